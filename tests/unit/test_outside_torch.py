"""The estimate of what a GPU holds outside torch: within what was measured, and larger with each kind of communication."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from memlab.config.layout import Layout
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.units import GIB, MIB, format_bytes

TWO_RANKS = [
    {"tensor_model_parallel_size": 2},
    {"data_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "data_parallel_size": 2},
]


def test_one_rank_has_no_connections() -> None:
    assert estimate_outside_torch(Layout()).nccl_bytes == 0
    assert "NCCL" not in str(estimate_outside_torch(Layout()))


def test_one_rank_is_what_an_h200_held() -> None:
    assert estimate_outside_torch(Layout()).total_bytes == pytest.approx(2503 * MIB, rel=0.01)


@pytest.mark.parametrize("sizes", TWO_RANKS)
def test_two_ranks_are_within_what_h200s_held(sizes: dict[str, int]) -> None:
    assert 2.4 * GIB <= estimate_outside_torch(Layout(**sizes)).total_bytes <= 3.9 * GIB


@pytest.mark.parametrize("sizes", TWO_RANKS)
def test_the_most_is_more_than_the_estimate(sizes: dict[str, int]) -> None:
    estimate = estimate_outside_torch(Layout(**sizes))
    assert estimate.nccl_bytes < estimate.most_nccl_bytes < estimate.nccl_bytes + 1.5 * GIB
    assert f"(at most {format_bytes(estimate.most_nccl_bytes)})" in str(estimate)


def test_the_most_is_the_sum_of_what_communicators_took() -> None:
    """On rank 0 of two H200s: a ring's, one with one peer, and what the first of a process takes besides."""
    measured = json.loads(Path("labs/results/h200_nccl.json").read_text())["ranks"][0]
    first = {(row["kind"], row["number"], row["use"]): row["bytes"] for row in reversed(measured)}
    rings = [bytes_ for (kind, number, use), bytes_ in first.items() if kind == use == "all-gather"]
    peers = [bytes_ for (kind, number, use), bytes_ in first.items() if kind == use == "send and receive"]
    assert len(rings) == len(peers) == 3
    once = first["all-reduce", 0, "all-reduce"] - mean(rings)
    tensor = estimate_outside_torch(Layout(tensor_model_parallel_size=2)).most_nccl_bytes
    assert tensor == pytest.approx(once + 2 * mean(rings), rel=0.01), "the tensor group and all ranks"
    stages = estimate_outside_torch(Layout(pipeline_model_parallel_size=2)).most_nccl_bytes
    # A second send buffer, which the measurement of two ranks does not show, and NVIDIA/nccl#1685 does.
    assert stages - 32 * 2 * MIB == pytest.approx(once + 2 * mean(rings) + mean(peers), rel=0.01)


def test_an_all_to_all_of_eight_ranks_is_what_an_h100_took_for_it() -> None:
    """4.34 - 1.06 GB outside torch, before and after the first one (NVIDIA/nccl#1685)."""
    sizes = {"data_parallel_size": 8}
    apart = estimate_outside_torch(Layout(**sizes, expert_model_parallel_size=8)).nccl_bytes
    counts = 24 * 12 * MIB
    assert apart - counts - estimate_outside_torch(Layout(**sizes)).nccl_bytes == pytest.approx(3.28e9, rel=0.01)


def test_a_larger_group_beyond_a_node_takes_no_more() -> None:
    eight, many = (
        estimate_outside_torch(Layout(data_parallel_size=64, expert_model_parallel_size=size)) for size in (8, 32)
    )
    assert eight == many
