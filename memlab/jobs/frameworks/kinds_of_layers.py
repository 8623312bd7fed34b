"""Which part each layer of a hybrid model has, as Megatron-LM's arguments and Megatron-Bridge's providers say it."""

from __future__ import annotations

from memlab.config.validation import shortened
from memlab.jobs.frameworks.framework import Reading

_FIELD = "hybrid_override_pattern"
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
_PATTERNS = (_FIELD, "hybrid_layer_pattern")
_SPECS = ("mamba_layer_specs", "hybrid_layer_specs")


def is_of_hybrids(spec: object) -> bool:
    """Whether ``--spec`` names Megatron-Core's own layers of hybrid models."""
    return any(name in str(spec) for name in _SPECS)


def says_kinds_of_layers(reading: Reading) -> bool:
    """Whether a job says which layers are Mamba."""
    entries = reading.entries
    return is_of_hybrids(entries.get("spec")) or any(entries.get(name) for name in (*_PATTERNS, *_RATIOS))


def take_kinds_of_layers(reading: Reading, prefix: str = "") -> None:
    """Takes the pattern of a hybrid model's layers, and what follows from it.

    In a pattern of megatron-core 0.17 or later, ``|`` divides the layers into the chunks of pipeline stages, and what
    follows ``/`` are those of multi-token prediction (``models/hybrid/hybrid_layer_allocation.py``, 0.19.2). Older
    jobs give the shares of layers of attention and of MLPs (``ssm/mamba_hybrid_layer_allocation.py``, 0.16.1).
    """
    values = reading.values
    ratios = [_ratio(reading, f"{prefix}{name}") for name in _RATIOS]
    reading.known |= {f"{prefix}{name}" for name in (*_RATIOS, "spec", "is_hybrid_model")}
    text, num_layers = values.get(_FIELD), values.get("num_layers")
    if text is None and num_layers and (any(ratios) or is_of_hybrids(reading.get(f"{prefix}spec"))):
        text = _allocated(num_layers, *ratios)
    if not text:
        for name in [name for name in values if name.startswith("mamba_")]:
            values.pop(name)
        return
    main, *extra = str(text).split("/")
    chunks = main.split("|")
    values[_FIELD] = "".join(chunks)
    if num_layers and num_layers != len(values[_FIELD]):
        reading.warnings.append(
            f"num_layers {num_layers} is ignored, since the pattern has {len(values[_FIELD])} layers (Megatron-LM's "
            "arguments, main of August 2026; core 0.16.1 refuses such a job)"
        )
    values["num_layers"] = len(values[_FIELD])
    if any(extra):
        reading.miss(
            _FIELD, "more", "the pattern has layers of multi-token prediction, which memlab does not have here"
        )
    stages = values.get("pipeline_model_parallel_size") or 1
    if len(chunks) > 1 and len(chunks) % stages:
        reading.blocked["job"].append(
            f"the pattern of layers has {len(chunks)} chunks, must have a multiple of the {stages} pipeline stages "
            "(Megatron-Core): move its bars, or change pipeline_model_parallel_size"
        )
    elif len(chunks) > 1:
        values["virtual_pipeline_model_parallel_size"] = len(chunks) // stages
        if len({*map(len, chunks)}) > 1:
            values["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * len(chunk) for chunk in chunks)}L"
    hidden, channels = values.get("hidden_size"), values.get("mamba_head_dim") or 64
    if hidden and not values.get("mamba_num_heads"):
        values["mamba_num_heads"] = 2 * hidden // channels


def _ratio(reading: Reading, key: str) -> float:
    """Returns a share of layers.

    Raises:
        ValueError: If it is no number from 0 to 1, with its line.
    """
    value = reading.get(key, 0.0) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{reading.entries.by_key[key].place}: {key} is {shortened(value)}, must be a share of the layers, from 0 "
            "to 1: correct it"
        )
    return float(value)


def _allocated(num_layers: int, of_attention: float, of_mlps: float) -> str:
    """Spreads layers of attention and MLPs over a model, as ``_allocate_auto`` does (0.16.1)."""
    kinds = ["M"] * num_layers
    attention = round(num_layers * of_attention)
    _place("*", kinds, (num_layers - attention) / (attention + 1))
    if mlps := round(num_layers * of_mlps):
        _place("-", kinds, (num_layers - attention - mlps) / mlps)
    return "".join(kinds)


def _place(letter: str, kinds: list[str], every: float) -> None:
    left = every
    for layer, kind in enumerate(kinds):
        if kind != "M":
            continue
        if left < 0.5:
            kinds[layer] = letter
            left += every
        else:
            left -= 1
