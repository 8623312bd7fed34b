"""The architectures that memlab knows: two families, their published members, and one tiny member of each.

The published values are those of the models' Hugging Face ``config.json`` files. The tiny members keep
their family's shape (grouped-query attention, q/k norms, experts) at widths that step on a laptop's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.config.from_json import read_json
from memlab.config.validation import (
    MOST_LAYERS,
    MOST_TOKENS_OF_A_SEQUENCE,
    check_number,
    check_whole_number,
    is_whole_number,
    shortened,
)

Family = Literal["qwen3_moe", "phi3"]
"""Models with experts, and dense ones. Each is named after the first one of its kind that was compared with GPUs."""

# Some ten times what any published model has. Below these limits no tensor's bytes overflow 64 bits, and what walks
# over layers, experts or ranks ends.
_MOST = {
    "num_layers": MOST_LAYERS,
    "hidden_size": 2**20,
    "ffn_hidden_size": 2**22,
    "num_attention_heads": 2**13,
    "num_query_groups": 2**13,
    "kv_channels": 2**14,
    "vocab_size": 2**24,
    "default_seq_length": MOST_TOKENS_OF_A_SEQUENCE,
    "num_moe_experts": 2**14,
    "moe_router_topk": 2**14,
    "moe_ffn_hidden_size": 2**22,
}
_OF_EXPERTS = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
_MOST_PARAMETERS = 10**15
_RANGES: dict[str, tuple[float | None, float]] = {
    "rotary_base": (0, 1e15),
    "rotary_percent": (0, 1),
    "layernorm_epsilon": (0, 1),
    "moe_aux_loss_coeff": (None, 1e6),
}
"""A number has to be above the first (or at least 0 where there is none), and at most the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One decoder-only transformer; field names are Megatron's `TransformerConfig` names."""

    name: str
    family: Family
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    rotary_base: float
    rotary_percent: float = 1.0
    layernorm_epsilon: float
    share_embeddings_and_output_weights: bool = False
    qk_layernorm: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_aux_loss_coeff: float = 0.0
    moe_router_pre_softmax: bool = False
    """Whether the selected probabilities are not renormalised (Hugging Face ``norm_topk_prob: false``)."""
    default_seq_length: int = 4096
    """The sequence length that a Scenario takes when none is given."""

    def __post_init__(self) -> None:
        for name, at_most in _MOST.items():
            if self.is_moe or name not in _OF_EXPERTS:
                check_whole_number(f"{self.name}: {name}", getattr(self, name), at_most=at_most, action="correct it")
        for name, (above, largest) in _RANGES.items():
            check_number(f"{self.name}: {name}", getattr(self, name), above, largest, action="correct it")
        for name in ("share_embeddings_and_output_weights", "qk_layernorm", "moe_router_pre_softmax"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{self.name}: {name} is {getattr(self, name)!r}, must be True or False: correct it")
        rotated = int(self.kv_channels * self.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"{self.name}: kv_channels {self.kv_channels} x rotary_percent {self.rotary_percent:g} is {rotated}, "
                "must be an even number, since rotary embeddings rotate pairs: correct one of them"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.name}: num_attention_heads is {self.num_attention_heads}, must be a multiple of "
                f"num_query_groups, {self.num_query_groups}: correct one of them"
            )
        self._check_experts()
        if self.num_parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"{self.name}: it has {self.num_parameters:,} parameters, must have at most {_MOST_PARAMETERS:,} "
                "(more than "
                "any real model has): correct its sizes"
            )

    def _check_experts(self) -> None:
        if self.num_moe_experts is None:
            return
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"{self.name}: moe_router_topk is {self.moe_router_topk}, must be at most num_moe_experts, "
                f"{self.num_moe_experts}: correct one of them"
            )
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            # ``TransformerConfig.__post_init__`` of megatron-core 0.16.1 and 0.19.2.
            raise ValueError(
                f"{self.name}: moe_router_topk is 1 without moe_router_pre_softmax, must be at least 2 there by a rule "
                "of Megatron-Core, because the softmax over one expert has no gradient: set moe_router_pre_softmax "
                "(norm_topk_prob false in a config.json), or choose more experts"
            )

    @property
    def is_moe(self) -> bool:
        """Whether the layers have experts instead of one dense MLP."""
        return self.num_moe_experts is not None

    @property
    def largest_row(self) -> int:
        """The most elements that one token has in any activation, before anything is split over ranks."""
        return max(
            self.vocab_size,
            self.ffn_hidden_size,
            self.hidden_size,
            self.num_attention_heads * self.kv_channels,
            self.moe_router_topk * max(self.moe_ffn_hidden_size, self.hidden_size),
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, counted from the published shapes."""
        query, kv = self.num_attention_heads * self.kv_channels, self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        routers = (self.num_moe_experts or 0) * self.hidden_size
        mlp = 0 if self.is_moe else 3 * self.hidden_size * self.ffn_hidden_size
        embeddings = self.vocab_size * self.hidden_size
        embeddings *= 1 if self.share_embeddings_and_output_weights else 2
        outside = self.num_layers * (attention + norms + routers + mlp) + embeddings + self.hidden_size
        return outside + self.num_parameters_of_experts

    @property
    def num_parameters_of_experts(self) -> int:
        """Number of parameters in the experts of all layers; 0 for a dense model."""
        return self.num_layers * (self.num_moe_experts or 0) * 3 * self.hidden_size * self.moe_ffn_hidden_size


_QWEN3_MOE: dict[str, Any] = {
    "family": "qwen3_moe",
    "kv_channels": 128,
    "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "moe_aux_loss_coeff": 1e-3,
}

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
        Architecture(
            name="qwen3-30b-a3b",
            num_layers=48,
            hidden_size=2048,
            ffn_hidden_size=6144,
            num_attention_heads=32,
            num_query_groups=4,
            vocab_size=151936,
            num_moe_experts=128,
            moe_router_topk=8,
            moe_ffn_hidden_size=768,
            **_QWEN3_MOE,
        ),
        # https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json
        Architecture(
            name="qwen3-235b-a22b",
            num_layers=94,
            hidden_size=4096,
            ffn_hidden_size=12288,
            num_attention_heads=64,
            num_query_groups=4,
            vocab_size=151936,
            num_moe_experts=128,
            moe_router_topk=8,
            moe_ffn_hidden_size=1536,
            **_QWEN3_MOE,
        ),
        Architecture(
            name="qwen3-moe-tiny",
            num_layers=4,
            hidden_size=128,
            ffn_hidden_size=384,
            num_attention_heads=4,
            num_query_groups=2,
            vocab_size=256,
            num_moe_experts=8,
            moe_router_topk=2,
            moe_ffn_hidden_size=64,
            default_seq_length=1024,
            **(_QWEN3_MOE | {"kv_channels": 32}),
        ),
        # https://huggingface.co/microsoft/phi-4/blob/main/config.json
        Architecture(
            name="phi-4",
            family="phi3",
            num_layers=40,
            hidden_size=5120,
            ffn_hidden_size=17920,
            num_attention_heads=40,
            num_query_groups=10,
            kv_channels=128,
            vocab_size=100352,
            rotary_base=250000.0,
            layernorm_epsilon=1e-5,
        ),
        # https://huggingface.co/microsoft/Phi-4-mini-instruct/blob/main/config.json (its "longrope" factors
        # rescale angles beyond 4096 positions and change no tensor's size; they are not applied here)
        Architecture(
            name="phi-4-mini",
            family="phi3",
            num_layers=32,
            hidden_size=3072,
            ffn_hidden_size=8192,
            num_attention_heads=24,
            num_query_groups=8,
            kv_channels=128,
            vocab_size=200064,
            rotary_base=10000.0,
            rotary_percent=0.75,
            layernorm_epsilon=1e-5,
            share_embeddings_and_output_weights=True,
        ),
        Architecture(
            name="phi-4-tiny",
            family="phi3",
            num_layers=4,
            hidden_size=160,
            ffn_hidden_size=560,
            num_attention_heads=5,
            num_query_groups=5,
            kv_channels=32,
            vocab_size=256,
            rotary_base=250000.0,
            layernorm_epsilon=1e-5,
            default_seq_length=1024,
        ),
    )
}


def find_architecture(name: str | Path) -> Architecture:
    """Finds an architecture by its name, or reads it from a local Hugging Face config.

    Args:
        name: A key of `ARCHITECTURES`, or the path of a ``config.json`` or of a folder that holds one.

    Raises:
        ValueError: If it is neither, or the config is damaged, or the model has parts that memlab does not model.
    """
    if not isinstance(name, (str, Path)):
        raise ValueError(
            f"architecture is {shortened(name)}, must be a name, a path or an Architecture: choose from "
            f"{', '.join(ARCHITECTURES)}, or give the path of a config.json or its folder"
        )
    known = ARCHITECTURES.get(str(name))
    if known is not None:
        return known
    path = Path(name)
    try:
        config_path = path / "config.json" if path.is_dir() else path
        if not config_path.exists():
            raise ValueError(
                f"architecture {shortened(str(name))} is neither a known name nor a Hugging Face config.json: "
                f"choose from {', '.join(ARCHITECTURES)}, or give the path of a config.json or its folder"
            )
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(
            f"architecture {shortened(str(name))} cannot be read ({(error.strerror or '').lower()}): choose from "
            f"{', '.join(ARCHITECTURES)}, or give the path of a config.json or its folder"
        ) from error
    config = read_json(config_path, "give a Hugging Face config.json")
    if not isinstance(config, dict):
        raise ValueError(
            f"{shortened(config_path)} holds {type(config).__name__}, not an object: give a Hugging Face config.json"
        )
    try:
        return _from_hugging_face(config, config_path)
    except ValueError as error:
        raise ValueError(f"{shortened(config_path)}: {error}") from error


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


def _from_hugging_face(config: dict[str, Any], path: Path) -> Architecture:
    """Reads the fields that decide sizes or meaning. A field that may be left out counts as left out where it is null.

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
        "name": _printable(model_name(str(path.parent)) if path.name == "config.json" else path.stem) or str(name),
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
        return Architecture(family="phi3", **common)
    width = "moe_intermediate_size" if kind.experts == "own width" else "intermediate_size"
    return Architecture(
        family="qwen3_moe",
        **common,
        num_moe_experts=_num_experts(config),
        moe_router_topk=_whole(config, "num_experts_per_tok"),
        moe_ffn_hidden_size=_whole(config, width),
        moe_aux_loss_coeff=_number(config, "router_aux_loss_coef", default=0.001),
        # Mixtral has no such field, and always normalises.
        moe_router_pre_softmax=not _flag(config, "norm_topk_prob", default=kind.experts == "width of the MLP"),
    )


def _num_experts(config: dict[str, Any]) -> int:
    """Returns the number of experts; of Qwen3-MoE, transformers writes the second name since 5.18."""
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
    for name in ("attention_bias", "mlp_bias"):
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


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)
