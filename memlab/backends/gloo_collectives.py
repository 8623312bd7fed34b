"""gloo's collectives in the place of NCCL's: on copies, so that nothing that gloo holds counts as device memory.

gloo reduces in buffers of its own, which NCCL does not have on the device. And gloo's threads let go of a collective's
tensors some time after the collective has ended, so that a tensor would be freed a little later in one step than in
another. Receiving needs no copy: it holds nothing but the caller's tensor, as long as the caller waits. What is sent is
copied, because megatron-core before 0.18 frees what an interleaved stage sends before the send has ended
(`deallocate_pipeline_outputs` in pipeline_parallel/schedules.py; Megatron-LM PR #4047 waits): gloo would read freed
memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_leaves, tree_map_only

from memlab.meter.observers import EagerMode

_RECEIVING = {"c10d::recv_", "c10d::recv_any_source_"}
_OF_LISTS = {"c10d::allgather_", "c10d::reduce_scatter_"}
"""Collectives whose parts may have different numbers of rows, which NCCL takes and gloo refuses: experts with a tensor
size gather the tokens that were routed to each rank. The copies are as long as the longest part."""


class CollectivesOnCopies(EagerMode):
    """Runs every collective to its end on copies; who waits for it finds it done.

    Enter it before the meter, which then sees neither the copies nor what gloo does with them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or func._schema.name in _RECEIVING:
            return func(*args, **(kwargs or {}))
        if func._schema.name == "c10d::send":
            copies = [tensor.detach().clone() for tensor in args[0]]
            return func(copies, *args[1:], **(kwargs or {}))  # the work keeps them, and the schedule waits for it
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        num_rows = _most_rows(args) if func._schema.name in _OF_LISTS else 0

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().clone()
            if num_rows and num_rows > len(tensor):
                copy = torch.cat((copy, copy.new_zeros(num_rows - len(tensor), *tensor.shape[1:])))
            pairs.append((tensor, copy))
            return copy

        outputs = tree_map_only(torch.Tensor, copy_of, args[0])  # the first argument of each is what it writes
        written = list(pairs)
        result = func(outputs, *tree_map_only(torch.Tensor, copy_of, args[1:]), **(kwargs or {}))
        (result[-1] if isinstance(result, tuple) else result).wait()
        for tensor, copy in written:
            tensor.data.copy_(
                copy[: len(tensor)] if num_rows else copy
            )  # through .data, so that autograd sees no change
        done = FakeWork().boxed()
        return (args[0], done) if isinstance(result, tuple) else done


def _most_rows(args: Any) -> int:
    rows = [len(tensor) for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor) and tensor.dim()]
    return max(rows) if len(set(rows)) > 1 else 0
