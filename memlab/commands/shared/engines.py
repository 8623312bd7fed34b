"""The flag ``--engines``: how many are started on this machine, or the profile of those that run already."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memlab.config.validation import shortened

if TYPE_CHECKING:
    from memlab.ranks.ranks import Ranks

_MOST_ENGINES = 1024
_PROFILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class EnginesNotStartedError(Exception):
    """Engines that were to be started on this machine did not start; the text says in one line why."""


def number_or_profile(text: str) -> int | str:
    """Reads the value of ``--engines``."""
    if re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        number = int(text)
        if not 0 <= number <= _MOST_ENGINES:
            raise argparse.ArgumentTypeError(
                f"{shortened(number)} must be from 0 to {_MOST_ENGINES}: give a number of engines, or a profile"
            )
        return number
    if not _PROFILE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is neither a number of engines nor the name of an ipyparallel profile (letters, "
            "digits and _ . -): give a number such as 4, or a profile such as default"
        )
    return text


@contextmanager
def open_engines(engines: int | str) -> Iterator[Ranks]:
    """Starts so many engines, or connects to those of a profile; at the end of the block their processes end.

    Raises:
        EnginesNotStartedError: If there are none.
    """
    from memlab.ranks.ranks import Ranks

    try:
        ranks = Ranks.start(engines) if isinstance(engines, int) else Ranks.connect(engines)
    except ValueError as error:
        raise EnginesNotStartedError(f"--engines is {engines}: {error}") from error
    with ranks:
        yield ranks
