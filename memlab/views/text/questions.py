"""The text and the HTML of questions to the reader of a lab: a guess with its result, and a quiz with explanations."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from string import ascii_lowercase

NO_GUESS = "(you entered no guess)"
"""Stands behind a result that nobody has guessed."""


def amount(value: float | str, unit: str = "") -> str:
    """Writes a number with its unit, such as ``175,272 bytes``, and a text as it is."""
    if isinstance(value, str):
        return value.strip()
    digits = f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{digits} {unit}".rstrip()


_UNITS = (
    {"x": 1, "k": 1e3, "thousand": 1e3, "million": 1e6, "billion": 1e9},
    {"%": 1, "percent": 1},
    {"byte": 1, "bytes": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    {"s": 1, "seconds": 1, "ms": 1e-3},
)
"""What may follow the number of a guess: multiples of any unit, and units of one kind each."""


def as_number(text: str, unit: str = "") -> float | None:
    """Reads a guess such as ``175,000``, ``175k``, ``1,5``, ``60 %`` or ``about 40``; None if it is not a number.

    Args:
        text: What the reader entered. It may have another unit of the same kind, such as ``171 KiB`` for bytes.
        unit: Of the question. If that is ``%``, a fraction such as ``5/7`` is a share (71.4 %), and if it is ``of 4``,
            ``3/4`` is 3.
    """
    guess = re.sub(r"^(about|around|~|≈)\s*", "", text.strip().casefold()).replace("per cent", "percent")
    guess = guess.removesuffix(unit.casefold()).strip()
    numerator, slash, denominator = guess.partition("/")
    if not slash:
        return _with_unit(guess, unit)
    upper, lower = _plain_number(numerator), _plain_number(denominator)
    if upper is None or not lower:
        return None
    if unit.startswith("of "):
        return upper if lower == _plain_number(unit.removeprefix("of ")) else None
    return upper / lower * (100 if unit == "%" and "%" not in text else 1)


def _with_unit(guess: str, unit: str) -> float | None:
    asked, _, per = unit.casefold().partition(" per ")
    guess = guess.removesuffix(f" per {per}")
    digits = guess.rstrip(ascii_lowercase)
    letters = guess[len(digits) :]
    for units in _UNITS:
        if letters in units and (units is _UNITS[0] or asked in units):
            number = _plain_number(digits)
            return None if number is None else number * units[letters] / units.get(asked, 1)
    return _plain_number(guess)


def _plain_number(text: str) -> float | None:
    text = text.replace(" ", "")
    # A comma before three digits separates thousands; any other single comma is a decimal comma.
    if not re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", ".")
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def guess_and_result(guessed: str, result: float | str, unit: str = "", question: str = "") -> str:
    """Says in one line what the result is, what was guessed, and how far the guess is off.

    A guess in words is right if its words are those of the result, and wrong if it is another of the answers that the
    question names, or another number, or says of the result that it is not so. Whether other words mean the same as the
    result, the reader decides, and the line says so.
    """
    shown = f"result: {amount(result, unit)}"
    if not guessed.strip():
        return f"{shown} {NO_GUESS}"
    if isinstance(result, str):
        return f"{shown}; your guess: {guessed.strip()}{_verdict(guessed, result, question)}"
    number = as_number(guessed, unit)
    if number is None:
        names_unit = unit and not unit.startswith("of ") and re.match(r"\W*\d", guessed)
        action = f"enter a number in {unit}" if names_unit else "enter a number"
        return f"{shown}; your guess: {guessed.strip()} ({action} to compare the two)"
    distance = _distance(number, result, unit)
    if unit == "%" and 0 < number < 1 < result and not re.search("%|per ?cent", guessed.casefold()):
        distance = f"{distance.removesuffix(')')}; as a share of 1 it would be {amount(100 * number, unit)})"
    return f"{shown}; your guess: {amount(number, unit)}{distance}"


_UNDECIDED = " (compare the two yourself, or answer in words of the question)"
_FILLERS = {"", "a", "an", "at", "do", "in", "is", "it", "the"}
_NEGATIONS = {"not", "never", "cannot", "neither", "nor", "except", "but", "without"}
_SPELLINGS = {"y": "yes", "n": "no", "does": "do"}
_SPELLINGS |= dict.fromkeys(("larger", "greater", "bigger"), "higher") | {"smaller": "lower", "same": "equal"}


def _verdict(guessed: str, result: str, question: str) -> str:
    in_order = [_words(text) for text in (_spelled_out(guessed, question), result, question)]
    guess, right, asked = (set(words) - _FILLERS for words in in_order)
    if not guess:
        return _UNDECIDED
    if bool(guess & _NEGATIONS) != bool(right & _NEGATIONS):
        opposite = guess - _NEGATIONS <= right - _NEGATIONS or guess <= asked
        return " (wrong)" if opposite else _UNDECIDED
    own, other = ("".join(words).replace("_", "") for words in in_order[:2])
    is_one_word = own == other  # handover, hand over and hand_over
    names_it = right <= guess and not (guess - right) & (asked | {"or"})
    numbers, asked_for = ({word for word in words if word.isdigit()} for words in (guess, right))
    if is_one_word or names_it or guess <= right:
        # The word "rank" alone does not say which one, and neither do two numbers.
        says_which = not asked_for or asked_for <= numbers <= asked_for | asked
        return " (right)" if says_which else _UNDECIDED
    is_another_number = numbers and asked_for and not numbers & asked_for and guess - numbers < right
    return " (wrong)" if guess <= asked or is_another_number else _UNDECIDED


def _spelled_out(guessed: str, question: str) -> str:
    """Returns the choice of the question that a single letter stands for, such as ``h`` for ``higher``."""
    letter = guessed.strip().casefold()
    lists = re.findall(r"(?:\w+, )*\w+ or \w+", question.casefold())
    choices = [word for words in lists for word in re.findall(r"\w+", words) if word != "or" and word[0] == letter]
    return choices[0] if len(choices) == 1 else guessed


def _words(text: str) -> list[str]:
    # A singular names the same answer as its plural.
    text = re.sub(r"\bno (?=more\b|less\b|\w+er\b)", "not ", text.casefold())
    words = re.findall(r"\w+", re.sub(r"n['\u2019]t\b", " not", text))
    return [_SPELLINGS.get(word, word).removesuffix("s") for word in words]


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
