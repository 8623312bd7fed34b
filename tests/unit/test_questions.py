"""Guesses and quizzes: what the reader enters stays, the result stands beside it, every choice is explained."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from memlab import guess, line_by_line, quiz
from memlab.views.text.questions import quiz_html

CHOICES = {"`a` < b": "It is less.", "c": "It is & more."}


@pytest.mark.parametrize(
    ("entered", "result", "line"),
    [
        ("", 175_272, "result: 175,272 bytes (you entered no guess)"),
        ("100,000", 175_272, "result: 175,272 bytes; your guess: 100,000 bytes (43 % too low)"),
        ("175272", 175_272, "result: 175,272 bytes; your guess: 175,272 bytes (exact)"),
        ("2", 0, "result: 0 bytes; your guess: 2 bytes (too high)"),
        ("0", -368, "result: -368 bytes; your guess: 0 bytes (100 % too high)"),
        ("1000000 bytes", 4_000, "result: 4,000 bytes; your guess: 1,000,000 bytes (24,900 % too high)"),
        ("nan", 3, "result: 3 bytes; your guess: nan"),
        ("Activations ", "activations", "result: activations; your guess: Activations (right)"),
        ("the <optimizer>", "activations", "result: activations; your guess: the <optimizer>"),
    ],
)
def test_the_result_stands_beside_the_guess(
    entered: str, result: float | str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = guess("How much?", "bytes")
    asked.field.value = entered
    capsys.readouterr()
    asked.reveal(result)
    assert capsys.readouterr().out == f"How much?\n  {line}\n"
    assert line.replace("<", "&lt;").replace(">", "&gt;") in asked.answer.value
    assert asked.guessed == entered


def test_a_guess_that_is_changed_later_is_compared_again_and_others_are_not() -> None:
    first, second = guess("First?"), guess("Second?")
    first.reveal(4)
    first.field.value = "2"
    assert "50 % too low" in first.answer.value
    assert "result" not in second.answer.value


def test_the_question_is_the_label_of_its_field_and_the_text_of_a_page_without_widgets() -> None:
    asked = guess("How much?", "bytes")
    assert asked.field.description == "How much? (bytes)"
    assert asked._repr_mimebundle_()["text/plain"] == "Guess: How much? (bytes)"


def test_a_quiz_explains_every_choice_in_text_and_behind_a_click(capsys: pytest.CaptureFixture[str]) -> None:
    quiz("Which `one`?", CHOICES, right="c")
    assert capsys.readouterr().out == "Which `one`?\n  wrong: `a` < b. It is less.\n  right: c. It is & more.\n"
    page = ET.fromstring(f"<div>{quiz_html('Which `one`?', CHOICES, 'c')}</div>")
    choices = [("".join(each[0].itertext()), "".join(each[1].itertext())) for each in page.iter("details")]
    assert choices == [("a < b", "Wrong. It is less."), ("c", "Right. It is & more.")]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="guess got an empty question"):
        guess(" ")
    with pytest.raises(ValueError, match="right is 'd', which is not one of the choices: choose from"):
        quiz("Which?", CHOICES, right="d")
    with pytest.raises(ValueError, match="needs at least 2, each with an explanation"):
        quiz("Which?", {"a": "why", "b": ""}, right="a")
    with pytest.raises(ValueError, match="two empty dicts"):
        line_by_line({}, {})
