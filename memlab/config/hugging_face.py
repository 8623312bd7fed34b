"""Reads a Hugging Face ``config.json``: the sizes by Megatron's names, and which parts memlab does not have."""

from __future__ import annotations

from typing import Any

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.families import FAMILIES, FamilyRow
from memlab.config.parts.dense import Dense
from memlab.config.parts.gdn import GatedDeltaNet
from memlab.config.parts.gqa import GroupedQueryAttention
from memlab.config.parts.mamba import Mamba
from memlab.config.parts.mla import LatentAttention
from memlab.config.parts.moe import Experts
from memlab.config.validation import is_whole_number, shortened

_READ: dict[str, FamilyRow] = {name: row for name, row in FAMILIES.items() if row.has_config}


def architecture_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields that decide sizes or meaning. A field that may be left out counts as left out where it is null.

    Returns:
        Fields of `Architecture`, all but the name.

    Raises:
        ValueError: If a field is missing, of the wrong type, or of a kind that memlab does not model.
    """
    name = config.get("model_type")
    kind = _READ.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"model_type {shortened(name)} is not supported: memlab reads {', '.join(_READ)}")
    fields = ConfigJson(config)
    _check_parts(fields, kind)
    rope = config.get("rope_parameters") or {}
    kinds = () if not isinstance(rope, dict) else ("sliding_attention", "full_attention")
    for part in (rope, *(rope.get(each) or {} for each in kinds)):
        if not isinstance(part, dict):
            raise ValueError(
                f"rope_parameters is {shortened(rope)}, must be an object, or one with an object for each kind of "
                "layers: correct it"
            )
    of_windows = ConfigJson(rope.get("sliding_attention") or {})
    local = of_windows.number("rope_theta", default=fields.number("rope_local_base_freq", default=10000.0))
    if kind.window_rotary_base not in (None, local):
        raise ValueError(
            f"the rotary base of layers with windows is {local:g}, must be {kind.window_rotary_base:g}, the only one "
            f"that memlab has for {name}: correct rope_local_base_freq or rope_parameters"
        )
    rope = rope.get("full_attention") or rope
    # Newer files of transformers keep the base, and the share that is rotated, among the rope's parameters.
    base = ConfigJson(rope).number("rope_theta", default=kind.rotary_base)
    share = ConfigJson(rope).number("partial_rotary_factor", default=kind.rotary_percent)
    if "rotary_dim" in config and kind.norms_all_heads:
        share = fields.whole("rotary_dim") / fields.whole("head_dim", default=kind.head_dim)
    epsilon = "layer_norm_epsilon" if kind.is_hybrid else "norm_eps" if kind.has_squared_relu else kind.epsilon
    read: dict[str, Any] = {
        "family": name,
        "num_layers": fields.whole("num_hidden_layers"),
        "vocab_size": fields.whole("vocab_size"),
        "rotary_base": fields.number("rope_theta", default=base),
        "rotary_percent": fields.number("partial_rotary_factor", default=share),
        "layernorm_epsilon": fields.number(epsilon, default=None if epsilon == "rms_norm_eps" else 1e-5),
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings", default=kind.ties_embeddings),
    }
    attention = LatentAttention if kind.multi_latent_attention else GroupedQueryAttention
    if kind.has_delta_net:
        read |= {"attention_output_gate": True, "linear_attention_freq": _linear_layers(fields)}
        read |= GatedDeltaNet.of_config(fields, kind)
    if kind.has_squared_relu:
        read |= {"normalization": "LayerNorm", "gated_linear_unit": False, "squared_relu": True}
    if kind.has_gelu:
        read |= {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True}
    pattern = _kinds_of_layers(fields) if kind.is_hybrid else None
    has_experts = kind.experts is not None and (pattern is None or "E" in pattern)
    for part in (attention, Dense, *([Experts] if has_experts else [])):
        read |= part.of_config(fields, kind)
    return read if pattern is None else read | _hybrid(fields, kind, pattern)


def model_type_of(config_class: str) -> str | None:
    """Returns the ``model_type`` of a class such as ``transformers.Qwen3MoeConfig``; None if memlab reads none."""
    name = config_class.rpartition(".")[2].lower()
    return next((kind for kind in _READ if f"{kind.replace('_', '')}config" == name), None)


_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def _kinds_of_layers(fields: ConfigJson) -> str:
    """Returns the pattern of a hybrid model's layers (``NemotronHConfig`` in transformers 5.24)."""
    listed = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    if listed is None:
        pattern = fields.values.get("hybrid_override_pattern")
        if not isinstance(pattern, str):
            raise ValueError("field 'hybrid_override_pattern' is missing: give the whole Hugging Face config.json")
        return pattern
    if not isinstance(listed, list) or not {*map(str, listed)} <= {*_LETTERS}:
        raise ValueError(
            f"layers_block_type is {shortened(listed)}, must be a list of {', '.join(_LETTERS)}: correct it"
        )
    return "".join(_LETTERS[each] for each in listed)


def _hybrid(fields: ConfigJson, kind: ModelType, pattern: str) -> dict[str, Any]:
    """Reads what only hybrid models have.

    Raises:
        ValueError: If a field says what memlab does not have.
    """
    num_layers = fields.values.get("num_hidden_layers")
    if num_layers is not None and num_layers != len(pattern):
        raise ValueError(
            f"num_hidden_layers is {shortened(num_layers)}, must be the {len(pattern)} layers of the pattern "
            "(transformers' NemotronHConfig): correct one of the two"
        )
    modelled: dict[str, Any] = {
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "conv_kernel": 4,
    }
    modelled |= {"chunk_size": 128, "use_bias": False, "mamba_proj_bias": False, "residual_in_fp32": False}
    for name, value in modelled.items():
        if fields.values.get(name, value) not in (value, None):
            raise ValueError(f"{name} {shortened(fields.values[name])} is not modelled: memlab models {value!r}")
    read: dict[str, Any] = {
        "num_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "position_embedding_type": "none",
        "gated_linear_unit": False,
        "squared_relu": True,
        **Mamba.of_config(fields, kind),
    }
    if "E" in pattern:
        read["moe_shared_expert_intermediate_size"] = fields.whole("moe_shared_expert_intermediate_size")
        read["moe_latent_size"] = fields.values.get("moe_latent_size")
        read["moe_layer_freq"] = None
    return read


def _linear_layers(fields: ConfigJson) -> int | tuple[int, ...]:
    """Returns which layers have gated delta net (``Qwen3NextConfig`` in transformers 5.24): all but every fourth."""
    every, kinds = fields.whole("full_attention_interval", default=4), fields.values.get("layer_types")
    if not kinds:
        return every
    pattern = tuple(int(kind == "linear_attention") for kind in kinds)
    return every if pattern == tuple(int((layer + 1) % every > 0) for layer in range(len(pattern))) else pattern


def _check_parts(fields: ConfigJson, kind: ModelType) -> None:
    """Refuses parts that memlab's layers do not have.

    Raises:
        ValueError: If the config has one, with the field that says so.
    """
    config = fields.values
    zero = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
    modelled: dict[str, tuple[Any, ...]] = dict.fromkeys(zero, (0, None))
    modelled["hidden_act"] = ("relu2" if kind.has_squared_relu else "gelu_new" if kind.has_gelu else "silu",)
    # Biases of attention's output, and norms of queries and keys, which no published model of these families has.
    absent = ("attention_out_bias", *(() if kind.qk_layernorm else ("qk_layernorm", "use_qk_norm")))
    modelled |= {name: (False, None) for name in absent if name != kind.qk_norm_field}
    modelled |= {name: (share,) for name, share in kind.dropout.items()}
    if kind.norms_all_heads_fused:
        modelled["clip_qkv"] = (None,)
    if kind.is_gemma:
        modelled |= dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh", None))
        for name, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), kind.soft_caps, strict=True):
            modelled[name] = (cap,)
    own = {"resid_pdrop": 0.0} if kind.has_gelu else {}  # of transformers' PhiConfig, where the file says nothing
    for name, values in modelled.items():
        value = config.get(name, own.get(name, values[0]))
        if value not in values:
            raise ValueError(f"{name} {shortened(value)} is not modelled: memlab models {values[0]!r}")
    for name in ("attention_bias", "qkv_bias", "mlp_bias"):
        is_known = (name == "qkv_bias" and kind.add_qkv_bias) or name == kind.qkv_bias_field
        if fields.flag(name, default=False) and not is_known:
            raise ValueError(
                f"{name} true is not supported: of biases, memlab has those of Qwen2's and GLM's attention only"
            )
    longest, window = config.get("max_position_embeddings"), config.get("sliding_window")
    is_whole = is_whole_number(longest) and is_whole_number(window, at_least=int(longest or 0))
    if (
        window is not None
        and not is_whole
        and not (kind.has_sinks or kind.window_pattern or kind.has_window)
        and fields.flag("use_sliding_window", default=kind.uses_window)
    ):
        raise ValueError(
            f"sliding_window {shortened(window)} is not modelled, unless it is at least max_position_embeddings, "
            f"{shortened(longest)}: memlab's attention sees all earlier tokens"
        )
    layers = [] if kind.is_hybrid else config.get("layer_types") or []
    known = ("full_attention", "sliding_attention") if kind.has_sinks or kind.window_pattern else ("full_attention",)
    known = (*known, "linear_attention") if kind.has_delta_net else known
    others = [layer for layer in layers if layer not in known] if isinstance(layers, list) else [layers]
    if others:
        raise ValueError(
            f"layer_types has {shortened(others[0])}, which is not modelled: memlab has {' and '.join(known)} only"
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
