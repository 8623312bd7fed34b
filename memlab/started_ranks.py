"""Which rank of a job this process is, by the environment variables that ``torchrun`` sets.

They are ``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``
(torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13.0). Without them, a process is a rank alone.
"""

from __future__ import annotations

import os
import re

_START = "start the ranks with torchrun"


def world_size() -> int:
    """Returns how many ranks were started; 1 without ``torchrun``.

    Raises:
        ValueError: If the environment variable ``WORLD_SIZE`` is not a positive number.
    """
    return _number("WORLD_SIZE", default=1, at_least=1)


def rank() -> int:
    """Returns this process's rank; 0 without ``torchrun``.

    Raises:
        ValueError: If the environment variable ``RANK`` is not the number of one of the ranks, or is missing beside
            others.
    """
    _require("RANK")
    number, num_ranks = _number("RANK", default=0, at_least=0), world_size()
    if number >= num_ranks:
        counted = num_ranks if "WORLD_SIZE" in os.environ else f"{num_ranks} where it is not set"
        raise ValueError(
            f"the environment variable RANK is {number}, must be below WORLD_SIZE, {counted}: {_START}, or unset both"
        )
    return number


def local_rank() -> int:
    """Returns this process's number among the ranks of its machine; 0 without ``torchrun``.

    Raises:
        ValueError: If the environment variable ``LOCAL_RANK`` is not a number, or is missing beside other ranks: all
            of a machine would take its first GPU.
    """
    _require("LOCAL_RANK")
    return _number("LOCAL_RANK", default=0, at_least=0)


def check_meeting_point() -> None:
    """Checks that this process can find the other ranks (``env://``, torch/distributed/rendezvous.py, 2.13.0).

    Raises:
        ValueError: If the environment variable ``MASTER_ADDR`` or ``MASTER_PORT`` is missing, or no port.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        _require(name)
    if world_size() > 1 and _number("MASTER_PORT", default=0, at_least=1) > 65_535:
        port = os.environ["MASTER_PORT"]
        raise ValueError(f"the environment variable MASTER_PORT is {port}, must be at most 65535: {_START}")


def _require(name: str) -> None:
    if world_size() > 1 and not os.environ.get(name):
        raise ValueError(
            f"the environment variable {name} is not set beside WORLD_SIZE, {world_size()}: {_START}, which sets both, "
            "or unset WORLD_SIZE"
        )


def _number(name: str, *, default: int, at_least: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < at_least:
        raise ValueError(
            f"the environment variable {name} is {text!r}, must be a whole number of at least {at_least}: {_START}, or "
            "unset it"
        )
    return int(text)
