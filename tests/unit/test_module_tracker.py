"""Backward names the module in whose forward a node was made: held against what each forward says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memlab.meter.labels import Labels
from memlab.meter.module_tracker import module_of


class Witness:
    """Notes for tensors which module made them, and which module stood when backward had passed their nodes."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.seen: list[tuple[str, str]] = []
        self.nodes: list[tuple[str, Any]] = []

    def __call__(self, module: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            self.nodes.append((module, tensor.grad_fn))
            tensor.grad_fn.register_hook(lambda *_: self.seen.append((module, self.standing())))
        return tensor

    def standing(self) -> str:
        return self.labels.modules[self.labels.module]


class Inner(torch.nn.Module):
    def __init__(self, name: str, witness: Witness) -> None:
        super().__init__()
        self.name, self.witness = name, witness
        self.failure: BaseException | None = None
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.failure is not None:
            raise self.failure
        first = self.witness(self.name, x * self.weight)
        return self.witness(self.name, first.sin()), None


class Outer(torch.nn.Module):
    """Works before, between, beside and after its inner modules, one of them under a checkpoint."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness
        self.one, self.two, self.three = (Inner(name, witness) for name in ("one", "two", "three"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            return self.witness("outer", tensor)

        before = own(own(x * 2).cos())
        first, _ = self.one(before)
        beside = own(before.exp())
        between = own(own(first + beside) * 3)
        second, _ = checkpoint(self.two, between, use_reentrant=True)
        after = own(own(second.tanh()).cos())
        third, _ = self.three(after)
        return own(third + between)


@pytest.fixture
def labels() -> Labels:
    return Labels()


@pytest.fixture
def model(labels: Labels) -> Iterator[Outer]:
    outer = Outer(Witness(labels))
    labels.attach([("outer", outer), *outer.named_children()])
    yield outer
    labels.release()


def test_each_node_s_backward_stands_in_the_module_that_made_it(model: Outer) -> None:
    for _ in range(2):
        model.witness.seen.clear()
        model(torch.ones(4, requires_grad=True)).sum().backward()
        assert {made for made, _ in model.witness.seen} == {"outer", "one", "two", "three"}
        assert [pair for pair in model.witness.seen if pair[0] != pair[1]] == []


def test_a_node_can_be_asked_for_its_module_in_the_middle_of_forward(model: Outer, labels: Labels) -> None:
    asked: list[tuple[str, str]] = []

    def look(*_: object) -> None:
        asked.extend((made, labels.modules[module_of(node)]) for made, node in model.witness.nodes)

    model.three.register_forward_pre_hook(look)
    model(torch.ones(4, requires_grad=True))
    made_by_now = [pair for pair in asked if pair[1]]
    assert {made for made, _ in made_by_now} == {"outer", "one"}
    assert all(made == named for made, named in made_by_now)


def test_one_stretch_of_a_module_is_announced_once(model: Outer, labels: Labels) -> None:
    output = model(torch.ones(4, requires_grad=True)).sum()
    moves: list[str] = []
    labels.on_move = lambda: moves.append(model.witness.standing())
    output.backward()
    assert "two" in moves
    # Of `after`'s two nodes and of inner modules' two only the first that runs says so.
    assert [name for name in moves if name in ("one", "three")] == ["three", "one"]
    assert len(moves) < len(model.witness.nodes) - 3


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
def test_a_forward_that_fails_leaves_nothing_behind_in_the_next_phase(
    model: Outer, labels: Labels, failure: BaseException
) -> None:
    model.three.failure = failure
    with pytest.raises(type(failure)):
        model(torch.ones(4, requires_grad=True))
    model.three.failure = None
    labels.enter_phase("forward")
    assert labels.module == 0
    # Numbers of another thread begin anew: what was noted before the failure would name them wrongly.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(test_each_node_s_backward_stands_in_the_module_that_made_it, model).result()
