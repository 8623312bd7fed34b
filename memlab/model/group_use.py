"""Which of parameters, gradients and optimizer state each phase of a step touches: seen, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.meter.labels import Labels
from memlab.movement import GROUPS
from memlab.timeline import PHASES


class GroupUse(TorchDispatchMode):
    """Notes, for the block, which groups' storages are among the arguments of each operation.

    Args:
        labels: Know the phase.
        groups: Group to its tensors.
    """

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
        for leaf in () if func.is_view else tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                group = self._group_of.get(leaf.untyped_storage()._cdata)
                if group is not None:
                    self._used.setdefault(PHASES[self._labels.phase], set()).add(group)
        return func(*args, **(kwargs or {}))
