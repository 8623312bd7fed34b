"""Which of parameters, gradients and optimizer state each phase of a step touches: seen, operation by operation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.meter.labels import Labels
from memlab.record.transfer import GROUPS
from memlab.upstream.patching import patched
from memlab.vocabulary import PHASES

_FUSED_KERNELS = "transformer_engine.pytorch.optimizers.multi_tensor_apply"


class GroupUse(TorchDispatchMode):
    """Notes, in `watching`, which groups' storages are among the arguments of each operation."""

    def __init__(self, labels: Labels, groups: Mapping[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self._labels = labels
        self._group_of = {
            tensor.untyped_storage()._cdata: group for group, tensors in groups.items() for tensor in tensors
        }
        self._used: dict[str, set[str]] = {}

    def by_phase(self) -> dict[str, tuple[str, ...]]:
        """Returns phase to the groups that it touched, both in their usual order."""
        used = {phase: self._used[phase] for phase in PHASES if phase in self._used}
        return {phase: tuple(group for group in GROUPS if group in groups) for phase, groups in used.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view names a storage and reads nothing of it.
        if not func.is_view:
            self._see((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _see(self, arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                group = self._group_of.get(leaf.untyped_storage()._cdata)
                if group is not None:
                    self._used.setdefault(PHASES[self._labels.phase], set()).add(group)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what the block touches."""
        with self, _seeing_fused_kernels(self._see):
            yield


@contextmanager
def _seeing_fused_kernels(see: Callable[[Any], None]) -> Iterator[None]:
    # The gradients' norm, their clipping and Adam are kernels over lists of tensors, of which torch's dispatcher hears
    # nothing (transformer_engine/pytorch/optimizers/multi_tensor_apply.py, 2.12.0).
    engine = sys.modules.get(_FUSED_KERNELS)
    if engine is None:
        yield
        return
    apply = engine.MultiTensorApply.__call__

    def apply_seen(applier: Any, kernel: Any, overflow: Any, tensor_lists: Any, *args: Any) -> Any:
        see(tensor_lists)
        return apply(applier, kernel, overflow, tensor_lists, *args)

    with patched({f"{_FUSED_KERNELS}.MultiTensorApply.__call__": apply_seen}):
        yield
