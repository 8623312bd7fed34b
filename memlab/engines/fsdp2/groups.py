"""What FSDP2 keeps from step to step: the rank's shards, their gradients, and Adam's moments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from memlab.engines.fsdp2.sharded_model import ShardedModel
from memlab.engines.protocol import HeldTensor


def whole_storage(tensor: Any) -> torch.Tensor:
    """Returns all of a shard's storage: the gradients of a layer are views of what its reduce-scatter has written."""
    local = _local(tensor).detach()
    return torch.as_strided(local, (local.untyped_storage().nbytes() // local.element_size(),), (1,), 0)


def _local(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's own part; Transformer Engine's Adam has that itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedGroups:
    """Implements `memlab.engines.protocol.Groups`."""

    def __init__(self, live: ShardedModel) -> None:
        self._live = live

    def parameters(self) -> list[torch.Tensor]:
        """Returns the rank's shards."""
        # With FSDP1's ``use_orig_params``, several are parts of one storage.
        whole = [whole_storage(each) for each in self._live.parameters]
        return [*{each.untyped_storage()._cdata: each for each in whole}.values()]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of the shards."""
        return [whole_storage(each) for each in self._live.gradients()]

    def optimizer_state(self) -> list[torch.Tensor]:
        """Returns Adam's moments, and the main parameters that Transformer Engine's may keep."""
        states = self._live.optimizer.state.values() if self._live.optimizer is not None else ()
        names = ("exp_avg", "exp_avg_sq", "master_param")
        return [whole_storage(state[name]) for state in states for name in names if name in state]

    def drop_copied_gradients(self) -> int:
        """Drops nothing: no gradient is copied."""
        return 0

    def gather(self) -> None:
        """Does nothing: each rank updates all of its own shard."""


def holdings(live: ShardedModel) -> Iterator[HeldTensor]:
    """Yields what FSDP2's own objects and the optimizer refer to."""
    for shard, gradient in live.shards():
        yield HeldTensor("parameters", "shards", shard)
        if gradient is not None:
            yield HeldTensor("gradients", "the shards' .grad", whole_storage(gradient))
    for state in live.optimizer.state.values() if live.optimizer is not None else ():
        for name, value in state.items():
            if value.dim():
                yield HeldTensor("optimizer state", name, _local(value))
