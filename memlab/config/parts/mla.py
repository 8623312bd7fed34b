"""Multi-latent attention: keys and values, and in large models queries, are made from a narrow latent vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import Part, SharedSize, Weight
from memlab.config.validation import check_whole_number, shortened

RopeType = Literal["rope", "yarn"]
_MOST_RANK = 2**16
_MOST_CHANNELS = 2**14


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(Part):
    """Causal attention of DeepSeek's kind (``megatron/core/transformer/multi_latent_attention.py``, 0.16.1).

    Each head of queries and keys has channels with and without a position. All heads share the part of a key that has
    the position.
    """

    hidden_size: int
    num_attention_heads: int
    multi_latent_attention: bool
    q_lora_rank: int | None
    """Of the latent vector of queries; None makes queries from the layer's input."""
    kv_lora_rank: int
    qk_head_dim: int
    """Channels of a head's queries and keys that have no position."""
    qk_pos_emb_head_dim: int
    """Channels that have one."""
    v_head_dim: int
    rope_type: RopeType
    qk_layernorm: bool
    """Whether latent vectors are normalised."""

    most: ClassVar = {
        "hidden_size": 2**20,
        "num_attention_heads": 2**13,
        "kv_lora_rank": _MOST_RANK,
        "qk_head_dim": _MOST_CHANNELS,
        "qk_pos_emb_head_dim": _MOST_CHANNELS,
        "v_head_dim": _MOST_CHANNELS,
    }
    recompute_modules: ClassVar = ("mla_up_proj",)
    offload_groups: ClassVar = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
    effective: ClassVar = ("recompute_modules:layernorm",)  # the norm before attention is a module

    def check(self, name: str) -> None:
        """Checks the fields, and that channels with a position divide into pairs."""
        Part.check(self, name)
        if self.q_lora_rank is not None:
            check_whole_number(f"{name}: q_lora_rank", self.q_lora_rank, at_most=_MOST_RANK, action="correct it")
        if self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"{name}: qk_pos_emb_head_dim is {self.qk_pos_emb_head_dim}, must be even, since rotary embeddings "
                "rotate pairs: correct it"
            )
        if self.rope_type not in ("rope", "yarn"):
            raise ValueError(f"{name}: rope_type is {shortened(self.rope_type)}, must be rope or yarn: choose one")

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads ranks and channels (``DeepseekV3Config`` in transformers 5.24)."""
        heads = config.whole("num_attention_heads")
        values = config.whole("v_head_dim")
        return {
            "multi_latent_attention": True,
            "hidden_size": config.whole("hidden_size"),
            "num_attention_heads": heads,
            "num_query_groups": heads,
            "kv_channels": values,
            # Null is without one, as in DeepSeek-V2-Lite; left out, transformers takes 1536 (5.24).
            "q_lora_rank": config.whole_or_null("q_lora_rank"),
            "kv_lora_rank": config.whole("kv_lora_rank"),
            "qk_head_dim": config.whole("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": config.whole("qk_rope_head_dim"),
            "v_head_dim": values,
            "rope_type": _rope_type(config),
            "qk_layernorm": kind.qk_layernorm,
        }

    @property
    def query_channels(self) -> int:
        """Channels of one head of queries or keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def weights(self) -> tuple[Weight, ...]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        queries = heads * self.query_channels
        if self.q_lora_rank is None:
            of_queries = [Weight("self_attention.linear_q_proj.weight", (queries, hidden), split=0)]
        else:
            of_queries = self._through_latent("q", self.q_lora_rank, self.q_lora_rank, queries)
        keys_and_values = heads * (self.qk_head_dim + self.v_head_dim)
        return (
            Weight("input_layernorm.weight", (hidden,)),
            *of_queries,
            *self._through_latent("kv", self.kv_lora_rank, self._kv_latent, keys_and_values),
            Weight("self_attention.linear_proj.weight", (hidden, heads * self.v_head_dim), split=1),
        )

    @property
    def _kv_latent(self) -> int:
        """Channels of the latent vector of keys and values, and of the position of all keys beside it."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    def _through_latent(self, name: str, rank: int, beside: int, width: int) -> list[Weight]:
        up = f"self_attention.linear_{name}_up_proj"
        return [
            Weight(f"self_attention.linear_{name}_down_proj.weight", (beside, self.hidden_size)),
            *([Weight(f"{up}.layer_norm_weight", (rank,))] if self.qk_layernorm else []),
            Weight(f"{up}.weight", (width, rank), split=0),
        ]

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the heads, which tensor parallel ranks share."""
        field = "num_attention_heads"
        return (SharedSize(field, "attention heads", self.num_attention_heads, "tensor_model_parallel_size"),)

    @property
    def largest_row(self) -> int:
        widest = max(self.query_channels, self.qk_head_dim + self.v_head_dim)
        return max(self.hidden_size, self.num_attention_heads * widest)

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of a forward pass for one token, with those of ``core_attn``."""
        return Part.operations(self, attended) + self.operations_of_modules(attended)["core_attn"]

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs of scores and values, of the projections from the latent vectors, and of the norm."""
        up = [weight for weight in self.weights() if weight.is_matrix and weight.name.endswith("_up_proj.weight")]
        if self.q_lora_rank is None:
            up += [weight for weight in self.weights() if weight.name == "self_attention.linear_q_proj.weight"]
        return {
            "core_attn": attended * self.num_attention_heads * (self.query_channels + self.v_head_dim),
            "mla_up_proj": sum(2.0 * weight.num_elements for weight in up),
            "layernorm": 4.0 * self.hidden_size,
        }

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of input, norm, latent vectors, queries, keys, values and the attention's output."""
        if recompute == "full":
            return 2 * self.hidden_size * tokens
        ranks = [self.kv_lora_rank, *([] if self.q_lora_rank is None else [self.q_lora_rank])]
        of_latents = sum(4 * rank + 4 if self.qk_layernorm else 2 * rank for rank in ranks)
        of_angles = 8 * self.qk_pos_emb_head_dim
        attended = 4 * self.num_attention_heads * (self.query_channels + self.v_head_dim)
        log_sums = 0 if recompute == "core_attn" else 4 * self.num_attention_heads
        return (4 * self.hidden_size + 4 + of_latents + of_angles + attended + log_sums) * tokens


def _rope_type(config: ConfigJson) -> RopeType:
    """Returns how angles are scaled; the factors change no tensor's size."""
    scaling: Any = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling is {shortened(scaling)}, must be an object: correct it")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_scaling has type {shortened(kind)}, must be yarn for latent attention, or left out")
    return "yarn" if kind == "yarn" else "rope"
