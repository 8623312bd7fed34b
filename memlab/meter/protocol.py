"""What a stepper asks of a meter; each backend brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from memlab.record.out_of_memory import Refusal
from memlab.record.timeline import Timeline


class Meter(Protocol):
    """Accounts for the bytes of one device and of host memory."""

    device_memory_bytes: int | None
    """The most that the device may hold; more raises `torch.OutOfMemoryError`. None: what there is."""

    @property
    def out_of_memory(self) -> Refusal | None:
        """The last request that was refused in this timeline; complete once `finish` has returned."""

    def watching(self) -> AbstractContextManager[None]:
        """Meters what the block does."""

    def looking_away(self) -> AbstractContextManager[None]:
        """Lets the block run unmetered within `watching`."""

    def start(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Begins a timeline; what is alive opens it.

        Args:
            categories: Category to the tensors that are of it, as `Timeline` will name them.
        """

    def categorise(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Fixes the category of what is alive."""

    def at_event(self, number: int, look: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls `look` in a repetition of the last step, when as many device events have passed.

        A GPU runs behind the program: there the moment is when the module takes over in which the event happened.
        """

    def finish(self) -> Timeline:
        """Ends the timeline that `start` began, and returns it."""

    def pool_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the pool that a tensor's storage is in; None for one that was never seen."""

    def bytes_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the device bytes alive now that are none of the tensors', nor a workspace that no tensor shows."""

    def restart_peak(self) -> None:
        """Lets `peak_host_bytes` begin anew."""

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes on the host since `restart_peak`."""

    def live_bytes(self, pool: str = "device") -> int:
        """Returns the bytes alive in a pool now."""

    def hold_on_host(self, tensor: torch.Tensor) -> object:
        """Counts a host tensor, until its storage dies."""

    def host_reserved_bytes(self) -> int | None:
        """Returns the pinned host memory that is really held; None where nothing is really pinned."""

    def uncategorised_bytes(self) -> int:
        """Returns the device bytes alive now that `categorise` has given no name."""

    def close(self) -> None:
        """Ends the watch for good."""
