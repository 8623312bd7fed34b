"""The kernels of gated delta net: what Megatron-Core calls of flash-linear-attention, and the gates that it compiles.

Each function saves for backward what the original saves, and takes in between what it takes, in the same order
(flash-linear-attention 0.4.2, which megatron-core 0.16.1 and 0.19.2 ask for: ``fla/ops/gated_delta_rule/chunk.py``,
``fla/ops/common``, ``fla/ops/utils`` and ``fla/modules/l2norm.py``). Values are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.engines.megatron.layers.kernel_timing import time_variants
from memlab.meter.labels import one_kernel

CHUNK = 64
"""Tokens between two states that the kernels keep."""
_CHANNELS_OF_BLOCK = 128
"""Channels of keys that one block takes in backward, on an H100 or H200 (``chunk_bwd_dqkwg``)."""


def l2norm(inputs: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Replaces fla's function: divides each row [..., channels] by its length; saves its result and the reciprocals."""
    return _LengthNorm.apply(inputs, eps)


class _LengthNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, epsilon: float) -> torch.Tensor:
        output = torch.empty_like(inputs)
        reciprocal = inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)
        _time("l2norm_fwd", inputs)
        if not inputs.is_meta:
            _fill_norm(output, reciprocal, inputs, epsilon)
        ctx.save_for_backward(output, reciprocal)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        output, reciprocal = ctx.saved_tensors
        grad = grads[0].contiguous()
        gradient = torch.empty_like(output)
        _time("l2norm_bwd", output)
        if not output.is_meta:
            _fill_norm_gradient(gradient, grad, output, reciprocal)
        return gradient, None


@one_kernel()
def _fill_norm(output: torch.Tensor, reciprocal: torch.Tensor, inputs: torch.Tensor, epsilon: float) -> None:
    exact = inputs.float()
    of_rows = torch.rsqrt(exact.square().sum(-1, keepdim=True) + epsilon)
    output.copy_(exact * of_rows)
    reciprocal.copy_(of_rows.flatten())


@one_kernel()
def _fill_norm_gradient(
    gradient: torch.Tensor, grad: torch.Tensor, output: torch.Tensor, reciprocal: torch.Tensor
) -> None:
    unit, exact = output.float(), grad.float()
    across = exact - (exact * unit).sum(-1, keepdim=True) * unit
    gradient.copy_(across * reciprocal.view(*output.shape[:-1], 1))


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Replaces fla's function, which Megatron calls without a first or last state.

    Args:
        q: Queries, shape [batch, tokens, heads, channels of keys], contiguous.
        k: Keys, as many.
        v: Values, shape [batch, tokens, heads, channels of values].
        g: Logarithms of the decays, fp32 [batch, tokens, heads].
        beta: How much of a value is written, shape [batch, tokens, heads].
        **options: Those that Megatron gives, all of them off.

    Returns:
        The output, shaped as `v`, and no last state.
    """
    assert not any(options.values()), options
    return _DeltaRule.apply(q, k, v, g, beta), None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        query, key, value, decay, beta = (each.contiguous() for each in (query, key, value, decay, beta))
        sums = torch.empty_like(decay, dtype=torch.float32)
        _time("cumsum", decay)
        products = key.new_empty(*decay.shape, CHUNK, dtype=torch.float32)
        _time("kkt", key)
        inverse = torch.zeros_like(products, dtype=key.dtype)
        _time("solve_tril", inverse)
        del products
        changes = _changes(key, value)
        kept = _states(query, key, value)
        output = torch.empty_like(value)
        _time("fwd_o", query, value)
        del changes, kept
        if not query.is_meta:
            _fill_output(output, sums, query, key, value, decay, beta)
        ctx.save_for_backward(query, key, value, sums, beta, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, sums, beta, _inverse = ctx.saved_tensors
        grad = grads[0].contiguous()
        changes = _changes(key, value)
        kept = _states(query, key, value)
        of_values = torch.empty_like(grad)
        _time("bwd_dv_local", query, value)
        of_states = torch.empty_like(kept[0])
        of_all_values = torch.empty_like(of_values)
        _time("bwd_dhu", query, value)
        of_values = of_all_values
        of_query, of_key = torch.empty_like(query), torch.empty_like(key)
        blocks = -(-key.shape[-1] // _CHANNELS_OF_BLOCK)
        of_blocks = sums.new_empty(blocks, *sums.shape)
        of_changes = torch.empty_like(changes[0])
        _time("bwd_dqkwg", query, value)
        of_decay = of_blocks.sum(0)
        del of_blocks
        more_of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        more_of_decay, of_beta = torch.empty_like(sums), torch.empty_like(beta)
        _time("bwd_wy", key, value)
        of_values = of_all_values = of_value
        summed = torch.empty_like(of_decay)
        _time("reversed cumsum", summed)
        del of_states, of_changes, more_of_key, more_of_decay, of_decay
        gradients = of_query, of_key, of_value, summed, of_beta
        if not query.is_meta:
            _fill_gradients(gradients, grad, query, key, value, sums, beta)
        return gradients


def _changes(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what a chunk's keys and values become in its representation, ``w`` and ``u``."""
    changed = torch.empty_like(key), torch.empty_like(value)
    _time("w_u", key, value)
    return changed


def _states(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state before each chunk, in the type of the keys, and the values that are written."""
    batch, tokens, heads, channels = key.shape
    states = key.new_empty(batch, -(-tokens // CHUNK), heads, channels, value.shape[-1])
    written = torch.empty_like(value)
    _time("fwd_h", query, value)
    return states, written


@one_kernel()
def _fill_output(
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    output.copy_(_rule(query, key, value, decay, beta))
    for part, own in zip(sums.split(CHUNK, dim=1), decay.split(CHUNK, dim=1), strict=True):
        part.copy_(own.cumsum(1))


@one_kernel()
def _fill_gradients(gradients: tuple[torch.Tensor, ...], grad: torch.Tensor, *saved: torch.Tensor) -> None:
    query, key, value, sums, beta = saved
    chunks = [torch.cat((part[:, :1], part[:, 1:] - part[:, :-1]), dim=1) for part in sums.split(CHUNK, dim=1)]
    inputs = [each.detach().requires_grad_() for each in (query, key, value, torch.cat(chunks, dim=1), beta)]
    with torch.enable_grad():
        output = _rule(*inputs).to(grad.dtype)
    for target, own in zip(gradients, torch.autograd.grad(output, inputs, grad), strict=True):
        target.copy_(own)


def _rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Returns the rule's output in fp32: each token decays the state, and writes its value at the place of its key."""
    tokens, scale = query.shape[1], query.shape[-1] ** -0.5
    query, key, value, decay, beta = (_chunks(each) for each in (query.float() * scale, key, value, decay, beta))
    sums, beta = decay.cumsum(-1), beta.unsqueeze(-1)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    from_start, to_end = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    among = (beta * key @ key.transpose(-1, -2) * decays).tril(-1)
    unit = torch.eye(CHUNK, device=query.device)
    changed = torch.linalg.solve_triangular(unit + among, torch.cat((beta * value, beta * key * from_start), -1),
                                            upper=False, unitriangular=True)  # fmt: skip
    own, of_state = changed.split((value.shape[-1], key.shape[-1]), dim=-1)
    attended = query @ key.transpose(-1, -2) * decays
    state = key.new_zeros(*key.shape[1:-2], key.shape[-1], value.shape[-1])
    outputs = []
    for number in range(len(query)):
        written = own[number] - of_state[number] @ state
        outputs.append(query[number] * from_start[number] @ state + attended[number] @ written)
        kept = from_start[number, ..., -1:, :] * state
        state = kept + (key[number] * to_end[number]).transpose(-1, -2) @ written
    return torch.cat(outputs, dim=-2)[..., :tokens, :].transpose(1, 2)


def _chunks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [batch, tokens, heads, ...] in fp32 as [chunks, batch, heads, tokens, ...], the last chunk filled up."""
    missing = -tensor.shape[1] % CHUNK
    filled = torch.cat((tensor.float(), tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:]).float()), dim=1)
    return filled.unflatten(1, (-1, CHUNK)).movedim(1, 0).movedim(3, 2)


def apply_gated_norm(layer: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Replaces ``GatedDeltaNet._apply_gated_norm``, of which torch compiles what follows the norm."""
    normalised = layer.out_norm(x.reshape(-1, x.shape[-1]))
    return gated(normalised, gate.reshape(-1, gate.shape[-1]), torch.nn.functional.silu)


def apply_output_gate(layer: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Replaces ``Attention._apply_output_gate``, which torch compiles.

    The gate may be a slice of linear_qkv's output, where a rank has one head of keys: its kernel copies nothing, and
    backward keeps the whole output (an H200, torch 2.11).
    """
    return gated(x, gate, torch.sigmoid)


def gated(inputs: torch.Tensor, gate: torch.Tensor, activation: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Multiplies by an activated gate in fp32, in one kernel that saves both; the gate may have another shape."""
    return _Gated.apply(inputs, gate, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, gate: torch.Tensor, activation: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, gate)
        ctx.activation = activation
        return _gate(inputs, gate, activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, gate = ctx.saved_tensors
        return *_gate_backward(grads[0], inputs, gate, ctx.activation), None


@one_kernel()
def _gate(inputs: torch.Tensor, gate: torch.Tensor, activation: Callable[..., torch.Tensor]) -> torch.Tensor:
    return (inputs * activation(gate.float().reshape(inputs.shape))).to(inputs.dtype)


@one_kernel()
def _gate_backward(
    grad: torch.Tensor, inputs: torch.Tensor, gate: torch.Tensor, activation: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = gate.float().reshape(inputs.shape).detach().requires_grad_()
    with torch.enable_grad():
        factor = activation(exact)
    (of_gate,) = torch.autograd.grad(factor, exact, grad.float() * inputs.float())
    return (grad * factor.detach()).to(inputs.dtype), of_gate.to(gate.dtype).view(gate.shape)


def _time(kernel: str, *tensors: torch.Tensor) -> None:
    time_variants((f"fla {kernel}", *(each.shape[2:] for each in tensors), tensors[0].dtype), tensors[0])
