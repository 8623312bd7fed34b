"""Compares memlab's tables of keys and defaults with the frameworks' own configurations.

``python -m benchmarks.framework_defaults [FRAMEWORK …] [--checkout FRAMEWORK=FOLDER …]`` downloads the named version of
each framework with pip into a temporary folder, without what it depends on, and reads its configuration: Hydra's files
as YAML, dataclasses from their source, because importing them would need torch, CUDA and Transformer Engine. What is
not on PyPI is read from a checkout: of NeMo-RL, of verl (its engines that have models of their own), and of slime and
Megatron-LM from a folder that has a folder of slime and one per version of Megatron-LM, such as core_v0.16.1 and
core_r0.19.0. Their parsers are imported, with stand-ins for what these import. It prints what differs and is not among
the adapter's expected differences, and then exits with 1: a key of the framework that is in none of memlab's lists, a
key of memlab that the framework does not have, and a default that is another one.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

if not __package__:  # started by its path: python benchmarks/framework_defaults.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.framework_sources import Sources, Text
from memlab.jobs.frameworks import without_effect
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.keys import ABSENT
from memlab.jobs.frameworks.registry import TABLES


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one framework's own configuration is read, and what differs from memlab's tables on purpose."""

    packages: tuple[str, ...]
    """As pip takes them; the folders of `read` are theirs, in this order, then the checkout's."""
    needs_checkout: bool = False
    read: Callable[[Sources], dict[str, Any]]
    """Returns all keys with their defaults; `Text` where a default is computed."""
    expected: dict[str, str] = field(default_factory=dict)
    """Differences that have a reason, by key; ``key*`` stands for all keys that start so."""
    sections: tuple[str, ...] = ("",)
    """How the table's keys begin that the framework has to have; the others are those of another adapter's."""


def bridge(sources: Sources) -> dict[str, Any]:
    """Reads `ConfigContainer`, with the provider of Qwen's models with experts as the model."""
    module = "megatron.bridge.training.config"
    keys = sources.keys(module, "ConfigContainer", skipped=("model", "dataset", "peft"))
    del keys["model"]
    for dataset_module, name in _DATASETS:
        fields = sources.keys(f"megatron.bridge.{dataset_module}", name)
        keys |= {f"dataset.{key}": Text("the dataset's own") for key in fields}
    return keys | {f"model.{key}": value for key, value in bridge_provider(sources).items()}


_DATASETS = (
    ("data.builders.direct_hf_sft", "DirectHFSFTDatasetConfig"),
    ("data.builders.mock_vlm_sft", "MockVLMSFTDatasetConfig"),
    ("data.builders.energon", "EnergonDatasetConfig"),
    ("data.builders.gpt_sft", "GPTSFTDatasetConfig"),
    ("training.config", "GPTFIMDatasetConfig"),
)


def bridge_provider(sources: Sources) -> dict[str, Any]:
    """Returns the fields of a Qwen3-MoE model: the provider's, and what the model's bridge sets."""
    module = "megatron.bridge.models.gpt_provider"
    skipped = ("timers", "quant_recipe", "_pg_collection", "transformer_layer_spec", "tp_comm_overlap_cfg")
    keys = sources.keys(module, "GPTModelProvider", skipped=skipped)
    found = sources.find("megatron.bridge.models.qwen.qwen3_moe_bridge", "Qwen3MoEBridge")
    assert found is not None
    return keys | dict(_assigned(found[1], "provider"))


def verl(sources: Sources) -> dict[str, Any]:
    """Reads the composed configuration, and beneath it what Megatron-Bridge and Megatron-Core have."""
    prefixes = ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor.optim")
    fsdp = _verl_file(sources, "_generated_ppo_trainer")
    return fsdp | _verl_engine(sources, *prefixes) | _verl_file(sources, "_generated_ppo_megatron_trainer")


def verl_sft(sources: Sources) -> dict[str, Any]:
    """Reads the trainer's own file, and what ``engine=megatron optim=megatron model=hf_model`` choose beside it."""
    own = _verl_file(sources, "sft_trainer_engine")
    composed = _verl_file(sources, "_generated_ppo_megatron_trainer")
    groups = {"engine": "actor_rollout_ref.actor.megatron", "optim": "actor_rollout_ref.actor.optim"}
    groups |= {"model": "actor_rollout_ref.model", "profiler": "actor_rollout_ref.actor.profiler"}
    chosen = {
        f"{group}.{key.removeprefix(f'{prefix}.')}": value
        for group, prefix in groups.items()
        for key, value in composed.items()
        if key.startswith(f"{prefix}.")
    }
    return _verl_engine(sources, "engine", "optim") | chosen | {key: own[key] for key in own if key != "defaults"}


def verl_engine(name: str) -> Callable[[Sources], dict[str, Any]]:
    """Returns what reads the sections of an engine of verl that has models of its own, and of its optimizer."""

    def read(sources: Sources) -> dict[str, Any]:
        engine, optim = (_verl_file(sources, f"{group}/{name}") for group in ("engine", "optim"))
        keys = _under("engine", engine) | _under("optim", optim)
        return {key: value for key, value in keys.items() if not key.endswith("._target_")}

    return read


def _verl_file(sources: Sources, name: str) -> dict[str, Any]:
    (package,) = (folder for folder in sources.folders if (folder / "verl").is_dir())
    text = (package / f"verl/trainer/config/{name}.yaml").read_text(encoding="utf-8")
    return dict(_flat(yaml.safe_load(text)))


def _verl_engine(sources: Sources, engine: str, optim: str) -> dict[str, Any]:
    """Returns what verl's engine passes on to Megatron-Bridge and Megatron-Core, with what it sets."""
    found = sources.find("verl.workers.engine.megatron.transformer_impl", "MegatronEngine")
    assert found is not None
    beneath = bridge_provider(sources) | _literal(found[1], "provider_overrides")
    return (
        _under(f"{engine}.override_transformer_config", beneath)
        | _under(f"{engine}.override_ddp_config", ddp(sources))
        | _under(f"{optim}.override_optimizer_config", optimizer_config(sources))
    )


def skyrl(sources: Sources) -> dict[str, Any]:
    """Reads `SkyRLTrainConfig`, and beneath it what Megatron-Bridge and Megatron-Core have."""
    own = sources.keys("skyrl.train.config.config", "SkyRLTrainConfig")
    return _skyrl_megatron(sources, "trainer.policy.megatron_config") | own


def skyrl_sft(sources: Sources) -> dict[str, Any]:
    """Reads `SFTConfig`, and beneath it what Megatron-Bridge and Megatron-Core have."""
    return _skyrl_megatron(sources, "megatron_config") | sources.keys("skyrl.train.config.sft_config", "SFTConfig")


def _skyrl_megatron(sources: Sources, prefix: str) -> dict[str, Any]:
    beneath = bridge_provider(sources) | _constant(sources, "DEFAULT_TRANSFORMER_CONFIG_KWARGS")
    optimizer = optimizer_config(sources) | _constant(sources, "DEFAULT_MEGATRON_OPTIMIZER_KWARGS")
    return _under(f"{prefix}.transformer_config_kwargs", beneath) | _under(
        f"{prefix}.optimizer_config_kwargs", optimizer
    )


def ms_swift(sources: Sources) -> dict[str, Any]:
    """Reads the arguments of ``megatron sft``, ``pt`` and ``rlhf``, and beneath them `TransformerConfig`."""
    folder = "swift.megatron.arguments"
    keys = (
        sources.keys(f"{folder}.pretrain_args", "MegatronPretrainArguments")
        | sources.keys(f"{folder}.rlhf_args", "MegatronRLHFArguments")
        | sources.keys(f"{folder}.sft_args", "MegatronSftArguments")
    )
    passed_on = dict.fromkeys(transformer_config(sources), Text("mcore-bridge's own, or another argument's"))
    return _under("megatron_extra_kwargs", passed_on) | keys


def automodel(sources: Sources) -> dict[str, Any]:
    """Reads the dataclasses of the sections that have one; the others are arguments of what ``_target_`` names."""
    parts = "nemo_automodel.components"
    rows = (
        ("distributed", f"{parts}.distributed.config", "FSDP2Config"),
        ("distributed", f"{parts}.distributed.mesh", "ParallelismSizes"),
        ("distributed.moe", f"{parts}.distributed.config", "MoEParallelizerConfig"),
        ("model.backend", f"{parts}.models.common.utils", "BackendConfig"),
        ("step_scheduler", f"{parts}.training.step_scheduler", "StepSchedulerConfig"),
        ("lr_scheduler", f"{parts}.optim.optimizer", "LRSchedulerConfig"),
    )
    keys: dict[str, Any] = {}
    for section, module, name in rows:
        keys |= _under(section, sources.keys(module, name))
    return keys


def nemo_rl(sources: Sources) -> dict[str, Any]:
    """Reads the configuration of each algorithm and engine, and the examples, whose first one has the defaults."""
    keys: dict[str, Any] = {}
    for algorithm in ("grpo", "sft", "dpo", "rm", "distillation", "ppo"):
        keys |= sources.keys(f"nemo_rl.algorithms.{algorithm}", "MasterConfig")
    for engine, name in _ENGINES.items():
        own = sources.keys(f"nemo_rl.models.generation.{engine}.config", name)
        keys |= _under("policy.generation", own)
    (checkout,) = (folder for folder in sources.folders if (folder / "nemo_rl").is_dir())
    for file in sorted((checkout / "examples").rglob("*.yaml")):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(tree, dict) and ("policy" in tree or "defaults" in tree):
            keys |= {key: Text("an example's own") for key, _ in _flat(tree)}
    defaults = yaml.safe_load((checkout / "examples/configs/grpo_math_1B.yaml").read_text(encoding="utf-8"))
    keys |= dict(_flat(defaults))
    megatron = "policy.megatron_cfg"
    return (
        _under(f"{megatron}.model_overrides", dict.fromkeys(transformer_config(sources), Text("the model's own")))
        | _under(f"{megatron}.optimizer", optimizer_config(sources))
        | keys
    )


_ENGINES = {
    "vllm": "VllmConfig",
    "sglang": "SGLangConfig",
    "trtllm": "TrtllmConfig",
    "megatron": "MCoreGenerationConfig",
    "dynamo": "DynamoConfig",
}


def megatron_lm(sources: Sources) -> dict[str, Any]:
    """Reads the parsers of all versions of Megatron-LM that the checkout's folder has, the oldest version's last."""
    (folder,) = sources.folders
    keys: dict[str, Any] = {}
    for version in sorted(folder.glob("*/megatron/training/arguments.py"), reverse=True):
        keys |= _parsed(version.parents[2])
    return keys


def slime(sources: Sources) -> dict[str, Any]:
    """Reads slime's parser on top of Megatron-LM's of the oldest version that is beside it."""
    (folder,) = sources.folders
    oldest = min(folder.glob("*/megatron/training/arguments.py")).parents[2]
    (own,) = folder.glob("*/slime/utils/arguments.py")
    return megatron_lm(sources) | _parsed(oldest, own.parents[2])


def _parsed(*folders: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.command_line_arguments", *map(str, folders)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    keys: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return keys


def transformer_config(sources: Sources) -> dict[str, Any]:
    """Reads Megatron-Core's `TransformerConfig`."""
    skipped = ("timers", "quant_recipe")
    return sources.keys("megatron.core.transformer.transformer_config", "TransformerConfig", skipped=skipped)


def ddp(sources: Sources) -> dict[str, Any]:
    """Reads Megatron-Core's `DistributedDataParallelConfig`."""
    return sources.keys("megatron.core.distributed", "DistributedDataParallelConfig")


def optimizer_config(sources: Sources) -> dict[str, Any]:
    """Reads Megatron-Core's `OptimizerConfig`."""
    return sources.keys("megatron.core.optimizer.optimizer_config", "OptimizerConfig", skipped=("timers",))


def _under(prefix: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in keys.items()}


def _constant(sources: Sources, name: str) -> dict[str, Any]:
    (package,) = (folder for folder in sources.folders if (folder / "skyrl").is_dir())
    tree = ast.parse((package / "skyrl/train/config/config.py").read_text(encoding="utf-8"))
    return _literal(tree, name)


def _literal(tree: ast.AST, name: str) -> dict[str, Any]:
    """Returns a mapping that is assigned to a name, its values as `Text` where they are computed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == name:
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): _value(value) for key, value in pairs if key is not None}
    raise ValueError(f"no mapping is assigned to {name}: the framework's source has changed, correct the adapter")


def _assigned(cls: ast.ClassDef, owner: str) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a variable that a class's methods set."""
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if ast.unparse(target.value) == owner:
                yield target.attr, _value(node.value)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Text(ast.unparse(node))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str) and ("${" in value or value == "???"):
            yield f"{prefix}{name}", Text(value)
        else:
            yield f"{prefix}{name}", value


def _for(reason: str, *keys: str, prefix: str = "") -> dict[str, str]:
    return dict.fromkeys((f"{prefix}{key}" for key in keys), reason)


def _beneath(transformer: str, ddp_key: str | None, optimizer: str) -> dict[str, str]:
    """Returns the expected differences of what a framework passes on to Megatron-Bridge and Megatron-Core."""
    older = "megatron-core 0.16.1 has it"
    return (
        _for(
            "the published model's own config sets it", "attention_dropout", "position_embedding_type",
            "share_embeddings_and_output_weights", "qk_layernorm", "moe_router_topk", "softmax_type",
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
            prefix=f"{transformer}.",
        )
        | _for(_OF_LATENT_ATTENTION, *_LATENT, prefix=f"{transformer}.")
        | _for(_LATER, *_OF_MAIN, "logit_dtype", prefix=f"{transformer}.")
        | ({} if ddp_key is None else {f"{ddp_key}.megatron_fsdp_version": _LATER})
        | {f"{optimizer}.muon_use_syrk": _LATER}
        | _for(
            older, "moe_use_legacy_grouped_gemm", "moe_extended_tp", "async_tensor_model_parallel_allreduce",
            prefix=f"{transformer}.",
        )
        | _for("experts in every layer, as without a value", f"{transformer}.moe_layer_freq")
        | _for("of hybrid models' providers", "hybrid_override_pattern", "mamba_chunk_size", prefix=f"{transformer}.")
        | _for(
            "of the providers of Llama 3.1 and of layers of different shapes, and of the base class of providers",
            "low_freq_factor", "high_freq_factor", "old_context_len", "scale_factor",
            "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "generation_config",
            prefix=f"{transformer}.",
        )
        | ({} if ddp_key is None else {f"{ddp_key}.preserve_fp32_weights": older})
        | {
            f"{optimizer}.muon_use_nesterov": older,
            f"{optimizer}.offload_optimizer_states": "of Megatron-LM's development branch (pull request 2760); "
            "Megatron-Bridge's performance recipes use it",
        }
    )  # fmt: skip


def _headed(name: str, *headings: str, prefix: str = "") -> dict[str, str]:
    """Returns the keys of a list that stand under these headings, below a prefix, each with its heading."""
    keys = without_effect.headed_keys(name)
    return {f"{prefix}{key}": heading for heading, key in keys if heading.startswith(headings)}


_OF_A_LOG = (
    "params_dtype", "data_parallel_size", "transformer_pipeline_model_parallel_size", "variable_seq_lengths", "rank",
    "iteration", "start_time", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
    "grpo_samples_per_iteration", "virtual_pipeline_model_parallel_size", "world_size", "cpu_offloading",
    "use_custom_fsdp",
)  # fmt: skip
_LATER = "main of August 2026 has it"
_OF_MAIN = (
    "batch_invariant_backend", "enable_mhc_connections", "gdp_cutedsl_kernel", "gdp_num_chunk_states_to_recompute",
    "gdp_num_householder", "gtp_remat_opt_in_modules", "mhc_init_gating_factor", "mhc_num_residual_streams",
    "mhc_recompute_layer_num", "mhc_sinkhorn_iterations", "moe_combine_bwd_dtype", "moe_dispatch_fwd_dtype",
    "moe_use_grouped_tensor", "mtp_hsm",
)  # fmt: skip
"""Of TransformerConfig."""
_IN_CODE = "memlab's module looks at it in code, with other arguments"
_MEGATRON_LM = (
    dict.fromkeys(_OF_A_LOG, "set when the job starts; a log has it")
    | _headed("megatron_lm", "of the launcher")
    | _for("an argument where Kitchen is installed", "kitchen_config_file", "kitchen_recipe_number")
    | _for("arguments of examples/multimodal", "language_model_type", "vision_model_type")
    | _for(
        _IN_CODE, "num_query_groups", "normalization", "add_bias_linear", "openai_gelu", "bias_gelu_fusion",
        "no_bias_gelu_fusion", "bias_dropout_fusion", "no_bias_dropout_fusion", "vocab_file", "tokenizer_type",
    )
    | _for(
        "what memlab's models have where no value is given", "softmax_type", "moe_router_score_function",
        "moe_layer_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
    )
    | _for("memlab's code reads it with the pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio")
    | _for("a field of hybrid models' configuration", "mamba_chunk_size")
    | _for(_LATER, *_OF_MAIN, "megatron_fsdp_version", "muon_use_syrk", "logit_dtype", "output_logit_dtype")
    | _for(
        _LATER, "rl_max_inflight_requests", "rl_durable_rollout_bank", "rl_rollout_bank_*", "otel_*", "use_gigatoken",
        "ckpt_fully_parallel_load_per_rank_objects", "ckpt_pg_tensors_cache_*", "ckpt_drop_redundant_extra_state",
        "save_tokenizer_assets", "no_save_tokenizer_assets", "disable_save_tokenizer_assets",
        "gtp_remat_reduce_scatter_with_fp32_accumulation", "gtp_remat_nccl_ub", "gtp_expert_remat_nccl_ub",
    )
    | _for("an argument of BigCode's fork", "attention_head_type")
)  # fmt: skip
_SWIFT_3 = (
    "activation_func_clamp_value", "add_qkv_bias", "attention_dropout", "deterministic_mode", "hidden_dropout", "load",
    "microbatch_group_size_per_virtual_pipeline_stage", "moe_apply_probs_on_input", "moe_layer_freq",
    "moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_score_function",
    "moe_shared_expert_intermediate_size", "multi_latent_attention", "no_bias_swiglu_fusion", "no_rope_freq",
    "no_rope_fusion", "normalization", "num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "qk_l2_norm", "rotary_interleaved", "seq_length",
    "softmax_type", "train_type", "glu_linear_offset", "moe_router_num_groups", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "no_gradient_accumulation_fusion", "window_attn_skip_freq", "window_size",
)  # fmt: skip
_OLDER_CORE = (
    "async_tensor_model_parallel_allreduce", "hybrid_override_pattern", "moe_extended_tp",
    "moe_use_legacy_grouped_gemm", "position_embedding_type",
)  # fmt: skip
_OF_PROVIDERS = (
    "hf_model_id", "make_vocab_size_divisible_by", "mamba_chunk_size", "rotary_base", "rotary_percent", "seq_length",
    "share_embeddings_and_output_weights", "should_pad_vocab", "vocab_size",
)  # fmt: skip
_OF_OTHER_VERSIONS = "of megatron-core 0.16.1, or of a model's provider"
_LATENT = (
    "kv_lora_rank", "mla_down_proj_fusion", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "rope_type",
    "v_head_dim", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "cache_mla_latents",
)  # fmt: skip
_OF_LATENT_ATTENTION = "of the configuration of models with latent attention (MLATransformerConfig)"
_READ_WITH_ADAPTERS = "the table has no row: memlab's code reads it where the job trains adapters"
_READ_BY_CODE = "the table has no row: memlab's code reads it together with other keys"
_REPORTED = "memlab reports it as unknown"
_MXFP8_BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
_NEMO = "policy.megatron_cfg"
_CORE, _BRIDGE = "megatron-core==0.19.2", "megatron-bridge==0.6.2"
_VARIABLE = "a variable of the environment, in an open mapping"
_EARLIER = "earlier versions have it"
_LOG_PROBS = "the framework computes log-probabilities itself"
_CORE_ATTENTION = "Megatron-Core takes core_attn where none is given"
_OWN_KEY = "the framework sets it from a key of its own"
_ACTOR = "actor_rollout_ref.actor"
_ASYNC_SAVE = ("async_dist_ckpt_save", "async_dist_ckpt_strategy", "async_save_prestage_to_cpu")


def _of_verl(engine: str, optim: str, model: str) -> dict[str, str]:
    """Returns the expected differences of an engine of verl, below its prefixes."""
    transformer, gradients = f"{engine}.override_transformer_config", f"{engine}.override_ddp_config"
    return (
        _beneath(transformer, gradients, f"{optim}.override_optimizer_config")
        | _for(_LATER, f"{engine}.grad_offload")
        | _for(
            "of MindSpeed on NPUs, and of Megatron-LM's arguments", "use_flash_attn", "use_fused_rmsnorm",
            "use_fused_swiglu", "use_naive_l2norm", "swiglu", "use_distributed_optimizer", "context_parallel_algo",
            "context_parallel_kv_cache_policy", prefix=f"{transformer}.",
        )
        | _for("of a branch of verl", f"{engine}.offload.*")
        | _for("every job names its model", f"{model}.path")
        | _for(_CORE_ATTENTION, f"{transformer}.recompute_modules")
        | _for(_LOG_PROBS, f"{transformer}.cross_entropy_loss_fusion")
        | _for(_OWN_KEY, f"{transformer}.bf16")
        | _for(_READ_BY_CODE, f"{engine}.sequence_parallel")
        | _for(_READ_WITH_ADAPTERS, f"{model}.lora.a2a_experimental")
        | _for(
            "of Megatron-Bridge's LoRA since 0.6", "normalize_moe_lora", "share_expert_adapters",
            prefix=f"{model}.lora.",
        )
        | _for("of vLLM's adapters", f"{model}.lora.fully_sharded_loras")
        | _for(_REPORTED, f"{optim}.override_optimizer_config.{_MXFP8_BUFFER}")
        | _for(
            "the published model's own config sets it", "moe_aux_loss_coeff", "moe_router_score_function",
            prefix=f"{transformer}.",
        )
        | _for("memlab asks for the version: fp32 since 2026-08-20", f"{gradients}.grad_reduce_in_fp32")
    )  # fmt: skip


_REFUSED = "memlab refuses the engine's models as a whole"
_OF_VERL_S_ENGINES = {
    "veomni": _for(_REFUSED, "engine.moe_implementation"),
    "automodel": _for(
        _REFUSED, "attn", "dispatcher", "experts", "linear", "rms_norm", "rope_fusion", prefix="engine.backend_config."
    ),
    "torchtitan": _for(_READ_BY_CODE, "engine.attn_type"),
}  # fmt: skip


def _of_skyrl(prefix: str) -> dict[str, str]:
    """Returns the expected differences of a `MegatronConfig` of SkyRL, below its prefix."""
    transformer = f"{prefix}.transformer_config_kwargs"
    return (
        _beneath(transformer, None, f"{prefix}.optimizer_config_kwargs")
        | _for(_LATER, *_ASYNC_SAVE, prefix=f"{prefix}.")
        | _for(
            "of a branch of August 2026 (commit 0010f48da)", "fp8", "fp8_recipe", "fp8_param", prefix=f"{prefix}."
        )
        | _for(_CORE_ATTENTION, f"{transformer}.recompute_modules")
        | _for(_LOG_PROBS, f"{transformer}.cross_entropy_loss_fusion")
        | _for(
            _OWN_KEY, "moe_aux_loss_coeff", "tensor_model_parallel_size", "context_parallel_size",
            "pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel", "bf16",
            prefix=f"{transformer}.",
        )
        | _for(_REPORTED, f"{prefix}.optimizer_config_kwargs.{_MXFP8_BUFFER}")
    )  # fmt: skip


ADAPTERS = {
    "bridge": Adapter(
        packages=(_BRIDGE, _CORE),
        read=bridge,
        expected=_beneath("model", "ddp", "optimizer")
        | _for("of hybrid models' providers", "model.hybrid_layer_pattern")
        | _for("the published model's own config sets it", "model.gated_linear_unit", "model.normalization")
        | _for(_VARIABLE, "ENV_VARS*", "env_vars.*")
        | _for("Megatron-Bridge writes it into run_config.yaml", "data_parallel_size", "world_size")
        | _for("flags of torchrun and of run_recipe.py", "nnodes", "nproc_per_node", "recipe")
        | _headed("bridge_dataset", "not of 0.6.2's classes", prefix="dataset.")
        | _for(
            _EARLIER, "pack_sequences_in_batch", "packed_sequence_specs.packed_sequence_size", prefix="dataset."
        )
        | _for(
            "of Megatron-Core's GPTDatasetConfig, main of August 2026", "sft_mock_dataset_config_json",
            "varlen_mock_dataset_config_json", "varlen_sbhd_validation", prefix="dataset.",
        )
        | _for(
            _LATER, "tokenizer.use_gigatoken", "checkpoint.ckpt_fully_parallel_load_per_rank_objects",
            "checkpoint.ckpt_pg_tensors_cache_*",
        )
        | _for("an argument of the dataset", "dataset.dataset_kwargs.get_attention_mask_from_fusion")
        | _headed("bridge", "options of run_recipe.py")
        | _for("of the providers of models with images or sound", "model.freeze_*")
        | _for("memlab's reader of recipes names the class", "model.class")
        | _for("options of run_recipe.py", "step_func", "deterministic", "packed_sequence")
        | _for(
            "the published model's own config sets it", "rotary_base", "rotary_percent", "layernorm_epsilon",
            "moe_aux_loss_coeff", "moe_router_score_function", prefix="model.",
        )
        | _headed("bridge", "recipe functions set these", "run_recipe.py calls it again")
        | _for("of the class that peft._target_ names", "peft.*")
        | _for(_READ_BY_CODE, "comm_overlap.overlap_param_gather_with_optimizer_step")
        | _for("of the provider for distillation", "model.kd_config*", "model.distill_submodule", "model.teacher")
        | _for(
            "every recipe sets it", "model.seq_length", "model.bf16", "train.micro_batch_size",
            "optimizer.use_distributed_optimizer",
        )
        | _for("memlab warns that it takes what the recipe bf16_mixed has", "ddp.grad_reduce_in_fp32")
        | _for("comm_overlap, which every recipe has, sets it by the pipeline", "model.overlap_p2p_comm"),
    ),
    "verl": Adapter(
        packages=("verl==0.9.1", _BRIDGE, _CORE),
        read=verl,
        expected=_of_verl(f"{_ACTOR}.megatron", f"{_ACTOR}.optim", "actor_rollout_ref.model")
        | _for("a field of AlgoConfig that its file leaves out", "algorithm.gdpo_reward_keys")
        | _for(
            _EARLIER, "trainer.use_legacy_worker_impl",
        )
        | _for(
            _LATER, f"{_ACTOR}.router_replay.*", "actor_rollout_ref.ref.megatron.grad_offload",
            "actor_rollout_ref.ref.router_replay.*", "critic.megatron.grad_offload",
        )
        | _for(_EARLIER, "actor_rollout_ref.rollout.update_weights_bucket_megabytes")
        | _for("it chooses among verl's configurations", "model_engine", "config_name")
        | _for(
            "of verl's asynchronous trainers", "async_training.*", "rollout.*",
            "actor_rollout_ref.rollout.standalone_gpu_memory_utilization",
            "actor_rollout_ref.actor.use_rollout_log_probs",
        )
        | _for(
            "copies that a resolved configuration has", "actor_rollout_ref.rollout.mtp.*",
            "actor_rollout_ref.rollout.qat.*",
        )
        | _for(
            "arguments of the engine or of the sender of weights, in an open mapping", "engine_kwargs.*",
            "checkpoint_engine.engine_kwargs.*", prefix="actor_rollout_ref.rollout.",
        )
        | _for("of the rollout's class, for TensorRT-LLM", "actor_rollout_ref.rollout.moe_tensor_parallel_size")
        | _for("of a branch of verl", "critic.megatron.offload.*")
        | _for(_VARIABLE, "ray_kwargs.ray_init.runtime_env.env_vars.*"),
    ),
    "verl-sft": Adapter(
        packages=("verl==0.9.1", _BRIDGE, _CORE),
        read=verl_sft,
        expected=_of_verl("engine", "optim", "model") | _for("flags of torchrun", "nnodes", "nproc_per_node")
        | _for("verl fills it in for the engine that is chosen", "engine.strategy"),
    ),
    **{
        f"verl-sft-{name}": Adapter(
            packages=(),
            needs_checkout=True,
            read=verl_engine(name),
            sections=(),
            expected=reasons,
        )
        for name, reasons in _OF_VERL_S_ENGINES.items()
    },
    "skyrl": Adapter(
        packages=("skyrl==0.3.0", _BRIDGE, _CORE),
        read=skyrl,
        expected=_of_skyrl("trainer.policy.megatron_config")
        | _for(
            _LATER, "generator.inference_engine.delta_weight_sync.*",
            "generator.inference_engine.offload_kv_for_weight_sync", "trainer.algorithm.cispo.cispo_anchor",
            "trainer.vocab_entropy_chunk_memory_mb", "trainer.vocab_entropy_chunk_size",
        )
        | _for(_LATER, *_ASYNC_SAVE, prefix="trainer.ref.megatron_config.")
        | _for(
            _EARLIER, "generator.gpu_memory_utilization", "generator.inference_engine_tensor_parallel_size",
            "generator.weight_transfer_threshold_cuda_ipc_GB", "trainer.use_sample_packing",
            "generator.inference_engine.async_engine", "generator.backend", "generator.async_engine",
            "generator.enable_http_endpoint", "generator.http_endpoint_*", "generator.num_inference_engines",
            "generator.run_engines_locally", "generator.weight_sync_backend",
        )
        | _for("arguments of the engine, in an open mapping", "generator.inference_engine.engine_init_kwargs.*")
        | _for("no module is excluded, either way", "trainer.policy.model.lora.exclude_modules")
        | _for("of SkyRL's examples", "trainer.algorithm.overlong_buffer_*", "trainer.num_dummy_steps")
        | _for("of forks with Liger's kernels", "trainer.ref.use_liger_kernel")
        | _for("main_base.py reads it before the configuration", "trainer.override_entrypoint"),
    ),
    "skyrl-sft": Adapter(
        packages=("skyrl==0.3.0", _BRIDGE, _CORE),
        read=skyrl_sft,
        expected=_of_skyrl("megatron_config")
        | _for(_EARLIER, "use_sample_packing")
        | _for("no module is excluded, either way", "model.lora.exclude_modules")
        | _for(
            _LATER, "train_dataset*", "pretokenized_dataset_paths", "eval_datasets", "eval_dataset_splits",
            "eval_dataset_names", "eval_pretokenized_dataset_paths", "async_batch_collation",
        ),
    ),
    "ms-swift": Adapter(
        packages=("ms-swift==4.6.0", _CORE),
        read=ms_swift,
        expected=_headed("ms_swift", "derived when", "of ms-swift 3.12", "of the launcher", "groups of a job")
        | _for("of ms-swift 3.12", *_SWIFT_3)
        | _for("variables of the environment", "NNODES", "NPROC_PER_NODE")
        | _for("of a job under Ray", "colocate_groups", "config", "nnodes", "train.gpus")
        | _for(_READ_WITH_ADAPTERS, "target_regex", "modules_to_save", "lora_bias", "lora_dtype")
        | _for("of models with images or sound", "freeze_*")
        | _for("derived when the job starts; args.json has it", "is_multimodal", "world_size", "muon_nesterov")
        | _for("derived from the model's own type", "bf16")
        | _for(_OF_OTHER_VERSIONS, *_OLDER_CORE, *_OF_PROVIDERS, prefix="megatron_extra_kwargs.")
        | _for(_OF_LATENT_ATTENTION, *_LATENT, prefix="megatron_extra_kwargs.")
        | _for(_LATER, *_OF_MAIN, prefix="megatron_extra_kwargs.")
        | _for(
            "ms-swift has it in megatron_extra_kwargs only", "cuda_graph_impl", "moe_router_force_load_balancing",
            "moe_router_fusion", "attention_output_gate", "experimental_attention_variant", "linear_attention_freq",
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
            "linear_value_head_dim", "moe_deepep_num_sms", "moe_flex_dispatcher_backend", "moe_latent_size",
            "mtp_detach_heads",
        )
        | _for(
            "memlab reports it as unknown: the argument of ms-swift itself sets it",
            "virtual_pipeline_model_parallel_size", "num_layers", "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout", prefix="megatron_extra_kwargs.",
        ),
    ),
    "automodel": Adapter(
        packages=("nemo-automodel==0.7.0",),
        read=automodel,
        expected=_for(
            "an argument of what _target_ names, or of a section that no dataclass of these reads",
            "_*", "autocast.*", "autopipeline*", "benchmark.*", "ci*", "checkpoint*", "clip_grad_norm.*", "comet*",
            "compile*",
            "data*", "dist_env.*", "embedding_row_repair.*", "fp8*", "longalign", "loss_fn.*", "mlflow*", "model.a*",
            "model.c*", "model.dtype", "model.force_hf", "model.load_base_model", "model.num_hidden_layers",
            "model.output_hidden_states", "model.pretrained_model_name_or_path", "model.t*", "model.use_*", "neftune.*",
            "nvtx", "optimizer.*", "packed_sequence.*", "parallelizer.*", "peft*", "freeze_config.*",
            "distributed.offload_policy.*", "prewarm.*", "qat*", "quantization",
            "recipe", "rng.*", "sdpa_method", "seed", "tokenizer*", "tool_call_eval.*",
            "validation_data*", "wandb*",
        )
        | _for(_LATER, "moe_metrics.*")
        | _for("torch's MixedPrecisionPolicy, whose default is the strategy's", "distributed.mp_policy.*")
        | _for("of a section with a dataclass of its own", "distributed.pipeline*", "distributed.strategy")
        | _for("the recipe itself reads it", "step_scheduler.dp_size", "step_scheduler.local_batch_size")
        | _for("there is no such section by default", "model.backend.te_fp8.recipe")
        | _for("recipes for diffusion read these sections by themselves", "flow_matching.*", "fsdp.*", "performance.*"),
    ),
    "nemo-rl": Adapter(
        packages=(_CORE,),
        needs_checkout=True,
        read=nemo_rl,
        expected=_for("memlab's reader obeys it", "defaults", "data._override_", f"{_NEMO}._override_")
        | _for("every job names its model", "policy.model_name")
        | _for(_OF_OTHER_VERSIONS, *_OLDER_CORE, *_OF_PROVIDERS, prefix=f"{_NEMO}.model_overrides.")
        | _for(_OF_LATENT_ATTENTION, *_LATENT, prefix=f"{_NEMO}.model_overrides.")
        | _for(_LATER, *_OF_MAIN, prefix=f"{_NEMO}.model_overrides.")
        | _for(
            "NeMo-RL derives it from fp8_cfg", f"{_NEMO}.optimizer.{_MXFP8_BUFFER}",
            f"{_NEMO}.distributed_data_parallel_config.{_MXFP8_BUFFER}",
        )
        | _for(_READ_WITH_ADAPTERS, f"{_NEMO}.peft.a2a_experimental")
        | _for(_READ_BY_CODE, "policy.reward_model_cfg.enabled")
        | _for("NeMo-RL's refit reads it, and no example has it", f"{_NEMO}.pipeline_model_parallel_layout")
        | _for(
            "memlab reports it as unknown: NeMo-RL refuses it beside its own key", "apply_rope_fusion",
            "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "recompute_granularity", "fp8",
            "fp8_recipe", "fp8_param", "fine_grained_activation_offloading", "offload_modules",
            "gradient_accumulation_fusion", "bias_activation_fusion", "pipeline_model_parallel_layout",
            prefix=f"{_NEMO}.model_overrides.",
        )
        | _for("of megatron-core 0.16.1", f"{_NEMO}.optimizer.muon_use_nesterov")
        | _for(_LATER, f"{_NEMO}.optimizer.muon_use_syrk")
        | _for("of Megatron-LM's development branch", f"{_NEMO}.optimizer.offload_optimizer_states")
        | _for(_VARIABLE, f"{_NEMO}.env_vars.*")
        | _for(
            "setup.py reads it, and no example has it", f"{_NEMO}.layernorm_epsilon",
            "policy.offload_optimizer_for_refit",
        )
        | _for("of models with images or sound", f"{_NEMO}.freeze_*")
        | _for("arguments of the engine, in an open mapping", "vllm_kwargs.*", "sglang_kwargs.*",
               prefix="policy.generation.")
        | _for(_EARLIER, f"{_NEMO}.use_linear_ce_fusion_loss", f"{_NEMO}.moe_layer_recompute")
        | _for("a job of Megatron switches it on", f"{_NEMO}.enabled"),
    ),
    "megatron-lm": Adapter(packages=(), needs_checkout=True, read=megatron_lm, expected=_MEGATRON_LM),
    "slime": Adapter(
        packages=(),
        needs_checkout=True,
        read=slime,
        expected={key: reason for key, reason in _MEGATRON_LM.items() if key != "world_size"}
        | _headed("slime", "derived from", "of the launcher", "arguments of SGLang")
        | _for("slime parses it first, by a parser of its own", "train_backend", "debug_rollout_only",
               "debug_train_only", "load_debug_rollout_data")
        | _for("of Ray's command", "runtime_env_json")
        | _for("slime sets it after parsing", "bf16", "use_distributed_optimizer")
        | _for(_EARLIER, "lora_rank", "qkv_format"),
    ),
}  # fmt: skip


def differences(framework: Framework, theirs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each key that differs between a framework's configuration and memlab's tables, with how it differs."""
    for key in theirs:
        if not framework.knows(key):
            yield key, "is in none of memlab's lists"
    mappings = {key[:dot] for key in theirs for dot, letter in enumerate(key) if letter == "."}
    for key in sorted(framework.names() | set(framework.without_effect)):
        if key not in theirs and key not in mappings and not key.endswith(".*"):
            yield key, "is in memlab's lists, and the framework does not have it"
    yield from _other_defaults(framework, theirs)
    yield from _other_notes(framework, theirs)


def _other_defaults(framework: Framework, theirs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    first: dict[str, str] = {}
    for row in framework.keys:
        first.setdefault(row.field, row.name)
    for row in framework.keys:
        value = theirs.get(row.name)
        if row.name not in theirs or isinstance(value, Text) or first[row.field] != row.name:
            continue
        default, read = None if row.default is ABSENT else row.default, row.conversion.read(value)
        if read != default and not (default is None and read in (False, 0, ())):
            yield row.name, f"has the default {value!r}, memlab's table {row.conversion.write(default)!r}"


def _other_notes(framework: Framework, theirs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for missing in framework.missing:
        value = theirs.get(missing.name)
        if missing.name not in theirs or isinstance(value, Text):
            continue
        is_noted = missing.default is not ABSENT and missing.is_on(missing.default)
        if missing.is_on(value) != is_noted:
            yield missing.name, f"has the default {value!r}, memlab {'notes' if is_noted else 'does not note'} it"


def unexpected(found: list[tuple[str, str]], expected: dict[str, str]) -> list[tuple[str, str]]:
    """Returns the differences without a reason, and the reasons without a difference."""
    reasons = {key: next((name for name in expected if _covers(name, key)), None) for key, _ in found}
    left = [(key, text) for key, text in found if reasons[key] is None]
    unused = (name for name, why in expected.items() if name not in reasons.values() and why != _LATER)
    return left + [(name, "is expected to differ, and does not") for name in unused]


def _covers(name: str, key: str) -> bool:
    return name == key or (name.endswith("*") and key.startswith(name[:-1]))


def packages_in(folder: Path, packages: tuple[str, ...]) -> list[Path]:
    """Downloads packages without what they depend on, and unpacks each into a folder of its own."""
    folders = []
    for package in packages:
        wheels = folder / f"{package}.wheels"
        options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--quiet", "--dest", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
        (wheel,) = wheels.glob("*.whl")
        folders.append(folder / package)
        zipfile.ZipFile(wheel).extractall(folders[-1])
    return folders


def main(arguments: list[str] | None = None) -> int:
    """Compares the frameworks that are named, or all; returns 1 if something differs without a reason."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"of {', '.join(ADAPTERS)} (default: all)")
    parser.add_argument("--checkout", action="append", default=[], metavar="FRAMEWORK=FOLDER")
    given = parser.parse_args(arguments)
    checkouts = dict(text.split("=", 1) for text in given.checkout)
    if unknown := {*given.frameworks, *checkouts} - ADAPTERS.keys():
        parser.error(f"unknown framework {', '.join(sorted(unknown))}, must be of {', '.join(ADAPTERS)}")
    print(f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}")
    count = 0
    for name in given.frameworks or ADAPTERS:
        adapter = ADAPTERS[name]
        if adapter.needs_checkout and name not in checkouts:
            print(f"{name}: not compared, it is not on PyPI: give --checkout {name}=FOLDER")
            continue
        with tempfile.TemporaryDirectory() as folder:
            folders = packages_in(Path(folder), adapter.packages)
            folders += [Path(checkouts[name])] if name in checkouts else []
            theirs = adapter.read(Sources(folders))
        every = differences(TABLES[name], theirs)
        found = [one for one in every if one[0] in theirs or one[0].startswith(adapter.sections)]
        left = unexpected(found, adapter.expected)
        print(f"{name}: {', '.join(adapter.packages)}{f', {checkouts[name]}' if name in checkouts else ''}")
        print(f"  {len(theirs)} keys, {len(found)} differences, {len(left)} without a reason")
        for key, text in left:
            print(f"  {key} {text}")
        count += len(left)
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
