"""Five errors that were made in moving parameters, gradients and optimizer state, each as a `Residency` that makes it.

They exist to be seen and to be caught by the audit; the right way is `memlab.model.residency.residency`, which knows
none of them.
None touches memory that it does not have: where upstream's code would have, it stops short, and the next step is
refused by `residency_walk.require_resident`. `repair` puts right what any of them left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch

from memlab.model.build import LiveModel
from memlab.model.residency.residency import Residency
from memlab.record.transfer import GROUPS


class SizeNotSaved(Residency):
    """Gradient storages are emptied without a note of their size (SkyRL #563, first revision, found in review).

    Upstream then resized to ``buffer.grad_data_size``: with megatron-core 0.14 an AttributeError, from 0.16 on, where
    that attribute is Megatron's own and 0, nothing at all; the ``zero_()`` after it has nothing to write to. Here the
    load brings nothing and the ``zero_()`` is left out.
    """

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """As it should be, but nobody knows afterwards how large the gradients were."""
        freed = super().offload(groups)
        self._away["gradients"].clear()
        return freed


class InvertedCondition(Residency):
    """Gradients go down only where they are down, and come up only where they are up (SkyRL #563, first revision).

    Merged: ``if storage().size() > 0`` before going down, and no condition before coming up. Which of the two was
    inverted we have no text of, so here both are: going down does nothing, coming up zeroes what is there.
    """

    def offload(self, groups: Collection[str]) -> dict[str, int]:
        """Skips gradients that are on the device."""
        return super().offload([group for group in groups if group != "gradients"])

    def load(self, groups: Collection[str] = GROUPS) -> dict[str, int]:
        """Zeroes gradients that are on the device."""
        if "gradients" in groups:
            for gradient in self._gradients():
                gradient.zero_()
        return super().load(groups)


class ExpertBuffersForgotten(Residency):
    """Only ``buffers`` move, not ``expert_parallel_buffers`` (verl #1766): with many experts that is most of the model.

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


class GradientsHeldByMainParameters(Residency):
    """Each main parameter's ``.grad`` is a copy of its own, and outlives the step (verl #5105).

    megatron-core's ``copy_group_grads`` sets it to ``main_grad...float()``
    (``megatron/core/optimizer/distrib_optimizer.py``): with fp32 gradient buffers a view, which empties with its
    buffer; with bf16 buffers, or with the ``.clone()`` that #5105 quotes, a copy that no offload of buffers reaches.
    """

    def __init__(self, live: LiveModel) -> None:
        super().__init__(live)
        for part in _parts(live):
            part._copy_model_grads_to_main_grads = _copying(part, part._copy_model_grads_to_main_grads)


class PinnedAgain(Residency):
    """Every offload of the parameters makes ``.cpu().pin_memory()`` anew (verl #6193, and Megatron-LM #7007).

    The new copy is made while the old one is still referred to, and goes through a pageable one besides.
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
    "size_not_saved": SizeNotSaved,
    "inverted_condition": InvertedCondition,
    "expert_buffers_forgotten": ExpertBuffersForgotten,
    "gradients_held_by_main_parameters": GradientsHeldByMainParameters,
    "pinned_again": PinnedAgain,
}


def repair(live: LiveModel) -> None:
    """Brings gradients back that a fault lost, as zeros, and lets main parameters take theirs as Megatron does."""
    for _, buffer in live.buffers():
        gradient = buffer.grad_data
        num_bytes = gradient.numel() * gradient.element_size()
        if gradient.untyped_storage().nbytes() < num_bytes:
            gradient.untyped_storage().resize_(num_bytes)
            gradient.zero_()
    for part in _parts(live):
        if vars(part).pop("_copy_model_grads_to_main_grads", None) is not None:
            part.zero_grad()


def _copying(part: Any, copy_model_grads: Callable[[], None]) -> Callable[[], None]:
    def copy_model_grads_and_keep() -> None:
        copy_model_grads()
        for group in part.optimizer.param_groups:
            for main_parameter in group["params"]:
                main_parameter.grad = main_parameter.grad.clone()

    return copy_model_grads_and_keep


def _parts(live: LiveModel) -> list[Any]:
    return list(getattr(live.optimizer, "chained_optimizers", [live.optimizer]))
