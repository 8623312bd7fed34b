"""The autograd functions behind `torch_layers`: each computes in torch what one Transformer Engine module computes.

Each saves for backward the tensors that TE 2.12.0 saves, and makes the outputs that TE's kernels make; what a kernel
keeps on chip is made inside `one_kernel`. Norms are computed in fp32: LayerNorm where they have a bias, else RMSNorm. A
linear whose weight is frozen saves no input for the weight's gradient (``backward_needs_input``, TE 2.12.0 and 2.16.1).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from memlab.engines.megatron.layers.tensor_parallel import WHOLE, Split
from memlab.engines.megatron.layers.weight_gradients import weight_gradient
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
