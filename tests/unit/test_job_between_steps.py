"""What jobs of reinforcement learning have on the device between steps, in which allocator, and how long sequences get.

Files are those of August 2026, where no other version is named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.bounds import is_of_inference_engine
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.job import Job
from memlab.lab.job_phases import predict_phases
from memlab.units import GIB, MIB
from memlab.views.text.job_phases import phases_table
from tests.unit.job_files import read_job

NEMO = """policy:
  model_name: {model}
  megatron_cfg: {{enabled: true, defer_fp32_logits: true, tensor_model_parallel_size: 2}}
  max_total_sequence_length: 512
  train_micro_batch_size: 1
  train_global_batch_size: 8
  generation:
    backend: {backend}
    colocated: {{enabled: {colocated}, resources: {{num_nodes: 1, gpus_per_node: 8}}}}
cluster: {{gpus_per_node: 8, num_nodes: 2}}
grpo: {{num_prompts_per_step: 8}}
"""
VERL = (
    "python -m verl.trainer.main_ppo {chosen} actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
    "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=True "
)
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B "
    "trainer.placement.policy_num_gpus_per_node=8 "
)
SLIME = "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /root/Qwen3-30B-A3B "
SWIFT = "NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-8B --max_length 2048 --max_completion_length 1024 "


def verl(folder: Path, overrides: str = "", chosen: str = "model_engine=megatron") -> Job:
    return read_job(VERL.format(chosen=chosen) + overrides, folder)


def nemo(
    folder: Path, *overrides: str, model: str = "Qwen/Qwen3-8B", backend: str = "megatron", colocated: bool = True
) -> Job:
    text = NEMO.format(model=model, backend=backend, colocated=str(colocated).lower())
    return read_job(text, folder, "job.yaml", overrides=overrides)


def effects(job: Job) -> dict[str, NotModelled]:
    return {one.key: one for one in job.not_modelled}


@pytest.mark.parametrize(
    ("backend", "colocated", "overrides", "offloaded"),
    [
        ("megatron", False, [], (False, True, True)),
        ("megatron", False, ["policy.offload_optimizer_for_refit=false"], (False, True, False)),
        ("megatron", False, ["policy.megatron_cfg.optimizer.optimizer_cpu_offload=true"], (False, True, False)),
        ("vllm", False, [], (False, False, False)),
        ("megatron", True, [], (True, True, True)),
        ("vllm", True, [], (True, True, True)),
    ],
)
def test_what_nemo_rl_takes_off_the_device_before_a_weight_sync(
    backend: str, colocated: bool, overrides: list[str], offloaded: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    """``offload_before_refit`` of megatron_weight_synchronizer.py; collective_weight_synchronizer.py has none."""
    job = nemo(tmp_path, *overrides, backend=backend, colocated=colocated)
    _, settings = job.required()
    assert job.rollout is not None
    assert job.rollout.bucket_bytes == (0 if backend == "megatron" else None)
    found = (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer)
    assert found == offloaded


def test_an_engine_of_megatron_with_weights_of_its_own_pauses_them_while_the_model_trains() -> None:
    """NeMo-RL's ``_offload_inference_model`` leaves the buffer, and ``swap_model_weights`` needs no bucket."""
    rollout = Rollout(is_colocated=True, ranks_per_node=1, seq_length=32, engine_bytes=GIB, engine_sleeps=False)
    rollout = replace(rollout, bucket_share=0.3)
    job = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    weights = 2 * rollout.num_weights_of_engine(job)
    found = predict_phases(job, MemorySettings(offload_parameters=True), rollout, 80 * GIB)
    assert [phase.engine_bytes for phase in found.phases] == [weights + GIB, GIB, GIB, weights + GIB]
    assert found.gathered_bytes == 0


@pytest.mark.parametrize("key", ["policy.generation.vllm_cfg.precision=fp8", "policy.generation.real_quant=true"])
def test_an_engine_on_other_gpus_is_no_matter_of_the_training(key: str, tmp_path: Path) -> None:
    name = key.partition("=")[0]
    assert effects(nemo(tmp_path, key, backend="vllm"))[name].effect == "less"
    job = nemo(tmp_path, key, backend="vllm", colocated=False)
    assert name not in effects(job)
    assert "other GPUs" in job.without_effect[name]


def test_the_graphs_of_an_engine_on_other_gpus_are_not_added(tmp_path: Path) -> None:
    assert effects(nemo(tmp_path))["policy.generation.backend"].effect == "more"
    assert "policy.generation.backend" not in effects(nemo(tmp_path, colocated=False))


def test_the_training_keeps_the_experts_that_an_engine_on_other_gpus_chose(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert effects(verl(tmp_path, f"{key}=True actor_rollout_ref.hybrid_engine=False"))[key].effect == "more"


FREEZE = "policy.megatron_cfg.freeze_config.freeze_"


@pytest.mark.parametrize(
    ("part", "is_counted"),
    [("language_model", True), ("vision_model", False), ("vision_projection", False), ("sound_encoder", False)],
)
def test_frozen_parts_of_nemo_rl_s_models_have_no_gradients(part: str, is_counted: bool, tmp_path: Path) -> None:
    """``apply_freeze`` in nemo_rl/models/megatron/setup.py runs before Megatron makes the gradients' buffers."""
    nemo(tmp_path, model="Qwen/Qwen3-VL-8B-Instruct")
    job = Job.read(tmp_path / "job.yaml", overrides=[f"{FREEZE}{part}=true"], architecture="qwen3-8b")
    scenario, _ = job.required()
    found = effects(job)[FREEZE + part]
    # Each of 2 tensor parallel ranks has half: 2 bytes of gradient per parameter, and 10 of state over 8 copies
    # (moments of 4 bytes, and the 2 bytes that the main parameters have beyond bf16).
    expected = (2 + 10 / 8) * scenario.architecture.num_parameters / 2 if is_counted else 0
    assert found.effect == "less"
    assert found.bound_bytes == pytest.approx(expected, rel=0.001)


def test_models_of_text_alone_have_no_part_to_freeze(tmp_path: Path) -> None:
    job = nemo(tmp_path, f"{FREEZE}language_model=true")
    assert f"{FREEZE}language_model" not in effects(job)
    assert "only multimodal models" in job.without_effect[f"{FREEZE}language_model"]


@pytest.mark.parametrize("key", ["model.freeze_vision_model", "model.freeze_language_model"])
def test_frozen_parts_of_megatron_bridge_s_models_are_named(key: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "model: {hf_model_id: Qwen/Qwen3-8B, seq_length: 512}\ntrain: {global_batch_size: 8}\n"
    )
    job = Job.read(tmp_path / "job.yaml", overrides=[f"{key}=true"], format_name="bridge")
    assert effects(job)[key].effect == "less"


@pytest.mark.parametrize(
    ("overrides", "segments", "is_warned"),
    [
        ("", True, True),
        ("actor_rollout_ref.actor.megatron.param_offload=True", True, False),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", False, False),
        ("actor_rollout_ref.hybrid_engine=False", False, False),
    ],
)
def test_verl_switches_expandable_segments_on_after_each_weight_sync(
    overrides: str, segments: bool, is_warned: bool, tmp_path: Path
) -> None:
    """``update_weights`` in verl/workers/engine_workers.py, 0.9.1 and August 2026."""
    job = verl(tmp_path, overrides)
    assert job.required()[0].allocator.expandable_segments == segments
    assert any("after the model is built" in line for line in job.warnings) == is_warned


@pytest.mark.parametrize(("value", "segments"), [("1", True), ("0", False)])
def test_slime_switches_expandable_segments_on_by_its_own_variable(value: str, segments: bool, tmp_path: Path) -> None:
    """``set_allocator_expandable_segments`` in slime/utils/accelerator/torch_accelerator.py."""
    variable = f'{{"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "{value}"}}'
    sizes = "--seq-length 4096 --train-env-vars"
    assert read_job(f"{SLIME} {sizes} '{variable}'", tmp_path).required()[0].allocator.expandable_segments == segments
    exported = f"export SLIME_ENABLE_EXPANDABLE_SEGMENTS={value}\n{SLIME} --seq-length 4096"
    assert read_job(exported, tmp_path).required()[0].allocator.expandable_segments == segments


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_a_setting_made_by_code_drops_the_options_of_the_variable(framework: str, tmp_path: Path) -> None:
    """torch resets them each time (``parseArgs`` in c10/core/AllocatorConfig.cpp, 2.13)."""
    job = VERL.format(chosen="model_engine=megatron") if framework == "verl" else SKYRL
    read = read_job(f"export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256\n{job}", tmp_path)
    assert str(read.required()[0].allocator) == "expandable_segments:True"
    assert any("drops max_split_size_mb" in line for line in read.warnings)


@pytest.mark.parametrize(
    ("option", "effect"),
    [
        ("large_segment_size_mb:12", "either"),
        ("large_segment_size_mb:20", None),
        ("max_non_split_rounding_mb:40", "either"),
        ("per_process_memory_fraction:0.9", "more"),
        ("per_process_memory_fraction:1.0", None),
        ("expandable_segments_reserve:0.5", "more"),
        ("expandable_segments_reserve:1", None),
        ("expandable_segments_reserve:40G", "more"),
        ("expandable_segments_reserve_by_class:[serving:0.25,other:8G]", "more"),
        ("throw_on_cudamalloc_oom:True", None),
        ("graph_capture_record_stream_reuse:True", None),
        ("pinned_free_catch_all:True", None),
        ("backend:cudaMallocAsync", "either"),
        ("a_new_option:1", "unknown"),
    ],
)
def test_options_of_newer_allocators_are_known_or_named(option: str, effect: str | None, tmp_path: Path) -> None:
    """``parseArgs`` in c10/cuda/CUDAAllocatorConfig.cpp of torch 2.15 knows all of them except the last."""
    job = f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,{option}\n{SLIME} --seq-length 4096"
    read = read_job(job, tmp_path)
    assert read.required()[0].allocator.expandable_segments
    found = [one.effect for one in read.not_modelled if option.partition(":")[0] in one.key]
    assert found == [effect] * (effect is not None)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("--rlhf_type grpo", 3072),
        ("--rlhf_type grpo --vllm_max_model_len 2560", 2560),
        ("--rlhf_type grpo --vllm_max_model_len 8192", 3072),
        ("--rlhf_type grpo --max_turns 2", 3072),
        ("--rlhf_type grpo --multi_turn_scheduler tool --max_turns 3", 2048 + 3 * 1024),
        ("--rlhf_type gkd --multi_turn_scheduler tool --max_turns 3 --vllm_max_model_len 4096", 4096),
        ("--rlhf_type grpo --multi_turn_scheduler tool --vllm_max_model_len 6144", 6144),
        ("--rlhf_type grpo --vllm_mode server --vllm_max_model_len 2560", 3072),
    ],
)
def test_turns_of_ms_swift_make_sequences_longer(flags: str, tokens: int, tmp_path: Path) -> None:
    """Each turn has ``max_completion_length`` tokens, and the engine ends a sequence at its longest length."""
    assert read_job(SWIFT + flags, tmp_path).required()[0].seq_length == tokens


def test_turns_without_an_end_are_asked_for(tmp_path: Path) -> None:
    job = read_job(f"{SWIFT} --rlhf_type grpo --multi_turn_scheduler tool", tmp_path)
    assert "give --set max_turns=NUMBER" in str(job.not_supported)


def test_turns_of_slime_s_own_functions_are_named(tmp_path: Path) -> None:
    lengths = "--seq-length 4096 --rollout-max-prompt-len 1024 --rollout-max-response-len 1024"
    own = f"{SLIME} {lengths} --custom-generate-function-path my.generate"
    assert effects(read_job(own, tmp_path))["custom_generate_function_path"].effect == "more"
    limited = read_job(f"{own} --rollout-max-context-len 4096", tmp_path)
    assert "custom_generate_function_path" not in effects(limited)


@pytest.mark.parametrize(("experts", "refused"), [(64, True), (8, False), (1, False)])
def test_verl_spreads_experts_of_an_engine_over_all_of_its_ranks(experts: int, refused: bool, tmp_path: Path) -> None:
    """``RolloutConfig.__post_init__`` in verl/workers/config/rollout.py, 0.9.1."""
    rollout = "actor_rollout_ref.rollout"
    job = verl(tmp_path, f"{rollout}.tensor_model_parallel_size=8 {rollout}.expert_parallel_size={experts}")
    assert ("must be tensor_model_parallel_size x data_parallel_size (8 x 1)" in str(job.cannot_start)) == refused
    assert job.cannot_start is None or refused


@pytest.mark.parametrize(
    ("chosen", "stops"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", True),
        ("", True),
        ("model_engine=megatron", False),
        ("actor@actor_rollout_ref.actor=megatron_actor", False),
        ("--config-name=ppo_megatron_trainer", False),
    ],
)
def test_hydra_stops_at_keys_of_megatron_without_its_engine(chosen: str, stops: bool, tmp_path: Path) -> None:
    """Hydra 1.3: "Could not override", because dp_actor.yaml has no section of Megatron."""
    causes = verl(tmp_path, chosen=chosen).causes
    assert any("Hydra stops at actor_rollout_ref.actor.megatron." in cause for cause in causes) == stops


@pytest.mark.parametrize(
    ("flags", "sleeps"),
    [
        ("--colocate", True),
        ("--colocate --no-offload-rollout", False),
        ("--colocate --offload-rollout", True),
        ("--colocate --no-offload-rollout --offload", True),
        ("--colocate --no-offload-rollout --release-train", True),
    ],
)
def test_slime_s_engine_leaves_the_device_unless_it_is_told_to_stay(flags: str, sleeps: bool, tmp_path: Path) -> None:
    """``slime_validate_args`` in slime/utils/arguments.py."""
    rollout = read_job(f"{SLIME} --seq-length 4096 {flags}", tmp_path).rollout
    assert rollout is not None
    assert rollout.engine_sleeps == sleeps


@pytest.mark.parametrize(("value", "sleeps"), [("true", True), ("false", False)])
def test_nemo_rl_s_sglang_leaves_the_device_only_where_its_server_says_so(
    value: str, sleeps: bool, tmp_path: Path
) -> None:
    """``finish_generation`` in nemo_rl/models/generation/sglang/sglang_generation.py."""
    key = "policy.generation.sglang_cfg.sglang_server_config.needs_offload"
    rollout = nemo(tmp_path, f"{key}={value}", backend="sglang").rollout
    assert rollout is not None
    assert rollout.engine_sleeps == sleeps


@pytest.mark.parametrize(
    ("overrides", "freed"),
    [
        ([], ("gradients",)),
        (["async_rl.min_groups_for_streaming_train=8"], ("gradients",)),
        (["async_rl.min_groups_for_streaming_train=4"], ()),
    ],
)
def test_gradients_of_a_step_that_has_begun_stay_for_log_probabilities(
    overrides: list[str], freed: tuple[str, ...], tmp_path: Path
) -> None:
    """``keep_train_buffers=step_open`` in nemo_rl/algorithms/single_controller.py; a step has 8 prompts."""
    rollout = nemo(tmp_path, *overrides, backend="vllm", colocated=False).rollout
    assert rollout is not None
    assert rollout.freed_for_log_probabilities == freed


@pytest.mark.parametrize(
    ("overrides", "freed"),
    [
        ("", ("gradients", "optimizer state")),
        ("trainer.algorithm.use_kl_loss=false", ()),
        (
            "trainer.algorithm.use_kl_loss=false trainer.algorithm.use_kl_in_reward=true",
            ("gradients", "optimizer state"),
        ),
        ("trainer.placement.colocate_policy_ref=false", ()),
        ("trainer.placement.colocate_all=true", ()),
    ],
)
def test_a_reference_model_of_skyrl_takes_the_policy_s_place(
    overrides: str, freed: tuple[str, ...], tmp_path: Path
) -> None:
    """``_get_colocation_group`` in skyrl/backends/skyrl_train/workers/worker_dispatch.py, 0.3.0."""
    apart = "" if "colocate_all" in overrides else "trainer.placement.colocate_all=false "
    rollout = read_job(SKYRL + apart + overrides, tmp_path).rollout
    assert rollout is not None
    assert rollout.freed_for_log_probabilities == freed


def test_skyrl_offloads_the_optimizer_in_any_case_with_megatron(tmp_path: Path) -> None:
    """Only fsdp_strategy.py reads ``offload_after_step``; ``_prepare_for_weight_sync`` offloads the state (0.3.0)."""
    key = "trainer.policy.optimizer_config.offload_after_step"
    job = read_job(f"{SKYRL} {key}=false", tmp_path)
    assert job.required()[1].offload_optimizer
    assert key in job.without_effect


@pytest.mark.parametrize(
    ("flags", "offloaded"),
    [
        ("--offload_model true", (True, True, False)),
        ("--offload_optimizer true", (False, False, True)),
        ("--offload_model true --offload_optimizer true", (True, True, True)),
    ],
)
def test_ms_swift_frees_gradients_where_it_offloads_parameters(
    flags: str, offloaded: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    """``offload_megatron_model_to_cpu`` in swift/megatron/trainers/utils.py, 4.6.0."""
    _, settings = read_job(f"{SWIFT} --rlhf_type grpo {flags}", tmp_path).required()
    found = (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer)
    assert found == offloaded


@pytest.mark.parametrize(
    ("flags", "is_offloaded"),
    [
        ("--rlhf_type grpo --vllm_mode colocate", True),
        ("--rlhf_type grpo --vllm_mode server", False),
        ("--rlhf_type gkd --vllm_mode colocate", True),
        ("--rlhf_type gkd --vllm_mode server", False),
        ("--rlhf_type gkd --lmbda 0", False),
        ("--rlhf_type dpo", False),
    ],
)
def test_ms_swift_offloads_only_around_generation_on_the_same_gpus(
    flags: str, is_offloaded: bool, tmp_path: Path
) -> None:
    """``enable_offload`` in swift/megatron/trainers/rollout_mixin.py, 4.6.0."""
    job = read_job(f"{SWIFT} {flags} --offload_model true --offload_optimizer true", tmp_path)
    _, settings = job.required()
    found = {settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer}
    assert found == {is_offloaded}
    said = [line for line in job.warnings if "offload" in line and "has no effect" in line]
    assert len(said) == (0 if is_offloaded else 2)


UNDER_RAY = (
    "rlhf_type: grpo\nmodel: Qwen/Qwen3-8B\nmax_length: 2048\nmax_completion_length: 1024\n"
    "train: {gpus: 4, tensor_model_parallel_size: 2}\nrollout: {gpus: 4, vllm_tensor_parallel_size: 1}\n"
)


@pytest.mark.parametrize(
    ("lines", "kept", "from_host"),
    [
        ("colocate_groups: [[train, rollout]]\n", 2 * GIB, True),
        ("colocate_groups: [[train, rollout]]\nENV: {SWIFT_RAY_WEIGHT_BUCKET_MB: 512}\n", GIB // 2, True),
        ("", 6 * GIB, False),
    ],
)
def test_ms_swift_keeps_the_buffers_of_its_weight_sync_under_ray(
    lines: str, kept: int, from_host: bool, tmp_path: Path
) -> None:
    """``update_weights`` in swift/ray/megatron/rollout/adapter.py and ``prepare`` in checkpoint_engine/nccl.py."""
    rollout = read_job(lines + UNDER_RAY, tmp_path, "job.yaml", format_name="ms-swift").rollout
    assert rollout is not None
    assert (rollout.kept_buffer_bytes, rollout.syncs_from_host, rollout.bucket_bytes) == (kept, from_host, 0)


@pytest.mark.parametrize(("variable", "mib"), [("", 512), ("export SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE=64\n", 64)])
def test_ms_swift_sends_weights_to_a_server_in_buckets(variable: str, mib: int, tmp_path: Path) -> None:
    """``_load_weights_to_server_in_buckets`` in swift/megatron/trainers/rollout_mixin.py, 4.6.0."""
    rollouts = [read_job(f"{variable}{SWIFT} --rlhf_type grpo --vllm_mode {mode}", tmp_path).rollout
                for mode in ("server", "colocate")]  # fmt: skip
    found = [(one.bucket_bytes, one.bucket_copies, one.bucket_overflows) for one in rollouts if one is not None]
    assert found == [(mib * MIB, 2, True), (0, 1, False)]


def test_what_the_weight_sync_keeps_is_in_every_phase_and_its_copies_in_the_sync_alone() -> None:
    job = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    away = MemorySettings(offload_parameters=True)
    usual = Rollout(is_colocated=False, ranks_per_node=1, seq_length=32, bucket_bytes=GIB, has_reference_model=True)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"kept_buffer_bytes": 3 * GIB},
        {"bucket_copies": 2, "bucket_overflows": True},
        {"syncs_from_host": True},
        {"gathers_beside_bucket": True},
    )
    found = [predict_phases(job, away, replace(usual, **change)) for change in changes]
    bytes_of = [[phase.training_bytes for phase in one.phases] for one in found]
    more = [[after - before for before, after in zip(bytes_of[0], one, strict=True)] for one in bytes_of[1:]]
    model = job.architecture
    largest = 2 * model.hidden_size * max(model.vocab_size, 2 * model.ffn_hidden_size)  # 2 bytes per element
    assert more[:2] == [[3 * GIB] * 4, [0, 0, 0, GIB + 2 * largest]]
    # The weights and those of the reference model are on the host.
    assert more[2] == pytest.approx([0, 0, 0, -2 * found[0].reference_bytes], abs=512)
    assert more[3] == [0, 0, 0, largest]
    assert "keeps" in phases_table(found[1])


@pytest.mark.parametrize(
    ("lines", "offloaded", "tokens"),
    [
        ("colocate_groups: [[train, rollout]]\n", (True, True, False), 3072),
        ("colocate_groups: [[train, rollout]]\noffload_optimizer: true\n", (True, True, True), 3072),
        ("offload_optimizer: true\n", (True, True, True), 3072),
        ("", (False, False, False), 3072),
        ("vllm_max_model_len: 2560\n", (False, False, False), 2560),
    ],
)
def test_under_ray_ms_swift_offloads_for_any_engine_on_the_same_gpus(
    lines: str, offloaded: tuple[bool, bool, bool], tokens: int, tmp_path: Path
) -> None:
    """``_generation_context`` in swift/ray/megatron/base_trainer.py, 4.6.0."""
    job = read_job(lines + UNDER_RAY, tmp_path, "job.yaml", format_name="ms-swift")
    scenario, settings = job.required()
    found = (settings.offload_parameters, settings.offload_gradients, settings.offload_optimizer)
    assert (found, scenario.seq_length) == (offloaded, tokens)


_REFERENCE, _OWN = "actor_rollout_ref.ref.log_prob_", "actor_rollout_ref.rollout.log_prob_"
_COMPARES = "actor_rollout_ref.actor.use_kl_loss=True"
_DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"


@pytest.mark.parametrize(
    ("overrides", "tokens", "rows"),
    [
        (f"{_OWN}micro_batch_size_per_gpu=2 {_REFERENCE}micro_batch_size_per_gpu=8", 2048, 1),
        (f"{_OWN}micro_batch_size_per_gpu=2 {_REFERENCE}micro_batch_size_per_gpu=8 {_COMPARES}", 8192, 1),
        (f"{_OWN}micro_batch_size_per_gpu=8 {_REFERENCE}micro_batch_size_per_gpu=2 {_COMPARES}", 8192, 1),
        (f"{_DYNAMIC} {_REFERENCE}max_token_len_per_gpu=32768 {_COMPARES}", 32768, 1),
        (f"{_DYNAMIC} {_REFERENCE}use_dynamic_bsz=False {_REFERENCE}micro_batch_size_per_gpu=32 {_COMPARES}", 32768, 1),
        (f"{_DYNAMIC} {_REFERENCE}max_token_len_per_gpu=8192 {_COMPARES}", 16384, 1),
    ],
)
def test_passes_of_verl_s_reference_model_have_sizes_of_their_own(
    overrides: str, tokens: int, rows: int, tmp_path: Path
) -> None:
    """``log_prob_*`` of ``ref/ref.yaml`` and ``rollout/rollout.yaml``, 0.9.1; without padding, a pass is one row."""
    rollout = verl(tmp_path, overrides).rollout
    assert rollout is not None
    assert (rollout.seq_length, rollout.micro_batch_size) == (tokens, rows)


def test_verl_refuses_budgets_for_some_of_its_passes(tmp_path: Path) -> None:
    """``assert self.config.actor.use_dynamic_bsz == ...`` in verl/workers/engine_workers.py, 0.9.1."""
    job = verl(tmp_path, f"{_OWN}use_dynamic_bsz=True")
    assert "set both to the same" in str(job.cannot_start)
    assert verl(tmp_path, f"{_OWN}use_dynamic_bsz=True {_DYNAMIC}").cannot_start is None


def test_the_model_s_key_decides_whether_verl_pads_rows(tmp_path: Path) -> None:
    """``TrainingWorker`` in verl/workers/engine_workers.py, 0.9.1, sets the engine's key from the model's."""
    of_model, of_engine = (f"actor_rollout_ref.{part}.use_remove_padding" for part in ("model", "actor.megatron"))
    job = verl(tmp_path, f"{of_model}=False {of_engine}=False")
    assert effects(job)[of_model].effect == "more"
    assert of_engine not in effects(job)


@pytest.mark.parametrize(("offloaded", "reason"), [("true", "in its own pass alone"), ("false", "on the same ranks")])
def test_a_teacher_of_ms_swift_may_leave_the_device(offloaded: str, reason: str, tmp_path: Path) -> None:
    flags = f"--rlhf_type grpo --teacher_model Qwen/Qwen3-32B --offload_teacher_model {offloaded}"
    found = effects(read_job(SWIFT + flags, tmp_path))["teacher_model"]
    assert (found.effect, found.reason.endswith(reason)) == ("more", True)
    assert "teacher_model" not in read_job(f"{SWIFT} --rlhf_type grpo", tmp_path).without_effect


@pytest.mark.parametrize("strategy", ["deepspeed", "megatron"])
def test_a_job_of_another_engine_stays_named_with_another_architecture(strategy: str, tmp_path: Path) -> None:
    job = read_job(SKYRL.replace("strategy=megatron", f"strategy={strategy}"), tmp_path, architecture="qwen3-8b")
    assert (job.scenario is None) == (strategy == "deepspeed")
    assert job.scenario is not None or "trainer.strategy deepspeed" in str(job.not_supported)


def test_a_draft_model_of_an_engine_on_other_gpus_is_no_matter_of_the_training(tmp_path: Path) -> None:
    key = "actor_rollout_ref.model.mtp.enable_rollout"
    assert effects(verl(tmp_path, f"{key}=True"))[key].effect == "more"
    assert key not in effects(verl(tmp_path, f"{key}=True actor_rollout_ref.hybrid_engine=False"))


@pytest.mark.parametrize(
    ("is_packed", "overrides", "bound_bytes"),
    [
        ("false", [], None),
        ("false", ["policy.megatron_cfg.attention_backend=unfused"], 512**2 * (1 + 8)),
        ("false", ["policy.megatron_cfg.attention_backend=local"], 512**2 * (1 + 8)),
        ("false", ["policy.precision=float32"], 512**2 * (1 + 8)),
        ("false", ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=512"],
         512**2 * (1 + 8)),
        ("true", ["policy.sequence_packing.train_mb_tokens=512"], None),
    ],
)  # fmt: skip
def test_rows_that_nemo_rl_does_not_pack_have_a_causal_mask(
    is_packed: str, overrides: list[str], bound_bytes: int | None, tmp_path: Path
) -> None:
    """``process_microbatch`` in nemo_rl/models/megatron/data.py: 1 byte per pair of tokens, made of 2 x 4 bytes.

    It is a bound where the data decide how long a row is, and where attention makes other masks of it.
    """
    key = "policy.sequence_packing.enabled"
    job = nemo(tmp_path, f"{key}={is_packed}", *overrides)
    found = effects(job).get(key)
    assert (None if found is None else found.bound_bytes) == bound_bytes
    assert job.required()[0].state.create_attention_mask == (is_packed == "false" and found is None)


def test_slime_s_state_is_back_for_log_probabilities_and_away_at_the_weight_sync() -> None:
    """``wake_up`` and ``update_weights`` in slime/backends/megatron_utils/actor.py."""
    job = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    away = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
    usual = Rollout(is_colocated=True, ranks_per_node=1, seq_length=32, bucket_bytes=GIB)
    of_slime = replace(usual, offloads_for_generation_only=True, syncs_from_host=True)
    bytes_of = [
        {phase.name: phase.training_bytes for phase in predict_phases(job, away, rollout).phases}
        for rollout in (usual, of_slime)
    ]
    more, less = (bytes_of[1][name] - bytes_of[0][name] for name in ("log-probabilities", "weight sync"))
    # Gradients of 4 bytes and a state of 12 beside each weight of 2.
    assert less < 0
    assert more == pytest.approx(8 * -less, rel=0.001)
    assert bytes_of[1]["weight sync"] == bytes_of[1]["generation"] + GIB


@pytest.mark.parametrize(
    ("flags", "from_host"),
    [
        ("--colocate", True),
        ("--colocate --no-offload-train", False),
        ("", False),
        ("--offload-train", True),
        ("--advantage-estimator ppo", False),
        ("--colocate --advantage-estimator ppo", True),
    ],
)
def test_where_slime_s_weight_sync_reads_the_weights(flags: str, from_host: bool, tmp_path: Path) -> None:
    rollout = read_job(f"{SLIME} --seq-length 4096 {flags}", tmp_path).rollout
    assert rollout is not None
    assert (rollout.offloads_for_generation_only, rollout.syncs_from_host) == (True, from_host)


@pytest.mark.parametrize(
    ("overrides", "freed"),
    [
        ([], ()),
        (["policy.offload_optimizer_for_logprob=true"], ()),
        (
            ["policy.offload_optimizer_for_logprob=true", "policy.offload_optimizer_for_refit=false"],
            ("optimizer state",),
        ),
    ],
)
def test_an_optimizer_that_stays_for_generation_may_leave_for_log_probabilities(
    overrides: list[str], freed: tuple[str, ...], tmp_path: Path
) -> None:
    """``prepare_for_lp_inference`` in nemo_rl/models/policy/workers/megatron_policy_worker.py."""
    rollout = nemo(tmp_path, *overrides, backend="vllm").rollout
    assert rollout is not None
    assert rollout.freed_for_log_probabilities == freed


@pytest.mark.parametrize(("groups", "is_beside"), [("[train, rollout, teacher]", True), ("[train, rollout]", False)])
def test_a_teacher_s_engine_of_ms_swift_may_have_the_training_s_gpus(
    groups: str, is_beside: bool, tmp_path: Path
) -> None:
    """``colocate_groups`` in swift/ray/megatron/driver_utils.py, 4.6.0."""
    (tmp_path / "job.yaml").write_text(
        f"rlhf_type: gkd\nmodel: Qwen/Qwen3-8B\nmax_length: 2048\ncolocate_groups: [{groups}]\n"
        "train: {gpus: 4}\nrollout: {gpus: 4}\nteacher: {gpus: 4, model: Qwen/Qwen3-32B}\n"
    )
    job = Job.read(tmp_path / "job.yaml", format_name="ms-swift")
    assert ("colocate_groups" in effects(job)) == is_beside
    assert job.rollout is not None
    assert job.rollout.is_colocated


_CHECKPOINTS_OF_ENGINES = [
    ("slime", "Qwen/Qwen3-4B-FP8", "sglang_quantization"),
    ("ms-swift", "Qwen/Qwen3-8B-AWQ", "vllm_engine_kwargs"),
    ("skyrl", "/models/Qwen3-8B-GPTQ-Int4", "generator.inference_engine.engine_init_kwargs.quantization"),
    ("verl", "Qwen/Qwen3-30B-A3B-FP8", "actor_rollout_ref.rollout.quantization"),
    ("nemo-rl", "nvidia/Qwen3-8B-NVFP4", "policy.generation.vllm_kwargs.quantization"),
]


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize(("framework", "model", "key"), _CHECKPOINTS_OF_ENGINES)
def test_an_engine_has_the_quantized_weights_of_its_checkpoint(
    framework: str, model: str, key: str, is_quantized: bool, tmp_path: Path
) -> None:
    """Engines read how weights are quantized from the checkpoint's config.json, of which only the name is here."""
    name = model if is_quantized else "Qwen/Qwen3-8B"
    texts = {
        "slime": f"{SLIME} --seq-length 4096 --colocate --hf-checkpoint {name}",
        "ms-swift": f"{SWIFT} --rlhf_type grpo --model {name}",
        "skyrl": f"{SKYRL} trainer.policy.model.path={name}",
    }
    if framework == "verl":
        job = verl(tmp_path, f"actor_rollout_ref.model.path={name}")
    elif framework == "nemo-rl":
        job = nemo(tmp_path, f"policy.model_name={name}", backend="vllm", colocated=True)
    else:
        job = read_job(texts[framework], tmp_path)
    found = effects(job)
    assert (key in found) == is_quantized
    if is_quantized:
        assert (found[key].effect, model in found[key].reason) == ("less", True)


@pytest.mark.parametrize(
    ("overrides", "is_named"),
    [
        (["policy.generation.top_p=0.9"], True),
        (["policy.generation.top_k=50"], True),
        (["policy.generation.top_p=1.0", "policy.generation.top_k=null"], False),
        (["policy.generation.top_k=-1"], False),
        (["policy.generation.top_p=0.9", "distillation.max_num_steps=1"], False),
    ],
)
@pytest.mark.parametrize("colocated", [True, False])
def test_nemo_rl_s_loss_filters_the_logits_as_its_engine_does(
    overrides: list[str], is_named: bool, colocated: bool, tmp_path: Path
) -> None:
    """``TrainingSamplingParams`` in nemo_rl/models/megatron/setup.py, wherever the engine is (August 2026)."""
    job = nemo(tmp_path, *overrides, backend="vllm", colocated=colocated)
    found = [one for one in job.not_modelled if one.key.endswith(("top_k", "top_p"))]
    assert [one.effect for one in found] == ["either"] * is_named
    assert not [one.key for one in found if is_of_inference_engine(one.key)]


@pytest.mark.parametrize(("colocated", "size"), [(True, GIB), (False, None)])
def test_the_size_of_nemo_rl_s_refit_buffer_is_that_of_an_engine_on_the_same_gpus(
    colocated: bool, size: int | None, tmp_path: Path
) -> None:
    """``refit_policy_generation`` in nemo_rl/algorithms/grpo.py reads it where ``colocated_inference`` (August 2026)."""
    key = "policy.refit_buffer_size_gb"
    job = nemo(tmp_path, f"{key}=1", backend="vllm", colocated=colocated)
    assert job.rollout is not None
    assert job.rollout.bucket_bytes == size
    assert (key in job.without_effect) == (not colocated)


_NO_PENALTY = "trainer.algorithm.use_kl_loss=false"
_ON_POLICY = "loss_fn.force_on_policy_ratio=true"
_STEPS = "--rollout-batch-size 8 --n-samples-per-prompt 8"


@pytest.mark.parametrize(
    ("framework", "text", "computes"),
    [
        ("nemo-rl", "", True),
        ("nemo-rl", f"{_ON_POLICY}", True),  # the reference model's is in its place
        ("nemo-rl", f"{_ON_POLICY} loss_fn.reference_policy_kl_penalty=0", False),
        ("nemo-rl", f"{_ON_POLICY} grpo.skip_reference_policy_logprobs_calculation=true", False),
        (
            "nemo-rl",
            f"{_ON_POLICY} loss_fn.reference_policy_kl_penalty=0 grpo.seq_logprob_error_threshold=2",
            True,
        ),
        ("nemo-rl", "distillation.max_num_steps=1", False),
        ("verl", "", True),
        ("verl", "algorithm.rollout_correction.bypass_mode=True", False),
        ("verl", "algorithm.rollout_correction.bypass_mode=True algorithm.use_kl_in_reward=True", True),
        ("skyrl", _NO_PENALTY, True),
        ("skyrl", f"{_NO_PENALTY} trainer.algorithm.policy_loss_type=rollout_is", False),
        ("skyrl", "trainer.algorithm.policy_loss_type=rollout_is", True),
        ("skyrl", f"{_NO_PENALTY} trainer.algorithm.policy_loss_type=cispo", True),
        (
            "skyrl",
            f"{_NO_PENALTY} trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_anchor=rollout",
            False,
        ),
        ("ms-swift", "--rlhf_type grpo", True),
        ("ms-swift", "--rlhf_type gkd", False),
        ("slime", "", True),
        ("slime", "--use-rollout-logprobs", False),
        ("slime", "--use-rollout-logprobs --get-mismatch-metrics", True),
        ("slime", "--use-rollout-logprobs --use-kl-loss", True),
        ("slime", f"{_STEPS} --global-batch-size 64", False),
        ("slime", f"{_STEPS} --num-steps-per-rollout 1", False),
        ("slime", f"{_STEPS} --global-batch-size 32", True),
        ("slime", f"{_STEPS} --global-batch-size $(cat batch)", True),
        ("slime", f"{_STEPS} --global-batch-size 64 --kl-coef 0.1", True),
        ("slime", f"{_STEPS} --global-batch-size 64 --advantage-estimator gspo", True),
        ("slime", "--loss-type sft_loss --disable-compute-advantages-and-returns", False),
    ],
)
def test_some_jobs_have_no_pass_for_log_probabilities(
    framework: str, text: str, computes: bool, tmp_path: Path
) -> None:
    """``_resolve_logprob_skip_flags`` of NeMo-RL, ``apply_bypass_mode`` of verl, ``_skip_policy_forward`` of SkyRL,
    ``_maybe_compute_logps`` of ms-swift and ``train_actor`` of slime, all as of August 2026."""
    if framework == "nemo-rl":
        rollout = nemo(tmp_path, *text.split(), backend="vllm").rollout
    elif framework == "verl":
        rollout = verl(tmp_path, text).rollout
    else:
        starts = {"skyrl": SKYRL, "ms-swift": SWIFT, "slime": f"{SLIME} --seq-length 4096 "}
        rollout = read_job(starts[framework] + text, tmp_path).rollout
    assert rollout is not None
    assert rollout.computes_log_probabilities == computes


@pytest.mark.parametrize(
    ("framework", "key", "value"),
    [
        ("slime", "kl_coef", f"{_STEPS} --global-batch-size 64 --kl-coef $(choose)"),
        ("verl", "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.bypass_mode=$(choose)"),
        ("skyrl", "trainer.algorithm.policy_loss_type", "trainer.algorithm.policy_loss_type=$(choose)"),
    ],
)
def test_what_decides_over_a_pass_and_is_known_only_when_the_job_runs_is_said(
    framework: str, key: str, value: str, tmp_path: Path
) -> None:
    if framework == "verl":
        job = verl(tmp_path, value)
    else:
        job = read_job({"skyrl": SKYRL, "slime": f"{SLIME} --seq-length 4096 "}[framework] + value, tmp_path)
    assert [one for one in job.warnings if f"{key} is known only when the job runs" in one]


def test_a_pass_that_a_job_does_not_have_is_no_phase() -> None:
    job = Scenario.of("phi-4-tiny", num_layers=1, seq_length=32)
    rollout = Rollout(is_colocated=False, ranks_per_node=1, seq_length=32, computes_log_probabilities=False)
    found = predict_phases(job, MemorySettings(), rollout)
    assert [phase.name for phase in found.phases] == ["generation", "training step", "weight sync"]


@pytest.mark.parametrize(("backend", "times"), [("naive", 1), ("nccl", 2)])
def test_verl_sends_weights_to_other_gpus_with_two_buffers(backend: str, times: int, tmp_path: Path) -> None:
    rollout = verl(tmp_path, f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}").rollout
    assert rollout is not None
    assert rollout.bucket_copies == times


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 2001),
        ("--tensor_model_parallel_size 4", 2001),
        ("--tensor_model_parallel_size 4 --sequence_parallel true", 2004),
        ("--tensor_model_parallel_size 2 --sequence_parallel true --context_parallel_size 2", 2004),
        ("--attention_backend fused", 2048),
        ("--attention_backend fused --tensor_model_parallel_size 4 --sequence_parallel true", 2048),
        ("--fp8_format hybrid --fp8_recipe tensorwise --attention_backend flash", 2016),
        ("--fp8_format e4m3 --fp8_recipe blockwise --tensor_model_parallel_size 2 --sequence_parallel true", 2048),
    ],
)
def test_ms_swift_pads_rows_for_ranks_fp8_and_cudnn(flags: str, tokens: int, tmp_path: Path) -> None:
    """``get_padding_to`` in swift/megatron/utils/utils.py (3602360): rows were as long as the data's."""
    job = read_job(f"NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --max_length 2001 {flags}", tmp_path)
    assert job.required()[0].seq_length == tokens
    assert any("are padded to" in warning for warning in job.warnings) == (tokens != 2001)
