"""Where parameters, gradients and optimizer state live between steps: on the device, or down on the host.

Each tensor's storage is emptied in place and filled again, so that every view of it (DDP's buckets, Megatron's main
parameters, Adam's state) stays valid: the mechanism of Megatron's own ``_ParamAndGradBuffer.offload_to_cpu`` (0.16),
used here for the optimizer too. Gradients are dropped, not copied: they come back as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memlab.model.build import LiveModel
from memlab.settings import MemorySettings

GROUPS = ("parameters", "gradients", "optimizer state")


class Residency:
    """The three groups of one live model, and their copies on the host.

    A host copy is allocated when its tensor first goes down and then kept, pinned, for as long as the setting stands:
    pinning anew each time doubles the host memory for a moment (verl #6193).
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._host_copies: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
        self._away: dict[str, list[tuple[torch.Tensor, int]]] = {group: [] for group in GROUPS}

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns each group's tensors, one for every storage, expert buffers included; and their host copies."""
        seen: set[int] = set()
        groups: dict[str, list[torch.Tensor]] = {}
        for group, tensors in zip(
            GROUPS, (self._parameters(), self._gradients(), self._optimizer_state()), strict=True
        ):
            # In fp32 the main parameters are views of the parameters: a storage belongs to the first group that has it.
            own = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in seen]
            seen.update(tensor.untyped_storage()._cdata for tensor in own)
            groups[group] = own + self._host_copies[group]
        return groups

    def offload(self, settings: MemorySettings) -> dict[str, int]:
        """Takes the groups that the settings name off the device, and forgets host copies that they no longer need.

        Returns:
            Device bytes that each group gave back; groups that stay are left out.
        """
        wanted = {
            "parameters": settings.offload_parameters,
            "gradients": bool(settings.offload_gradients),
            "optimizer state": settings.offload_optimizer,
        }
        groups = self.tensors()
        freed: dict[str, int] = {}
        for group in GROUPS:
            if not wanted[group]:
                self._host_copies[group].clear()
                continue
            copies = self._host_copies[group]
            tensors = groups[group][: len(groups[group]) - len(copies)]
            if group != "gradients":
                copies.extend(
                    torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors[len(copies) :]
                )
                for tensor, copy in zip(tensors, copies, strict=True):
                    copy.copy_(tensor, non_blocking=True)
                torch.cuda.synchronize()
            freed[group] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self._away[group] = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
            for tensor in tensors:
                tensor.untyped_storage().resize_(0)
        return freed

    def load(self) -> dict[str, int]:
        """Brings back whatever is away: copies up, gradients as zeros.

        Returns:
            Device bytes that each group took again; empty if nothing was away.
        """
        taken: dict[str, int] = {}
        for group in GROUPS:
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

    def _buffers(self) -> Iterator[object]:
        # Experts have buffers of their own where they are spread over ranks; forgetting them was verl #1766.
        yield from self._live.chunk.buffers
        yield from self._live.chunk.expert_parallel_buffers

    def _parameters(self) -> list[torch.Tensor]:
        return [buffer.param_data for buffer in self._buffers() if buffer.param_data is not None]  # type: ignore[attr-defined]

    def _gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self._buffers()]  # type: ignore[attr-defined]

    def _optimizer_state(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for part in getattr(self._live.optimizer, "chained_optimizers", [self._live.optimizer]):
            for group in part.optimizer.param_groups:
                for main_parameter in group["params"]:
                    tensors.append(main_parameter.data)
                    state = part.optimizer.state.get(main_parameter, {})
                    tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        return tensors
