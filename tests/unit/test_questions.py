"""Guesses and quizzes: what the reader enters stays, the result stands beside it, every choice is explained."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from memlab import guess, line_by_line, quiz
from memlab.views.text.questions import guess_and_result, quiz_html

CHOICES = {"`a` < b": "It is less.", "c": "It is & more."}


@pytest.mark.parametrize(
    ("entered", "result", "line"),
    [
        ("", 175_272, "result: 175,272 bytes (you entered no guess)"),
        ("100,000", 175_272, "result: 175,272 bytes; your guess: 100,000 bytes (43 % too low)"),
        ("175272", 175_272, "result: 175,272 bytes; your guess: 175,272 bytes (exact)"),
        ("about 175272", 175_272, "result: 175,272 bytes; your guess: 175,272 bytes (exact)"),
        ("1000000 bytes", 4_000, "result: 4,000 bytes; your guess: 1,000,000 bytes (24,900 % too high)"),
        # No percent of zero or of a negative number.
        ("2", 0, "result: 0 bytes; your guess: 2 bytes (2 bytes too high)"),
        ("0", -368, "result: -368 bytes; your guess: 0 bytes (368 bytes too high)"),
        ("-400", -368, "result: -368 bytes; your guess: -400 bytes (32 bytes too low)"),
        ("1000", -368, "result: -368 bytes; your guess: 1,000 bytes (1,368 bytes too high, the result is negative)"),
        ("-5", 3, "result: 3 bytes; your guess: -5 bytes (8 bytes too low, the result is positive)"),
        ("nan", 3, "result: 3 bytes; your guess: nan (enter a number to compare the two)"),
        ("a <few>", 3, "result: 3 bytes; your guess: a <few> (enter a number to compare the two)"),
        ("2 KiB", 2048, "result: 2,048 bytes; your guess: 2,048 bytes (exact)"),
        ("2 m", 3, "result: 3 bytes; your guess: 2 m (enter a number in bytes to compare the two)"),
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


@pytest.mark.parametrize(
    ("entered", "unit", "result", "verdict"),
    [
        ("40 %", "%", 28, "40 % (12 percentage points too high)"),
        ("about 40%", "%", 71.19, "40 % (31.19 percentage points too low)"),
        ("0.28", "%", 28, "0.28 % (27.72 percentage points too low; as a share of 1 it would be 28 %)"),
        ("0.28 %", "%", 28, "0.28 % (27.72 percentage points too low)"),
        ("0.5", "%", 0.4, "0.5 % (0.1 percentage points too high)"),
        ("71,2", "%", 71.19, "71.2 % (0.01 percentage points too high)"),  # a decimal comma
        ("0,7", "GiB", 0.7, "0.7 GiB (exact)"),
        ("-1,438.5", "bytes", -1438.5, "-1,438.5 bytes (exact)"),
        ("4 of 4", "of 4", 3, "4 of 4 (1 too high)"),
        ("3/4", "of 4", 3, "3 of 4 (exact)"),
        ("3/5", "of 4", 3, "3/5 (enter a number to compare the two)"),
        ("5/8", "%", 62.5, "62.5 % (exact)"),
        ("60 percent", "%", 60, "60 % (exact)"),
        ("about 60 per cent", "%", 60, "60 % (exact)"),
        ("4x", "times", 4, "4 times (exact)"),
        ("5/8 %", "%", 0.625, "0.62 % (exact)"),
        ("1/0", "%", 3, "1/0 (enter a number in % to compare the two)"),
        ("175k", "bytes per token", 175_000, "175,000 bytes per token (exact)"),
        ("about 3 KiB per token", "bytes per token", 3072, "3,072 bytes per token (exact)"),
        ("2 thousand bytes", "bytes", 2000, "2,000 bytes (exact)"),
        ("512 MiB", "GiB", 0.5, "0.5 GiB (exact)"),
        ("2.147483648 GB", "GiB", 2, "2 GiB (exact)"),
        ("0.25 s", "ms", 250, "250 ms (exact)"),
        ("9k", "tokens", 9000, "9,000 tokens (exact)"),
        ("9 KiB", "tokens", 9000, "9 KiB (enter a number in tokens to compare the two)"),
    ],
)
def test_a_share_or_a_count_is_compared_by_its_difference(entered: str, unit: str, result: float, verdict: str) -> None:
    assert guess_and_result(entered, result, unit).endswith(f"your guess: {verdict}")


UNDECIDED = " (compare the two yourself, or answer in words of the question)"
PART = "Which part is the largest: parameters, gradients, optimizer state or activations?"
PHASE = "When in the step does memory peak: forward, backward or optimizer?"
FITS = "Does the job fit or does it not?"
HIGHER = "Is the peak lower, equal or higher?"
RANK = "Which rank needs the most memory?"
YES_OR_NO = "Is the loss still the same: yes or no?"


@pytest.mark.parametrize(
    ("question", "entered", "result", "verdict"),
    [
        (PART, "Activations ", "activations", "Activations (right)"),
        (PART, "activation", "activations", "activation (right)"),
        (PART, "optimizer", "optimizer state", "optimizer (right)"),
        (PART, "optimizer", "activations", "optimizer (wrong)"),
        (PART, "the <optimizer>", "activations", "the <optimizer> (wrong)"),
        (PHASE, "end of forward", "forward", "end of forward (right)"),
        (PHASE, "it is in forward", "forward", "it is in forward (right)"),
        (PHASE, "not forward", "forward", "not forward (wrong)"),
        (PHASE, "anything but forward", "forward", f"anything but forward{UNDECIDED}"),
        (PHASE, "no, it's forward", "forward", "no, it's forward (right)"),
        (PHASE, "not backward", "forward", f"not backward{UNDECIDED}"),
        (FITS, "fits", "does not fit", "fits (wrong)"),
        (FITS, "it fits", "does not fit", "it fits (wrong)"),
        (FITS, "doesn't fit", "does not fit", "doesn't fit (right)"),
        (FITS, "it does not fit", "does not fit", "it does not fit (right)"),
        (FITS, "does not fit", "fits", "does not fit (wrong)"),
        (FITS, "no", "does not fit", f"no{UNDECIDED}"),
        (FITS, "won't fit", "does not fit", "won't fit (right)"),
        (HIGHER, "a bit higher", "higher", "a bit higher (right)"),
        (HIGHER, "no higher", "higher", "no higher (wrong)"),
        (HIGHER, "not higher", "higher", "not higher (wrong)"),
        (HIGHER, "not equal, but higher", "higher", f"not equal, but higher{UNDECIDED}"),
        (HIGHER, "larger", "higher", "larger (right)"),
        (HIGHER, "smaller", "higher", "smaller (wrong)"),
        (HIGHER, "the same", "higher", "the same (wrong)"),
        (HIGHER, "H", "higher", "H (right)"),
        (HIGHER, "l", "higher", "l (wrong)"),
        (HIGHER, "x", "higher", f"x{UNDECIDED}"),
        (YES_OR_NO, "y", "yes, to the last bit", "y (right)"),
        (YES_OR_NO, "n", "yes, to the last bit", "n (wrong)"),
        (YES_OR_NO, "no", "no", "no (right)"),
        (YES_OR_NO, "yes", "no", "yes (wrong)"),
        (RANK, "0", "rank 0", "0 (right)"),
        (RANK, "rank", "rank 0", f"rank{UNDECIDED}"),
        (RANK, "rank 1", "rank 0", "rank 1 (wrong)"),
        (RANK, "3", "rank 0", "3 (wrong)"),
        (PHASE, "2", "backward", f"2{UNDECIDED}"),  # the second of the list
        (RANK, "stage 1", "rank 0", f"stage 1{UNDECIDED}"),
        (RANK, "rank 0 or rank 1", "rank 0", f"rank 0 or rank 1{UNDECIDED}"),
        (RANK, "rank 0 and rank 3", "rank 0", f"rank 0 and rank 3{UNDECIDED}"),
        (RANK, "ranks 0 and 3", "rank 0", f"ranks 0 and 3{UNDECIDED}"),
        (PHASE, "forward or backward", "forward", "forward or backward (wrong)"),
        (YES_OR_NO, "yes", "yes, to the last bit", "yes (right)"),
        ("What varies: the bytes at the start, or its peak?", "its peak", "the peak", "its peak (right)"),
        ("What varies: the bytes at the start, or its peak?", "the start", "the peak", "the start (wrong)"),
        ("What is last: load, hand over, or broadcast?", "hand_over", "hand over", "hand_over (right)"),
        ("What is last: load, hand over, or broadcast?", "Handover", "hand over", "Handover (right)"),
        ("What is last: load, hand over, or broadcast?", "the", "hand over", f"the{UNDECIDED}"),
        ("Which module copies nothing?", "moe", "moe_act", f"moe{UNDECIDED}"),
        # Other words may mean the same.
        ("Is it lower, equal or higher?", "unchanged", "equal", f"unchanged{UNDECIDED}"),
        ("Is it lower, equal or higher?", "?", "equal", f"?{UNDECIDED}"),
    ],
)
def test_a_guess_in_words_is_compared_with_the_words_of_the_result(
    question: str, entered: str, result: str, verdict: str
) -> None:
    assert guess_and_result(entered, result, question=question) == f"result: {result}; your guess: {verdict}"


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


def test_names_in_asterisks_are_emphasized_and_products_are_not() -> None:
    page = quiz_html("What is in *no offload*?", {"2 * 3 * 4": "It is `4*one - 3*(5*E)`.", "c": "why"}, "c")
    assert "What is in <em>no offload</em>?" in page
    assert page.count("<em>") == 1
    assert "2 * 3 * 4" in page and "<code>4*one - 3*(5*E)</code>" in page


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="guess got an empty question"):
        guess(" ")
    with pytest.raises(ValueError, match="right is 'd', which is not one of the choices: choose from"):
        quiz("Which?", CHOICES, right="d")
    with pytest.raises(ValueError, match="must get at least 2, each with one"):
        quiz("Which?", {"a": "why", "b": ""}, right="a")
    with pytest.raises(ValueError, match="two empty dicts"):
        line_by_line({}, {})
