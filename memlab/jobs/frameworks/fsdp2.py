"""What the readers of jobs with FSDP have in common: what FSDP2 keeps of a model, and what memlab has of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES, families_with
from memlab.config.lora import NAMES_OF_TRANSFORMERS, OF_ROUTED_LAYERS, LibraryOfFsdp2, LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import AttnImplementation
from memlab.config.transformers_linears import adapted_linears, adapted_parameters, own_names
from memlab.jobs.frameworks.adapters import ALL_LINEAR, LORA, RANK
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import COUNT, DTYPE, NUMBER, SWITCH, TEXT, WHOLE, WORDS, Blocked, Conversion, Key
from memlab.jobs.frameworks.megatron_lm import common

FROZEN = "frozen parts have no gradients and no optimizer state"
OWN_PLAN = "a plan of the job's own may divide other matrices"
PARTS_OF_AUTOMODEL = ("language_model", "vision_tower", "audio_tower")
"""What ``freeze_config`` of NeMo Automodel can freeze; nothing there reads ``freeze_embeddings`` (36044ad3, 0.7.0)."""
ATTENTION = get_args(AttnImplementation)
EXCHANGE = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_deepep_num_sms")
OF_TOWERS = ("vision_tower", "images_per_sequence", "patches_per_image", "freeze_vision_tower")
OF_OWN_EXPERTS = ("fake_balanced_gate", "linear_implementation")
"""Options of NeMo Automodel's own classes of models with experts."""
ONLY_OF_AUTOMODEL = (
    dict.fromkeys(EXCHANGE, "its ranks exchange no tokens of experts")
    | dict.fromkeys(OF_OWN_EXPERTS, "it builds transformers' classes of models with experts")
    | dict.fromkeys(("schedule_runs", "return_outputs"), "its jobs with FSDP have no pipeline stages")
    | dict.fromkeys(OF_TOWERS, "memlab reads its jobs for texts only")
    | dict.fromkeys(("master_weights", "store_param_remainders"), "torch's Adam keeps no main parameters")
)
"""For `Framework.cannot_write` of the other frameworks with FSDP."""
OF_SEVERAL_KEYS = frozenset(
    (
        *(
            "dtype",
            "fp32_sharded_params",
            "lora_fsdp2_library",
            "lora_fused_experts",
            "lora_enable_input_require_grads",
        ),
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "selective_ac", "checkpoint_every"),
    )
)
"""For `Framework.without_own_key`: what `composed_of_fsdp2` makes several keys of, or none."""
FLASH = "flash_attention_2"
OUTPUT_LAYER = "lm_head"
_CLASS_OF_AUTOMODEL = "PeftConfig"
_ADAMS = ("torch.optim.AdamW", "torch.optim.Adam")


def _read_resharding(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return "none" if value == 1 else COUNT.read(value)
    return "all" if SWITCH.read(value) else "none"


RESHARDING = Conversion(_read_resharding, lambda value: {"all": True, "none": False}.get(value, value))
"""``reshard_after_forward`` of torch's `fully_shard`: whether layers are sharded again, or over how many ranks. Over a
single rank is not at all (``_get_post_forward_mesh_info`` in ``_fully_shard/_fsdp_init.py``, torch 2.13)."""


FOREACH = Conversion(lambda value: None if value is None else SWITCH.read(value), lambda value: value)
"""``foreach`` of torch's Adam: None lets it decide, which it does for ``foreach`` on a GPU."""


def take_resharding(reading: Reading) -> None:
    """Takes the number of ranks over which layers are sharded again, where the key has one."""
    value = reading.values["reshard_after_forward"]
    if isinstance(value, int):
        reading.values |= {"reshard_after_forward": "all", "reshard_after_forward_ranks": value}


def take_shards(reading: Reading, key: str) -> None:
    """Takes groups of ranks that each have all shards (HSDP), from the number of ranks in a group; -1 is all."""
    ranks, shards = reading.values["world_size"], reading.values.pop("ranks_of_shards")
    if 0 < shards < ranks:
        reading.take(key, "dp_replicate_size", ranks // shards)


def check_shards(reading: Reading) -> None:
    """Checks that the groups of `take_shards` have all ranks together.

    Raises:
        CannotStartError: If they do not, which torch's ``init_device_mesh`` refuses.
    """
    ranks = reading.values["world_size"]
    for one in reading.taken:
        if one.field == "ranks_of_shards" and 0 < one.memlab_value < ranks and ranks % one.memlab_value:
            raise CannotStartError(
                f"{one.key} is {one.value}, must divide the {ranks} ranks, by a rule of torch's device mesh: choose "
                "another, or -1 for one group of all",
                one.key,
            )


def take_attention(reading: Reading, key: str) -> None:
    """Takes the function of transformers that attends; by default flash-attn, which takes 16 bits only and is named.

    The default is that of ``hf_model.yaml`` of verl 0.9.1, ``flash_attn`` of SkyRL, and of NeMo-RL's packed sequences.

    Args:
        reading: Of the job; its values have the type that layers compute in.
        key: Of `attention_key`; functions that memlab does not have are named by it.
    """
    given, values = reading.get(key), reading.values
    chosen = values["attn_implementation"] or FLASH
    is_of_memlab = chosen in ATTENTION and (chosen != FLASH or values["dtype"] == "bf16")
    if not is_of_memlab:
        reading.miss(
            key, "either", f"memlab predicts torch's attention (sdpa), not {chosen}{'' if given else ', the default'}"
        )
        chosen = "sdpa"
    reading.taken = [one for one in reading.taken if one.key != key]
    if given is not None:
        reading.take(key, "attn_implementation", chosen)
    values["attn_implementation"] = chosen


def attention_key(name: str) -> Key:
    """Returns the key that names the function of transformers that attends; without it, it is flash-attn."""
    return Key(name, "attn_implementation", TEXT, FLASH)


def take_logprobs(reading: Reading, key: str, without_flash: str) -> None:
    """Takes log-probabilities that are computed from the logits in their type, by flash-attn's kernel where it is.

    ``logprobs_from_logits`` of verl (``verl/utils/torch_functional.py``, 0.9.1) and of its copy in SkyRL.

    Args:
        reading: Of the job, after `take_attention`.
        key: By which it is named that nothing says whether the package flash-attn is installed.
        without_flash: The loss of the scenario that has as much where it is not.
    """
    has_flash = reading.values["attn_implementation"] == FLASH
    reading.values["loss_of_transformers"] = "logprobs_flash_attn" if has_flash else without_flash
    if not has_flash:
        reading.miss(key, "less", "where the package flash-attn is installed, log-probabilities need the logits alone")


def take_ulysses(reading: Reading) -> None:
    """Takes ranks that share rows and exchange heads, from their number by the field ``ulysses``."""
    ranks = reading.values.pop("ulysses")
    given = [one.key for one in reading.taken if one.field == "ulysses" and one.memlab_value == ranks]
    if ranks > 1:
        reading.take(given[-1], "context_parallel_size", ranks)
        reading.values["cp_comm_type"] = "a2a"


def take_units(reading: Reading, embeddings: str) -> None:
    """Takes what is sharded by itself beside layers, and freed after forward as they are: ``apply_fsdp2`` of verl."""
    frees = reading.values["reshard_after_forward"] != "none"
    reading.values |= {"separate_embeddings": embeddings, "reshard_root_after_forward": frees}


def peft_keys(section: str, start: str = "") -> tuple[Key, ...]:
    """Returns the keys of adapters that PEFT makes, with their defaults in verl and SkyRL; a rank of 0 is none.

    Args:
        section: The section that has them.
        start: How the rank's and the scale's keys begin in it.
    """
    return (
        Key(f"{section}.{start}rank", "lora_rank", RANK, None),
        Key(f"{section}.{start}alpha", "lora_alpha", NUMBER, 16),
        Key(f"{section}.target_modules", "lora_target_modules", WORDS, (ALL_LINEAR,)),
        Key(f"{section}.exclude_modules", "lora_exclude_modules", WORDS, None),
    )


def take_peft(reading: Reading, key: str, *, adapts_experts: bool) -> None:
    """Takes adapters of PEFT, which are in fp32 as the shards are, and let the embedding's output require a gradient.

    With ``all-linear``, PEFT leaves the output layer out (``_maybe_include_all_linear_layers`` in
    ``tuners/tuners_utils.py``, 0.21.2).

    Args:
        key: By which adapters that memlab has none of are named.
        adapts_experts: Whether the job's PEFT adapts experts that are one parameter, as it does since 0.20.
    """
    values = reading.values
    targets, excluded = values.get("lora_target_modules") or (), values.get("lora_exclude_modules") or ()
    if ALL_LINEAR in targets:
        targets, excluded = (), (OUTPUT_LAYER, *excluded)
    lacks = [] if values["fp32_sharded_params"] or values["dtype"] == "fp32" else ["adapters of shards in bf16"]
    values |= {"lora_fsdp2_library": "peft", "lora_enable_input_require_grads": True}
    values["lora_fused_experts"] = adapts_experts
    take_adapters(reading, key, tuple(targets), tuple(excluded), lacks)


def automodel_keys(section: str, *, match_all_linear: bool = False) -> tuple[Key, ...]:
    """Returns the keys of NeMo Automodel's adapters, with the defaults of its ``PeftConfig``."""
    return (
        Key(f"{section}.dim", "lora_rank", WHOLE, 8),
        Key(f"{section}.alpha", "lora_alpha", NUMBER, 32),
        Key(f"{section}.dropout", "lora_dropout", NUMBER, 0.0),
        Key(f"{section}.dropout_position", "lora_dropout_position", TEXT, "post"),
        Key(f"{section}.target_modules", "lora_target_modules", WORDS, None),
        Key(f"{section}.exclude_modules", "lora_exclude_modules", WORDS, None),
        Key(f"{section}.match_all_linear", "lora_of_all", SWITCH, match_all_linear),
    )


def take_automodel_adapters(reading: Reading, section: str, *, is_on: bool) -> None:
    """Takes adapters of NeMo Automodel, by the rules of ``ModuleMatcher`` in ``components/_peft/module_matcher.py``."""
    values, is_of_all = reading.values, reading.values.pop("lora_of_all")
    targets, excluded = values["lora_target_modules"] or (), values["lora_exclude_modules"] or ()
    if not is_on:
        values["lora_rank"] = None
        reading.taken = [one for one in reading.taken if one.place != "default" or not one.key.startswith(section)]
    elif is_of_all:
        targets = excluded = ()
    elif not targets and not excluded:
        targets = ("*_proj",)
    lacks = []
    if reading.get(f"{section}.use_dora"):
        lacks.append("adapters of the kind DoRA")
    if reading.get(f"{section}.use_memory_efficient_lora") is False:
        lacks.append("adapters without its memory-efficient function")
    own, is_fp32 = reading.get(f"{section}.lora_dtype"), values["fp32_sharded_params"] or values["dtype"] == "fp32"
    of_shards = ("float32", "fp32") if is_fp32 else ("bfloat16", "bf16")
    if own not in (None, "None") and str(own).rpartition(".")[2] not in of_shards:
        lacks.append(f"adapters in {own}, another type than the shards'")
    kind = str(reading.get(f"{section}._target_", _CLASS_OF_AUTOMODEL)).rpartition(".")[2]
    if kind != _CLASS_OF_AUTOMODEL:
        lacks.append(f"adapters of the class {kind}")
    if is_on and reading.get(f"{section}.use_triton"):
        reading.miss(
            f"{section}.use_triton",
            "either",
            "without Transformer Engine, Triton's kernels keep other tensors of the adapters' rank",
        )
    values["lora_fsdp2_library"] = "automodel"
    take_adapters(reading, section, tuple(targets), tuple(excluded), lacks)


def take_adapters(
    reading: Reading, key: str, targets: tuple[str, ...], excluded: tuple[str, ...], lacks: Iterable[str] = ()
) -> None:
    """Takes adapters; where memlab has none of such, it names them and trains the model, which is an upper bound.

    Args:
        reading: Of the job; its values have the adapters' other fields, and no rank where there are none.
        key: By which they are named.
        targets: Names or patterns of the linears that have adapters; none is all that are not excluded.
        lacks: What memlab lacks of these, in phrases.
    """
    values, reasons = reading.values, [*lacks]
    if targets and excluded:
        reasons.append("adapters of some linears but for others")
    of_experts = OF_ROUTED_LAYERS if values.get("lora_fused_experts") else ()
    if not all(name.endswith(("*", "*_proj", *NAMES_OF_TRANSFORMERS)) or name in of_experts for name in targets):
        reasons.append("adapters of other linears")
    if values.get("lora_rank") is not None and not reasons:
        values |= {"lora_target_modules": targets, "lora_exclude_modules": excluded}
        return
    if values.get("lora_rank") is not None:
        reading.miss(key, "less", f"{LORA} (memlab has no {', no '.join(reasons)} under FSDP2)")
    for name in [name for name in values if name.startswith("lora_")]:
        del values[name]


def freezes_language(reading: Reading, section: str) -> bool:
    """Whether a ``freeze_config`` of NeMo Automodel freezes a part that every language model has."""
    return bool(reading.get(f"{section}.freeze_language_model"))


def block(reading: Reading, key: str, what: str, of: Blocked = "job") -> None:
    """Notes that memlab does not have what a key asks for, and of what that is."""
    entry = reading.entries.by_key.get(key)
    reading.known.add(key)
    place = "" if entry is None else f" {entry.value} ({entry.place})"
    reading.blocked[of].append(f"{key}{place}: {what}")


def check_family(reading: Reading, architecture: Architecture) -> None:
    """Checks that the engine builds a model's family, and drops ranks of experts for a dense one in the job's place.

    Raises:
        ValueError: If it does not.
    """
    if not FAMILIES[architecture.family].fsdp2:
        reading.lacks.append(f"the family {architecture.family} under FSDP2")
        raise ValueError(
            f"{architecture.name} is of the family {architecture.family}, which memlab does not build under FSDP2: it "
            f"has {', '.join(families_with('fsdp2'))}"
        )
    if not architecture.routes and (reading.blocked["model"] or reading.blocked["engine"]):
        reading.values["expert_model_parallel_size"] = 1


def take_types(reading: Reading, *, shards: str, compute: str, reduced: str) -> None:
    """Takes the types of shards, of what layers compute in, and of the gradients' reduction."""
    values = reading.values
    values["dtype"] = "fp32" if compute == "fp32" else "bf16"
    values["fp32_sharded_params"] = shards == "fp32" and compute != "fp32"
    values["grad_reduce_in_bf16"] = reduced != "fp32"


def take_kept(reading: Reading, *, trains_all: bool, is_torch_adam: bool) -> None:
    """Takes what FSDP2 keeps of each parameter: its shard, and of what torch's Adam trains three more in its type.

    Of a job whose shards are on the host it keeps nothing on the device.
    """
    if reading.values["fsdp_cpu_offload"]:
        return
    shard = 4 if reading.values["fp32_sharded_params"] or reading.values["dtype"] == "fp32" else 2
    reading.kept_of_parameter["parameters"] = shard
    if trains_all:
        reading.kept_of_parameter["gradients"] = shard
        if is_torch_adam:
            reading.kept_of_parameter["optimizer state"] = 2 * shard


def take_checkpointed_layers(reading: Reading) -> None:
    """Takes checkpoints of whole layers, each by itself, as transformers makes them."""
    reading.values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def take_adam(reading: Reading) -> None:
    """Takes how torch's Adam updates parameters, from its arguments ``foreach`` and ``fused``."""
    values = reading.values
    is_foreach = values.pop("is_foreach", None)
    values["adam_implementation"] = "foreach" if is_foreach is not False else "for_loop"
    if values.pop("is_fused", None):
        values["adam_implementation"] = "fused"


def take_optimizer(reading: Reading, key: str, kind: str, adams: Iterable[str] = _ADAMS) -> bool:
    """Takes torch's Adam, and names by a key that a job has another optimizer; returns whether it is Adam."""
    take_adam(reading)
    if kind not in adams:
        reading.miss(key, "either", f"memlab predicts torch's Adam and AdamW, not {kind}")
    return kind in adams


_OF_FUSED_ADAM = {
    "exp_avg_dtype": ("exp_avg_dtype", DTYPE),
    "exp_avg_sq_dtype": ("exp_avg_sq_dtype", DTYPE),
    "master_weight_dtype": ("main_params_dtype", DTYPE),
    "master_weights": ("master_weights", SWITCH),
    "store_param_remainders": ("store_param_remainders", SWITCH),
}
"""Arguments of Transformer Engine's FusedAdam, each with memlab's field and how it is read."""
TYPES_OF_FUSED_ADAM = tuple(field for field, _ in _OF_FUSED_ADAM.values())


def take_fused_adam(reading: Reading, section: str) -> None:
    """Takes what FusedAdam keeps, of a job that memlab does not predict: with other types than fp32 it has none of it.

    Args:
        section: The prefix of the optimizer's arguments.
    """
    for name, (field, conversion) in _OF_FUSED_ADAM.items():
        value = reading.converted(f"{section}.{name}", conversion)
        if value is not None:
            reading.take(f"{section}.{name}", field, value)


def composed_of_fsdp2(scenario: Scenario, settings: MemorySettings, library: LibraryOfFsdp2) -> dict[str, Any]:
    """Returns the values by the tables' fields from which these readers make types, shards and adapters."""
    state, layout = scenario.state, scenario.layout
    adapters = _composed_adapters(scenario, library)
    others = {name: value for name, value in common(scenario, settings).items() if not name.startswith("lora_")}
    resharding = "none" if state.reshard_after_forward == "none" else state.reshard_after_forward_ranks or "all"
    return (
        others
        | adapters
        | {
            "shards": "fp32" if scenario.dtype == "fp32" or state.fp32_sharded_params else "bf16",
            "compute": scenario.dtype,
            "reduced": "bf16" if state.grad_reduce_in_bf16 else "fp32",
            "reshard_after_forward": resharding,
            "gathers_ahead": state.fsdp2_forward_prefetch_depth > 0,
            "ranks_of_shards": scenario.ranks_of_shards if state.dp_replicate_size > 1 else -1,
            "ulysses": layout.context_parallel_size,
            "is_checkpointing": settings.recompute_granularity is not None,
            "is_foreach": False if state.adam_implementation == "for_loop" else None,
            "is_fused": True if state.adam_implementation == "fused" else None,
        }
    )


def _composed_adapters(scenario: Scenario, library: LibraryOfFsdp2) -> dict[str, Any]:
    """Returns the values of adapters, of which a section may not say anything where there are none."""
    lora = scenario.state.lora
    if lora is None:
        return {"lora_rank": None, "has_adapters": False}
    targets, excluded = (own_names(scenario.architecture, one) for one in (lora.target_modules, lora.exclude_modules))
    is_of_all = not targets and not excluded
    if library == "peft" and _has_patterns(lora):
        found = adapted_linears(scenario.architecture, scenario.num_layers, lora)
        targets, excluded = tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in found)), ()
    elif library == "peft" and not targets:
        targets, excluded = (ALL_LINEAR,), tuple(name for name in excluded if name != OUTPUT_LAYER)
    return {
        "has_adapters": True,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_dropout_position": lora.dropout_position,
        "lora_of_all": is_of_all,
        "lora_target_modules": targets or None,
        "lora_exclude_modules": excluded or None,
    }


def _has_patterns(lora: LoRA) -> bool:
    return any("*" in name for name in (*lora.target_modules, *lora.exclude_modules))


Own = dict[str, tuple[Any, str]]
"""By field of memlab the only value that a framework can have there, and why."""


def of_other_values(scenario: Scenario, settings: MemorySettings, own: Own) -> dict[str, str]:
    """Names the fields of a job that have another value than a framework can have, each with the reason."""
    state, found = scenario.state.options(), {"allocator": scenario.allocator}
    found |= {name: getattr(scenario.layout, name) for name in scenario.layout.__slots__}
    found |= state | {name: getattr(settings, name) for name in settings.__slots__}
    return {name: reason for name, (value, reason) in own.items() if found[name] != value}


def own_checkpoints(settings: MemorySettings, title: str) -> Own:
    """Returns the checkpoints of a framework that makes them of all layers, each by itself, or none."""
    reason = f"{title} checkpoints all layers, each by itself, or none"
    is_on = settings.recompute_granularity is not None
    return {
        "recompute_method": ("uniform" if is_on else None, reason),
        "recompute_num_layers": (1 if is_on else None, reason),
        "selective_ac": (False, reason),
        "checkpoint_every": (None, reason),
    }


def own_transformers(scenario: Scenario, title: str, *, adapts_experts: bool) -> Own:
    """Returns what verl and SkyRL have in common: who shares rows, what is sharded again, and the loss."""
    state, of_ranks = scenario.state, scenario.state.reshard_after_forward_ranks
    frees = state.reshard_after_forward != "none"
    return {
        "tensor_model_parallel_size": (1, f"{title} has no tensor parallelism with FSDP"),
        "cp_comm_type": (
            "a2a" if scenario.layout.context_parallel_size > 1 else "p2p",
            f"{title}'s ranks that share rows exchange heads (Ulysses)",
        ),
        "reshard_after_forward": ("all" if frees else "none", f"{title} shards all layers again, or none"),
        "reshard_after_forward_ranks": (
            of_ranks if frees else None,
            f"{title} has one key for it and for reshard_after_forward",
        ),
    } | own_peft(scenario, title, adapts_experts=adapts_experts)


def own_peft(scenario: Scenario, title: str, *, adapts_experts: bool) -> Own:
    """Returns what adapters of PEFT are, as `take_peft` reads them; nothing of a job without."""
    state, lora = scenario.state, scenario.state.lora
    if lora is None:
        return {}
    own: Own = {
        "lora_fsdp2_library": ("peft", f"{title} trains the adapters of PEFT"),
        "lora_enable_input_require_grads": (True, f"{title} lets the embedding's output require a gradient"),
    }
    if not state.fp32_sharded_params and scenario.dtype != "fp32":
        own["lora_rank"] = (None, "memlab reads adapters of PEFT beside shards in fp32 only")
    own["lora_dropout_position"] = ("pre", "PEFT drops the inputs of adapters")
    fused = replace(lora, fused_experts=True, dropout=0.0)
    has_experts = any(True for _ in adapted_parameters(scenario.architecture, 1, fused))
    own["lora_fused_experts"] = (adapts_experts and has_experts, f"the version of PEFT that {title} has decides it")
    if _has_patterns(lora):
        reason = "PEFT takes names of linears, and no patterns"
        own |= dict.fromkeys(("lora_target_modules", "lora_exclude_modules"), (None, reason))
    elif not lora.target_modules and OUTPUT_LAYER not in own_names(scenario.architecture, lora.exclude_modules):
        own["lora_exclude_modules"] = (None, "PEFT adds no adapter to the output layer unless it is named")
    return own


def own_automodel(scenario: Scenario, title: str) -> Own:
    """Returns what adapters of NeMo Automodel are; nothing of a job without."""
    if scenario.state.lora is None:
        return {}
    return {
        "lora_fsdp2_library": ("automodel", f"{title} trains adapters of NeMo Automodel's own"),
        "lora_fused_experts": (False, f"{title} has no adapters of PEFT"),
        "lora_enable_input_require_grads": (False, f"{title} lets no output of the embedding require a gradient"),
    }
