"""Questions to the reader of a lab: `guess` stores what the reader expects, `quiz` explains each answer.

Both show themselves where they are called. Without a browser they are text.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets

from memlab.views.display import View
from memlab.views.text.questions import guess_and_result, quiz_html, quiz_text

# The question is the label of the field, which screen readers read. ipywidgets cuts long labels off.
_STYLE = """<style>
.memlab-guess { flex-wrap: wrap; align-items: center; margin: .3em 0 }
.memlab-guess .widget-text { width: auto; height: auto; align-items: center }
.memlab-guess .widget-label { white-space: normal; height: auto; width: auto; max-width: 40em; line-height: 1.4;
  text-align: left; margin-right: .8em }
.memlab-guess input { width: 11em; flex: none }
</style>"""


class Guess(ipywidgets.HBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A question with a field for the reader's guess; `reveal` puts the result beside it. `memlab.guess` makes it."""

    def __init__(self, question: str, unit: str = "") -> None:
        self.question, self.unit = question, unit
        self.field = ipywidgets.Text(
            description=f"{question} ({unit})" if unit else question,
            placeholder="your guess",
            style={"description_width": "initial"},
            continuous_update=False,
        )
        self.answer = ipywidgets.HTML(_STYLE)
        super().__init__([self.field, self.answer])
        self.add_class("memlab-guess")
        self._result: float | str | None = None
        self.field.observe(lambda _: self._show(), names=["value"])

    @property
    def guessed(self) -> str:
        """What the reader has entered; empty if nothing yet."""
        return str(self.field.value)

    def reveal(self, result: float | str) -> None:
        """Shows the result beside the guess, and prints the question with both.

        Args:
            result: A number in the unit of the question, or a text.
        """
        self._result = result
        self._show()
        print(f"{self.question}\n  {guess_and_result(self.guessed, result, self.unit, self.question)}")  # noqa: T201  # a cell's output

    def __repr__(self) -> str:
        return f"Guess: {self.question}" + (f" ({self.unit})" if self.unit else "")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the widget, and the question as text for a page without widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"text/plain": repr(self), "application/vnd.jupyter.widget-view+json": view}

    def _show(self) -> None:
        result = self._result
        line = "" if result is None else guess_and_result(self.guessed, result, self.unit, self.question)
        self.answer.value = f"{_STYLE}<span role='status'>{html.escape(line, quote=False)}</span>"


def guess(question: str, unit: str = "") -> Guess:
    """Asks the reader for a guess, and shows a field for it.

    Args:
        question: One sentence that ends with a question mark.
        unit: Unit of the number that is asked for, such as ``"bytes per token"``; empty if the answer is a text.

    Returns:
        The guess. Call its method ``reveal(result)`` once the result is known.

    Raises:
        ValueError: If the question is empty.
    """
    if not question.strip():
        raise ValueError("guess got an empty question: write one sentence that says what the reader is to guess")
    asked = Guess(question, unit)
    _show_now(asked)
    return asked


def quiz(question: str, choices: Mapping[str, str], right: str) -> None:
    """Shows a question with several choices. A click on a choice says whether it is right, and why.

    Args:
        question: One sentence.
        choices: The explanation of each choice.
        right: The choice that is right.

    Raises:
        ValueError: If there are fewer than two choices, one has no explanation, or the right one is not among them.
    """
    explained = [why for why in choices.values() if why.strip()]
    if len(choices) < 2 or len(explained) < len(choices):
        raise ValueError(
            f"quiz got {len(choices)} choices, {len(choices) - len(explained)} of them without an explanation, must "
            "get at least 2, each with one: add what is missing"
        )
    if right not in choices:
        raise ValueError(
            f"right is {right!r}, which is not one of the choices: choose from {', '.join(map(repr, choices))}"
        )
    _show_now(View(None, quiz_text(question, choices, right), quiz_html(question, choices, right)))


def _show_now(thing: object) -> None:
    from IPython.display import display

    display(thing)  # type: ignore[no-untyped-call]
