"""Low-rank adapters beside transformers' linears: PEFT's, and NeMo Automodel's, which keep less for backward.

Written after ``tuners/lora/layer.py`` of PEFT 0.21.2, and after ``components/_peft/lora.py`` and ``lora_mlp.py`` of
NeMo Automodel (36044ad3). With its option ``use_triton``, Automodel's adapters differ by tensors of the rank's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import parametrize

from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.transformers_linears import AdaptedParameter, adapted_linears, adapted_parameters
from memlab.engines.fsdp2.vision import language_model_of
from memlab.meter.labels import one_kernel

_PIECES = 64
"""In how many pieces of its rows a tensor is computed in place, where Automodel has one kernel without temporaries."""


def add_adapters(model: Any, scenario: Scenario) -> None:
    """Freezes transformers' model before FSDP2 shards it, and adds the training state's adapters to its linears."""
    lora = scenario.state.lora
    assert lora is not None, "the caller asks only for adapters that there are"
    model.requires_grad_(requires_grad=False)
    if scenario.layout.tensor_model_parallel_size > 1:
        for linear in adapted_linears(scenario.architecture, scenario.num_layers, lora):
            _give_divided_adapter(model.get_submodule(linear.name), lora)
        return
    kind = AutomodelLinear if lora.fsdp2_library == "automodel" else PeftLinear
    for linear in adapted_linears(scenario.architecture, scenario.num_layers, lora):
        path, _, name = linear.name.rpartition(".")
        owner = model.get_submodule(
            path.replace("model.", "model.language_model.", 1) if scenario.vision_tower else path
        )
        setattr(owner, name, kind(getattr(owner, name), lora))
    for adapted in adapted_parameters(scenario.architecture, scenario.num_layers, lora):
        path, _, name = adapted.module.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, name, PeftParameter(getattr(owner, name), adapted, lora))
    # On several ranks, and of its own classes on one too, the model is on the meta device when Automodel looks for MLPs
    # to fuse, and it fuses none (``_fusible``; ``is_meta_device`` in _transformers/auto_model.py, 36044ad3 and 0.7.0).
    on_meta = scenario.layout.world_size > 1 or scenario.state.model_classes != "transformers"
    if lora.fsdp2_library == "automodel" and not lora.dropout and not on_meta:
        for mlp in _mlps(model):
            mlp.forward = _FusedMlp(mlp)
    if lora.enable_input_require_grads:
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_())


class DividedLinear(torch.nn.Linear):
    """A frozen linear of NeMo Automodel with its adapter, both divided over tensor parallel ranks.

    Automodel's memory-efficient function takes no DTensor (``_should_use_memory_efficient_lora``), so each product is
    one of torch's own, and what ranks have to add up is added once for both.
    """

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        output = functional.linear(inputs, self.weight, self.bias)
        added: torch.Tensor = output + self.lora_B(self.lora_A(inputs) * self.scaling)
        return added


def _give_divided_adapter(linear: Any, lora: LoRA) -> None:
    linear.lora_A, linear.lora_B = _two_linears(linear, lora, linear.weight.dtype)
    linear.scaling, linear.__class__ = lora.alpha / lora.rank, DividedLinear


def _mlps(model: Any) -> Iterator[Any]:
    """Yields the MLPs with three linears, all of which have adapters; Phi-3's have two."""
    for layer in language_model_of(model).layers:
        linears = [getattr(layer.mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(linear, AutomodelLinear) for linear in linears):
            yield layer.mlp


class PeftLinear(torch.nn.Module):
    """A frozen linear and its adapter in fp32, which FSDP2 gathers in the type that layers compute in."""

    def __init__(self, base_layer: Any, lora: LoRA) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, lora.alpha / lora.rank
        self.lora_dropout = torch.nn.Dropout(lora.dropout) if lora.dropout else torch.nn.Identity()
        self.lora_A, self.lora_B = _two_linears(base_layer, lora, torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        output = self.base_layer(inputs)
        rows = inputs.to(self.lora_A.weight.dtype)
        return (output + self.lora_B(self.lora_A(self.lora_dropout(rows))) * self.scaling).to(output.dtype)


class PeftParameter(torch.nn.Module):
    """A module and the adapter of one of its frozen parameters, whose sum the module computes with.

    After ``ParamWrapper`` in ``tuners/lora/layer.py`` of PEFT 0.21.2: each forward registers a parametrization, which
    torch tries once at that moment, and keeps the sum until the outermost wrapper of the module has ended.

    Args:
        base_layer: The module, or the wrapper of another of its parameters.
        adapted: Which parameter it is, and the sizes of its adapter.
    """

    def __init__(self, base_layer: Any, adapted: AdaptedParameter, lora: LoRA) -> None:
        super().__init__()
        self.base_layer, self.adapted, self.scaling = base_layer, adapted, lora.alpha / lora.rank
        width = adapted.rank * adapted.num_experts
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": self.parameter.device}
        self.lora_A = torch.nn.Linear(adapted.inputs, width, **options)
        self.lora_B = torch.nn.Linear(width, adapted.outputs, **options)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, *inputs: Any) -> Any:
        """Computes the module with the sum in the parameter's place."""
        name, parameter = self.adapted.name, self.parameter
        if self.adapted.num_experts > 1:
            count, (first, second) = self.adapted.num_experts, (self.lora_A.weight, self.lora_B.weight)
            left = second.reshape(second.shape[0], -1, count).permute(2, 0, 1).to(parameter.dtype)
            right = first.reshape(count, -1, first.shape[-1]).to(parameter.dtype)
            added: torch.nn.Module = _Factors(left, right, self.scaling)
        else:
            added = _Sum((self.lora_B.weight @ self.lora_A.weight * self.scaling).to(parameter.dtype))
        requires_grad = parameter.requires_grad
        parametrize.register_parametrization(self._module, name, added)
        self._module.parametrizations[name].original.requires_grad_(requires_grad)
        try:
            with parametrize.cached():
                return self.base_layer(*inputs)
        finally:
            parametrize.remove_parametrizations(self._module, name, leave_parametrized=False)

    @property
    def parameter(self) -> torch.Tensor:
        """The frozen parameter: FSDP2's gathered one during a step."""
        return getattr(self._module, self.adapted.name)

    @property
    def _module(self) -> Any:
        module = self.base_layer
        while isinstance(module, PeftParameter):
            module = module.base_layer
        return module


class _Factors(torch.nn.Module):
    """Adds the product of two matrices for each expert to a parameter."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.left, self.right, self.scale = left, right, scale

    def forward(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(parameter, self.left, self.right, alpha=self.scale)


class _Sum(torch.nn.Module):
    """Adds a tensor to a parameter."""

    def __init__(self, added: torch.Tensor) -> None:
        super().__init__()
        self.added = added

    def forward(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter + self.added


class MatrixOfAdapter(torch.nn.Linear):
    """One of an adapter's two matrices.

    FSDP1 gathers it in the type that layers compute in, and PEFT looks at its type before: the rows are in fp32 then,
    and ``torch.autocast``, under which verl runs a model, copies them once more.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        return functional.linear(inputs.to(self.weight.dtype), self.weight)


class AutomodelLinear(torch.nn.Module):
    """A frozen linear and its adapter, of which backward computes again what the first matrix has made."""

    def __init__(self, base_layer: Any, lora: LoRA) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, lora.alpha / lora.rank
        self.dropout, self.drops_output = lora.dropout, lora.dropout_position == "post"
        self.lora_A, self.lora_B = _two_linears(base_layer, lora, base_layer.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        output = self.base_layer(inputs)
        is_dropped = self.dropout > 0 and self.training
        if is_dropped and not self.drops_output:
            inputs = functional.dropout(inputs, self.dropout)
        matrices = self.lora_A.weight, self.lora_B.weight
        if not (is_dropped and self.drops_output):
            return _Adapter.apply(inputs, *matrices, self.scaling, output).reshape(output.shape)
        added = _Adapter.apply(inputs, *matrices, self.scaling, None).reshape(output.shape)
        return functional.dropout(added, self.dropout).add_(output)


def _two_linears(base: Any, lora: LoRA, dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    options = {"bias": False, "dtype": dtype, "device": base.weight.device}
    matrices = (
        MatrixOfAdapter(base.in_features, lora.rank, **options),
        MatrixOfAdapter(lora.rank, base.out_features, **options),
    )
    torch.nn.init.zeros_(matrices[1].weight)
    return matrices


class _Adapter(torch.autograd.Function):
    """The product with both matrices, added to an output if there is one; backward needs only the input."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float, output: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, first, second)
        ctx.scale, ctx.output_shape = scale, None if output is None else output.shape
        rows = inputs.reshape(-1, inputs.shape[-1])
        added = functional.linear(functional.linear(rows, first) * scale, second)
        return added if output is None else added.add_(output.reshape(added.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, first, second = ctx.saved_tensors
        rows = inputs.reshape(-1, inputs.shape[-1])
        inner = torch.matmul(gradient, second)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = torch.empty_like(rows).addmm_(inner, first, beta=0, alpha=ctx.scale).view(inputs.shape)
        of_first = torch.matmul(inner.t(), rows) * ctx.scale
        again = functional.linear(rows, first)
        of_second = torch.empty_like(second).addmm_(gradient.t(), again, beta=0, alpha=ctx.scale)
        of_output = gradient.reshape(ctx.output_shape) if ctx.output_shape is not None else None
        return of_inputs, of_first, of_second, None, of_output


class _FusedMlp:
    """Takes the place of an MLP's forward: one function over its three linears, each with an adapter."""

    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        linears = self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj
        scales = tuple(linear.scaling for linear in linears)
        weights = [each.weight for one in linears for each in (one.base_layer, one.lora_A, one.lora_B)]
        return _Mlp.apply(inputs, scales, *weights)


class _Mlp(torch.autograd.Function):
    """SwiGLU of which backward computes the activation again, in the memory of what forward has kept."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, scales: tuple[float, ...], *weights: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        gate, up, down = (weights[start : start + 3] for start in (0, 3, 6))
        gated, other = _product(rows, gate, scales[0]), _product(rows, up, scales[1])
        with one_kernel():
            inner = torch.empty_like(gated)
            for piece, one, two in zip(*(each.chunk(_PIECES) for each in (inner, gated, other)), strict=True):
                torch.mul(functional.silu(one), two, out=piece)
        output = _product(inner, down, scales[2])
        ctx.save_for_backward(rows, gated, other, *gate[1:], *up[1:], *down[1:])
        ctx.frozen, ctx.scales, ctx.shape = (gate[0], up[0], down[0]), scales, inputs.shape
        return output.view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, gated, other, *matrices = ctx.saved_tensors
        (gate_in, gate_out, up_in, up_out, down_in, down_out), scales = matrices, ctx.scales
        of_output = gradient.reshape(-1, gradient.shape[-1])
        of_low = scales[2] * (of_output @ down_out)
        inner = torch.addmm(of_output @ ctx.frozen[2], of_low, down_in)
        with one_kernel():
            _swiglu_backward(inner, gated, other)
        # What the first matrices make stays until the end, as the local variables of Automodel's function.
        low_of_down = functional.linear(inner, down_in)
        of_down_out = scales[2] * (of_output.t() @ low_of_down)
        of_down_in = of_low.t() @ inner
        low_of_up = functional.linear(rows, up_in)
        of_up_out = scales[1] * (gated.t() @ low_of_up)
        of_up_low = scales[1] * (gated @ up_out)
        of_up_in = of_up_low.t() @ rows
        low_of_gate = functional.linear(rows, gate_in)
        of_gate_out = scales[0] * (other.t() @ low_of_gate)
        of_gate_low = scales[0] * (other @ gate_out)
        of_gate_in = of_gate_low.t() @ rows
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = torch.addmm(other @ ctx.frozen[0], of_gate_low, gate_in)
            of_inputs = of_inputs.addmm_(gated, ctx.frozen[1]).addmm_(of_up_low, up_in).view(ctx.shape)
        return (
            *(of_inputs, None),
            *(None, of_gate_in, of_gate_out),
            *(None, of_up_in, of_up_out),
            *(None, of_down_in, of_down_out),
        )


def _product(rows: torch.Tensor, weights: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    """Returns the output of a linear with its adapter: `weights` are the linear's and the adapter's two."""
    frozen, first, second = weights
    output = functional.linear(rows, frozen)
    return output.addmm_(functional.linear(rows, first) * scale, second.t())


def _swiglu_backward(of_inner: torch.Tensor, gated: torch.Tensor, other: torch.Tensor) -> None:
    """Writes the activation, the gradient of `other` and that of `gated` over the three tensors, in this order."""
    for one, two, three in zip(*(each.chunk(_PIECES) for each in (of_inner, gated, other)), strict=True):
        sigmoid = torch.sigmoid(two)
        activated = two * sigmoid
        inner, of_other = activated * three, one * activated
        of_gated = one * three * sigmoid * (1 + two * (1 - sigmoid))
        one.copy_(inner)
        two.copy_(of_other)
        three.copy_(of_gated)
