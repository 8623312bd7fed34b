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
    """Reads a guess such as ``175,000``, ``1.5`` or ``60 %``; None if it is not a number."""
    try:
        number = float(text.strip().removesuffix(unit).replace(",", "").replace(" ", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def guess_and_result(guessed: str, result: float | str, unit: str = "") -> str:
    """Says in one line what the result is, what was guessed, and how far a guessed number is off.

    A guess in words is called right where it is the result; whether other words mean the same, the reader decides.
    """
    shown = f"result: {amount(result, unit)}"
    if not guessed.strip():
        return f"{shown} (you entered no guess)"
    number = as_number(guessed, unit)
    if number is None or isinstance(result, str):
        is_right = guessed.strip().casefold() == amount(result, unit).casefold()
        return f"{shown}; your guess: {guessed.strip()}{' (right)' if is_right else ''}"
    return f"{shown}; your guess: {amount(number, unit)}{_distance(number, result)}"


def _distance(number: float, result: float) -> str:
    if number == result:
        return " (exact)"
    direction = "high" if number > result else "low"
    if not result:
        return f" (too {direction})"
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
    """Escapes a text for a page; what is between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
