"""What a simulated GPU does as one that nobody observes: sums of gradients in place, and steps that repeat."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.request_log import RequestLog
from memlab.backends.eager_backward import as_autograd, bytes_beside, eager_backward
from memlab.engines.fsdp2 import selective_checkpoint
from memlab.meter.observers import ObserveResults, computed
from memlab.units import MIB


class _Returns(torch.autograd.Function):
    """The identity, whose backward returns a new gradient and notes it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, made: list[Any], held: list[Any] | None) -> torch.Tensor:
        ctx.made, ctx.held = made, held
        return rows * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        made = grads[0] * 2
        ctx.made.append(_place(made))
        if ctx.held is not None:
            ctx.held.append(made)
        return made, None, None


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()


def sums_in_place(device: str, context: Any, *, is_held: bool) -> bool:
    """Whether the sum of two gradients has the storage of one of them."""
    made: list[int] = []
    summed: list[int] = []
    held: list[Any] | None = [] if is_held else None
    both = torch.ones(8, device=device, requires_grad=True) * 1
    both.register_hook(lambda gradient: summed.append(_place(gradient)))
    total = _Returns.apply(both, made, held) + _Returns.apply(both, made, held)
    with context:
        torch.autograd.backward(total, torch.ones(8, device=device))
    return summed[0] in made


@pytest.mark.parametrize("is_held", [False, True])
def test_a_sum_of_gradients_is_in_place_where_autograd_alone_would_make_it_so(is_held: bool) -> None:
    observed = ObserveResults(lambda *_: None, as_autograd(computed))

    with eager_backward():
        found = sums_in_place("meta", observed, is_held=is_held)

    assert found == sums_in_place("cpu", nullcontext(), is_held=is_held) == (not is_held)


def test_without_the_context_each_sum_is_a_new_tensor() -> None:
    assert not sums_in_place("meta", ObserveResults(lambda *_: None, as_autograd(computed)), is_held=False)


@pytest.mark.parametrize("context", [eager_backward(), nullcontext()])
def test_gradients_of_chosen_rows_are_added_to_zeros_in_place(context: Any) -> None:
    rows = torch.ones(8, 4, device="meta", requires_grad=True)
    chosen = rows[torch.empty(5, dtype=torch.int64, device="meta")]
    made: list[Any] = []
    observed = ObserveResults(lambda result, _: made.append(result), as_autograd(computed))

    with context, observed:
        (gradient,) = torch.autograd.grad(chosen, rows, torch.ones(5, 4, device="meta"))

    whole = {_place(each) for each in made if isinstance(each, torch.Tensor) and each.shape == rows.shape}
    assert gradient.shape == rows.shape
    assert len(whole) == (2 if isinstance(context, nullcontext) else 1)


@pytest.mark.parametrize(
    ("shape", "dims", "num_bytes"),
    [
        ((1, 4096, 4096), [0, 1], 128 * MIB),  # a norm's weight of Llama 3.1 8B, as an H200 requested it
        ((1, 4096, 4096), [2], 0),
        ((4096, 4096), [0, 1], 0),
    ],
)
def test_a_sum_over_rows_allocates_what_an_h200_does(shape: tuple[int, ...], dims: list[int], num_bytes: int) -> None:
    rows = torch.empty(shape, device="meta")

    with eager_backward():
        assert bytes_beside(torch.ops.aten.sum.dim_IntList, (rows, dims), rows.sum(dims)) == num_bytes


def logged(num_steps: int) -> RequestLog:
    """Logs steps, each of which replaces what the former one has kept, and takes it out of a larger block."""
    allocator = CachingAllocator()
    log, kept = RequestLog(allocator), allocator.allocate(40 * MIB)
    for _ in range(num_steps):
        log.step_begins()
        allocator.free(allocator.allocate(100 * MIB))
        former, kept = kept, allocator.allocate(40 * MIB)
        allocator.free(former)
        allocator.free(allocator.allocate(90 * MIB, 1))
    return log


def test_tables_of_a_layer_of_llama_and_parts_of_norms_are_an_h200s() -> None:
    """Of Llama 3.1 8B on one rank, with eight layers: gradients in bf16 that are reduced in fp32, and the clipping."""
    hidden, of_keys, inner, vocabulary = 4096, 1024, 14336, 128256
    matrices = [(hidden, hidden), (of_keys, hidden), (of_keys, hidden), (hidden, hidden)]
    matrices += [(inner, hidden), (inner, hidden), (hidden, inner)]
    layer = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in (*matrices, (hidden,), (hidden,))]
    joined = torch.empty(sum(each.numel() for each in layer), device="meta")
    outside = [torch.empty(vocabulary, hidden, device="meta")] * 2 + [torch.empty(hidden, device="meta")]
    with eager_backward():
        assert bytes_beside(torch.ops.fsdp.chunk_cat.default, (layer, 0, 1), joined) == 3_408_448
        none = torch.empty(0, hidden, device="meta", dtype=torch.bfloat16)
        assert bytes_beside(torch.ops.fsdp.chunk_cat.default, ([none], 0, 1), none) == 8 * (6 + 2)
        norms = torch.ops.aten._foreach_norm.Scalar
        assert bytes_beside(norms, (layer * 8 + outside, 2.0), outside) == 2_404_800


def test_a_repeated_step_is_as_one_that_was_taken() -> None:
    limits = [MIB * limit for limit in range(130, 340, 2)]
    one, four = logged(1), logged(4)

    repeated = [one.completes_within(limit, further_steps=3) for limit in limits]

    assert repeated == [four.completes_within(limit) for limit in limits]
    assert repeated != [one.completes_within(limit) for limit in limits]


def test_what_a_recomputation_does_not_ask_for_is_kept_with_its_context() -> None:
    """Recomputation stops at the last product, which an H200 keeps until the layer's backward has ended."""
    forward, again = selective_checkpoint.contexts(nullcontext())
    with forward:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    storage = product.untyped_storage()._cdata
    references = torch._C._storage_Use_Count(storage)
    del forward
    with again:
        pass
    assert torch._C._storage_Use_Count(storage) == references
