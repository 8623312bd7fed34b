"""One rank of a larger job on fake tensors: what the ranks have together, and what a routing does to them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.config.layout import Layout
from memlab.config.routing import Routing, find_routing
from memlab.engines.megatron.layers.tensor_parallel import Split
from memlab.engines.megatron.layers.torch_functions import Linear, NormLinear
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import POOLS
from tests.unit.ranks import on_ranks

SMALL: dict[str, Any] = {"num_layers": 4, "seq_length": 64, "backend": "simulated"}


@cache
def step(architecture: str, routing: str = "balanced", **sizes: int) -> StepRecord:
    """Predicts a step once, for all tests that need it."""
    num_microbatches = 4 if sizes.get("pipeline_model_parallel_size", 1) > 1 else 1
    with Lab(architecture, layout=Layout(**sizes), routing=routing, num_microbatches=num_microbatches, **SMALL) as lab:
        return lab.step()


def requested(record: StepRecord, category: str) -> int:
    """What was asked for, about: without what the allocator rounds up."""
    return record.peak_by_category[category]


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("phi-4-mini", {"tensor_model_parallel_size": 2}),
        ("phi-4-tiny", {"pipeline_model_parallel_size": 2}),
        ("phi-4-tiny", {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
        ("phi-4-tiny", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        ("phi-4-tiny", {"data_parallel_size": 2}),
        ("qwen3-moe-tiny", {"tensor_model_parallel_size": 2}),
        ("qwen3-moe-tiny", {"expert_model_parallel_size": 2, "data_parallel_size": 2}),
        (
            "qwen3-moe-tiny",
            {"expert_model_parallel_size": 2, "data_parallel_size": 2, "pipeline_model_parallel_size": 2},
        ),
    ],
)
def test_the_ranks_have_the_whole_model_together(architecture: str, sizes: dict[str, int]) -> None:
    whole = step(architecture)
    world_size = Layout(**sizes).world_size
    records = [step(architecture, rank=rank, **sizes) for rank in range(world_size)]
    assert all(record.status == "ok" for record in records)
    # Each copy's optimizer state is spread over the copies: over all ranks it is there once.
    state = sum(requested(record, "optimizer state") for record in records)
    norms = 0.02 if sizes.get("tensor_model_parallel_size") else 0  # which every tensor-parallel rank has
    assert state == pytest.approx(requested(whole, "optimizer state"), rel=0.01 + norms)
    parameters = sum(requested(record, "parameters") for record in records)
    copies = sizes.get("data_parallel_size", 1)
    if "expert_model_parallel_size" not in sizes:
        assert parameters == pytest.approx(copies * requested(whole, "parameters"), rel=0.01 + norms)
    else:
        assert requested(whole, "parameters") < parameters < copies * requested(whole, "parameters")


def weights_of_experts(record: StepRecord) -> int:
    """Returns the bytes of a rank's parts of all experts' weights, by the architecture's shapes."""
    layout, architecture = record.scenario.layout, record.scenario.architecture
    assert architecture.num_moe_experts is not None
    local = architecture.num_moe_experts // layout.expert_model_parallel_size
    columns = architecture.moe_ffn_hidden_size // layout.expert_tensor_size
    return record.scenario.num_layers * local * 3 * architecture.hidden_size * columns * 2


@pytest.mark.parametrize(
    ("tensor", "experts", "expert_tensor"), [(2, 1, None), (2, 1, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2), (2, 1, 4)]
)
def test_experts_are_split_by_sizes_of_their_own(tensor: int, experts: int, expert_tensor: int | None) -> None:
    """Beside them every rank of a layout has the same; with experts apart, each rank has one part of their state."""
    sizes = {"tensor_model_parallel_size": tensor, "data_parallel_size": 4 // tensor}
    plain = step("qwen3-moe-tiny", **sizes)
    split = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": expert_tensor}
    record = step("qwen3-moe-tiny", **sizes, **{name: size for name, size in split.items() if size is not None})
    others = requested(plain, "parameters") - weights_of_experts(plain)
    assert requested(record, "parameters") == pytest.approx(others + weights_of_experts(record), abs=16384)
    assert requested(record, "gradients") == pytest.approx(2 * (others + weights_of_experts(record)), abs=32768)
    if experts > 1:
        copies = 4 // (experts * record.scenario.layout.expert_tensor_size)
        of_others = others / record.scenario.layout.data_parallel_size
        state = 6 * (of_others + weights_of_experts(record) / copies)
        assert requested(record, "optimizer state") == pytest.approx(state, rel=0.02)


def test_rows_are_gathered_over_the_ranks_that_share_an_expert() -> None:
    alone = step("qwen3-moe-tiny", data_parallel_size=2)
    shared = step("qwen3-moe-tiny", data_parallel_size=2, expert_tensor_parallel_size=2)
    # Twice the rows, half of each row's features.
    assert expert_rows(shared) == expert_rows(alone)
    rows = 64 * shared.scenario.architecture.moe_router_topk
    gathered = 2 * rows * shared.scenario.architecture.hidden_size * 2
    assert made_by_dispatcher(shared) - made_by_dispatcher(alone) >= gathered


def made_by_dispatcher(record: StepRecord) -> int:
    """Bytes that the first MoE layer made outside its inner modules, in forward."""
    assert record.timeline is not None
    timeline = record.timeline
    code = timeline.modules.index("decoder.layers.0.mlp")
    made = (timeline.module == code) & (timeline.phase == 1) & (timeline.delta_bytes > 0)
    return int(timeline.delta_bytes[made & (timeline.pool == POOLS.index("device"))].sum())


def expert_rows(record: StepRecord) -> int:
    """Bytes that the experts' first linear made in the first layer, in forward."""
    assert record.timeline is not None
    timeline = record.timeline
    code = timeline.modules.index("decoder.layers.0.mlp.experts.linear_fc1")
    chosen = (timeline.module == code) & (timeline.delta_bytes > 0) & (timeline.pool == POOLS.index("device"))
    return int(timeline.delta_bytes[chosen & (timeline.phase == 1)].sum())


def test_a_skewed_routing_moves_rows_between_ranks_and_makes_none() -> None:
    sizes = {"expert_model_parallel_size": 4, "data_parallel_size": 4}
    balanced = [step("qwen3-moe-tiny", rank=rank, **sizes) for rank in range(4)]
    skewed = [step("qwen3-moe-tiny", "skewed:3", rank=rank, **sizes) for rank in range(4)]
    rows = [expert_rows(record) for record in skewed]
    assert len({expert_rows(record) for record in balanced}) == 1
    assert sum(rows) == pytest.approx(sum(expert_rows(record) for record in balanced), rel=0.02)
    assert rows == sorted(rows, reverse=True) and rows[0] > 1.5 * rows[-1]
    assert skewed[0].peak_allocated_bytes > balanced[0].peak_allocated_bytes > skewed[3].peak_allocated_bytes


@pytest.mark.parametrize("text", ["balanced", "random:7", "skewed:1", "skewed:2.5", "skewed:16", "FILE"])
def test_a_routing_gives_every_token_its_experts(text: str, tmp_path: Path) -> None:
    shares = [2 / 256] * 64 + [1 / 128] * 64
    (tmp_path / "shares.json").write_text(json.dumps(shares))
    routing = find_routing(str(tmp_path / "shares.json") if text == "FILE" else text)
    routing.check(128, 8)
    counts = routing.tokens_per_expert(4096, 128, 8, rank=3)
    assert len(counts) == 128 and sum(counts) == 4096 * 8 and min(counts) >= 0
    if routing.kind == "skewed":
        assert counts[0] == pytest.approx(routing.factor * 256, rel=0.01)
    if text == "balanced":
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("skewed:0.5", "factor 0.5, must be a number of at least 1"),
        ("skewed:high", "must have a number after the colon"),
        ("skewed", "skewed is not a file"),
        ("skewed:17", "17 times the mean, must give it at most 16 times"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        find_routing(text).check(128, 8)


def test_shares_sum_to_1() -> None:
    with pytest.raises(ValueError, match=r"a sum of 0\.9, must be from 0 to 1 with a sum of 1"):
        Routing(kind="shares", shares=(0.5, 0.4))


def test_a_rank_is_one_of_the_layout() -> None:
    with pytest.raises(ValueError, match="rank is 4, must be from 0 to 3"):
        Layout(data_parallel_size=2, tensor_model_parallel_size=2, rank=4)


def test_only_the_simulated_backend_takes_a_routing() -> None:
    with pytest.raises(ValueError, match="the router decides"):
        Lab("qwen3-moe-tiny", routing="skewed:2", backend="cpu")


def test_split_linears_compute_what_whole_ones_do() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, first, second, grad = (
        torch.randn(shape, generator=generator) for shape in ((8, 1, 4), (6, 4), (4, 6), (8, 1, 4))
    )
    norm = torch.ones(4)

    def gradients(inputs: torch.Tensor, first: torch.Tensor, second: torch.Tensor, grad: Any, group: Any) -> Any:
        leaves: list[Any] = [tensor.clone().requires_grad_() for tensor in (inputs, first, second)]
        leaves[1].fuse_wgrad_accumulation = leaves[2].fuse_wgrad_accumulation = False  # as a linear notes it
        ways = (Split("column", group), Split("row", group)) if group else (Split(), Split())
        hidden = NormLinear.apply(leaves[0], norm, None, leaves[1], None, 1e-6, ways[0])
        output = Linear.apply(hidden, leaves[2], ways[1])
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    whole = gradients(inputs, first, second, grad, None)
    parts: dict[int, Any] = {}

    def job(rank: int, group: Any) -> None:
        rows, features = slice(4 * rank, 4 * rank + 4), slice(3 * rank, 3 * rank + 3)
        parts[rank] = gradients(inputs[rows], first[features], second[:, features], grad[rows], group)

    on_ranks(2, job)
    for index, dim in ((0, 0), (1, 0), (2, 0), (3, 1)):
        together = torch.cat([parts[rank][index] for rank in range(2)], dim)
        torch.testing.assert_close(together, whole[index], rtol=1e-4, atol=1e-5)
