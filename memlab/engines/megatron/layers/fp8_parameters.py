"""Weights whose only copy is in FP8, as fake tensors: Megatron's ``--fp8-param-gather``.

Read in Transformer Engine 2.12.0 (`TransformerEngineBaseModule.reset_parameters` and ``tensor/utils.py`` of
``transformer_engine/pytorch``) and megatron-core 0.16.1 (``fp8_utils.py``). Megatron's DDP keeps the row-wise values of
all weights in one buffer of uint8; column-wise values and scales stay with each weight.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.megatron.layers.fp8_recipes import BlockRecipe, MxRecipe, Quantized, Recipe


class Fp8Parameter(torch.nn.Parameter):
    """Looks like a bf16 parameter of shape [rows, width], and holds its values in `quantized`.

    Its own storage is the one of a scale, as if all elements were the scale's first: TE's `QuantizedTensor` has none.
    """

    quantized: Quantized
    recipe: Recipe
    original: torch.Tensor | None
    """The values before they were quantized, on the host, from which the optimizer makes the main parameters."""

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, recipe: Recipe) -> Fp8Parameter:
        """Quantizes a parameter, and keeps its attributes."""
        original = parameter.detach().cpu()
        rows, width = parameter.shape
        quantized = recipe.quantize(rows, width, columnwise=True, is_weight=True)
        scale = (quantized.shared or quantized.rowwise[1:])[0]
        own = scale.view(-1)[:2].view(parameter.dtype)[:1].expand(rows, width)
        kind = MxParameter if type(recipe) is MxRecipe else cls
        made: Fp8Parameter = torch.Tensor._make_subclass(kind, own, True)
        vars(made).update(vars(parameter))
        made.quantized, made.recipe, made.original = quantized, recipe, original
        return made

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Returns `original`; Megatron calls it when it builds the optimizer."""
        assert self.original is not None
        return self.original

    def clear_high_precision_init_val(self) -> None:
        """Drops `original`."""
        self.original = None


class MxParameter(Fp8Parameter):
    """One in MXFP8: DDP leaves it outside its buffers, and writes what it has gathered into it in place."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter without its history."""
        return torch.Tensor._make_subclass(MxParameter, super().data)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Quantizes values in place, in one kernel without temporaries (`MXFP8Quantizer.update_quantized`)."""
        return self


def is_mx(parameter: torch.Tensor) -> bool:
    """Replaces ``is_mxfp8tensor``."""
    return isinstance(parameter, MxParameter)


def move_rows(parameter: Fp8Parameter, buffer: torch.Tensor) -> None:
    """Replaces ``_modify_underlying_storage_impl``: the row-wise values move into DDP's buffer."""
    quantized, values = parameter.quantized, parameter.quantized.rowwise[0]
    buffer.detach().copy_(values)
    quantized.rowwise[0] = buffer
    quantized.columnwise = [tensor for tensor in quantized.columnwise if tensor is not values]


def quantize_main_parameters(
    parameters: list[Fp8Parameter], main_parameters: list[torch.Tensor | None], *_: Any, **__: Any
) -> None:
    """Replaces ``_quantize_param_shard_impl``, after an update (`cast_master_weights_to_fp8`).

    All main parameters are cast to bf16 before the first of them is quantized.
    """
    cast = [main.to(torch.bfloat16) for main in main_parameters if main is not None]
    scales = [torch.empty_like(each.quantized.rowwise[1]) for each in parameters if type(each.recipe) is BlockRecipe]
    del cast, scales
