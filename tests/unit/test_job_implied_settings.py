"""Keys that decide more than their own field: another program, another attention, another key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.job import Job
from memlab.units import GIB
from tests.unit.job_files import read_job

SIZES = """--num-layers 32 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 32 --swiglu
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--vocab-size 32064 --bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0
""".replace("\n", " ")
SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 "


def read(folder: Path, flags: str, start: str = "torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES) -> Job:
    return read_job(f"{start}{flags}\n", folder)


def missing(job: Job, key: str) -> NotModelled:
    (found,) = (one for one in job.not_modelled if one.key == key)
    return found


_GPT = """--num-layers 12 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 1024
--seq-length 1024 --micro-batch-size 4 --global-batch-size 32 --vocab-size 50257 --bf16
""".replace("\n", " ")


@pytest.mark.parametrize(
    ("start", "flags", "backend", "layers", "is_named"),
    [
        (SIZES, "--attention-backend unfused", "unfused", "transformer_engine", False),
        (SIZES, "--transformer-impl local", "unfused", "transformer_engine", True),  # with RMSNorm
        (_GPT, "--transformer-impl local", "auto", "local", False),
        (_GPT, "--transformer-impl local --attention-backend unfused", "auto", "local", False),
        (_GPT, "--transformer-impl local --no-masked-softmax-fusion", "unfused", "transformer_engine", True),
        (_GPT, "--transformer-impl inference_optimized", "auto", "transformer_engine", True),
        (_GPT, "--transformer-impl other", "auto", "transformer_engine", True),
        # Megatron's kernel of the softmax takes 4 matrices of scores, and 4 tokens, at a time.
        (
            _GPT,
            "--transformer-impl local --micro-batch-size 1 --hidden-size 640 --num-attention-heads 10",
            "unfused",
            "transformer_engine",
            True,
        ),
        (_GPT, "--transformer-impl local --seq-length 1022", "unfused", "transformer_engine", True),
    ],
)
def test_attention_that_keeps_scores_is_predicted_as_such(
    tmp_path: Path, start: str, flags: str, backend: str, layers: str, is_named: bool
) -> None:
    """The log of NVIDIA/Megatron-LM's issue 965: dropout adds 1,536 MiB per layer for 32 heads and 4,096 tokens."""
    job = read(tmp_path, f"{flags} --attention-dropout 0.1", f"torchrun --nproc-per-node 8 pretrain_gpt.py {start}")
    scenario, _ = job.required()

    assert (scenario.state.attention_backend, scenario.state.transformer_impl) == (backend, layers)
    assert scenario.state.attention_dropout == 0.1
    assert ("transformer_impl" in {one.key for one in job.not_modelled}) == is_named


@pytest.mark.parametrize(
    ("flags", "is_named"),
    [
        ("--no-masked-softmax-fusion --attention-softmax-in-fp32", True),
        ("--no-masked-softmax-fusion --apply-query-key-layer-scaling", True),
        ("--no-masked-softmax-fusion", False),
        ("--attention-softmax-in-fp32", False),
        ("--attention-softmax-in-fp32 --seq-length 8192 --max-position-embeddings 8192", True),
    ],
)
def test_megatron_s_own_softmax_in_fp32_is_said_where_no_kernel_takes_its_place(
    flags: str, is_named: bool, tmp_path: Path
) -> None:
    """Saved by megatron-core 0.16.1's ``FusedScaleMaskSoftmax`` of bf16 scores: 2 bytes each, or 4 of fp32."""
    job = read(tmp_path, f"--transformer-impl local --bf16 {flags}")
    assert ("attention_softmax_in_fp32" in {one.key for one in job.not_modelled}) == is_named


@pytest.mark.parametrize(
    ("environment", "flags", "refusal"),
    [
        ("NVTE_FLASH_ATTN=0", "", "NVTE_FLASH_ATTN is 0"),
        ("NVTE_FUSED_ATTN=0", "", "NVTE_FUSED_ATTN is 0"),
        ("NVTE_FUSED_ATTN=1", "--attention-backend flash", "NVTE_FUSED_ATTN is 1"),
        ("NVTE_FLASH_ATTN=1", "--attention-backend fused", "NVTE_FLASH_ATTN is 1"),
        ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0", "--transformer-impl local", "NVTE_FUSED_ATTN is 0"),
        ("NVTE_FUSED_ATTN=1", "", None),
        ("NVTE_FLASH_ATTN=0", "--attention-backend $(choose)", None),
        ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0", "--attention-backend flash", None),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0 NVTE_UNFUSED_ATTN=1", "--attention-backend unfused", None),
    ],
)
def test_megatron_refuses_an_environment_that_chooses_another_attention(
    tmp_path: Path, environment: str, flags: str, refusal: str | None
) -> None:
    start = "".join(f"export {one}\n" for one in environment.split())
    job = read(tmp_path, flags, start + "torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES)

    assert refusal in (job.cannot_start or "") if refusal else job.cannot_start is None


def test_a_step_of_grpo_is_not_predicted_as_pretraining(tmp_path: Path) -> None:
    start = "torchrun --nproc-per-node 8 train_rl.py --perform-rl-step " + SIZES
    job = read(tmp_path, "", start)

    assert job.scenario is None
    assert "line 1: perform_rl_step makes this a job of GRPO" in job.causes[0]
    assert "--set perform_rl_step=false" in str(job.not_supported)
    assert Job.read(job.path, overrides=["perform_rl_step=false"]).scenario is not None


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("pretrain_mamba.py", "another kind"),
        ("examples/t5/pretrain_t5.py", "another kind"),
        ("${MEGATRON}/pretrain_vlm.py", "another kind"),
        ("tools/run_text_generation_server.py", "does not train"),
        ("-m tools/checkpoint/convert.py", "a checkpoint"),
        ("tools/preprocess_data.py", "does not train"),
        ("train_rl.py", "reinforcement learning"),
        ("pretrain_gpt.py", None),
        ("my_pretrain.py", None),
        ("examples/multimodal/train.py --language-model-type llama3_8b --vision-model-type radio", "vision tower"),
    ],
)
def test_another_program_is_not_predicted_as_pretraining(tmp_path: Path, program: str, what: str | None) -> None:
    job = read(tmp_path, "", f"torchrun --nproc-per-node 8 {program} {SIZES}")

    assert (job.scenario is None) == (what is not None)
    assert (what or "") in f"{job.causes} {job.not_supported}"


@pytest.mark.parametrize(
    ("flags", "granularity"),
    [
        ("--recompute-activations", "selective"),
        ("--recompute-activations --recompute-granularity full", "selective"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full"),
    ],
)
def test_recompute_activations_sets_the_granularity(tmp_path: Path, flags: str, granularity: str) -> None:
    _, settings = read(tmp_path, flags).required()

    assert settings.recompute_granularity == granularity


def test_older_names_of_two_sizes_are_read(tmp_path: Path) -> None:
    """``validate_args`` takes them where ``--num-layers`` and ``--seq-length`` are not given."""
    start = "torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES.replace("--num-layers", "--encoder-num-layers")
    scenario, _ = read(tmp_path, "", start.replace("--seq-length", "--encoder-seq-length")).required()

    assert (scenario.num_layers, scenario.seq_length) == (32, 4096)


@pytest.mark.parametrize("version", ["flash_2", "flash_3", "flash_4", "flash"])
def test_ms_swift_takes_flash_attention_of_one_version(tmp_path: Path, version: str) -> None:
    scenario, _ = read(tmp_path, f"--attention_backend {version}", SWIFT).required()

    assert scenario.state.attention_backend == "flash"


def test_parts_of_multimodal_models_are_without_effect_on_text_models(tmp_path: Path) -> None:
    """``args.json`` has them for every model, with these values."""
    (tmp_path / "args.json").write_text(
        '{"model": "Qwen/Qwen3-30B-A3B", "tuner_type": "full", "freeze_llm": false, "freeze_vit": true, '
        '"freeze_aligner": true, "is_multimodal": false, "freeze_parameters": [], "freeze_parameters_ratio": 0.0, '
        '"freeze_parameters_regex": null, "adapters": [], "world_size": 8}'
    )
    job = Job.read(tmp_path / "args.json")

    assert [one.key for one in job.not_modelled if one.effect == "less"] == []
    assert {"freeze_vit", "freeze_aligner"} <= set(job.without_effect)


@pytest.mark.parametrize(
    ("flags", "key", "effect"),
    [
        ("--freeze_parameters embedding", "freeze_parameters", "less"),
        ("--freeze_parameters_ratio 0.5", "freeze_parameters_ratio", "less"),
        ("--adapters out/checkpoint-10 --lora_bias all", "tuner_type", "less"),
        ("--mcore_adapter out/checkpoint-10 --tuner_type full --lora_bias all", "tuner_type", "less"),
        ("--tuner_type lora --lora_bias all", "tuner_type", "less"),
        ("--padding_free false", "padding_free", "more"),
        ("--rlhf_type grpo --teacher_model Qwen/Qwen3-235B-A22B", "teacher_model", "more"),
    ],
)
def test_what_ms_swift_trains_and_keeps(tmp_path: Path, flags: str, key: str, effect: str) -> None:
    assert missing(read(tmp_path, flags, SWIFT), key).effect == effect


def test_packing_makes_rows_without_padding(tmp_path: Path) -> None:
    """``MegatronBaseArguments`` sets ``padding_free`` where ``packing`` is on."""
    job = read(tmp_path, "--padding_free false --packing true", SWIFT)

    assert "padding_free" not in {one.key for one in job.not_modelled}


def test_muon_switches_the_distributed_optimizer_off(tmp_path: Path) -> None:
    job = read(tmp_path, "--optimizer dist_muon", SWIFT)

    assert not job.required()[0].state.use_distributed_optimizer
    assert missing(job, "optimizer").effect == "either"


def test_fused_gradients_of_ms_swift_depend_on_the_machine(tmp_path: Path) -> None:
    for flags, is_on in (("", True), ("--gradient_accumulation_fusion false", False)):
        job = read(tmp_path, flags, SWIFT)
        assert job.required()[0].state.gradient_accumulation_fusion == is_on
        assert any("where Apex cannot be imported" in line for line in job.warnings) == is_on


SLIME = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /root/Qwen3-30B-A3B
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --attention-dropout 0 --hidden-dropout 0
--rollout-max-context-len 8192 --global-batch-size 32 """.replace("\n", " ")


@pytest.mark.parametrize(
    ("budget", "tensor", "tokens"), [(4096, 1, 4096), (4000, 1, 4096), (4100, 2, 4352), (129, 1, 256)]
)
def test_slime_pads_a_full_row(tmp_path: Path, budget: int, tensor: int, tokens: int) -> None:
    """``get_batch`` pads to a multiple of 128 x tensor parallel ranks (slime/backends/megatron_utils/data.py)."""
    flags = f"--use-dynamic-batch-size --max-tokens-per-gpu {budget} --tensor-model-parallel-size {tensor} "
    flags += "--rollout-max-context-len 100 --sequence-parallel --global-batch-size 64"
    scenario, _ = read(tmp_path, flags, SLIME).required()

    assert scenario.seq_length == tokens
    (tmp_path / "run.sh").write_text(f"{SLIME}{flags} --data-pad-size-multiplier 1\n")
    assert Job.read(tmp_path / "run.sh").required()[0].seq_length == budget // tensor * tensor


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--freeze-params-name-list embedding", "freeze_params_name_list"),
        ("--only-train-params-name-list layers.47", "only_train_params_name_list"),
        ("--use-stateless-adam", "use_stateless_adam"),
        ("--use-rollout-routing-replay", "use_rollout_routing_replay"),
        ("--moe-flex-dispatcher-backend ncclep", "moe_flex_dispatcher_backend"),
    ],
)
def test_what_slime_trains_and_keeps(tmp_path: Path, flags: str, key: str) -> None:
    assert missing(read(tmp_path, flags, SLIME), key).effect != "unknown"


def test_slime_dispatches_with_alltoall_in_place_of_allgather(tmp_path: Path) -> None:
    job = read(tmp_path, "--moe-token-dispatcher-type allgather", SLIME)

    assert "moe_token_dispatcher_type" not in {one.key for one in job.not_modelled}
    assert job.required()[0].state.moe_token_dispatcher_type == "alltoall"


def test_a_job_of_slime_without_rollout_has_no_engine(tmp_path: Path) -> None:
    rollout = read(tmp_path, "--colocate --sglang-mem-fraction-static 0.7 --debug-train-only", SLIME).rollout

    assert rollout is not None
    assert rollout.gpu_memory_utilization == 0


def test_a_job_of_slime_that_only_generates_is_no_training(tmp_path: Path) -> None:
    assert read(tmp_path, "--debug-rollout-only", SLIME).scenario is None


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--batch-size 4", "micro_batch_size"),
        ("--model-parallel-size 2", "tensor_model_parallel_size"),
        ("--checkpoint-activations", "recompute_granularity"),
        ("--warmup 0.01", "lr_warmup_fraction"),
    ],
)
def test_an_argument_that_megatron_lm_no_longer_takes_is_refused(tmp_path: Path, flag: str, instead: str) -> None:
    """``validate_args`` asserts or exits, 0.16.1 and 0.19."""
    assert str(read(tmp_path, flag).cannot_start).endswith(f"give {instead}")
    # It is named where something else refuses the job first, too.
    assert any(cause.endswith(f"give {instead}") for cause in read(tmp_path, f"{flag} --fp16").causes)


def test_arguments_in_a_file_of_megatron_lm_are_asked_for(tmp_path: Path) -> None:
    """``--yaml-cfg``: ``load_yaml`` takes the place of all flags."""
    job = read(tmp_path, "--yaml-cfg gpt.yaml")

    assert "from yaml_cfg 'gpt.yaml'" in job.causes[0]
    assert "--set yaml_cfg=null" in str(job.not_supported)
    assert Job.read(job.path, overrides=["yaml_cfg=null"]).scenario is not None


def test_other_positions_than_rope_switch_its_fusion_off(tmp_path: Path) -> None:
    start = "torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES
    assert read(tmp_path, "", start).required()[0].state.apply_rope_fusion
    yarn = read(tmp_path, "", start.replace("position-embedding-type rope", "position-embedding-type yarn"))
    assert not yarn.required()[0].state.apply_rope_fusion


MOE = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 8
--expert-tensor-parallel-size 1 --attention-dropout 0 """.replace("\n", " ")


def test_experts_one_by_one_are_said_of_megatron_lm_s_models_with_experts(tmp_path: Path) -> None:
    found = missing(read(tmp_path, MOE), "moe_grouped_gemm")

    assert (found.place, found.value) == ("default", False)
    assert "moe_grouped_gemm" not in {one.key for one in read(tmp_path, "").not_modelled}


@pytest.mark.parametrize(
    ("flags", "key", "effect"),
    [
        ("--moe-paged-stash", "moe_paged_stash", "either"),
        ("--moe-enable-routing-replay", "moe_enable_routing_replay", "more"),
        ("--ddp-num-buckets 4", "ddp_num_buckets", "either"),
        ("--ddp-pad-buckets-for-high-nccl-busbw", "ddp_pad_buckets_for_high_nccl_busbw", "more"),
        ("--use-nccl-ub", "use_nccl_ub", "either"),
        ("--no-fp8-wgrad", "no_fp8_wgrad", "more"),
        ("--empty-unused-memory-level 1", "empty_unused_memory_level", "less"),
        ("--use-torch-fsdp2", "use_torch_fsdp2", "less"),
        ("--use-checkpoint-args", "use_checkpoint_args", "either"),
        ("--logits-load-dir /teacher", "logits_load_dir", "more"),
    ],
)
def test_an_argument_that_a_pattern_called_without_effect(tmp_path: Path, flags: str, key: str, effect: str) -> None:
    """Each was covered by a pattern such as ``moe_router_*``, or was in no list."""
    assert missing(read(tmp_path, MOE + flags), key).effect == effect


@pytest.mark.parametrize("kind", ["--fp4-format e2m1", "--fp8-format hybrid"])
def test_layers_that_stay_in_bf16_are_said_in_fp4_and_fp8(tmp_path: Path, kind: str) -> None:
    assert missing(read(tmp_path, f"{MOE} {kind} --first-last-layers-bf16"), "first_last_layers_bf16").effect == "more"


@pytest.mark.parametrize("flag", ["--moe-router-of-the-next-release", "--lr-of-next", "--save-activations-on-gpu"])
def test_an_argument_in_no_list_is_unknown(tmp_path: Path, flag: str) -> None:
    assert missing(read(tmp_path, flag), flag[2:].replace("-", "_")).effect == "unknown"


@pytest.mark.parametrize("value", ["$(choose)", "'${oc.env:CHOSEN}'"])
@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.megatron.vanilla_mbridge",
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.adv_estimator",
    ],
)
def test_a_key_beside_the_table_that_is_unknown_is_said(tmp_path: Path, key: str, value: str) -> None:
    start = "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
    job = read(tmp_path, f"{key}={value}", start)

    (warning,) = (line for line in job.warnings if key in line)
    assert warning.startswith(f"line 1: {key} is known only when the job runs, so memlab takes it as not given")


def test_extra_arguments_of_ms_swift_are_fields_of_the_model(tmp_path: Path) -> None:
    extra = '{"moe_z_loss_coeff": 0.001, "recompute_modules": ["mlp", "moe_act"], "softmax_scale": 0.1, "new": 1, "qk_l2_norm": true}'
    job = read(tmp_path, f"--megatron_extra_kwargs '{extra}'", SWIFT)

    assert missing(job, "megatron_extra_kwargs.qk_l2_norm").effect == "more"
    assert job.required()[0].state.moe_z_loss_coeff == 0.001
    assert missing(job, "megatron_extra_kwargs.new").effect == "unknown"
    assert "megatron_extra_kwargs.softmax_scale" in job.without_effect
    assert job.required()[1].recompute_modules == ("mlp", "moe_act")


def test_unfused_permutation_is_a_default_of_ms_swift(tmp_path: Path) -> None:
    for flags, is_fused in (("", False), ("--moe_permute_fusion true", True)):
        assert read(tmp_path, flags, SWIFT).required()[0].state.moe_permute_fusion == is_fused


@pytest.mark.parametrize(
    ("value", "kind"), [("null", "aux_loss"), ('["seq_aux_loss"]', "seq_aux_loss"), ('"none"', "none")]
)
def test_ms_swift_takes_the_loss_of_the_router_from_the_model(tmp_path: Path, value: str, kind: str) -> None:
    """``args.json`` has null in every job that does not set it; mcore-bridge leaves out what is null."""
    key = "moe_router_load_balancing_type"
    (tmp_path / "args.json").write_text(f'{{"model": "Qwen/Qwen3-30B-A3B", "world_size": 8, "{key}": {value}}}')
    assert Job.read(tmp_path / "args.json").required()[0].state.moe_router_load_balancing_type == kind


def test_the_history_of_scales_concerns_fp8_alone(tmp_path: Path) -> None:
    """``args.json`` has ``fp8_amax_history_len 1024`` in every job."""
    key = "fp8_amax_history_len"
    assert key not in {one.key for one in read(tmp_path, f"--{key} 1024", SWIFT).not_modelled}
    assert missing(read(tmp_path, "--fp8_format hybrid", SWIFT), key).place == "default"
    assert key not in {one.key for one in read(tmp_path, f"--fp8_format hybrid --{key} 1", SWIFT).not_modelled}


NEMO = """\
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_micro_batch_size: 2
  sequence_packing: {enabled: false}
  megatron_cfg: {enabled: true, expert_model_parallel_size: 8, defer_fp32_logits: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
grpo: {num_prompts_per_step: 4}
"""


def nemo(folder: Path, *overrides: str) -> Job:
    return read_job(NEMO, folder, "config.yaml", overrides=overrides)


@pytest.mark.parametrize(
    ("key", "value", "effect"),
    [
        ("empty_unused_memory_level", 1, "less"),
    ],
)
def test_defaults_of_nemo_rl_that_are_not_modelled_are_said(
    tmp_path: Path, key: str, value: object, effect: str
) -> None:
    """``examples/configs/grpo_math_1B.yaml`` at 7ea279ab."""
    found = missing(nemo(tmp_path), f"policy.megatron_cfg.{key}")

    assert (found.place, found.value, found.effect) == ("default", value, effect)


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_nemo_rl_takes_the_backend_from_its_own_key(tmp_path: Path, backend: str) -> None:
    """``_apply_performance_config`` in nemo_rl/models/megatron/setup.py."""
    scenario, _ = nemo(tmp_path, f"policy.megatron_cfg.attention_backend={backend}").required()

    assert scenario.state.attention_backend == backend


def test_log_probabilities_of_nemo_rl_take_the_micro_batch_of_training(tmp_path: Path) -> None:
    rollout = nemo(tmp_path).rollout

    assert rollout is not None
    assert rollout.micro_batch_size == 2


@pytest.mark.parametrize("key", ["bucket_size", "nccl_ub", "use_megatron_fsdp", "num_distributed_optimizer_instances"])
def test_keys_that_nemo_rl_does_not_read_are_not_taken(tmp_path: Path, key: str) -> None:
    """It gives ``DistributedDataParallelConfig`` five values by name (``_create_megatron_config`` in setup.py)."""
    text = NEMO.replace("defer_fp32", f"distributed_data_parallel_config: {{{key}: 2}}, defer_fp32")
    job = read_job(text, tmp_path, "config.yaml")

    assert missing(job, f"policy.megatron_cfg.distributed_data_parallel_config.{key}").effect == "unknown"


@pytest.mark.parametrize(
    ("overrides", "share", "ranks"),
    [
        (["vllm_cfg.tensor_parallel_size=4", "vllm_cfg.expert_parallel_size=4"], 0.6, 4),
        (["vllm_cfg.gpu_memory_utilization=0.7", "vllm_cfg.tensor_parallel_size=4"], 0.7, 4),
        (["vllm_cfg.tensor_parallel_size=4", "vllm_cfg.pipeline_parallel_size=2"], 0.6, 8),
        (["backend=sglang", "sglang_cfg.mem_fraction_static=0.5", "sglang_cfg.tp_size=2"], 0.5, 2),
        (["backend=sglang", "sglang_cfg.tp_size=8", "vllm_cfg.gpu_memory_utilization=0.7"], None, 8),
        (["backend=sglang", "sglang_cfg.mem_fraction_static=0.5", "vllm_cfg.tensor_parallel_size=4"], 0.5, 1),
        (["backend=megatron", "vllm_cfg.gpu_memory_utilization=0.7"], None, 1),
        (["backend=trtllm", "trtllm_cfg.tensor_parallel_size=4"], None, 4),
        (["backend=dynamo", "vllm_cfg.tensor_parallel_size=4"], None, 1),
        (["backend=[vllm]"], None, 1),
    ],
)
def test_the_engine_of_nemo_rl_is_the_one_that_is_used(
    tmp_path: Path, overrides: list[str], share: float | None, ranks: int
) -> None:
    rollout = nemo(tmp_path, *(f"policy.generation.{one}" for one in overrides)).rollout

    assert rollout is not None
    assert (rollout.gpu_memory_utilization, rollout.engine_ranks) == (share, ranks)


MCORE = "policy.generation.mcore_generation_config"
MEGATRON_ENGINE = ("policy.generation.backend=megatron", "policy.megatron_cfg.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "engine_bytes", "sleeps", "has_own_weights", "ranks"),
    [
        ([], 10 * GIB, False, False, 1),
        ([f"{MCORE}.buffer_size_gb=20", f"{MCORE}.kv_cache_management_mode=offload"], 20 * GIB, True, False, 1),
        (["grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"], 10 * GIB, True, False, 1),
        ([f"{MCORE}.tensor_model_parallel_size=2"], 10 * GIB, False, False, 1),
        (
            [f"{MCORE}.tensor_model_parallel_size=4", f"{MCORE}.pipeline_model_parallel_size=2"],
            10 * GIB,
            False,
            True,
            8,
        ),
        ([f"{MCORE}.transformer_impl=inference_optimized"], 10 * GIB, False, True, 2),
        (
            ["policy.megatron_cfg.context_parallel_size=2", "policy.sequence_packing.enabled=true"],
            10 * GIB,
            False,
            True,
            2,
        ),
    ],
)
def test_megatron_s_engine_in_nemo_rl_generates_with_the_training_s_parameters(
    tmp_path: Path, overrides: list[str], engine_bytes: int, sleeps: bool, has_own_weights: bool, ranks: int
) -> None:
    """``dedicated_inference_megatron_cfg`` in nemo_rl/models/generation/megatron/config.py at 7ea279ab."""
    rollout = nemo(tmp_path, *MEGATRON_ENGINE, *overrides).rollout

    assert rollout is not None
    found = (rollout.engine_bytes, rollout.engine_sleeps, rollout.engine_has_own_weights, rollout.engine_ranks)
    assert found == (engine_bytes, sleeps, has_own_weights, ranks)
    assert rollout.gpu_memory_utilization is None


@pytest.mark.parametrize(
    ("overrides", "freed"),
    [
        (["policy.generation.colocated.enabled=false"], ("gradients",)),
        (
            ["policy.generation.colocated.enabled=false", "policy.offload_optimizer_for_logprob=true"],
            ("gradients", "optimizer state"),
        ),
        ([], ()),
    ],
)
def test_nemo_rl_frees_gradients_before_log_probabilities(
    tmp_path: Path, overrides: list[str], freed: tuple[str, ...]
) -> None:
    """``prepare_for_lp_inference`` in nemo_rl/models/policy/workers/megatron_policy_worker.py at 7ea279ab."""
    rollout = nemo(tmp_path, *overrides).rollout

    assert rollout is not None
    assert rollout.freed_for_log_probabilities == freed


REWARD = ("data.default.env_name=reward_model", "env.reward_model.resources={num_nodes: 1, gpus_per_node: 2}")
TEACHERS = (
    "on_policy_distillation.enabled=true",
    "on_policy_distillation.non_colocated_teachers.enabled=true",
    "on_policy_distillation.teacher_model_by_agent_name={first: a, second: b, third: a}",
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes=1",
    "on_policy_distillation.non_colocated_teachers.teacher_overrides.second.num_nodes=2",
)
ELSEWHERE = "policy.generation.colocated.enabled=false"


@pytest.mark.parametrize(
    ("nodes", "overrides", "ranks"),
    [
        (1, REWARD, 6),
        (4, REWARD, 24),
        (4, REWARD[1:], 32),
        (1, (*REWARD, ELSEWHERE, "policy.generation.colocated.resources={gpus_per_node: 4}"), 2),
        (4, (*REWARD, ELSEWHERE, "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 8}"), 16),
        (2, (*REWARD, ELSEWHERE, "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 4}"), 4),
        (4, TEACHERS, 8),
        (8, (*TEACHERS, "on_policy_distillation.deduplicate_shared_teacher_checkpoints=false"), 32),
    ],
)
def test_models_beside_the_policy_of_nemo_rl_have_nodes_of_their_own(
    tmp_path: Path, nodes: int, overrides: tuple[str, ...], ranks: int
) -> None:
    """``setup`` in nemo_rl/algorithms/grpo.py at 7ea279ab."""
    cluster = (f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=8")
    size = ("policy.train_global_batch_size=96", "policy.megatron_cfg.expert_model_parallel_size=1")
    job = nemo(tmp_path, *cluster, *overrides, *size)

    assert job.required()[0].layout.world_size == ranks
    said = job.without_effect.get("on_policy_distillation.enabled", "")
    if TEACHERS[0] in overrides:
        assert said.startswith(f"the teachers have {nodes - ranks // 8} of the job's nodes for themselves")
    assert "on_policy_distillation.enabled" not in {one.key for one in job.not_modelled}


def test_nemo_rl_moves_the_optimizer_state_that_megatron_does_not_move_itself(tmp_path: Path) -> None:
    optimizer = "policy.megatron_cfg.optimizer"
    assert nemo(tmp_path).required()[1].offload_optimizer
    for override in ("policy.offload_optimizer_for_refit=false", f"{optimizer}.optimizer_cpu_offload=true"):
        settings = nemo(tmp_path, override).required()[1]
        assert (settings.offload_parameters, settings.offload_optimizer) == (True, False)
    kept = nemo(tmp_path, f"{optimizer}.use_precision_aware_optimizer=false").warnings
    assert any("leaves them on the device between steps" in one for one in kept)


VERL = (
    "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
    "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=True "
)
SFT = (
    "python -m verl.trainer.sft_trainer engine=megatron model.path=Qwen/Qwen3-30B-A3B "
    "engine.override_ddp_config.grad_reduce_in_fp32=True "
)


@pytest.mark.parametrize(
    ("key", "start"),
    [
        ("actor_rollout_ref.rollout.prompt_length=", VERL),
        ("actor_rollout_ref.rollout.response_length=", VERL),
        ("nnodes=", SFT),
        ("nproc_per_node=", SFT),
        ("--nnodes ", SWIFT),
    ],
)
def test_a_second_key_of_a_number_that_is_null_counts_as_not_given(tmp_path: Path, key: str, start: str) -> None:
    given, left_out = read(tmp_path, f"{key}null", start), read(tmp_path, "", start)

    assert given.required() == left_out.required()


@pytest.mark.parametrize("size", [0, -2])
@pytest.mark.parametrize(
    "start",
    [
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.rollout.data_parallel_size=",
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.rollout.tensor_model_parallel_size=",
        "main_base.py trainer.policy.model.path=phi-4 trainer.strategy=megatron generator.inference_engine.tensor_parallel_size=",
        "python3 train.py --actor-num-nodes 1 --rollout-num-gpus-per-engine ",
        SWIFT + "--vllm_tensor_parallel_size ",
    ],
)
def test_an_engine_has_at_least_one_rank(tmp_path: Path, start: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"^line 1: .* is {size}, must be a whole number of at least 1: correct it$"):
        read(tmp_path, str(size), start)


@pytest.mark.parametrize(("tensor", "experts", "copies"), [(4, 8, 2), (2, 8, 4), (4, 4, 1), (8, 1, 1)])
def test_the_engine_of_nemo_rl_spreads_experts_over_its_copies(
    tmp_path: Path, tensor: int, experts: int, copies: int
) -> None:
    """``expert_parallel_size`` is a multiple of ``tensor_parallel_size`` (vllm_generation.py at 7ea279ab)."""
    engine = "policy.generation.vllm_cfg"
    overrides = (f"{engine}.tensor_parallel_size={tensor}", f"{engine}.expert_parallel_size={experts}")
    rollout = nemo(tmp_path, *overrides).rollout

    assert rollout is not None
    assert (rollout.engine_ranks, rollout.engine_data_ranks) == (tensor, copies)


@pytest.mark.parametrize(
    ("flags", "is_fused_loss", "is_fused_rope"),
    [
        ("", True, False),
        ("--train_type full", False, True),
        ("--save out --max_epochs 1", False, True),
        ("--train_type full --cross_entropy_loss_fusion true", True, True),
        ("--no_rope_fusion true", False, False),
    ],
)
def test_an_argument_of_ms_swift_3_brings_its_defaults(
    tmp_path: Path, flags: str, is_fused_loss: bool, is_fused_rope: bool
) -> None:
    state = read(tmp_path, flags, SWIFT).required()[0].state

    assert (state.cross_entropy_loss_fusion, state.apply_rope_fusion) == (is_fused_loss, is_fused_rope)


_NAMED = {
    "megatron-lm": ("torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES, "--expert-model-parallel-size 2"),
    "ms-swift": ("NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B ", "--expert_model_parallel_size 2"),
    "verl": (
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B ",
        (
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2 trainer.n_gpus_per_node=8 "
            "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=True"
        ),
    ),
}


@pytest.mark.parametrize("name", _NAMED)
def test_a_model_without_experts_cannot_spread_them(tmp_path: Path, name: str) -> None:
    """``TransformerConfig.__post_init__`` raises, megatron-core 0.16.1 and 0.19.2."""
    start, flags = _NAMED[name]
    assert "which has no experts, by a rule of Megatron-Core" in str(read(tmp_path, flags, start).cannot_start)
    assert Job.read(tmp_path / "run.sh", architecture="qwen3-30b-a3b").cannot_start is None
    assert Job.read(tmp_path / "run.sh", architecture="phi-4").cannot_start is None  # in place of the job's model


_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_POSITIONS = "--max-position-embeddings 4096"
_TWO_STAGES = "--pipeline-model-parallel-size 2"
_CHUNKS = f"{_TWO_STAGES} --num-layers-per-virtual-pipeline-stage 4"
_SPLIT = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("refused", "accepted"),
    [
        (_SELECTIVE, f"{_SELECTIVE} layernorm"),
        (f"{_SELECTIVE} mla_up_proj", f"{_SELECTIVE} layernorm"),
        ("--encoder-num-layers 32", ""),
        ("--group-query-attention --multi-latent-attention", "--group-query-attention"),
        (f"{_CHUNKS} --decoder-first-pipeline-num-layers 14", _CHUNKS),
        (f"{_CHUNKS} --no-overlap-p2p-communication", "--no-overlap-p2p-communication"),
        (
            f"{_TWO_STAGES} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            f"{_TWO_STAGES} --num-virtual-stages-per-pipeline-rank 1 --no-overlap-p2p-communication",
        ),
        ("--no-position-embedding --position-embedding-type none", "--no-position-embedding"),
        (
            "--no-position-embedding --position-embedding-type none",
            "--no-position-embedding --position-embedding-type none --use-checkpoint-args",
        ),
        (
            "--fp8-format hybrid --fp8-param-gather",
            "--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
        ),
        ("--fp8-format hybrid --first-last-layers-bf16", "--fp8-recipe tensorwise --first-last-layers-bf16"),
        ("--fp16-lm-cross-entropy", ""),
        ("--attention-backend local", "--attention-backend unfused"),
        (
            "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 1",
            "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        ),
        ("--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2", "--cpu-offloading-num-layers 2"),
        (f"--cpu-offloading-num-layers 2 {_SELECTIVE} layernorm", "--cpu-offloading-num-layers 0"),
        ("--distribute-saved-activations", ""),
        (
            f"--distribute-saved-activations {_FULL} {_SPLIT} --sequence-parallel",
            f"--distribute-saved-activations {_FULL} {_SPLIT}",
        ),
    ],
)
def test_flags_that_megatron_lm_refuses(tmp_path: Path, refused: str, accepted: str) -> None:
    """``validate_args`` and ``TransformerConfig``, run with d98e8a64."""
    found = str(read(tmp_path, refused).cannot_start)
    assert found.startswith("the job has ") and " refuse" in found
    assert read(tmp_path, accepted).cannot_start is None


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid --fp8-recipe $RECIPE --first-last-layers-bf16",
        f"--distribute-saved-activations --recompute-granularity $RECOMPUTE {_SPLIT}",
    ],
)
def test_a_rule_on_a_text_that_only_the_run_knows_refuses_nothing(tmp_path: Path, flags: str) -> None:
    job = read(tmp_path, flags)
    assert job.cannot_start is None
    assert " is known only when the job runs, and with the default the framework refuses" in str(job.not_supported)


@pytest.mark.parametrize("name", _NAMED)
def test_a_model_without_latent_attention_cannot_recompute_its_projections(tmp_path: Path, name: str) -> None:
    start, _ = _NAMED[name]
    modules = {
        "megatron-lm": f"{_SELECTIVE} mla_up_proj",
        "ms-swift": "--recompute_granularity selective --recompute_modules mla_up_proj",
        "verl": "trainer.n_gpus_per_node=8 "
        + " ".join(
            f"actor_rollout_ref.actor.megatron.override_transformer_config.recompute_{key}"
            for key in ("granularity=selective", "modules=[mla_up_proj]")
        ),
    }
    assert "without multi-latent attention" in str(read(tmp_path, modules[name], start).cannot_start)
    assert Job.read(tmp_path / "run.sh", architecture="phi-4").cannot_start is None  # in place of the job's model


_OFFLOAD = "--fine-grained-activation-offloading"


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [
        # Megatron-Core: these three of a dense model too
        ("megatron-lm", "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor 1.0"),
        ("megatron-lm", "--moe-router-padding-for-quantization", "--fp8-format hybrid"),
        ("megatron-lm", "--moe-router-padding-for-quantization", "--fp4-format e2m1"),
        ("megatron-lm", "--fp4-param-gather", "--fp4-format e2m1"),
        ("ms-swift", "--moe_router_group_topk 1", "--moe_router_num_groups 2"),
        ("ms-swift", "--moe_router_group_topk 1", "--model deepseek-ai/DeepSeek-V3"),  # which has groups itself
        ("megatron-lm", _OFFLOAD, "--offload-modules core_attn"),
        ("megatron-lm", "--fp8-param-gather --use-distributed-optimizer", "--fp8-format hybrid"),
        ("ms-swift", "--fp8_param_gather true", "--fp8_format hybrid"),
        ("megatron-lm", "--defer-embedding-wgrad-compute", "--pipeline-model-parallel-size 2"),
        # Megatron-LM's own
        ("megatron-lm", "--deterministic-mode --cross-entropy-loss-fusion", None),
        ("megatron-lm", "--load-main-params-from-ckpt", "--no-load-optim"),
        (
            "megatron-lm",
            "--cp-comm-type a2a+p2p --context-parallel-size 4",
            "--hierarchical-context-parallel-sizes 2 2",
        ),
        ("megatron-lm", "--use-torch-fsdp2 --pipeline-model-parallel-size 2", None),
        ("megatron-lm", "--train-iters 10 --lr-decay-samples 10", None),
        # ms-swift's own
        ("ms-swift", "--group_by_length true", "--padding_free false"),
        ("ms-swift", "--tp_comm_overlap true", "--tensor_model_parallel_size 2 --sequence_parallel true"),
        ("ms-swift", "--mtp_shared_weights true", "--mtp_num_layers 1"),
        ("ms-swift", "--muon_lr 0.1", "--optimizer muon"),
        ("ms-swift", "--recompute_method uniform", "--recompute_granularity full --recompute_num_layers 1"),
        ("megatron-lm", "--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size 2"),
    ],
)
def test_an_option_that_needs_another_one(tmp_path: Path, name: str, refused: str, accepted: str | None) -> None:
    """By each framework's own validation of 450 and more random settings (core 0.16.1 and 0.19.2, ms-swift 4.6.0)."""
    start, _ = _NAMED[name]
    option = refused.partition(" ")[0].lstrip("-").replace("-", "_")
    assert f"the job has {option}" in str(read(tmp_path, refused, start).cannot_start)
    if accepted is not None:
        assert "the job has" not in str(read(tmp_path, f"{refused} {accepted}", start).cannot_start)


@pytest.mark.parametrize(
    ("model", "flag", "is_refused"),
    [
        ("Qwen/Qwen3-8B", "--apply_wd_to_qk_layernorm true", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "--apply_wd_to_qk_layernorm true", False),
        ("Qwen/Qwen3-8B", "--apply_wd_to_qk_layernorm false", False),
        ("Qwen/Qwen3-8B", "--tuner_type lora_llm", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "--tuner_type lora_llm", False),
    ],
)
def test_what_ms_swift_has_for_some_models_only(tmp_path: Path, model: str, flag: str, is_refused: bool) -> None:
    start, _ = _NAMED["ms-swift"]
    assert (read(tmp_path, f"--model {model} {flag}", start).cannot_start is not None) == is_refused


def test_a_router_chooses_no_groups_of_which_only_the_number_is_given(tmp_path: Path) -> None:
    """``TransformerConfig`` (0.16.1 and 0.19.2) looks at the number where ``moe_router_group_topk`` is given."""
    start, _ = _NAMED["megatron-lm"]
    experts = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
    one, both = (
        read(tmp_path, f"{_POSITIONS} {experts} --moe-router-num-groups 3{more}", start)
        for more in ("", " --moe-router-group-topk 2")
    )
    assert one.scenario is not None
    assert "must divide the 8 experts" in str(both.not_supported)


_TORCH_FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"


@pytest.mark.parametrize("flag", ["--use-megatron-fsdp --ckpt-format fsdp_dtensor", _TORCH_FSDP2])
@pytest.mark.parametrize(
    ("before", "is_refused"),
    [("", False), ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", True), ("export CUDA_DEVICE_MAX_CONNECTIONS=8\n", False)],
)
def test_megatron_lm_s_fsdp_needs_several_connections(flag: str, before: str, is_refused: bool, tmp_path: Path) -> None:
    """``validate_args`` asserts it for both (core 0.12 to 0.19)."""
    start = before + "torchrun --nproc-per-node 8 pretrain_gpt.py " + _GPT
    job = read(tmp_path, f"{flag} --untie-embeddings-and-output-weights", start)
    assert ("with CUDA_DEVICE_MAX_CONNECTIONS 1 in its environment" in str(job.cannot_start)) is is_refused
    other = read(tmp_path, "", start)
    assert other.cannot_start is None


@pytest.mark.parametrize(
    "before", ["[ -f x ] && export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "export CUDA_DEVICE_MAX_CONNECTIONS=$(nproc)\n"]
)
def test_fsdp_is_warned_of_a_number_of_connections_that_is_not_known(before: str, tmp_path: Path) -> None:
    start = before + "torchrun --nproc-per-node 8 pretrain_gpt.py " + _GPT
    said = "does not start with CUDA_DEVICE_MAX_CONNECTIONS 1, which it may set"
    for flags, is_warned in (("--use-megatron-fsdp --ckpt-format fsdp_dtensor", True), ("", False)):
        job = read(tmp_path, flags, start)
        assert job.cannot_start is None
        assert any(said in text for text in job.warnings) is is_warned


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--use-megatron-fsdp", "use_megatron_fsdp with checkpoints in another format than fsdp_dtensor"),
        ("--use-megatron-fsdp --ckpt-format torch_dist", "in another format than fsdp_dtensor"),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", None),
        ("--use-custom-fsdp", None),
        ("--ckpt-format fsdp_dtensor", "ckpt_format fsdp_dtensor without use_megatron_fsdp"),
        ("--ckpt-format torch_dcp", "ckpt_format torch_dcp without use_torch_fsdp2"),
        ("--use-torch-fsdp2", "use_torch_fsdp2 with fused accumulation of gradients"),
        (f"{_TORCH_FSDP2} --ckpt-format torch_dcp", None),
        (f"{_TORCH_FSDP2} --ckpt-format torch", "in another format than torch_dist or torch_dcp"),
        (
            f"{_TORCH_FSDP2} --swiglu --num-experts 8 --expert-model-parallel-size 2",
            "expert_model_parallel_size above 1",
        ),
    ],
)
def test_what_megatron_lm_s_fsdp_needs_beside_it(flags: str, cause: str | None, tmp_path: Path) -> None:
    """``validate_args`` of core 0.16.1 was run with these flags."""
    start = "torchrun --nproc-per-node 8 pretrain_gpt.py --untie-embeddings-and-output-weights " + _GPT
    job = read(tmp_path, flags, start)
    assert job.cannot_start is None if cause is None else cause in str(job.cannot_start)
    if flags == _TORCH_FSDP2:
        tied = read(tmp_path, flags, start.replace("--untie-embeddings-and-output-weights", ""))
        assert "use_torch_fsdp2 with shared embeddings" in str(tied.cannot_start)


_SECTIONS = {
    "language_model": {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "add_bias_linear": False},
    "model_parallel": {"bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
} | {
    "seq_length": 128,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "before", "refused"),
    [
        ({"seq_length": 128}, "", None),
        ({"train_iters": 5, "train_samples": 5}, "", "train_iters with train_samples"),
        ({"train_iters": 5, "lr_warmup_samples": 0}, "", None),
        ({"encoder_seq_length": 128}, "", "seq_length with encoder_seq_length"),
        ({"save": "x"}, "", "save without save_interval"),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "model_parallel.pipeline_model_parallel_size": 2},
            *("", "fewer than three pipeline stages"),
        ),
        ({"overlap_param_gather": True}, "", "overlap_param_gather without use_distributed_optimizer"),
        ({"seq_length": 128}, "CUDA_DEVICE_MAX_CONNECTIONS=8 ", "sequence_parallel with another number than 1"),
        # Rules of ``validate_args`` alone.
        ({"model_parallel.use_ring_exchange_p2p": False, "batch_size": 8}, "", None),
        ({"no_position_embedding": True}, "", None),
        ({"load_main_params_from_ckpt": True}, "", None),
    ],
)
def test_a_file_in_place_of_flags_has_rules_of_its_own(
    changes: dict[str, Any], before: str, refused: str | None, tmp_path: Path
) -> None:
    """``validate_yaml`` in megatron/training/yaml_arguments.py (core 0.16.1) takes the place of ``validate_args``."""
    tree: dict[str, Any] = {name: dict(one) if isinstance(one, dict) else one for name, one in _SECTIONS.items()}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    (tmp_path / "gpt.yaml").write_text(yaml.safe_dump(tree))
    job = read(tmp_path, "", f"{before}torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg gpt.yaml")
    assert (refused or "None") in str(job.cannot_start)


def test_ms_swift_sets_the_connections_that_megatron_fsdp_refuses(tmp_path: Path) -> None:
    start, _ = _NAMED["ms-swift"]
    for connections, is_refused in (("", True), ("CUDA_DEVICE_MAX_CONNECTIONS=32 ", False)):
        job = read(tmp_path, "--use_megatron_fsdp true", connections + start)
        assert any("CUDA_DEVICE_MAX_CONNECTIONS" in text for text in job.warnings) == is_refused


@pytest.mark.parametrize(
    ("refused", "accepted"),
    [
        ("", "--max-position-embeddings 4096"),
        (f"{_POSITIONS} {_OFFLOAD} --offload-modules core_attn", f"{_POSITIONS} --recompute-granularity selective"),
        ("", "--max-position-embeddings $POSITIONS"),
        (f"{_POSITIONS} {_SELECTIVE} moe_act", f"{_POSITIONS} {_SELECTIVE} moe_act --moe-grouped-gemm"),
    ],
)
def test_what_megatron_lm_refuses_and_memlab_predicts_is_named(tmp_path: Path, refused: str, accepted: str) -> None:
    assert any("refuses" in text for text in read(tmp_path, refused).warnings)
    assert not any("refuses" in text for text in read(tmp_path, accepted).warnings)


def test_verl_has_no_sequence_parallelism_on_one_rank(tmp_path: Path) -> None:
    start, _ = _NAMED["verl"]
    section = "actor_rollout_ref.actor.megatron"
    keys = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
    keys = (*keys, "distribute_saved_activations=True")
    flags = " ".join(["trainer.n_gpus_per_node=8", *(f"{section}.override_transformer_config.{key}" for key in keys)])
    assert read(tmp_path, flags, start).cannot_start is None
    split = f"{flags} {section}.tensor_model_parallel_size=2"
    assert "with sequence parallelism" in str(read(tmp_path, split, start).cannot_start)


_BRIDGE = """model: {num_layers: 4, hidden_size: 1024, num_attention_heads: 16, ffn_hidden_size: 4096, vocab_size: 32000,
  seq_length: 4096, bf16: true, params_dtype: torch.bfloat16}
ddp: {grad_reduce_in_fp32: true}
"""
_EXPERTS = "num_moe_experts: 8, moe_router_topk: 2"


@pytest.mark.parametrize(
    ("keys", "refusal", "named"),
    [
        ("cuda_graph_impl: local", "cuda_graph_impl local", []),
        (f"cuda_graph_impl: local, cuda_graph_scope: [full_iteration], {_EXPERTS}", None, ["cuda_graph_impl"]),
        ("vision_cuda_graph_impl: local", None, ["vision_cuda_graph_impl"]),
        ("cuda_graph_impl: transformer_engine", None, []),
        ("deterministic_mode: true", "deterministic_mode with cross_entropy_loss_fusion", []),
        ("hierarchical_context_parallel_sizes: [2, 2]", "another product than context_parallel_size", []),
        # fields of Megatron-Core's main of August 2026
        ("enable_mhc_connections: false, mhc_num_residual_streams: 4, gdp_num_householder: 3, mscale: 1.0", None, []),
        ("moe_use_grouped_tensor: true, mtp_hsm: true, logit_dtype: torch.float32", None, ["mtp_hsm", "logit_dtype"]),
    ],
)
def test_options_of_megatron_bridge(tmp_path: Path, keys: str, refusal: str | None, named: list[str]) -> None:
    model = _BRIDGE.replace("model: {", f"model: {{{keys}, ")
    job = read_job(f"{model}train: {{micro_batch_size: 1, global_batch_size: 8}}\n", tmp_path, "run.yaml")
    assert (refusal or "None") in str(job.cannot_start)
    if refusal is None:
        assert [one.key.removeprefix("model.") for one in job.not_modelled if one.place != "default"] == named


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"dist.use_decentralized_pg": True}, "dist.use_decentralized_pg with Gloo's process groups"),
        ({"dist.use_decentralized_pg": True, "dist.use_gloo_process_groups": False}, None),
        ({"ddp.use_megatron_fsdp": True, "checkpoint.save": "/c"}, "use_megatron_fsdp with checkpoints in another"),
        ({"ddp.use_megatron_fsdp": True, "checkpoint.save": "/c", "checkpoint.ckpt_format": "fsdp_dtensor"}, None),
        ({"ddp.use_megatron_fsdp": True}, None),
        (
            {"ddp.use_megatron_fsdp": True, "env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 1},
            "with CUDA_DEVICE_MAX_CONNECTIONS 1 in its environment",
        ),
        ({"ddp.use_megatron_fsdp": True, "env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 32}, None),
        (
            {"optimizer.use_precision_aware_optimizer": True, "optimizer.optimizer": "sgd"},
            "another optimizer than adam",
        ),
        ({"optimizer.use_precision_aware_optimizer": True, "optimizer.optimizer": "adam"}, None),
        (
            {"optimizer.use_precision_aware_optimizer": True, "optimizer.use_distributed_optimizer": False},
            "optimizer.use_distributed_optimizer false",
        ),
        (
            {
                "model.fine_grained_activation_offloading": True,
                "model.offload_modules": ["core_attn"],
                "model.cpu_offloading": True,
            },
            "fine_grained_activation_offloading with cpu_offloading",
        ),
        ({"model.delay_wgrad_compute": True}, "delay_wgrad_compute without overlap_moe_expert_parallel_comm"),
        ({"model.delay_wgrad_compute": True, "comm_overlap.tp_comm_overlap": False}, None),
        ({"model.defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute without pipeline stages"),
        ({"model.defer_embedding_wgrad_compute": True, "comm_overlap.tp_comm_overlap": False}, None),
    ],
)
def test_rules_of_megatron_bridge_s_configuration(tmp_path: Path, changes: dict[str, Any], refusal: str | None) -> None:
    """As ``runtime_config_update`` of megatron-bridge 0.6.2 over megatron-core 0.19.2 accepts or refuses them."""
    tree = yaml.safe_load(f"{_BRIDGE}train: {{micro_batch_size: 1, global_batch_size: 8}}\n")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    assert (refusal or "None") in str(read_job(yaml.safe_dump(tree), tmp_path, "run.yaml").cannot_start)


def test_megatron_bridge_wants_weights_to_stay_where_activations_are_offloaded(tmp_path: Path) -> None:
    keys = "fine_grained_activation_offloading: true, offload_modules: [core_attn], "
    text = _BRIDGE.replace("model: {", f"model: {{{keys}") + "train: {micro_batch_size: 1, global_batch_size: 8}\n"
    for variable, is_said in (("", True), ("env_vars: {NVTE_CPU_OFFLOAD_V1: 1}\n", False)):
        (tmp_path / "run.yaml").write_text(text + variable)
        said = [one for one in Job.read(tmp_path / "run.yaml").warnings if "NVTE_CPU_OFFLOAD_V1" in one]
        assert bool(said) is is_said


@pytest.mark.parametrize(
    ("recipe", "is_refused"),
    [("bf16_mixed", True), ("bf16-with-nvfp4-mixed", False), ("my_own_mixed", False), ("bf16_with_mxfp8_mixed", False)],
)
def test_a_named_recipe_may_be_the_type_that_padding_needs(tmp_path: Path, recipe: str, *, is_refused: bool) -> None:
    model = _BRIDGE.replace("model: {", f"model: {{moe_router_padding_for_quantization: true, {_EXPERTS}, ")
    (tmp_path / "run.yaml").write_text(
        f"{model}train: {{micro_batch_size: 1, global_batch_size: 8}}\nmixed_precision: {recipe}\n"
    )
    assert (Job.read(tmp_path / "run.yaml").cannot_start is not None) == is_refused


@pytest.mark.parametrize(
    ("train", "missing_keys"),
    [
        ("train_iters: 4", ["train.micro_batch_size", "train.global_batch_size"]),
        ("micro_batch_size: null, global_batch_size: 8", ["train.micro_batch_size"]),
        ("micro_batch_size: 1", ["train.global_batch_size"]),
        ("micro_batch_size: 1, global_batch_size: 8", []),
    ],
)
def test_sizes_without_which_megatron_bridge_refuses_a_job(tmp_path: Path, train: str, missing_keys: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(f"{_BRIDGE}train: {{{train}}}\n")
    said = [text.partition(" ")[0] for text in Job.read(tmp_path / "run.yaml").warnings if "Bridge refuses" in text]
    assert said == missing_keys


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--seq-length 8192 --max-position-embeddings 4096", "max_position_embeddings is 4096, must be at least"),
        ("--seq-length 4096 --max-position-embeddings 4096", None),
        (
            "--mtp-num-layers 1 --position-embedding-type learned_absolute --max-position-embeddings 4096",
            "choose rope or none",
        ),
        ("--mtp-num-layers 1", None),
    ],
)
def test_positions_that_the_arguments_of_megatron_lm_refuse(tmp_path: Path, flags: str, refusal: str | None) -> None:
    """``validate_args`` asserts it, with rotary positions too."""
    found = read(tmp_path, flags).cannot_start
    assert refusal in str(found) if refusal else found is None


@pytest.mark.parametrize("flag", ["seq_length", "micro_batch_size"])
def test_a_size_without_a_default_is_not_taken_in_silence(tmp_path: Path, flag: str) -> None:
    """Megatron-LM asserts that both are given; a part of a script may lack them."""
    start = "torchrun --nproc-per-node 8 pretrain_gpt.py " + SIZES
    given = f"--{flag.replace('_', '-')}"
    words = re.sub(rf"{given} \S+", "", start)
    assert words != start
    job = read(tmp_path, "", words)
    assert any(line.startswith(f"{flag} is not in the file, and Megatron-LM has no default") for line in job.warnings)
    assert job.guesses
    assert not [line for line in read(tmp_path, "", start).warnings if "no default" in line]
