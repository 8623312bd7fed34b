"""Attention with grouped queries: several heads of queries share one head of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.parts.part import Normalization, Part, SharedSize, Weight, norm_kept_bytes, norm_weights
from memlab.config.validation import is_whole_number, shortened

PositionEmbeddingType = Literal["rope", "learned_absolute", "none"]
SoftmaxType = Literal["vanilla", "learnable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQueryAttention(Part):
    """Causal self-attention, with rotary positions or without (``megatron/core/transformer/attention.py``, 0.16.1)."""

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_percent: float
    qk_layernorm: bool
    norms_all_heads: bool
    norms_all_heads_fused: bool
    add_qkv_bias: bool
    attention_output_gate: bool
    normalization: Normalization
    add_bias_linear: bool
    position_embedding_type: PositionEmbeddingType
    softmax_type: SoftmaxType
    window_size: tuple[int, int] | None
    window_attn_skip_freq: int | tuple[int, ...] | None
    sandwich_norms: bool

    most: ClassVar = {
        "hidden_size": 2**20,
        "num_attention_heads": 2**13,
        "num_query_groups": 2**13,
        "kv_channels": 2**14,
    }
    ranges: ClassVar = {"rotary_percent": (0, 1)}
    offload_groups: ClassVar = ("qkv_linear", "core_attn", "attn_proj")

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The norm before attention is no module."""
        reason = "the norm before attention is fused into linear_qkv: there is no norm module to offload"
        return {"offload_modules:attn_norm": reason}

    def check(self, name: str) -> None:
        """Checks the fields, and that heads divide into groups and channels into pairs."""
        Part.check(self, name)
        rotated = int(self.kv_channels * self.rotary_percent)
        if self.rotates and (rotated < 2 or rotated % 2):
            raise ValueError(
                f"{name}: kv_channels {self.kv_channels} x rotary_percent {self.rotary_percent:g} is {rotated}, "
                "must be an even number, since rotary embeddings rotate pairs: correct one of them"
            )
        self._check_window(name)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{name}: num_attention_heads is {self.num_attention_heads}, must be a multiple of "
                f"num_query_groups, {self.num_query_groups}: correct one of them"
            )

    def _check_window(self, name: str) -> None:
        window, layers = self.window_size, self.window_attn_skip_freq
        is_pair = isinstance(window, (tuple, list)) and len(window) == 2
        if window is not None and not (is_pair and is_whole_number(window[0], at_least=0) and window[1] == 0):
            raise ValueError(
                f"{name}: window_size is {shortened(window)}, must be a number of tokens and 0, which attention sees "
                "before and after a token, since memlab's attention is causal: correct it"
            )
        is_pattern = isinstance(layers, (tuple, list)) and {*layers} <= {0, 1}
        if layers is not None and not (is_pattern or is_whole_number(layers)):
            raise ValueError(
                f"{name}: window_attn_skip_freq is {shortened(layers)}, must be a whole number of layers, or for each "
                "layer 1 or 0: correct it"
            )

    @classmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads heads and channels; transformers divides the hidden size by the heads where no ``head_dim`` is."""
        heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
        return {
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "num_query_groups": config.whole("num_key_value_heads", default=kind.num_key_value_heads or heads),
            "kv_channels": config.whole("head_dim", default=kind.head_dim or max(1, hidden_size // heads)),
            "qk_layernorm": kind.qk_layernorm or config.says(kind.qk_norm_field),
            "norms_all_heads": kind.norms_all_heads,
            "norms_all_heads_fused": kind.norms_all_heads_fused,
            "add_qkv_bias": kind.add_qkv_bias or config.says(kind.qkv_bias_field, default=kind.has_qkv_bias),
            **(_sinks_of_config(config) if kind.has_sinks else {}),
            **(_windows_of_config(config, kind) if kind.window_pattern else {}),
            **(_window_of_all_layers(config, kind) if kind.has_window else {}),
        }

    @property
    def rotates(self) -> bool:
        """Whether it rotates queries and keys by their positions."""
        return self.position_embedding_type == "rope"

    @property
    def query_width(self) -> int:
        """Channels of all heads of queries together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def qkv_width(self) -> int:
        """Channels of all heads of queries, keys and values together, and of the gates of the output if it has them."""
        heads = self.num_attention_heads * (2 if self.attention_output_gate else 1) + 2 * self.num_query_groups
        return heads * self.kv_channels

    def weights(self) -> tuple[Weight, ...]:
        of_queries = Weight("self_attention.linear_qkv.bias", (self.qkv_width,), split=0)
        of_output = Weight("self_attention.linear_proj.bias", (self.hidden_size,))
        of_sinks = Weight("self_attention.core_attention.softmax_offset", (self.num_attention_heads,), split=0)
        norms = [f"self_attention.{name}_layernorm." for name in ("q", "k") if self.qk_layernorm]
        return (
            *norm_weights("self_attention.linear_qkv.layer_norm_", self.hidden_size, self.normalization),
            Weight("self_attention.linear_qkv.weight", (self.qkv_width, self.hidden_size), split=0),
            *((of_queries,) if self.add_qkv_bias or self.add_bias_linear else ()),
            *((of_sinks,) if self.softmax_type == "learnable" else ()),
            *(weight for name in norms for weight in self._norm_weights(name)),
            Weight("self_attention.linear_proj.weight", (self.hidden_size, self.query_width), split=1),
            *((of_output,) if self.add_bias_linear else ()),
            *(norm_weights("post_attention_layernorm.", self.hidden_size, "RMSNorm") if self.sandwich_norms else ()),
        )

    def _norm_weights(self, name: str) -> tuple[Weight, ...]:
        if not self.norms_all_heads:
            return norm_weights(name, self.kv_channels, self.normalization)
        heads = self.num_attention_heads if ".q_" in name else self.num_query_groups
        return (Weight(f"{name}weight", (heads * self.kv_channels,), split=0),)

    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the channels that tensor parallel ranks share; `Layout` has Megatron's further rules for heads."""
        return (
            SharedSize("the attention's size", "channels of all heads", self.query_width, "tensor_model_parallel_size"),
            SharedSize(
                "the size of query, key and value",
                "rows of query, key and value",
                self.qkv_width,
                "tensor_model_parallel_size",
            ),
        )

    @property
    def largest_row(self) -> int:
        return max(self.hidden_size, self.query_width)

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of a forward pass for one token, with those of ``core_attn``."""
        return Part.operations(self, attended) + self.operations_of_modules(attended)["core_attn"]

    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs of scores and values, on average over layers with a window and without.

        A causal mask leaves half of all pairs; a window leaves each token that many tokens, or all before it.
        """
        seen = min((self.window_size or (attended, 0))[0] + 1, attended)
        pairs = self._share_with_window * seen * (2 - seen / attended) + (1 - self._share_with_window) * attended
        return {"core_attn": 2.0 * pairs * self.query_width}

    @property
    def _share_with_window(self) -> float:
        """The share of layers that have a window (``is_layer_window_attention`` of core's transformer/utils.py)."""
        every = self.window_attn_skip_freq
        if self.window_size is None:
            return 0
        if isinstance(every, tuple):
            return sum(every) / len(every)
        return 1 if every is None else 1 - 1 / every

    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns the bytes of the layer's input, its norm, queries, keys, values and the attention's output."""
        if recompute == "full":
            return 2 * self.hidden_size * tokens
        heads, groups, channels = self.num_attention_heads, self.num_query_groups, self.kv_channels
        of_row = norm_kept_bytes(self.normalization)
        norms = (2 * channels + of_row) * (heads + groups) if self.qk_layernorm else 0
        if self.norms_all_heads_fused:
            norms = 2 * channels * (heads + groups) + 2 * of_row
        elif self.norms_all_heads:  # a copy in fp32, normalised values, and two reciprocals
            norms = (4 + 2) * channels * (heads + groups) + 2 * 4
        # The checkpoint's inputs: values are a part of linear_qkv's output, and queries and keys too, unless changed.
        has_copies = recompute == "core_attn" and (self.rotates or self.qk_layernorm)
        attended = (6 if has_copies else 4) * (heads + groups) * channels
        log_sums = 0 if recompute == "core_attn" else 4 * heads
        angles = 8 * int(channels * self.rotary_percent) if self.rotates else 0
        if self.attention_output_gate:  # the gate, the gated output, and maybe its part of linear_qkv's output
            attended += (6 if has_copies else 4) * self.query_width
        return (4 * self.hidden_size + of_row + norms + attended + log_sums + angles) * tokens


def _sinks_of_config(config: ConfigJson) -> dict[str, Any]:
    """Returns sinks, windows and biases (``GptOssConfig`` in transformers 5.24): every second layer has no window."""
    if not config.flag("attention_bias", default=True):
        raise ValueError("attention_bias false is not modelled: memlab has gpt-oss with biases of all matrices")
    window, kinds = config.values.get("sliding_window", 128), config.values.get("layer_types")
    has_window = [int(kind == "sliding_attention") for kind in kinds or ()]
    alternate = [(layer + 1) % 2 for layer in range(len(has_window))]
    return {
        "softmax_type": "learnable",
        "add_qkv_bias": False,  # all matrices have one
        "add_bias_linear": True,
        "window_size": None if window is None else (config.whole("sliding_window", default=128) - 1, 0),
        "window_attn_skip_freq": 2 if has_window == alternate else tuple(has_window),
    }


def _window_of_all_layers(config: ConfigJson, kind: ModelType) -> dict[str, Any]:
    """Returns the window of a Mistral or Phi-3, if sequences may be longer."""
    if config.values.get("sliding_window", kind.window) is None:
        return {}
    window, longest = config.whole("sliding_window", default=kind.window), config.values.get("max_position_embeddings")
    if longest is not None and window >= config.whole("max_position_embeddings"):
        return {}
    return {"window_size": (window - 1, 0)}


def _windows_of_config(config: ConfigJson, kind: ModelType) -> dict[str, Any]:
    """Returns the windows of Gemma 2 and 3: one of so many layers has none (transformers 5.24)."""
    if config.values.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention true is not modelled: memlab's attention is causal")
    every, layers = kind.window_pattern, config.whole("num_hidden_layers")
    every = config.whole("sliding_window_pattern", default=every)
    kinds = config.values.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)
    ]
    return {
        "window_size": (config.whole("sliding_window", default=4096) - 1, 0),
        "window_attn_skip_freq": tuple(int(each == "sliding_attention") for each in kinds),
    }
