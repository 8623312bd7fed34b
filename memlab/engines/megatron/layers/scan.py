"""The kernels of Mamba 2 in torch: a short convolution, a scan that carries a state along the sequence, and a norm.

They save and allocate what mamba_ssm 2.2.6 to 2.3.2 does (``MambaSplitConv1dScanCombinedFn`` in
``ops/triton/ssd_combined.py``, ``LayerNormFn`` in ``ops/triton/layernorm_gated.py``), tensor by tensor, in its order
and as long as its variables have them. The values are computed over all pairs of tokens; what the kernel computes on
the way is allocated, and has no values. causal_conv1d's kernels allocate nothing of their own (1.5.3).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from memlab.meter.labels import one_kernel, timed_at_first_call

_SMS = 132
"""Multiprocessors of an H100 or H200, by which the kernels divide the heads of a group."""
_BYTES_OF_TIMING = 2**28
"""What Triton overwrites between two variants of a kernel (`kernel_timing`)."""
_LEAST_BLOCK = 32
_LEAST_BLOCK_OF_STATES = 64


class Sizes(NamedTuple):
    """Of a rank's part of a layer."""

    heads: int
    channels: int
    """Of a head."""
    groups: int
    states: int
    """Numbers of a state for each channel."""
    chunk: int
    """Tokens between two states that the kernel writes."""

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.channels

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.groups * self.states

    def splits(self, batch: int, chunks: int) -> int:
        """Returns in how many parts the kernels add up what the heads of a group have in common."""
        of_group = self.heads // self.groups
        of_program = max(min(math.ceil(batch * chunks * self.heads / _SMS), of_group), 1)
        return -(-of_group // of_program)


class SplitConvScan(torch.autograd.Function):
    """Convolution and scan of one projection [batch, tokens, columns]; saves it and the scan's output before the gate.

    The columns are gates, what is convolved and a step of time for each head. Backward computes all else again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor,
        time_bias: torch.Tensor,
        decay: torch.Tensor,
        skip: torch.Tensor,
        sizes: Sizes,
    ) -> torch.Tensor:
        _time_kernels("forward", projected, sizes)
        batch, tokens, _ = projected.shape
        convolved = projected.new_empty(batch, tokens, sizes.convolved)
        _steps, _sums = _steps_of_time(projected, sizes)
        of_chunks = _states(projected, sizes, torch.float32)
        passed, _last = _states(projected, sizes, projected.dtype), _last_state(projected, sizes)
        del of_chunks
        _products = _products_of_groups(projected, sizes)
        output, before_gate = (projected.new_empty(batch, tokens, sizes.width) for _ in range(2))
        del convolved, passed
        weights = conv_weight, conv_bias, time_bias, decay, skip
        if not projected.is_meta:
            _compute(output, before_gate, projected, weights, sizes)
        ctx.save_for_backward(projected, *weights, before_gate)
        ctx.sizes = sizes
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        projected, conv_weight, conv_bias, time_bias, decay, skip, before_gate = ctx.saved_tensors
        sizes: Sizes = ctx.sizes
        _time_kernels("backward", projected, sizes)
        batch, tokens, _ = projected.shape
        of_convolved = [projected.new_empty(batch, tokens, sizes.convolved)]
        grad_projected = torch.empty_like(projected)
        of_convolved.append(projected.new_empty(batch, tokens, sizes.convolved))
        small = _backward_of_scan(projected, before_gate, skip, sizes)
        for weight in (conv_weight, conv_bias):
            in_fp32 = torch.zeros_like(weight, dtype=torch.float32)
            small.append(in_fp32.type_as(weight))
            del in_fp32
        grad_skip, grad_time_bias, grad_decay, *grads_of_conv = small
        gradients = [grad_projected, *grads_of_conv, grad_time_bias, grad_decay, grad_skip]
        if not projected.is_meta:
            _compute_gradients(gradients, grads[0], (projected, conv_weight, conv_bias, time_bias, decay, skip), sizes)
        return *gradients, None


def _backward_of_scan(
    projected: torch.Tensor, before_gate: torch.Tensor, skip: torch.Tensor, sizes: Sizes
) -> list[torch.Tensor]:
    """Allocates what ``_mamba_chunk_scan_combined_bwd`` does; returns the gradients of D, of dt_bias and of A."""
    batch, tokens, _ = projected.shape
    chunks = -(-tokens // sizes.chunk)
    splits, of_heads = sizes.splits(batch, chunks), (batch, sizes.heads, chunks)

    def fp32(*shape: int) -> torch.Tensor:
        return projected.new_empty(shape, dtype=torch.float32)

    _copied_steps = projected.new_empty(batch, tokens, sizes.heads)
    _steps, _sums = _steps_of_time(projected, sizes)
    _products = _products_of_groups(projected, sizes)
    states = _states(projected, sizes, torch.float32)
    passed, _last = _states(projected, sizes, torch.float32), _last_state(projected, sizes)
    states = passed
    del passed
    grad_skip = fp32(-(-sizes.chunk // _LEAST_BLOCK), batch, chunks, sizes.heads, 1)
    _grad_before_gate = torch.empty_like(before_gate)
    grad_skip = fp32(sizes.heads, 1).to(skip.dtype).squeeze(-1)
    grad_states = _states(projected, sizes, torch.float32)
    small_grad_states, small_states = (_states(projected, sizes, projected.dtype) for _ in range(2))
    of_chunks = fp32(*of_heads, -(-sizes.channels * sizes.states // _LEAST_BLOCK_OF_STATES))
    of_chunks = fp32(*of_heads)
    states, grad_states = small_states, small_grad_states
    del small_states, small_grad_states
    of_skip = fp32(-(-sizes.chunk // _LEAST_BLOCK), batch, chunks, sizes.heads, 1)
    _grad_steps = fp32(*of_heads, sizes.chunk)
    of_skip = fp32(sizes.heads, 1)
    of_skip = fp32(sizes.heads).to(skip.dtype)
    sums = [fp32(*of_heads, sizes.chunk)]
    written = _added_up(fp32(batch, tokens, splits, sizes.groups, sizes.states))
    sums.append(fp32(*of_heads, sizes.chunk))
    read = _added_up(fp32(batch, tokens, splits, sizes.groups, sizes.states))
    of_pairs = _added_up(fp32(batch, chunks, splits, sizes.groups, sizes.chunk, sizes.chunk))
    sums.append(sums[-1].flip(-1).cumsum(-1).flip(-1))
    in_blocks = fp32(*of_heads, -(-sizes.chunk // _LEAST_BLOCK), sizes.chunk)
    sums.append(fp32(*of_heads, sizes.chunk))
    del in_blocks
    fp32(*of_heads, sizes.chunk)  # the sum of two of these, before it is added to the third
    grad_time_bias, grad_decay = fp32(sizes.heads), fp32(sizes.heads)
    del states, grad_states, of_chunks, of_skip, written, read, of_pairs
    return [grad_skip, grad_time_bias, grad_decay]


def _added_up(parts: torch.Tensor) -> torch.Tensor:
    """Returns room for the sum over the parts of the heads, which is made beside them."""
    return parts.new_empty((*parts.shape[:2], *parts.shape[3:]))


def _steps_of_time(projected: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns room for the steps of time of each head, and for the sums of the decays within chunks."""
    batch, tokens, _ = projected.shape
    shape = batch, sizes.heads, -(-tokens // sizes.chunk), sizes.chunk
    return projected.new_empty(shape, dtype=torch.float32), projected.new_empty(shape, dtype=torch.float32)


def _states(projected: torch.Tensor, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """Returns room for the states of all chunks."""
    batch, tokens, _ = projected.shape
    shape = batch, -(-tokens // sizes.chunk), sizes.heads, sizes.channels, sizes.states
    return projected.new_empty(shape, dtype=dtype)


def _last_state(projected: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    return projected.new_empty((len(projected), sizes.width, sizes.states), dtype=torch.float32)


def _products_of_groups(projected: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Returns room for the products of what the tokens of a chunk write and read, in fp32."""
    batch, tokens, _ = projected.shape
    shape = batch, -(-tokens // sizes.chunk), sizes.groups, sizes.chunk, sizes.chunk
    return projected.new_empty(shape, dtype=torch.float32)


@one_kernel()
def _compute(
    output: torch.Tensor,
    before_gate: torch.Tensor,
    projected: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    sizes: Sizes,
) -> None:
    scanned, gates = scan(sizes, projected.detach(), *(weight.detach() for weight in weights))
    before_gate.copy_(scanned)
    output.copy_(scanned * torch.nn.functional.silu(gates))


@one_kernel()
def _compute_gradients(
    gradients: list[torch.Tensor], grad: torch.Tensor, inputs: tuple[torch.Tensor, ...], sizes: Sizes
) -> None:
    with torch.enable_grad():
        leaves = [each.detach().float().requires_grad_() for each in inputs]
        scanned, gates = scan(sizes, *leaves)
        found = torch.autograd.grad(scanned * torch.nn.functional.silu(gates), leaves, grad.float())
    for own, value in zip(gradients, found, strict=True):
        own.copy_(value.view(own.shape))


def scan(
    sizes: Sizes,
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    time_bias: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes Mamba 2 over all pairs of tokens (https://arxiv.org/abs/2405.21060, equation 16), in fp32.

    Args:
        projected: Shape [batch, tokens, columns].
        conv_weight: Shape [channels of the convolution, tokens that it sees].
        conv_bias: Shape [channels of the convolution].
        time_bias: What is added to the steps of time, before their softplus. Shape [heads].
        decay: Below 0. Shape [heads].
        skip: What a channel gets of its own input. Shape [heads].

    Returns:
        The scan's output and the gates before their SiLU, both [batch, tokens, channels of all heads].
    """
    tokens = projected.shape[1]
    gates, convolved, steps = projected.float().split([sizes.width, sizes.convolved, sizes.heads], dim=-1)
    seen = conv_weight.shape[1]
    padded = torch.nn.functional.pad(convolved.transpose(1, 2), (seen - 1, 0))
    kernel = conv_weight.float().unsqueeze(1)
    convolved = torch.nn.functional.conv1d(padded, kernel, conv_bias.float(), groups=sizes.convolved)
    convolved = torch.nn.functional.silu(convolved).transpose(1, 2)
    of_groups = sizes.groups * sizes.states
    values, written, read = convolved.split([sizes.width, of_groups, of_groups], dim=-1)
    values = values.unflatten(-1, (sizes.heads, sizes.channels))
    written, read = (
        each.unflatten(-1, (sizes.groups, sizes.states)).repeat_interleave(sizes.heads // sizes.groups, dim=2)
        for each in (written, read)
    )
    steps = torch.nn.functional.softplus(steps + time_bias.float())
    sums = (steps * decay.float()).cumsum(1).transpose(1, 2)
    is_later = sums.new_ones(tokens, tokens, dtype=torch.bool).triu(1)
    left = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(is_later, -torch.inf).exp()
    pairs = torch.einsum("bthn,buhn->bhtu", read, written) * left * steps.transpose(1, 2).unsqueeze(-2)
    scanned = torch.einsum("bhtu,buhp->bthp", pairs, values) + skip.float()[:, None] * values
    return scanned.flatten(2), gates


class GroupedNorm(torch.autograd.Function):
    """RMSNorm of each group of channels by itself; saves its input, the weight and a reciprocal of each group."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, groups: int) -> torch.Tensor:
        output, reciprocals = _normalised(inputs, weight, epsilon, groups)
        ctx.save_for_backward(inputs, weight, reciprocals)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, reciprocals = ctx.saved_tensors
        groups, width = len(reciprocals) // (inputs.numel() // len(weight)), len(weight)
        warps = min(max(min(_MOST_OF_A_BLOCK, 2 ** math.ceil(math.log2(width // groups))) // 256, 1), 8)
        grad_inputs = torch.empty_like(inputs)
        blocks = math.ceil(_SMS * math.ceil(4 / warps) / groups)
        in_parts = weight.new_empty((blocks, width), dtype=torch.float32)
        grad_weight = torch.empty(width, dtype=torch.float32, device=weight.device).to(weight.dtype)
        del in_parts
        if not inputs.is_meta:
            _gradients_of_norm(grad_inputs, grad_weight, grads[0], inputs, weight, reciprocals)
        return grad_inputs, grad_weight, None, None


_MOST_OF_A_BLOCK = 65536 // 2


@one_kernel()
def _normalised(
    inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    in_groups = inputs.float().unflatten(-1, (groups, -1))
    reciprocals = in_groups.pow(2).mean(-1).add(epsilon).rsqrt()
    output = (in_groups * reciprocals.unsqueeze(-1)).flatten(-2) * weight.float()
    return output.to(inputs.dtype), reciprocals.flatten()


@one_kernel()
def _gradients_of_norm(
    grad_inputs: torch.Tensor,
    grad_weight: torch.Tensor,
    grad: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    reciprocals: torch.Tensor,
) -> None:
    of_rows = reciprocals.view(*inputs.shape[:-1], -1, 1)
    groups = of_rows.shape[-2]
    normalised = inputs.float().unflatten(-1, (groups, -1)) * of_rows
    scaled = (grad.float() * weight.float()).unflatten(-1, (groups, -1))
    of_inputs = (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) * of_rows
    grad_inputs.copy_(of_inputs.flatten(-2))
    grad_weight.copy_((grad.float() * normalised.flatten(-2)).flatten(0, -2).sum(0))


def _time_kernels(direction: str, projected: torch.Tensor, sizes: Sizes) -> None:
    """Takes and frees what Triton times the variants of kernels with, if they are called first."""
    if projected.is_meta:
        key = "mamba_ssm", direction, sizes.chunk, sizes.channels, sizes.states
        timed_at_first_call(key, _BYTES_OF_TIMING)
