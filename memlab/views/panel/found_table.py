"""The tables of a search, whose rows can be chosen by a click or with the keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import anywidget
import traitlets

from memlab.views.panel.static_files import widget_code


class FoundTable(anywidget.AnyWidget):
    """Shows text with one table, and says which of the table's rows the user chooses.

    Args:
        on_choice: Called with the number that `show` was given for the row; with None if other rows have replaced it.
        lock: Held while a click is compared with the rows and answered, so that no other rows come in between.
    """

    _esm = widget_code("found_table.js")

    content: Any = traitlets.Dict({"html": "", "choices": [], "shown": 0}).tag(sync=True)
    """The text, a number for each row of the table's body, and how often `show` was called."""

    def __init__(self, on_choice: Callable[[int | None], None], lock: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._on_choice, self._lock = on_choice, lock
        self.on_msg(self._answer)

    def show(self, html: str, choices: Sequence[int]) -> None:
        """Replaces the text.

        Args:
            html: Text and at most one table.
            choices: A number for each row of the table's body.
        """
        self.content = {"html": html, "choices": list(choices), "shown": self.content["shown"] + 1}

    def _answer(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        with self._lock:
            self._on_choice(int(message["choice"]) if message["shown"] == self.content["shown"] else None)
