"""The router of experts in another type: the same bytes on the CPU and simulated, and from the jobs of frameworks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config import without_effect
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.parameters import kept_bytes
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


def plain(model: Architecture, **state: Any) -> tuple[StepRecord, StepRecord]:
    """Returns a step on the CPU and its prediction, with another router or state."""
    found = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab(model, num_layers=2, seq_length=64, backend=backend, state=TrainingState(**state)) as lab:
            found.append(lab.step())
    return found[0], found[1]


@pytest.mark.parametrize(
    ("router", "state"),
    [
        ({}, {"moe_z_loss_coeff": 1e-3}),
        ({}, {"moe_router_load_balancing_type": "seq_aux_loss"}),
        ({}, {"moe_router_load_balancing_type": "global_aux_loss"}),
        ({"moe_aux_loss_coeff": 0.0}, {"freeze_moe_router": True}),
        ({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, {}),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}, {}),
    ],
)
def test_another_router_is_predicted_to_the_byte(router: dict[str, Any], state: dict[str, Any]) -> None:
    real, simulated = plain(replace(ARCHITECTURES["qwen3-moe-tiny"], **router), **state)
    for name in ("parameters", "gradients", "activations", "temporary", "workspace"):
        assert simulated.peak_by_category[name] == real.peak_by_category[name], name
    assert real.residual_bytes == simulated.residual_bytes == 0


def test_a_router_without_a_loss_keeps_no_scores_for_it() -> None:
    """By hand: each of two layers keeps a probability in fp32 for each of 64 tokens and 8 experts, and what is small."""
    model = ARCHITECTURES["qwen3-moe-tiny"]
    losses = [
        plain(model, moe_router_load_balancing_type=kind)[1].peak_allocated_bytes for kind in ("aux_loss", "none")
    ]
    of_scores = 2 * 64 * 8 * 4
    assert of_scores <= losses[0] - losses[1] < of_scores + 256


def test_a_frozen_router_has_no_gradient_and_no_optimizer_state() -> None:
    """By hand: two layers with 8 experts and 128 channels; 4 bytes of gradient and 12 of optimizer state each."""
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, backend="cpu") as lab:
        trained = lab.step()
        expected = kept_bytes(lab.scenario)
        lab.set_state(TrainingState(freeze_moe_router=True))
        frozen, found = lab.step(), kept_bytes(lab.scenario)
    weights = 2 * 8 * 128
    assert trained.peak_by_category["gradients"] - frozen.peak_by_category["gradients"] == 4 * weights
    assert [before - after for before, after in zip(expected, found, strict=True)] == [0, 4 * weights, 12 * weights]
    assert frozen.loss == trained.loss


def test_what_a_router_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match="moe_router_load_balancing_type is 'sinkhorn', must be one of aux_loss, seq_aux"
    ):
        TrainingState(moe_router_load_balancing_type="sinkhorn")  # type: ignore[arg-type]
    scenario = Scenario.of(
        replace(ARCHITECTURES["qwen3-moe-tiny"], moe_aux_loss_coeff=0.0),
        state=TrainingState(moe_router_load_balancing_type="seq_aux_loss"),
    )
    assert without_effect.of_scenario(scenario) == {
        "moe_router_load_balancing_type": "moe_aux_loss_coeff of the model is 0"
    }


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
    assert without_effect.of_scenario(scenario) == {"moe_router_dtype": "the model has no experts"}
