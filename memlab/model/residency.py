"""Where parameters, gradients and optimizer state live between steps: on the device, or down on the host.

Each tensor's storage is emptied in place and filled again, so that every view of it (DDP's buckets, Megatron's main
parameters, Adam's state) stays valid: the mechanism of Megatron's own ``_ParamAndGradBuffer.offload_to_cpu`` (0.16),
used here for the optimizer too. Gradients are dropped, not copied: they come back as zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from memlab.model.build import LiveModel
from memlab.movement import GROUPS
from memlab.settings import MemorySettings


def groups_on_host(settings: MemorySettings) -> tuple[str, ...]:
    """Returns the groups that the settings keep on the host between steps."""
    wanted = (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer)
    return tuple(group for group, is_wanted in zip(GROUPS, wanted, strict=True) if is_wanted)


class Residency:
    """The three groups of one live model, and their copies on the host.

    A host copy is allocated when its tensor first goes down and then kept, pinned, until `forget`: pinning anew each
    time doubles the host memory for a moment (verl #6193).
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._host_copies: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
        self._away: dict[str, list[tuple[torch.Tensor, int]]] = {group: [] for group in GROUPS}

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors and their host copies."""
        return {group: own + self._host_copies[group] for group, own in self._own_tensors().items()}

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Takes groups off the device.

        Args:
            groups: Some of `GROUPS`.

        Returns:
            Device bytes that each group gave back; groups that were away already are left out.
        """
        own_tensors = self._own_tensors()
        freed: dict[str, int] = {}
        for group in GROUPS:
            if group not in groups or self._away[group]:
                continue
            tensors = own_tensors[group]
            if group != "gradients":
                self._copy_down(group, tensors)
            sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
            self._away[group] = sizes
            freed[group] = sum(num_bytes for _, num_bytes in sizes)
            for tensor in tensors:
                tensor.untyped_storage().resize_(0)
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
            while self._away[group]:
                # Taken off the list when it is back: a load that runs out of memory can be taken up again.
                tensor, num_bytes = self._away[group][-1]
                tensor.untyped_storage().resize_(num_bytes)
                if group == "gradients":
                    tensor.zero_()
                else:
                    tensor.copy_(self._host_copies[group][len(self._away[group]) - 1], non_blocking=True)
                self._away[group].pop()
                taken[group] = taken.get(group, 0) + num_bytes
        if taken:
            torch.cuda.synchronize()
        return taken

    def forget(self, groups: Collection[str]) -> None:
        """Frees the host copies of groups that are back on the device."""
        for group in groups:
            assert not self._away[group], f"the only copy of the {group} is on the host"
            self._host_copies[group].clear()

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
        return {"parameters": sum(tensor.untyped_storage().nbytes() for tensor in parameters)}

    def _copy_down(self, group: str, tensors: list[torch.Tensor]) -> None:
        copies = self._host_copies[group]
        if len(copies) != len(tensors):  # Adam has made its moments since: the places in the list are others
            copies.clear()
            copies.extend(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors)
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def _own_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors, one for every storage, expert buffers included."""
        seen: set[int] = set()
        groups: dict[str, list[torch.Tensor]] = {}
        sources = (self._parameters(), self._gradients(), self._optimizer_state())
        for group, tensors in zip(GROUPS, sources, strict=True):
            # In fp32 the main parameters are views of the parameters: a storage belongs to the first group with it.
            groups[group] = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in seen]
            seen.update(tensor.untyped_storage()._cdata for tensor in groups[group])
        return groups

    def _buffers(self) -> Iterator[Any]:
        # Experts have buffers of their own where they are spread over ranks; forgetting them was verl #1766.
        yield from self._live.chunk.buffers
        yield from self._live.chunk.expert_parallel_buffers

    def _parameters(self) -> list[torch.Tensor]:
        return [buffer.param_data for buffer in self._buffers() if buffer.param_data is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self._buffers()]

    def _optimizer_state(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for part in getattr(self._live.optimizer, "chained_optimizers", [self._live.optimizer]):
            for group in part.optimizer.param_groups:
                for main_parameter in group["params"]:
                    tensors.append(main_parameter.data)
                    state = part.optimizer.state.get(main_parameter, {})
                    tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        return tensors
