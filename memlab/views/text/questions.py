"""The text and the HTML of questions to the reader of a lab: a guess with its result, and a quiz with explanations."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping


def amount(value: float | str, unit: str = "") -> str:
    """Writes a number with its unit, such as ``175,272 bytes``, and a text as it is."""
    if isinstance(value, str):
        return value.strip()
    digits = f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{digits} {unit}".rstrip()


def as_number(text: str, unit: str = "") -> float | None:
    """Reads a guess such as ``175,000``, ``1.5``, ``1,5``, ``60 %`` or ``about 40``; None if it is not a number."""
    number_alone = re.sub(r"^(about|around|~|≈)\s*", "", text.strip().casefold()).removesuffix(unit.casefold())
    # A comma before three digits separates thousands; any other single comma is a decimal comma.
    if not re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", number_alone.replace(" ", "")):
        number_alone = number_alone.replace(",", ".")
    try:
        number = float(number_alone.replace(",", "").replace(" ", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def guess_and_result(guessed: str, result: float | str, unit: str = "", question: str = "") -> str:
    """Says in one line what the result is, what was guessed, and how far the guess is off.

    A guess in words is right if its words are those of the result, and wrong if it is another of the answers that the
    question names. Whether other words mean the same as the result, the reader decides.
    """
    shown = f"result: {amount(result, unit)}"
    if not guessed.strip():
        return f"{shown} (you entered no guess)"
    if isinstance(result, str):
        return f"{shown}; your guess: {guessed.strip()}{_verdict(guessed, result, question)}"
    number = as_number(guessed, unit)
    if number is None:
        action = f"enter a number in {unit}" if unit and re.match(r"\W*\d", guessed) else "enter a number"
        return f"{shown}; your guess: {guessed.strip()} ({action} to compare the two)"
    return f"{shown}; your guess: {amount(number, unit)}{_distance(number, result, unit)}"


_FILLERS = {"a", "an", "at", "in", "is", "it", "the"}


def _verdict(guessed: str, result: str, question: str) -> str:
    # A singular names the same answer as its plural.
    in_order = [
        [word.removesuffix("s") for word in re.findall(r"\w+", text.casefold())] for text in (guessed, result, question)
    ]
    guess, right, asked = (set(words) - _FILLERS for words in in_order)
    if "not" in guess - right:
        return ""
    own, other = ("".join(words).replace("_", "") for words in in_order[:2])
    is_one_word = own == other  # handover, hand over and hand_over
    if guess and (is_one_word or guess <= right or (right <= guess and not (guess - right) & asked)):
        return " (right)"
    return " (wrong)" if guess and guess <= asked else ""


def _distance(number: float, result: float, unit: str) -> str:
    if number == result:
        return " (exact)"
    direction = "high" if number > result else "low"
    if unit == "%":
        return f" ({amount(abs(number - result))} percentage points too {direction})"
    # Percent of a count such as "of 4", of zero or of a negative number would say little.
    if unit.startswith("of ") or result <= 0 or number < 0:
        sign = f", the result is {'negative' if result < 0 else 'positive'}" if number * result < 0 else ""
        return f" ({amount(abs(number - result), '' if unit.startswith('of ') else unit)} too {direction}{sign})"
    percent = 100 * abs((number - result) / result)
    return f" ({percent:,.0f} % too {direction})" if percent >= 10 else f" ({percent:.2g} % too {direction})"


def quiz_text(question: str, choices: Mapping[str, str], right: str) -> str:
    """Writes a quiz as plain text: each choice, whether it is right, and why."""
    lines = [f"  {'right' if choice == right else 'wrong'}: {choice}. {why}" for choice, why in choices.items()]
    return "\n".join([question, *lines])


def quiz_html(question: str, choices: Mapping[str, str], right: str) -> str:
    """Writes a quiz for a page, on which a click on a choice unfolds its explanation.

    The browser does the folding, so that it works in JupyterLab, in a saved page and with the keyboard.
    """
    parts = [f'<p style="margin:1em 0 .4em"><strong>{_marked_up(question)}</strong></p>']
    for choice, why in choices.items():
        verdict = "Right." if choice == right else "Wrong."
        parts.append(
            '<details style="margin:.25em 0 .25em 1em;max-width:50em">'
            f'<summary style="cursor:pointer">{_marked_up(choice)}</summary>'
            f'<p style="margin:.2em 0 .6em 1.2em"><strong>{verdict}</strong> {_marked_up(why)}</p>'
            "</details>"
        )
    return "".join(parts)


def _marked_up(text: str) -> str:
    """Escapes a text for a page; what is between backticks is code, and a name between asterisks is emphasized."""
    in_code = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])", r"<em>\1</em>", in_code)
