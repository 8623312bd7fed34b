"""Reads a Hugging Face ``config.json``: the sizes by Megatron's names, and which parts memlab does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memlab.config.validation import check_number, check_whole_number, is_whole_number, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class _ModelType:
    """A kind of Hugging Face config whose layers memlab has: what they consist of, and what a left-out field means.

    The values are those of transformers 5.24, ``models/*/configuration_*.py`` and ``modeling_*.py``.
    """

    num_key_value_heads: int | None = None
    """None takes as many as attention heads."""
    head_dim: int | None = None
    """None divides the hidden size by the attention heads."""
    qk_layernorm: bool = False
    uses_window: bool = True
    """Whether a ``sliding_window`` counts where ``use_sliding_window`` is left out."""
    experts: Literal["own width", "width of the MLP"] | None = None


_MODEL_TYPES = {
    "qwen3_moe": _ModelType(num_key_value_heads=4, qk_layernorm=True, uses_window=False, experts="own width"),
    "mixtral": _ModelType(num_key_value_heads=8, experts="width of the MLP"),
    "phi3": _ModelType(),
    "llama": _ModelType(),
    "mistral": _ModelType(num_key_value_heads=8),
    "qwen3": _ModelType(num_key_value_heads=32, head_dim=128, qk_layernorm=True, uses_window=False),
}
_OTHER_PARTS = {
    "qwen2": "biases of queries, keys and values",
    "qwen2_moe": "shared experts, and biases of queries, keys and values",
}
"""By model type, which of its parts memlab lacks."""


def architecture_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields that decide sizes or meaning. A field that may be left out counts as left out where it is null.

    Returns:
        Fields of `Architecture`, all but the name.

    Raises:
        ValueError: If a field is missing, of the wrong type, or of a kind that memlab does not model.
    """
    name = config.get("model_type")
    kind = _MODEL_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        lacks = f", since it has {_OTHER_PARTS[name]}" if isinstance(name, str) and name in _OTHER_PARTS else ""
        raise ValueError(
            f"model_type {shortened(name)} is not supported{lacks}: memlab reads {', '.join(_MODEL_TYPES)}"
        )
    _check_parts(config, kind)
    heads, hidden_size = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {shortened(rope)}, must be an object: correct it")
    # Newer files of transformers keep the base, and the share that is rotated, among the rope's parameters.
    share = _number(rope, "partial_rotary_factor", default=1.0)
    common: dict[str, Any] = {
        "family": name,
        "num_layers": _whole(config, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": _whole(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": _whole(config, "num_key_value_heads", default=kind.num_key_value_heads or heads),
        "kv_channels": _whole(config, "head_dim", default=kind.head_dim or max(1, hidden_size // heads)),
        "vocab_size": _whole(config, "vocab_size"),
        "rotary_base": _number(config, "rope_theta", default=_number(rope, "rope_theta", default=10000.0)),
        "rotary_percent": _number(config, "partial_rotary_factor", default=share),
        "layernorm_epsilon": _number(config, "rms_norm_eps"),
        "share_embeddings_and_output_weights": _flag(config, "tie_word_embeddings", default=False),
        "qk_layernorm": kind.qk_layernorm,
    }
    if kind.experts is None:
        return common
    width = "moe_intermediate_size" if kind.experts == "own width" else "intermediate_size"
    return common | {
        "num_moe_experts": _num_experts(config),
        "moe_router_topk": _whole(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": _whole(config, width),
        "moe_aux_loss_coeff": _number(config, "router_aux_loss_coef", default=0.001),
        # Mixtral has no such field, and always normalises.
        "moe_router_pre_softmax": not _flag(config, "norm_topk_prob", default=kind.experts == "width of the MLP"),
    }


def _num_experts(config: dict[str, Any]) -> int:
    """Returns the number of experts; of Qwen3-MoE, transformers writes the second name since 5.1."""
    names = ("num_experts", "num_local_experts")
    found = {name: _whole(config, name) for name in names if name in config} or {names[0]: _whole(config, names[0])}
    if len(set(found.values())) > 1:
        given = " and ".join(f"{name} {number}" for name, number in found.items())
        raise ValueError(f"it has {given}, two names for the same number: leave the wrong one out")
    return next(iter(found.values()))


def _check_parts(config: dict[str, Any], kind: _ModelType) -> None:
    """Refuses parts that memlab's layers do not have.

    Raises:
        ValueError: If the config has one, with the field that says so.
    """
    zero = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
    modelled: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)} | dict.fromkeys(zero, (0, None))
    for name, values in modelled.items():
        if name in config and config[name] not in values:
            raise ValueError(f"{name} {shortened(config[name])} is not modelled: memlab models {values[0]!r}")
    for name in ("attention_bias", "qkv_bias", "mlp_bias"):
        if _flag(config, name, default=False):
            raise ValueError(f"{name} true is not supported: memlab's linears have no biases")
    longest, window = config.get("max_position_embeddings"), config.get("sliding_window")
    is_whole = is_whole_number(longest) and is_whole_number(window, at_least=int(longest or 0))
    if window is not None and not is_whole and _flag(config, "use_sliding_window", default=kind.uses_window):
        raise ValueError(
            f"sliding_window {shortened(window)} is not modelled, unless it is at least max_position_embeddings, "
            f"{shortened(longest)}: memlab's attention sees all earlier tokens"
        )
    layers = config.get("layer_types") or []
    others = [layer for layer in layers if layer != "full_attention"] if isinstance(layers, list) else [layers]
    if others:
        raise ValueError(
            f"layer_types has {shortened(others[0])}, which is not modelled: memlab has full_attention only"
        )
    if config.get("shared_expert_intermediate_size"):
        raise ValueError(
            f"shared_expert_intermediate_size {shortened(config['shared_expert_intermediate_size'])} is not modelled: "
            "memlab has no shared experts"
        )
    if config.get("mlp_only_layers") or _whole(config, "decoder_sparse_step", default=1) != 1:
        raise ValueError(
            "dense layers among MoE layers are not supported: mlp_only_layers must be empty and decoder_sparse_step 1"
        )


def model_name(path: str) -> str:
    """Returns the name of the model in a path, such as ``Qwen3-30B-A3B`` for the folder of a snapshot in a cache.

    The cache of huggingface_hub (2.4) keeps a model in ``models--OWNER--NAME/snapshots/COMMIT``.
    """
    parts = path.rstrip("/").split("/")
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    if cached:
        return cached[-1]
    return parts[-3] if len(parts) > 2 and parts[-2] == "snapshots" else parts[-1]


def _field(config: dict[str, Any], name: str, default: Any) -> Any:
    if default is None and name not in config:
        raise ValueError(f"field {name!r} is missing: give the whole Hugging Face config.json")
    value = config.get(name)
    return default if value is None and default is not None else value


def _whole(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _field(config, name, default)
    check_whole_number(name, value, action="correct it")
    return int(value)


def _number(config: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _field(config, name, default)
    check_number(name, value, above=None, at_most=1e300, action="correct it")
    return float(value)


def _flag(config: dict[str, Any], name: str, *, default: bool) -> bool:
    value = _field(config, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shortened(value)}, must be true or false: correct it")
    return value
