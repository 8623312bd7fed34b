"""Expands ``{a,b}``, ``{1..8..2}`` and ``{a..d}`` of a word, beside quotes and other expansions, as bash 5.2 does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from memlab.jobs.shell.words import Piece, Word

_SEQUENCE = re.compile(r"(?:(-?\d{1,9})\.\.(-?\d{1,9})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d{1,9}))?")
_DEEPEST = 20

_Part = str | Piece
"""A character that is neither quoted nor expanded, or a piece that stays as it is."""


def without_braces(word: Word, charge: Callable[[list[str]], None]) -> list[Word]:
    """Returns the words that a word's braces make of it, in order.

    Args:
        word: Before any other expansion.
        charge: Is called with each text that is made, so that it can refuse too many.
    """
    if not any(piece.kind == "plain" and "{" in piece.text for piece in word.pieces):
        return [word]
    parts: list[_Part] = []
    for piece in word.pieces:
        parts += list(piece.text) if piece.kind == "plain" else [piece]
    found = []
    for chosen in _expanded(parts, 0):
        charge([part if isinstance(part, str) else part.text for part in chosen])
        found.append(Word(word.line, _joined(chosen)))
    return found


def _expanded(parts: list[_Part], depth: int) -> Iterator[list[_Part]]:
    for start in (place for place, part in enumerate(parts) if part == "{" and depth < _DEEPEST):
        end, commas = _closed(parts, start)
        if end < 0:
            continue
        inside = parts[start + 1 : end]
        if commas:
            edges = [start, *commas, end]
            choices: Iterator[list[_Part]] = (
                made for first, last in pairwise(edges) for made in _expanded(parts[first + 1 : last], depth + 1)
            )
        elif all(isinstance(part, str) for part in inside) and (
            match := _SEQUENCE.fullmatch("".join(map(str, inside)))
        ):
            choices = (list(text) for text in _sequence(match))
        else:
            continue
        for choice in choices:
            for rest in _expanded(parts[end + 1 :], depth + 1):
                yield [*parts[:start], *choice, *rest]
        return
    yield parts


def _closed(parts: list[_Part], start: int) -> tuple[int, list[int]]:
    """Returns where the brace closes, or -1, and where the commas between them stand."""
    depth, commas = 0, list[int]()
    for place in range(start, len(parts)):
        if parts[place] == "{":
            depth += 1
        elif parts[place] == "}":
            depth -= 1
            if not depth:
                return place, commas
        elif parts[place] == "," and depth == 1:
            commas.append(place)
    return -1, []


def _sequence(match: re.Match[str]) -> Iterator[str]:
    first, last, letter, last_letter, step_text = match.groups()
    start, end = (int(first), int(last)) if first else (ord(letter), ord(last_letter))
    step = (abs(int(step_text or 1)) or 1) * (1 if start <= end else -1)
    width = max(len(first), len(last)) if first and re.search(r"(^|\.|-)0\d", f"{first}.{last}") else 0
    for number in range(start, end + (1 if step > 0 else -1), step):
        yield f"{number:0{width}}" if first else chr(number)


def _joined(parts: list[_Part]) -> list[Piece]:
    found: list[Piece] = []
    for part in parts:
        last = found[-1] if found else None
        if not isinstance(part, str):
            found.append(part)
        elif last is not None and (last.kind == "plain" or _goes_on(last, part)):
            found[-1] = Piece(last.text + part, last.kind)
        else:
            found.append(Piece(part, "plain"))
    return found


def _goes_on(piece: Piece, sign: str) -> bool:
    """Whether a character becomes a part of the name before it: braces are expanded before variables."""
    return piece.kind == "split" and re.fullmatch(r"\$[A-Za-z_]\w*", piece.text + sign, re.ASCII) is not None
