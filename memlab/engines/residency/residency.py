"""Offloads parameters, gradients and optimizer state to host memory between steps, and loads them back.

Each tensor's storage is emptied in place and filled again, so that every view of it (DDP's buckets, Megatron's main
parameters, Adam's state) stays valid: the mechanism of Megatron's own ``_ParamAndGradBuffer.offload_to_cpu`` (0.16),
used here for the optimizer too. Gradients are freed, not copied: a load restores them as zeros.
What an optimizer keeps on the host by itself stays there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from memlab.allocator.rules import rounded_bytes
from memlab.config.settings import MemorySettings
from memlab.engines.residency.host_buffer import HostBuffer
from memlab.record.transfer import GROUPS

_EVENT_EVERY_BYTES = 512 * 1024**2
_SEGMENT_BYTES = 128 * 1024**2


def groups_on_host(settings: MemorySettings) -> tuple[str, ...]:
    """Returns the groups that the settings keep on the host between steps."""
    is_optimizer_offloaded = settings.offload_optimizer or settings.offload_optimizer_except_update
    offloaded = (settings.offload_parameters, settings.offload_gradients, is_optimizer_offloaded)
    return tuple(group for group, is_offloaded in zip(GROUPS, offloaded, strict=True) if is_offloaded)


class Groups(Protocol):
    """What one model keeps from step to step, as `Residency` transfers it: tensors that cover their whole storages.

    A storage that is in two groups belongs to the first one. What an optimizer keeps on the host is not ``is_cuda``.
    """

    def parameters(self) -> list[torch.Tensor]:
        """Returns the rank's part of the parameters."""

    def gradients(self) -> list[torch.Tensor]:
        """Returns what is there of gradients now."""

    def optimizer_state(self) -> list[torch.Tensor]:
        """Returns main parameters, moments and their scales."""

    def drop_copied_gradients(self) -> int:
        """Frees gradients that the next step would free before its forward; returns their bytes."""

    def gather(self) -> None:
        """Brings the parameters up to date where another rank has updated a part of them, before they are copied."""


class Residency:
    """The three groups of one live model, and their copies on the host.

    A group's host buffer is allocated at the group's first offload and then kept, pinned, until `forget`: pinning new
    memory at each offload doubles the host memory for a moment (verl #6193).
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.pinned = True
        """Whether host copies are page-locked; pageable ones are slower to copy."""
        self.in_segments = True
        """Whether the device has an allocator, which then reserves a segment for many tensors of a load."""
        self._host_buffers: dict[str, list[HostBuffer]] = {group: [] for group in GROUPS}
        self._away: dict[str, list[tuple[torch.Tensor, int]]] = {group: [] for group in GROUPS}

    @property
    def on_host(self) -> tuple[str, ...]:
        """The groups of which something is on the host and not on the device."""
        return tuple(group for group in GROUPS if self._away[group])

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors, on the device and on the host, and their host copies."""
        return {
            group: own + [buffer.whole for buffer in self._host_buffers[group]]
            for group, own in self._own_tensors(also_on_host=True).items()
        }

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Offloads groups to the host.

        Returns:
            Device bytes freed by each group; groups that were on the host already are left out.
        """
        on_device = [group for group in GROUPS if group in groups and not self._away[group]]
        if not on_device:
            return {}
        dropped_bytes = self._groups.drop_copied_gradients() if "gradients" in on_device else 0
        own_tensors = self._own_tensors()
        freed: dict[str, int] = {}
        for group in on_device:
            tensors = own_tensors[group]
            sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
            copied = [] if group == "gradients" else self._copy_down(group, tensors)
            self._away[group] = sizes
            freed[group] = sum(num_bytes for _, num_bytes in sizes) + (dropped_bytes if group == "gradients" else 0)
            num_freed = 0
            for num_copied, is_copied in copied:
                is_copied.synchronize()
                _empty(tensors[num_freed:num_copied])  # while the others are being copied
                num_freed = num_copied
            _empty(tensors[num_freed:])
        torch.cuda.empty_cache()  # a rollout engine cannot use what the allocator caches
        return freed

    @torch.no_grad()  # Megatron lets the CPU optimizer's fp32 copies require gradients
    def load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        """Loads groups back to the device: copies of parameters and optimizer state, gradients as zeros.

        Returns:
            Device bytes allocated by each group; empty if all were on the device.
        """
        taken: dict[str, int] = {}
        for group in groups:
            copies = self._copies(group)
            segment_bytes = 0
            while self._away[group]:
                # Removed from the list once it is loaded: a load that runs out of memory can be continued.
                tensor, num_bytes = self._away[group][-1]
                if self.in_segments:
                    if segment_bytes < num_bytes:
                        segment_bytes = _make_segment(self._away[group])
                    segment_bytes -= rounded_bytes(num_bytes)
                tensor.untyped_storage().resize_(num_bytes)
                if group == "gradients":
                    tensor.zero_()
                else:
                    tensor.copy_(copies[len(self._away[group]) - 1], non_blocking=True)
                self._away[group].pop()
                taken[group] = taken.get(group, 0) + num_bytes
        if taken:
            torch.cuda.synchronize()
        return taken

    def forget(self, groups: Collection[str]) -> None:
        """Frees the host copies of groups that are back on the device."""
        for group in groups:
            assert not self._away[group], f"the only copy of the {group} is on the host"
            self._host_buffers[group].clear()

    def hand_over(self) -> dict[str, int]:
        """Copies the parameters to the host for another program, as a weight sync does; they stay on the device.

        Returns:
            Bytes that were copied, under ``parameters``.

        Raises:
            ValueError: If the parameters are not on the device.
        """
        if self._away["parameters"]:
            raise ValueError("the parameters are on the host, and are handed over from the device: load them first")
        self._groups.gather()
        parameters = self._own_tensors()["parameters"]
        self._copy_down("parameters", parameters)
        torch.cuda.synchronize()
        return {"parameters": sum(tensor.untyped_storage().nbytes() for tensor in parameters)}

    def _copy_down(self, group: str, tensors: list[torch.Tensor]) -> list[tuple[int, torch.cuda.Event]]:
        """Starts the copies to the host.

        Returns:
            An entry after every `_EVENT_EVERY_BYTES`: how many tensors were sent by then, and the event that is reached
            when they have arrived.
        """
        if len(self._copies(group)) != len(tensors):
            # Adam has allocated its moments since the last offload, so the buffer has no place for them.
            self._host_buffers[group].clear()
            self._host_buffers[group].append(HostBuffer(tensors, pinned=self.pinned))
        copied: list[tuple[int, torch.cuda.Event]] = []
        waiting_bytes = 0
        for count, (tensor, copy) in enumerate(zip(tensors, self._copies(group), strict=True), start=1):
            copy.copy_(tensor, non_blocking=True)
            waiting_bytes += tensor.nbytes
            if waiting_bytes >= _EVENT_EVERY_BYTES or count == len(tensors):
                event = torch.cuda.Event()
                event.record()
                copied.append((count, event))
                waiting_bytes = 0
        return copied

    def _copies(self, group: str) -> list[torch.Tensor]:
        return [part for buffer in self._host_buffers[group] for part in buffer.parts]

    def _own_tensors(self, *, also_on_host: bool = False) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors, one for every storage.

        Args:
            also_on_host: Also returns what an optimizer keeps on the host by itself, which never leaves the host.
        """
        seen: set[int] = set()
        groups: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
        sources = (self._groups.parameters(), self._groups.gradients(), self._groups.optimizer_state())
        with torch._C.DisableTorchFunction():  # a function mode would see each look
            keys = [[tensor.untyped_storage()._cdata for tensor in tensors] for tensors in sources]
        for group, tensors, of_tensors in zip(GROUPS, sources, keys, strict=True):
            # In fp32 Megatron's main parameters are views of the parameters: the first group has such a storage.
            for tensor, key in zip(tensors, of_tensors, strict=True):
                if key not in seen and (also_on_host or tensor.is_cuda):
                    seen.add(key)
                    groups[group].append(tensor)
        return groups


def _make_segment(away: list[tuple[torch.Tensor, int]]) -> int:
    """Makes the allocator reserve one segment for the last tensors of a list; returns its bytes.

    Fewer segments are faster to free: cudaFree took 85 ms for 34.8 GiB of Adam's state in 1,927 segments, and it waits
    for every copy under way. Larger segments are slower to load into: cudaMalloc delays copies on the device. Measured
    on an H200 with torch 2.11, as a share of the bandwidth of one plain copy:

        segment      one per tensor   64 MiB   128 MiB   256 MiB
        to the host            84 %     93 %      95 %      96 %
        to the device          92 %     96 %      94 %      92 %

    Example: the list ends in tensors of 30, 60, 50 and 40 MiB. 40 + 50 + 60 MiB reach 128 MiB, so the segment has 150
    MiB, and the tensor of 30 MiB comes into the next one.
    """
    segment_bytes = 0
    for _, num_bytes in reversed(away):
        segment_bytes += rounded_bytes(num_bytes)
        if segment_bytes >= _SEGMENT_BYTES:
            break
    torch.empty(segment_bytes, dtype=torch.uint8, device=away[-1][0].device)
    return segment_bytes


def _empty(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
