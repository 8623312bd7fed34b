"""How a linear is split over tensor-parallel ranks: what it gathers, scatters and sums.

As Transformer Engine does it (``linear.py`` and ``layernorm_linear.py`` of ``transformer_engine/pytorch/module``): a
column-parallel linear gathers its input along the sequence, again in backward, and scatters its input's gradient; a
row-parallel one scatters its output, and gathers the output's gradient. Without sequence parallelism each rank has the
whole sequence: the input's gradient and the output are summed in place. On one rank nothing is transferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class Split:
    """The collectives of a linear, before and after its matrix product."""

    way: Literal["column", "row"] | None = None
    group: Any = None
    ranks: int = 1
    splits_sequence: bool = True

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the input of the matrix product."""
        return _gather_along_first_dim(inputs, self.group) if self.way == "column" and self.splits_sequence else inputs

    def enter_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of what `enter` took."""
        return self._summed(grad) if self.way == "column" else grad

    def leave(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the linear's output."""
        return self._summed(outputs) if self.way == "row" else outputs

    def leave_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of what `leave` took."""
        return _gather_along_first_dim(grad, self.group) if self.way == "row" and self.splits_sequence else grad

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.splits_sequence:
            return _reduce_scatter_along_first_dim(tensor, self.group)
        torch.distributed.all_reduce(tensor, group=self.group)
        return tensor


WHOLE = Split()


def split_of(way: Literal["column", "row"] | None, config: TransformerConfig) -> Split:
    """Returns how a linear of the model is split under its layout."""
    if way is None or config.tensor_model_parallel_size == 1:
        return WHOLE
    group, ranks = parallel_state.get_tensor_model_parallel_group(), config.tensor_model_parallel_size
    return Split(way, group, ranks, config.sequence_parallel)
