"""The jobs that are measured in plain Megatron are those that memlab predicts, and their routes are put together right."""

from __future__ import annotations

import pytest

from benchmarks.megatron_jobs import EMBEDDINGS, MODELS, Job, jobs
from benchmarks.plain_megatron import routes_of
from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState


@pytest.mark.parametrize("job", list(jobs()), ids=lambda job: job.name)
def test_memlab_predicts_every_job_that_is_measured(job: Job) -> None:
    MemorySettings(**job.settings)
    scenario = Scenario.of(
        job.model,
        num_layers=job.num_layers,
        num_microbatches=job.num_microbatches,
        layout=Layout.from_text(job.layout),
        state=TrainingState(**job.state),
    )
    layout = scenario.layout
    assert layout.world_size == job.num_ranks
    assert job.num_ranks in (1, 2, 4)
    assert all(getattr(layout, name) == size for name, size in job.sizes.items())


def test_the_sizes_are_those_that_memlab_has() -> None:
    for name, sizes in MODELS.items():
        architecture = find_architecture(name)
        for field, value in {**sizes, **EMBEDDINGS[name]}.items():
            if hasattr(architecture, field):
                assert getattr(architecture, field) == value, f"{name}: {field}"


def test_the_routes_of_a_layer_are_those_of_all_its_experts() -> None:
    ranks = [
        {"expert_rank": 0, "tokens_per_expert": {"1": [[5, 3]], "10": [[4, 4]]}},
        {"expert_rank": 1, "tokens_per_expert": {"1": [[2, 6]], "10": [[8, 0]]}},
        {"expert_rank": 1, "tokens_per_expert": {"2": [[1, 7]]}},
        {"expert_rank": 0, "tokens_per_expert": {"2": [[6, 2]]}},
    ]
    assert routes_of(ranks) == ((5, 3, 2, 6), (6, 2, 1, 7), (4, 4, 8, 0))
