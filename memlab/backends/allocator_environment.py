"""The options of torch's allocator that a process was started with: torch reads them once, from the environment.

It reads one of two variables: the older name wherever it is set, even to nothing, else the newer one
(``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDAAllocatorConfig.h``, torch 2.13).
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

from memlab.config.allocator_settings import AllocatorSettings

Number = TypeVar("Number", int, float)

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_of_process() -> AllocatorSettings:
    """Returns the options in the environment. Those that `AllocatorSettings` lacks are left out.

    Raises:
        ValueError: If a value breaks its rule.
    """
    text = os.environ.get(_variable(), "")
    values: dict[str, Any] = {}
    for option in re.sub(r"\[[^]]*\]|\s", "", text).split(","):
        name, _, value = option.partition(":")
        if name == "expandable_segments":
            values[name] = value.lower() == "true"
        elif name == "garbage_collection_threshold":
            values[name] = _number(name, value, float) or None  # 0 never collects garbage
        elif name == "max_split_size_mb":
            values[name] = _number(name, value, int)
    return AllocatorSettings(**values)


def check_allocator(requested: AllocatorSettings) -> None:
    """Checks that this process was started with the options that are requested.

    Raises:
        ValueError: If not: torch's allocator cannot change them once it holds memory.
    """
    found = allocator_of_process()
    if requested != found:
        wanted = "" if requested == AllocatorSettings() else str(requested)
        raise ValueError(
            f"allocator is {str(requested)!r}, and this process was started with {str(found)!r}, which must be the "
            f"same: export {_variable()}='{wanted}' and restart Python, or leave allocator out"
        )


def start_with(requested: AllocatorSettings) -> AllocatorSettings:
    """Sets the options of this process, in which torch has not started yet, unless the environment has options.

    Returns:
        The options that the process has: those of the environment if none are requested.
    """
    if any(name in os.environ for name in _VARIABLES):
        return allocator_of_process() if requested == AllocatorSettings() else requested
    if requested != AllocatorSettings():
        os.environ[_VARIABLES[0]] = str(requested)
    return requested


def _number(name: str, text: str, kind: type[Number]) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r} in {_variable()}, must be a number: correct it, or leave it out"
        ) from None


def _variable() -> str:
    return next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
