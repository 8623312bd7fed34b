"""Collectives on fake tensors: a kernel for torch's meta device, where the ``fake`` process group has none.

The group answers for the other ranks at once, and allocates nothing, like NCCL where Megatron brings the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
)


def _on_nothing(name: str) -> Any:
    operation = getattr(torch.ops.c10d, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "alltoall_base_":
            args = (*args[:3], [], [], *args[5:])  # how the rows are split is checked against the tensors
        # Empty tensors in the place of fake ones: what is wanted is the Work that the group returns.
        return operation(*tree_map_only(torch.Tensor, lambda _: torch.empty(0, device="cpu"), args), **kwargs)

    return run


def exchange(operations: list[Any]) -> list[Any]:
    """Stands for ``torch.distributed.batch_isend_irecv``, which asks for the backend of the tensors' device."""
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]


_kernels = torch.library.Library("c10d", "IMPL", "Meta")
for _name in _COLLECTIVES:
    # Builds of torch with CUDA bring kernels of their own here (seen in 2.11), which know nothing of the fake group.
    _kernels.impl(_name, _on_nothing(_name), allow_override=True)
