"""Damaged copies of a file, made from a seed: what a bad disk, a cut transfer, a hand or another version leaves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

Kind = Literal["bytes", "text", "json"]

_TEXTS = ["", "x", "\x00", "é", "../..", "a\nb", "<script>alert(1)</script>", "\ud800", "9" * 5000]
_NUMBERS = [0, -1, 1, 2**63, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"), float("-inf")]
_OTHERS = [None, True, False, [], {}, [1], {"a": 1}, [[]], {"": None}]
_DEEP = 100_000
"""Deeper than any reader recurses."""


def corruptions(data: bytes, kind: Kind, seed: int, count: int = 200) -> Iterator[bytes]:
    """Yields damaged copies of a file's content, the same ones for the same seed.

    Some are harmless: a flipped bit may fall into a comment or a number. A reader must either refuse a copy in one
    line or return something whole.

    Args:
        data: The content of a good file.
        kind: What the damage knows of the format. ``bytes`` flips, cuts, zeroes, repeats and inserts bytes. ``text``
            also drops, repeats, swaps and indents lines. ``json`` also parses the data and changes types, removes,
            renames and adds keys, nests without an end, and writes numbers that JSON does not have.
        seed: Of the choices.
        count: How many copies.
    """
    choose = random.Random(seed)
    damages: list[Callable[[random.Random, bytes], bytes]] = [*_OF_BYTES]
    if kind == "text":
        damages += _OF_LINES * 2
    if kind == "json":
        damages += [_restructured] * 2 * len(_OF_BYTES)
    for number in range(count):
        # The first round applies each kind of damage once, so that a short run has all of them.
        damage = damages[number] if number < len(damages) else choose.choice(damages)
        yield damage(choose, data)


def _flip(choose: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 8, 64])):
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
    return bytes(damaged)


def _overwrite(choose: random.Random, data: bytes) -> bytes:
    start = choose.randrange(len(data))
    length = min(choose.choice([1, 8, 512]), len(data) - start)
    patch = choose.choice([bytes(length), b"\xff" * length, choose.randbytes(length)])
    return data[:start] + patch + data[start + length :]


def _truncate(choose: random.Random, data: bytes) -> bytes:
    return data[: choose.choice([0, 1, len(data) // 2, len(data) - 1, choose.randrange(len(data))])]


def _cut_out(choose: random.Random, data: bytes) -> bytes:
    start = choose.randrange(len(data))
    return data[:start] + data[start + choose.choice([1, 16, 256]) :]


def _repeat(choose: random.Random, data: bytes) -> bytes:
    start = choose.randrange(len(data))
    end = start + choose.choice([1, 16, len(data)])
    return data[:end] + data[start:]


def _insert(choose: random.Random, data: bytes) -> bytes:
    start = choose.randrange(len(data) + 1)
    return (
        data[:start] + choose.choice([b"\x00", b"\xff\xfe", b"\n", b"[", b"NaN", choose.randbytes(16)]) + data[start:]
    )


_OF_BYTES: list[Callable[[random.Random, bytes], bytes]] = [_flip, _overwrite, _truncate, _cut_out, _repeat, _insert]


def _drop_line(choose: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[choose.randrange(len(lines))]
    return b"".join(lines)


def _repeat_line(choose: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    lines.insert(choose.randrange(len(lines) + 1), choose.choice(lines))
    return b"".join(lines)


def _swap_lines(choose: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    one, two = choose.randrange(len(lines)), choose.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def _indent_line(choose: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    number = choose.randrange(len(lines))
    line = lines[number]
    lines[number] = choose.choice([b"  " + line, b"\t" + line, line.lstrip(), line.replace(b":", b"", 1)])
    return b"".join(lines)


def _replace_value(choose: random.Random, data: bytes) -> bytes:
    lines = data.splitlines()
    number = choose.randrange(len(lines))
    name = lines[number].partition(b":")[0]
    value = choose.choice(
        ["", "null", "~", "[]", "{}", "-1", "1e999", ".nan", "'", "&a [*a]", "!!python/name:os.system"]
    )
    lines[number] = name + b": " + value.encode()
    return b"\n".join(lines) + b"\n"


_OF_LINES: list[Callable[[random.Random, bytes], bytes]] = [
    _drop_line,
    _repeat_line,
    _swap_lines,
    _indent_line,
    _replace_value,
]


def _restructured(choose: random.Random, data: bytes) -> bytes:
    """Damages one place of a JSON document, at any depth, and writes it back as valid or nearly valid JSON."""
    root = [json.loads(data)]  # so that the document itself has a place too
    places = list(_places(root))
    if choose.random() < 0.3:  # the few places near the root are the ones that decide what a reader does
        places = [place for place in places if place[2] <= 2]
    container, key, _ = choose.choice(places)
    match choose.choice(["replace", "replace", "replace", "remove", "rename", "add", "deepen"]):
        case "replace":
            container[key] = choose.choice([*_TEXTS, *_NUMBERS, *_OTHERS])
        case "remove" if container is not root:
            del container[key]
        case "rename" if isinstance(container, dict):
            container[f"{key}x"] = container.pop(key)
        case "add" if isinstance(container, dict):
            container[choose.choice(["", "new", "__class__", key + " "])] = choose.choice([*_NUMBERS, *_OTHERS])
        case "deepen" if choose.random() < 0.5:
            marker = "memlab-deep-marker"
            container[key] = marker
            return _dumped(root[0]).replace(json.dumps(marker).encode(), b"[" * _DEEP + b"]" * _DEEP)
        case _:
            container[key] = [container[key]]
    return _dumped(root[0])


def _dumped(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _places(container: Any, depth: int = 0) -> Iterator[tuple[Any, Any, int]]:
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key, depth
        if isinstance(container[key], (dict, list)):
            yield from _places(container[key], depth + 1)
