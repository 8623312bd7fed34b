"""Five real errors in the transfer of parameters, gradients and optimizer state: each is a `Residency` or groups.

They show that the audit finds each of them; `memlab.engines.residency.residency` has none of them. None accesses memory
that it does not have: it stops before upstream's code would, and `audit.require_resident` refuses the next step.
`repair` undoes what any of them left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.groups import MegatronGroups
from memlab.engines.residency.residency import Residency
from memlab.record.transfer import GROUPS


class SizeNotSaved(Residency):
    """Gradient storages are emptied, and their size is not stored (SkyRL #563, first revision, found by its reviewer).

    Only this error, with the condition of `InvertedCondition` repaired: load then resizes to
    ``buffer.grad_data_size``. In megatron-core 0.14 that is an AttributeError; since 0.16 the attribute is Megatron's
    own and 0, so the storage stays empty, and the ``zero_()`` after it has no memory to write to. Here it is left out.
    """

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Empties the storages as it should, and forgets the size of the gradients."""
        freed = super().offload(groups)
        self._away["gradients"].clear()
        return freed


class InvertedCondition(SizeNotSaved):
    """Load has a condition that is never true for what was offloaded (SkyRL #563, first revision, both errors).

    It restores a gradient buffer only if the storage has a size above 0, but offload has resized that storage to 0: no
    gradient is ever loaded back. So the line that needs the size, which `SizeNotSaved` did not store, is never reached.
    Merged: the size is stored, and load has no condition.
    """

    def load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        """Loads what was offloaded, except for gradients: the condition is false for each of their buffers."""
        return super().load([group for group in groups if group != "gradients"])


class ExpertBuffersForgotten(MegatronGroups):
    """Only ``buffers`` are offloaded, not ``expert_parallel_buffers`` (verl #1766): most of a large MoE model.

    Raises:
        ValueError: If the experts of the model have no buffers of their own.
    """

    def __init__(self, live: LiveModel) -> None:
        super().__init__(live)
        if all(name != "expert_parallel_buffers" for name, _ in live.buffers()):
            raise ValueError(
                f"{live.scenario} has 0 expert_parallel_buffers, must have some: Megatron fills them where experts are "
                "spread over ranks; open a lab of an MoE architecture with expert_buffers=True"
            )

    def _buffers(self) -> Any:
        yield from (buffer for name, buffer in self._live.buffers() if name == "buffers")


class GradientsHeldByMainParameters(MegatronGroups):
    """Each main parameter's ``.grad`` is a copy of its own, and outlives the step (verl #5105).

    megatron-core's ``copy_group_grads`` sets it to ``main_grad...float()``
    (``megatron/core/optimizer/distrib_optimizer.py``): with fp32 gradient buffers a view, which empties with its
    buffer; with bf16 buffers, or with the ``.clone()`` that #5105 quotes, a copy that no offload of buffers reaches.

    Raises:
        ValueError: If the optimizer updates the parameters themselves (``FP32Optimizer``).
    """

    def __init__(self, live: LiveModel) -> None:
        super().__init__(live)
        if not all(hasattr(part, "_copy_model_grads_to_main_grads") for part in live.optimizers):
            raise ValueError(
                f"{live.scenario} has no main parameters, must have some: choose bf16, or the distributed optimizer"
            )
        for part in live.optimizers:
            part._copy_model_grads_to_main_grads = _copying(part, part._copy_model_grads_to_main_grads)

    def _copied_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


class PinnedAgain(Residency):
    """Every offload of the parameters makes a new ``.cpu().pin_memory()`` copy (verl #6193, and Megatron-LM #7007).

    The new copy is made while the old one is still referred to, and by way of a pageable copy.
    """

    def _copy_down(self, group: str, tensors: list[torch.Tensor]) -> list[tuple[int, torch.cuda.Event]]:
        if group != "parameters":
            return super()._copy_down(group, tensors)
        buffers: list[Any] = self._host_buffers[group]
        for index, tensor in enumerate(tensors):
            copy = tensor.cpu().pin_memory()
            buffers[index : index + 1] = [SimpleNamespace(whole=copy, parts=[copy])]
            del copy
        return []


FAULTS: dict[str, Callable[[LiveModel], Residency]] = {
    "size_not_saved": lambda live: SizeNotSaved(MegatronGroups(live)),
    "inverted_condition": lambda live: InvertedCondition(MegatronGroups(live)),
    "expert_buffers_forgotten": lambda live: Residency(ExpertBuffersForgotten(live)),
    "gradients_held_by_main_parameters": lambda live: Residency(GradientsHeldByMainParameters(live)),
    "pinned_again": lambda live: PinnedAgain(MegatronGroups(live)),
}


def repair(live: LiveModel) -> None:
    """Restores lost gradients, as zeros, and the main parameters' gradients to Megatron's way."""
    for _, buffer in live.buffers():
        gradient = buffer.grad_data
        num_bytes = gradient.numel() * gradient.element_size()
        if gradient.untyped_storage().nbytes() != num_bytes:
            gradient.untyped_storage().resize_(num_bytes)
            gradient.zero_()
    for part in live.optimizers:
        if vars(part).pop("_copy_model_grads_to_main_grads", None) is not None:
            part.zero_grad()


def _copying(part: Any, copy_model_grads: Callable[[], None]) -> Callable[[], None]:
    def copy_model_grads_and_keep() -> None:
        copy_model_grads()
        for group in part.optimizer.param_groups:
            for main_parameter in group["params"]:
                main_parameter.grad = main_parameter.grad.clone()

    return copy_model_grads_and_keep
