"""What a stepper calls on a meter. Every backend has a meter; only what differs is documented there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.record.device_bytes import DeviceBytes
from memlab.record.out_of_memory import FailedAllocation
from memlab.record.timeline import Timeline

if TYPE_CHECKING:
    from memlab.meter.repeater import Repeater


class Meter(Protocol):
    """Counts the bytes of one device and of host memory."""

    device_memory_bytes: int | None
    """The device's limit; an allocation beyond it raises `torch.OutOfMemoryError`. None: no other limit than the
    device's own."""

    @property
    def out_of_memory(self) -> FailedAllocation | None:
        """The last failed allocation of this timeline; complete once `finish` has returned."""

    @property
    def repeater(self) -> Repeater | None:
        """What lets recorded events happen again without a step; None where only steps make events."""

    @property
    def looks(self) -> bool:
        """Whether a function waits for its event (`at_event`), so that each has to happen."""

    @property
    def kept_gather_bytes(self) -> int:
        """Of the last step; see `StepRecord.kept_gather_bytes`."""

    @property
    def late_free_bytes(self) -> int:
        """Of the last step; see `StepRecord.late_free_bytes`."""

    def use_allocator(self, settings: AllocatorSettings) -> None:
        """Gives a simulated allocator its options, before the first allocation."""

    def remember(self) -> Callable[[], bool]:
        """Remembers what is allocated, and where.

        Returns:
            A function that makes the meter's memory as it is now, where the same storages are allocated again. It
            returns whether it could; if not, it has changed nothing.
        """

    def logging_requests(self) -> AbstractContextManager[RequestLog | None]:
        """Logs the requests of the block to a simulated allocator; None where none is simulated."""

    def watching(self) -> AbstractContextManager[None]:
        """Meters the block."""

    def paused(self) -> AbstractContextManager[None]:
        """Meters nothing of the block, inside `watching`. Storages allocated in it stay unknown or unlabelled."""

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]], others: str | None = None) -> None:
        """Begins a timeline. Storages that are allocated now become its opening events.

        Args:
            categories: The tensors of each category, by the category's name (`memlab.vocabulary.CATEGORIES`).
            others: The category of what is allocated and has none yet; None decides by when it will be freed.
        """

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]], module: str | None = None) -> None:
        """Sets the category of storages, from their allocation on.

        Args:
            categories: As for `start`.
            module: What has allocated them, if that is known better than by the module that was running.
        """

    def mark(self) -> None:
        """Adds an event of 0 bytes to the timeline, so that it shows a phase in which nothing is allocated."""

    def at_event(self, number: int, look: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls `look` in a repetition of the last step, right after device event `number` (from 1).

        A GPU runs behind the program: there `look` is called when the module begins in which the event happened.
        """

    def finish(self) -> Timeline:
        """Ends the timeline that `start` began, and returns it.

        Raises:
            RuntimeError: If the meter missed a free, so that the timeline would be wrong.
        """

    def drop(self) -> None:
        """Ends the timeline that `start` began, and makes none.

        Raises:
            RuntimeError: As `finish`.
        """

    def pool_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the pool of a tensor's storage (`memlab.vocabulary.POOLS`); None for an unknown storage."""

    def untracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the allocated device bytes that belong to none of the tensors, without a GPU's own workspaces."""

    def reset_peak(self) -> None:
        """Restarts `peak_host_bytes` at the bytes allocated now."""

    @property
    def peak_host_bytes(self) -> int:
        """The most host bytes allocated since `reset_peak`."""

    def live_bytes(self, pool: str = "device") -> int:
        """Returns the bytes allocated in a pool now."""

    def device_bytes(self) -> DeviceBytes:
        """Returns what is allocated, active and reserved on the device now."""

    def track_host_tensor(self, tensor: torch.Tensor) -> object:
        """Counts a host tensor until its storage is freed."""

    def host_reserved_bytes(self) -> int | None:
        """Returns the pinned host memory that torch holds; None for a backend that pins nothing."""

    def free_cached_pinned_memory(self) -> None:
        """Frees the pinned host memory that torch keeps for reuse."""

    def uncategorised_bytes(self) -> int:
        """Returns the allocated device bytes without a category from `categorise`."""

    def close(self) -> None:
        """Stops metering for good."""
