"""Collectives on fake tensors: kernels for torch's meta device, on which the ``fake`` process group has none.

The group answers for the other ranks at once, and allocates nothing, like NCCL where Megatron brings the buffers. Lists
of tensors of one size are the exception (`gather`, `reduce_and_scatter`). What a rank would send is counted in
`memlab.meter.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state

from memlab.meter.collectives import sent_bytes
from memlab.meter.observers import tensors_in

_gather, _reduce_and_scatter = torch.distributed.all_gather, torch.distributed.reduce_scatter

_Shares = Callable[[Any, Any], float]
"""Takes a collective's arguments and its group, and returns the bytes that the group's own rank sends."""


def _num_bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_in((tensors,)))


def _of_all_to_all(args: Any, group: Any) -> float:
    sent, splits = _num_bytes(args[1]), args[4]
    own = splits[group.rank()] / max(1, sum(splits)) if splits else 1 / group.size()
    return sent * (1 - own)


_SENT: dict[str, tuple[str, _Shares]] = {
    **dict.fromkeys(
        ("allreduce_", "allreduce_coalesced_"),
        ("all-reduce", lambda args, group: 2 * _num_bytes(args[0]) * (group.size() - 1) / group.size()),
    ),
    "broadcast_": ("broadcast", lambda args, group: _num_bytes(args[0]) * (group.size() > 1)),
    **dict.fromkeys(
        ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
        ("all-gather", lambda args, group: _num_bytes(args[1]) * (group.size() - 1)),
    ),
    **dict.fromkeys(
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        ("reduce-scatter", lambda args, group: _num_bytes(args[0]) * (group.size() - 1)),
    ),
    "alltoall_": ("all-to-all", lambda args, group: _num_bytes(args[1]) * (group.size() - 1) / group.size()),
    "alltoall_base_": ("all-to-all", _of_all_to_all),
    "send": ("send", lambda args, _: _num_bytes(args[0])),
    "recv_": ("send", lambda args, _: 0),  # counted by the rank that sends
}
"""The kind of each collective, and the bytes that a rank sends in it. Those are the data that a ring of the group's
ranks passes on, by which nccl-tests computes its bus bandwidth (doc/PERFORMANCE.md of NVIDIA/nccl-tests)."""


@contextmanager
def collectives_on_fake_tensors() -> Iterator[None]:
    """Registers the kernels for the block."""
    kernels = torch.library.Library("c10d", "IMPL", "Meta")
    try:
        for name in _SENT:
            # Builds of torch with CUDA have kernels of their own here (seen in 2.11), which do not know the fake group.
            kernels.impl(name, _kernel(name), allow_override=True)
        yield
    finally:
        kernels._destroy()


@cache
def _kernel(name: str) -> Any:
    operation = getattr(torch.ops.c10d, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        _count(name, args)
        if name == "alltoall_base_":
            args = (*args[:3], [], [], *args[5:])  # how the rows are split is checked against the tensors
        # With empty tensors in place of the fake ones: only the Work that the group returns is needed.
        return operation(*_emptied(args), **kwargs)

    return run


def _emptied(values: Any) -> list[Any]:
    """Returns a collective's arguments with an empty tensor for each tensor, also in lists of lists."""
    return [
        _emptied(value)
        if isinstance(value, (list, tuple))
        else torch.empty(0, device="cpu")
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


def _count(name: str, args: tuple[Any, ...]) -> None:
    group = next(each for each in args if isinstance(each, torch.ScriptObject))
    kind, sent = _SENT[name]
    sent_bytes[kind] += round(sent(args, torch.distributed.ProcessGroup.unbox(group)))


def gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
    """Replaces ``torch.distributed.all_gather`` on a simulated GPU; NCCL writes into a copy of equal outputs."""
    flat = _flat_copy(outputs, group)
    work = _gather(outputs, own, group, **kwargs)
    del flat
    return work


def reduce_and_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    **kwargs: Any,
) -> Any:
    """Replaces ``torch.distributed.reduce_scatter`` on a simulated GPU; NCCL reads from a copy of equal inputs."""
    flat = _flat_copy(inputs, group)
    work = _reduce_and_scatter(output, inputs, op, group, **kwargs)
    del flat
    return work


def _flat_copy(tensors: list[torch.Tensor], group: Any) -> torch.Tensor | None:
    """Returns what ``ProcessGroupNCCL`` makes of a list of tensors that have one size (``newLikeFlat``, torch 2.11).

    Tensors of several sizes are sent one by one, without a copy. How many rows of the experts' inputs each tensor
    parallel rank has depends on the routers if experts are spread; then the sizes differ, in practice.
    """
    has_one_size = len({tensor.numel() for tensor in tensors}) == 1
    if not has_one_size or (_are_experts_spread() and group is parallel_state.get_expert_tensor_parallel_group()):
        return None
    return tensors[0].new_empty(len(tensors) * tensors[0].numel())


def _are_experts_spread() -> bool:
    return parallel_state.is_initialized() and parallel_state.get_expert_model_parallel_world_size() > 1


def exchange(operations: list[Any]) -> list[Any]:
    """Replaces ``torch.distributed.batch_isend_irecv``, which looks up a backend for the tensors' device."""
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
