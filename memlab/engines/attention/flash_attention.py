"""Attention of the package flash-attn, version 2, as Transformer Engine calls it.

The buffers are those of ``mha_fwd`` and ``mha_bwd`` in flash-attn's ``csrc/flash_attn/flash_api.cpp`` (2.8) and of
``FlashAttention`` in Transformer Engine's ``attention/dot_product_attention/backends.py`` (2.12.0). Allocated peaks
of steps with flash-attn 2.8.3 on an H200 were within 0.012 % of it (`labs/RESULTS.md`). Where the package flash-attn-3
is installed, Transformer Engine calls that one on a Hopper GPU, and its buffers are others. For fewer than about 100
blocks of 64 queries (sequences x heads x blocks) flash-attn splits the keys and allocates more than is allocated
here. Where ranks share sequences, the rings of `context_parallel` and `packed_context_parallel` call it tile by tile,
and `all_to_all_attention` with whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.engines.attention import context_parallel, packed_context_parallel
from memlab.engines.attention.all_to_all_attention import AllToAllAttention
from memlab.engines.attention.kernel import (
    Dropped,
    attend,
    attend_backward,
    attend_each,
    attend_each_backward,
    new_random_state,
)
from memlab.engines.attention.packed_sequences import lengths_of
from memlab.engines.attention.qkv_layout import in_known_layout
from memlab.meter.labels import one_kernel

_QUERIES_PER_BLOCK = 128
_CHANNELS_PER_BLOCK = 32


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    drop: float = 0.0,
    group: Any = None,
    *,
    exchanges_heads: bool = False,
) -> torch.Tensor:
    """Attends causally from [sequence, batch, heads, channels]; key and value may have fewer heads.

    Args:
        query: Of this rank's tokens.
        drop: The share of probabilities that dropout drops, which several ranks do not take.
        group: The ranks that share the sequence; None is this one alone.
        exchanges_heads: Whether these ranks exchange heads, and do not pass keys and values around.

    Returns:
        Shape [sequence, batch, heads * channels].
    """
    copied = in_known_layout(query, key, value)
    # Sequences come first in flash-attn. One sequence needs no copy for that.
    rows = (tensor.transpose(0, 1).contiguous() for tensor in copied)
    if group is None:
        output = _FlashAttention.apply(*rows, scale, drop)
    elif exchanges_heads:
        output = AllToAllAttention.apply(*rows, scale, group, None, None, _OF_RANKS)
    else:
        output = context_parallel.RingAttention.apply(*rows, scale, group, _OF_RANKS)
    return output.flatten(2).transpose(0, 1).contiguous()


Run = Callable[[Callable[[], tuple[torch.Tensor, ...]]], tuple[torch.Tensor, ...]]
"""Runs a kernel, given as a function that returns its results, or returns what it has returned before."""
Allocate = Callable[[torch.Tensor, torch.Tensor, int], list[torch.Tensor]]
"""As `backward_buffers`."""


def _at_once(compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return compute()


def flash_attention_of_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    run: Run = _at_once,
    *,
    is_causal: bool = True,
    allocate: Allocate | None = None,
) -> torch.Tensor:
    """Attends as ``scaled_dot_product_attention`` does with torch's own copy of flash-attn.

    It saves the tensors that it is given: none is copied, and a view keeps what it is a view of (torch 2.11,
    ``aten/src/ATen/native/transformers/cuda/attention.cu``). Its output lies in memory as the query does.

    Args:
        query: Shape [batch, heads, tokens, channels].
        key: The same, of as many or fewer heads.
        run: Runs the kernel of forward.
        is_causal: Whether a token attends to those before it only.
        allocate: Returns what the kernel of backward allocates and frees in the place of `backward_buffers`.

    Returns:
        Shape [batch, tokens, heads, channels].
    """
    tensors = (each.transpose(1, 2) for each in (query, key, value))
    output: torch.Tensor = _FlashAttention.apply(*tensors, scale, 0.0, run, is_causal, allocate)
    return output.contiguous()


def packed_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    ends: torch.Tensor,
    group: Any = None,
) -> torch.Tensor:
    """Attends each packed sequence by itself, from [tokens, heads, channels] (``mha_varlen_fwd``, ``mha_varlen_bwd``).

    Args:
        query: Shape [tokens, heads, channels].
        key: The same, of as many or fewer heads.
        ends: Where the sequences end, int32 [sequences + 1] with a 0 in front.
        group: The ranks that share each sequence; None is this one alone.

    Returns:
        Shape [tokens, heads * channels].
    """
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    if group is None:
        return packed_flash_attention_of_views(query, key, value, scale, ends).flatten(1)
    ring = packed_context_parallel.PackedRingAttention
    return ring.apply(query, key, value, scale, ends, group, _OF_A_PACKED_RING)


def packed_flash_attention_of_views(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    ends: torch.Tensor,
    run: Run = _at_once,
) -> torch.Tensor:
    """Attends as `packed_flash_attention`, and copies nothing: a view that is saved keeps what it is a view of.

    Args:
        query: As `packed_flash_attention`, like the following ones.
        run: Runs the kernel of forward.

    Returns:
        Shape [tokens, heads, channels].
    """
    return _PackedFlashAttention.apply(query, key, value, scale, ends, run)


class _PackedFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        ends: torch.Tensor,
        run: Run,
    ) -> torch.Tensor:
        ctx.lengths = lengths_of(ends)
        output, log_sum_exp, random_state = run(lambda: _attend_each(query, key, value, scale, ctx.lengths))
        ctx.save_for_backward(query, key, value, output, log_sum_exp, random_state, ends)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp, _, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        parts = _attend_each_backward(grad, query, key, value, output, log_sum_exp, ctx.scale, ctx.lengths)
        return *parts, None, None, None


class _FlashAttention(torch.autograd.Function):
    """``FlashAttnFunc``; shapes are [batch, sequence, heads, channels].

    Saves query, key, value, its output, the log-sum-exp of each row (fp32) and the state of dropout's random numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        drop: float,
        run: Run = _at_once,
        is_causal: bool = True,
        allocate: Allocate | None = None,
    ) -> torch.Tensor:
        def compute() -> tuple[torch.Tensor, ...]:
            random_state = new_random_state(query)
            return *_attend(query, key, value, scale, Dropped.of(drop, random_state), causal=is_causal), random_state

        output, log_sum_exp, random_state = run(compute)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, random_state)
        ctx.scale, ctx.drop, ctx.is_causal = scale, drop, is_causal
        ctx.allocate = allocate
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp, random_state = ctx.saved_tensors
        grad = grads[0].contiguous()
        dropped = Dropped.of(ctx.drop, random_state)
        saved = (grad, query, key, value, output, log_sum_exp)
        options = {"causal": ctx.is_causal, "allocate": ctx.allocate}
        parts = _attend_backward(*saved, ctx.scale, dropped, **options)
        return *parts, None, None, None, None, None


def _attend_in_a_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    random_state = query.new_empty(2, dtype=torch.int64)
    return *_attend(query, key, value, scale, causal=causal), random_state


@one_kernel()
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropped: Dropped | None = None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, log_sum_exp = attend(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), scale, dropped, causal=causal
    )
    output = output.transpose(0, 1)
    if query.is_contiguous():
        return output.contiguous(), log_sum_exp
    return torch.empty_like(query).copy_(output), log_sum_exp


def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    dropped: Dropped | None = None,
    *,
    causal: bool = True,
    allocate: Allocate | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key and value."""
    results = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    rows = -(-query.shape[1] // _QUERIES_PER_BLOCK) * _QUERIES_PER_BLOCK
    buffers = (allocate or backward_buffers)(query, key, rows)
    with one_kernel():
        grad, query, key, value, output = (tensor.transpose(0, 1) for tensor in (grad, query, key, value, output))
        parts = attend_backward(grad, query, key, value, output, log_sum_exp, scale, dropped, causal=causal)
        for result, part in zip(results, parts, strict=True):
            result.copy_(part.transpose(0, 1))
        del parts, part  # within the kernel, as what it frees
    del buffers
    return results


def _attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *lengths: list[int], causal: bool = True
) -> tuple[torch.Tensor, ...]:
    output, log_sum_exp = attend_each(query, key, value, scale, *lengths, causal=causal)
    return output, log_sum_exp, query.new_empty(2, dtype=torch.int64)


def _attend_each_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    *lengths: list[int],
    causal: bool = True,
) -> tuple[torch.Tensor, ...]:
    # Each sequence gets a block of rows more, where it may not be a multiple of one.
    rows = query.shape[0] + _QUERIES_PER_BLOCK * len(lengths[0])
    buffers = backward_buffers(query.unsqueeze(0), key.unsqueeze(0), rows)
    parts = attend_each_backward(grad, query, key, value, output, log_sum_exp, scale, *lengths, causal=causal)
    del buffers
    return parts


def backward_buffers(query: torch.Tensor, key: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Returns what ``mha_bwd`` allocates and frees, for the queries of a sequence in so many rows.

    These are sums of rows, the query's gradient in fp32, and with grouped queries the gradients of key and value for
    each head.
    """
    batch, _, heads, channels = query.shape
    columns = -(-channels // _CHANNELS_PER_BLOCK) * _CHANNELS_PER_BLOCK
    buffers = [
        query.new_empty(batch, heads, rows, dtype=torch.float32),
        query.new_empty(batch, rows, heads, columns, dtype=torch.float32),
    ]
    if key.shape[2] != heads:
        buffers += [key.new_empty(batch, key.shape[1], heads, channels) for _ in range(2)]
    return buffers


# Before Transformer Engine 2.15 the gradient of a micro-batch of several sequences was copied first.
_OF_RANKS = context_parallel.Kernel(_attend_in_a_ring, _attend_backward, sequence_dim=1, takes_strides=True)
_OF_A_PACKED_RING = packed_context_parallel.PackedKernel(_attend_each, _attend_each_backward, has_heads_first=True)
