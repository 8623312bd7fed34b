"""The models that memlab knows: two families, their published members, and one tiny member of each.

The published values are those of the models' Hugging Face ``config.json`` files. The tiny members keep
their family's shape (grouped-query attention, q/k norms, experts) at widths that step on a laptop's CPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.config.validation import check_whole_number

Family = Literal["qwen3_moe", "phi3"]


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
    """True where the kept probabilities are not renormalised (Hugging Face ``norm_topk_prob: false``)."""
    default_seq_length: int = 4096
    """The sequence length that a Scenario takes when none is given."""

    def __post_init__(self) -> None:
        counts = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"]
        counts += ["kv_channels", "vocab_size", "default_seq_length"]
        counts += ["num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"] if self.is_moe else []
        for name in counts:
            check_whole_number(f"{self.name}: {name}", getattr(self, name), action="correct it")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.name}: num_attention_heads is {self.num_attention_heads}, must be a multiple of "
                f"num_query_groups, {self.num_query_groups}: correct one of them"
            )
        if self.num_moe_experts is not None and self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"{self.name}: moe_router_topk is {self.moe_router_topk}, must be at most num_moe_experts, "
                f"{self.num_moe_experts}: correct one of them"
            )

    @property
    def is_moe(self) -> bool:
        """Whether the layers hold experts instead of one dense MLP."""
        return self.num_moe_experts is not None

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, all layers, counted from the published shapes."""
        query, kv = self.num_attention_heads * self.kv_channels, self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        if self.num_moe_experts is not None:
            expert = 3 * self.hidden_size * self.moe_ffn_hidden_size
            mlp = self.num_moe_experts * (expert + self.hidden_size)
        else:
            mlp = 3 * self.hidden_size * self.ffn_hidden_size
        embeddings = self.vocab_size * self.hidden_size
        embeddings *= 1 if self.share_embeddings_and_output_weights else 2
        return self.num_layers * (attention + norms + mlp) + embeddings + self.hidden_size


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
        ValueError: If it is neither, or if the config is of another family or uses what memlab does not model.
    """
    known = ARCHITECTURES.get(str(name))
    if known is not None:
        return known
    path = Path(name)
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        raise ValueError(
            f"architecture {str(name)!r} is neither a known name nor a Hugging Face config.json: "
            f"choose from {', '.join(ARCHITECTURES)}, or give the path of a config.json or its folder"
        )
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise ValueError(f"{config_path} is not valid JSON ({error}): give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} holds {type(config).__name__}, not an object: give a Hugging Face config.json")
    return _from_hugging_face(config, config_path)


def _from_hugging_face(config: dict[str, Any], path: Path) -> Architecture:
    family = config.get("model_type")
    if family not in ("qwen3_moe", "phi3"):
        raise ValueError(f"{path}: model_type {family!r} is not supported: memlab models qwen3_moe and phi3")
    changes_memory = {
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
        "resid_pdrop": (0, 0.0),
        "embd_pdrop": (0, 0.0),
    }
    for name, modelled in changes_memory.items():
        if name in config and config[name] not in modelled:
            raise ValueError(f"{path}: {name} {config[name]!r} is not modelled: memlab models {modelled[0]!r}")
    try:
        heads = config["num_attention_heads"]
        if not isinstance(heads, int) or heads < 1 or not isinstance(config["hidden_size"], int):
            raise ValueError(
                f"{path}: num_attention_heads is {heads!r} and hidden_size {config['hidden_size']!r}, must be whole "
                "numbers: correct them"
            )
        common: dict[str, Any] = {
            "name": (path.parent.name if path.name == "config.json" else path.stem) or family,
            "family": family,
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": config["num_attention_heads"],
            # transformers' own default is 4 for Qwen3-MoE, and as many as heads for phi-3.
            "num_query_groups": config.get("num_key_value_heads") or (heads if family == "phi3" else 4),
            "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            "vocab_size": config["vocab_size"],
            # Newer files of transformers keep it among the rope's parameters.
            "rotary_base": float(
                config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0
            ),
            "layernorm_epsilon": config["rms_norm_eps"],
            "share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings", False)),
        }
        if config.get("attention_bias"):
            raise ValueError(f"{path}: attention_bias true is not supported: both families train without biases")
        if family == "phi3":
            return Architecture(**common, rotary_percent=config.get("partial_rotary_factor", 1.0))
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(
                f"{path}: dense layers among MoE layers are not supported: mlp_only_layers must be empty and "
                "decoder_sparse_step 1"
            )
        return Architecture(
            **common,
            qk_layernorm=True,
            num_moe_experts=config["num_experts"],
            moe_router_topk=config["num_experts_per_tok"],
            moe_ffn_hidden_size=config["moe_intermediate_size"],
            moe_aux_loss_coeff=config.get("router_aux_loss_coef", 0.0),
            moe_router_pre_softmax=not config.get("norm_topk_prob", True),
        )
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing: give the whole Hugging Face config.json") from error
    except TypeError as error:
        raise ValueError(f"{path}: a field is of another kind than memlab reads ({error}): correct it") from error
