"""The workspace of a norm's backward in Transformer Engine: parts of the weights' gradients, in fp32.

The kernel runs in as many blocks as an H100 or H200 holds at once (132 multiprocessors). Each block, or several that
share a row, adds up a part of the weight's gradient, and of LayerNorm's bias; another kernel adds the parts up
(``rmsnorm_bwd_semi_cuda_kernel.cu``, ``ln_bwd_semi_cuda_kernel.cu`` and ``LaunchParams`` in
``transformer_engine/common/normalization``, 2.12.0 to 2.16.1). How many blocks a multiprocessor holds follows from
the registers of each kernel for compute capability 9.0 (read with ``cuobjdump -res-usage`` in 2.16.1's wheel for CUDA
13, bf16): the bytes are those that an H200 allocated for 15 widths of RMSNorm and three of LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_SMS = 132
_ALIGNMENT = 16
_BYTES_OF_SUMS = 8 * 2
"""Two sums in fp32 of a block's rows, in two turns."""
_BYTES_OF_BARRIER = 4 * 2


class _Kernel(NamedTuple):
    blocks_of_sm: int
    blocks_of_row: int = 1
    rows_of_block: int = 1


_TUNED_RMS = {
    **{width: _Kernel(blocks, rows_of_block=4) for width, blocks in ((512, 6), (768, 4), (1024, 3))},
    **{width: _Kernel(blocks) for width, blocks in ((2048, 5), (4096, 3), (8192, 2))},
}
_TUNED_LAYER_NORM = {
    **{width: _Kernel(blocks, rows_of_block=4) for width, blocks in ((768, 3), (1024, 2))},
    **{width: _Kernel(blocks) for width, blocks in ((1536, 5), (2048, 4), (2304, 3), (3072, 3), (3840, 2))},
    **{width: _Kernel(blocks) for width, blocks in ((4096, 2), (5120, 2), (6144, 1))},
    **{width: _Kernel(2, blocks_of_row=2) for width in (8192, 10240)},
    **{width: _Kernel(2, blocks_of_row=4) for width in (15360, 16384, 18432, 20480)},
    **{width: _Kernel(1, blocks_of_row=4) for width in (24576, 30720, 32768, 40960)},
    **{width: _Kernel(1, blocks_of_row=8) for width in (49152, 65536)},
    12288: _Kernel(3, blocks_of_row=4),
    12800: _Kernel(4, blocks_of_row=5),
    25600: _Kernel(2, blocks_of_row=5),
}
_GENERAL_RMS = {128: 12, 512: 4, 1024: 3, 2048: 5, 4096: 3}
_GENERAL_LAYER_NORM = {128: 10, 512: 4, 1024: 2, 2048: 4, 4096: 2}
"""Blocks of a multiprocessor, by the width up to which a kernel takes a row as a whole; the last one splits rows."""
_FOUR_ROWS_UP_TO = 1024


def bytes_of_workspace(rows: int, width: int, *, is_layer_norm: bool = False) -> int:
    """Returns what the backward of a norm over `width` values of each of `rows` rows allocates beside its results.

    Args:
        rows: Tokens, or tokens times heads for a norm of each head.
        width: Values that are normalised together.
        is_layer_norm: Whether the norm has a bias, so that parts of two gradients are added up.
    """
    tuned = _TUNED_LAYER_NORM if is_layer_norm else _TUNED_RMS
    if width in tuned:
        kernel = tuned[width]
        columns = _SMS * kernel.blocks_of_sm // kernel.blocks_of_row
    else:
        general = _GENERAL_LAYER_NORM if is_layer_norm else _GENERAL_RMS
        of_row = next((most for most in general if width <= most), max(general))
        rows_of_block = 4 if of_row <= _FOUR_ROWS_UP_TO else 1
        kernel = _Kernel(general[of_row], -(-width // of_row), rows_of_block)
        columns = min(-(-rows // rows_of_block), _SMS * kernel.blocks_of_sm // kernel.blocks_of_row)
    parts = _aligned(4 * columns * width)
    if kernel.blocks_of_row == 1:
        return (1 + is_layer_norm) * parts
    sums = columns * kernel.rows_of_block * kernel.blocks_of_row * _BYTES_OF_SUMS
    return (1 + is_layer_norm) * parts + _aligned(sums) + _aligned(columns * _BYTES_OF_BARRIER)


def allocate_workspace(inputs: torch.Tensor, *, is_layer_norm: bool = False) -> torch.Tensor:
    """Returns the workspace for the gradient of a norm's input [..., width], which lives as long as the kernel."""
    width = inputs.shape[-1]
    num_bytes = bytes_of_workspace(inputs.numel() // width, width, is_layer_norm=is_layer_norm)
    return torch.empty(num_bytes, dtype=torch.uint8, device=inputs.device)


def with_workspace(norm_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `torch_functions.norm_backward` with the workspace of a GPU's kernel."""

    def beside_workspace(
        grad: torch.Tensor, inputs: torch.Tensor, of_rows: list[torch.Tensor], weight: torch.Tensor
    ) -> Any:
        gradients = norm_backward(grad, inputs, of_rows, weight)
        allocate_workspace(inputs, is_layer_norm=len(of_rows) > 1)
        return gradients

    return beside_workspace


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
