"""The router of experts in another type: the same bytes on the CPU and simulated, and from the jobs of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord

pytestmark = pytest.mark.versions


def step(backend: object, **state: str) -> StepRecord:
    """Returns a step of two small layers with experts, of which 2 of 8 get each of its 64 tokens."""
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, backend=backend, state=TrainingState(**state)) as lab:
        return lab.step()


@pytest.mark.parametrize(("dtype", "more"), [("params_dtype", -2), ("fp64", 4)])
def test_a_router_in_another_type_keeps_its_probabilities_in_it(dtype: str, more: int) -> None:
    """Each layer keeps the probabilities of all experts, and those of the chosen ones again, permuted."""
    real, simulated = step("cpu", moe_router_dtype=dtype), step(of_the_cpu_backend(), moe_router_dtype=dtype)
    plain = step("cpu")

    for name in ("parameters", "gradients", "activations", "temporary", "workspace"):
        assert simulated.peak_by_category[name] == real.peak_by_category[name], name
    assert real.peak_allocated_bytes - plain.peak_allocated_bytes == more * 2 * 64 * (8 + 2)
    assert real.loss == pytest.approx(plain.loss, rel=1e-2)


JOB = "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path={model} {key}={value}"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("fp64", "fp64"),
        ("float32", "fp32"),
        ("null", "params_dtype"),
        ("none", "params_dtype"),
        ("bf16", "params_dtype"),
    ],
)
def test_a_job_s_router_dtype_is_read(value: str, dtype: str, tmp_path: Path) -> None:
    key = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype"
    (tmp_path / "run.sh").write_text(JOB.format(model="Qwen/Qwen3-30B-A3B", key=key, value=value))
    job = Job.read(tmp_path / "run.sh", world_size=8, version="2026-08-20")

    assert job.required()[0].state.moe_router_dtype == dtype
    assert not [one for one in job.not_modelled if one.key.endswith("moe_router_dtype")]


def test_a_router_dtype_that_megatron_does_not_have_is_refused(tmp_path: Path) -> None:
    key = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype"
    (tmp_path / "run.sh").write_text(JOB.format(model="Qwen/Qwen3-30B-A3B", key=key, value="fp8"))
    with pytest.raises(ValueError, match=r"moe_router_dtype is 'fp8', must be fp32, fp64 or none: correct it"):
        Job.read(tmp_path / "run.sh", world_size=8, version="2026-08-20")


def test_a_dense_model_has_no_router(tmp_path: Path) -> None:
    key = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype"
    (tmp_path / "run.sh").write_text(JOB.format(model="Qwen/Qwen3-8B", key=key, value="fp64"))
    job = Job.read(tmp_path / "run.sh", world_size=8, version="2026-08-20")

    assert job.required()[0].state.moe_router_dtype == "fp32"
    assert job.without_effect[key[1:]] == "the model has no experts"
    scenario = Scenario.of("phi-4-tiny", state=TrainingState(moe_router_dtype="fp64"))
    assert scenario.without_effect() == {"moe_router_dtype": "the model has no experts"}
