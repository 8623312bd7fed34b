"""Live ranks on CPUs, joined by gloo: to the byte what is predicted for each rank, and the values of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import memlab.lab.lab
from memlab.backends import find_backend, simulated_routing
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab
from memlab.meter.storage_meter import StorageMeter
from memlab.record.step_record import StepRecord
from tests.unit.processes import on_processes


@dataclass(frozen=True)
class Job:
    """A model in a layout, and the settings of its steps."""

    sizes: dict[str, int]
    settings: tuple[MemorySettings, ...] = (MemorySettings(),)
    architecture: str = "qwen3-moe-tiny"
    options: dict[str, Any] = field(default_factory=dict)

    def lab(self, rank: int) -> Lab:
        sizes = {"seq_length": 64, "num_microbatches": 4 if "pipeline_model_parallel_size" in self.sizes else 2}
        return Lab(self.architecture, layout=Layout(**self.sizes, rank=rank), backend="cpu", **(sizes | self.options))


@dataclass(frozen=True)
class OfRank:
    """What a rank did."""

    records: list[StepRecord]
    tokens_per_expert: list[list[int]]
    """Of this rank's tokens, by call of the dispatcher."""
    step_count_bytes: int
    """torch's AdamW counts its steps in a tensor of 4 bytes for each weight, Transformer Engine's in a number."""


def take_steps(jobs: list[Job]) -> list[OfRank]:
    """Runs on every rank."""
    return [_take_steps(job) for job in jobs]


def _take_steps(job: Job) -> OfRank:
    counts: list[list[int]] = []
    with job.lab(int(os.environ["RANK"])) as lab, _noting_routes(lab, counts):
        records = [lab.step(settings) for settings in job.settings]
        states = [state for part in lab._stepper.live.optimizers for state in part.optimizer.state.values()]
        return OfRank(records, counts, 4 * sum(isinstance(state.get("step"), torch.Tensor) for state in states))


@contextmanager
def _noting_routes(lab: Lab, counts: list[list[int]]) -> Iterator[None]:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def noting(dispatcher: Any, routing_map: torch.Tensor) -> Any:
        with lab._stepper.meter.paused():
            counts.append(routing_map.sum(dim=0).tolist())
        return preprocess(dispatcher, routing_map)

    with patch.object(MoEAlltoAllTokenDispatcher, "preprocess", noting):
        yield


def predict(job: Job, rank: int, live: list[OfRank]) -> list[StepRecord]:
    """Takes a rank's steps on fake tensors with the routes of the live ones, without an allocator's rounding."""
    exact = replace(find_backend("simulated"), meter=StorageMeter, fill_workspaces=lambda is_moe: None)
    layout = Layout(**job.sizes, rank=rank)
    sharing = layout.expert_model_parallel_size * layout.expert_tensor_size
    per_call = 1 + sharing if sharing > 1 else 1  # a rank's own counts, and those of all that share the experts
    calls = 0

    def counts_of(routing: Any, num_tokens: int, num_experts: int, topk: int, of_rank: int) -> list[int]:
        nonlocal calls
        calls += 1
        return live[of_rank].tokens_per_expert[(calls - 1) // per_call]

    with (
        patch.object(memlab.lab.lab, "find_backend", lambda name: exact),
        patch.object(simulated_routing, "_counts", counts_of),
        job.lab(rank) as lab,
    ):
        return [lab.step(settings) for settings in job.settings]


TWO = [
    Job({"tensor_model_parallel_size": 2}),
    Job({"expert_model_parallel_size": 2, "data_parallel_size": 2}),
    Job({"data_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    Job({"context_parallel_size": 2}),
    Job({"data_parallel_size": 2}, architecture="phi-4-tiny"),
    Job({"pipeline_model_parallel_size": 2}, architecture="phi-4-tiny"),
    Job({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[OfRank]]:
    """What each rank did, by rank and job of `TWO`: two processes, started once."""
    results: list[list[OfRank]] = on_processes(2, take_steps, TWO, folder=tmp_path_factory.mktemp("ranks"))
    return results


@pytest.mark.parametrize("number", range(len(TWO)), ids=[str(Layout(**job.sizes)) for job in TWO])
def test_every_rank_s_bytes_are_those_predicted_for_it(two_ranks: list[list[OfRank]], number: int) -> None:
    check_bytes(TWO[number], [of_jobs[number] for of_jobs in two_ranks])


def check_bytes(job: Job, live: list[OfRank]) -> None:
    for rank, of_rank in enumerate(live):
        steps = of_rank.step_count_bytes
        for real, fake in zip(of_rank.records, predict(job, rank, live), strict=True):
            assert without_steps(real.peak_by_category, steps) == fake.peak_by_category, (rank, real.settings)
            assert without_steps(real.offloaded_bytes_by_group, steps) == fake.offloaded_bytes_by_group
            for name in ("residual_bytes", "recomputed_bytes", "offloaded_bytes_by_module", "without_effect"):
                assert getattr(real, name) == getattr(fake, name), (rank, name, real.settings)
            away = steps if real.settings.offload_optimizer else 0
            assert real.activation_peak_bytes - fake.activation_peak_bytes == away, (rank, real.settings)
            assert real.host_bytes - fake.host_bytes == away, (rank, real.settings)


def without_steps(sizes: dict[str, int], step_count_bytes: int) -> dict[str, int]:
    return {name: size - (step_count_bytes if name == "optimizer state" else 0) for name, size in sizes.items()}
