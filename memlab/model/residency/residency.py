"""Where parameters, gradients and optimizer state live between steps: on the device, or down on the host.

Each tensor's storage is emptied in place and filled again, so that every view of it (DDP's buckets, Megatron's main
parameters, Adam's state) stays valid: the mechanism of Megatron's own ``_ParamAndGradBuffer.offload_to_cpu`` (0.16),
used here for the optimizer too. Gradients are dropped, not copied: they come back as zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from memlab.allocator.rules import rounded_bytes
from memlab.config.settings import MemorySettings
from memlab.model.build import LiveModel
from memlab.model.residency.host_buffer import HostBuffer
from memlab.record.transfer import GROUPS

_EVENT_EVERY_BYTES = 512 * 1024**2
_SEGMENT_BYTES = 128 * 1024**2


def groups_on_host(settings: MemorySettings) -> tuple[str, ...]:
    """Returns the groups that the settings keep on the host between steps."""
    wanted = (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer)
    return tuple(group for group, is_wanted in zip(GROUPS, wanted, strict=True) if is_wanted)


class Residency:
    """The three groups of one live model, and their copies on the host.

    A group's host buffer is allocated when the group first goes down and then kept, pinned, until `forget`: pinning
    anew each time doubles the host memory for a moment (verl #6193).
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self.pinned = True
        """Whether host copies are page-locked; pageable ones are slower to copy."""
        self._host_buffers: dict[str, list[HostBuffer]] = {group: [] for group in GROUPS}
        self._away: dict[str, list[tuple[torch.Tensor, int]]] = {group: [] for group in GROUPS}

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors and their host copies."""
        return {
            group: own + [buffer.whole for buffer in self._host_buffers[group]]
            for group, own in self._own_tensors().items()
        }

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Takes groups off the device.

        Args:
            groups: Some of `GROUPS`.

        Returns:
            Device bytes that each group gave back; groups that were away already are left out.
        """
        wanted = [group for group in GROUPS if group in groups and not self._away[group]]
        if not wanted:
            return {}
        own_tensors = self._own_tensors()
        freed: dict[str, int] = {}
        for group in wanted:
            tensors = own_tensors[group]
            sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
            copied = [] if group == "gradients" else self._copy_down(group, tensors)
            self._away[group] = sizes
            freed[group] = sum(num_bytes for _, num_bytes in sizes)
            num_freed = 0
            for num_copied, is_copied in copied:
                is_copied.synchronize()
                _empty(tensors[num_freed:num_copied])  # while the rest is on its way
                num_freed = num_copied
            _empty(tensors[num_freed:])
        torch.cuda.empty_cache()  # what the allocator keeps for itself is no room for a rollout engine
        return freed

    def load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        """Brings back what is away: copies up, gradients as zeros.

        Args:
            groups: Some of `GROUPS`.

        Returns:
            Device bytes that each group took again; empty if nothing was away.
        """
        taken: dict[str, int] = {}
        for group in groups:
            copies = self._copies(group)
            room_bytes = 0
            while self._away[group]:
                # Taken off the list when it is back: a load that runs out of memory can be taken up again.
                tensor, num_bytes = self._away[group][-1]
                if room_bytes < num_bytes:
                    room_bytes = _make_segment(self._away[group])
                room_bytes -= rounded_bytes(num_bytes)
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
        """Copies the parameters to the host for somebody else, as a weight sync does, and leaves them where they are.

        Returns:
            Bytes that were copied, under ``parameters``.

        Raises:
            ValueError: If the parameters are not on the device.
        """
        if self._away["parameters"]:
            raise ValueError("the parameters wait on the host, and are handed over from the device: load them first")
        parameters = self._own_tensors()["parameters"]
        self._copy_down("parameters", parameters)
        torch.cuda.synchronize()
        return {"parameters": sum(tensor.untyped_storage().nbytes() for tensor in parameters)}

    def _copy_down(self, group: str, tensors: list[torch.Tensor]) -> list[tuple[int, torch.cuda.Event]]:
        """Starts the copies to the host.

        Returns:
            Every now and then, how many tensors have been sent, and the event that says that they have arrived.
        """
        if len(self._copies(group)) != len(tensors):
            # Adam has made its moments since: the places in the list are others.
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

    def _own_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors, one for every storage, expert buffers included."""
        seen: set[int] = set()
        groups: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
        sources = (self._parameters(), self._gradients(), self._optimizer_state())
        for group, tensors in zip(GROUPS, sources, strict=True):
            # In fp32 the main parameters are views of the parameters: a storage belongs to the first group with it.
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    groups[group].append(tensor)
        return groups

    def _buffers(self) -> Iterator[Any]:
        yield from (buffer for _, buffer in self._live.buffers())

    def _parameters(self) -> list[torch.Tensor]:
        return [buffer.param_data for buffer in self._buffers() if buffer.param_data is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self._buffers()]

    def _optimizer_state(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for part in self._live.optimizers:
            for group in part.optimizer.param_groups:
                for main_parameter in group["params"]:
                    tensors.append(main_parameter.data)
                    state = part.optimizer.state.get(main_parameter, {})
                    tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        return tensors


def _make_segment(away: list[tuple[torch.Tensor, int]]) -> int:
    """Lets the allocator get room for the last tensors of a list in one piece; returns how much.

    They then go down again as one: 34.8 GiB of Adam's state in 1,927 segments took cudaFree 85 ms, and it waits for
    every copy that is on its way. Larger pieces cost on the way up: what cudaMalloc does on the device delays copies
    (H200, torch 2.11; of a plain copy's bandwidth down and up: 84 and 92 % with a segment a tensor, 93 and 96 % with 64
    MiB, 95 and 94 % with 128, 96 and 92 % with 256).
    """
    wanted = 0
    for _, num_bytes in reversed(away):
        wanted += rounded_bytes(num_bytes)
        if wanted >= _SEGMENT_BYTES:
            break
    if away[-1][0].device.type != "cpu":
        torch.empty(wanted, dtype=torch.uint8, device=away[-1][0].device)
    return wanted


def _empty(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
