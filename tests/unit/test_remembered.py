"""What a frozen object computes once: each object its own, and a copy nothing of another's."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields, replace

from memlab.config.architectures import find_architecture
from memlab.config.remembered import Remembers, remembered


@dataclass(frozen=True, slots=True)
class Side(Remembers):
    length: int
    asked: list[int]

    @remembered
    def square(self) -> int:
        self.asked.append(self.length)
        return self.length**2


def test_each_object_computes_its_own_once() -> None:
    asked: list[int] = []
    two, three = Side(2, asked), Side(3, asked)
    assert [two.square, three.square, two.square, three.square] == [4, 9, 4, 9]
    assert asked == [2, 3]
    assert two == Side(2, asked) and [field.name for field in fields(two)] == ["length", "asked"]
    assert [each.square for each in (replace(two, length=5), copy.copy(two), pickle.loads(pickle.dumps(two)))] == [  # noqa: S301
        *(25, 4, 4)
    ]


def test_a_model_of_other_sizes_has_parts_of_its_own() -> None:
    model = find_architecture("qwen3-moe-tiny")
    assert model.parts is model.parts
    dense = replace(model, num_moe_experts=None, moe_router_topk=None, moe_ffn_hidden_size=None)
    assert model.routes and not dense.routes
