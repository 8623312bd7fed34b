"""Silence for megatron-core's advice about its own defaults: none of it is about a user's settings."""

from __future__ import annotations

import logging
import re
import warnings

_ADVICE = (
    ("", r"megatron\."),
    (r"`torch\.distributed\.\w+` is deprecated", ""),  # it calls collectives by older names
)
"""Regular expressions of a warning's message and of the module that it names; the empty one matches any."""


def silence_megatron() -> None:
    """Ignores megatron-core's warnings, and its log below errors, where the user has no filter and no level of his own.

    Filters and levels belong to the process and not to a thread, so they are added once, behind the user's, and stay:
    a step that restored them at its end would revert what a cell has set in the meantime.
    """
    known = {(action, message, module) for action, message, _, module, _ in warnings.filters}
    for message, module in _ADVICE:
        stored = (re.compile(message, re.IGNORECASE) if message else None, re.compile(module) if module else None)
        if ("ignore", *stored) not in known:  # adding a filter makes Python show all warnings once more
            warnings.filterwarnings("ignore", message, module=module, append=True)
    logger = logging.getLogger("megatron.core")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
