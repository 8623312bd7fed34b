"""Fused kernels of simulated steps: repeated without their operations, with the events that their operations have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memlab.backends import simulated
from memlab.backends.repeated_kernels import RepeatedKernels
from memlab.meter.labels import Labels, labelled_by, on_host, one_kernel, timed_at_first_call
from memlab.meter.observers import ObserveResults
from memlab.meter.storage_meter import StorageMeter
from memlab.record.step_record import StepRecord
from memlab.vocabulary import POOLS
from tests.unit.replayed import _COLUMNS, random_case, take

_RESERVED = POOLS.index("reserved")
Function = Callable[..., Any]


def called(self: RepeatedKernels, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    with one_kernel():
        return function(*args, **kwargs)


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", **options)


class Kernels:
    """Calls functions under a meter, and counts how often a kernel's own code runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RepeatedKernels, "_shared", {})
        self.labels, self.num_runs = Labels(), 0
        self.backend = simulated.backend("test")

    def kernel(self, function: Function) -> Function:
        @one_kernel()
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_runs += 1
            return function(*args, **kwargs)

        return counted

    def events(self, call: Callable[[], Any], times: int) -> list[list[tuple[int, int, int, int]]]:
        """Returns for each time the events' bytes and pools, and the storages by their births since the call began."""
        found = []
        meter: Any = self.backend.meter(self.labels)
        assert isinstance(meter, StorageMeter)
        with labelled_by(self.labels), self.backend.active(), meter.watching():
            meter.start({})
            for _ in range(times):
                position, first = len(meter.storages.log.events), meter.storages.num_births
                result = call()
                del result
                rows = [each for each in meter.storages.log.events[position:] if each.pool != _RESERVED]
                found.append([(e.delta_bytes, e.pool, e.allocation.birth - first, e.rounding_bytes) for e in rows])
        return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def _several(given: torch.Tensor, factor: float) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    exact = given.float()
    rows = (exact * exact).mean(-1)
    return (exact * factor).to(given.dtype), [rows, None, given]


def test_a_second_call_has_the_events_of_the_first_and_runs_nothing(kernels: Kernels) -> None:
    kernel = kernels.kernel(_several)

    def call() -> None:
        given = fake(64, 256)
        output, (rows, nothing, same) = kernel(given, 0.5)
        assert (output.shape, output.dtype, output.stride()) == (given.shape, torch.bfloat16, (256, 1))
        assert (rows.shape, rows.dtype, nothing) == ((64,), torch.float32, None)
        assert same is given

    first, second, third = kernels.events(call, 3)
    assert kernels.num_runs == 1
    assert first == second == third
    assert len(first) > 8


@pytest.mark.parametrize(
    "other",
    [
        lambda kernel: kernel(fake(64, 128), 0.5),
        lambda kernel: kernel(fake(128, 64).T, 0.5),
        lambda kernel: kernel(fake(64, 256, dtype=torch.float32), 0.5),
        lambda kernel: kernel(fake(64, 256), 1),
        lambda kernel: kernel(fake(64, 256), factor=0.5),
    ],
    ids=["shape", "stride", "dtype", "number", "by name"],
)
def test_what_may_decide_is_another_call(kernels: Kernels, other: Callable[[Function], Any]) -> None:
    kernel = kernels.kernel(_several)
    kernels.events(lambda: kernel(fake(64, 256), 0.5), 2)
    kernels.events(lambda: other(kernel), 1)
    assert kernels.num_runs == 2


_KEPT: list[torch.Tensor] = []


def _keeping(given: torch.Tensor) -> torch.Tensor:
    _KEPT.append(given * 2)
    return given + 1


def _timed(given: torch.Tensor) -> torch.Tensor:
    timed_at_first_call(("kernel", len(_KEPT)), 2**20)
    return given + 1


class _Scaled:
    factor = 2.0


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (_keeping, lambda: (fake(8, 8),)),
        (lambda given: given[1:], lambda: (fake(8, 8),)),
        (lambda given: (given * 2)[1:], lambda: (fake(8, 8),)),
        (lambda given, other: given * other.factor, lambda: (fake(8, 8), _Scaled())),
        (lambda given: given * 2, lambda: (fake(8, 8, requires_grad=True),)),
        (lambda given: given * 2, lambda: (torch.ones(2, device="cpu"),)),
    ],
    ids=["keeps a tensor", "returns a view", "returns a part of a new one", "an object", "a graph", "values"],
)
def test_what_does_more_is_called_each_time(
    kernels: Kernels, function: Function, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    kernel = kernels.kernel(function)
    kernels.events(lambda: kernel(*arguments()), 3)
    _KEPT.clear()
    assert kernels.num_runs == 3


def test_a_call_in_which_variants_are_timed_is_not_repeated(kernels: Kernels) -> None:
    kernel = kernels.kernel(_timed)
    kernels.events(lambda: kernel(fake(8, 8)), 2)
    assert kernels.num_runs == 2


def test_an_argument_that_is_given_twice_shows_nothing_of_two_arguments(kernels: Kernels) -> None:
    kernel = kernels.kernel(lambda first, second: first)

    def one() -> None:
        given = fake(8, 8)
        kernel(given, given)

    def two() -> None:
        first = fake(8, 8)
        assert kernel(first, fake(8, 8)) is first

    kernels.events(one, 1)
    kernels.events(two, 1)


def test_nothing_is_repeated_for_the_host_or_another_mode_that_looks(kernels: Kernels) -> None:
    kernel = kernels.kernel(lambda given: given * 2)

    def on_the_host() -> None:
        given = fake(8, 8)
        with on_host():
            kernel(given)

    def seen_by_another() -> None:
        given = fake(8, 8)
        with ObserveResults(lambda *_: None):
            kernel(given)

    kernels.events(lambda: kernel(fake(8, 8)), 2)
    kernels.events(on_the_host, 2)
    assert kernels.num_runs == 3
    kernels.events(seen_by_another, 2)
    assert kernels.num_runs == 5


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_steps_have_the_events_of_kernels_that_are_called(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(random.Random(seed))
    repeated, _ = take(case, replay=False)
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedKernels, "call", called)
        truth, _ = take(case, replay=False)
    for one, other in zip(truth, repeated, strict=True):
        _require_equal(one, other)


def _require_equal(one: StepRecord, other: StepRecord) -> None:
    assert one.timeline is not None
    assert other.timeline is not None
    assert len(one.timeline) == len(other.timeline)
    for name in _COLUMNS:
        assert np.array_equal(getattr(one.timeline, name), getattr(other.timeline, name)), name
