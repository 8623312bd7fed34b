"""NeMo Automodel's own class of Qwen3-MoE in the engine fsdp2, whose experts ranks may share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.backends.simulated import predicting
from memlab.config.cublas import CUBLAS_WORKSPACE_BYTES
from memlab.config.exchange_buffers import exchange_buffers, require_no_library_for_exchange
from memlab.config.parameters import kept_bytes
from memlab.config.scenario import Scenario
from memlab.fitting.outside_torch import RING_BYTES, outside_torch_of
from memlab.jobs.job import Job
from memlab.views.text.record import without_state

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
from memlab.engines.transformer_engine_caches import TE_WORKSPACE_BYTES
from tests.unit.automodel_classes import assert_saves_and_computes

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex"}


def of(classes: Any = "automodel", experts: int = 1, ranks: int = 8, **state: Any) -> Scenario:
    if experts > 1:
        state = {"moe_token_dispatcher_type": "allgather", "reshard_after_forward": "none"} | state
    return Scenario.of(
        "qwen3-moe-tiny",
        num_layers=2,
        seq_length=64,
        dtype="bf16",
        engine="fsdp2",
        layout=Layout(data_parallel_size=ranks, expert_model_parallel_size=experts),
        state=TrainingState(model_classes=classes, **state),
    )


def test_it_saves_as_much_as_the_class_itself_and_computes_what_transformers_does() -> None:
    """545,048 bytes that Automodel's class (36044ad3, torch_mm) saved for backward on a CPU (torch 2.13), two layers.

    flash-attn also saves the state of its random numbers, 16 bytes a layer, which the CPU's kernel does not.
    """
    assert_saves_and_computes(of(ranks=1), "memlab_sdpa", 545_048 + 2 * 16)


@pytest.mark.parametrize("classes", ["automodel", "automodel_0.7.0"])
def test_a_live_step_needs_what_is_predicted(classes: str) -> None:
    scenario, records = of(classes, ranks=1), {}
    for backend in ("cpu", predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            records[backend] = [lab.step(settings) for settings in (MemorySettings(), FULL)]
    live, predicted = ([one.peak_by_category for one in steps] for steps in records.values())
    assert predicted == live
    assert all(step.residual_bytes == 0 for steps in records.values() for step in steps)


HYBRID_EP = FLEX | {"moe_flex_dispatcher_backend": "hybridep"}


@pytest.mark.parametrize(
    ("state", "experts"),
    [
        ({}, 4),
        ({"attn_implementation": "te"}, 8),
        (FLEX, 8),
        (HYBRID_EP, 4),
        # Each of them with the other number.
        pytest.param({}, 8, marks=pytest.mark.slow),
        pytest.param({"attn_implementation": "te"}, 4, marks=pytest.mark.slow),
        pytest.param(FLEX, 4, marks=pytest.mark.slow),
        pytest.param(HYBRID_EP, 8, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_experts_keep_their_own(state: dict[str, Any], experts: int) -> None:
    """Where all ranks share them, experts are whole on each, and else shards; both are an eighth of all."""
    scenario = of(experts=experts, **state)
    with Lab(scenario, backend="simulated") as lab:
        plain = [lab.step() for _ in range(2)][1]
        checkpointed = lab.step(FULL)
    kept = kept_bytes(scenario)
    assert 0 <= plain.peak_by_category["parameters"] - kept.parameters < 25 * 512  # of 25 shards' blocks
    assert checkpointed.recomputed_bytes > plain.recomputed_bytes == 0
    alone = kept_bytes(of())
    assert abs(kept.parameters - alone.parameters) < 64


def test_gathering_tokens_needs_memory_for_those_of_all_ranks() -> None:
    """In forward the fp32 sums of the tokens of all ranks, once more for the sum over ranks: 8 bytes an element."""
    peaks = []
    for experts in (4, 8):
        with Lab(replace(of(experts=experts), seq_length=512), backend="simulated") as lab:
            peaks.append(lab.step().peak_allocated_bytes)
    assert peaks[1] - peaks[0] > 4 * 512 * 128 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": "transformers", "experts": 8}, "model_classes 'transformers', must be 1"),
        ({"experts": 8, "moe_token_dispatcher_type": "alltoall"}, "must be allgather or flex"),
        ({"experts": 8, "ranks": 16, "dp_replicate_size": 2}, "dp_replicate_size 2, which memlab does not predict"),
        ({"moe_token_dispatcher_type": "allgather"}, "no rank has tokens for another one"),
        ({"experts": 4, "ranks": 12}, "3 ranks have shards of the same experts, .* divide hidden_size"),
        ({"classes": "transformers", "attn_implementation": "te"}, "attn_implementation is 'te'"),
        ({"classes": "transformers", "linear_implementation": "te"}, "linear_implementation is 'te'"),
        ({"classes": "transformers", "fake_balanced_gate": True}, "fake_balanced_gate is True"),
    ],
)
def test_what_is_not_predicted_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(**change)


@pytest.mark.parametrize("state", [{}, FLEX | {"attn_implementation": "te"}])
def test_the_words_of_a_job_are_those_without_its_state(state: dict[str, Any]) -> None:
    scenario = replace(of(experts=8, **state), packed_sequences=2 if state else None)
    words = without_state(scenario)
    assert "fsdp2" in words and "EP8" in words and "automodel" not in words and "dispatcher" not in words


def test_outside_torch_are_the_groups_that_share_experts_and_the_buffers_of_the_exchange() -> None:
    alone, all_share, some, sent = map(outside_torch_of, (of(), of(experts=8), of(experts=4), of(experts=8, **FLEX)))
    assert all_share.nccl_bytes - alone.nccl_bytes == RING_BYTES
    assert some.nccl_bytes - alone.nccl_bytes == 2 * RING_BYTES
    buffers = exchange_buffers(of(experts=8, **FLEX))
    assert sent.total_bytes - all_share.total_bytes == buffers.least_bytes > 0


@pytest.mark.parametrize(
    "change",
    [{"experts": 2, "ranks": 2}, *({"ranks": 1, f"{kind}_implementation": "te"} for kind in ("attn", "linear"))],
)
def test_only_predictions_have_shared_experts_and_the_attention_of_te(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only predicts"):
        require_no_library_for_exchange(of(**change))


RECIPE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 16, local_batch_size: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  torch_dtype: bfloat16
  backend: {attn: te, linear: torch, rms_norm: torch_fp32, experts: torch_mm, dispatcher: DISPATCHER}
distributed: {strategy: fsdp2, dp_size: 8, ep_size: 8, activation_checkpointing: true}
dataset: {_target_: MockIterableDataset, seq_len: 4096}
optimizer: {_target_: torch.optim.AdamW}
"""


@pytest.mark.parametrize(
    ("dispatcher", "kind", "library"),
    [("torch", "allgather", "deepep"), ("deepep", "flex", "deepep"), ("hybridep", "flex", "hybridep")],
)
def test_a_recipe_is_read_whole(tmp_path: Path, dispatcher: str, kind: str, library: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DISPATCHER", dispatcher))
    job = Job.read(path, version="36044ad3")
    scenario, settings = job.required()
    state = scenario.state
    assert (state.moe_token_dispatcher_type, state.moe_flex_dispatcher_backend) == (kind, library)
    assert (state.model_classes, state.attn_implementation) == ("automodel", "te")
    assert (state.reshard_after_forward, state.separate_embeddings) == ("none", "both")
    assert scenario.layout.expert_model_parallel_size == 8
    assert settings.recompute_granularity == "full"
    assert not job.not_modelled


def test_what_memlab_does_not_have_of_the_class_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    backend = "linear: te, gate_precision: float32, fake_balanced_gate: true, enable_fsdp_optimizations: true, "
    backend += "dispatcher_share_token_dispatcher: false"
    text = RECIPE.replace("linear: torch", backend).replace("DISPATCHER", "uccl_ep")
    path.write_text(text.replace("ep_size: 8,", "ep_size: 8, moe: {ignore_router_for_ac: false},"))
    effects = {one.key.rpartition(".")[2]: one.effect for one in Job.read(path, version="36044ad3").not_modelled}
    assert effects == {
        "dispatcher": "either",
        "dispatcher_share_token_dispatcher": "more",
        "gate_precision": "more",
        "ignore_router_for_ac": "less",
    }
    path.write_text(text + "peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig}\n")
    job = Job.read(path, version="36044ad3")
    assert job.lacks == ("Automodel's own experts beside adapters",)


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_a_library_that_sends_tokens_needs_ranks_that_share_experts(tmp_path: Path, dispatcher: str) -> None:
    """Automodel then builds experts without a dispatcher, and their first forward pass ends with an AttributeError."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DISPATCHER", dispatcher).replace("ep_size: 8", "ep_size: 1"))
    job = Job.read(path, version="36044ad3")
    with pytest.raises(ValueError, match="ep_size 1 on 8 ranks, must be torch"):
        job.required()


def test_without_a_router_there_are_neither_its_weights_nor_its_scores() -> None:
    """And with linears of Transformer Engine, its workspace alone in the place of torch's two."""
    steps = {}
    for number, state in enumerate(({}, {"fake_balanced_gate": True}, {"linear_implementation": "te"})):
        scenario = of(experts=8, **(state | (steps and {"fake_balanced_gate": True})))
        with Lab(scenario, backend="simulated") as lab:
            steps[number] = lab.step()
    kept = [kept_bytes(of(experts=8, fake_balanced_gate=one)).parameters for one in (False, True)]
    assert kept[0] - kept[1] == 2 * 8 * 128 * 2 // 8  # two layers, 8 experts, bf16, an eighth
    router, turns, of_te = (steps[number].peak_by_category for number in range(3))
    assert router["parameters"] > turns["parameters"]
    assert turns["activations"] < router["activations"]
    assert turns["workspace"] - of_te["workspace"] == 2 * CUBLAS_WORKSPACE_BYTES - TE_WORKSPACE_BYTES
