"""NeMo-RL's jobs with the DTensor policy: their fields and defaults, and what the engine does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.any_model import of_any_model
from memlab.jobs.job import Job
from memlab.views.text.job import job_table
from tests.unit.job_files import read_job

DTENSOR = "policy.dtensor_cfg"
CONFIG = """
grpo: {num_prompts_per_step: 32}
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  precision: bfloat16
  dtensor_cfg: {enabled: true, _v2: true, activation_checkpointing: true}
  megatron_cfg: {enabled: false}
  sequence_packing: {enabled: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {foreach: false, fused: false}}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STATE = {
    "fp32_sharded_params": True,
    "defer_fsdp_grad_sync": True,
    "adam_implementation": "for_loop",
}
ON_HOST = {"offload_parameters": True, "offload_gradients": True, "offload_optimizer": True}


def read(folder: Path, **changes: Any) -> Job:
    """Reads the job with other values, by dotted keys with ``__`` for each dot."""
    tree = yaml.safe_load(CONFIG)
    for name, value in changes.items():
        *parents, last = name.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return read_job(yaml.safe_dump(tree), folder, "config.yaml")


def test_a_job_is_read_with_the_defaults_of_nemo_rl(tmp_path: Path) -> None:
    job = read(tmp_path)
    assert job.required() == (
        Scenario.of(
            "qwen3-8b",
            seq_length=4096,
            num_microbatches=8,
            engine="fsdp2",
            layout=Layout(data_parallel_size=8),
            state=TrainingState(**STATE),  # type: ignore[arg-type]
        ),
        MemorySettings(**WHOLE_LAYERS, **ON_HOST),  # type: ignore[arg-type]
    )
    assert job.framework == "nemo-rl-dtensor" and not job.guesses
    found = {one.key: (one.effect, bool(one.bound_bytes)) for one in job.not_modelled}
    assert found == {"policy.precision": ("more", True), "loss_fn": ("either", True)}


@pytest.mark.parametrize(
    ("changes", "state", "settings"),
    [
        ({"policy__dtensor_cfg__cpu_offload": True}, {"fsdp_cpu_offload": True}, dict.fromkeys(ON_HOST, False)),
        ({"policy__dtensor_cfg__dp_replicate_size": 2}, {"dp_replicate_size": 2}, {}),
        ({"policy__dtensor_cfg___v2": False}, {"reshard_after_forward": "all", "defer_fsdp_grad_sync": False}, {}),
        ({"policy__dtensor_cfg__activation_checkpointing": False}, {}, dict.fromkeys(WHOLE_LAYERS)),
        ({"policy__generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 0}}}}, {},
         dict.fromkeys(ON_HOST, False)),
        ({"policy__optimizer__kwargs": {"fused": True}}, {"adam_implementation": "fused"}, {}),
        ({"policy__optimizer__kwargs": {}}, {"adam_implementation": "foreach"}, {}),
    ],
)  # fmt: skip
def test_shards_and_what_leaves_the_device(
    changes: dict[str, Any], state: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    scenario, found = read(tmp_path, **changes).required()
    assert scenario.state == TrainingState(**(STATE | state))
    assert found == MemorySettings(**(WHOLE_LAYERS | ON_HOST | settings))


@pytest.mark.parametrize(("every", "is_told"), [(None, False), (1, True)])
def test_a_cache_that_is_emptied_within_a_step_is_told(every: int | None, is_told: bool, tmp_path: Path) -> None:
    job = read(tmp_path, **{"policy.dtensor_cfg.clear_cache_every_n_steps": every})
    assert any("less may be reserved" in one for one in job.warnings) is is_told


def test_variables_of_the_workers_set_the_allocator(tmp_path: Path) -> None:
    """``Policy.__init__`` in nemo_rl/models/policy/lm_policy.py gives them to the ranks."""
    job = read(tmp_path, policy__dtensor_cfg__env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert job.required()[0].allocator.expandable_segments


QWEN_VL = {"policy__model_name": "Qwen/Qwen2.5-VL-3B-Instruct", "images_per_sequence": 2, "patches_per_image": 1024}
FREEZES = "policy__dtensor_cfg__automodel_kwargs__freeze_config"


@pytest.mark.parametrize(
    ("changes", "freezes"),
    [({}, False), ({f"{FREEZES}__freeze_vision_tower": False}, False), ({f"{FREEZES}__freeze_embeddings": True}, True)],
)
def test_a_tower_is_trained_unless_a_section_freezes_it(tmp_path: Path, changes: dict[str, Any], freezes: bool) -> None:
    scenario = read(tmp_path, **QWEN_VL, **changes).required()[0]
    images = {"vision_tower": "qwen2.5-vl-3b", "images_per_sequence": 2, "patches_per_image": 1024}
    assert scenario.architecture.name == "qwen2.5-3b"
    assert scenario.state == TrainingState(**STATE, **images, freeze_vision_tower=freezes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images_per_sequence": None}, "the number of images in each sample: .* --set images_per_sequence=NUMBER"),
        ({"patches_per_image": None}, "the size of images: .* --set patches_per_image=NUMBER, the patches of the"),
        ({"policy__dtensor_cfg___v2": False}, "a vision tower in version 1 of the policy"),
        ({"policy__tokenizer__video": {"num_frames": 16}}, "videos in place of images"),
    ],
)
def test_a_tower_needs_what_the_data_decides_and_version_2(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, **QWEN_VL | changes).required()


@pytest.mark.parametrize(("section", "sends"), [("grpo", True), ("sft", False)])
def test_a_weight_sync_that_sends_a_tower_is_named(tmp_path: Path, section: str, sends: bool) -> None:
    (tmp_path / "config.yaml").write_text(
        CONFIG.replace("grpo", section).replace("Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-3B")
    )
    job = Job.read(tmp_path / "config.yaml")
    assert any("sends the tower" in one.reason for one in job.not_modelled) is sends


def test_images_of_a_model_without_a_tower_have_no_effect(tmp_path: Path) -> None:
    job = read(tmp_path, images_per_sequence=2)
    assert job.required()[0].state == TrainingState(**STATE)  # type: ignore[arg-type]
    assert job.without_effect["images_per_sequence"] == "memlab has no vision tower of this model"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"policy__sequence_packing__enabled": True, "policy__train_micro_batch_size": 2}, {}),
        ({"policy__train_micro_batch_size": 2}, {"policy.sequence_packing.enabled": "more"}),
        ({"policy__dtensor_cfg___v2": False}, {f"{DTENSOR}.activation_checkpointing": "either"}),
        ({"policy__dtensor_cfg__automodel_kwargs": {"use_liger_kernel": True}},
         {f"{DTENSOR}.automodel_kwargs.use_liger_kernel": "less"}),
        ({"policy__dtensor_cfg__context_parallel_size": 2}, {}),
        ({"policy__dtensor_cfg__tensor_parallel_size": 2}, {f"{DTENSOR}.tensor_parallel_size": "less"}),
    ],
)  # fmt: skip
def test_what_is_not_modelled_has_a_bound(changes: dict[str, Any], missing: dict[str, str], tmp_path: Path) -> None:
    job = read(tmp_path, **changes)
    found = {one.key: one.effect for one in job.not_modelled if one.key not in ("policy.precision", "loss_fn")}
    assert found == missing and all(one.bound_bytes for one in job.not_modelled)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"policy__dtensor_cfg__tensor_parallel_size": 2, "policy__dtensor_cfg__context_parallel_size": 2},
         "context_parallel_size beside tensor_model_parallel_size under FSDP2"),
        ({"policy__model_name": "Qwen/Qwen3-30B-A3B"}, "Automodel's own experts"),
    ],
)  # fmt: skip
def test_what_the_engine_does_not_have_is_refused_by_name(changes: dict[str, Any], lacks: str, tmp_path: Path) -> None:
    job = read(tmp_path, **changes)
    assert job.scenario is None and job.lacks == (lacks,) and job.at_least
    assert all(one.effect != "unknown" for one in job.not_modelled)


@pytest.mark.parametrize(("is_packed", "tokens"), [(False, 4032), (True, 4000)])
def test_rows_are_padded_to_a_multiple_unless_they_are_packed(is_packed: bool, tokens: int, tmp_path: Path) -> None:
    """``batched_message_log_to_flat_message`` in nemo_rl/data/llm_message_utils.py (7ea279ab)."""
    lengths = {"policy__max_total_sequence_length": 4000, "policy__make_sequence_length_divisible_by": 64}
    job = read(tmp_path, **lengths, policy__sequence_packing__enabled=is_packed)
    assert job.required()[0].seq_length == tokens


def test_a_budget_of_tokens_is_of_whole_rows_before_ranks_share_them(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        policy__dtensor_cfg__context_parallel_size=2,
        policy__dynamic_batching={"enabled": True, "train_mb_tokens": 4096},
    )
    assert job.required()[0].seq_length == 4096


@pytest.mark.parametrize(("name", "taken"), [("eager", "eager"), ("te", "sdpa")])
def test_a_job_may_name_the_function_of_attention(name: str, taken: str, tmp_path: Path) -> None:
    job = read(tmp_path, policy__dtensor_cfg__automodel_kwargs={"attn_implementation": name})
    assert job.required()[0].state.attn_implementation == taken
    assert any(one.key.endswith("attn_implementation") for one in job.not_modelled) is (name != taken)


def test_a_layout_that_memlab_lacks_shows_the_model_and_the_phases(tmp_path: Path) -> None:
    sizes = {f"policy__dtensor_cfg__{kind}_parallel_size": 2 for kind in ("tensor", "context")}
    job = read(tmp_path, **sizes)
    assert of_any_model(job, lambda model: Job.read(job.path, architecture=model)) is None
    assert (job.as_read["hidden_size"], job.as_read["is_colocated"]) == (4096, True)
    state = TrainingState().options() | job.as_read
    assert {name: job.as_read[name] for name in state} == state  # also what the job leaves as it is
    assert "hidden_size 4096" in job_table(job)


def test_a_configuration_of_an_evaluation_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluates a model by NeMo-RL, and trains none"):
        read_job("eval: {metric: pass@k}\ngeneration: {model_name: Qwen/Qwen3-8B}\n", tmp_path, "eval.yaml")


def test_distillation_from_data_has_no_engine_and_names_its_teachers(tmp_path: Path) -> None:
    """``xtoken_off_policy_distillation.py`` (7ea279ab)."""
    tree = yaml.safe_load(CONFIG)
    del tree["grpo"]
    tree |= {"distillation": {"num_prompts_per_step": 64}, "teachers": [{"model_name": "Qwen/Qwen3-14B"}]}
    job = read_job(yaml.safe_dump(tree), tmp_path, "config.yaml")
    scenario, settings = job.required()
    assert job.rollout is None and not settings.offload_parameters
    assert scenario.state.loss_of_transformers != "topk_logits"
    assert "teachers" in {one.key for one in job.not_modelled}


def test_types_of_fused_adam_are_those_of_the_job_where_memlab_refuses_it(tmp_path: Path) -> None:
    name = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
    kwargs = {"exp_avg_dtype": "torch.bfloat16", "master_weights": True}
    changes = {"policy__dtensor_cfg__expert_parallel_size": 8, "policy__model_name": "Qwen/Qwen3-30B-A3B"}
    job = read(tmp_path, **changes, policy__optimizer={"name": name, "kwargs": kwargs})
    found = of_any_model(job, lambda model: Job.read(job.path, architecture=model))
    assert found is not None and found.values["state"]["exp_avg_dtype"] == "bf16"
    assert found.values["state"]["master_weights"] is True
    assert found.model["fields"]["num_layers"] == 48  # of a model that memlab has


def test_a_job_that_names_megatron_is_megatron_s(tmp_path: Path) -> None:
    assert read(tmp_path, policy__megatron_cfg={"enabled": True}).framework == "nemo-rl"


def test_ranks_that_share_matrices_or_sequences_are_read(tmp_path: Path) -> None:
    divided = {"policy__dtensor_cfg__tensor_parallel_size": 2, "policy__dtensor_cfg__sequence_parallel": True}
    layout = read(tmp_path, **divided).required()[0].layout
    assert (layout.tensor_model_parallel_size, layout.sequence_parallel, layout.data_parallel_size) == (2, True, 4)
    layout = read(tmp_path, policy__dtensor_cfg__context_parallel_size=4).required()[0].layout
    assert (layout.context_parallel_size, layout.data_parallel_size) == (4, 2)
    plan = f"{DTENSOR}.custom_parallel_plan"
    own = read(tmp_path, **divided, policy__dtensor_cfg__custom_parallel_plan="my.module.plan")
    assert (plan, "either") in {(one.key, one.effect) for one in own.not_modelled}


def test_what_only_automodel_s_own_classes_read_is_named(tmp_path: Path) -> None:
    """``BackendConfig`` of Automodel, which NeMo-RL 7ea279ab hands to the class of a model."""
    backend = {"_target_": "BackendConfig", "attn": "te", "rms_norm": "te", "rope_fusion": False}
    job = read(
        tmp_path,
        policy__dtensor_cfg__automodel_kwargs={"backend": backend},
        policy__dtensor_cfg__moe_parallelizer={"ignore_router_for_ac": True, "lm_head_precision": None},
    )
    named = {one.key.removeprefix(f"{DTENSOR}.") for one in job.not_modelled if one.key.startswith(DTENSOR)}
    own = {"automodel_kwargs.backend.attn", "automodel_kwargs.backend.rms_norm"}
    assert named == own | {"moe_parallelizer.ignore_router_for_ac"}
    assert not {f"{DTENSOR}.{one}" for one in named} & job.without_effect.keys()


def test_a_job_with_automodel_s_own_experts_names_its_other_fields(tmp_path: Path) -> None:
    """The ranks that share experts are the job's, though dense models take the place of its own."""
    job = read(tmp_path, policy__model_name="google/gemma-4-26B-A4B-it", policy__dtensor_cfg__expert_parallel_size=8)
    assert job.scenario is None and "Automodel's own experts" in str(job.not_supported)
    found = of_any_model(job, lambda model: Job.read(tmp_path / "config.yaml", architecture=model))
    assert found is not None and found.models == ("llama-3.1-8b", "qwen2.5-14b")
    layout = found.values["layout"]
    assert (layout["expert_model_parallel_size"], layout["data_parallel_size"]) == (8, 8)
    assert found.values["rollout"]["is_colocated"] is True
