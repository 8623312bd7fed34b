"""Jobs of Llama 3 and Qwen2.5 in every framework: by the model's name, or by its sizes and the biases of its attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memlab.config.architectures import ARCHITECTURES, HUGGING_FACE_NAMES, Architecture
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from tests.unit.job_files import read_job
from tests.unit.test_job_round_trip import FILES, read_lines

QWEN, LLAMA = ARCHITECTURES["qwen2.5-7b"], ARCHITECTURES["llama-3.1-8b"]
SIZES = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944
--num-attention-heads 28 --group-query-attention --num-query-groups 4 --kv-channels 128 --swiglu --bf16
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--vocab-size 152064 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8""".replace("\n", " ")


@pytest.mark.parametrize("model", [QWEN, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_job_that_is_written_is_read_as_the_same_model(name: str, model: Architecture, tmp_path: Path) -> None:
    lines = written(name, Scenario.of(model, seq_length=4096), MemorySettings()).lines
    job = read_lines(name, list(lines), 1, tmp_path / f"job.{'yaml' if name in FILES else 'sh'}")
    assert job.required()[0].architecture == model
    assert not [one for one in job.not_modelled if "bias" in one.key and "fusion" not in one.key]


def test_megatron_lm_s_flag_decides_on_the_biases(tmp_path: Path) -> None:
    assert read_job(f"{SIZES} --add-qkv-bias", tmp_path, "with.sh").required()[0].architecture == QWEN
    without = read_job(SIZES, tmp_path, "without.sh").required()[0].architecture
    assert not without.add_qkv_bias
    assert QWEN.num_parameters - without.num_parameters == 28 * (28 + 2 * 4) * 128


def test_megatron_lm_s_windows_of_a_dense_model_are_predicted(tmp_path: Path) -> None:
    scenario, _ = read_job(f"{SIZES} --window-size 127,0", tmp_path).required()
    assert (scenario.engine, scenario.architecture.window_size) == ("megatron", (127, 0))


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=True "
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"


@pytest.mark.parametrize("model", [QWEN, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "text",
    [
        VERL + f"{TRANSFORMER}.add_qkv_bias=True actor_rollout_ref.model.path=",
        "megatron sft --megatron_extra_kwargs '{\"add_qkv_bias\": true}' --model ",
        "megatron sft --add_qkv_bias true --model ",
    ],
)
def test_what_a_job_says_of_a_model_that_it_names_counts(text: str, model: Architecture, tmp_path: Path) -> None:
    job = read_job(text + HUGGING_FACE_NAMES[model.name], tmp_path)
    assert job.required()[0].architecture == replace(model, add_qkv_bias=True)


OSS = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880
--num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 --quick-geglu --bf16
--normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type yarn --rotary-base 150000
--num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-router-load-balancing-type none
--softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --no-bias-dropout-fusion --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--expert-model-parallel-size 8 --vocab-size 201088 --make-vocab-size-divisible-by 1
--seq-length 4096 --micro-batch-size 1 --global-batch-size 8""".replace("\n", " ")


def test_megatron_lm_s_flags_of_gpt_oss_are_read(tmp_path: Path) -> None:
    job = read_job(OSS, tmp_path, "oss.sh")
    scenario = job.required()[0]
    assert scenario.architecture == ARCHITECTURES["gpt-oss-20b"]
    assert scenario.state.bias_activation_fusion
    assert scenario.state.moe_router_load_balancing_type == "none"
    assert not [one for one in job.not_modelled if one.key in ("window_size", "softmax_type", "quick_geglu")]


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "automodel"])  # its engine is FSDP2
def test_a_written_job_of_gpt_oss_is_read_as_gpt_oss(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES["gpt-oss-20b"]
    lines = written(name, Scenario.of(model, seq_length=4096), MemorySettings()).lines
    job = read_lines(name, list(lines), 1, tmp_path / f"job.{'yaml' if name in FILES else 'sh'}")
    assert job.required()[0].architecture == model


IN_FP8 = "mixed_precision: bf16_with_fp8_current_scaling_mixed\n"
ADAPTERS = "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n"


@pytest.mark.parametrize(
    ("text", "lora", "fp8_format", "named"),
    [
        (IN_FP8, None, "hybrid", []),
        (ADAPTERS + "  dim: 8\n", LoRA(rank=8), None, []),
        (ADAPTERS, LoRA(rank=32), None, []),
    ],
)
def test_what_memlab_lacks_beside_biases_is_named(
    text: str, lora: LoRA | None, fp8_format: str | None, named: list[str], tmp_path: Path
) -> None:
    """All linears of gpt-oss have biases. Beside adapters the model is then predicted in bf16."""
    path = tmp_path / "config.yaml"
    path.write_text(f"model:\n  hf_model_id: openai/gpt-oss-20b\ntrain:\n  global_batch_size: 8\n{text}")
    job = Job.read(path, world_size=8)
    state = job.required()[0].state
    assert state.lora == lora and state.fp8_format == fp8_format
    assert [one.key for one in job.not_modelled if one.key in ("model.fp8", "peft")] == named
