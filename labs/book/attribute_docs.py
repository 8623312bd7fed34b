"""Writes the docstrings of attributes: an option's help comes first, and napoleon leaves them as they are.

Napoleon would read what is before a colon as the attribute's type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import memlab
from memlab.config.option import options_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def _help(name: str) -> list[str]:
    """Returns the sentence of an option by its full name, such as ``memlab.TrainingState.loss``, as lines."""
    owner, _, attribute = name.removeprefix("memlab.").partition(".")
    cls = getattr(memlab, owner, None)
    option = options_of(cls).get(attribute) if hasattr(cls, "__dataclass_fields__") else None
    return [] if option is None else [f"{option.sentence(lambda other: f'``{other}``')}.", ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers one function before napoleon's (priority 500) and one after it."""
    written: list[str] = []

    def keep(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
        written[:] = _help(name) + lines

    def restore(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
        if what in {"attribute", "property"}:
            lines[:] = written

    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
