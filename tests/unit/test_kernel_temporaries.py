"""What a CUDA kernel allocates and frees inside itself, which no operation on fake tensors shows."""

from __future__ import annotations

import pytest

from memlab.backends.kernel_temporaries import bytes_of_sum


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
