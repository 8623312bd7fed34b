"""NeMo Automodel's recipes: fields and defaults of its own, what the engine does not have, and what its classes differ in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.bounds import bound_bytes
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.views.text.job import job_table
from tests.unit.job_files import read_job
from tests.unit.saved import saved_tensors, storage_bytes

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
RECIPE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: microsoft/phi-4
  torch_dtype: bf16
  use_liger_kernel: false
step_scheduler:
  global_batch_size: 64
  local_batch_size: 4
distributed:
  strategy: fsdp2
  dp_size: 8
  tp_size: 1
  activation_checkpointing: true
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset
  seq_len: 2048
optimizer:
  _target_: torch.optim.Adam
  lr: 1.0e-5
  weight_decay: 0
ci:
  nodes: 1
"""


def read(folder: Path, changes: str = "", **options: Any) -> Job:
    """Reads the recipe with other values: YAML of dotted keys; one without a value is removed."""
    tree = yaml.safe_load(RECIPE)
    for name, value in (yaml.safe_load(changes) or {}).items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        if value is None:
            del node[last]
    return read_job(yaml.safe_dump(tree, sort_keys=False), folder, "recipe.yaml", **options)


def test_a_recipe_is_the_step_of_each_of_its_ranks(tmp_path: Path) -> None:
    job = read(tmp_path, version="36044ad3")
    assert job.required() == (
        Scenario.of(
            "phi-4",
            seq_length=2048,
            micro_batch_size=4,
            num_microbatches=2,
            engine="fsdp2",
            layout=Layout(data_parallel_size=8),
            state=TrainingState(defer_fsdp_grad_sync=True),
            versions=job.required()[0].versions,
        ),
        FULL,
    )
    assert (job.framework, job.not_modelled, job.guesses, job.warnings) == ("automodel", (), (), ())


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ("{model.torch_dtype: float32}", {"fp32_sharded_params": True}),
        ("{model.torch_dtype: null}", {}),
        ("{distributed.mp_policy.reduce_dtype: bfloat16, distributed.mp_policy.param_dtype: bfloat16}", {"grad_reduce_in_bf16": True}),
        ("{distributed.mp_policy.param_dtype: torch.bfloat16}", {"grad_reduce_in_bf16": True}),
        ("{distributed.defer_fsdp_grad_sync: false}", {"defer_fsdp_grad_sync": False}),
        ("{distributed.reshard_after_forward: true}", {"reshard_after_forward": "all"}),
        ("{distributed.reshard_after_forward: false}", {"reshard_after_forward": "none"}),
        ("{optimizer.foreach: false}", {"adam_implementation": "for_loop"}),
        ("{optimizer._target_: torch.optim.AdamW, optimizer.fused: true}", {"adam_implementation": "fused"}),
        ("{distributed: {dp_size: 8}}", {"defer_fsdp_grad_sync": True}),
    ],
)  # fmt: skip
def test_types_resharding_and_optimizer(changes: str, state: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, changes).required()[0].state
    assert found == TrainingState(**({"defer_fsdp_grad_sync": True} | state))


@pytest.mark.parametrize(
    ("changes", "tokens", "passes", "ranks", "guesses"),
    [
        ("{packed_sequence.packed_sequence_size: 1024}", 1024, 2, 8, ()),
        ("{step_scheduler: {max_steps: 3}}", 2048, 4, 8, ()),  # 32 samples, of which each rank has one at a time
        ("{dataset.seq_len: null}", 4096, 2, 8, ("the length of its sequences",)),
        ("{distributed.dp_size: none, ci.nodes: 2}", 2048, 1, 16, ("the number of ranks",)),
        ("{distributed.dp_size: null, ci.nproc_per_node: 2}", 2048, 8, 2, ("the number of ranks",)),
        ("{distributed.dp_size: null, step_scheduler.global_batch_size: 24}", 2048, 1, 6, ("the number of ranks",)),
    ],
)
def test_rows_and_ranks(
    changes: str, tokens: int, passes: int, ranks: int, guesses: tuple[str, ...], tmp_path: Path
) -> None:
    job = read(tmp_path, changes)
    scenario, _ = job.required()
    assert (scenario.seq_length, scenario.num_microbatches) == (tokens, passes)
    assert (scenario.layout.world_size, job.guesses) == (ranks, guesses)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ("{recipe: FinetuneRecipeForVLM}", "the recipe FinetuneRecipeForVLM"),
        ("{distributed.tp_size: 2, distributed.sequence_parallel: true}",
         "tensor_model_parallel_size beside sequence_parallel under FSDP2"),
        ("{distributed.cp_size: 2, distributed.tp_size: 2}",
         "context_parallel_size beside tensor_model_parallel_size under FSDP2"),
        ("{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe}",
         "pipeline schedules other than 1f1b and interleaved1f1b"),
        ("{distributed.pp_size: 2, distributed.pipeline.pp_schedule_csv: own.csv}",
         "a schedule or a division of the model of the recipe's own"),
        ("{distributed.strategy: megatron_fsdp}", "strategies other than fsdp2"),
        ("{distributed.offload_policy: cpu}", "an offload policy without a _target_"),
        ("{quantization.load_in_4bit: true}", "a recipe with quantization"),
        ("{model._target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained}", "models of NeMoAutoModelForImageTextToText"),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B, distributed.cp_size: 2}",
         "Automodel's own experts beside context parallelism"),
    ],
)  # fmt: skip
def test_what_the_engine_does_not_have_is_refused_by_name(changes: str, lacks: str, tmp_path: Path) -> None:
    job = read(tmp_path, changes)
    assert job.scenario is None and job.lacks == (lacks,)


@pytest.mark.parametrize(
    "more", [{}, {"distributed.sequence_parallel": True, "model.pretrained_model_name_or_path": "Qwen/Qwen3-8B"}]
)
def test_ranks_that_divide_matrices_are_read(more: dict[str, Any], tmp_path: Path) -> None:
    job = read(tmp_path, str({"distributed.tp_size": 2} | more))
    layout = job.required()[0].layout
    assert (layout.tensor_model_parallel_size, layout.sequence_parallel) == (2, bool(more))
    own = read(tmp_path, str({"distributed.tp_size": 2, "distributed.tp_plan": "my.module.plan"} | more))
    assert {one.key for one in own.not_modelled} - {one.key for one in job.not_modelled} == {"distributed.tp_plan"}


@pytest.mark.parametrize(
    ("model", "more", "version", "classes"),
    [
        ("microsoft/phi-4", "", "0.7.0", "transformers"),
        ("Qwen/Qwen2.5-7B", "", None, "automodel"),
        ("Qwen/Qwen3-8B", ", distributed.tp_size: 2, distributed.sequence_parallel: true", "0.7.0", "automodel_0.7.0"),
        ("meta-llama/Llama-3.1-8B", "", "36044ad3", "automodel"),
        ("meta-llama/Llama-3.1-8B", ", distributed.tp_size: 2, distributed.sequence_parallel: true", None, "transformers"),
        ("meta-llama/Llama-3.1-8B", ", model.force_hf: true", "0.7.0", "transformers"),
    ],
)  # fmt: skip
def test_of_three_families_automodel_has_classes_of_its_own(
    model: str, more: str, version: str | None, classes: str, tmp_path: Path
) -> None:
    job = read(tmp_path, f"{{model.pretrained_model_name_or_path: {model}{more}}}", version=version)
    assert job.required()[0].state.model_classes == classes


@pytest.mark.parametrize(
    ("changes", "embeddings"),
    [
        ("{distributed.dp_size: 8}", "both"),
        ("{peft.dim: 8}", "none"),
        ("{freeze_config.freeze_embeddings: true}", "both"),
    ],
)
def test_the_release_shards_embeddings_that_it_trains_alone(changes: str, embeddings: str, tmp_path: Path) -> None:
    job = read(tmp_path, changes, version="0.7.0")
    state = job.required()[0].state
    assert (state.separate_embeddings, state.loss_of_transformers) == (embeddings, "masked_cross_entropy")
    (warning,) = [one for one in read(tmp_path, changes).warnings if one not in job.warnings]
    assert "--framework-version 0.7.0" in warning
    assert read(tmp_path, changes, version="36044ad3").warnings == job.warnings


def test_ranks_that_share_sequences_are_read(tmp_path: Path) -> None:
    scenario, _ = read(tmp_path, "{distributed.cp_size: 2, distributed.tp_plan: my.module.plan}").required()
    layout = scenario.layout
    assert (layout.context_parallel_size, layout.data_parallel_size, layout.world_size) == (2, 8, 16)


def test_replicas_and_shards_on_the_host_are_read(tmp_path: Path) -> None:
    policy = "distributed.offload_policy._target_: torch.distributed.fsdp.CPUOffloadPolicy"
    job = read(
        tmp_path, f"{{distributed.dp_replicate_size: 2, {policy}, distributed.offload_policy.pin_memory: false}}"
    )
    assert job.scenario is not None and job.scenario.ranks_of_shards == job.scenario.layout.world_size // 2
    assert job.scenario.state.fsdp_cpu_offload and not job.lacks


@pytest.mark.parametrize(
    ("changes", "read_as"),
    [
        ("{distributed.enable_fsdp2_prefetch: true}", (1, 2)),
        ("{distributed.enable_fsdp2_prefetch: true, distributed.fsdp2_forward_prefetch_depth: 0}", (0, 2)),
        ("{distributed.enable_fsdp2_prefetch: true, distributed.reshard_after_forward: false}", (0, 0)),
        ("{distributed.fsdp2_backward_prefetch_depth: 4}", (0, 0)),
    ],
)
def test_what_is_gathered_ahead_is_read(changes: str, read_as: tuple[int, int], tmp_path: Path) -> None:
    job = read(tmp_path, changes)
    assert job.scenario is not None
    state = job.scenario.state
    assert (state.fsdp2_forward_prefetch_depth, state.fsdp2_backward_prefetch_depth) == read_as


def test_fused_adam_is_read_with_its_main_parameters(tmp_path: Path) -> None:
    target = "optimizer._target_: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
    job = read(tmp_path, f"{{{target}, optimizer.master_weights: true, optimizer.store_param_remainders: true}}")
    assert job.scenario is not None
    state = job.scenario.state
    assert (state.adam_implementation, state.master_weights, state.store_param_remainders) == ("te_fused", True, True)
    assert "optimizer._target_" not in {one.key for one in job.not_modelled}


LAYER_OF_PHI_4 = 5120 * (5120 + 2 * 1280) + 5120 * 5120 + 3 * 5120 * 17920 + 2 * 5120
OUTSIDE_LAYERS = 2 * 100352 * 5120 + 5120
OF_A_RANK = (40 * LAYER_OF_PHI_4 + OUTSIDE_LAYERS) // 8


@pytest.mark.parametrize(
    ("changes", "at_least"),
    [
        ("{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe}", (2, 2, 4)),
        ("{distributed.tp_size: 4, model.torch_dtype: float32}", (4, 4, 8)),
        (
            "{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, optimizer._target_: flashoptim.FlashAdamW, model.torch_dtype: float32}",
            (2, 2),
        ),
        ("{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, peft.dim: 8}", (2,)),
        (
            "{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, freeze_config.freeze_language_model: true}",
            (2,),
        ),
        ("{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, quantization.load_in_4bit: true}", ()),
        (
            "{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, model.pretrained_model_name_or_path: a/b}",
            (),
        ),
        (
            "{distributed.pp_size: 2, distributed.pipeline.pp_schedule: gpipe, distributed.offload_policy._target_: torch.distributed.fsdp.CPUOffloadPolicy}",
            (),
        ),
        ("{model._target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained}", ()),
    ],
)
def test_a_recipe_that_is_refused_says_what_a_rank_keeps_at_least(
    changes: str, at_least: tuple[int, ...], tmp_path: Path
) -> None:
    job = read(tmp_path, changes, world_size=8)
    assert job.scenario is None and all(one.effect != "unknown" for one in job.not_modelled)
    assert tuple(job.at_least.values()) == tuple(size * OF_A_RANK for size in at_least)
    assert ("at least" in job_table(job)) is bool(at_least)


def test_tensor_parallel_ranks_divide_the_others(tmp_path: Path) -> None:
    model = "model.pretrained_model_name_or_path: Qwen/Qwen3-8B"
    scenario, settings = read(tmp_path, f"{{{model}, distributed.dp_size: 4, distributed.tp_size: 2}}").required()
    assert scenario.layout == Layout(data_parallel_size=4, tensor_model_parallel_size=2, sequence_parallel=False)
    assert scenario.num_microbatches == 4
    said = written("automodel", scenario, settings)
    assert not said.unsaid and read_job("\n".join(said.lines), tmp_path, "recipe.yaml").required()[0] == scenario


def test_adapters_beside_tensor_parallel_ranks_are_read(tmp_path: Path) -> None:
    changes = "distributed.dp_size: 4, distributed.tp_size: 2, peft.dim: 8"
    state = read(tmp_path, f"{{{changes}}}").required()[0].state
    assert state.lora is not None and state.lora.fsdp2_library == "automodel"
    job = read(tmp_path, f"{{{changes}, distributed.sequence_parallel: true}}")
    assert job.lacks == ("tensor_model_parallel_size beside sequence_parallel under FSDP2",)


def test_a_model_of_more_ranks_than_a_node_has_takes_as_many_as_it_needs(tmp_path: Path) -> None:
    gpipe = "distributed.pipeline.pp_schedule: gpipe"
    whole = read(tmp_path, f"{{distributed.pp_size: 2, {gpipe}}}", world_size=16).at_least["parameters"]
    job = read(tmp_path, f"{{distributed.dp_size: null, distributed.pp_size: 4, distributed.tp_size: 4, {gpipe}}}")
    assert job.at_least["parameters"] == whole


@pytest.mark.parametrize(
    ("changes", "adapters"),
    [
        ("{peft.dim: 16, peft.alpha: 32}", {"rank": 16, "target_modules": ("*_proj",)}),
        ("{peft.match_all_linear: true}", {"rank": 8, "target_modules": ()}),
        ("{peft.target_modules: [qkv_proj, o_proj]}", {"rank": 8, "target_modules": ("qkv_proj", "o_proj")}),
        ("{peft.exclude_modules: ['*o_proj']}", {"rank": 8, "target_modules": (), "exclude_modules": ("*o_proj",)}),
    ],
)
def test_adapters_are_those_of_automodel(changes: str, adapters: dict[str, Any], tmp_path: Path) -> None:
    state = read(tmp_path, changes).required()[0].state
    assert state.lora == LoRA(alpha=32, dropout_position="post", fsdp2_library="automodel", **adapters)


def test_what_only_other_ranks_read_has_no_effect_without_them(tmp_path: Path) -> None:
    keys = "distributed.sequence_parallel: true, distributed.pipeline.pp_schedule: gpipe"
    assert {"distributed.sequence_parallel", "distributed.pipeline.pp_schedule"} <= read(
        tmp_path, f"{{{keys}}}"
    ).without_effect.keys()
    job = read(tmp_path, f"{{{keys}, distributed.tp_size: 2, distributed.pp_size: 2, peft.dim: 16, peft.alpha: 32}}")
    taken = {one.key: one.memlab_value for one in job.taken}
    assert [taken[f"distributed.{name}"] for name in ("sequence_parallel", "pipeline.pp_schedule")] == [True, "gpipe"]
    assert (taken["peft.dim"], taken["peft.alpha"]) == (16, 32)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ("{model.use_liger_kernel: null}", {"model.use_liger_kernel": "less"}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen3-8B}", {}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen3-8B, model.backend.rms_norm: te}", {}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen2.5-7B, model.backend.rms_norm: quack, model.backend.rope: quack}",
         {"model.backend.rms_norm": "either", "model.backend.rope": "less"}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen2.5-7B, distributed.tp_size: 2, distributed.sequence_parallel: true}",
         {"model.backend.rms_norm": "less", "model.backend.rope": "more", "distributed.activation_checkpointing": "either"}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen3-8B, distributed.dp_size: 1, peft.dim: 8}",
         {"distributed.dp_size": "less"}),
        ("{model.pretrained_model_name_or_path: Qwen/Qwen3-8B, model.force_hf: true}", {}),
        ("{distributed.activation_checkpointing: selective}", {}),
        ("{peft.use_dora: true}", {"peft": "less"}),
        ("{peft.dim: 8, peft.use_triton: true}", {"peft.use_triton": "either"}),
        ("{peft.dim: 8, peft.lora_dtype: torch.float32}", {"peft": "less"}),
        ("{peft.dim: 8, peft.lora_dtype: torch.bfloat16}", {}),
        ("{peft.dim: 8, peft._target_: peft.LoraConfig}", {"peft": "less"}),
        ("{optimizer.weight_decay: 0.1}", {"optimizer.weight_decay": "more"}),
        ("{optimizer.weight_decay: 0.1, optimizer._target_: torch.optim.AdamW}", {}),
        ("{optimizer._target_: transformer_engine.pytorch.optimizers.FusedAdam, optimizer.exp_avg_dtype: torch.bfloat16}",
         {"optimizer._target_": "either"}),
        ("{dataset._target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset}", {"step_scheduler.local_batch_size": "more"}),
        ("{packed_sequence.packed_sequence_size: 1024}", {"packed_sequence.packed_sequence_size": "more"}),
        ("{model.attn_implementation: eager}", {}),
        ("{loss_fn._target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy, model.output_hidden_states: true}",
         {"loss_fn._target_": "less", "model.output_hidden_states": "more"}),
        ("{distributed.mp_policy.param_dtype: float32}", {"distributed.mp_policy.param_dtype": "less"}),
        ("{distributed.mp_policy.param_dtype: float32, model.torch_dtype: float32}", {}),
        ("{distributed.mp_policy: {param_dtype: bfloat16, output_dtype: float32}}", {"distributed.mp_policy.output_dtype": "more"}),
    ],
)  # fmt: skip
def test_what_is_not_modelled_has_a_bound(changes: str, missing: dict[str, str], tmp_path: Path) -> None:
    job = read(tmp_path, changes)
    assert {one.key: one.effect for one in job.not_modelled} == missing
    assert all(one.bound_bytes for one in job.not_modelled)


def test_keys_of_experts_and_the_loss_of_a_refused_recipe_are_not_called_without_effect(tmp_path: Path) -> None:
    """As 15 of 40 recipes had it: what its own experts gather was listed as no memory of a training step."""
    own = "distributed.moe.reshard_after_forward: true, model.backend.experts: gmm, model.backend.dispatcher: deepep"
    model = (
        "model.pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B, loss_fn._target_: linear_ce.FusedLinearCrossEntropy"
    )
    job = read(tmp_path, f"{{{model}, distributed.ep_size: 8, distributed.cp_size: 2, {own}}}")
    noted = {one.key: one.effect for one in job.not_modelled}
    assert noted == {key.partition(":")[0]: "either" for key in own.split(", ")} | {"loss_fn._target_": "less"}
    assert not noted.keys() & job.without_effect.keys()
    assert "model.backend.experts" in read(tmp_path, "{model.backend.experts: torch}").without_effect


def test_a_key_of_adapters_that_automodel_does_not_have_is_unknown(tmp_path: Path) -> None:
    job = read(tmp_path, "{peft.dim: 8, peft.r: 16, peft.lora_A_init: xavier}")
    assert [(one.key, one.effect) for one in job.not_modelled] == [("peft.r", "unknown")]
    assert "peft.lora_A_init" in job.without_effect


def test_one_rank_is_not_sharded_by_automodel(tmp_path: Path) -> None:
    (one,) = read(tmp_path, "{distributed.dp_size: 1}").not_modelled
    layer, outside = LAYER_OF_PHI_4, OUTSIDE_LAYERS
    deferred = 4 * (outside + 40 * layer)  # of 16 micro-batches
    assert (one.key, one.effect) == ("distributed.dp_size", "less")
    assert one.bound_bytes == 2 * (outside + 3 * layer) + 8 * (outside + layer) + deferred
    (one,) = read(tmp_path, "{distributed.dp_size: 1, model.torch_dtype: float32}").not_modelled
    assert (one.key, one.bound_bytes) == ("distributed", None), "it then computes in fp32"


@pytest.mark.parametrize("settings", [MemorySettings(), FULL], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    "kind", ["float32 everywhere", "foreach", "for_loop", "fused", "bf16 reduction", "fp32 shards"]
)
def test_what_is_written_is_read_back(kind: str, settings: MemorySettings, tmp_path: Path) -> None:
    state: dict[str, Any] = {"defer_fsdp_grad_sync": True, "reshard_after_forward": "all"}
    if kind in ("foreach", "for_loop", "fused"):
        state |= {"adam_implementation": kind, "fp32_sharded_params": kind == "fused"}
    state |= {"fp32_sharded_params": True} if kind == "fp32 shards" else {}
    scenario = Scenario.of(
        "llama-3.1-8b",
        num_layers=8,
        seq_length=512,
        num_microbatches=2,
        dtype="fp32" if kind == "float32 everywhere" else "bf16",
        engine="fsdp2",
        layout=Layout(data_parallel_size=4),
        state=TrainingState(**state, grad_reduce_in_bf16=kind in ("bf16 reduction", "fp32 shards")),
    )
    said = written("automodel", scenario, settings)
    job = read_job("\n".join(said.lines), tmp_path, "recipe.yaml")
    assert not said.unsaid and not job.guesses
    read_scenario, read_settings = job.required()
    assert (read_scenario.to_dict() | {"versions": None}, read_settings) == (
        scenario.to_dict() | {"versions": None},
        settings,
    )
    first = written("automodel", scenario, MemorySettings(**{**FULL.to_dict(), "recompute_method": "block"}))
    assert first.unsaid == {"recompute_method": "Automodel checkpoints all layers, each by itself, or none"}


@pytest.mark.parametrize(
    ("changes", "freezes", "lora"),
    [("", True, None), (", freeze_config.freeze_vision_tower: false", False, None), (", peft.dim: 8", True, 8)],
)
def test_a_recipe_for_images_asks_how_many_a_sample_has(changes: str, freezes: bool, lora: Any, tmp_path: Path) -> None:
    """Towers are frozen where a ``freeze_config`` does not say otherwise, and wherever adapters are trained."""
    own = "model._target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained, recipe: FinetuneRecipeForVLM"
    own += ", model.pretrained_model_name_or_path: google/gemma-3-4b-it, model.attn_implementation: eager"
    own += f", freeze_config.freeze_embeddings: true{changes}"
    job = read(tmp_path, f"{{{own}}}")
    assert job.scenario is None and "give --set dataset.num_images_per_sample=NUMBER" in job.questions[0]
    job = read(tmp_path, f"{{{own}, dataset.num_images_per_sample: 2}}")
    scenario, settings = job.required()
    state = scenario.state
    assert (scenario.architecture.name, state.vision_tower) == ("gemma-3-4b-text", "gemma-3-4b")
    assert (state.images_per_sequence, state.freeze_vision_tower) == (2, freezes)
    assert state.attn_implementation == "eager"
    assert (state.lora and state.lora.rank) == lora
    assert "freeze_config.freeze_embeddings" in job.without_effect
    assert {"vision_tower", "images_per_sequence"} <= written("automodel", scenario, settings).unsaid.keys()
    own = own.replace("google/gemma-3-4b-it", "Qwen/Qwen3-VL-8B-Instruct") + ", dataset.num_images_per_sample: 2"
    assert "give --set processor.max_pixels=NUMBER" in read(tmp_path, f"{{{own}}}").questions[0]
    state = read(tmp_path, f"{{{own}, processor.max_pixels: 1003520}}").required()[0].state
    assert (state.vision_tower, state.patches_per_image, state.model_classes) == ("qwen3-vl-8b", 3920, "transformers")
    with pytest.raises(ValueError, match=r"processor[.]max_pixels is 'auto', must be a whole number"):
        read(tmp_path, f"{{{own}, processor.max_pixels: auto}}")
    flash = read(tmp_path, f"{{{own.replace('eager', 'flash_attention_2')}, processor.max_pixels: 1003520}}")
    assert "model.attn_implementation" in {one.key for one in flash.not_modelled}
    packed = read(tmp_path, f"{{{own}, processor.max_pixels: 1003520, packed_sequence.pack_size: 8192}}")
    assert packed.lacks == ("rows of packed samples with images",)
    texts = read(tmp_path, "{dataset.num_images_per_sample: 2}")
    assert texts.required()[0].state.vision_tower is None and "dataset.num_images_per_sample" in texts.without_effect


def test_no_part_of_adapters_is_written_for_a_recipe_without_them() -> None:
    said = written("automodel", Scenario.of("llama-3.1-8b", engine="fsdp2"), MemorySettings())
    tree = yaml.safe_load("\n".join(said.lines))
    assert "peft" not in tree, "Automodel trains adapters wherever a recipe has this section"
    assert "sequence_parallel" not in tree["distributed"], "of one tensor parallel rank"


def test_a_reduction_in_bf16_leaves_what_layers_compute_in(tmp_path: Path) -> None:
    job = read(tmp_path, "{model.torch_dtype: float32}")
    scenario, settings = job.required()
    changed = replace(scenario, state=replace(scenario.state, grad_reduce_in_bf16=True))
    lines = yaml.safe_load("\n".join(written("automodel", changed, settings, source=job).lines))
    policy = {f"distributed.mp_policy.{key}": value for key, value in lines["distributed"]["mp_policy"].items()}
    assert read(tmp_path, yaml.safe_dump({"model.torch_dtype": "float32"} | policy)).required()[0] == changed


def test_a_bound_of_experts_has_the_gates_of_all_that_get_a_token() -> None:
    model = replace(find_architecture("qwen3-moe-tiny"), ffn_hidden_size=2**20)
    scenario = Scenario.of(model, seq_length=64, engine="fsdp2")
    with_liger, norms = (
        bound_bytes(NotModelled(key, None, "less", ""), scenario, MemorySettings())
        for key in ("model.use_liger_kernel", "model.backend.rms_norm")
    )
    gate = 2 * 64 * model.moe_router_topk * model.moe_ffn_hidden_size
    assert (with_liger or 0) - (norms or 0) == gate * (model.num_layers + 4)


def saved_bytes(change: Any, attention: str = "sdpa") -> int:
    """Returns what transformers' own Llama of three layers saves for backward, each storage once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    config = LlamaConfig(**sizes, **heads, attn_implementation=attention, use_cache=False)
    with torch.device("cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    change(model)
    with saved_tensors() as saved:
        _ = model(input_ids=torch.zeros(1, 64, dtype=torch.long)).logits
    return sum(storage_bytes(saved, apart_from=model.parameters()).values())


def fused_norms(model: Any) -> None:
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("norm"):
            fused = torch.nn.RMSNorm(128, eps=1e-6, dtype=torch.bfloat16)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, fused)


def whole_layers(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


def parts_of_layers(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for layer in model.model.layers:
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))


@pytest.mark.parametrize(
    ("key", "settings", "variant", "usual"),
    [
        ("model.backend.rms_norm", MemorySettings(), (fused_norms, "sdpa"), (lambda model: None, "sdpa")),
        pytest.param(
            *(
                "model.attn_implementation",
                MemorySettings(),
                (lambda model: None, "eager"),
                (lambda model: None, "sdpa"),
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("distributed.activation_checkpointing", FULL, (parts_of_layers, "sdpa"), (whole_layers, "sdpa")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fused norms", "eager attention", "parts of layers"],
)
def test_a_bound_holds_for_what_the_modules_save(key: str, settings: MemorySettings, variant: Any, usual: Any) -> None:
    pytest.importorskip("transformers", reason="the modules are those of transformers")
    sizes: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 64, "kv_channels": 16}
    model = replace(find_architecture("llama-3-tiny"), num_attention_heads=8, num_query_groups=4, num_layers=3, **sizes)
    scenario = Scenario.of(model, seq_length=64, engine="fsdp2")
    difference = abs(saved_bytes(*variant) - saved_bytes(*usual))
    bound = bound_bytes(NotModelled(key, None, "either", ""), scenario, settings)
    assert bound is not None and 0 < difference <= bound < 12 * difference


def test_a_selective_checkpoint_is_written_and_read_again(tmp_path: Path) -> None:
    scenario, settings = read(
        tmp_path, "{distributed.activation_checkpointing: selective, model.force_hf: true}"
    ).required()
    assert settings.selective_ac
    again = written("automodel", scenario, settings)
    (tmp_path / "again.yaml").write_text("\n".join(again.lines))
    assert not again.unsaid and Job.read(tmp_path / "again.yaml").required() == (scenario, settings)


@pytest.mark.parametrize(("tokens", "is_named"), [(0, False), (4096, True)])
def test_how_sequences_are_packed_decides_only_where_they_are(tokens: int, is_named: bool, tmp_path: Path) -> None:
    job = read(tmp_path, f"{{packed_sequence: {{packed_sequence_size: {tokens}, packing_strategy: neat}}}}")
    assert ("packed_sequence.packing_strategy" in {one.key for one in job.not_modelled}) is is_named


def test_a_recipe_that_is_refused_shows_all_that_was_read(tmp_path: Path) -> None:
    """Images, and pipeline stages: the values, and the keys of a class that memlab does not have, by name."""
    own = "model.backend.attn: te, model.text_config.use_cache: true, distributed.multimodal.frozen_sharding: root"
    stages = "distributed.pp_size: 4, distributed.pipeline.round_virtual_stages_to_pp_multiple: up"
    job = read(tmp_path, f"{{recipe: FinetuneRecipeForVLM, {stages}, {own}, model.backend.rope_fusion: false}}")
    words = job_table(job)
    assert job.to_dict()["as_read"]["world_size"] == 32 and "up" in {one.memlab_value for one in job.taken}
    said = ("world_size 32", "pipeline_model_parallel_size 4", "recompute_granularity full", "micro_batch_size 4")
    assert all(word in words for word in said), words
    noted = {one.key for one in job.not_modelled}
    assert {part.partition(":")[0] for part in own.split(", ")} <= noted and "model.backend.rope_fusion" not in noted
    assert "as far as memlab read it" not in job_table(read(tmp_path))


def test_numbers_in_quotes_are_numbers(tmp_path: Path) -> None:
    job = read(tmp_path, "{distributed.dp_size: 4, distributed.tp_size: '2'}")
    assert job.required()[0].layout.tensor_model_parallel_size == 2
    with pytest.raises(ValueError, match="must be a whole number"):
        read(tmp_path, "{distributed.tp_size: '08'}")


@pytest.mark.parametrize(
    ("fsdp", "recomputes", "gathers_ahead", "is_on_host"),
    [
        ("{}", "full", True, False),
        ("{activation_checkpointing: false, enable_fsdp2_prefetch: false, cpu_offload: true}", None, False, True),
    ],
)
def test_a_recipe_for_diffusion_has_its_ranks_in_a_section_of_its_own(
    fsdp: str, recomputes: str | None, gathers_ahead: bool, is_on_host: bool, tmp_path: Path
) -> None:
    """``_build_diffusion_parallel_manager_args`` in nemo_automodel/recipes/diffusion/train.py (36044ad3)."""
    tree = yaml.safe_load(RECIPE)
    del tree["distributed"]
    tree |= {"flow_matching": {"adapter_type": "flux2"}, "fsdp": yaml.safe_load(fsdp) | {"dp_size": 4, "tp_size": 2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    job = Job.read(tmp_path / "recipe.yaml")
    assert "a recipe with flow_matching" in str(job.not_supported)
    assert [one.key for one in job.not_modelled if one.key.startswith(("fsdp.", "flow_matching."))] == []
    read_of = {one.field: one.memlab_value for one in job.taken}
    assert (read_of["checkpointing"], read_of["gathers_ahead"]) == (recomputes, gathers_ahead)
    assert (job.as_read["tensor_model_parallel_size"], job.as_read["world_size"]) == (2, 8)
    assert bool(job.as_read.get("fsdp_cpu_offload")) is is_on_host


_SIZES = """model.pretrained_model_name_or_path:
model.config: {_target_: transformers.CLASS, hidden_size: 2048, intermediate_size: 6144, num_hidden_layers: 12,
  num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, vocab_size: 151936, num_experts: 128,
  num_experts_per_tok: 8, moe_intermediate_size: 768, norm_topk_prob: true, tie_word_embeddings: false,
  rope_parameters: {rope_theta: 1000000.0, rope_type: default}, rms_norm_eps: 1.0e-06, model_type: of the class}
"""


def test_a_configuration_that_a_recipe_writes_out_is_the_model_s(tmp_path: Path) -> None:
    job = read(tmp_path, _SIZES.replace("CLASS", "Qwen3MoeConfig"))
    scenario, _ = job.required()
    assert scenario.architecture == find_architecture("qwen3-30b-a3b") and scenario.num_layers == 12
    assert not [one.key for one in job.not_modelled if one.key.startswith("model.config")]
    other = read(tmp_path, _SIZES.replace("CLASS", "Qwen3MoeConfig").replace("2048", "1024"))
    assert other.required()[0].architecture.hidden_size == 1024
    lacking = read(tmp_path, _SIZES.replace("CLASS", "Qwen3MoeConfig").replace("vocab_size", "other"))
    assert "model.config._target_" in str(lacking.not_supported) and "'vocab_size'" in str(lacking.not_supported)
    assert read(tmp_path, _SIZES.replace("CLASS", "BambaConfig")).not_supported is not None
    unknown = read(tmp_path, _SIZES.replace("CLASS", "Qwen3MoeConfig").replace("2048", "'${missing}'"))
    assert "model.config.hidden_size: a size of the model that is known only" in str(unknown.not_supported)


@pytest.mark.parametrize(("rows", "ranks"), [(160, 32), (20, 16)])
def test_ranks_that_the_file_does_not_say_can_share_the_experts(rows: int, ranks: int, tmp_path: Path) -> None:
    """Of two nodes, ranks in groups of 16; where the rows of no such number are whole, the fewest ranks stand."""
    changes = (
        "{model.pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B, distributed.dp_size: null, distributed.ep_size: 16, "
        f"ci.nodes: 8, step_scheduler.global_batch_size: {8 * rows}, step_scheduler.local_batch_size: 8}}"
    )
    job = read(tmp_path, changes)
    if rows % ranks == 0:
        assert job.required()[0].layout.world_size == ranks
    else:
        assert "must be a multiple of 128 (micro-batch 8 x data parallel 16)" in str(job.cannot_start)
