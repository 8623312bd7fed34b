"""Requests to a process that serves an object, and its messages, as pickled tuples (`memlab.ranks.rank_process`)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

SILENT_SECONDS = 20.0
"""A process that has not said for so long that it lives has stopped, or its host is out of memory."""


def request(number: int, method: str, args: tuple[Any, ...]) -> bytes:
    """Returns a request to call a method; number 0 is called at once, next to other calls, and has no answer."""
    return pickle.dumps((number, method, args))


def read(messages: Iterable[bytes], number: int, place: str) -> Iterator[tuple[str, Any]]:
    """Yields the kind and the value of each message, without answers to other requests.

    Args:
        messages: As the process sent them. They come from this user's own processes: unpickling runs what they say.
        number: Of the request that waits for an answer.
        place: Where the process runs, such as ``rank 1``. An error gets its traceback there as a note, unless it is a
            `ValueError`: the words of a refusal say all.
    """
    for packed in messages:
        kind, *values = pickle.loads(packed)  # noqa: S301  # from this user's own processes
        if kind in {"alive", "progress"}:
            yield kind, values[0]
        elif values[0] == number:
            if kind == "error" and not isinstance(values[1], ValueError):
                values[1].add_note(f"on {place}:\n{values[2]}")
            yield kind, values[1]
