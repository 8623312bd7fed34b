"""verl's engines that build models of classes that memlab does not have: VeOmni, NeMo Automodel and torchtitan.

Their jobs are not predicted, and all their fields are named. Names and defaults:
``verl/trainer/config/{engine,optim}/{veomni,automodel,torchtitan}.yaml``, and what they do ``verl/workers/engine/``
(1dda039b, August 2026; VeOmni d9774494).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.jobs.frameworks import verl_fsdp, verl_sft_fsdp
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    RESHARDING,
    attention_key,
    block,
    check_family,
    check_shards,
    peft_keys,
    take_attention,
    take_checkpointed_layers,
    take_fused_adam,
    take_kept,
    take_logprobs,
    take_optimizer,
    take_peft,
    take_resharding,
    take_shards,
    take_types,
    take_ulysses,
)
from memlab.jobs.frameworks.keys import (
    COUNT,
    LONG_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    Conversion,
    Key,
    Missing,
    is_false,
    is_given,
    other_than,
)
from memlab.jobs.frameworks.reinforcement import note_replaced_values
from memlab.jobs.frameworks.verl import VERL
from memlab.jobs.frameworks.verl_checkout import version_around
from memlab.jobs.frameworks.verl_sft import VERL_SFT
from memlab.jobs.frameworks.without_effect import keys_without_effect

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_POLICY = Conversion(lambda value: RESHARDING.read(value not in ("never", False)), str)
"""torchtitan's ``reshard_after_forward``: its default shards again unless there are pipeline stages."""
_KERNELS = (
    *("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss", "rms_norm_gated"),
    *("causal_conv1d", "chunk_gated_delta_rule", "dsa_indexer", "dsa_attention", "mhc"),
)
"""What VeOmni has other kernels for than ``eager``, each with a key that ends in ``_implementation``."""
_CLASSES = "it decides what the engine's own classes compute and keep"


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine of verl: its keys, and what they mean together."""

    name: str
    title: str
    keys: Callable[[str, str, str], tuple[Key, ...]]
    """Of the engine, its optimizer and its model, below their prefixes."""
    missing: tuple[tuple[str, str, Callable[[Any], bool]], ...]
    """Keys of the engine that change memory: the key, how, and whether a value does; each effect is either."""
    take: Callable[[Reading, str, str], None]
    """Takes shards, ranks and optimizer, by the prefixes of the engine and the optimizer."""


def _keys_of_model(model: str) -> tuple[Key, ...]:
    return (
        Key(f"{model}.path", "architecture", TEXT),
        Key(f"{model}.override_config.num_hidden_layers", "num_layers", WHOLE),
        Key(f"{model}.use_remove_padding", "removes_padding", SWITCH, True),
    )


def _keys_of_offload(engine: str) -> tuple[Key, ...]:
    return (
        Key(f"{engine}.param_offload", "offload_parameters", SWITCH, False),
        Key(f"{engine}.optimizer_offload", "offload_optimizer", SWITCH, False),
    )


def _keys_of_veomni(engine: str, optim: str, model: str) -> tuple[Key, ...]:
    return (
        *_keys_of_model(model),
        *_keys_of_offload(engine),
        Key(f"{engine}.mixed_precision", "is_mixed", SWITCH, True),
        Key(f"{engine}.enable_fsdp_offload", "fsdp_cpu_offload", SWITCH, False),
        Key(f"{engine}.fsdp_size", "ranks_of_shards", WHOLE, -1),
        Key(f"{engine}.ulysses_parallel_size", "ulysses", COUNT, 1),
        Key(f"{engine}.expert_parallel_size", "expert_model_parallel_size", COUNT, 1),
        Key(f"{engine}.enable_full_shard", "reshard_after_forward", RESHARDING, "all"),
        Key(f"{engine}.forward_prefetch", "gathers_ahead", SWITCH, True),
        attention_key(f"{engine}.attn_implementation"),
        Key(f"{optim}.optimizer", "optimizer", TEXT, "adamw"),
        Key(f"{model}.enable_gradient_checkpointing", "is_checkpointing", SWITCH, True),
        *peft_keys(model, "lora_"),
    )


def _take_veomni(reading: Reading, engine: str, optim: str) -> None:
    """Takes shards as ``VeOmniEngine`` makes them; each of its micro-batches reduces gradients."""
    values, is_mixed = reading.values, reading.values.pop("is_mixed")
    take_types(reading, shards="fp32" if is_mixed else "bf16", compute="bf16", reduced="fp32" if is_mixed else "bf16")
    take_ulysses(reading)
    trains_all = values.get("lora_rank") is None
    take_peft(reading, f"{_MODEL if optim.startswith(_ACTOR) else 'model'}.lora_rank", adapts_experts=True)
    is_adam = take_optimizer(reading, f"{optim}.optimizer", values.pop("optimizer"), ("adamw",))
    # ``fsdp_size`` counts copies of the data, and ranks that share a row have shards of their own (``fsdp_mesh``).
    values["ranks_of_shards"] *= values.get("context_parallel_size") or 1
    take_shards(reading, f"{engine}.fsdp_size")
    take_resharding(reading)
    # ``parallelize_model_fsdp2`` in veomni/distributed/torch_parallelize.py: the root stays until backward.
    values |= {"reshard_root_after_forward": False, "defer_fsdp_grad_sync": False}
    if values.pop("gathers_ahead") and values["reshard_after_forward"] != "none":
        values["fsdp2_forward_prefetch_depth"] = 1
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)
    take_kept(reading, trains_all=trains_all, is_torch_adam=is_adam)


def _keys_of_automodel(engine: str, optim: str, model: str) -> tuple[Key, ...]:
    return (
        *_keys_of_model(model),
        *_keys_of_offload(engine),
        Key(f"{engine}.distributed_strategy", "distributed", TEXT, "fsdp2"),
        Key(f"{engine}.tp_size", "tensor_model_parallel_size", COUNT, 1),
        Key(f"{engine}.pp_size", "pipeline_model_parallel_size", COUNT, 1),
        Key(f"{engine}.cp_size", "context_parallel_size", COUNT, 1),
        Key(f"{engine}.ep_size", "expert_model_parallel_size", COUNT, 1),
        Key(f"{engine}.dp_replicate_size", "dp_replicate_size", COUNT, 1),
        Key(f"{engine}.sequence_parallel", "sequence_parallel", SWITCH, False),
        Key(f"{engine}.defer_fsdp_grad_sync", "defer_fsdp_grad_sync", SWITCH, True),
        Key(f"{engine}.activation_checkpointing", "is_checkpointing", SWITCH, False),
        Key(f"{engine}.model_dtype", "shards", LONG_DTYPE, "fp32"),
        Key(f"{engine}.mp_param_dtype", "compute", LONG_DTYPE, "bf16"),
        Key(f"{engine}.mp_reduce_dtype", "reduced", LONG_DTYPE, "fp32"),
        attention_key(f"{engine}.attn_implementation"),
        Key(f"{optim}.optimizer", "optimizer", TEXT, "AdamW"),
        Key(f"{optim}.optimizer_impl", "library", TEXT, "torch.optim"),
    )


def _take_automodel(reading: Reading, engine: str, optim: str) -> None:
    """Takes shards as ``build_distributed_config_from_engine_config`` makes them, which leave the last layer whole."""
    values = reading.values
    if (kind := values.pop("distributed")) != "fsdp2":
        block(reading, f"{engine}.distributed_strategy", f"Automodel's {kind}")
    if values["tensor_model_parallel_size"] == 1:
        del values["sequence_parallel"]
    take_types(reading, shards=values.pop("shards"), compute=values.pop("compute"), reduced=values.pop("reduced"))
    values |= {"reshard_after_forward": "all_but_last", "fsdp_cpu_offload": False}
    is_adam = take_optimizer(reading, f"{optim}.optimizer", f"{values.pop('library')}.{values.pop('optimizer')}")
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)
    take_kept(reading, trains_all=True, is_torch_adam=is_adam)


def _keys_of_torchtitan(engine: str, optim: str, model: str) -> tuple[Key, ...]:
    return (
        *_keys_of_model(model),
        *_keys_of_offload(engine),
        Key(f"{engine}.offload_policy", "fsdp_cpu_offload", SWITCH, False),
        Key(f"{engine}.reshard_after_forward", "reshard_after_forward", _POLICY, "all"),
        Key(f"{engine}.data_parallel_replicate_size", "dp_replicate_size", COUNT, 1),
        Key(f"{engine}.tensor_parallel_size", "tensor_model_parallel_size", COUNT, 1),
        Key(f"{engine}.pipeline_parallel_size", "pipeline_model_parallel_size", COUNT, 1),
        Key(f"{engine}.context_parallel_size", "context_parallel_size", COUNT, 1),
        Key(f"{engine}.expert_parallel_size", "expert_model_parallel_size", COUNT, 1),
        Key(f"{engine}.activation_checkpoint", "checkpointing", TEXT, "selective"),
        Key(f"{optim}.name", "optimizer", TEXT, "AdamW"),
    )


def _take_torchtitan(reading: Reading, engine: str, optim: str) -> None:
    """Takes shards as ``TorchTitanEngine`` makes them: fp32, and bf16 in layers (torchtitan's ``TrainingConfig``)."""
    values = reading.values
    take_types(reading, shards="fp32", compute="bf16", reduced="fp32")
    reading.miss(f"{engine}.attn_type", "either", "memlab has no attention of torchtitan's")
    values["defer_fsdp_grad_sync"] = False
    is_adam = take_optimizer(reading, f"{optim}.name", values.pop("optimizer"), ("Adam", "AdamW"))
    values["adam_implementation"] = "fused"  # of ``OptimizersContainer.Config``
    if (kind := values.pop("checkpointing")) == "full":
        take_checkpointed_layers(reading)
    elif kind == "selective":
        reading.miss(f"{engine}.activation_checkpoint", "less", "torchtitan keeps chosen operations of each layer")
    take_kept(reading, trains_all=True, is_torch_adam=is_adam)


_VEOMNI = _Engine(
    name="veomni",
    title="VeOmni",
    keys=_keys_of_veomni,
    missing=(
        ("pad_to_length", "rows are padded to a multiple of pad_to_length_bucket", bool),
        ("router_replay.mode", "the chosen experts of each token are kept", other_than("disabled")),
        ("activation_gpu_limit", "so many GB of activations stay on the device where they leave it", bool),
        ("basic_modules", "these modules are sharded by themselves too", is_given),
        ("enable_reentrant", "checkpoints of another implementation keep other tensors", bool),
        ("force_use_huggingface", _CLASSES, bool),
        ("moe_implementation", _CLASSES, is_given),
        *((f"{kernel}_implementation", _CLASSES, other_than("eager")) for kernel in _KERNELS),
    ),
    take=_take_veomni,
)
_AUTOMODEL = _Engine(
    name="automodel",
    title="NeMo Automodel",
    keys=_keys_of_automodel,
    missing=(
        ("enable_fp8", "linears compute in FP8", bool),
        ("enable_compile", "memlab predicts eager layers", bool),
        *((f"backend_config.{key}", _CLASSES, is_given)
          for key in ("attn", "linear", "rms_norm", "rope_fusion", "dispatcher", "experts", "gate_precision",
                      "enable_fsdp_optimizations")),
        *((f"moe_config.{key}", _CLASSES, is_given)
          for key in ("ignore_router_for_ac", "reshard_after_forward", "lm_head_precision")),
    ),
    take=_take_automodel,
)  # fmt: skip
_TORCHTITAN = _Engine(
    name="torchtitan",
    title="torchtitan",
    keys=_keys_of_torchtitan,
    missing=(("forward_prefetch", "layers are gathered ahead", bool),),
    take=_take_torchtitan,
)


def _complete(reading: Reading, engine: _Engine, prefixes: tuple[str, str, str], chosen: str, loss: str) -> None:
    """Derives ranks, types, shards, and what leaves the device."""
    values, (section, optim, model) = reading.values, prefixes
    block(reading, chosen, f"models as {engine.title} builds them", of="engine")
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    note_replaced_values(reading, f"{model}.override_config")
    engine.take(reading, section, optim)
    if "attn_implementation" in values:
        take_attention(reading, f"{section}.attn_implementation")
        take_logprobs(reading, loss, "logprobs_by_row")
    if values.get("fsdp_cpu_offload"):
        values["offload_parameters"] = values["offload_optimizer"] = False
    values["offload_gradients"] = values["offload_parameters"]


def _missing(engine: _Engine, section: str, model: str) -> tuple[Missing, ...]:
    return (
        *(Missing(f"{section}.{key}", "either", reason, is_on) for key, reason, is_on in engine.missing),
        Missing(f"{model}.enable_activation_offload", "less", "activations leave the device in forward"),
        Missing(f"{model}.use_liger", "less", "Liger's norms and MLPs keep less"),
        Missing(f"{model}.use_fused_kernels", "less", "log-probabilities without whole logits"),
        Missing(f"{model}.use_remove_padding", "more", "rows are padded, and attention then has a mask", is_false),
        Missing(f"{model}.tiled_mlp.enabled", "less", "MLPs work on a part of the tokens at a time"),
        Missing(f"{model}.mtp.enable", "more", "multi-token prediction: one more layer and set of logits"),
    )


def _of_trainer(engine: _Engine) -> Framework:
    """Returns the table of verl's trainer of reinforcement learning with an engine."""
    section = f"{_ACTOR}.{engine.name}"
    prefixes = (section, f"{_ACTOR}.optim", _MODEL)
    of_fsdp = verl_fsdp.VERL_FSDP
    trainer = [key for key in of_fsdp.keys if not key.name.startswith(verl_fsdp.OF_ENGINE)]
    own = engine.keys(*prefixes)
    keys = (
        *(key for key in trainer if key.field not in ("strategy", "ulysses", "is_layered")),
        *own,
        Key(f"{section}.use_torch_compile", "is_compiled", SWITCH, engine is _TORCHTITAN),
        Key(f"{section}.entropy_from_logits_with_chunking", "has_chunks_of_entropy", SWITCH),
        Key(f"{section}.entropy_from_logits_chunk_size", "entropy_chunk_size", COUNT),
        *(
            (Key("actor_rollout_ref.ref.veomni.param_offload", "offload_reference", SWITCH),)
            if engine is _VEOMNI
            else ()
        ),
    )

    def complete(reading: Reading) -> None:
        values = reading.values
        values.pop("model_engine", None)
        chosen = next((key for key in _CHOOSE if key in reading.entries.by_key), _CHOOSE[-1])
        _complete(reading, engine, prefixes, chosen, f"{_ACTOR}.policy_loss")
        values |= {"reference_shards": "fp32", "reference_reshards": True, "is_layered": True}
        # ``veomni_ref.yaml`` moves a reference model as the policy unless told otherwise; torchtitan keeps it on the
        # host.
        moves = values.pop("offload_reference", None)
        on_host = engine is _TORCHTITAN or bool(values["offload_parameters"] if moves is None else moves)
        verl_fsdp.complete_trainer(reading, engine.name, section, has_reference_on_host=on_host)

    reference = f"actor_rollout_ref.ref.{engine.name}"
    without_effect = of_fsdp.without_effect | {f"{reference}.optimizer_offload"}  # a reference model has no optimizer
    for one in (section, reference):
        without_effect |= keys_without_effect(f"verl_{engine.name}", one)
    return Framework(
        name=f"verl-{engine.name}",
        title=f"verl with {engine.title}",
        source="1dda039b",
        signs=Signs(looked_for=f"model_engine={engine.name}"),
        style="overrides",
        keys=keys,
        missing=(
            *(row for row in of_fsdp.missing if not row.name.startswith(verl_fsdp.OF_ENGINE)),
            *_missing(engine, section, _MODEL),
        ),
        without_effect=without_effect | keys_without_effect(f"verl_{engine.name}_optimizer", f"{_ACTOR}.optim"),
        complete=complete,
        complete_of_model=check_family,
        check=check_shards,
        versions=VERL.versions,
        version_around=version_around,
        fixed={"engine": "fsdp2", "loss": "cross_entropy"},
    )


def _of_sft(engine: _Engine) -> Framework:
    """Returns the table of verl's trainer for supervised fine-tuning with an engine."""
    prefixes = ("engine", "optim", "model")
    trainer = [key for key in verl_sft_fsdp.KEYS if not key.name.startswith(("engine.", "optim.", "model."))]

    def complete(reading: Reading) -> None:
        _complete(reading, engine, prefixes, "engine.strategy", "loss_fn")
        reading.known.add("engine")
        verl_sft_fsdp.complete_trainer(reading)

    # No loss of the trainer's has an entropy, for which alone VeOmni compiles.
    unread = {"engine.entropy_from_logits_with_chunking", "engine.entropy_from_logits_chunk_size"}
    compiles = Missing("engine.use_torch_compile", "either", "memlab predicts eager layers", default=True)
    without_effect = VERL_SFT.without_effect | keys_without_effect(f"verl_{engine.name}", "engine") | unread
    return Framework(
        name=f"verl-sft-{engine.name}",
        title=f"verl's SFT trainer with {engine.title}",
        source="1dda039b",
        signs=Signs(looked_for=f"engine={engine.name}"),
        style="overrides",
        keys=(*trainer, *engine.keys(*prefixes)),
        missing=(
            *_missing(engine, "engine", "model"),
            *((compiles,) if engine is _TORCHTITAN else ()),
            *(row for row in VERL_SFT.missing if row.name.startswith("data.")),
        ),
        without_effect=without_effect
        | keys_without_effect(f"verl_{engine.name}_optimizer", "optim")
        | ({"engine.use_torch_compile"} if engine is _VEOMNI else set()),
        complete=complete,
        complete_of_model=check_family,
        complete_refused=lambda reading: take_fused_adam(reading, "optim"),
        check=check_shards,
        versions=VERL_SFT.versions,
        version_around=version_around,
        fixed={"engine": "fsdp2", "loss": "cross_entropy"},
    )


_CHOOSE = (f"actor@{_ACTOR}", "model_engine")
"""Keys that choose the actor's engine; the first one counts."""


def _chooses(name: str) -> Callable[[dict[str, Any]], bool]:
    def chooses(values: dict[str, Any]) -> bool:
        chosen = next((values[key] for key in _CHOOSE if values.get(key) is not None), None)
        return str(chosen).removesuffix("_actor") == name

    return chooses


def _chooses_of_sft(name: str) -> Callable[[dict[str, Any]], bool]:
    def chooses(values: dict[str, Any]) -> bool:
        return name in (values.get("engine.strategy"), values.get("engine"))

    return chooses


OF_TRAINER = tuple((_chooses(engine.name), _of_trainer(engine)) for engine in (_VEOMNI, _TORCHTITAN))
"""Whether a job chooses the engine, and its table; Automodel is an engine of fine-tuning alone."""
OF_SFT = tuple((_chooses_of_sft(engine.name), _of_sft(engine)) for engine in (_VEOMNI, _AUTOMODEL, _TORCHTITAN))
