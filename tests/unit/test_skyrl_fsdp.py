"""SkyRL's jobs with FSDP2: their fields and defaults, what the engine does not have, and which jobs they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.entries import NoJobError
from memlab.jobs.job import Job
from tests.unit.job_files import read_job

POLICY = "trainer.policy"
FSDP = f"{POLICY}.fsdp_config"
CHUNK = "trainer.logprobs_chunk_size"
"""Named in every job: the entropy is computed in each."""
START = (
    f"python -m skyrl.train.entrypoints.main_base {POLICY}.model.path=Qwen/Qwen2.5-7B-Instruct "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.policy_mini_batch_size=64 generator.n_samples_per_prompt=2 "
    "trainer.max_prompt_length=1024 generator.sampling_params.max_generate_length=3072 "
)
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STATE = {
    "fp32_sharded_params": True,
    "reshard_after_forward": "all",
    "attn_implementation": "flash_attention_2",
    "separate_embeddings": "input",
    "reshard_root_after_forward": True,
    "loss_of_transformers": "logprobs_flash_attn",
}
ON_HOST = {"offload_parameters": True, "offload_gradients": True, "offload_optimizer": True}
ON_DEVICE = dict.fromkeys(ON_HOST, False)


def read(folder: Path, keys: str = "") -> Job:
    return read_job(START + keys, folder)


def test_a_job_is_read_with_the_defaults_of_skyrl(tmp_path: Path) -> None:
    job = read(tmp_path)
    assert job.required() == (
        Scenario.of(
            "qwen2.5-7b",
            seq_length=4096,
            num_microbatches=16,
            engine="fsdp2",
            layout=Layout(data_parallel_size=8),
            state=TrainingState(**STATE),  # type: ignore[arg-type]
            allocator=AllocatorSettings(expandable_segments=True),
        ),
        MemorySettings(**WHOLE_LAYERS, **ON_HOST),  # type: ignore[arg-type]
    )
    assert job.framework == "skyrl-fsdp" and not job.guesses
    assert [one.key for one in job.not_modelled] == [CHUNK]


def test_the_section_of_megatron_is_read_with_megatron_only(tmp_path: Path) -> None:
    section = f"{POLICY}.megatron_config"
    keys = [f"{section}.{each}" for each in ("tensor_model_parallel_size=2", "moe_token_dispatcher_type=flex")]
    job = read(tmp_path, " ".join(keys))
    assert {key.partition("=")[0] for key in keys} <= job.without_effect.keys()


@pytest.mark.parametrize(
    ("keys", "state", "settings"),
    [
        ("trainer.strategy=fsdp", {}, {}),
        ("trainer.strategy=fsdp2", {}, {}),
        (f"{FSDP}.mixed_precision.reduce_dtype=bf16", {"grad_reduce_in_bf16": True}, {}),
        (
            f"{FSDP}.reshard_after_forward=false",
            {"reshard_after_forward": "none", "reshard_root_after_forward": False},
            {},
        ),
        (f"{FSDP}.reshard_after_forward=4", {"reshard_after_forward_ranks": 4}, {}),
        (f"{FSDP}.fsdp_size=4", {"dp_replicate_size": 2}, {}),
        (f"{FSDP}.cpu_offload=true", {"fsdp_cpu_offload": True}, ON_DEVICE),
        ("trainer.placement.colocate_all=false", {}, ON_DEVICE),
        (f"{POLICY}.optimizer_config.offload_after_step=false", {}, {"offload_optimizer": False}),
        ("trainer.gradient_checkpointing=false", {}, dict.fromkeys(WHOLE_LAYERS)),
    ],
)
def test_types_shards_and_what_leaves_the_device(
    keys: str, state: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    scenario, found = read(tmp_path, keys).required()
    assert scenario.state == TrainingState(**(STATE | state))
    assert found == MemorySettings(**(WHOLE_LAYERS | ON_HOST | settings))


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ("trainer.micro_train_batch_size_per_gpu=2", {}),
        ("trainer.remove_microbatch_padding=false", {"trainer.remove_microbatch_padding": "more"}),
        ("trainer.algorithm.use_entropy_loss=true", {"trainer.algorithm.use_entropy_loss": "more"}),
        (
            f"{POLICY}.model.lora.rank=32 {POLICY}.model.lora.target_modules=[router]",
            {f"{POLICY}.model.lora.rank": "less"},
        ),
    ],
)
def test_what_is_not_modelled_has_a_bound(keys: str, missing: dict[str, str], tmp_path: Path) -> None:
    job = read(tmp_path, keys)
    found = {one.key: one.effect for one in job.not_modelled}
    assert found == missing | {CHUNK: "more"} and all(one.bound_bytes for one in job.not_modelled)


@pytest.mark.parametrize("chunk", ["null", "0", "-5", "many"])
def test_a_chunk_that_skyrl_refuses_is_refused_by_its_rule(chunk: str, tmp_path: Path) -> None:
    """``TrainerConfig.__post_init__`` in skyrl/train/config/config.py at a9564572."""
    assert f"{CHUNK} is " in (read(tmp_path, f"{CHUNK}={chunk}").cannot_start or "")


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_micro_batches_of_which_a_step_is_no_multiple_are_refused(engine: str, tmp_path: Path) -> None:
    """``validate_batch_sizes`` in skyrl/train/utils/utils.py (a9564572)."""
    sizes = "trainer.policy_mini_batch_size=4 generator.n_samples_per_prompt=10 trainer.micro_train_batch_size_per_gpu="
    job = read(tmp_path, f"trainer.strategy={engine} {sizes}4")
    assert job.cannot_start is not None and "has 5 sequences in a step" in job.cannot_start
    assert read(tmp_path, f"trainer.strategy={engine} {sizes}5").cannot_start is None


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_training_that_is_simulated_is_refused(engine: str, tmp_path: Path) -> None:
    """``fully_async_trainer_sim.py`` (a9564572)."""
    job = read(tmp_path, f"trainer.strategy={engine} trainer.fully_async.simulate_training=true")
    assert "the training is simulated" in str(job.not_supported)


@pytest.mark.parametrize("program", ["skyrl.train.entrypoints.serve", "examples.harbor.main_harbor_generate"])
def test_a_program_that_only_generates_is_refused(program: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(START.replace("skyrl.train.entrypoints.main_base", program))
    assert f"{program} (line 1): it generates and does not train" in str(Job.read(tmp_path / "run.sh").not_supported)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("keys", "is_named"),
    [
        ("+trainer.ref.model_config_kwargs.rope_theta=1000000", True),
        ("+trainer.ref.model_config_kwargs.rope_theta=1e4 +trainer.policy.model_config_kwargs.rope_theta=1e4", False),
        ("+trainer.ref.model_config_kwargs.rope_theta=1e4 trainer.algorithm.use_kl_loss=false", False),
        ("trainer.ref.megatron_config.transformer_config_kwargs.recompute_granularity=full", False),
    ],
)
def test_what_a_reference_model_has_otherwise_is_named(engine: str, keys: str, is_named: bool, tmp_path: Path) -> None:
    job = read(tmp_path, f"trainer.strategy={engine} {keys}")
    named = [one.key for one in job.not_modelled if one.key.startswith("trainer.ref.")]
    assert bool(named) is is_named


def test_a_package_that_the_launcher_installs_is_no_key(tmp_path: Path) -> None:
    job = read_job(f"uv run --with transformers==5.4.0 {START}", tmp_path)
    assert job.scenario is not None and not [one.key for one in job.not_modelled if one.effect == "unknown"]


@pytest.mark.parametrize(("name", "is_named"), [("Qwen2DecoderLayer", False), ("Qwen2MLP", True)])
def test_classes_that_are_sharded_by_themselves_are_named(name: str, is_named: bool, tmp_path: Path) -> None:
    key = f"{POLICY}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    job = read(tmp_path, f"{key}=\"['{name}']\"")
    assert (key in {one.key for one in job.not_modelled}) is is_named


def test_a_task_of_skypilot_is_the_script_that_it_runs(tmp_path: Path) -> None:
    script = START.replace(
        "=8 ", '="$SKYPILOT_NUM_GPUS_PER_NODE" trainer.placement.policy_num_nodes=$SKYPILOT_NUM_NODES '
    )
    head = "num_nodes: 2\nresources:\n  accelerators: {gpus}\nenvs:\n  MODEL: Qwen/Qwen3-8B\nrun: |\n"
    script = script.replace("Qwen/Qwen2.5-7B-Instruct", "$MODEL")
    for gpus, ranks in (("L40S:4", 8), ("{H100: 8}", 16), ("H100", 2)):
        job = read_job(head.replace("{gpus}", gpus) + f"  set -e\n  {script}\n", tmp_path, "task.yaml")
        assert job.required()[0].layout.data_parallel_size == ranks
        assert job.required()[0].architecture.name == "qwen3-8b"
        assert "line 8" in {one.place for one in job.taken}  # of the file, not of the script
    left_open = ("{H100: 8, A100: 4}", "null", "null\n  any_of: [{accelerators: H100:8}, {accelerators: A100:4}]")
    for gpus in left_open:  # to the machine that SkyPilot finds, or to its command line
        job = read_job(head.replace("{gpus}", gpus) + f"  {script}\n", tmp_path, "task.yaml")
        assert job.cannot_start is None and any("known only when the job runs" in one for one in job.warnings)


def test_a_chunk_of_the_entropy_has_tokens_of_each_row(tmp_path: Path) -> None:
    padded = "trainer.micro_train_batch_size_per_gpu=2 trainer.remove_microbatch_padding=false"
    job = read(tmp_path, f"{padded} {CHUNK}=512")
    (entropy,) = (one for one in job.not_modelled if one.key == CHUNK)
    assert job.required()[0].micro_batch_size == 2 and entropy.bound_bytes == 12 * 2 * 512 * 152_064


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    lora = read(tmp_path, f"{POLICY}.model.lora.rank=32").required()[0].state.lora
    assert lora == LoRA(
        rank=32,
        alpha=16,
        target_modules=(),
        exclude_modules=("lm_head",),
        fsdp2_library="peft",
        enable_input_require_grads=True,
    )
    named = read(tmp_path, f"{POLICY}.model.lora.rank=8 {POLICY}.model.lora.target_modules=[q_proj,v_proj]")
    assert named.required()[0].state.options()["lora_target_modules"] == ("q_proj", "v_proj")


@pytest.mark.parametrize("targets", ["", "[q_proj,down_proj]"])
def test_experts_have_no_adapters(targets: str, tmp_path: Path) -> None:
    """SkyRL asks for PEFT 0.18.1, which adapts linears only: experts of transformers 5 are parameters (run with 5.24)."""
    named = f" {POLICY}.model.lora.target_modules={targets}" if targets else ""
    job = read(tmp_path, f"{POLICY}.model.lora.rank=8 {POLICY}.model.path=Qwen/Qwen3-30B-A3B{named}")
    lora = job.required()[0].state.lora
    assert lora is not None and not lora.fused_experts
    assert not [one.key for one in job.not_modelled if "lora" in one.key]


@pytest.mark.parametrize("key", ["trainer.fused_lm_head_logprob", f"{POLICY}.model.fake_int4_qat.enabled"])
def test_what_skyrl_has_with_megatron_only_cannot_start(key: str, tmp_path: Path) -> None:
    job = read(tmp_path, f"{key}=true")
    assert job.cannot_start is not None and f"{key} is true" in job.cannot_start
    assert read(tmp_path, f"{key}=false").cannot_start is None


def test_ranks_that_share_rows_exchange_heads(tmp_path: Path) -> None:
    scenario, _ = read(tmp_path, f"{POLICY}.sequence_parallel_size=2").required()
    assert (scenario.layout.context_parallel_size, scenario.state.cp_comm_type) == (2, "a2a")
    assert scenario.ranks_of_shards == 8


SFT = "python -m skyrl.train.main_sft strategy=fsdp model.path=Qwen/Qwen2.5-7B-Instruct max_length=512 batch_size=64 "


def read_sft(folder: Path, keys: str = "") -> Job:
    return read_job(SFT + "placement.num_gpus_per_node=8 " + keys, folder)


@pytest.mark.parametrize(
    ("command", "is_read"),
    [
        ('bash jobs/gsm8k/run.sh trainer.placement.policy_num_gpus_per_node=4 "$@"', True),
        ("jobs/gsm8k/run.sh trainer.placement.policy_num_gpus_per_node=4", True),
        ("bash jobs/gsm8k/run.sh trainer.placement.policy_num_gpus_per_node=4; bash jobs/gsm8k/two.sh", False),
        ("bash jobs/gsm8k/none.sh trainer.placement.policy_num_gpus_per_node=4", False),
        ("bash jobs/gspo/run.sh", False),  # itself
        ('"$@"', False),
    ],
)
def test_a_script_that_starts_another_one_has_its_job(command: str, is_read: bool, tmp_path: Path) -> None:
    """As examples/train/algorithms/gspo/run_gspo_gsm8k.sh (a9564572)."""
    for name in ("gsm8k", "gspo"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    for name in ("run.sh", "two.sh"):
        (tmp_path / "jobs" / "gsm8k" / name).write_text(START + ' trainer.placement.policy_num_gpus_per_node=2 "$@"\n')
    (tmp_path / "jobs" / "gspo" / "run.sh").write_text(command + "\n")
    if not is_read:
        with pytest.raises(NoJobError):
            Job.read(tmp_path / "jobs" / "gspo" / "run.sh")
        return
    job = Job.read(tmp_path / "jobs" / "gspo" / "run.sh")
    assert job.required()[0].layout.world_size == 4
    assert any("the script starts run.sh" in one for one in job.warnings)
    assert any("$@ stands for what the script is started with" in one for one in job.warnings) == ("$@" in command)


def test_a_program_of_one_s_own_that_trains_so_is_read_as_skyrl_s(tmp_path: Path) -> None:
    """As examples/train/callbacks/main_sft_with_callbacks.py (a9564572)."""
    rows = "micro_train_batch_size_per_gpu=2 "
    usual = read_sft(tmp_path, rows)
    own = (tmp_path / "run.sh").read_text().replace("skyrl.train.main_sft", "mine.main_sft_with_callbacks")
    assert read_job(own, tmp_path).required() == usual.required()


def test_supervised_fine_tuning_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    """A micro-batch of two sequences is one row, and nothing leaves the device, as no engine needs it."""
    job = read_sft(tmp_path)
    assert job.required() == (
        Scenario.of(
            "qwen2.5-7b",
            seq_length=1024,
            packed_sequences=2,
            num_microbatches=4,
            engine="fsdp2",
            layout=Layout(data_parallel_size=8),
            state=TrainingState(**STATE),  # type: ignore[arg-type]
            allocator=AllocatorSettings(expandable_segments=True),
        ),
        MemorySettings(**WHOLE_LAYERS),  # type: ignore[arg-type]
    )
    (entropy,) = job.not_modelled
    assert job.framework == "skyrl-sft-fsdp" and job.rollout is None
    assert (entropy.key, entropy.bound_bytes) == ("logprobs_chunk_size", 12 * 1024 * 152_064)
    other = read_sft(tmp_path, "fsdp_config.cpu_offload=true model.lora.rank=16 micro_train_batch_size_per_gpu=1")
    scenario = other.required()[0]
    assert scenario.state.fsdp_cpu_offload and scenario.state.lora == LoRA(
        rank=16, alpha=16, target_modules=(), exclude_modules=("lm_head",), enable_input_require_grads=True
    )
    assert (scenario.seq_length, scenario.packed_sequences, scenario.num_microbatches) == (512, None, 8)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("use_sequence_packing=true", "use_sequence_packing is true, must be false unless strategy is megatron"),
        ("max_length=null", "give --set max_length=TOKENS"),
        ("megatron_config.tensor_model_parallel_size=2", ""),
    ],
)
def test_what_supervised_fine_tuning_cannot_be_is_named(keys: str, words: str, tmp_path: Path) -> None:
    job = read_sft(tmp_path, keys)
    assert words in str(job.cannot_start or job.not_supported)
    assert words or (job.scenario is not None and keys.partition("=")[0] in job.without_effect)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_rows_of_harbor_s_agents_have_the_whole_length_that_their_program_asks_for(engine: str, tmp_path: Path) -> None:
    """``main_harbor.py`` of a9564572 refuses a job without it, and its generator reads no length of prompts."""
    harbor = START.replace("skyrl.train.entrypoints.main_base", "examples.train_integrations.harbor.main_harbor")
    for command, length in ((harbor, 32768), (START, 4096)):
        keys = f"trainer.strategy={engine} trainer.algorithm.max_seq_len=32768 generator.step_wise_trajectories=true"
        job = read_job(command + keys, tmp_path)
        assert job.required()[0].seq_length == length
        assert job.rollout is not None and job.rollout.seq_length == length
        # An answer of one turn is one step; agents of Harbor take as many as they like.
        said = [one for one in job.warnings if one.startswith("generator.step_wise_trajectories: ")]
        assert bool(said) is (command == harbor)
    (tmp_path / "run.sh").write_text(f"{harbor} trainer.strategy={engine}")
    assert "--set trainer.algorithm.max_seq_len=TOKENS" in str(Job.read(tmp_path / "run.sh").not_supported)
