"""A CUDA graph of a whole iteration: what its pools hold, which jobs have one, and who refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab import Lab, MemorySettings, TrainingState
from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.request_log import RequestLog
from memlab.config.allocator_settings import AllocatorSettings
from memlab.jobs.job import Job
from memlab.units import MIB

GRAPH = TrainingState(cuda_graph_impl="full_iteration")


@pytest.mark.parametrize("expandable", [False, True])
def test_only_the_next_graph_gets_what_a_graph_has_reserved(expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    weights = allocator.allocate(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.exchange_pools()
    assert allocator.reserved_bytes == 100 * MIB, "the cache is emptied first"
    allocator.free(allocator.allocate(40 * MIB))
    allocator.exchange_pools()
    assert allocator.reserved_bytes == 140 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 140 * MIB, "a graph keeps its pools"
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.reserved_bytes == 160 * MIB, "others get memory of their own"
    allocator.exchange_pools()
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(weights)
    assert allocator.reserved_bytes == 100 * MIB, "while a graph is captured, nothing is returned"


def test_a_limit_holds_for_requests_of_a_graph_too() -> None:
    allocator = CachingAllocator()
    log = RequestLog(allocator)
    weights = allocator.allocate(100 * MIB)
    allocator.exchange_pools()
    allocator.free(allocator.allocate(40 * MIB))
    allocator.free(allocator.allocate(60 * MIB))  # not in the place of the 40 MiB, which are too few
    allocator.exchange_pools()
    allocator.free(weights)
    assert [log.completes_within(limit * MIB) for limit in (199, 200)] == [False, True]


@pytest.mark.parametrize("replay", [True, False])
def test_a_captured_step_allocates_what_an_eager_one_does_and_reserves_a_pool(replay: bool) -> None:
    peaks = []
    for state in (TrainingState(), GRAPH):
        with Lab("phi-4-tiny", num_microbatches=6, state=state, backend="simulated", replay=replay) as lab:
            steps = [lab.step(), lab.step(), lab.step(MemorySettings(recompute_granularity="full"))]
        peaks.append([(each.static_bytes, each.peak_allocated_bytes) for each in steps])
        reserved = [each.peak_reserved_bytes for each in steps]
    assert peaks[0] == peaks[1]
    assert reserved[0] == reserved[1]


def test_replayed_layers_and_micro_batches_are_in_the_pool() -> None:
    reserved = []
    for replay in (True, False):
        with Lab("phi-4-tiny", num_microbatches=6, state=GRAPH, backend="simulated", replay=replay) as lab:
            reserved.append([lab.step().peak_reserved_bytes for _ in range(2)])
    assert reserved[0] == reserved[1]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("cuda_graph_impl: full_iteration", "full_iteration"),
        ("cuda_graph_impl: local\n  cuda_graph_scope: [full_iteration]", "full_iteration"),
        ("enable_cuda_graph: true\n  cuda_graph_scope: full_iteration", "full_iteration"),
        ("cuda_graph_impl: none\n  cuda_graph_scope: [full_iteration]", "none"),
        ("cuda_graph_impl: local", "model.cuda_graph_impl"),
        ("cuda_graph_impl: transformer_engine\n  cuda_graph_scope: [attn]", "model.cuda_graph_impl"),
        ("external_cuda_graph: true", "model.external_cuda_graph"),
    ],
)
def test_a_job_says_which_graphs_it_has(lines: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model:\n  hf_model_id: meta-llama/Llama-3.1-8B\n  {lines}\nddp: {{}}\ntrain:\n  train_iters: 1\n")
    job = Job.read(file, format_name="bridge", world_size=8)
    named = [one.key for one in job.not_modelled if "cuda_graph" in one.key]
    assert job.scenario is not None
    assert (named or [job.scenario.state.cuda_graph_impl]) == [expected]


def test_graphs_are_predicted_for_dense_models_and_never_measured() -> None:
    with pytest.raises(ValueError, match="cuda_graph_impl is 'full_iteration', which memlab predicts for dense models"):
        Lab("qwen3-moe-tiny", state=GRAPH, backend="simulated")
    with pytest.raises(ValueError, match="memlab measures eager steps only: choose 'none', or predict the step"):
        Lab("phi-4-tiny", state=GRAPH, backend="cpu")
