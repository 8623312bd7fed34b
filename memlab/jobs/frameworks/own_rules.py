"""Rows of rules by which a framework refuses single values of a job, and one that two frameworks have for Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memlab.jobs.entries import Entry
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import is_given

Rule = tuple[str, Callable[[Any, Reading], object], str]
"""A key, whether the value that the job gives for it breaks the rule, and what it must be, in words."""


def one_of(key: str, *allowed: str) -> Rule:
    """Returns the rule of a key that has one of some values, or none."""
    words = f"must be {', '.join(allowed[:-1])} or {allowed[-1]}"
    return key, lambda value, _: is_given(value) and str(value) not in allowed, words


def broken(reading: Reading, rules: Iterable[Rule]) -> Iterator[tuple[Entry, str]]:
    """Yields each key of a job that breaks a rule, and what is wrong."""
    for key, breaks, rule in rules:
        entry = reading.entries.by_key.get(key)
        if entry is not None and not entry.is_unknown and breaks(entry.value, reading):
            yield entry, f"{key} is {entry.value}, {rule}"


def check_dispatcher(reading: Reading, title: str, configs: Iterable[str]) -> None:
    """Checks that a framework whose sequences have any length has a dispatcher that takes these.

    Args:
        reading: Of the job.
        title: The framework's.
        configs: The prefixes of Megatron's keys; the last one is passed on as it is.

    Raises:
        CannotStartError: If Megatron-Core refuses the dispatcher.
    """
    prefixes = list(configs)
    if reading.get(f"{prefixes[-1]}.variable_seq_lengths") is False:
        return
    if "allgather" in [reading.entries.get(f"{one}.moe_token_dispatcher_type") for one in prefixes]:
        raise CannotStartError(
            f"the job has moe_token_dispatcher_type allgather with sequences of variable length, which {title} always "
            "has and Megatron-Core refuses: choose alltoall",
            "moe_token_dispatcher_type",
        )
