"""Which architecture a job trains: found by the model's name, or by its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memlab.config.architectures import (
    ARCHITECTURES,
    Architecture,
    find_architecture,
    published_architecture,
)
from memlab.config.families import Family
from memlab.config.hugging_face import architecture_fields, model_name
from memlab.config.parts.gqa import GroupedQueryAttention
from memlab.config.parts.mla import LatentAttention
from memlab.config.validation import shortened
from memlab.jobs.model_names import models_in, named_by_a_folder

_QUANTIZED = re.compile(r"[-_.](fp8|int4|int8|awq|gptq|nvfp4|mxfp[48]|w4a16|w8a8|w8a16)(?=[-_.]|$)", re.IGNORECASE)
_OUTSIDE_LAYERS = ("vocab_size", "share_embeddings_and_output_weights")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_OF_LATENT_ATTENTION = {field.name for field in fields(LatentAttention)} - {
    field.name for field in fields(GroupedQueryAttention)
}
_MOST_MENTIONED = 3
_ROUTER = ("moe_aux_loss_coeff", "moe_router_pre_softmax")
"""What a job chooses for a model of any name: it decides which of the router's tensors are kept."""


def architecture_named(name: str, folder: Path, others: Iterable[str] = ()) -> tuple[Architecture, str]:
    """Finds the architecture of a model's name or path, such as ``Qwen/Qwen3-30B-A3B-Base``.

    Args:
        name: As the job's file has it.
        folder: That of the job's file; a relative path of a model's folder may start there.
        others: Names in the job's file that may mention the model, such as that of the run.

    Returns:
        The architecture, and a warning if only a folder above the model's own names it.

    Raises:
        ValueError: If memlab does not model it.
    """
    for path in (Path(name), folder / name):
        try:
            if (path / "config.json").is_file():
                return find_architecture(path), ""
        except OSError:
            continue
    if (known := published_architecture(name)) is not None:
        return known, ""
    if (by_folder := named_by_a_folder(name)) is not None:
        return by_folder[0], (
            f"the model is {shortened(name)}, and memlab takes {by_folder[0].name}, as the folder {by_folder[1]} is "
            "called: give --architecture for another"
        )
    mentioned = models_in([name, *others])
    says = f" (the job's names say {' or '.join(mentioned)})" if 0 < len(mentioned) <= _MOST_MENTIONED else ""
    raise ValueError(
        f"the model is {shortened(name)}, a name that memlab does not know: give --architecture with a model that "
        f"memlab knows{says}, or with the path of the model's config.json; memlab predict --help lists them"
    )


def is_quantized(name: str) -> bool:
    """Whether a checkpoint's name says that its weights have fewer than 2 bytes, as ``Qwen/Qwen3-4B-FP8`` does."""
    return _QUANTIZED.search(model_name(name)) is not None


def missing_sizes(values: dict[str, Any]) -> list[str]:
    """Returns the sizes without which no model has its parameters, and that a job does not give."""
    return [size for size in _NEEDED if values.get(size) is None]


def architecture_of(values: dict[str, Any], name: str) -> Architecture:
    """Returns the architecture with these sizes, by the name of a known one where its layers and vocabulary are equal.

    Args:
        values: Fields of `Architecture`; ``num_query_groups`` and ``kv_channels`` may be missing.
        name: What an architecture that memlab does not know is called.

    Raises:
        ValueError: If a size is missing or breaks a rule.
    """
    missing = missing_sizes(values)
    if missing:
        raise ValueError(
            f"the job names no model and does not give {', '.join(missing)}: give --architecture, or the sizes with "
            "--set"
        )
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    known_fields = {field.name for field in fields(Architecture) if field.name != "moe_layer_freq"}
    sizes = {key: value for key, value in values.items() if key in known_fields and value is not None}
    sizes.setdefault("num_query_groups", heads)
    sizes.setdefault("kv_channels", max(1, hidden // max(1, heads)))
    sizes.setdefault("ffn_hidden_size", 4 * hidden)
    sizes.setdefault("rotary_base", 10000.0)
    sizes.setdefault("layernorm_epsilon", 1e-5)
    family: Family = "gpt2" if sizes.get("position_embedding_type") == "learned_absolute" else "phi3"
    if sizes.get("hybrid_override_pattern"):
        family = "nemotron_h"
    else:
        sizes = {key: value for key, value in sizes.items() if not key.startswith("mamba_")}
    if sizes.get("num_moe_experts"):
        family = family if family == "nemotron_h" else "qwen3_moe"
        sizes.setdefault("moe_ffn_hidden_size", sizes["ffn_hidden_size"])
        sizes.setdefault("moe_router_topk", 2)
    else:
        sizes = {key: value for key, value in sizes.items() if "moe" not in key}
    if sizes.get("multi_latent_attention"):
        sizes.setdefault("rope_type", "yarn")  # ``MLATransformerConfig`` of megatron-core 0.16.1
    else:
        sizes = {key: value for key, value in sizes.items() if key not in _OF_LATENT_ATTENTION}
    sizes["rotary_base"], sizes["layernorm_epsilon"] = float(sizes["rotary_base"]), float(sizes["layernorm_epsilon"])
    return _as_published(Architecture(name=name, family=family, **sizes))


def architecture_written_out(config: dict[str, Any], name: str) -> Architecture:
    """Returns the architecture of the fields of a Hugging Face configuration that a job's file has.

    Args:
        config: With its ``model_type``; what is left out has the default of the configuration's class.
        name: What an architecture that memlab does not know is called.

    Raises:
        ValueError: If a field is missing, or of a kind that memlab does not model.
    """
    return _as_published(Architecture(name=name, **architecture_fields(config)))


def _as_published(made: Architecture) -> Architecture:
    for published in ARCHITECTURES.values():
        known = replace(published, **{name: getattr(made, name) for name in _ROUTER}) if made.routes else published
        compared = ("parts", "hybrid_override_pattern", *_OUTSIDE_LAYERS)
        if all(getattr(known, name) == getattr(made, name) for name in compared):
            return known
    return made
