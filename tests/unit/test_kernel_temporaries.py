"""What a CUDA kernel allocates and frees inside itself, which no operation on fake tensors shows."""

from __future__ import annotations

import pytest

from memlab.backends.kernel_temporaries import bytes_of_sum
from memlab.engines.megatron.layers.norm_workspace import bytes_of_workspace


@pytest.mark.parametrize(
    ("outputs", "rows", "num_bytes"),
    [
        # 64 blocks of 128 outputs are a 33rd of what fills an H200, and 512 rows of a thread are shared by at most 32.
        (8192, 2048, 4 * 8192 * 128 * 32),  # 134,217,728, as an H200's allocator recorded
        (16384, 2048, 4 * 16384 * 128 * 17),
        (8192, 512, 0),  # a thread sums 128 rows
        (64, 4096, 0),  # fewer outputs than a block has
        (128 * 2113, 4096, 0),  # the outputs alone fill the GPU
    ],
)
def test_a_sum_over_rows_leaves_a_part_of_each_thread_that_shares_an_output(
    outputs: int, rows: int, num_bytes: int
) -> None:
    assert bytes_of_sum(outputs, rows) == num_bytes


ON_H200 = {
    1024: 1622016, 1536: 4055040, 2048: 5406720, 2560: 4055040, 2880: 4561920, 3072: 4866048, 3584: 5677056,
    4096: 6488064, 5120: 4063232, 6144: 4874240, 7168: 5685248, 8192: 8650752, 12288: 6495744, 16384: 6495232,
    18432: 5831680,
}  # fmt: skip
"""Bytes that the allocator gave to the backward of RMSNorm, by width: TE 2.16.1, bf16, any number of rows."""
ON_H200_WITH_BIAS = {4096: 8650752, 8192: 8656384, 12288: 9739264}
"""Of LayerNorm."""


@pytest.mark.parametrize(
    ("width", "is_layer_norm", "num_bytes"),
    [
        *((width, False, size) for width, size in ON_H200.items()),
        *((width, True, size) for width, size in ON_H200_WITH_BIAS.items()),
    ],
)
def test_a_norms_backward_has_the_workspace_that_an_h200_allocated(
    width: int, is_layer_norm: bool, num_bytes: int
) -> None:
    of_kernel = bytes_of_workspace(8192, width, is_layer_norm=is_layer_norm)
    assert -(-of_kernel // 512) * 512 == num_bytes


def test_norms_of_heads_and_few_rows() -> None:
    assert bytes_of_workspace(4096 * 32, 128) == 12 * 132 * 128 * 4  # as an H200 allocated
    assert bytes_of_workspace(64, 128) == 64 // 4 * 128 * 4  # a block takes four rows
