"""Context parallelism by torch's ``context_parallel``, as NeMo Automodel uses it: ranks share each sequence.

Each rank has one chunk from the front of a sequence and one from the back. Keys and values of all ranks are gathered,
and what a rank attends to on each of them is merged in fp32 (``components/distributed/context_parallel/utils.py``,
36044ad3; ``torch/distributed/tensor/experimental/_context_parallel/_attention.py``, torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab.config.scenario import Scenario
from memlab.engines.attention.flash_attention import backward_buffers
from memlab.engines.attention.kernel import attend, attend_backward, new_random_state
from memlab.engines.attention.packed_sequences import chunks_of_rank
from memlab.meter.labels import one_kernel


def mesh_of(scenario: Scenario, device: str) -> Any:
    """Returns the mesh of the ranks that share a sequence; None if there is one rank."""
    layout = scenario.layout
    ranks, tensor = layout.context_parallel_size, layout.tensor_model_parallel_size
    if ranks == 1:
        return None
    shape = (layout.data_parallel_size, ranks, tensor)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "cp", "tp"))["cp"]


def own_part(inputs: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Returns the rank's part of a batch, with positions and the group of the ranks, where there is no GPU."""
    tokens = inputs["input_ids"]
    positions = torch.arange(tokens.shape[1], device="cpu").unsqueeze(0).cuda()
    whole = inputs | {"position_ids": positions}
    ranks, rank = mesh.size(), mesh.get_local_rank()
    own = {name: chunks_of_rank(tensor, ranks, rank, 1) for name, tensor in whole.items()}
    return own | {"context_parallel_group": mesh.get_group()}


@contextmanager
def sharded_by_torch(module: Any, inputs: dict[str, Any], mesh: Any) -> Iterator[dict[str, Any]]:
    """Has torch shard a batch and attend over the ranks, for the block, on GPUs; yields the rank's part."""

    def without_mask(_: Any, args: Any, named: dict[str, Any]) -> Any:
        return args, named | {"attention_mask": None, "is_causal": True}

    own = {name: tensor.clone() for name, tensor in inputs.items()}
    own["position_ids"] = torch.arange(own["input_ids"].shape[1], device="cuda").unsqueeze(0)
    hooks = [
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True, prepend=True)
        for layer in module.model.layers
    ]
    buffers = list(own.values())
    sharded = context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers[:-1])
    )
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), sharded:
            yield own
    finally:
        for hook in hooks:
            hook.remove()


def attend_over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, group: Any
) -> torch.Tensor:
    """Attends causally to the tokens of all ranks of a group; shapes are [batch, heads, own tokens, channels]."""
    return _RingAttention.apply(query, key, value, scale, group)


class _RingAttention(torch.autograd.Function):
    """torch's own loop over the ranks, with a kernel for each of them as on a GPU."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, scale: float, group: Any) -> torch.Tensor:
        output, log_sums, *_ = ring._templated_ring_attention(
            group, 2, _kernel, query, key, value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, log_sums, new_random_state(query))
        ctx.scale, ctx.group = scale, group
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, output, log_sums, _ = ctx.saved_tensors
        saved = query, key, value, output, log_sums
        of_inputs = ring._templated_ring_attention_backward(
            ctx.group, 2, _kernel_backward, grads[0], "grad_out", *saved, is_causal=True, scale=ctx.scale
        )
        return *of_inputs[:3], None, None


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(2, 0, 1, 3)


@one_kernel()
def _kernel(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    first = _tokens_first(query), _tokens_first(key), _tokens_first(value)
    output, log_sums = attend(*first, scale, causal=is_causal)
    return torch.empty_like(query).copy_(output.permute(1, 2, 0, 3)), log_sums


def _kernel_backward(
    *, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad_out: Any, is_causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    results = tuple(torch.empty_like(each) for each in (query, key, value))
    buffers = backward_buffers(query.transpose(1, 2), key.transpose(1, 2), query.shape[2])
    _write_gradients(results, (grad_out, query, key, value, out), logsumexp, is_causal, scale)
    del buffers
    return results


@one_kernel()
def _write_gradients(results: Any, tensors: Any, log_sums: Any, is_causal: bool, scale: float) -> None:
    grad, query, key, value, output = map(_tokens_first, tensors)
    parts = attend_backward(grad.contiguous(), query, key, value, output, log_sums, scale, causal=is_causal)
    for result, part in zip(results, parts, strict=True):
        result.copy_(part.permute(1, 2, 0, 3))
