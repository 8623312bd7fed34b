"""The JavaScript and CSS that the panel sends to the page: files in `static`, read as text.

They are sent as text because anywidget keeps a watcher for each file that it is given.
"""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"


def page_code(name: str) -> str:
    """Returns a file of `static` as text, for example ``chart.js``."""
    return (STATIC / name).read_text(encoding="utf-8")
