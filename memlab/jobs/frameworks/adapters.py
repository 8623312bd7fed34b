"""Low-rank adapters in job files: the keys of Megatron-Bridge's ``LoRA``, and what memlab has none of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memlab.config.lora import (
    CANONICAL,
    JOINING,
    LINEARS,
    OF_LATENT_ATTENTION,
    OF_LINEAR_ATTENTION,
    OUTPUT_LAYER,
    PARTS,
)
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import NUMBER, SWITCH, TEXT, WHOLE, WORDS, Conversion, Key, is_given

LORA = "low-rank adapters: only these have gradients and optimizer state, so memlab's numbers are an upper bound"
PASS_WITHOUT_ADAPTERS = "the model without its adapters computes each micro-batch first, without gradients"
ALL_LINEAR = "all-linear"
OF_BRIDGE = {
    "lora_library": "its adapters are those of Megatron-Bridge",
    "lora_enable_input_require_grads": "Megatron-Bridge lets the embedding's output require a gradient only under full "
    "recompute",
}
"""What Megatron-Bridge's adapters never are, each with the reason."""
_OPTIONS = [name for name in options_of(TrainingState) if name.startswith("lora_")]


def of_one_kind(title: str) -> dict[str, str]:
    """Returns why a framework cannot express other adapters of experts than its own, by option."""
    return {
        "lora_share_expert_adapters": f"{title} has no key for who shares the adapters of experts",
        "lora_normalize_moe_lora": f"the adapters of {title} all have the same rank",
    }


def no_adapters(title: str) -> dict[str, str]:
    """Returns why a framework without adapters cannot express them, by option."""
    return dict.fromkeys(_OPTIONS, f"{title} trains no adapters")


def _read_targets(value: Any) -> Any:
    names = WORDS.read(value)
    if names is None or ALL_LINEAR not in names:
        return names
    return tuple(dict.fromkeys((*LINEARS, *(name for name in names if name != ALL_LINEAR))))


RANK = Conversion(lambda value: WHOLE.read(value) or None, lambda value: value or 0)
"""verl and SkyRL train no adapters of rank 0."""
TARGETS = Conversion(_read_targets, WORDS.write)
"""SkyRL and ms-swift have a word for all linears."""


def adapter_keys(prefix: str, rank_key: str = "rank", **defaults: Any) -> tuple[Key, ...]:
    """Returns the keys of a section of adapters.

    Args:
        prefix: Of the section.
        **defaults: The framework's own, by the fields of `LoRA`; a key without one does not exist there.
    """
    rows = {
        "rank": (rank_key, RANK if rank_key == "rank" else WHOLE),
        "alpha": ("alpha", NUMBER),
        "dropout": ("dropout", NUMBER),
        "dropout_position": ("dropout_position", TEXT),
        "target_modules": ("target_modules", TARGETS),
        "exclude_modules": ("exclude_modules", TARGETS),
        "share_expert_adapters": ("share_expert_adapters", SWITCH),
        "normalize_moe_lora": ("normalize_moe_lora", SWITCH),
    }
    return tuple(
        Key(f"{prefix}.{name}", f"lora_{field}", conversion, defaults[field])
        for field, (name, conversion) in rows.items()
        if field in defaults
    )


def complete_adapters(reading: Reading, key: str, lacks: Iterable[str] = ()) -> None:
    """Names adapters that memlab has none of, and trains the model then: its numbers are an upper bound.

    Args:
        reading: Of the job; its values have the adapters' fields.
        key: By which they are named: the rank's, or the section's.
        lacks: What memlab lacks of these, in phrases.
    """
    values = reading.values
    if values.get("lora_rank") is None:
        return
    for name in ("lora_target_modules", "lora_exclude_modules"):
        if name in values and values[name] is None:
            values[name] = ()
    reasons, targets = [*lacks], values.get("lora_target_modules")
    known = ("*", *LINEARS, *OF_LATENT_ATTENTION, *OF_LINEAR_ATTENTION, *CANONICAL, JOINING, OUTPUT_LAYER)
    if targets is not None and not all(str(name).endswith(known) for name in targets):
        reasons.append("adapters of other linears")
    if values.get("fp8_param_gather") and values.get("fp8_recipe") == "mxfp8":
        reasons.append("adapters beside MXFP8 parameters")
    if values.get("fp8_format") and values.get("lora_share_expert_adapters") is False:
        reasons.append("adapters of each expert in FP8")
    if reasons:
        reading.miss(key, "less", f"{LORA} (memlab has no {', no '.join(reasons)} here)")
        values["lora_rank"] = None


def lacks_of_kind(reading: Reading, kind: Any, *, has_targets: bool) -> list[str]:
    """Takes the linears of the canonical form where a job names none; returns what memlab lacks of a kind, in phrases.

    Args:
        reading: Of the job; its values have the adapters' fields.
        kind: Megatron-Bridge's word for it (``create_peft`` in ``peft/utils.py``, 0.6.2), or the name of its class.
        has_targets: Whether the linears that it names are the job's own.
    """
    word, values = str(kind or "lora").lower().replace("_", ""), reading.values
    if word not in ("lora", "canonicallora"):
        return [f"adapters of the kind {kind}"]
    if word == "canonicallora" and not has_targets:
        values["lora_target_modules"] = CANONICAL
    targets = [str(name) for name in values.get("lora_target_modules") or ()]
    of_parts = tuple(part for parts in PARTS.values() for part in parts)
    if word == "canonicallora" and (not targets or any(name.endswith(("*", *PARTS)) for name in targets)):
        return [f"canonical adapters of {', '.join(targets) or 'an empty list'}, on which Megatron-Bridge fails"]
    if word == "lora" and any(name.endswith(of_parts) for name in targets):
        return ["adapters of parts of linears, which only the canonical form of Megatron-Bridge has"]
    return []


def kind_of(scenario: Scenario) -> str:
    """Returns Megatron-Bridge's word for the kind of a scenario's adapters."""
    lora = scenario.state.lora
    return "canonical_lora" if lora is not None and lora.is_canonical else "lora"


def lacks_of_section(reading: Reading, prefix: str) -> list[str]:
    """Returns what memlab lacks of a section with Megatron-Bridge's own names, in phrases."""
    lacks = []
    for name, what in (
        ("experts_shared_outer_loras", "half of an adapter that experts share"),
        ("sequence_parallel_input_regather", "input that is gathered twice"),
        ("a2a_experimental", "exchange of all with all"),
    ):
        if is_given(reading.get(f"{prefix}.{name}")):
            lacks.append(what)
    return lacks
