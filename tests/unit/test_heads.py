"""Heads of a few outputs in place of the output layer: their parameters, their bytes, and jobs that have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.parameters import kept_bytes, parameters_of_rank
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.job_files import read_job
from tests.unit.live import FULL, gradients_of_step, recompute

pytestmark = pytest.mark.versions

CRITIC = TrainingState(num_labels=1)
SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64}


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ({}, 0),
        ({"tensor_model_parallel_size": 2}, 1),
        *(({"pipeline_model_parallel_size": 2}, rank) for rank in (0, 1)),
    ],
    ids=str,
)
def test_a_rank_has_the_parameters_that_megatron_builds(layout: dict[str, int], rank: int) -> None:
    """Of a model with tied embeddings: the last stage has no copy of them, and each tensor rank the whole head."""
    where, state = Layout(**layout, rank=rank), TrainingState(num_labels=3)
    with Lab("qwen3-dense-tiny", layout=where, state=state, backend="simulated", num_microbatches=2, **SMALL) as lab:
        live = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
        assert sum(parameters_of_rank(lab.scenario)) == live


def test_a_head_takes_the_place_of_the_output_layer_by_hand() -> None:
    """phi-4-tiny is 160 wide, with an output layer of its own."""
    plain, critic = (Scenario.of("phi-4-tiny", state=state) for state in (TrainingState(), CRITIC))
    removed = plain.architecture.vocab_size * 160 - 160
    assert kept_bytes(plain).parameters - kept_bytes(critic).parameters == 2 * removed
    assert kept_bytes(plain).optimizer - kept_bytes(critic).optimizer == (4 + 8) * removed


@pytest.mark.parametrize("state", [CRITIC, TrainingState(num_labels=1, lora=LoRA(rank=4))], ids=str)
def test_a_step_is_the_cpu_s_to_the_byte_and_makes_no_logits(state: TrainingState) -> None:
    """Beside adapters the head is trained whole."""
    records = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab("qwen3-dense-tiny", state=state, backend=backend, num_microbatches=2, **SMALL) as lab:
            records.append([lab.step(settings) for settings in (MemorySettings(), FULL)])
            vocabulary = lab.scenario.architecture.vocab_size
    for real, fake in zip(*records, strict=True):
        assert real.activation_peak_bytes == fake.activation_peak_bytes
        assert real.peak_by_module | {"": 0} == fake.peak_by_module | {"": 0}
        made = real.peak_by_module
        assert made.get("output_layer", 0) + made.get("loss", 0) < 64 * vocabulary
        kept = kept_bytes(real.scenario).gradients
        assert kept <= real.peak_by_category["gradients"] <= kept + 512  # the padding of a buffer


def test_the_loss_and_the_gradients_are_the_same_under_every_setting(open_lab: Any) -> None:
    lab = open_lab("phi-4-tiny", state=CRITIC, **SMALL)
    expected, gradients = gradients_of_step(lab, MemorySettings())
    weight = inside(lab).model.engine.live.chunk.module.output_layer.weight
    assert weight.main_grad.norm() > 0
    for settings in (FULL, recompute("core_attn", "mlp")):
        loss, others = gradients_of_step(lab, settings)
        assert loss == expected
        assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "softmax"}, "num_labels is 1 with loss 'softmax', and the output layer makes logits for it"),
        ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion True"),
        ({"mtp_num_layers": 1}, "mtp_num_layers 1, and its layers compute logits by the output layer"),
        ({"lora": LoRA(rank=8, target_modules=("output_layer",))}, "lora_target_modules that name output_layer"),
        ({"num_labels": 0}, "num_labels is 0, must be a whole number of at least 1"),
    ],
)
def test_what_a_head_does_not_go_with_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        replace(CRITIC, **values)


_OF_SWIFT = "megatron {} --model Qwen/Qwen3-8B --max_length 512 --micro_batch_size 2 --global_batch_size 8"


@pytest.mark.parametrize(
    ("text", "num_labels", "rows"),
    [
        (f"{_OF_SWIFT.format('rlhf')} --rlhf_type rm", 1, 4),
        (f"{_OF_SWIFT.format('rlhf')} --rlhf_type rm --num_labels 5 --task_type causal_lm", 1, 4),
        (f"{_OF_SWIFT.format('sft')} --task_type seq_cls --num_labels 3", 3, 2),
        (f"{_OF_SWIFT.format('sft')} --num_labels 3 --task_type causal_lm", None, 2),
    ],
)
def test_jobs_of_ms_swift_have_the_head_of_their_task(
    text: str, num_labels: int | None, rows: int, tmp_path: Path
) -> None:
    job = read_job(text, tmp_path)
    scenario, _ = job.required()
    assert (scenario.state.num_labels, scenario.micro_batch_size) == (num_labels, rows)
    assert not [one for one in job.not_modelled if one.key in ("task_type", "rlhf_type")]


def test_ms_swift_refuses_a_classifier_of_unknown_size_and_memlab_reads_a_head_beside_adapters(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{_OF_SWIFT.format('sft')} --task_type seq_cls")
    with pytest.raises(ValueError, match="seq_cls without num_labels, which ms-swift refuses"):
        Job.read(path).required()
    path.write_text(f"{_OF_SWIFT.format('rlhf')} --rlhf_type rm --tuner_type lora")
    job = Job.read(path)
    state = job.required()[0].state
    assert (state.num_labels, state.lora is not None, state.loss) == (1, True, "cross_entropy")
    assert not {one.key for one in job.not_modelled}
    path.write_text(f"{_OF_SWIFT.format('rlhf')} --rlhf_type rm --mtp_num_layers 1")
    job = Job.read(path)
    assert (job.required()[0].state.num_labels, {one.key for one in job.not_modelled}) == (1, {"mtp_num_layers"})


_PPO = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=gae data.max_prompt_length=1024 "
    "data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
    "critic.model.path=Qwen/Qwen3-4B critic.megatron.tensor_model_parallel_size=2 "
    "critic.megatron.override_transformer_config.gradient_accumulation_fusion=False {}"
)


def test_the_critic_of_verl_is_read_from_the_same_file_and_bounds_the_actor_s_job(tmp_path: Path) -> None:
    """Its parameters on two tensor parallel ranks, without an output layer; four ranks share the optimizer's state."""
    path = tmp_path / "run.sh"
    path.write_text(_PPO.format("critic.ppo_micro_batch_size_per_gpu=4 critic.model.lora.rank=8"))
    of_adapters, _ = Job.read(path, format_name="verl-critic", version="0.9.1").required()
    assert of_adapters.state.lora is not None and of_adapters.state.num_labels == 1
    path.write_text(_PPO.format("critic.ppo_micro_batch_size_per_gpu=4"))
    critic, _ = Job.read(path, format_name="verl-critic", version="0.9.1").required()
    model = critic.architecture
    assert (model.name, critic.state.num_labels, critic.state.loss) == ("qwen3-4b", 1, "cross_entropy")
    assert (critic.layout.world_size, critic.layout.tensor_model_parallel_size) == (8, 2)
    assert (critic.seq_length, critic.packed_sequences, critic.state.fp32_output) == (4 * 2048, 4, False)
    job = Job.read(path, version="0.9.1")
    (row,) = job.not_modelled
    assert job.required()[0].state.num_labels is None
    assert row.key == "algorithm.adv_estimator"
    assert row.bound_bytes == pytest.approx(model.num_parameters / 2 * (2 + 4 + 12 / 4), rel=1e-3)
    assert any("--format verl-critic predicts them" in one for one in job.warnings)


def test_rows_of_all_ranks_of_a_critic_are_said(tmp_path: Path) -> None:
    """As of the actor: the key is deprecated, and a rank's share of it depends on how ranks are grouped."""
    path = tmp_path / "run.sh"
    path.write_text(_PPO.format("critic.ppo_micro_batch_size=32 trainer.device=npu"))
    critic = Job.read(path, format_name="verl-critic", version="0.9.1")
    assert {one.key for one in critic.not_modelled} == {"critic.ppo_micro_batch_size", "trainer.device"}
    assert any("critic.ppo_micro_batch_size_per_gpu is not in the file" in one for one in critic.warnings)


def test_a_job_without_a_critic_has_none_to_predict(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(_PPO.format("critic.enable=False"))
    assert not Job.read(path, version="0.9.1").not_modelled
    with pytest.raises(ValueError, match=r"critic\.enable is False, with which verl trains no critic"):
        Job.read(path, format_name="verl-critic", version="0.9.1").required()


@pytest.mark.parametrize("engine", ["model_engine=fsdp2", "model_engine=veomni", "trainer.nnodes=1"])
def test_a_critic_that_megatron_does_not_train_is_not_predicted_as_if_it_did(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"python3 -m verl.trainer.main_ppo {engine} algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen3-4B "
        "trainer.n_gpus_per_node=8"
    )
    with pytest.raises(ValueError, match=r"memlab predicts .* Megatron"):
        Job.read(path, format_name="verl-critic", version="0.9.1").required()


@pytest.mark.parametrize(
    ("estimator", "engine", "reason"),
    [
        ("gae", "megatron", "it is the critic's, whose steps --format verl-critic predicts"),
        ("gae", "fsdp2", "it is the critic's, which memlab notes as a whole"),
        ("grpo", "megatron", "the job trains no critic"),
    ],
)
def test_the_keys_of_a_critic_are_said_to_be_the_critic_s(
    estimator: str, engine: str, reason: str, tmp_path: Path
) -> None:
    """They had "does not concern the memory of a training step", or that the value has no effect."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"python3 -m verl.trainer.main_ppo model_engine={engine} algorithm.adv_estimator={estimator} "
        "actor_rollout_ref.model.path=Qwen/Qwen3-4B critic.model.path=Qwen/Qwen3-4B trainer.n_gpus_per_node=8 "
        "critic.megatron.param_offload=true actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    )
    found = Job.read(path, version="0.9.1").without_effect
    assert {found["critic.model.path"], found["critic.megatron.param_offload"]} == {reason}
    if reason.endswith("predicts"):
        own = Job.read(path, format_name="verl-critic", version="0.9.1").without_effect
        assert own["algorithm.adv_estimator"] == "it decides only whether there is a critic"


_SLIME = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-4B --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
    "--rollout-max-context-len 4096 --global-batch-size 64 --micro-batch-size 1 --tensor-model-parallel-size 2 "
    "--advantage-estimator {} --entropy-coef 0.01 --swiglu --disable-bias-linear"
)


def test_the_critic_of_slime_takes_the_actor_s_arguments_without_logits(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(_SLIME.format("ppo") + " --rollout-top-p 0.9 --recompute-loss-function --sglang-cpu-offload-gb 4")
    actor, critic = Job.read(path), Job.read(path, format_name="slime-critic")
    of_actor, of_critic = actor.required()[0], critic.required()[0]
    assert of_actor.state.entropy_loss and of_actor.state.fp32_output
    expected = replace(of_actor.state, num_labels=1, loss="cross_entropy", fp32_output=False, entropy_loss=False)
    assert of_critic == replace(of_actor, state=expected)
    assert actor.rollout is not None and critic.rollout is None
    of_actor_alone = {one.key for one in actor.not_modelled} - {one.key for one in critic.not_modelled}
    of_logits = {"entropy_coef", "rollout_top_p", "recompute_loss_function"}
    assert of_actor_alone == {"advantage_estimator", "sglang_cpu_offload_gb"} | of_logits
    assert critic.without_effect["sglang_cpu_offload_gb"] == "no engine gets a critic's weights"
    assert critic.without_effect["entropy_coef"] == "a critic has no logits"
    path.write_text(_SLIME.format("grpo"))
    with pytest.raises(ValueError, match="advantage_estimator is grpo, with which slime trains no critic"):
        Job.read(path, format_name="slime-critic").required()


def test_layers_of_multi_token_prediction_beside_a_head_are_named_and_not_said_to_be_used(tmp_path: Path) -> None:
    job = read_job(f"{_OF_SWIFT.format('sft')} --task_type seq_cls --num_labels 3 --mtp_num_layers 1", tmp_path)
    assert job.required()[0].state.mtp_num_layers is None
    assert [one.effect for one in job.not_modelled if one.key == "mtp_num_layers"] == ["more"]
    assert not [one for one in job.taken if one.field == "mtp_num_layers"]


_CLASSIC = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --advantage-estimator ppo --bf16
--num-layers 2 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 2048 --vocab-size 50257
--seq-length 1024 --rollout-max-context-len 1024 --micro-batch-size 1 --global-batch-size 8 --qkv-format bshd
--transformer-impl local""".replace("\n", " ")


def test_a_critic_of_megatron_s_own_layers_is_predicted_with_scores_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(_CLASSIC)
    actor, critic = Job.read(path), Job.read(path, format_name="slime-critic")
    assert actor.required()[0].state.transformer_impl == "local"
    state = critic.required()[0].state
    assert (state.transformer_impl, state.attention_backend) == ("transformer_engine", "unfused")
    assert "transformer_impl" in {one.key for one in critic.not_modelled}
