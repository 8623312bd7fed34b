"""Compares memlab's tables of keys and defaults with the frameworks' own configurations.

``python -m benchmarks.framework_defaults [FRAMEWORK …] [--checkout FRAMEWORK=FOLDER …]`` downloads the named version of
each framework with pip into a temporary folder, without what it depends on, and reads its configuration: Hydra's files
as YAML, dataclasses from their source, because importing them would need torch, CUDA and Transformer Engine. What is
not on PyPI is read from a checkout. It prints what differs and is not among the adapter's expected differences, and
then exits with 1: a key of the framework that is in none of memlab's lists, a key of memlab that the framework does not
have, and a default that is another one.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.framework_sources import Sources, Text
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.keys import ABSENT
from memlab.jobs.frameworks.registry import FRAMEWORKS


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


def bridge(sources: Sources) -> dict[str, Any]:
    """Reads `ConfigContainer`, with the provider of Qwen's models with experts as the model."""
    module = "megatron.bridge.training.config"
    keys = sources.keys(module, "ConfigContainer", skipped=("model", "dataset", "peft"))
    del keys["model"]
    return keys | {f"model.{key}": value for key, value in bridge_provider(sources).items()}


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
    return _verl_engine(sources, *prefixes) | _verl_file(sources, "_generated_ppo_megatron_trainer")


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
            "share_embeddings_and_output_weights", "qk_layernorm", "moe_router_topk",
            prefix=f"{transformer}.",
        )
        | _for(
            older, "moe_use_legacy_grouped_gemm", "moe_extended_tp", "async_tensor_model_parallel_allreduce",
            prefix=f"{transformer}.",
        )
        | _for(
            "of hybrid models' providers", "hybrid_layer_pattern", "hybrid_override_pattern", prefix=f"{transformer}."
        )
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


_CORE, _BRIDGE = "megatron-core==0.19.2", "megatron-bridge==0.6.2"
_VARIABLE = "a variable of the environment, in an open mapping"
_LATER = "main of August 2026 has it"
_EARLIER = "earlier versions have it"
_LOG_PROBS = "the framework computes log-probabilities itself"
_CORE_ATTENTION = "Megatron-Core takes core_attn where none is given"
_OWN_KEY = "the framework sets it from a key of its own"
_ACTOR = "actor_rollout_ref.actor"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ASYNC_SAVE = ("async_dist_ckpt_save", "async_dist_ckpt_strategy", "async_save_prestage_to_cpu")


def _of_verl(engine: str, optim: str, model: str) -> dict[str, str]:
    """Returns the expected differences of an engine of verl, below its prefixes."""
    transformer, gradients = f"{engine}.override_transformer_config", f"{engine}.override_ddp_config"
    return (
        _beneath(transformer, gradients, f"{optim}.override_optimizer_config")
        | _for(_LATER, f"{engine}.grad_offload")
        | _for("of a branch of verl", f"{engine}.offload.*")
        | _for("every job names its model", f"{model}.path")
        | _for(_CORE_ATTENTION, f"{transformer}.recompute_modules")
        | _for(_LOG_PROBS, f"{transformer}.cross_entropy_loss_fusion")
        | _for(_OWN_KEY, f"{transformer}.bf16")
        | _for("memlab asks for the version: fp32 since 2026-08-20", f"{gradients}.grad_reduce_in_fp32")
    )


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
            _OWN_KEY, "moe_router_dtype", "tensor_model_parallel_size", "context_parallel_size",
            "pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel", "bf16",
            prefix=f"{transformer}.",
        )
    )  # fmt: skip


ADAPTERS = {
    "bridge": Adapter(
        packages=(_BRIDGE, _CORE),
        read=bridge,
        expected=_beneath("model", "ddp", "optimizer")
        | _for(_VARIABLE, "ENV_VARS", "ENV_VARS.*", *(f"env_vars.{name}" for name in _ALLOCATOR), "env_vars.NVTE_*")
        | _for("Megatron-Bridge writes it into run_config.yaml", "data_parallel_size", "world_size")
        | _for("flags of torchrun and of run_recipe.py", "nnodes", "nproc_per_node", "recipe")
        | _for("of the classes of datasets", "dataset.seq_length", "dataset.sequence_length")
        | _for(
            "the published model's own config sets it", "rotary_base", "rotary_percent", "layernorm_epsilon",
            "moe_aux_loss_coeff", prefix="model.",
        )
        | _for("of the provider for distillation", "model.kd_config", "model.distill_submodule", "model.teacher")
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
        | _for(
            _LATER, f"{_ACTOR}.router_replay.*", "actor_rollout_ref.ref.megatron.grad_offload",
            "actor_rollout_ref.ref.router_replay.*", "critic.megatron.grad_offload",
        )
        | _for(_EARLIER, "actor_rollout_ref.rollout.update_weights_bucket_megabytes")
        | _for("it chooses among verl's configurations", "model_engine")
        | _for(_VARIABLE, *_ALLOCATOR, prefix="ray_kwargs.ray_init.runtime_env.env_vars."),
    ),
    "verl-sft": Adapter(
        packages=("verl==0.9.1", _BRIDGE, _CORE),
        read=verl_sft,
        expected=_of_verl("engine", "optim", "model") | _for("flags of torchrun", "nnodes", "nproc_per_node")
        | _for("verl fills it in for the engine that is chosen", "engine.strategy"),
    ),
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
        ),
    ),
    "skyrl-sft": Adapter(
        packages=("skyrl==0.3.0", _BRIDGE, _CORE),
        read=skyrl_sft,
        expected=_of_skyrl("megatron_config") | _for(_EARLIER, "use_sample_packing"),
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
    return left + [(name, "is expected to differ, and does not") for name in expected if name not in reasons.values()]


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
        found = list(differences(FRAMEWORKS[name], theirs))
        left = unexpected(found, adapter.expected)
        print(f"{name}: {', '.join(adapter.packages)}{f', {checkouts[name]}' if name in checkouts else ''}")
        print(f"  {len(theirs)} keys, {len(found)} differences, {len(left)} without a reason")
        for key, text in left:
            print(f"  {key} {text}")
        count += len(left)
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
