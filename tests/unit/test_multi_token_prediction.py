"""Layers of multi-token prediction: the rank that has them, what is refused beside them, and jobs that ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.package_info import MINOR

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.parameters import parameters_of_rank
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from memlab.views.text.record import without_state
from tests.unit.inside import inside

pytestmark = pytest.mark.versions

EXTRA = TrainingState(mtp_num_layers=1)
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (PP2, 0),
        (PP2, 1),
        (PP2 | {"virtual_pipeline_model_parallel_size": 2}, 1),
        (PP2 | {"pipeline_model_parallel_layout": "Ett|ttmL"}, 1),
        (PP2 | {"pipeline_model_parallel_layout": "Etttt|mL"}, 0),
        (PP2 | {"pipeline_model_parallel_layout": "Etttt|mL"}, 1),
        ({"tensor_model_parallel_size": 2}, 1),
    ],
    ids=str,
)
def test_a_rank_has_the_parameters_that_megatron_builds(layout: dict[str, Any], rank: int) -> None:
    """The last stage has the embedding once more, and the final norm is where the last layer is."""
    where = Layout(**layout, rank=rank)
    with Lab(
        *("deepseek-tiny",), seq_length=64, num_microbatches=2, layout=where, state=EXTRA, backend="simulated"
    ) as lab:
        live = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
        assert sum(parameters_of_rank(lab.scenario)) == live


def test_a_last_stage_has_an_output_weight_beside_its_copy_of_a_tied_embedding() -> None:
    where = Layout(**PP2, rank=1)
    with Lab("qwen3-dense-tiny", seq_length=64, layout=where, state=EXTRA, backend="simulated") as lab:
        live = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
        assert sum(parameters_of_rank(lab.scenario)) == live


def test_a_layer_has_two_norms_a_matrix_and_the_model_s_last_layer_by_hand() -> None:
    """phi-4-tiny is 160 wide: one more of its layers, three norms, and a matrix from 320 to 160."""
    counts = [
        sum(parameters_of_rank(Scenario.of("phi-4-tiny", num_layers=layers, state=state)))
        for layers, state in ((2, TrainingState()), (3, TrainingState()), (2, EXTRA))
    ]
    hidden = 160
    assert counts[2] - counts[0] == counts[1] - counts[0] + 3 * hidden + 2 * hidden * hidden


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "logprobs"}, "with loss 'logprobs', must have 'cross_entropy'"),
        ({"mtp_num_layers": 0}, "mtp_num_layers is 0, must be a whole number of at least 1"),
    ],
)
def test_what_memlab_does_not_have_beside_them_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        TrainingState(**{"mtp_num_layers": 1} | values)


@pytest.mark.parametrize(
    ("layers", "packed", "words"), [(2, None, "must be 1 there by a rule"), (1, 2, "its checkpoint takes tensors only")]
)
def test_full_recompute_of_them_has_megatron_s_rules(layers: int, packed: int | None, words: str) -> None:
    """With the second, a live step of megatron-core 0.16.1 ends in an error of torch's ``save_for_backward``."""
    settings = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=layers)
    with pytest.raises(RuleError, match=words):
        check_on_model(settings, Scenario.of("qwen3-moe-tiny", packed_sequences=packed, state=EXTRA))


def test_a_scenario_is_written_with_a_layout_that_names_them() -> None:
    layout = Layout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|ttmL")
    scenario = Scenario.of("qwen3-moe-tiny", num_microbatches=2, layout=layout, state=EXTRA)
    assert "pipeline_model_parallel_layout=Ett|ttmL" in without_state(scenario)


MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --vocab-size 151936
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --qk-layernorm
--untie-embeddings-and-output-weights --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion --seq-length 4096 --micro-batch-size 1
--bf16""".replace("\n", " ")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VERL = "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"
VERL_OPTION = "+actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers=1"
SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096"
BRIDGE = """
model:
  hf_model_id: {model}
  {own}
train:
  global_batch_size: 8
"""


@pytest.mark.parametrize(
    ("text", "number", "not_modelled"),
    [
        (f"{MEGATRON} --mtp-num-layers 1", 1, {}),
        (f"{MEGATRON} --mtp-num-layers 2 --mtp-detach-heads", 2, {"mtp_detach_heads": "either"} if MINOR < 19 else {}),
        (f"{MEGATRON} --mtp-num-layers 1 --fp8-format hybrid", 1, {}),
        (f"{MEGATRON} --mtp-num-layers 1 --fp8-format hybrid {RECOMPUTE} --fp8-recipe blockwise", 1, {}),
        (f"{MEGATRON} --mtp-num-layers 1 --fp8-format hybrid {RECOMPUTE}", None, {"mtp_num_layers": "more"}),
        (f"{SWIFT} --mtp_num_layers 1 --tuner_type full", 1, {}),
        (f"{SWIFT} --mtp_num_layers 1 --tuner_type lora", 1, {}),
        (f"{VERL} {VERL_OPTION}", None, {VERL_OPTION[1:-2]: "more"}),
        (BRIDGE.format(model="Qwen/Qwen3-30B-A3B", own="mtp_num_layers: 1"), 1, {}),
        (BRIDGE.format(model="Qwen/Qwen3-30B-A3B", own="mtp_num_layers: 0"), None, {}),
        (BRIDGE.format(model="deepseek-ai/DeepSeek-V3", own="seq_length: 4096"), 1, {}),
        (BRIDGE.format(model="deepseek-ai/DeepSeek-V3", own="mtp_num_layers: null"), None, {}),
        (BRIDGE.format(model="moonshotai/Moonlight-16B-A3B", own="seq_length: 4096"), None, {}),
    ],
    ids=lambda value: value[-60:] if isinstance(value, str) else "",
)
def test_jobs_ask_for_them(tmp_path: Path, text: str, number: int | None, not_modelled: dict[str, str]) -> None:
    """Megatron-Bridge trains those that config.json has; a loss from the logits, as verl's, is another computation."""
    path = tmp_path / ("config.yaml" if "hf_model_id" in text else "run.sh")
    path.write_text(text)
    job = Job.read(path, world_size=8, version="2026-08-20" if "verl" in text else None)
    assert job.required()[0].state.mtp_num_layers == number
    found = {one.key: one.effect for one in job.not_modelled if "mtp" in one.key}
    assert found == not_modelled


DETACHED = TrainingState(mtp_num_layers=1, mtp_detach_heads=True)


@pytest.mark.skipif(MINOR >= 19, reason="megatron-core has it since 0.19")
def test_an_older_megatron_core_cannot_end_their_gradients_at_the_model() -> None:
    with pytest.raises(
        ValueError, match=r"mtp_detach_heads is True, but the installed megatron-core .* install .*0\.19"
    ):
        Lab("deepseek-tiny", seq_length=64, state=DETACHED, backend="simulated")


@pytest.mark.skipif(MINOR < 19, reason="megatron-core has it since 0.19")
def test_a_step_whose_extra_losses_end_at_the_model_is_predicted_to_the_byte() -> None:
    """The output layer's second gradient, and those of hidden states and embeddings, are not made.

    The layer's own hidden states and their gradient, which nothing reads, stay until the next step.
    """
    kept, peaks = [], []
    for state in (DETACHED, EXTRA):
        for backend in ("cpu", of_the_cpu_backend()):
            with Lab("deepseek-tiny", seq_length=64, state=state, backend=backend) as lab:
                lab.step()
                step = lab.step()
                kept.append(step.static_bytes)
                peaks.append(step.peak_allocated_bytes - step.static_bytes)
    hidden_bytes = 2 * 64 * ARCHITECTURES["deepseek-tiny"].hidden_size
    assert kept[0] - kept[2] == kept[1] - kept[3] == 2 * hidden_bytes
    assert peaks[0] == peaks[1] < peaks[2] == peaks[3]


def test_a_job_has_the_option_where_the_installed_megatron_core_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlab.config.model_restrictions._megatron_version", lambda: (0, 19))
    (tmp_path / "run.sh").write_text(f"{MEGATRON} --mtp-num-layers 1 --mtp-detach-heads")
    job = Job.read(tmp_path / "run.sh", world_size=8)
    assert job.required()[0].state.mtp_detach_heads
    assert "mtp_detach_heads" not in {one.key for one in job.not_modelled}
