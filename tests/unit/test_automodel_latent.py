"""NeMo Automodel's own classes of DeepSeek-V3, GLM and gpt-oss in the engine fsdp2: attention, routers and experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.config.architectures import ARCHITECTURES
from memlab.config.parameters import kept_bytes
from memlab.config.scenario import Scenario
from memlab.jobs.job import Job

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
from tests.unit.automodel_classes import assert_saves_and_computes

LITE = replace(
    ARCHITECTURES["deepseek-tiny"],
    name="glm-lite-tiny",
    family="glm4_moe_lite",
    moe_router_num_groups=1,
    moe_router_group_topk=1,
)
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def of(
    classes: Any = "automodel_0.7.0", experts: int = 1, ranks: int = 8, model: str = "deepseek-tiny", **state: Any
) -> Scenario:
    """Returns two layers, the first of DeepSeek-V3 and GLM dense."""
    if experts > 1:
        state = {"moe_token_dispatcher_type": "allgather", "reshard_after_forward": "none"} | state
    return Scenario.of(
        LITE if model == LITE.name else model,
        num_layers=2,
        seq_length=64,
        dtype="bf16",
        engine="fsdp2",
        layout=Layout(data_parallel_size=ranks, expert_model_parallel_size=experts),
        state=TrainingState(model_classes=classes, **{"attn_implementation": "te"} | state),
    )


@pytest.mark.parametrize(
    ("model", "classes", "is_balanced", "expected"),
    [
        ("deepseek-tiny", "automodel_0.7.0", False, 834_880),
        ("deepseek-tiny", "automodel_0.7.0", True, 783_936),
        ("deepseek-tiny", "automodel", False, 837_184),
        ("glm-4.5-tiny", "automodel", False, 710_080),
        ("glm-4.5-tiny", "automodel", True, 640_832),
        ("glm-lite-tiny", "automodel", False, 926_528),
        ("gpt-oss-tiny", "automodel", False, 590_296),
        ("gpt-oss-tiny", "automodel", True, 416_768),
    ],
)
def test_it_saves_as_much_as_the_class_itself_and_computes_what_transformers_does(
    model: str, classes: str, is_balanced: bool, expected: int
) -> None:
    """What Automodel's class saved for backward on a CPU with memlab's function of attention (torch 2.13).

    Of 36044ad3 it is without what its norms keep: they are compiled on a GPU, and not there. So are activations of
    gpt-oss, for which it had memlab's.
    """
    scenario = of(classes, ranks=1, model=model, fake_balanced_gate=is_balanced)
    assert_saves_and_computes(scenario, "eager", expected, is_balanced=is_balanced)


@pytest.mark.parametrize(
    ("model", "experts", "dispatcher"),
    [
        ("deepseek-tiny", 4, "flex"),
        ("deepseek-tiny", 8, "allgather"),
        ("gpt-oss-tiny", 4, "allgather"),
        ("glm-4.5-tiny", 8, "flex"),
        ("glm-lite-tiny", 4, "flex"),
        # Each of them with the other dispatcher.
        pytest.param("deepseek-tiny", 4, "allgather", marks=pytest.mark.slow),
        pytest.param("deepseek-tiny", 8, "flex", marks=pytest.mark.slow),
        pytest.param("gpt-oss-tiny", 4, "flex", marks=pytest.mark.slow),
        pytest.param("glm-4.5-tiny", 8, "allgather", marks=pytest.mark.slow),
        pytest.param("glm-lite-tiny", 4, "allgather", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_experts_beside_dense_layers_and_with_biases(model: str, experts: int, dispatcher: str) -> None:
    state = {"moe_token_dispatcher_type": dispatcher}
    scenario = of("automodel", experts=experts, model=model, **state)
    with Lab(scenario, backend="simulated") as lab:
        plain = [lab.step() for _ in range(2)][1]
        checkpointed = lab.step(FULL)
    kept = kept_bytes(scenario).parameters
    assert 0 <= plain.peak_by_category["parameters"] - kept < 40 * 512  # of 40 shards' blocks
    assert checkpointed.recomputed_bytes > plain.recomputed_bytes == 0
    assert abs(kept - kept_bytes(of("automodel", model=model)).parameters) < 64


@pytest.mark.parametrize(
    ("model", "state", "message"),
    [
        ("deepseek-tiny", {"attn_implementation": "sdpa"}, "only Transformer Engine's kernel: choose te"),
        (
            "deepseek-tiny",
            {"model_classes": "transformers", "attn_implementation": "sdpa"},
            "classes with model_classes",
        ),
        ("gpt-oss-tiny", {"model_classes": "automodel_0.7.0"}, "only as in August 2026: choose automodel"),
        ("glm-4.5-air", {"model_classes": "automodel_0.7.0"}, "only as in August 2026: choose automodel"),
        ("glm-4.7-flash", {"model_classes": "transformers"}, "family glm4_moe_lite, which this engine does not build"),
    ],
)
def test_what_is_not_predicted_is_refused(model: str, state: dict[str, Any], message: str) -> None:
    own = {"model_classes": "automodel", "attn_implementation": "te"} | state
    with pytest.raises(ValueError, match=message):
        Scenario.of(model, dtype="bf16", engine="fsdp2", state=TrainingState(**own))


def test_a_recipe_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("""
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 16, local_batch_size: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: moonshotai/Moonlight-16B-A3B
  torch_dtype: bfloat16
  backend: {attn: te, linear: te, rms_norm: te, experts: gmm, dispatcher: deepep, gate_precision: float32}
distributed: {strategy: fsdp2, dp_size: 8, ep_size: 8, activation_checkpointing: true}
dataset: {_target_: MockIterableDataset, seq_len: 4096}
optimizer: {_target_: torch.optim.AdamW}
""")
    job = Job.read(path, version="36044ad3")
    scenario, _ = job.required()
    assert (scenario.architecture.name, scenario.state.model_classes) == ("moonlight-16b-a3b", "automodel")
    assert not job.not_modelled
    path.write_text(path.read_text().replace("attn: te", "attn: sdpa"))
    assert Job.read(path, version="36044ad3").lacks == (
        "Automodel's own experts beside latent attention that is not Transformer Engine's",
    )
