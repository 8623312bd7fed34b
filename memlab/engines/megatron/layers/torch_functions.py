"""The autograd functions behind `torch_layers`: each computes in torch what one Transformer Engine module computes.

Each saves for backward the tensors that TE 2.12.0 saves, and makes the outputs that TE's kernels make; what a kernel
keeps on chip is made inside `one_kernel`. Norms are computed in fp32: LayerNorm where they have a bias, else RMSNorm. A
linear whose weight is frozen saves no input for the weight's gradient (``backward_needs_input``, TE 2.12.0 and 2.16.1).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from memlab.engines.megatron.layers.qkv_layout import in_known_layout
from memlab.engines.megatron.layers.tensor_parallel import WHOLE, Split
from memlab.engines.megatron.layers.weight_gradients import weight_gradient
from memlab.engines.megatron.packed_sequences import lengths_of
from memlab.meter.labels import multiplies, one_kernel


class Norm(torch.autograd.Function):
    """A norm over the last dimension; saves its input and of each row in fp32 a reciprocal, and of LayerNorm the mean.

    The reciprocal is that of the root mean square, or of the standard deviation.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        output, of_rows = _normalise(inputs, weight, bias, epsilon)
        ctx.save_for_backward(inputs, weight, *of_rows)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, *of_rows = ctx.saved_tensors
        return *norm_backward(grads[0], inputs, of_rows, weight), None


class Linear(torch.autograd.Function):
    """``inputs @ weight.T``; saves this rank's part of its input (transformer_engine/pytorch/module/linear.py)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, split: Split = WHOLE) -> torch.Tensor:
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        ctx.split, ctx.parameter = split, weight
        entered = split.enter(inputs)
        return split.leave(lambda: _matmul(entered, weight.T), inputs, (*entered.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        grad = ctx.split.leave_backward(grads[0])
        inputs = None if inputs is None else ctx.split.enter_again(inputs)
        shape = *grad.shape[:-1], weight.shape[1]
        # The latter stays allocated during the weight's gradient, while it is reduced.
        grad_inputs, _grad_entered = ctx.split.enter_backward(lambda: _matmul(grad, weight), grad, shape)
        grad_weight = None if inputs is None else weight_gradient(ctx.parameter, _flat(grad), _flat(inputs))
        return grad_inputs, grad_weight, None


Returned = Literal["gathered", "own"] | None
"""What a norm fused with a linear returns beside its output: the linear's whole input, or this rank's part of it."""


class NormLinear(torch.autograd.Function):
    """A norm and the linear after it as one module (transformer_engine/pytorch/module/layernorm_linear.py).

    Saves its input, the normalised output and what `Norm` keeps of rows: measured on an H200 with TE 2.12.0. With a
    frozen weight it keeps the normalised output only where it returns it too, for an adapter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        split: Split = WHOLE,
        returned: Returned = None,
    ) -> Any:
        normalised, of_rows = _normalise(inputs, norm_weight, norm_bias, epsilon)
        keeps = weight.requires_grad or returned is not None
        ctx.save_for_backward(inputs, norm_weight, weight, normalised if keeps else None, *of_rows)
        ctx.split, ctx.has_bias, ctx.parameter = split, bias is not None and bias.requires_grad, weight
        ctx.returns_gathered = returned == "gathered" and split.way is not None
        entered = split.enter(normalised)
        output = _matmul(entered, weight.T, bias)
        return output if returned is None else (output, normalised if returned == "own" else entered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, norm_weight, weight, normalised, *of_rows = ctx.saved_tensors
        if not weight.requires_grad:
            saved = inputs, norm_weight, weight, *of_rows
            return _backward_of_frozen(ctx.split, ctx.returns_gathered, saved, *grads)
        entered = ctx.split.enter_again(normalised)
        shape = *grads[0].shape[:-1], weight.shape[1]
        grad_normalised, grad_entered = ctx.split.enter_backward(lambda: _matmul(grads[0], weight), grads[0], shape)
        grad_weight = weight_gradient(ctx.parameter, _flat(grads[0]), _flat(entered))
        grad_bias = _flat(grads[0]).sum(0) if ctx.has_bias else None  # cuBLAS adds it up beside the weight's gradient
        del grad_entered, entered
        normalised.data = normalised.new_empty(0)  # TE's clear_tensor_data: freed before the norm's gradient is made
        grad_normalised = ctx.split.out_of_buffer(grad_normalised)
        of_norm = norm_backward(grad_normalised, inputs, of_rows, norm_weight)
        return *of_norm, grad_weight, grad_bias, None, None, None


def _backward_of_frozen(
    split: Split,
    returns_gathered: bool,
    saved: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    grad_returned: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    # As TE, it frees nothing of what it makes before its end; `NormLinear.backward` holds the normalised output.
    inputs, norm_weight, weight, *of_rows = saved
    grad_entered = _matmul(grad, weight)  # adapters and user buffers are refused together
    if grad_returned is not None and returns_gathered:
        # TE returns the gathered input, and adds no gradient of it (2.12.0 and 2.16.1). Here it is the right one.
        grad_entered += grad_returned.view_as(grad_entered)
    grad_of_both = grad_normalised = split.enter_backward(lambda: grad_entered, grad, grad_entered.shape)[0]
    if grad_returned is not None and not returns_gathered:
        grad_of_both = grad_normalised + grad_returned.view_as(grad_normalised)
    grad_inputs, *_ = norm_backward(grad_of_both, inputs, of_rows, norm_weight)
    return grad_inputs, *[None] * 7


class GroupedLinear(torch.autograd.Function):
    """One linear per expert over consecutive rows (transformer_engine/pytorch/module/grouped_linear.py).

    Saves each expert's rows as a view of the input, or the input itself under `save_original_input`.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, splits: list[int], save_original_input: bool, *weights_and_biases: torch.Tensor
    ) -> torch.Tensor:
        weights, biases = weights_and_biases[: len(splits)], weights_and_biases[len(splits) :]
        rows = torch.split(inputs, splits)
        output = inputs.new_empty((inputs.shape[0], weights[0].shape[0]))
        for part, row, weight in zip(torch.split(output, splits), rows, weights, strict=True):
            torch.mm(row, weight.T, out=part)
        for part, bias in zip(torch.split(output, splits), biases, strict=bool(biases)):
            part.add_(bias)
        if not weights[0].requires_grad:
            rows = ()
        ctx.save_for_backward(*((inputs,) if rows and save_original_input else rows), *weights)
        ctx.splits, ctx.parameters, ctx.biases = splits, weights, biases
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        saved, splits = ctx.saved_tensors, ctx.splits
        weights = saved[-len(splits) :]
        grad_rows = torch.split(grads[0].contiguous(), splits)
        grad_inputs = grads[0].new_empty((grads[0].shape[0], weights[0].shape[1]))
        for part, grad_row, weight in zip(torch.split(grad_inputs, splits), grad_rows, weights, strict=True):
            torch.mm(grad_row, weight, out=part)
        rows = saved[: -len(splits)]
        if not rows:
            return grad_inputs, None, None, *[None] * (len(splits) + len(ctx.biases))
        if len(rows) == 1 and len(splits) > 1:
            rows = torch.split(rows[0], splits)
        grad_weights = [weight_gradient(*each) for each in zip(ctx.parameters, grad_rows, rows, strict=True)]
        grad_biases = [grad_row.sum(0) for grad_row, _ in zip(grad_rows, ctx.biases, strict=False)]
        return grad_inputs, None, None, *grad_weights, *grad_biases


class CausalAttention(torch.autograd.Function):
    """Fused causal attention; saves query, key, value, its output and the log-sum-exp of each row (fp32).

    With dropout it saves the state of the random numbers too, from which backward makes the same ones, and with sinks
    these (``FusedAttnFunc``, ``attention/dot_product_attention/backends.py``, TE 2.16.1); a window saves nothing.
    Shapes are [sequence, batch, heads, channels]; key and value may have fewer heads (grouped queries). The output is
    [sequence, batch, heads * channels].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        drop: float = 0.0,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # A value that is a slice of linear_qkv's output may be copied, and the copy saved.
        query, key, value = in_known_layout(query, key, value)
        random_states = [new_random_state(query)] if drop else []
        dropped = Dropped.of(drop, *random_states)
        output, log_sum_exp = attend(query, key, value, scale, dropped, window=window, sinks=sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, sinks, *random_states)
        ctx.scale, ctx.drop, ctx.window = scale, drop, window
        return output.view(*output.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, sinks, *random_states = ctx.saved_tensors
        saved = grads[0], query, key, value, output, log_sum_exp, ctx.scale, Dropped.of(ctx.drop, *random_states)
        grads_of_inputs = attend_backward(*saved, window=ctx.window, sinks=sinks)
        return *grads_of_inputs[:3], None, None, None, *(grads_of_inputs[3:] or (None,))


class PackedAttention(torch.autograd.Function):
    """`CausalAttention` of sequences that share a row: shapes are [tokens, heads, channels].

    Saves the same tensors, and where the sequences end. cuDNN's log-sum-exp is fp32 [tokens, heads, 1] here
    (``fused_attn_f16_arbitrary_seqlen.cu``, Transformer Engine 2.12); how large cuDNN's workspace for packed sequences
    is, was not measured.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        ends: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        # Backward does not read the places: what is offloaded comes back without values in a simulation.
        ctx.lengths = lengths_of(ends)
        output, log_sum_exp = attend_each(query, key, value, scale, ctx.lengths, window=window, sinks=sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, ends, sinks)
        ctx.scale, ctx.window = scale, window
        return output.view(len(output), -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum_exp, _, sinks = ctx.saved_tensors
        saved = grads[0], query, key, value, output, log_sum_exp, ctx.scale, ctx.lengths
        grads_of_inputs = attend_each_backward(*saved, window=ctx.window, sinks=sinks)
        return *grads_of_inputs[:3], None, None, None, *(grads_of_inputs[3:] or (None,))


@one_kernel()
def attend_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lengths: list[int],
    key_lengths: list[int] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends each packed sequence by itself; returns output [tokens, heads, channels] and log-sum-exp [heads, tokens].

    Args:
        query: Shape [tokens, heads, channels].
        key: The same, of as many or fewer heads, and of other tokens if `key_lengths` says so.
        value: Like `key`.
        scale: Of the scores.
        lengths: Of the sequences of queries.
        key_lengths: Of those of keys; None if they are the same.
        causal: Whether a query sees only the keys up to its own place.
        window: As `attend`.
        sinks: As `attend`.
    """
    queries = query.unsqueeze(1).split(lengths)
    keys, values = (tensor.unsqueeze(1).split(key_lengths or lengths) for tensor in (key, value))
    seen: dict[str, Any] = {"causal": causal, "window": window, "sinks": sinks}
    rows = [attend(*row, scale, **seen) for row in zip(queries, keys, values, strict=True)]
    outputs, log_sums = zip(*rows, strict=True)
    return torch.cat(outputs).squeeze(1), torch.cat(log_sums, dim=-1).squeeze(0)


@one_kernel()
def attend_each_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    lengths: list[int],
    key_lengths: list[int] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key and value of `attend_each`, and of the sinks if there are any."""
    grads, queries, outputs = (
        tensor.unsqueeze(1).split(lengths) for tensor in (grad.view(output.shape), query, output)
    )
    keys, values = (tensor.unsqueeze(1).split(key_lengths or lengths) for tensor in (key, value))
    # Torch's kernel wants the log-sum-exp contiguous.
    log_sums = [part.contiguous() for part in log_sum_exp.unsqueeze(0).split(lengths, dim=-1)]
    rows = zip(grads, queries, keys, values, outputs, log_sums, strict=True)
    seen: dict[str, Any] = {"causal": causal, "window": window, "sinks": sinks}
    of_each = [attend_backward(one, q, k, v, out, log_sum, scale, **seen) for one, q, k, v, out, log_sum in rows]
    parts = [*zip(*of_each, strict=True)]
    of_sinks = [torch.stack(of_rows).sum(0) for of_rows in parts[3:]]
    return *(torch.cat(of_rows).squeeze(1) for of_rows in parts[:3]), *of_sinks


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = query.shape[2] // key.shape[2]
    return (
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3).repeat_interleave(groups, dim=1),
        value.permute(1, 2, 0, 3).repeat_interleave(groups, dim=1),
    )


@one_kernel()
def _normalise(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the norm, and of each row the reciprocal, before which LayerNorm has the mean."""
    exact = inputs.float()
    means = [] if bias is None else [exact.mean(-1)]
    for mean in means:
        exact = exact - mean.unsqueeze(-1)
    reciprocal = torch.rsqrt(exact.square().mean(-1) + epsilon)
    output = exact * reciprocal.unsqueeze(-1) * weight.float()
    return (output if bias is None else output + bias.float()).to(inputs.dtype), [*means, reciprocal]


@one_kernel()
def norm_backward(
    grad: torch.Tensor, inputs: torch.Tensor, of_rows: list[torch.Tensor], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of input, weight and bias."""
    *means, reciprocal = of_rows
    exact, unit = grad.view(inputs.shape).float(), inputs.float()
    for mean in means:
        unit = unit - mean.unsqueeze(-1)
    unit = unit * reciprocal.unsqueeze(-1)
    grad_weight = _flat(exact * unit).sum(0).to(weight.dtype)
    grad_bias = _flat(exact).sum(0).to(weight.dtype) if means else None
    weighted = exact * weight.float()
    projected = unit * (weighted * unit).mean(-1, keepdim=True)
    if means:
        projected = projected + weighted.mean(-1, keepdim=True)
    return ((weighted - projected) * reciprocal.unsqueeze(-1)).to(inputs.dtype), grad_weight, grad_bias


class Dropped(NamedTuple):
    """Dropout of probabilities of attention, on tensors with values."""

    share: float
    random_state: torch.Tensor

    @classmethod
    def of(cls, share: float, *random_state: torch.Tensor) -> Dropped | None:
        """Returns None without dropout, and for tensors without values, whose sizes do not depend on it."""
        return cls(share, *random_state) if share and not random_state[0].is_meta else None

    def factors(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns for each score 0, or what makes up for those that are 0."""
        generator = torch.Generator().manual_seed(int(self.random_state[0]))
        return (torch.rand(scores.shape, generator=generator, device=scores.device) >= self.share) / (1 - self.share)


def new_random_state(query: torch.Tensor) -> torch.Tensor:
    """Returns the state of the random numbers of one call of a kernel, int64 [2], drawn from the default generator."""
    return query.new_empty(2, dtype=torch.int64).random_()


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns causal probabilities [batch, heads, sequence, sequence] and their log-sum-exp, both in fp32."""
    scores = query.float() @ key.float().transpose(2, 3) * scale
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(-window)
    log_sum_exp = scores.masked_fill_(~seen, -torch.inf).logsumexp(-1)
    if sinks is not None:
        log_sum_exp = torch.logaddexp(log_sum_exp, sinks.squeeze(-1))
    return (scores - log_sum_exp.unsqueeze(-1)).exp(), log_sum_exp


@one_kernel()
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropped: Dropped | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output [sequence, batch, heads, channels] and log-sum-exp [batch, heads, sequence].

    Args:
        query: Shape [sequence, batch, heads, channels].
        key: The same, of as many or fewer heads.
        value: Like `key`.
        scale: Of the scores.
        dropped: The dropout of probabilities.
        causal: Whether a query sees only the keys up to its own place.
        window: How many keys before its own place a query sees; None is all.
        sinks: A further score of each head, which has no value; fp32 [1, heads, 1, 1].
    """
    if _is_written_out(query, dropped, window, sinks):
        query, key, value = _heads_first(query, key, value)
        probabilities, log_sums = _probabilities(query, key, scale, window, sinks)
        output = (probabilities if dropped is None else probabilities * dropped.factors(probabilities)) @ value.float()
        return output.to(query.dtype).permute(2, 0, 1, 3).contiguous(), log_sums
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(query, key, _padded(value, query)), 0.0, causal, scale=scale
    )
    return output[..., : value.shape[-1]].permute(2, 0, 1, 3).contiguous(), log_sum_exp.contiguous()


def _is_written_out(
    query: torch.Tensor, dropped: Dropped | None, window: int | None, sinks: torch.Tensor | None
) -> bool:
    """Whether probabilities are computed here: torch's own kernel has none of the three. Sizes do not depend on it."""
    return dropped is not None or (not query.is_meta and (window is not None or sinks is not None))


@one_kernel()
def attend_backward(
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
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key and value, and of the sinks if there are any."""
    groups = query.shape[2] // key.shape[2]
    is_written_out = _is_written_out(query, dropped, window, sinks)
    grads_of_sinks = [] if sinks is None else [torch.empty_like(sinks)]
    of_heads = _heads_first(query, key, value if is_written_out else _padded(value, query))
    if is_written_out:
        grad_heads = grad.view(output.shape).permute(1, 2, 0, 3)
        written_out = _backward_written_out(grad_heads, *of_heads, scale, dropped, window, sinks)
        grad_query, *grads_of_groups = written_out[:3]
        grads_of_sinks = [*written_out[3:]]
    else:
        grad_query, *grads_of_groups = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _padded(grad.view(output.shape), query).permute(1, 2, 0, 3),
            *of_heads,
            _padded(output, query).permute(1, 2, 0, 3),
            log_sum_exp,
            0.0,
            causal,
            scale=scale,
        )
    grad_key, grad_value = (
        part.unflatten(1, (-1, groups)).float().sum(2).to(part.dtype).permute(2, 0, 1, 3).contiguous()
        for part in grads_of_groups
    )
    grad_value = grad_value[..., : value.shape[-1]].contiguous()
    return grad_query.permute(2, 0, 1, 3).contiguous(), grad_key, grad_value, *grads_of_sinks


def _backward_written_out(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropped: Dropped | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    probabilities, log_sums = _probabilities(query, key, scale, window, sinks)
    kept = probabilities if dropped is None else probabilities * dropped.factors(probabilities)
    grad_value = kept.transpose(2, 3) @ grad.float()
    of_scores = kept * (grad.float() @ value.float().transpose(2, 3))
    of_rows = of_scores.sum(-1, keepdim=True)
    of_scores -= probabilities * of_rows
    grads = of_scores @ key.float() * scale, of_scores.transpose(2, 3) @ query.float() * scale, grad_value
    of_sinks = [] if sinks is None else [-((sinks - log_sums.unsqueeze(-1)).exp() * of_rows).sum((0, 2), keepdim=True)]
    return *(part.to(query.dtype) for part in grads), *of_sinks


def _padded(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with as many channels as the query, the further ones zero: torch's kernel needs it."""
    missing = query.shape[-1] - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _matmul(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = _flat(inputs)
    if rows.is_meta:  # not torch's own product, whose library has other workspaces
        multiplies("linear")
        product = rows.new_empty(len(rows), weight.shape[1])
    else:
        product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*inputs.shape[:-1], weight.shape[1])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
