"""How a linear is split over tensor-parallel ranks: what it gathers, scatters and sums.

As Transformer Engine does it (``linear.py`` and ``layernorm_linear.py`` of ``transformer_engine/pytorch/module``): a
column-parallel linear gathers its input along the sequence, again in backward, and scatters its input's gradient; a
row-parallel one scatters its output, and gathers the output's gradient. Without sequence parallelism each rank has the
whole sequence: the input's gradient and the output are summed in place. On one rank nothing is transferred.

With ``tp_comm_overlap``, what is gathered is in user buffers, and what is summed passes through them: torch's allocator
has neither. Read in 2.12.0 and 2.16.1, also ``module/base.py`` and ``csrc/extensions/gemm.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.meter.labels import in_user_buffer

_Product = Callable[[], torch.Tensor]
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which collectives of a linear go through user buffers."""

    gathers: bool = False
    """A column-parallel linear's input in forward, or a row-parallel one's gradient (``ub_overlap_ag``)."""
    scatters: bool = False
    """The output of a row-parallel linear (``ub_overlap_rs``)."""
    scatters_backward: bool = False
    """The input's gradient, while its product is computed (``ub_overlap_rs_dgrad``)."""
    gathers_again: bool = False
    """The input for the weight's gradient, beside the product of the input's gradient (``ub_bulk_dgrad``)."""
    scatters_beside: bool = False
    """The input's gradient, beside the product of the weight's gradient (``ub_bulk_wgrad``)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The collectives of a linear, before and after its matrix product."""

    way: Literal["column", "row"] | None = None
    group: Any = None
    ranks: int = 1
    splits_sequence: bool = True
    overlap: Overlap = Overlap()

    def without_gathers(self) -> Split:
        """Returns the split whose input is gathered by NCCL, as a norm's linear does without gradients."""
        return replace(self, overlap=replace(self.overlap, gathers=False)) if self.overlap.gathers else self

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the input of the matrix product."""
        return self._gathered(inputs, in_buffer=self.overlap.gathers) if self.way == "column" else inputs

    def enter_again(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns what `enter` does, for the weight's gradient."""
        return self._gathered(inputs, in_buffer=self.overlap.gathers_again) if self.way == "column" else inputs

    def enter_backward(
        self, multiply: _Product, like: torch.Tensor, shape: _Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradient of what `enter` took, and that of the product's input, from which it was made.

        Args:
            multiply: Computes the latter.
            like: A tensor of its type.
            shape: Of it.
        """
        if self.way != "column":
            return (product := multiply()), product
        if self.overlap.scatters_backward:
            return self._through_buffer(multiply, like, shape)
        with in_user_buffer(self.overlap.scatters_beside):
            product = multiply()
            return self._summed(product), product

    def out_of_buffer(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of `enter_backward` as it leaves the linear: a copy, if a user buffer has it."""
        return grad.clone() if self.overlap.scatters_beside else grad

    def leave(self, multiply: _Product, like: torch.Tensor, shape: _Shape) -> torch.Tensor:
        """Returns the linear's output.

        Args:
            multiply: Computes the product.
            like: A tensor of its type.
            shape: Of it.
        """
        if self.overlap.scatters:
            return self._through_buffer(multiply, like, shape)[0]
        return self._summed(multiply()) if self.way == "row" else multiply()

    def leave_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of what `leave` took."""
        return self._gathered(grad, in_buffer=self.overlap.gathers) if self.way == "row" else grad

    def _gathered(self, tensor: torch.Tensor, *, in_buffer: bool) -> torch.Tensor:
        if not self.splits_sequence:
            return tensor
        with in_user_buffer(in_buffer):
            return _gather_along_first_dim(tensor, self.group)

    def _through_buffer(
        self, multiply: _Product, like: torch.Tensor, shape: _Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scattered product, and the product.

        TE allocates the former first, and then a whole product to which nothing is written: the chunks are in the user
        buffer (`get_buffer_chunk_like` in ``common/comm_gemm_overlap/comm_gemm_overlap.cpp``).
        """
        own = like.new_empty((shape[0] // self.ranks, *shape[1:]))
        product = multiply()
        with in_user_buffer():
            own.copy_(self._summed(product))
        return own, product

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.splits_sequence:
            return _reduce_scatter_along_first_dim(tensor, self.group)
        torch.distributed.all_reduce(tensor, group=self.group)
        return tensor


WHOLE = Split()


def split_of(
    way: Literal["column", "row"] | None,
    config: TransformerConfig,
    buffer_name: str | None = None,
    *,
    has_norm: bool = False,
) -> Split:
    """Returns how a linear of the model is split under its layout.

    Args:
        way: Along which dimension of its weight.
        buffer_name: Megatron's name of its user buffers (``tp_comm_buffer_name``), as ``qkv``.
        has_norm: Whether a norm is fused with it.
    """
    if way is None or config.tensor_model_parallel_size == 1:
        return WHOLE
    group, ranks = parallel_state.get_tensor_model_parallel_group(), config.tensor_model_parallel_size
    return Split(way, group, ranks, config.sequence_parallel, _overlap_of(way, config, buffer_name, has_norm=has_norm))


def _overlap_of(way: str, config: TransformerConfig, name: str | None, *, has_norm: bool) -> Overlap:
    """Returns what ``megatron/core/extensions/transformer_engine.py``, 0.16.1 and 0.19.2, makes of the options."""
    if not config.tp_comm_overlap or not config.sequence_parallel or name is None:
        return Overlap()
    if way == "row":
        return Overlap(gathers=config.tp_comm_overlap_ag, scatters=config.tp_comm_overlap_rs)
    if not has_norm:
        return Overlap(gathers=config.tp_comm_overlap_ag)
    is_on = not getattr(config, f"tp_comm_overlap_disable_{name}", False)
    scatters = is_on and config.tp_comm_overlap_rs_dgrad
    return Overlap(
        gathers=is_on and config.tp_comm_overlap_ag,
        scatters_backward=scatters,
        gathers_again=config.tp_comm_bulk_dgrad and not scatters,
        scatters_beside=config.tp_comm_bulk_wgrad and not scatters,
    )
