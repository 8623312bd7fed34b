"""Collectives on fake tensors: kernels for torch's meta device, on which the ``fake`` process group has none.

The group answers for the other ranks at once, and allocates nothing, like NCCL where Megatron brings the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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


@contextmanager
def collectives_on_fake_tensors() -> Iterator[None]:
    """Registers the kernels for the block."""
    kernels = torch.library.Library("c10d", "IMPL", "Meta")
    try:
        for name in _COLLECTIVES:
            # Builds of torch with CUDA have kernels of their own here (seen in 2.11), which do not know the fake group.
            kernels.impl(name, _kernel(name), allow_override=True)
        yield
    finally:
        kernels._destroy()


@cache
def _kernel(name: str) -> Any:
    operation = getattr(torch.ops.c10d, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "alltoall_base_":
            args = (*args[:3], [], [], *args[5:])  # how the rows are split is checked against the tensors
        # With empty tensors in place of the fake ones: only the Work that the group returns is needed.
        return operation(*tree_map_only(torch.Tensor, lambda _: torch.empty(0, device="cpu"), args), **kwargs)

    return run


def exchange(operations: list[Any]) -> list[Any]:
    """Replaces ``torch.distributed.batch_isend_irecv``, which looks up a backend for the tensors' device."""
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
