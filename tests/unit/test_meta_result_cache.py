"""What is remembered of operations on fake tensors: the same as without, and nothing where the next may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memlab.backends import meta_result_cache
from memlab.backends.meta_result_cache import MetaResultCache
from memlab.meter.observers import ObserveResults

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


def form(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OPERATIONS: dict[str, Callable[[], Any]] = {
    "broadcast": lambda: fake(4, 1) + fake(3),
    "promotion": lambda: fake(4, dtype=torch.bfloat16) * fake(4),
    "whole number": lambda: fake(4, dtype=torch.int64) * 2,
    "fraction": lambda: fake(4, dtype=torch.int64) * 2.0,
    "truth": lambda: fake(4, dtype=torch.bool) * True,
    "transposed": lambda: fake(4, 3).T * 2,
    "sum": lambda: fake(4, 3).sum(0),
    "sum of the other": lambda: fake(4, 3).sum(1),
    "cat": lambda: torch.cat([fake(2, 3), fake(4, 3)]),
    "several": lambda: fake(4, 6).topk(2),
    "view": lambda: fake(4, 6).view(24),
    "unsafe view": lambda: torch.ops.aten._unsafe_view(fake(4, 6), [24]),
    "in place": lambda: fake(4, 6).add_(fake(6)),
    "drawn": lambda: fake(4, 6).normal_(std=0.02),
    "to": lambda: fake(4, 6).to(torch.bfloat16),
    "matrices": lambda: fake(4, 6) @ fake(6, 5),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_time_is_the_first(name: str) -> None:
    def forms() -> list[Form]:
        result = OPERATIONS[name]()
        return [form(part) for part in (result if isinstance(result, tuple) else (result,))]

    truth = forms()
    with ObserveResults(Mock(), MetaResultCache().answer):
        for each in OPERATIONS.values():  # what others left must not answer for it
            each()
            each()
        assert forms() == truth


def test_each_result_has_a_storage_of_its_own() -> None:
    tensor = fake(4)
    with ObserveResults(Mock(), MetaResultCache().answer):
        results = [tensor * 2 for _ in range(3)]
        assert len({result.untyped_storage()._cdata for result in (tensor, *results)}) == 4
        views = [torch.ops.aten._unsafe_view(tensor, [2, 2]) for _ in range(3)]
        assert {view.untyped_storage()._cdata for view in views} == {tensor.untyped_storage()._cdata}
        assert tensor.add_(1) is tensor
        assert tensor.add_(1) is tensor


def test_real_values_are_computed() -> None:
    with ObserveResults(Mock(), MetaResultCache().answer):
        sums = [torch.full((2,), value, device="cpu") + 1 for value in (1.0, 2.0)]
    assert [total.tolist() for total in sums] == [[2.0, 2.0], [3.0, 3.0]]


def test_what_does_not_fit_is_refused_each_time() -> None:
    with ObserveResults(Mock(), MetaResultCache().answer):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast"):
                fake(4, 3) + fake(4, 2)
            with pytest.raises(RuntimeError):
                fake(3).add_(fake(4, 3))


def test_labs_share_what_is_remembered_until_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = MetaResultCache.of_process()
    with ObserveResults(Mock(), shared.answer):
        fake(4) * 2
    assert MetaResultCache.of_process() is shared
    monkeypatch.setattr(meta_result_cache, "_MOST_ENTRIES", 0)
    assert MetaResultCache.of_process() is not shared


def test_what_another_default_dtype_made_does_not_answer() -> None:
    usual = torch.get_default_dtype()
    with ObserveResults(Mock(), MetaResultCache().answer):  # one meter, as while a model is built
        for dtype in (usual, usual, torch.float64, torch.bfloat16, usual):
            torch.set_default_dtype(dtype)
            try:
                made = torch.ops.aten.full.default([2], 0.5, device="meta")
            finally:
                torch.set_default_dtype(usual)
            assert made.dtype == dtype


def test_no_function_mode_sees_what_memlab_looks_at_within_the_engine_of_autograd() -> None:
    seen: list[str] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    total = (fake(4, 6).requires_grad_() * 2).exp().T.contiguous().sin()
    gradient = fake(6, 4)
    engine = torch.autograd.Variable._execution_engine
    for _ in range(2):  # the second time, results are made at once
        with ObserveResults(lambda result, _: result.shape, MetaResultCache.of_process().answer), Seen():
            engine.run_backward((total,), (gradient,), True, False, (), True, True)
    assert not seen
