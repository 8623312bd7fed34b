"""The architectures that memlab knows: published models, and a tiny one with experts and one without.

The published values are those of the models' Hugging Face ``config.json`` files. The tiny members keep
their family's shape (grouped-query attention, q/k norms, experts) at widths that step on a laptop's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.config.from_json import read_json
from memlab.config.hugging_face import architecture_fields, model_name
from memlab.config.validation import (
    MOST_LAYERS,
    MOST_TOKENS_OF_A_SEQUENCE,
    check_number,
    check_whole_number,
    shortened,
)

Family = Literal["qwen3_moe", "mixtral", "phi3", "llama", "mistral", "qwen3"]
"""The ``model_type`` of the model's config.json. A model of which only the sizes are known counts as qwen3_moe if it
has experts, else as phi3: the layers of the others have the same parts, with or without norms of queries and keys."""

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

_LLAMA: dict[str, Any] = {
    "family": "llama",
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 128256,
    "rotary_base": 500000.0,
    "layernorm_epsilon": 1e-5,
}
_QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 151936,
    "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
}


def _dense(name: str, *sizes: int, tied: bool = False, **others: Any) -> Architecture:
    """Makes a dense architecture of its layers, hidden size, width of the MLP and attention heads."""
    fields = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    return Architecture(
        name=name, share_embeddings_and_output_weights=tied, **(others | dict(zip(fields, sizes, strict=True)))
    )


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
        # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, and likewise. (How these models scale
        # the angles of the rotary embedding changes no tensor's size, and is not applied here.)
        _dense("llama-3.2-1b", 16, 2048, 8192, 32, tied=True, **(_LLAMA | {"kv_channels": 64})),
        _dense("llama-3.2-3b", 28, 3072, 8192, 24, tied=True, **_LLAMA),
        _dense("llama-3.1-8b", 32, 4096, 14336, 32, **_LLAMA),
        _dense("llama-3.1-70b", 80, 8192, 28672, 64, **_LLAMA),
        # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, and likewise
        _dense("qwen3-0.6b", 28, 1024, 3072, 16, tied=True, **_QWEN3),
        _dense("qwen3-1.7b", 28, 2048, 6144, 16, tied=True, **_QWEN3),
        _dense("qwen3-4b", 36, 2560, 9728, 32, tied=True, **_QWEN3),
        _dense("qwen3-8b", 36, 4096, 12288, 32, **_QWEN3),
        _dense("qwen3-14b", 40, 5120, 17408, 40, **_QWEN3),
        _dense("qwen3-32b", 64, 5120, 25600, 64, **_QWEN3),
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
        values = architecture_fields(config)
        name = model_name(str(config_path.parent)) if config_path.name == "config.json" else config_path.stem
        return Architecture(name=_printable(name) or values["family"], **values)
    except ValueError as error:
        raise ValueError(f"{shortened(config_path)}: {error}") from error


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)
