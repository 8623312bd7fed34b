"""The layer provider for fake tensors under FP8: each layer allocates, saves and frees what Transformer Engine's does.

Read in TE 2.12.0: ``linear.py``, ``layernorm_linear.py``, ``grouped_linear.py`` and ``base.py`` of
``transformer_engine/pytorch/module``. Attention, norms and the output layer are the provider's without FP8.

A forward pass quantizes the input row-wise for the product and column-wise for backward, and frees the row-wise half
when the product is done. The weight is quantized once per step, in the first micro-batch; the copy stays allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.config.versions import Versions
from memlab.engines.megatron.layers.fake_layers import FakeGroupedLinear, FakeGroupedRowLinear, FakeProvider
from memlab.engines.megatron.layers.fp8_parameters import Fp8Parameter
from memlab.engines.megatron.layers.fp8_recipes import OF_BLACKWELL, RECIPES, Quantized, Recipe, Splits
from memlab.engines.megatron.layers.norm_workspace import allocate_workspace
from memlab.engines.megatron.layers.tensor_parallel import Split
from memlab.engines.megatron.layers.torch_layers import (
    TorchColumnLinear,
    TorchGroupedLinear,
    TorchLinear,
    TorchNormLinear,
    TorchRowLinear,
)
from memlab.engines.megatron.layers.weight_gradients import empty_weight_gradient
from memlab.engines.megatron.megatron_versions import grouped_experts
from memlab.meter.labels import keeping, kept_by_collective, multiplies


class FakeFp8Provider(FakeProvider):
    """Megatron's layers for a GPT layer spec with FP8, for tensors without values."""

    def linear(self) -> type:
        return Fp8Linear

    def column_parallel_linear(self) -> type:
        return Fp8ColumnLinear

    def row_parallel_linear(self) -> type:
        return Fp8RowLinear

    def column_parallel_layer_norm_linear(self) -> type:
        return Fp8NormLinear

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        return grouped_experts(Fp8GroupedLinear, Fp8GroupedRowLinear)


_latest_recipe: Recipe = RECIPES["delayed"]
"""The recipe of the layers that were built last: a process has one model at a time."""


@dataclass(eq=False)
class QuantizerState:
    """The scales and amaxes of a module's quantizers."""

    tensors: list[torch.Tensor]


class _Fp8Module(torch.nn.Module):
    """What every FP8 layer keeps between steps: the state of its quantizers and its weight in FP8."""

    def keep_fp8(self, config: TransformerConfig, num_matrix_products: int = 1) -> None:
        """Starts with FP8 parameters, or without anything in FP8 until the first forward pass."""
        global _latest_recipe  # noqa: PLW0603  # as in TE (`FP8GlobalStateManager`), which pads experts' rows by it
        recipes = OF_BLACKWELL if config.memlab_non_tn_fp8_gemm else RECIPES
        self.recipe = _latest_recipe = recipes[config.fp8_recipe]
        self.versions: Versions = config.memlab_versions
        self.is_first_microbatch = True
        """Set by Megatron at the start of a step (``MegatronModule.set_is_first_microbatch``)."""
        self.num_matrix_products = num_matrix_products
        self.quantizers: dict[str, list[QuantizerState]] = {}
        self._fp8_workspaces: dict[str, Quantized] = {}
        self._updates_columnwise = False
        self._stores_fp8 = bool(config.fp8_param)
        if self._stores_fp8:
            self._keep_quantizers()
            for name, parameter in list(self.named_parameters()):
                if parameter.dim() > 1:
                    setattr(self, name, Fp8Parameter.of(parameter, self.recipe))

    def _keep_quantizers(self) -> None:
        if not self.quantizers:
            with keeping("workspace"):
                self.quantizers["all"] = [QuantizerState(self.recipe.state(self.num_matrix_products, self.versions))]

    def quantize_weight(self, *, columnwise: bool) -> Quantized | None:
        """Keeps the weight in FP8 (``quantize_weight``), allocated or completed where that is needed.

        Args:
            columnwise: Whether this pass asks for column-wise values.

        Returns:
            What was kept before and has been replaced, which some versions hold until the forward pass has ended.
        """
        self._keep_quantizers()
        if self._stores_fp8:
            return None
        replaced, kept = None, self._fp8_workspaces.get("weight")
        if kept is not None and columnwise and not kept.columnwise and self.recipe.renews_incomplete:
            replaced = self._fp8_workspaces.pop("weight") if self.versions.holds_replaced_weights else None
            self._fp8_workspaces.clear()
            kept = None
        if kept is None:
            with keeping("workspace"):
                self._fp8_workspaces["weight"] = self._quantized(columnwise=columnwise)
            self._updates_columnwise = bool(self._fp8_workspaces["weight"].columnwise)
        elif self.is_first_microbatch and not self._updates_columnwise:
            kept.columnwise = []  # an update leaves what the tensor was made with
        self.is_first_microbatch = False
        return replaced

    def complete_weight(self) -> None:
        """Adds the column-wise values that the product in backward reads, where forward left them out."""
        weight = self._fp8_workspaces.get("weight")
        if weight is not None and not weight.columnwise:
            with keeping("workspace"):
                weight.columnwise = self._quantized(rowwise=False, columnwise=True).columnwise

    def _quantized(self, *, rowwise: bool = True, columnwise: bool) -> Quantized:
        count, (rows, width) = self.num_matrix_products, next(self._matrices()).shape
        return self.recipe.quantize_weights(count, rows, width, rowwise=rowwise, columnwise=columnwise)

    def _matrices(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter in self.parameters() if parameter.dim() > 1)


class Fp8Linear(_Fp8Module, TorchLinear):
    """A linear, whose bias is returned."""

    outside_fp8: ClassVar[type] = TorchLinear

    def __init__(
        self,
        *sizes: int,
        config: TransformerConfig,
        tp_comm_buffer_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, config=config, tp_comm_buffer_name=tp_comm_buffer_name, **options)
        self.keep_fp8(config)
        # Attention saves its output itself, and Megatron lets this linear save the same tensor in place of an FP8 copy
        # (``transformer/attention.py``); its delayed recipe cannot.
        self.save_original_input = tp_comm_buffer_name == "proj" and config.fp8_recipe != "delayed"

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps [..., input_size] to [..., output_size]."""
        return _Linear.apply(inputs, self.weight, self, torch.is_grad_enabled()), self.bias


class Fp8ColumnLinear(Fp8Linear, TorchColumnLinear):
    """Each rank makes a part of the output's features."""

    outside_fp8 = TorchColumnLinear


class Fp8RowLinear(Fp8Linear, TorchRowLinear):
    """Each rank takes a part of the input's features."""

    outside_fp8 = TorchRowLinear


class Fp8NormLinear(_Fp8Module, TorchNormLinear):
    """RMSNorm fused with the linear that follows it."""

    def __init__(self, *sizes: int, config: TransformerConfig, **options: Any) -> None:
        super().__init__(*sizes, config=config, **options)
        self.keep_fp8(config)

    def forward(self, inputs: torch.Tensor) -> tuple[Any, None]:
        """Maps [..., input_size] to [..., output_size]; returns what it normalised too where an adapter reads it."""
        weights = self.layer_norm_weight, self.weight, self.bias
        return _NormLinear.apply(inputs, *weights, self, torch.is_grad_enabled()), None


class Fp8GroupedLinear(_Fp8Module, TorchGroupedLinear):
    """One linear for each local expert, over rows grouped by expert."""

    outside_fp8: ClassVar[type] = FakeGroupedLinear

    def __init__(self, num_gemms: int, *sizes: int, config: TransformerConfig, **options: Any) -> None:
        super().__init__(num_gemms, *sizes, config=config, **options)
        self.keep_fp8(config, num_gemms)

    def forward(
        self, inputs: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Maps [rows, input_size] to [rows, output_size], `tokens_per_expert` rows for each expert in turn."""
        splits = tuple(tokens_per_expert)
        assert sum(splits) == len(inputs), f"{tokens_per_expert} rows for {len(inputs)}"
        weights, biases = self.of_each("weight"), self.of_each("bias") if self.has_bias else []
        added = [] if self.skip_bias_add else biases
        output = _GroupedLinear.apply(inputs, self, splits, torch.is_grad_enabled(), *weights, *added)
        return output, biases if self.skip_bias_add and biases else None


class Fp8GroupedRowLinear(Fp8GroupedLinear):
    """The second linear of the experts."""

    outside_fp8 = FakeGroupedRowLinear
    way = "row"


class _Linear(torch.autograd.Function):
    """``linear.py``."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: Fp8Linear, is_training: bool
    ) -> torch.Tensor:
        recipe, split = layer.recipe, layer.split
        rows, width = _size(inputs)
        ctx.saves_inputs = layer.save_original_input
        keeps_rows = split.way == "column" and recipe.gathers_rows_only
        is_trained = is_training and weight.requires_grad
        columnwise = is_trained and not ctx.saves_inputs and not keeps_rows
        quantized = recipe.quantize(rows, width, columnwise=columnwise)
        entered, _ = _entered(layer, quantized, rows, width, in_buffer=split.overlap.gathers)
        _held = layer.quantize_weight(columnwise=(is_training and inputs.requires_grad) or _asks_for_columns(layer))
        shape = *_entered_shape(inputs, split), weight.shape[0]
        multiplies("linear")
        output = split.leave(lambda: inputs.new_empty(shape), inputs, shape)
        del entered
        if is_training:
            if not keeps_rows:
                quantized.rowwise = []
            saved = Quantized() if ctx.saves_inputs or not is_trained else quantized
            _save(ctx, saved, inputs if ctx.saves_inputs and is_trained else None, weight)
            ctx.layer, ctx.shape, ctx.keeps_rows = layer, inputs.shape, keeps_rows
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _, weight, saved = _saved(ctx)
        layer, recipe, split = ctx.layer, ctx.layer.recipe, ctx.layer.split
        width = ctx.shape[-1]
        rows = ctx.shape[:-1].numel()
        grad = _left_backward(layer, grads[0], columnwise=weight.requires_grad)
        shape = *_entered_shape(grads[0], split, backward=True), width
        if not weight.requires_grad:
            layer.complete_weight()
            return split.enter_backward(lambda: weight.new_empty(shape), weight, shape)[0], *[None] * 3
        if ctx.saves_inputs:
            saved = recipe.quantize(rows, width, rowwise=recipe.gathers_rows_only, columnwise=not ctx.keeps_rows)
        entered, in_transfer = _entered(
            layer, saved, rows, width, rowwise=ctx.keeps_rows, columnwise=True, in_buffer=split.overlap.gathers_again
        )
        layer.complete_weight()

        def multiply() -> torch.Tensor:
            product = weight.new_empty(shape)
            in_transfer.clear()
            return product

        grad_inputs, _grad_entered = split.enter_backward(multiply, weight, shape)
        held = _gathered_by_column(layer, grad, grads[0]) if split.way == "row" and split.overlap.gathers else []
        grad_weight = empty_weight_gradient(layer.weight)
        del grad, saved, entered, held
        return grad_inputs, grad_weight, None, None


class _NormLinear(torch.autograd.Function):
    """``layernorm_linear.py``."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        norm_weight: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Fp8NormLinear,
        is_training: bool,
    ) -> Any:
        recipe, split = layer.recipe, layer.split
        rows, width = _size(inputs)
        keeps_rows, is_trained = split.way == "column" and recipe.gathers_rows_only, weight.requires_grad
        reciprocal = inputs.new_empty(rows, dtype=torch.float32)
        returned = inputs.new_empty(inputs.shape) if layer.return_layernorm_output else None
        ctx.returns_gathered = layer.return_layernorm_output_gathered and split.way is not None
        if returned is not None and ctx.returns_gathered:
            returned = split.enter(returned)
        normalised = recipe.quantize(rows, width, columnwise=is_training and is_trained and not keeps_rows)
        if not recipe.fuses_norm and returned is None:
            inputs.new_empty(inputs.shape)  # the norm's output, freed when it is quantized
        if ctx.returns_gathered:
            entered = recipe.quantize(_entered_shape(inputs, split)[0] * inputs.shape[1], width, columnwise=False)
        else:
            in_buffer = split.overlap.gathers and is_training and returned is None
            entered, _ = _entered(layer, normalised, rows, width, in_buffer=in_buffer)
        _held = layer.quantize_weight(columnwise=is_training)
        multiplies("linear")
        output = inputs.new_empty((*_entered_shape(inputs, split), weight.shape[0]))
        del entered
        if is_training:
            if not is_trained and returned is None:
                normalised.clear()
            elif is_trained and not keeps_rows:
                normalised.rowwise = []
            _save(ctx, normalised, inputs, weight, norm_weight, reciprocal)
            ctx.layer, ctx.keeps_rows = layer, keeps_rows
        return output if returned is None else (output, returned)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, norm_weight, reciprocal, normalised = _saved(ctx)
        layer, split = ctx.layer, ctx.layer.split
        rows, width = _size(inputs)
        # Added up where the gradient is quantized (``bgrad_quantize``, ``csrc/extensions/bias.cpp``).
        grad_bias = None if layer.bias is None else torch.empty_like(layer.bias)
        grad = _left_backward(layer, grads[0])
        if not weight.requires_grad:
            return _backward_of_frozen(ctx, inputs, norm_weight, *grads), *[None] * 5
        in_buffer, shape = split.overlap.gathers_again, (*grads[0].shape[:-1], width)
        entered, in_transfer = _entered(
            layer, normalised, rows, width, rowwise=ctx.keeps_rows, columnwise=True, in_buffer=in_buffer
        )
        layer.complete_weight()
        grad_normalised, grad_entered = split.enter_backward(lambda: weight.new_empty(shape), weight, shape)
        if in_buffer:
            entered.columnwise += layer.recipe.transposed(rows * split.ranks, width)
        grad_weight = empty_weight_gradient(layer.weight)
        del grad_entered, in_transfer
        entered.clear()
        normalised.clear()
        if split.way == "column" and split.splits_sequence and layer.versions.frees_quantized_gradients:
            grad.clear()
        grad_normalised = split.out_of_buffer(grad_normalised)
        grad_inputs, grad_norm_weight = torch.empty_like(inputs), torch.empty_like(norm_weight)
        allocate_workspace(inputs)
        del grad, grad_normalised, reciprocal
        return grad_inputs, grad_norm_weight, grad_weight, grad_bias, None, None


def _backward_of_frozen(
    ctx: Any,
    inputs: torch.Tensor,
    norm_weight: torch.Tensor,
    grad: torch.Tensor,
    grad_returned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gradient of what a norm and its frozen linear read; TE makes the norm's own gradient all the same."""
    layer, split = ctx.layer, ctx.layer.split
    layer.complete_weight()
    shape = *grad.shape[:-1], inputs.shape[-1]
    grad_normalised, _ = split.enter_backward(lambda: inputs.new_empty(shape), inputs, shape)
    if grad_returned is not None and not ctx.returns_gathered:
        grad_normalised = torch.empty_like(grad_normalised)
    grad_inputs, _ = torch.empty_like(inputs), torch.empty_like(norm_weight)
    allocate_workspace(inputs)
    return grad_inputs


class _GroupedLinear(torch.autograd.Function):
    """``grouped_linear.py``."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        layer: Fp8GroupedLinear,
        splits: Splits,
        is_training: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = parameters[: layer.num_gemms], parameters[layer.num_gemms :]
        saves_inputs, is_trained = layer.save_original_input, is_training and weights[0].requires_grad
        quantized = layer.recipe.quantize_rows(splits, inputs.shape[1], columnwise=is_trained and not saves_inputs)
        _held = layer.quantize_weight(columnwise=(is_training and inputs.requires_grad) or _asks_for_columns(layer))
        output = inputs.new_empty((inputs.shape[0], weights[0].shape[0]))
        multiplies("grouped linear")
        if is_training:
            quantized.rowwise = []
            saved = Quantized() if saves_inputs or not is_trained else quantized
            _save(ctx, saved, inputs if saves_inputs and is_trained else None, *weights)
            ctx.layer, ctx.splits, ctx.saves_inputs, ctx.biases = layer, splits, saves_inputs, biases
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _, *weights, saved = _saved(ctx)
        layer, recipe, splits = ctx.layer, ctx.layer.recipe, ctx.splits
        out_width, width = weights[0].shape
        grad_output = grads[0].contiguous()
        # Added up where each expert's gradient is quantized (``bgrad_quantize``), or before (blockwise).
        grad_biases = [torch.empty_like(bias) for bias in ctx.biases]
        grad = recipe.quantize_rows(splits, out_width, columnwise=True)
        grad_inputs = grad_output.new_empty((grad_output.shape[0], width))
        layer.complete_weight()
        if not weights[0].requires_grad:
            return grad_inputs, *[None] * (3 + len(weights) + len(grad_biases))
        grad_weights = [empty_weight_gradient(weight) for weight in layer.of_each("weight")]
        if ctx.saves_inputs:
            saved = recipe.quantize_rows(splits, width, rowwise=recipe.gathers_rows_only, columnwise=True)
        saved.clear()
        del grad, saved
        return grad_inputs, None, None, None, *grad_weights, *grad_biases


def _entered(
    layer: Fp8Linear | Fp8NormLinear,
    own: Quantized,
    rows: int,
    width: int,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    in_buffer: bool = False,
) -> tuple[Quantized, list[torch.Tensor]]:
    """Returns the operand of a matrix product that a column-parallel linear gathers from `own`.

    Args:
        layer: The linear; another one than column-parallel takes `own` as it is.
        rowwise: Whether row-wise values are gathered.
        columnwise: Whether column-wise values are needed.
        in_buffer: Whether a user buffer has the values; a transposed copy of them is then made later.

    Returns:
        The operand, and what lives until the transfer has ended.
    """
    if layer.split.way != "column":
        return own, []
    if in_buffer:
        return layer.recipe.gather_in_buffer(rows, layer.split.ranks, width, columnwise=columnwise), []
    entered, arriving = layer.recipe.gather(rows, layer.split.ranks, width, rowwise=rowwise, columnwise=columnwise)
    # Column-wise values are sent in backward, where TE empties the sent tensors itself.
    _note_kept(layer.recipe, [*(own.rowwise if rowwise else ()), *arriving])
    return entered, arriving


def _left_backward(layer: Fp8Linear | Fp8NormLinear, grad: torch.Tensor, *, columnwise: bool = True) -> Quantized:
    """Returns the output's gradient in FP8, which a row-parallel linear gathers (`grad_output_preprocess`).

    `te.Linear` leaves column-wise values out where its weight is frozen; the linear fused with a norm does not.
    """
    rows, width = _size(grad)
    recipe, split = layer.recipe, layer.split
    if split.way != "row":
        return recipe.quantize(rows, width, columnwise=columnwise)
    if split.overlap.gathers:
        own = recipe.quantize(rows, width, columnwise=False)
        in_buffer = recipe.gather_in_buffer(rows, split.ranks, width, columnwise=False)
        in_buffer.shared = own.shared
        return in_buffer
    own = recipe.quantize(rows, width, columnwise=columnwise and not recipe.gathers_rows_only)
    gathered, arriving = recipe.gather(rows, split.ranks, width, rowwise=True, columnwise=columnwise)
    # `te.Linear` empties the gathered values where it makes a weight's gradient (linear.py, 2.16.1); those of a frozen
    # weight may be kept as well. Scales that arrive in tensors of their own are not the operand's.
    received = [] if columnwise else gathered.rowwise[:1] if arriving else gathered.rowwise
    _note_kept(recipe, [*own.tensors(), *arriving, *received])
    del own
    return gathered


def _gathered_by_column(layer: Fp8Linear, gathered: Quantized, grad: torch.Tensor) -> list[Quantized]:
    """Gives the weight's product what it reads of the output's gradient by column, where a user buffer has that.

    Args:
        layer: A row-parallel linear.
        gathered: The gradient of all ranks, as the input's product has read it.
        grad: The rank's part of the gradient.

    Returns:
        What lives until backward has ended.
    """
    (rows, width), ranks, recipe = _size(grad), layer.split.ranks, layer.recipe
    if recipe.gathers_rows_only:
        gathered.columnwise += recipe.transposed(rows * ranks, width)
        return []
    # MXFP8 is quantized and gathered a second time: values by row do not give those by column.
    own = recipe.quantize(rows, width, rowwise=False, columnwise=True)
    gathered.columnwise = recipe.gather_in_buffer(rows, ranks, width, columnwise=True).columnwise
    gathered.rowwise = []
    return [own]


def _note_kept(recipe: Recipe, tensors: Iterable[torch.Tensor]) -> None:
    """Reports what torch may keep of a gather: all tensors sent and received, except those that TE empties itself.

    TE opens ``_coalescing_manager(group, device)``, which waits for the work object of ``_end_coalescing`` and drops
    that of the collective (``torch/distributed/distributed_c10d.py``, 2.11). The dropped one holds the tensors. torch's
    watchdog, which looks every 100 ms, must first find that the GPU has run it; then the next collective of the group
    frees them (``shelvesToUnstash_``, ``ProcessGroupNCCL.cpp``). Measured: `labs/LOG.md`, 2026-11-24, night.
    """
    if recipe.gathers_scales:
        kept_by_collective(tensors)


def _entered_shape(inputs: torch.Tensor, split: Split, *, backward: bool = False) -> tuple[int, ...]:
    """Returns the leading sizes of a product: the sequence is gathered before it, or in backward after it."""
    length, *others = inputs.shape[:-1]
    return length * (split.ranks if split.way == ("row" if backward else "column") else 1), *others


def _size(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.shape[:-1].numel(), matrix.shape[-1]


def _save(ctx: Any, quantized: Quantized, *others: torch.Tensor | None) -> None:
    """Saves each tensor of a matrix in FP8 by itself, as TE's ``prepare_for_saving`` does."""
    ctx.save_for_backward(*others, *quantized.tensors())
    ctx.counts = len(others), len(quantized.rowwise), len(quantized.columnwise)


def _saved(ctx: Any) -> list[Any]:
    """Returns what `_save` saved: the others in order, then the matrix in FP8."""
    tensors = list(ctx.saved_tensors)
    ends = list(accumulate(ctx.counts))
    quantized = Quantized(tensors[ends[0] : ends[1]], tensors[ends[1] : ends[2]], tensors[ends[2] :])
    return [*tensors[: ends[0]], quantized]


Place = Literal["around layers", "inside layers"]
_checkpoint: Place | None = None
"""Which checkpoint's first pass runs: Megatron's around whole layers, or one inside a layer's FP8 context."""


def _asks_for_columns(layer: _Fp8Module) -> bool:
    """Whether the first pass of a checkpoint quantizes weights column-wise too (`is_fp8_activation_recompute_enabled`).

    TE before 2.19 asks whether FP8 is on where the checkpoint begins. Around whole layers it is on only under the
    delayed recipe, whose context Megatron opens around all layers (``transformer_block.py``). TE 2.19 and later ask in
    the linear (``transformer_engine/pytorch/distributed.py``), so that a checkpoint around layers is as one inside.
    """
    return _checkpoint == "inside layers" or (_checkpoint == "around layers" and layer.recipe.spans_layers)


def checkpointed(
    place: Place | None,
    function: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoints as Megatron does without FP8: TE's `_CheckpointFunction` saves the same tensors.

    Args:
        place: Where it is, for `_asks_for_columns`; None tells the linears nothing of this checkpoint.
        args: Of `function`. Only their gradients are computed.
    """

    def run(*inputs: Any) -> Any:
        if torch.is_grad_enabled() or place is None:
            return function(*inputs, **kwargs)
        with _first_pass(place):
            return function(*inputs, **kwargs)

    return tensor_parallel.checkpoint(run, distribute_saved_activations, *args)


@contextmanager
def _first_pass(place: Place) -> Iterator[None]:
    global _checkpoint  # noqa: PLW0603  # TE keeps it in the module too
    outer, _checkpoint = _checkpoint, place
    try:
        yield
    finally:
        _checkpoint = outer


class Fp8Padding(torch.nn.Module):
    """Pads each expert's rows to a multiple of the recipe's alignment (``module/fp8_padding.py``)."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size or _latest_recipe.row_alignment

    def forward(self, inputs: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Returns [padded rows, width] and the padded rows of each expert."""
        padded = _padded_rows(splits, self.align_size)
        return (inputs if padded == splits else _Resized.apply(inputs, sum(padded))), padded


class Fp8Unpadding(Fp8Padding):
    """Undoes `Fp8Padding` (``module/fp8_unpadding.py``)."""

    def forward(self, inputs: torch.Tensor, splits: list[int]) -> torch.Tensor:  # type: ignore[override]
        """Returns [rows, width]."""
        if _padded_rows(splits, self.align_size) == splits:
            return inputs
        return _Resized.apply(inputs, sum(splits))


def _padded_rows(splits: list[int], alignment: int) -> list[int]:
    """Returns the rows of each expert, rounded up to a multiple of the alignment."""
    return [-(-rows // alignment) * alignment for rows in splits]


class _Resized(torch.autograd.Function):
    """Copies rows into a tensor with other space between them, and back in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.num_rows = len(inputs)
        return inputs.new_empty((num_rows, inputs.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = grads[0].contiguous()
        return grad.new_empty((ctx.num_rows, grad.shape[1])), None
