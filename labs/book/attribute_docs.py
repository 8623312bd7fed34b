"""Keeps the docstrings of attributes as they are: napoleon reads what is before a colon as the attribute's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers one function before napoleon's (priority 500) and one after it."""
    written: list[str] = []

    def keep(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
        written[:] = lines

    def restore(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
        if what in {"attribute", "property"}:
            lines[:] = written

    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
