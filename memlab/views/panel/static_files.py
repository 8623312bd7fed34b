"""The JavaScript and CSS that the panel sends to the page: files in `static`, read as text.

They are sent as text because anywidget keeps a watcher for each file that it is given.
"""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"


def page_code(name: str) -> str:
    """Returns a file of `static` as text, for example ``panel.css``."""
    return (STATIC / name).read_text(encoding="utf-8")


def widget_code(name: str) -> str:
    """Returns a widget's file of `static`, with what it imports in it: a page cannot import from the kernel's files."""
    shared = page_code("hearing.js").replace("export ", "")
    return page_code(name).replace('import { hearing } from "./hearing.js";\n', shared)
