"""Which loss a job computes, from logits of which type, and which rows of tokens it computes it for."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.jobs.job import Job
from tests.unit.job_files import read_job

_VERL = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-0.6B "
    "data.max_prompt_length=512 data.max_response_length=512"
)
_ACTOR = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
_VERL_SFT = "python3 -m verl.trainer.sft_trainer engine=megatron model.path=Qwen/Qwen3-0.6B data.max_length=1024"
_SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-0.6B "
    "trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=512"
)
_SKYRL_SFT = (
    "python -m skyrl.train.main_sft model.path=Qwen/Qwen3-0.6B max_length=4096 megatron_config.context_parallel_size=1"
)
_SLIME = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-0.6B --actor-num-nodes 1 --rollout-max-context-len 1024 "
    "--global-batch-size 64 --colocate"
)
_SWIFT = "NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-0.6B --max_length 512 --max_completion_length 512"
_SWIFT_SFT = _SWIFT.replace("rlhf", "sft")
_NEMO = """policy:
  model_name: Qwen/Qwen3-0.6B
  max_total_sequence_length: 1024
  train_micro_batch_size: 4
  megatron_cfg: {enabled: true, defer_fp32_logits: DEFERRED}
  sequence_packing: {enabled: PACKED, fuse_loss: FUSED}
  logprob_chunk_size: CHUNK
cluster: {gpus_per_node: 8}
"""


def _nemo(section: str = "grpo", deferred: str = "false", packed: str = "true", fused: str = "false") -> str:
    values = {"DEFERRED": deferred, "PACKED": packed, "FUSED": fused, "CHUNK": "512" if deferred == "true" else "null"}
    text = _NEMO + f"{section}: {{max_num_steps: 1}}\n"
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _nemo_in_fp8(recipe: str) -> str:
    text = _nemo().replace("length: 1024", "length: 512").replace("fuse_loss: false", "train_mb_tokens: 1000")
    fp8 = f"fp8_cfg: {{enabled: true, fp8: hybrid, fp8_recipe: {recipe}}}, defer"
    return text.replace("defer", fp8)


_WHOLE, _BY_SEQUENCE = "logprobs_one_hot", "logprobs_by_sequence"
_CHUNKED_ENTROPY = "actor_rollout_ref.actor.entropy_from_logits_with_chunking"
_OF_VERL = "vocab_parallel_cross_entropy"


@pytest.mark.parametrize(
    ("text", "loss", "chunk", "row"),
    [
        (f"{_VERL} {_ACTOR}=1", _OF_VERL, None, (1024, 1, None)),
        (f"{_VERL} {_ACTOR}=4", _OF_VERL, None, (4096, 1, 4)),
        (f"{_VERL} {_ACTOR}=4 actor_rollout_ref.model.use_remove_padding=False", _OF_VERL, None, (1024, 4, None)),
        (f"{_VERL} {_ACTOR}=4 actor_rollout_ref.actor.megatron.use_remove_padding=False", _OF_VERL, None, (4096, 1, 4)),
        (f"{_VERL_SFT} data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", _OF_VERL, None, (2048, 1, 2)),
        (f"{_SKYRL} trainer.micro_train_batch_size_per_gpu=1", "logprobs", None, (1024, 1, None)),
        (f"{_SKYRL} trainer.logprobs_chunk_size=512", "logprobs", 512, (1024, 1, None)),
        (f"{_SKYRL} trainer.micro_train_batch_size_per_gpu=4", "logprobs", 1024, (4096, 1, 4)),
        (
            f"{_SKYRL} trainer.micro_train_batch_size_per_gpu=4 trainer.use_sample_packing=false",
            "logprobs", None, (1024, 4, None),
        ),
        (f"{_SKYRL_SFT} micro_train_batch_size_per_gpu=6 batch_size=24", "logprobs", 1024, (24576, 1, 6)),
        (f"{_SLIME} --micro-batch-size 2", "softmax", None, (2048, 1, 2)),
        (f"{_SLIME} --micro-batch-size 2 --qkv-format bshd", "softmax", None, (1024, 2, None)),
        (f"{_SLIME} --rollout-temperature 0.8 --log-probs-chunk-size 256", "scaled_softmax", 256, (1024, 1, None)),
        (f"{_SLIME} --rollout-temperature 1.0", "softmax", None, (1024, 1, None)),
        (f"{_SWIFT} --rlhf_type grpo --micro_batch_size 2", "log_softmax", None, (2048, 1, 2)),
        (f"{_SWIFT} --rlhf_type grpo --micro_batch_size 2 --padding_free false", "log_softmax", None, (1024, 2, None)),
        (f"{_SWIFT} --rlhf_type gkd --micro_batch_size 1 --teacher_model x", "log_softmax", None, (1024, 1, None)),
        (f"{_SWIFT} --rlhf_type dpo --micro_batch_size 2", "cross_entropy", None, (512, 4, None)),
        (f"{_SWIFT} --rlhf_type dpo --micro_batch_size 2 --packing true", "cross_entropy", None, (512, 2, None)),
        (f"{_SWIFT} --rlhf_type kto --micro_batch_size 2", "cross_entropy", None, (512, 2, None)),
        (f"{_SWIFT_SFT} --task_type embedding --micro_batch_size 2", "cross_entropy", None, (512, 4, None)),
        (f"{_SWIFT_SFT} --task_type reranker --micro_batch_size 2", "cross_entropy", None, (512, 2, None)),
        (_nemo(), _BY_SEQUENCE, None, (4096, 1, 4)),
        (_nemo(fused="true"), _WHOLE, None, (4096, 1, 4)),
        (_nemo(deferred="true"), _BY_SEQUENCE, 512, (4096, 1, 4)),
        (_nemo(packed="false"), _WHOLE, None, (1024, 4, None)),
        (_nemo("sft"), _BY_SEQUENCE, None, (4096, 1, 4)),
        (_nemo("dpo"), _BY_SEQUENCE, None, (8192, 1, 8)),
        (_nemo("distillation", deferred="true"), "topk_logits", None, (4096, 1, 4)),
    ],
)  # fmt: skip
def test_a_job_computes_the_loss_of_its_framework(
    text: str, loss: str, chunk: int | None, row: tuple[int, int, int | None], tmp_path: Path
) -> None:
    path = tmp_path / ("config.yaml" if text.startswith("policy") else "run.sh")
    path.write_text(text)
    job = Job.read(path, version="0.9.1" if "verl" in text else None)
    scenario, _ = job.required()
    assert (scenario.state.loss, scenario.state.logprobs_chunk_size) == (loss, chunk)
    # Only NeMo-RL keeps logits in bf16, and Megatron's own loss returns none.
    assert scenario.state.fp32_output == (loss != "cross_entropy" and "defer_fp32_logits: true" not in text)
    assert (scenario.seq_length, scenario.micro_batch_size, scenario.packed_sequences) == row


def test_verl_s_entropy_has_chunks_that_training_cannot_have(tmp_path: Path) -> None:
    """It is a pass's alone, or one chunk has the whole row: torch refuses the backward of a second chunk."""
    path, size = tmp_path / "run.sh", "actor_rollout_ref.actor.entropy_from_logits_chunk_size"
    for keys, chunk in (("", None), (f"{_CHUNKED_ENTROPY}=True", 2048), (f"{_CHUNKED_ENTROPY}=True {size}=64", 64)):
        path.write_text(f"{_VERL} {keys}")
        job = Job.read(path, version="0.9.1")
        assert job.required()[0].state.entropy_chunk_size == chunk
        assert not {one.key for one in job.not_modelled} & {_CHUNKED_ENTROPY, size}
    path.write_text(f"{_VERL} {keys} actor_rollout_ref.actor.entropy_coeff=0.01")
    job = Job.read(path, version="0.9.1")
    assert f"{size} is 64" in str(job.cannot_start) and "at least the 1024 tokens of a row" in str(job.cannot_start)


def test_a_distillation_has_as_many_logits_of_its_teacher_as_the_job_says(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(_nemo("distillation").replace("max_num_steps: 1", "topk_logits_k: 512"))
    job = Job.read(path)
    assert job.required()[0].state.topk_logits_k == 512
    assert "distillation.topk_logits_k" not in {one.key for one in job.not_modelled}
    path.write_text(_nemo().replace("policy:", "policy:\n  reward_model_cfg: {enabled: true}", 1))
    assert "which NeMo-RL refuses" in str(Job.read(path).cannot_start)


@pytest.mark.parametrize(
    ("text", "has_entropy", "missed"),
    [
        (_VERL, False, set()),
        (f"{_VERL} actor_rollout_ref.actor.entropy_coeff=0.01", True, set()),
        (f"{_VERL} actor_rollout_ref.actor.calculate_entropy=True", True, set()),
        (f"{_VERL} actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.calculate_entropy=False", False, set()),
        (
            f"{_VERL} actor_rollout_ref.actor.entropy_coeff=0.01 {_CHUNKED_ENTROPY}=True",
            True, set(),
        ),
        (f"{_SKYRL} trainer.algorithm.use_entropy_loss=true", True, set()),
        (f"{_SKYRL} trainer.algorithm.use_entropy_loss=false trainer.vocab_entropy_chunk_size=64", False, set()),
        (f"{_SLIME} --micro-batch-size 2 --entropy-coef 0.01", True, set()),
        (f"{_SLIME} --micro-batch-size 2 --entropy-coef 0.0", False, set()),
        (f"{_SLIME} --micro-batch-size 2 --entropy-coef 0.01 --rollout-top-p 0.9", True, {"entropy_coef", "rollout_top_p"}),
    ],
)  # fmt: skip
def test_the_entropy_is_a_part_of_the_loss_where_a_job_gives_it_a_coefficient(
    text: str, has_entropy: bool, missed: set[str], tmp_path: Path
) -> None:
    """verl's is so wherever it is computed (``ppo_loss`` in verl/workers/utils/losses.py, 0.9.1)."""
    job = read_job(text, tmp_path, version="0.9.1" if "verl" in text else None)
    assert job.required()[0].state.entropy_loss == has_entropy
    of_entropy = {one.key: one for one in job.not_modelled if "entropy" in one.key or "top_p" in one.key}
    assert of_entropy.keys() == missed
    assert all(one.bound_bytes for one in of_entropy.values() if "entropy" in one.key)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{_SLIME} --rollout-top-p 0.9", "rollout_top_p"),
        (f"{_SLIME} --use-dynamic-batch-size --max-tokens-per-gpu 4096 --qkv-format bshd", "qkv_format"),
        (f"{_SWIFT_SFT} --task_type embedding", "task_type"),
        (f"{_SWIFT_SFT} --task_type generative_reranker", "task_type"),
        (f"{_SKYRL} trainer.max_tokens_per_microbatch=4096 trainer.use_sample_packing=false", "trainer.max_tokens_per_microbatch"),
        (_nemo("distillation") + "loss_fn: {zero_outside_topk: true}\n", "loss_fn.zero_outside_topk"),
    ],
)  # fmt: skip
def test_what_of_a_loss_is_not_modelled_is_named(text: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / ("config.yaml" if text.startswith("policy") else "run.sh")
    path.write_text(text)
    assert {one.key: one.effect for one in Job.read(path).not_modelled}[key] == "more"


@pytest.mark.parametrize(
    ("text", "key", "tokens"),
    [
        (f"{_SKYRL} trainer.remove_microbatch_padding=false", "trainer.remove_microbatch_padding", 1024),
        (f"{_SKYRL} trainer.use_sample_packing=false", "trainer.use_sample_packing", 1024),
        (f"{_SKYRL} trainer.use_sample_packing=false trainer.max_tokens_per_microbatch=4096", "trainer.use_sample_packing", 4096),
        (f"{_SKYRL_SFT} remove_microbatch_padding=false", "remove_microbatch_padding", 2 * 4096),
        (_SKYRL, None, 0),
        (_SKYRL_SFT, None, 0),
    ],
)  # fmt: skip
def test_skyrl_copies_the_logits_of_rows_with_padding(text: str, key: str | None, tokens: int, tmp_path: Path) -> None:
    """``recover_left_padding``, which both directions of SkyRL's Megatron wrapper call where padding stays (0.3.0)."""
    job = read_job(text, tmp_path)
    scenario, _ = job.required()
    found = [(one.key, one.effect, one.bound_bytes) for one in job.not_modelled if "copy of the logits" in one.reason]
    elements = tokens * scenario.architecture.vocab_size // scenario.layout.tensor_model_parallel_size
    assert found == ([] if key is None else [(key, "more", 4 * 4 * elements)])


_BUDGET = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu={}"
_FP8_OF_VERL = "actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid"
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_TP2 = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("text", "row", "sequences"),
    [
        # Sequences of 1,024 tokens on two ranks: rows of any even number, and in FP8 of a multiple of 256.
        (f"{_VERL} {_BUDGET.format(2100)} {_TP2}", 2100, 3),
        (f"{_VERL} {_BUDGET.format(2100)} {_TP2} {_FP8_OF_VERL}", 2304, 3),
        (f"{_VERL} {_BUDGET.format(2048)} {_TP2} {_FP8_OF_VERL}", 2048, 2),
        (f"{_VERL} {_ACTOR}=3 {_MINI}=12 {_TP2} {_FP8_OF_VERL} data.max_response_length=500", 3 * 1024, 3),
        (_nemo_in_fp8("blockwise"), 1024, 2),
        (_nemo_in_fp8("tensorwise"), 1008, 2),
    ],
)
def test_rows_are_padded_in_fp8_as_their_framework_pads_them(
    text: str, row: int, sequences: int, tmp_path: Path
) -> None:
    """``_compute_fp8_thd_align_size`` of verl, and ``_get_pack_sequence_parameters_for_megatron`` of NeMo-RL."""
    path = tmp_path / ("config.yaml" if text.startswith("policy") else "run.sh")
    path.write_text(text)
    scenario, _ = Job.read(path, version="0.9.1" if "verl" in text else None).required()
    assert (scenario.seq_length, scenario.packed_sequences) == (row, sequences)
