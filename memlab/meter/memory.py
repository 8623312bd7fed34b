"""How much memory a storage takes: on a CPU what it asks for. `memlab.meter.caching_memory` is a GPU's, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter.allocations import Opening, StorageAllocation
from memlab.meter.events import EventLog


class PlainMemory:
    """Device and host memory of one meter, in which a storage takes what it asks for."""

    replacements: Mapping[str, Any] = {}
    """Names of torch that are replaced while the meter watches, with what replaces them."""
    reserved_bytes = None
    """What an allocator has reserved on the device; None without one."""

    def __init__(self, log: EventLog) -> None:
        self.limit_bytes: int | None = None
        """What the device has; None is no limit."""
        self._log = log

    def use_allocator(self, settings: AllocatorSettings) -> None:
        """Gives a simulated allocator its options, before the first allocation."""
        # a CPU has no caching allocator

    def require(self, num_bytes: int) -> None:
        """Checks that the device can serve a request.

        Raises:
            torch.OutOfMemoryError: If it cannot; with the request, the allocated bytes and the limit.
        """
        if self.limit_bytes is not None and self._log.device_bytes + num_bytes > self.limit_bytes:
            self._log.refuse(num_bytes, self.limit_bytes)

    def take(self, allocation: StorageAllocation, num_bytes: int) -> int:
        """Returns the bytes that a storage of `num_bytes` takes of its pool."""
        return num_bytes

    def give_back(self, allocation: StorageAllocation) -> None:
        """Frees what `take` took."""
        # there are no places

    def opening(self, live: list[StorageAllocation]) -> Opening:
        """Begins a step that finds these storages, in the order of their births."""
        return Opening([allocation for allocation in live if allocation.num_bytes])

    def kept_gather_bytes(self, columns: npt.NDArray[np.int64]) -> int:
        """Returns `StepRecord.kept_gather_bytes` of the step with these columns."""
        return 0

    def late_free_bytes(self, columns: npt.NDArray[np.int64]) -> int:
        """Returns `StepRecord.late_free_bytes` of the step with these columns."""
        return 0

    def remember(self, live: Callable[[], list[StorageAllocation]]) -> Callable[[], bool]:
        """Implements `Meter.remember`; `live` returns the storages in the order of their births."""
        then = self._log.device_bytes, self._log.host_bytes
        return lambda: (self._log.device_bytes, self._log.host_bytes) == then

    def logging_requests(self) -> AbstractContextManager[None]:
        """Implements `Meter.logging_requests`."""
        return nullcontext()

    def host_reserved_bytes(self) -> None:
        """Returns the pinned host memory that torch holds; None for memory that pins nothing."""
        return

    def free_cached_pinned_memory(self) -> None:
        """Frees the pinned host memory that torch keeps for reuse."""
        # a CPU pins nothing
