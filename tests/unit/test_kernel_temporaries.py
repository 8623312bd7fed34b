"""What a CUDA kernel allocates and frees inside itself, which no operation on fake tensors shows."""

from __future__ import annotations

import pytest
import torch

from memlab import Lab
from memlab.backends.kernel_temporaries import bytes_of_sum
from memlab.engines.attention import workspace
from memlab.engines.megatron.layers.norm_workspace import bytes_of_workspace
from memlab.meter.labels import Product
from tests.unit.inside import inside

pytestmark = pytest.mark.versions


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


@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "groups", "channels", "of_values", "num_bytes"),
    [
        (4096, 1, 16, 4, 128, 128, 67371264),
        (4096, 1, 32, 8, 128, 128, 134742272),
        (4096, 1, 32, 32, 128, 128, 67633408),
        (8192, 1, 32, 8, 128, 128, 269484288),
        (4096, 2, 32, 8, 128, 128, 269484288),
        (4096, 1, 40, 10, 128, 128, 168427776),
        (4096, 1, 32, 4, 128, 128, 134742272),
        (4096, 1, 16, 16, 192, 128, 50594048),
        (4096, 1, 64, 8, 64, 64, 135266560),
    ],
)
def test_attention_s_backward_has_the_workspace_that_an_h200_allocated(
    tokens: int, batch: int, heads: int, groups: int, channels: int, of_values: int, num_bytes: int
) -> None:
    """The requests of cuDNN's kernel: Transformer Engine 2.16.1, torch 2.11.0+cu130, bf16."""
    sizes = ((heads, channels), (groups, channels), (groups, of_values))
    query, key, value = (torch.Size((tokens, batch, *each)) for each in sizes)
    assert workspace.bytes_of_workspace(query, key, value) == num_bytes


def test_the_first_pass_of_experts_leaves_triton_s_buffer_in_the_cache() -> None:
    """As an H200's first step did: each of three permutations with probabilities and without, and later steps none."""
    with Lab("qwen3-moe-tiny", num_layers=3, num_microbatches=2, backend="simulated") as lab:
        labels = inside(lab).model.labels
        taken: list[int] = []
        take = labels.on_timing
        assert take is not None
        labels.on_timing = lambda num_bytes: (taken.append(num_bytes), take(num_bytes))[1]
        first = lab.step(warm_up=False)
        assert taken == [2**28] * 6
        assert first.peak_reserved_bytes is not None and first.peak_reserved_bytes > 2**28
        assert lab.step(warm_up=False).status == "ok" and len(taken) == 6
        with inside(lab).model.job_context():
            assert inside(lab).model.start_over()
        assert not labels.timed_kernels, "a model that starts over is that of a new process"


def test_a_library_gets_its_workspace_at_its_first_product() -> None:
    """In the order that stacks of an H200's memory showed; a replayed or later pass asks for none."""
    with Lab("qwen3-moe-tiny", num_layers=8, num_microbatches=2, backend="simulated") as lab:
        labels = inside(lab).model.labels
        assert labels.on_product is not None
        place, came = labels.on_product, list[str]()

        def on_product(product: Product) -> None:
            came.append(product)
            place(product)

        labels.on_product = on_product
        first = lab.step(warm_up=False)
        assert list(dict.fromkeys(came)) == ["linear", "forward", "grouped linear", "backward"]
        assert labels.on_product is None, "each library has its workspaces"
        lab.step(warm_up=False)
        assert labels.on_product is None
        with inside(lab).model.job_context():
            assert inside(lab).model.start_over()
        assert labels.on_product is not None, "a model that starts over is that of a new process"
        again = lab.step(warm_up=False)
    assert again.peak_allocated_bytes == first.peak_allocated_bytes
    assert again.peak_reserved_bytes == first.peak_reserved_bytes
