"""What Transformer Engine allocates to hold a matrix in FP8, by recipe, as fake tensors.

Read in TE 2.12.0: ``tensor/float8_tensor.py``, ``float8_blockwise_tensor.py`` and ``mxfp8_tensor.py`` of
``transformer_engine/pytorch``, and ``csrc/quantizer.cpp`` and ``csrc/extensions/cast.cpp``. A matrix product needs
row-wise values of one operand and column-wise values of the other, so most matrices exist twice. On Hopper the
column-wise values are a transposed copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from memlab.meter.labels import in_user_buffer

_ROUNDED_SCALAR = 128
"""fp32 elements of the 512 bytes that torch's allocator takes for a tensor of one element."""
_BULK_ALIGNMENT, _SCALE_ALIGNMENT = 256, 16
"""Bytes to which `split_quantize` aligns values and scales in one buffer (``bulk_allocate_fp8_blockwise_tensors``)."""

Splits = tuple[int, ...]
"""Rows of each of the matrices that lie one below the other in a grouped linear."""


@dataclass(eq=False)
class Quantized:
    """The tensors of a matrix, or of a group of matrices, in FP8."""

    rowwise: list[torch.Tensor] = field(default_factory=list)
    """Values that are read by row, with their scales."""
    columnwise: list[torch.Tensor] = field(default_factory=list)
    """Values that are read by column, with their scales."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """Scales that both use."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors, as they are saved for backward."""
        return [*self.rowwise, *self.columnwise, *self.shared]

    def outside_the_buffer(self) -> list[torch.Tensor]:
        """Returns what a weight in FP8 keeps besides its row-wise values, which are in DDP's buffer."""
        return [*self.rowwise[1:], *self.columnwise, *self.shared]

    def clear(self) -> None:
        """Frees the values although other names still refer to their tensors (TE's ``clear_tensor_data``)."""
        for tensor in (*self.rowwise, *self.columnwise):
            tensor.data = tensor.new_empty(0)


class Recipe(ABC):
    """How matrices are scaled. Sizes are [rows, width]; every dtype but of the scales is uint8."""

    fuses_norm: ClassVar[bool] = False
    """Whether the norm's kernel writes FP8; without, it writes bf16, which is then quantized (`normalization.cpp`)."""
    gathers_rows_only: ClassVar[bool] = False
    """Whether only row-wise values can be gathered over ranks; each rank then transposes what it gathered."""
    gathers_scales: ClassVar[bool] = False
    """Whether values and their scales are gathered in one coalesced collective, of which torch keeps what is sent and
    received (`memlab.engines.megatron.layers.fake_fp8._note_kept`)."""
    renews_incomplete: ClassVar[bool] = True
    """Whether a cached weight without the values that a step needs is replaced (``get_weight_workspace``)."""
    spans_layers: ClassVar[bool] = False
    """Whether Megatron opens one FP8 context around all layers, in place of one per layer."""
    row_alignment: ClassVar[int] = 16
    """Experts' rows are padded to a multiple of this."""

    @abstractmethod
    def quantize(
        self, rows: int, width: int, *, rowwise: bool = True, columnwise: bool, is_weight: bool = False
    ) -> Quantized:
        """Returns the tensors of one matrix."""

    @abstractmethod
    def quantize_rows(self, splits: Splits, width: int, *, rowwise: bool = True, columnwise: bool) -> Quantized:
        """Returns the tensors of the activations of a grouped linear, `splits` rows for each expert."""

    def gather(
        self, rows: int, ranks: int, width: int, *, rowwise: bool = True, columnwise: bool
    ) -> tuple[Quantized, list[torch.Tensor]]:
        """Returns what `ranks` parts of `rows` rows make together, and what lives until they have been gathered.

        See ``gather_along_first_dim`` (``transformer_engine/pytorch/distributed.py``).
        """
        return self.quantize(rows * ranks, width, rowwise=rowwise, columnwise=columnwise), []

    def gather_in_buffer(self, rows: int, ranks: int, width: int, *, columnwise: bool) -> Quantized:
        """Returns what `gather` does, with its values in a user buffer.

        See ``fill_userbuffers_buffer_for_all_gather`` (``transformer_engine/pytorch/module/base.py``), which takes no
        other recipes.
        """
        raise NotImplementedError(f"{type(self).__name__}: no user buffers")

    def transposed(self, rows: int, width: int) -> list[torch.Tensor]:
        """Returns the transposed copy of what `gather_in_buffer` returned, if the recipe has one."""
        return []

    def quantize_weights(
        self, count: int, rows: int, width: int, *, rowwise: bool = True, columnwise: bool
    ) -> Quantized:
        """Returns the tensors of `count` weights, each allocated on its own."""
        parts = [
            self.quantize(rows, width, rowwise=rowwise, columnwise=columnwise, is_weight=True) for _ in range(count)
        ]
        return _joined(parts)

    def state(self, num_matrix_products: int) -> list[torch.Tensor]:
        """Returns what the quantizers of a module keep: three for forward, two for backward per matrix product."""
        return []


class TensorRecipe(Recipe):
    """One scale per tensor, of this tensor (``tensorwise``: `Float8CurrentScalingQuantizer`)."""

    gathers_rows_only = True
    transposes: ClassVar[bool] = True
    """Whether products need a transposed copy where they read a matrix by column (`non_tn_fp8_gemm`)."""

    def quantize(
        self, rows: int, width: int, *, rowwise: bool = True, columnwise: bool, is_weight: bool = False
    ) -> Quantized:
        return self._with_scales([rows], width, rowwise=rowwise, columnwise=columnwise)

    def quantize_rows(self, splits: Splits, width: int, *, rowwise: bool = True, columnwise: bool) -> Quantized:
        return self._with_scales(splits, width, rowwise=rowwise, columnwise=columnwise)

    def quantize_weights(
        self, count: int, rows: int, width: int, *, rowwise: bool = True, columnwise: bool
    ) -> Quantized:
        return self._with_scales([rows] * count, width, rowwise=rowwise, columnwise=columnwise or not self.transposes)

    def gather_in_buffer(self, rows: int, ranks: int, width: int, *, columnwise: bool) -> Quantized:
        with in_user_buffer():  # the scale is that of the rank's own part
            return Quantized([_values(rows * ranks, width)])

    def transposed(self, rows: int, width: int) -> list[torch.Tensor]:
        return [_values(width, rows)] if self.transposes else []

    def state(self, num_matrix_products: int) -> list[torch.Tensor]:
        # Each quantizer has a scale and an amax, tensors of one element.
        return [_scalars(2 * 5 * num_matrix_products)]

    def _with_scales(self, splits: list[int] | Splits, width: int, *, rowwise: bool, columnwise: bool) -> Quantized:
        made = Quantized()
        for rows in splits:
            if rowwise:
                made.rowwise.append(_values(rows, width))
            if columnwise:
                is_copy = self.transposes or not rowwise
                made.columnwise.append(_values(width, rows) if is_copy else made.rowwise[-1])
        made.shared.append(_scalars(len(splits)))
        return made


class DelayedRecipe(TensorRecipe):
    """One scale per tensor, of earlier steps (``delayed``: `Float8Quantizer`)."""

    fuses_norm = True
    spans_layers = True

    def state(self, num_matrix_products: int) -> list[torch.Tensor]:
        # Scales and amaxes of all quantizers, in forward and in backward; a history of one amax is Megatron's default
        # (``DelayedScalingRecipeState``, quantization.py; ``fp8_amax_history_len``, transformer_config.py).
        return [_scales(count * num_matrix_products) for count in (3, 3, 2, 2)]


class TensorRecipeOfBlackwell(TensorRecipe):
    """As `TensorRecipe` on a GPU that multiplies FP8 matrices in any layout: both products read the same values."""

    transposes = False


class DelayedRecipeOfBlackwell(DelayedRecipe):
    """As `DelayedRecipe` there."""

    transposes = False


class BlockRecipe(Recipe):
    """A scale per 128 values of a row, and per 128 x 128 values of a weight (``blockwise``: `Float8BlockQuantizer`)."""

    gathers_scales = True
    renews_incomplete = False
    block: ClassVar[int] = 128
    scale_bytes: ClassVar[int] = 4

    def quantize(
        self, rows: int, width: int, *, rowwise: bool = True, columnwise: bool, is_weight: bool = False
    ) -> Quantized:
        made = Quantized()
        if rowwise:
            made.rowwise += [_values(rows, width), self._scale(self._scale_shape(rows, width, is_weight))]
        if columnwise:
            made.columnwise += [
                self._column_values(rows, width),
                self._scale(self._column_scale_shape(rows, width, is_weight)),
            ]
        return made

    def quantize_rows(self, splits: Splits, width: int, *, rowwise: bool = True, columnwise: bool) -> Quantized:
        made = Quantized()
        if rowwise:
            made.rowwise.append(self._bulk([(rows * width, self._scale_shape(rows, width)) for rows in splits]))
        if columnwise:
            made.columnwise.append(
                self._bulk([(rows * width, self._column_scale_shape(rows, width)) for rows in splits])
            )
        return made

    def gather(
        self, rows: int, ranks: int, width: int, *, rowwise: bool = True, columnwise: bool
    ) -> tuple[Quantized, list[torch.Tensor]]:
        made, _ = super().gather(rows, ranks, width, rowwise=rowwise, columnwise=columnwise)
        # Transposed tensors arrive rank by rank, and are then interleaved (`_finish_all_gather_fp8_blockwise`).
        arriving = [torch.empty_like(made.rowwise[1])] if rowwise else []
        return made, arriving + ([torch.empty_like(made.columnwise[0])] if columnwise else [])

    def _scale_shape(self, rows: int, width: int, is_weight: bool = False) -> tuple[int, int]:
        blocks = math.ceil(width / self.block)
        if is_weight:
            return math.ceil(rows / self.block), _rounded_up(blocks, 4)
        return blocks, _rounded_up(rows, 4)

    def _column_scale_shape(self, rows: int, width: int, is_weight: bool = False) -> tuple[int, int]:
        return self._scale_shape(width, rows, is_weight)

    def _column_values(self, rows: int, width: int) -> torch.Tensor:
        return _values(width, rows)

    def _scale(self, shape: tuple[int, int]) -> torch.Tensor:
        return _scales(*shape)

    def _bulk(self, parts: list[tuple[int, tuple[int, int]]]) -> torch.Tensor:
        """Returns the one buffer of all parts: their values, then their scales."""
        end = 0
        for num_values, _ in parts:
            end = _rounded_up(end, _BULK_ALIGNMENT) + num_values
        for _, scale_shape in parts:
            end = _rounded_up(end, _SCALE_ALIGNMENT) + math.prod(scale_shape) * self.scale_bytes
        return _values(end)


class MxRecipe(BlockRecipe):
    """A scale of one byte per 32 values of a row or of a column (``mxfp8``: `MXFP8Quantizer`), on Blackwell."""

    renews_incomplete = True
    row_alignment = 32
    block = 32
    scale_bytes = 1

    def gather_in_buffer(self, rows: int, ranks: int, width: int, *, columnwise: bool) -> Quantized:
        with in_user_buffer():
            values = _values(rows * ranks, width)
        lines, others = (self._column_scale_shape if columnwise else self._scale_shape)(rows, width)
        made = [values, self._scale((lines * ranks, others))]
        return Quantized(columnwise=made) if columnwise else Quantized(made)

    def _scale_shape(self, rows: int, width: int, is_weight: bool = False) -> tuple[int, int]:
        return _rounded_up(rows, 128), _rounded_up(math.ceil(width / self.block), 4)

    def _column_scale_shape(self, rows: int, width: int, is_weight: bool = False) -> tuple[int, int]:
        return _rounded_up(math.ceil(rows / self.block), 4), _rounded_up(width, 128)

    def _column_values(self, rows: int, width: int) -> torch.Tensor:
        return _values(rows, width)

    def _scale(self, shape: tuple[int, int]) -> torch.Tensor:
        return _values(*shape)


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedRecipe(),
    "tensorwise": TensorRecipe(),
    "blockwise": BlockRecipe(),
    "mxfp8": MxRecipe(),
}
OF_BLACKWELL: dict[str, Recipe] = {"delayed": DelayedRecipeOfBlackwell(), "tensorwise": TensorRecipeOfBlackwell()}
"""Where `non_tn_fp8_gemm` is on."""


def _joined(parts: list[Quantized]) -> Quantized:
    return Quantized(
        [tensor for part in parts for tensor in part.rowwise],
        [tensor for part in parts for tensor in part.columnwise],
        [tensor for part in parts for tensor in part.shared],
    )


def _values(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=torch.cuda.current_device())


def _scales(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=torch.cuda.current_device())


def _scalars(count: int) -> torch.Tensor:
    """Returns one tensor in place of `count` tensors of one element each, with as many allocated bytes."""
    return _scales(count, _ROUNDED_SCALAR)


def _rounded_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
