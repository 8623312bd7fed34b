"""Which experts tokens go to: what a routing accepts, and that its counts are possible."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean, pvariance
from typing import Any

import pytest
import torch

from memlab.backends.simulated_routing import _counts
from memlab.config.layout import Layout
from memlab.config.routing import Routing, find_routing
from memlab.engines.routing_draws import RoutingDraws
from memlab.lab.lab import Lab
from tests.unit.corruption import corruptions
from tests.unit.refusal import refusal


@pytest.mark.parametrize("values", [{"factor": True}, {"seed": "x"}, {"kind": "shares", "shares": [True]}])
def test_a_routing_holds_what_its_types_say(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose balanced, random:SEED"):
        Routing(**values)


def test_no_expert_gets_more_rows_than_there_are_tokens() -> None:
    assert Routing(kind="shares", shares=(1 / 12, 1 / 2, 5 / 12)).tokens_per_expert(3, 3, 2, 0) == [1, 3, 2]
    rng = random.Random(0)
    for _ in range(500):
        parts = [rng.randint(0, 12) for _ in range(5)]
        shares = tuple(part / sum(parts) for part in parts) if sum(parts) else (1.0,)
        if len(shares) != 5 or max(shares) > 0.5:
            continue
        for tokens in (1, 3, 7):
            counts = Routing(kind="shares", shares=shares).tokens_per_expert(tokens, 5, 2, 0)
            assert sum(counts) == 2 * tokens and min(counts) >= 0 and max(counts) <= tokens


COUNTS = Routing(kind="counts", counts=((5, 0, 3, 8), (4, 4, 4, 4)))


def test_counts_are_those_of_each_layer_and_in_proportion_for_other_numbers_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS.counts))
    assert find_routing(str(tmp_path / "counts.json")) == find_routing(json.dumps(COUNTS.counts)) == COUNTS
    assert [COUNTS.tokens_per_expert(8, 4, 2, 0, layer=layer) for layer in (0, 1, 2)] == [
        [5, 0, 3, 8],
        [4, 4, 4, 4],
        [5, 0, 3, 8],
    ]
    assert COUNTS.tokens_per_expert(16, 4, 2, 0) == [10, 0, 6, 16]
    rng = random.Random(2)
    for _ in range(200):
        given = tuple(rng.randint(0, 4000) for _ in range(128))
        whole = Routing(kind="counts", counts=(given,)).tokens_per_expert(4096, 128, 8, 0)
        exact = [count * 4096 * 8 / sum(given) for count in given]
        assert sum(whole) == 4096 * 8 and all(abs(one - other) <= 1 for one, other in zip(whole, exact, strict=True))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([[5, 0, 3, 8], [4, 4, 4]], "routing has 3 counts, must be 4, one per expert"),
        ([[9, 0, 3, 4]], "gives an expert 2.25 times the mean, must give it at most 2 times"),
        ([[0, 0, 0, 0]], "counts with a layer without tokens"),
        ([[1, 1.5, 1, 1]], "counts with 1.5, must be whole numbers by layer"),
        ([[1, 10**400, 1, 1]], "must be whole numbers by layer"),
        ([[], []], "counts with a layer without tokens"),
    ],
)
def test_counts_that_no_layer_can_have_are_refused(counts: list[Any], words: str) -> None:
    assert words in refusal(lambda: find_routing(json.dumps(counts)).check(4, 2))


@pytest.mark.parametrize("values", [{"kind": "shares", "shares": 0.5}, {"kind": "counts", "counts": (1, 2)}])
def test_what_cannot_be_split_over_experts_is_refused(values: dict[str, Any]) -> None:
    assert "must be a tuple of shares, and a tuple of numbers for each layer" in refusal(lambda: Routing(**values))


def test_layers_with_other_counts_are_stepped_and_not_repeated() -> None:
    """Layers with equal counts make a replay believe that the next one is like them."""
    even, uneven = (32,) * 8, (64,) * 4 + (0,) * 4
    routing = Routing(kind="counts", counts=(even, even, even, even, uneven, even))
    model: dict[str, Any] = {"num_layers": 6, "seq_length": 128, "backend": "simulated", "routing": routing}
    model["layout"] = Layout(expert_model_parallel_size=2, data_parallel_size=2)
    of_experts = []
    for replay in (True, False):
        with Lab("qwen3-moe-tiny", **model, replay=replay) as lab:
            timeline = lab.step().timeline
        assert timeline is not None
        sizes = timeline.allocated_bytes_by_module("activations").items()
        of_experts.append(
            [sum(size for name, size in sizes if f"layers.{layer}.mlp.experts" in name) for layer in range(6)]
        )
    assert of_experts[0] == of_experts[1]
    assert of_experts[1][3] < of_experts[1][4], "this rank has the experts that get all tokens"


@pytest.mark.parametrize(
    ("chunks", "layers_of_stages"), [(1, ([0, 1, 2, 3], [4, 5, 6, 7])), (2, ([0, 1, 4, 5], [2, 3, 6, 7]))]
)
def test_pipeline_stages_have_the_counts_of_their_own_layers(
    chunks: int, layers_of_stages: tuple[list[int], ...]
) -> None:
    even, uneven = (32,) * 8, (64,) * 4 + (0,) * 4
    hot = {1, 5, 6}
    routing = Routing(kind="counts", counts=tuple(uneven if layer in hot else even for layer in range(8)))
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": chunks}
    job: dict[str, Any] = {"num_layers": 8, "seq_length": 128, "num_microbatches": 2}
    for stage, layers in enumerate(layers_of_stages):
        layout = Layout(**stages, expert_model_parallel_size=2, data_parallel_size=2, rank=2 * stage)
        with Lab("qwen3-moe-tiny", **job, layout=layout, routing=routing, backend="simulated") as lab:
            timeline = lab.step().timeline
        assert timeline is not None
        inputs = [
            timeline.delta_bytes[timeline.module == timeline.modules.index(f"decoder.layers.{layer}.mlp.experts")].max()
            for layer in range(4)
        ]
        assert {layer for layer, size in zip(layers, inputs, strict=True) if size > min(inputs)} == hot & {*layers}


def test_a_damaged_file_of_shares_is_refused_in_a_line_or_read(tmp_path: Path) -> None:
    path, refused = tmp_path / "shares.json", 0
    for damaged in corruptions(json.dumps([0.125] * 8).encode(), "json", seed=4):
        path.write_bytes(damaged)
        refused += bool(refusal(lambda: find_routing(str(path)).check(8, 2)))
    assert refused > 100


def test_random_routing_chooses_experts_as_tokens_do_that_choose_uniformly() -> None:
    """Beside counts of tokens that choose one by one; the mean and the variance of an expert's tokens."""
    tokens, experts, topk, draws = 64, 8, 2, 400
    counts = [Routing(kind="random").tokens_per_expert(tokens, experts, topk, 0, layer=layer) for layer in range(draws)]
    rng = random.Random(1)
    truth = []
    for _ in range(draws):
        chosen = [expert for _ in range(tokens) for expert in rng.sample(range(experts), topk)]
        truth.append([chosen.count(expert) for expert in range(experts)])
    assert all(sum(each) == tokens * topk and max(each) <= tokens for each in counts)
    of_counts, of_truth = ([count for each in many for count in each] for many in (counts, truth))
    assert mean(of_counts) == mean(of_truth) == tokens * topk / experts
    assert pvariance(of_counts) == pytest.approx(pvariance(of_truth), rel=0.1)


def test_random_routing_differs_by_rank_layer_and_microbatch_and_not_by_step() -> None:
    def draw(**where: int) -> tuple[int, ...]:
        values = {"rank": 0, "layer": 0, "microbatch": 0} | where
        return tuple(Routing(kind="random", seed=3).tokens_per_expert(256, 16, 2, **values))

    assert len({draw(), draw(rank=1), draw(layer=1), draw(microbatch=1)}) == 4
    assert draw(layer=1) == draw(layer=1)
    assert len({tuple(Routing().tokens_per_expert(256, 16, 2, 0, layer=layer)) for layer in range(3)}) == 1


def test_a_recomputed_pass_chooses_the_experts_of_its_forward() -> None:
    draws, layers = RoutingDraws(Routing(kind="random")), [Layer(1), Layer(2)]
    draws.add_layers(layers)
    first, second = (layer.token_dispatcher for layer in layers)
    for _ in range(2):  # steps
        draws.begin_step()
        with torch.no_grad():
            assert [draws.of_pass(each) for each in (first, second, first, second)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        assert [draws.of_pass(each) for each in (second, first, second, first)] == [(1, 0), (0, 0), (1, 1), (0, 1)]
        assert draws.of_pass(first) == (0, 2)  # a micro-batch that is not recomputed


class Layer:
    """Stands for one of Megatron's, and for its MLP."""

    def __init__(self, layer_number: int) -> None:
        self.layer_number, self.mlp = layer_number, self
        self.token_dispatcher = type("Dispatcher", (), {})()


def test_the_counts_of_a_large_step_are_kept_and_never_more_than_a_fixed_number() -> None:
    most = _counts.cache_parameters()["maxsize"]
    layers, ranks, microbatches = 94, 16, 8
    assert most is not None and most >= layers * ranks * microbatches
    drawn_elsewhere: Any = type("", (), {"tokens_per_expert": lambda *_, **__: []})()
    for microbatch in range(most + 1):
        _counts(drawn_elsewhere, 1, 2, 1, 0, 0, microbatch)
    assert _counts.cache_info().currsize == most
    _counts.cache_clear()
