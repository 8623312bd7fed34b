"""Silence for what Megatron says of its own defaults: none of it is about a user's settings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Runs the block without megatron-core's advice; its errors are still heard."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # It calls collectives by older names, and reads `.grad` of the views that its fp32 main parameters are.
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
