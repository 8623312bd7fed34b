"""The architectures that memlab knows: published models, and a tiny one with experts and one without.

The published values are those of the models' Hugging Face ``config.json`` files. The tiny members keep
their family's shape (grouped-query attention, q/k norms, experts) at widths that step on a laptop's CPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from memlab.config.families import FAMILIES, Family
from memlab.config.from_json import read_json
from memlab.config.hugging_face import architecture_fields, model_name
from memlab.config.parts.dense import Dense
from memlab.config.parts.gdn import AttentionVariant, GatedDeltaNet
from memlab.config.parts.gqa import GroupedQueryAttention, PositionEmbeddingType, SoftmaxType
from memlab.config.parts.mamba import Mamba
from memlab.config.parts.mla import LatentAttention, RopeType
from memlab.config.parts.moe import Experts, ScoreFunction
from memlab.config.parts.part import FeedForward, Normalization, Part, SharedSize, Weight, norm_weights
from memlab.config.remembered import Remembers, remembered
from memlab.config.validation import (
    MOST_LAYERS,
    MOST_TOKENS_OF_A_SEQUENCE,
    check_number,
    check_whole_number,
    shortened,
)

# Some ten times what any published model has, as `Part.most`. Below these limits no tensor's bytes overflow 64 bits,
# and what walks over layers, experts or ranks ends.
_MOST = {"num_layers": MOST_LAYERS, "vocab_size": 2**24, "default_seq_length": MOST_TOKENS_OF_A_SEQUENCE}
_MOST_PARAMETERS = 10**15
_RANGES: dict[str, tuple[float | None, float]] = {
    "rotary_base": (0, 1e15),
    "layernorm_epsilon": (0, 1),
}
"""A number has to be above the first (or at least 0 where there is none), and at most the second."""
_SWITCHES = (
    *("share_embeddings_and_output_weights", "qk_layernorm", "add_qkv_bias", "moe_router_pre_softmax"),
    *("moe_router_enable_expert_bias", "moe_shared_expert_gate", "multi_latent_attention"),
    *("gated_linear_unit", "add_bias_linear", "quick_geglu", "norms_all_heads"),
    *("norms_all_heads_fused", "squared_relu", "attention_output_gate"),
)
_CHOICES = {
    "normalization": get_args(Normalization),
    "position_embedding_type": get_args(PositionEmbeddingType),
    "softmax_type": get_args(SoftmaxType),
}

_KINDS: dict[str, type[Part]] = {"M": Mamba, "*": GroupedQueryAttention, "-": Dense, "E": Experts}
"""The letters of `Architecture.hybrid_override_pattern`."""


class LayerKind(NamedTuple):
    """What decides the parts of a layer."""

    has_linear_attention: bool
    """Whether it has the model's `experimental_attention_variant` in the place of attention."""
    routes: bool
    """Whether it has experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture(Remembers):
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
    norms_all_heads: bool = False
    """Whether queries, and keys, are normalised over the channels of all heads together instead of each head's."""
    norms_all_heads_fused: bool = False
    """Whether one kernel does this, as in OLMoE, whose tensor parallel ranks cannot share the heads."""
    add_qkv_bias: bool = False
    """Whether queries, keys and values have biases, if other matrices have none."""
    normalization: Normalization = "RMSNorm"
    gated_linear_unit: bool = True
    """Whether MLPs have a gate (SwiGLU). Without one, they have GELU."""
    squared_relu: bool = False
    """Whether MLPs and experts without a gate have the square of ReLU in the place of GELU (Megatron-LM's flag)."""
    quick_geglu: bool = False
    """Whether the gate of experts is an approximation of GELU in the place of SiLU (Megatron-LM's flag)."""
    glu_linear_offset: float = 0.0
    """What is added to what the gate multiplies."""
    activation_func_clamp_value: float | None = None
    """The largest value that an expert's activation takes; None does not clamp."""
    add_bias_linear: bool = False
    """Whether all matrices of layers have biases, routers and experts too."""
    position_embedding_type: PositionEmbeddingType = "rope"
    max_position_embeddings: int | None = None
    """Rows of the embedding of positions, if they are learned."""
    softmax_type: SoftmaxType = "vanilla"
    """Whether the sum of a softmax of attention has, beside its scores, a learned number of each head, a sink
    (``learnable``)."""
    window_size: tuple[int, int] | None = None
    """How many tokens before and after its own a token attends to, in layers with a window; None has no windows."""
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    """One of so many layers has no window; or for each layer 1 if it has one and 0 if not. None has windows in all."""
    num_moe_experts: int | None = None
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_aux_loss_coeff: float = 0.0
    moe_router_pre_softmax: bool = False
    """Whether the selected probabilities are not renormalised (Hugging Face ``norm_topk_prob: false``)."""
    moe_router_score_function: ScoreFunction = "softmax"
    moe_router_enable_expert_bias: bool = False
    """Whether a bias of each expert decides which experts a token goes to; the optimizer's step changes it."""
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    """How many of the groups of experts a token may go to."""
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    """Columns of the shared experts of a layer together, which all tokens pass through; None has no such experts."""
    moe_shared_expert_gate: bool = False
    moe_latent_size: int | None = None
    """Columns to which a matrix brings tokens before they are sent to experts; another one leads back. None sends them
    as they are."""
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    rope_type: RopeType = "rope"
    """How the angles of latent attention are scaled; those of other models are not."""
    hybrid_override_pattern: str | None = None
    """For each layer, which one part it has: M is Mamba, * attention, - an MLP, and E experts. None has attention and
    an MLP or experts in each layer."""
    mamba_num_heads: int = 0
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 8
    attention_output_gate: bool = False
    """Whether attention makes, beside each head of queries, a gate of what the head returns."""
    experimental_attention_variant: AttentionVariant | None = None
    """What some layers have in the place of attention."""
    linear_attention_freq: int | tuple[int, ...] | None = None
    """One of so many layers, the last of them, has attention; or for each layer 1 if it has
    `experimental_attention_variant` and 0 if it has attention."""
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    moe_layer_freq: tuple[int, ...] | None = None
    """For each layer, 1 if it has experts and 0 if it is dense. None has experts in every layer, if there are any."""
    default_seq_length: int = 4096
    """The sequence length that a Scenario takes when none is given."""

    def __post_init__(self) -> None:
        self._check_kinds_of_layers()
        self._check_pattern()
        self._check_windows()
        self._check_linear_attention()
        for name, at_most in _MOST.items():
            check_whole_number(f"{self.name}: {name}", getattr(self, name), at_most=at_most, action="correct it")
        for name, (above, largest) in _RANGES.items():
            check_number(f"{self.name}: {name}", getattr(self, name), above, largest, action="correct it")
        self._check_choices()
        self._check_combinations()
        for part in (Dense.of(self), *self.parts):  # every model has the width of a dense part
            part.check(self.name)
        if self.num_parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"{self.name}: it has {self.num_parameters:,} parameters, must have at most {_MOST_PARAMETERS:,} "
                "(more than "
                "any real model has): correct its sizes"
            )

    @property
    def sandwich_norms(self) -> bool:
        """Whether attention and MLP have a norm behind them too, as in Gemma 2 and 3."""
        return FAMILIES[self.family].sandwich_norms

    @property
    def shares_norm(self) -> bool:
        """Whether attention and MLP take what one norm returns."""
        return FAMILIES[self.family].shares_norm

    @property
    def only_in_transformers(self) -> str:
        """What memlab has in transformers' model only, and not in Megatron's; empty if nothing."""
        return FAMILIES[self.family].only_in_transformers

    def _check_choices(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{self.name}: {name} is {getattr(self, name)!r}, must be True or False: correct it")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{self.name}: {name} is {shortened(getattr(self, name))}, must be one of {', '.join(choices)}: "
                    "correct it"
                )

    def _check_combinations(self) -> None:
        if self.multi_latent_attention and not self.kv_lora_rank:
            raise ValueError(
                f"{self.name}: multi_latent_attention is True, and the model has no sizes of it, such as kv_lora_rank: "
                "leave it out, or choose a model that has it"
            )
        is_classic = self.normalization != "RMSNorm" or self.add_bias_linear or self.position_embedding_type != "rope"
        if self.multi_latent_attention and is_classic:
            raise ValueError(
                f"{self.name}: it has multi-latent attention with LayerNorm, biases or learned positions, and memlab "
                "has it with RMSNorm and rope, without biases: correct them"
            )
        if self.squared_relu and self.gated_linear_unit:
            raise ValueError(
                f"{self.name}: squared_relu is True with gated_linear_unit, must be False there, since the gate is "
                "SiLU: correct one of them"
            )
        if self.num_moe_experts is not None and not (self.gated_linear_unit or self.squared_relu):
            raise ValueError(
                f"{self.name}: gated_linear_unit is False, must be True for a model with experts, since memlab has "
                "experts with a gate or with squared_relu: choose one of them"
            )
        self._check_gates()
        if self.norms_all_heads and (not self.qk_layernorm or self.multi_latent_attention):
            raise ValueError(
                f"{self.name}: norms_all_heads is True, must be False without qk_layernorm or with multi-latent "
                "attention: correct one of them"
            )
        if self.norms_all_heads_fused and not self.norms_all_heads:
            raise ValueError(f"{self.name}: norms_all_heads_fused is True, must be False without norms_all_heads")
        rows, name = self.max_position_embeddings, f"{self.name}: max_position_embeddings"
        if self.position_embedding_type == "learned_absolute":
            check_whole_number(name, rows, at_most=MOST_TOKENS_OF_A_SEQUENCE, action="correct it")
        elif rows is not None:
            raise ValueError(f"{name} is {shortened(rows)}, must be left out with rope: nothing has these rows")

    def _check_gates(self) -> None:
        """Refuses the gates of experts in dense layers, which Megatron-Core's MLP has not fused (0.16.1)."""
        names = ("quick_geglu", "glu_linear_offset", "activation_func_clamp_value")
        changed = [name for name in names if getattr(self, name) not in (False, 0, None)]
        if changed and any(not part.routes for part in self.feed_forwards):
            raise ValueError(
                f"{self.name}: {changed[0]} is {getattr(self, changed[0])}, must be left out for a model with dense "
                "layers, since memlab has it in experts only: leave it out, or choose experts in all layers"
            )
        if self.multi_latent_attention and (self.softmax_type != "vanilla" or self.window_size is not None):
            raise ValueError(
                f"{self.name}: it has multi-latent attention with softmax_type {self.softmax_type} and window_size "
                f"{self.window_size}, which memlab has in grouped-query attention only: leave them out"
            )

    def _check_kinds_of_layers(self) -> None:
        """Checks the pattern of a hybrid model (``mamba_hybrid_layer_allocation.py`` of Megatron-Core, 0.16.1)."""
        pattern, name = self.hybrid_override_pattern, f"{self.name}: hybrid_override_pattern"
        if pattern is None:
            if self.mamba_num_heads:
                raise ValueError(
                    f"{self.name}: mamba_num_heads is {self.mamba_num_heads}, must be left out without "
                    "hybrid_override_pattern, which says which layers are Mamba: give the pattern"
                )
            return
        if not isinstance(pattern, str) or len(pattern) != self.num_layers or not {*pattern} <= {*_KINDS}:
            raise ValueError(
                f"{name} is {shortened(pattern)}, must have one of {' '.join(_KINDS)} for each of {self.num_layers} "
                "layers: correct it"
            )
        if "E" in pattern and self.num_moe_experts is None:
            raise ValueError(f"{name} has E, must have it only in a model with experts: give num_moe_experts")
        others = {"moe_layer_freq": self.moe_layer_freq, "multi_latent_attention": self.multi_latent_attention}
        others |= {"window_size": self.window_size, "quick_geglu": self.quick_geglu}
        others |= {"softmax_type": self.softmax_type != "vanilla", "norms_all_heads": self.norms_all_heads}
        for other, value in others.items():
            if value:
                raise ValueError(
                    f"{name} is {shortened(pattern)} with {other}, which memlab has in models of attention only: leave "
                    "one of the two out"
                )

    def _check_pattern(self) -> None:
        pattern = self.moe_layer_freq
        if pattern is None:
            return
        rule = f"must have 1 or 0 for each of its {self.num_layers} layers"
        if self.num_moe_experts is None:
            rule = "must be left out, since no layer has experts"
        if self.num_moe_experts is None or len(pattern) != self.num_layers or not {*pattern} <= {0, 1}:
            raise ValueError(f"{self.name}: moe_layer_freq is {shortened(pattern)}, {rule}: correct it")
        # Equal models compare equal.
        object.__setattr__(self, "moe_layer_freq", tuple(pattern) if 0 in pattern else None)

    def _check_windows(self) -> None:
        for name in ("window_size", "window_attn_skip_freq"):  # JSON has lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        pattern = self.window_attn_skip_freq
        if isinstance(pattern, tuple) and len(pattern) < self.num_layers:
            raise ValueError(
                f"{self.name}: window_attn_skip_freq is {shortened(pattern)}, must have 1 or 0 for each of its "
                f"{self.num_layers} layers: correct it"
            )

    def _check_linear_attention(self) -> None:
        pattern, variant = self.linear_attention_freq, self.experimental_attention_variant
        if isinstance(pattern, list):  # JSON has lists
            pattern = tuple(pattern)
            object.__setattr__(self, "linear_attention_freq", pattern)
        if variant not in (None, *get_args(AttentionVariant)):
            raise ValueError(
                f"{self.name}: experimental_attention_variant is {shortened(variant)}, must be "
                f"{', '.join(get_args(AttentionVariant))}, or left out: correct it"
            )
        name = f"{self.name}: linear_attention_freq"
        if variant is None and pattern is not None:
            raise ValueError(
                f"{name} is {shortened(pattern)}, must be left out without experimental_attention_variant: correct it"
            )
        if isinstance(pattern, tuple):
            if len(pattern) != self.num_layers or not {*pattern} <= {0, 1}:
                raise ValueError(
                    f"{name} is {shortened(pattern)}, must have 1 or 0 for each of its {self.num_layers} layers: "
                    "correct it"
                )
        elif variant is not None:
            check_whole_number(name, pattern, at_most=MOST_LAYERS, action="correct it")
        if self.multi_latent_attention and (variant is not None or self.attention_output_gate):
            raise ValueError(
                f"{self.name}: it has multi-latent attention beside gated delta net or a gate of attention's output, "
                "which memlab does not have together: correct it"
            )

    @remembered
    def attention(self) -> GroupedQueryAttention | LatentAttention:
        """The first part of every layer, or of those that have no other one."""
        return LatentAttention.of(self) if self.multi_latent_attention else GroupedQueryAttention.of(self)

    @remembered
    def parts_of_kinds(self) -> dict[LayerKind | str, tuple[Part, ...]]:
        """The parts of each kind of layer that the model has, by `kind_of_layer`."""
        if self.hybrid_override_pattern is not None:
            kinds_of_parts = {name: kind for name, kind in _KINDS.items() if name in self.hybrid_override_pattern}
            return {name: (kind.of(self),) for name, kind in kinds_of_parts.items()}
        every = self.linear_attention_freq
        shown = self.num_layers
        if self.moe_layer_freq is None and not isinstance(every, tuple):
            shown = min(shown, every or 1)
        kinds = sorted({self._kind_by_patterns(layer) for layer in range(shown)})
        return {
            kind: (
                GatedDeltaNet.of(self) if kind.has_linear_attention else self.attention,
                (Experts if kind.routes else Dense).of(self),
            )
            for kind in kinds
        }

    def kind_of_layer(self, layer: int) -> LayerKind | str:
        """Returns which kind a layer is of, by its number from 0; in a hybrid model it is the letter of the pattern."""
        if self.hybrid_override_pattern is not None:
            return self.hybrid_override_pattern[layer]
        return self._kind_by_patterns(layer)

    def _kind_by_patterns(self, layer: int) -> LayerKind:
        every = self.linear_attention_freq
        is_linear = every is not None and (every[layer] if isinstance(every, tuple) else (layer + 1) % every > 0)
        routes = self.num_moe_experts is not None if self.moe_layer_freq is None else self.moe_layer_freq[layer]
        return LayerKind(bool(is_linear), bool(routes))

    @remembered
    def parts(self) -> tuple[Part, ...]:
        """The kinds of parts that its layers have, those of attention first."""
        found = dict.fromkeys(part for parts in self.parts_of_kinds.values() for part in parts)
        return tuple(sorted(found, key=lambda part: isinstance(part, FeedForward)))

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """The kinds of feed-forward parts that its layers have."""
        return tuple(part for part in self.parts if isinstance(part, FeedForward))

    @remembered
    def shared_sizes(self) -> list[SharedSize]:
        """The sizes of its parts that ranks share."""
        return [size for part in self.parts for size in part.shared_sizes()]

    @property
    def sent_size(self) -> int:
        """Columns of a token as it is sent to experts."""
        return self.moe_latent_size or self.hidden_size

    @property
    def routes(self) -> bool:
        """Whether a layer sends tokens to experts."""
        return any(part.routes for part in self.parts)

    @property
    def keeps_graph(self) -> bool:
        """Whether a layer keeps the graph of its last forward pass."""
        return any(part.keeps_graph for part in self.parts)

    def absent_modules(self, field: str) -> set[str]:
        """Returns the modules of ``recompute_modules`` or ``offload_modules`` that no layer of the model has."""
        present = {type(part) for part in self.parts}
        kinds = (LatentAttention, GatedDeltaNet, GroupedQueryAttention, Dense, Experts)
        absent = [getattr(kind, field) for kind in kinds if kind not in present]
        return {name for modules in absent for name in modules}

    @property
    def has_kernel_of_flash_attn_2(self) -> bool:
        """Whether Transformer Engine gives its attention to flash-attn 2, whose keys and values have equal sizes.

        ``get_attention_backend`` in ``attention/dot_product_attention/utils.py`` (2.12.0 and 2.16.1) calls other sizes
        MLA and disables flash-attn 2 for them; 2.17.1 and later pad keys or values (``_pad_qkv_head_dim`` in
        ``dot_product_attention.py``), which memlab does not predict. Megatron-Core 0.18.2 and 0.19.2 pad the values of
        packed rows, so that the sizes are equal there (``multi_latent_attention.py``, ``pad_packed_values``); 0.16.1
        and 0.17.1 do not.
        """
        return not self.multi_latent_attention or self.qk_head_dim + self.qk_pos_emb_head_dim == self.v_head_dim

    @remembered
    def without_effect(self) -> dict[str, str]:
        """What does nothing in any of its layers: ``field:module`` to the reason."""
        others = [part for part in self.parts if isinstance(part, (FeedForward, Mamba))]
        ignored = [part.without_effect for part in others[::-1]]
        everywhere = {name: reason for name, reason in ignored[0].items() if all(name in each for each in ignored)}
        ignored_by_all = {**self.attention.without_effect, **everywhere}
        return {name: reason for name, reason in ignored_by_all.items() if name not in self.attention.effective}

    def kinds_of(self, layers: Sequence[int]) -> dict[Part, int]:
        """Returns how many of the layers, which are numbered from 0, have each kind of part."""
        kinds, counts = self.parts_of_kinds, Counter(map(self.kind_of_layer, layers))
        return {part: sum(counts[kind] for kind, parts in kinds.items() if part in parts) for part in self.parts}

    def num_routing(self, layers: Sequence[int]) -> int:
        """Returns how many of the layers, which are numbered from 0, send tokens to experts."""
        return sum(count for part, count in self.kinds_of(layers).items() if part.routes)

    def parts_of(self, layer: int) -> tuple[Part, ...]:
        """Returns the parts of a layer, by its number from 0, in the order in which it computes them."""
        return self.parts_of_kinds[self.kind_of_layer(layer)]

    def is_divided_by(self, ranks: str) -> bool:
        """Whether a part has something that a size of the layout, by its name, divides."""
        return any(size.ranks == ranks for size in self.shared_sizes)

    def with_layers(self, num_layers: int) -> Architecture:
        """Returns the model of the first layers."""
        patterns: dict[str, Any] = {
            name: pattern[:num_layers]
            for name in ("moe_layer_freq", "linear_attention_freq", "hybrid_override_pattern")
            if isinstance(pattern := getattr(self, name), tuple | str)
        }
        return replace(self, num_layers=num_layers, **patterns)

    def weights_of(self, layers: Sequence[int]) -> dict[Weight, int]:
        """Returns how many of the layers, which are numbered from 0, have each of their parameters."""
        counts: Counter[Weight] = Counter()
        for part, n in self.kinds_of(layers).items():
            for weight in part.weights() if n else ():
                counts[weight] += n
        return counts

    @property
    def output_weight(self) -> Weight:
        """The weight that makes logits."""
        return Weight("output_layer.weight", (self.vocab_size, self.hidden_size), 0)

    @property
    def largest_row(self) -> int:
        """The most elements that one token has in any activation, before anything is split over ranks."""
        return max(self.vocab_size, *(part.largest_row for part in self.parts))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, counted from the published shapes."""
        embeddings = self.vocab_size * self.hidden_size
        embeddings *= 1 if self.share_embeddings_and_output_weights else 2
        outside = embeddings + self.num_parameters_of_positions + self.num_parameters_of_final_norm
        outside += self.num_parameters_of_output_bias
        return outside + sum(self._elements().values())

    @property
    def num_parameters_of_positions(self) -> int:
        """Number of parameters of the embedding of positions."""
        return (self.max_position_embeddings or 0) * self.hidden_size

    @property
    def num_parameters_of_final_norm(self) -> int:
        """Number of parameters of the norm before the output layer."""
        return sum(weight.num_elements for weight in norm_weights("", self.hidden_size, self.normalization))

    @property
    def num_parameters_of_output_bias(self) -> int:
        """Number of parameters of the output layer beside its matrix."""
        return self.vocab_size if FAMILIES[self.family].output_bias else 0

    @property
    def num_parameters_of_experts(self) -> int:
        """Number of parameters in the experts of all layers; 0 for a dense model."""
        return sum(elements for weight, elements in self._elements().items() if weight.num_experts)

    def _elements(self) -> dict[Weight, int]:
        return {weight: n * weight.num_elements for weight, n in self.weights_of(range(self.num_layers)).items()}


_QWEN3_MOE: dict[str, Any] = {
    "family": "qwen3_moe", "num_query_groups": 4, "kv_channels": 128, "vocab_size": 151936, "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6, "qk_layernorm": True, "num_moe_experts": 128, "moe_router_topk": 8,
    "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
_PHI: dict[str, Any] = {"family": "phi3", "kv_channels": 128, "rotary_base": 250000.0, "layernorm_epsilon": 1e-5}
_LLAMA: dict[str, Any] = {
    "family": "llama", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 128256, "rotary_base": 500000.0,
    "layernorm_epsilon": 1e-5,
}  # fmt: skip
_LLAMA_2 = _LLAMA | {"vocab_size": 32000, "rotary_base": 10000.0}
_MISTRAL: dict[str, Any] = {
    "family": "mistral", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 32768, "rotary_base": 1e6,
    "layernorm_epsilon": 1e-5,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "family": "qwen3", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 151936, "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6, "qk_layernorm": True,
}  # fmt: skip
_QWEN2_5: dict[str, Any] = {
    "family": "qwen2", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 152064, "rotary_base": 1e6,
    "layernorm_epsilon": 1e-6, "add_qkv_bias": True,
}  # fmt: skip
_SMALL_QWEN2_5 = _QWEN2_5 | {"num_query_groups": 2, "vocab_size": 151936}
_GPT: dict[str, Any] = {
    "family": "gpt2", "rotary_base": 10000.0, "layernorm_epsilon": 1e-5, "normalization": "LayerNorm",
    "gated_linear_unit": False, "add_bias_linear": True, "position_embedding_type": "learned_absolute", "tied": True,
}  # fmt: skip
"""GPT as Megatron-LM's own tests train it, without the flags that make another model of it."""
_GPT_3 = {"num_query_groups": 32, "kv_channels": 128, "vocab_size": 50304, "default_seq_length": 2048}
_QWEN2_MOE: dict[str, Any] = {
    "family": "qwen2_moe", "kv_channels": 128, "rotary_base": 1e6, "layernorm_epsilon": 1e-6, "add_qkv_bias": True,
    "moe_router_pre_softmax": True, "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "family": "mixtral", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 32000, "rotary_base": 1e6,
    "layernorm_epsilon": 1e-5, "num_moe_experts": 8, "moe_router_topk": 2,
}  # fmt: skip
_GLM: dict[str, Any] = {
    "family": "glm4_moe", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 151552, "rotary_base": 1e6,
    "rotary_percent": 0.5, "layernorm_epsilon": 1e-5, "add_qkv_bias": True, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_num_groups": 1, "moe_router_group_topk": 1,
    "moe_router_topk": 8, "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "num_query_groups": 8, "kv_channels": 64, "vocab_size": 201088, "rotary_base": 150000.0,
    "layernorm_epsilon": 1e-5, "add_bias_linear": True, "softmax_type": "learnable",
    "window_size": (127, 0), "window_attn_skip_freq": 2, "quick_geglu": True, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0, "moe_router_topk": 4,
}  # fmt: skip
_MINIMAX: dict[str, Any] = {
    "family": "minimax_m2", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 200064, "rotary_base": 5e6,
    "rotary_percent": 0.5, "layernorm_epsilon": 1e-6, "qk_layernorm": True, "norms_all_heads": True,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 8,
    "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
_OLMOE: dict[str, Any] = {
    "family": "olmoe", "num_query_groups": 16, "kv_channels": 128, "vocab_size": 50304, "rotary_base": 10000.0,
    "layernorm_epsilon": 1e-5, "qk_layernorm": True, "norms_all_heads": True, "norms_all_heads_fused": True,
    "moe_router_topk": 8, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128, "kv_channels": 128, "qk_layernorm": True, "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
_DEEPSEEK_V2 = _LATENT | {
    "family": "deepseek_v2", "rope_type": "yarn", "vocab_size": 102400, "rotary_base": 10000.0,
    "layernorm_epsilon": 1e-6, "moe_router_pre_softmax": True, "moe_router_topk": 6,
}  # fmt: skip
_NO_AUX = _LATENT | {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 1,
    "moe_router_group_topk": 1, "moe_router_topk": 8,
}  # fmt: skip
_DEEPSEEK_V3 = _NO_AUX | {
    "family": "deepseek_v3", "q_lora_rank": 1536, "rope_type": "yarn", "vocab_size": 129280, "rotary_base": 10000.0,
    "layernorm_epsilon": 1e-6, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "family": "nemotron", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 256000, "rotary_base": 10000.0,
    "rotary_percent": 0.5, "layernorm_epsilon": 1e-5, "normalization": "LayerNorm", "gated_linear_unit": False,
    "squared_relu": True,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "family": "nemotron_h", "num_query_groups": 8, "kv_channels": 128, "vocab_size": 131072, "rotary_base": 10000.0,
    "layernorm_epsilon": 1e-5, "position_embedding_type": "none", "gated_linear_unit": False, "squared_relu": True,
    "default_seq_length": 8192,
}  # fmt: skip
_NANO_3 = _HYBRID | {
    "num_query_groups": 2, "mamba_num_heads": 64, "num_moe_experts": 128, "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1856, "moe_shared_expert_intermediate_size": 3712, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_num_groups": 1, "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5, "moe_aux_loss_coeff": 1e-4,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = {
    "family": "qwen3_next", "num_query_groups": 2, "kv_channels": 256, "vocab_size": 151936, "rotary_base": 1e7,
    "rotary_percent": 0.25, "layernorm_epsilon": 1e-6, "qk_layernorm": True, "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4,
}  # fmt: skip
_QWEN3_5 = _QWEN3_NEXT | {"family": "qwen3_5_text", "num_query_groups": 4, "vocab_size": 248320}
_SMALL_QWEN3_5 = _QWEN3_5 | {"num_query_groups": 2, "linear_num_value_heads": 16}
_QWEN3_NEXT_MOE = _QWEN3_NEXT | {"moe_shared_expert_gate": True, "moe_aux_loss_coeff": 1e-3}
_QWEN3_5_MOE = _QWEN3_NEXT_MOE | {"family": "qwen3_5_moe_text", "vocab_size": 248320, "moe_router_topk": 8}
_GEMMA: dict[str, Any] = {"kv_channels": 256, "rotary_base": 10000.0, "layernorm_epsilon": 1e-6, "tied": True}
_TINY: dict[str, Any] = {"num_query_groups": 2, "kv_channels": 32, "vocab_size": 256, "default_seq_length": 1024}


def _after(num_dense: int, num_layers: int) -> tuple[int, ...]:
    """Returns the pattern of a model whose first layers are dense, and the others have experts."""
    return (0,) * num_dense + (1,) * (num_layers - num_dense)


def _row(name: str, *sizes: int, tied: bool = False, **others: Any) -> Architecture:
    """Makes an architecture of its layers, hidden size, width of a dense MLP and attention heads."""
    fields = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    return Architecture(
        name=name, share_embeddings_and_output_weights=tied, **(others | dict(zip(fields, sizes, strict=True)))
    )


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json, and likewise
        _row("qwen3-30b-a3b", 48, 2048, 6144, 32, moe_ffn_hidden_size=768, **_QWEN3_MOE),
        _row("qwen3-235b-a22b", 94, 4096, 12288, 64, moe_ffn_hidden_size=1536, **_QWEN3_MOE),
        _row("qwen3-moe-tiny", 4, 128, 384, 4, moe_ffn_hidden_size=64,
             **(_QWEN3_MOE | _TINY | {"num_moe_experts": 8, "moe_router_topk": 2})),
        # https://huggingface.co/microsoft/phi-4/blob/main/config.json
        _row("phi-4", 40, 5120, 17920, 40, num_query_groups=10, vocab_size=100352, **_PHI),
        # https://huggingface.co/microsoft/Phi-4-mini-instruct/blob/main/config.json (its "longrope" factors rescale
        # angles beyond 4096 positions and change no tensor's size; they are not applied here)
        _row("phi-4-mini", 32, 3072, 8192, 24, num_query_groups=8, vocab_size=200064, rotary_percent=0.75, tied=True,
             **(_PHI | {"rotary_base": 10000.0})),
        _row("phi-3-mini-4k", 32, 3072, 8192, 32, num_query_groups=32, vocab_size=32064, window_size=(2046, 0),
             **(_PHI | {"kv_channels": 96, "rotary_base": 10000.0})),
        # https://huggingface.co/ByteDance-Seed/Seed-Coder-8B-Instruct/blob/main/config.json, and Falcon's
        _row("seed-coder-8b", 32, 4096, 14336, 32, **(_LLAMA | {"vocab_size": 155136})),
        _row("falcon3-7b", 28, 3072, 23040, 12,
             **(_LLAMA | {"num_query_groups": 4, "kv_channels": 256, "vocab_size": 131072, "rotary_base": 1000042.0,
                          "layernorm_epsilon": 1e-6})),
        # https://huggingface.co/google/gemma-2-9b/blob/main/config.json, and likewise
        _row("gemma-7b", 28, 3072, 24576, 16, family="gemma", num_query_groups=16, vocab_size=256000, **_GEMMA),
        _row("gemma-2b", 18, 2048, 16384, 8, family="gemma", num_query_groups=1, vocab_size=256000, **_GEMMA),
        _row("gemma-2-9b", 42, 3584, 14336, 16, family="gemma2", num_query_groups=8, vocab_size=256000,
             window_size=(4095, 0), window_attn_skip_freq=(1, 0) * 21, **_GEMMA),
        _row("gemma-3-270m", 18, 640, 2048, 4, family="gemma3_text", num_query_groups=1, vocab_size=262144,
             qk_layernorm=True, window_size=(511, 0), window_attn_skip_freq=(1, 1, 1, 1, 1, 0) * 3,
             **(_GEMMA | {"rotary_base": 1e6})),
        _row("gemma-3-1b", 26, 1152, 6912, 4, family="gemma3_text", num_query_groups=1, vocab_size=262144,
             qk_layernorm=True, window_size=(511, 0), window_attn_skip_freq=(*(1, 1, 1, 1, 1, 0) * 4, 1, 1),
             **(_GEMMA | {"rotary_base": 1e6})),
        # The language model of https://huggingface.co/google/gemma-3-4b-it/blob/main/config.json, whose tower is an
        # option. (How its angles are scaled changes no tensor's size; they are not scaled here.)
        _row("gemma-3-4b-text", 34, 2560, 10240, 8, family="gemma3_text", num_query_groups=4, vocab_size=262208,
             qk_layernorm=True, window_size=(1023, 0), window_attn_skip_freq=(*(1, 1, 1, 1, 1, 0) * 5, 1, 1, 1, 1),
             **(_GEMMA | {"rotary_base": 1e6})),
        # https://huggingface.co/ibm-granite/granite-3.3-2b-instruct/blob/main/config.json
        _row("granite-3.3-2b", 40, 2048, 8192, 32, family="granite", num_query_groups=8, kv_channels=64,
             vocab_size=49159, rotary_base=1e7, layernorm_epsilon=1e-5, tied=True),
        # https://huggingface.co/allenai/OLMo-2-0425-1B-Instruct/blob/main/config.json
        _row("olmo-2-1b", 16, 2048, 8192, 16, family="olmo2", num_query_groups=16, kv_channels=128, vocab_size=100352,
             rotary_base=5e5, layernorm_epsilon=1e-6, qk_layernorm=True, norms_all_heads=True),
        # https://huggingface.co/zai-org/glm-4-9b-chat-hf/blob/main/config.json
        _row("glm-4-9b", 40, 4096, 13696, 32, family="glm", num_query_groups=2, kv_channels=128, vocab_size=151552,
             rotary_base=10000.0, rotary_percent=0.5, layernorm_epsilon=1.5625e-7, add_qkv_bias=True),
        # https://huggingface.co/CohereForAI/c4ai-command-r7b-12-2024/blob/main/config.json. (Its norms are LayerNorms
        # without a bias.)
        _row("command-r7b", 32, 4096, 14336, 32, family="cohere2", num_query_groups=8, kv_channels=128,
             vocab_size=256000, rotary_base=50000.0, layernorm_epsilon=1e-5, tied=True, window_size=(4095, 0),
             window_attn_skip_freq=(1, 1, 1, 0) * 8),
        # https://huggingface.co/microsoft/phi-2/blob/main/config.json
        _row("phi-2", 32, 2560, 10240, 32, family="phi", num_query_groups=32, kv_channels=80, vocab_size=51200,
             rotary_base=10000.0, rotary_percent=0.4, layernorm_epsilon=1e-5, normalization="LayerNorm",
             gated_linear_unit=False, add_bias_linear=True, default_seq_length=2048),
        # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/config.json
        _row("seed-oss-36b", 64, 5120, 27648, 80, family="seed_oss", num_query_groups=8, kv_channels=128,
             vocab_size=155136, rotary_base=1e7, layernorm_epsilon=1e-6, add_qkv_bias=True),
        # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, and likewise. (How these models scale
        # the angles of the rotary embedding changes no tensor's size, and is not applied here.)
        _row("llama-3.2-1b", 16, 2048, 8192, 32, tied=True, **(_LLAMA | {"kv_channels": 64})),
        _row("llama-3.2-3b", 28, 3072, 8192, 24, tied=True, **_LLAMA),
        _row("llama-3.1-8b", 32, 4096, 14336, 32, **_LLAMA),
        _row("llama-3.1-70b", 80, 8192, 28672, 64, **_LLAMA),
        _row("llama-3.1-405b", 126, 16384, 53248, 128, **_LLAMA),
        _row("llama-2-7b", 32, 4096, 11008, 32, **(_LLAMA_2 | {"num_query_groups": 32})),
        _row("llama-2-13b", 40, 5120, 13824, 40, **(_LLAMA_2 | {"num_query_groups": 40})),
        _row("llama-2-70b", 80, 8192, 28672, 64, **_LLAMA_2),
        _row("llama-3-tiny", 4, 128, 448, 4, **(_LLAMA | _TINY)),
        # https://huggingface.co/deepseek-ai/deepseek-llm-7b-base/blob/main/config.json
        _row("deepseek-llm-7b", 30, 4096, 11008, 32,
             **(_LLAMA_2 | {"num_query_groups": 32, "vocab_size": 102400, "layernorm_epsilon": 1e-6})),
        # https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json, and likewise
        _row("mistral-7b-v0.1", 32, 4096, 14336, 32, window_size=(4095, 0),
             **(_MISTRAL | {"vocab_size": 32000, "rotary_base": 10000.0})),
        _row("mistral-7b-v0.2", 32, 4096, 14336, 32, **(_MISTRAL | {"vocab_size": 32000})),
        _row("mistral-7b-v0.3", 32, 4096, 14336, 32, **_MISTRAL),
        _row("mistral-nemo-12b", 40, 5120, 14336, 32, **(_MISTRAL | {"vocab_size": 131072})),
        _row("mistral-small-24b", 40, 5120, 32768, 32, **(_MISTRAL | {"vocab_size": 131072, "rotary_base": 1e8})),
        _row("mistral-large-123b", 88, 12288, 28672, 96, **_MISTRAL),
        # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, and likewise
        _row("qwen3-0.6b", 28, 1024, 3072, 16, tied=True, **_QWEN3),
        _row("qwen3-1.7b", 28, 2048, 6144, 16, tied=True, **_QWEN3),
        _row("qwen3-4b", 36, 2560, 9728, 32, tied=True, **_QWEN3),
        _row("qwen3-8b", 36, 4096, 12288, 32, **_QWEN3),
        _row("qwen3-14b", 40, 5120, 17408, 40, **_QWEN3),
        _row("qwen3-32b", 64, 5120, 25600, 64, **_QWEN3),
        _row("qwen3-dense-tiny", 4, 128, 384, 4, tied=True, **(_QWEN3 | _TINY)),
        # https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json, and likewise
        _row("qwen2.5-0.5b", 24, 896, 4864, 14, tied=True, **(_SMALL_QWEN2_5 | {"kv_channels": 64})),
        _row("qwen2.5-1.5b", 28, 1536, 8960, 12, tied=True, **_SMALL_QWEN2_5),
        _row("qwen2.5-3b", 36, 2048, 11008, 16, tied=True, **_SMALL_QWEN2_5),
        _row("qwen2.5-7b", 28, 3584, 18944, 28, **(_QWEN2_5 | {"num_query_groups": 4})),
        _row("qwen2.5-14b", 48, 5120, 13824, 40, **(_QWEN2_5 | {"layernorm_epsilon": 1e-5})),
        _row("qwen2.5-32b", 64, 5120, 27648, 40, **(_QWEN2_5 | {"layernorm_epsilon": 1e-5})),
        _row("qwen2.5-72b", 80, 8192, 29568, 64, **_QWEN2_5),
        # https://huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B/blob/main/config.json: as Qwen2.5-Math-1.5B,
        # but untied
        _row("deepseek-r1-distill-qwen-1.5b", 28, 1536, 8960, 12, **(_SMALL_QWEN2_5 | {"rotary_base": 10000.0})),
        _row("qwen2.5-tiny", 4, 128, 448, 4, **(_QWEN2_5 | _TINY)),
        # https://huggingface.co/XiaomiMiMo/MiMo-7B-RL/blob/main/config.json, whose layers are Qwen2's; a job says
        # whether it trains the model's layer of multi-token prediction
        _row("mimo-7b", 36, 4096, 11008, 32,
             **(_QWEN2_5 | {"vocab_size": 151680, "rotary_base": 640000.0, "layernorm_epsilon": 1e-5})),
        # https://arxiv.org/abs/2005.14165, table 2.1; the vocabulary as Megatron-LM pads it
        _row("gpt3-6.7b", 32, 4096, 16384, 32, max_position_embeddings=2048, **(_GPT | _GPT_3)),
        _row("gpt-tiny", 4, 128, 512, 4, max_position_embeddings=1024, **(_GPT | _TINY | {"num_query_groups": 4})),
        # https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B/blob/main/config.json, and likewise
        _row("qwen1.5-moe-a2.7b", 24, 2048, 5632, 16, num_query_groups=16, vocab_size=151936, num_moe_experts=60,
             moe_router_topk=4, moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=5632, **_QWEN2_MOE),
        _row("qwen2-57b-a14b", 28, 3584, 18944, 28, num_query_groups=4, vocab_size=151936, num_moe_experts=64,
             moe_router_topk=8, moe_ffn_hidden_size=2560, moe_shared_expert_intermediate_size=20480, **_QWEN2_MOE),
        _row("qwen2-moe-tiny", 4, 128, 384, 4, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64,
             moe_shared_expert_intermediate_size=128, **(_QWEN2_MOE | _TINY)),
        # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json, and likewise
        _row("mixtral-8x7b", 32, 4096, 14336, 32, moe_ffn_hidden_size=14336, moe_aux_loss_coeff=0.02, **_MIXTRAL),
        _row("mixtral-8x22b", 56, 6144, 16384, 48, moe_ffn_hidden_size=16384, moe_aux_loss_coeff=1e-3, **_MIXTRAL),
        _row("mixtral-tiny", 4, 128, 64, 4, moe_ffn_hidden_size=64, moe_aux_loss_coeff=0.02, **(_MIXTRAL | _TINY)),
        # https://huggingface.co/zai-org/GLM-4.5/blob/main/config.json, and likewise
        _row("glm-4.5", 92, 5120, 12288, 96, num_moe_experts=160, moe_ffn_hidden_size=1536, qk_layernorm=True,
             moe_shared_expert_intermediate_size=1536, moe_layer_freq=_after(3, 92), moe_router_topk_scaling_factor=2.5,
             **_GLM),
        _row("glm-4.5-air", 46, 4096, 10944, 96, num_moe_experts=128, moe_ffn_hidden_size=1408,
             moe_shared_expert_intermediate_size=1408, moe_layer_freq=_after(1, 46), **_GLM),
        _row("glm-4.5-tiny", 4, 128, 384, 4, num_moe_experts=8, moe_ffn_hidden_size=64, qk_layernorm=True,
             moe_shared_expert_intermediate_size=64, moe_layer_freq=_after(1, 4), moe_router_topk_scaling_factor=2.5,
             **(_GLM | _TINY | {"moe_router_topk": 2})),
        # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json, and likewise. (How the angles are scaled
        # changes no tensor's size, and is not applied here.)
        _row("gpt-oss-20b", 24, 2880, 2880, 64, num_moe_experts=32, moe_ffn_hidden_size=2880, **_GPT_OSS),
        _row("gpt-oss-120b", 36, 2880, 2880, 64, num_moe_experts=128, moe_ffn_hidden_size=2880, **_GPT_OSS),
        _row("gpt-oss-tiny", 4, 128, 64, 4, num_moe_experts=8, moe_ffn_hidden_size=64,
             **(_GPT_OSS | _TINY | {"moe_router_topk": 2, "window_size": (15, 0)})),
        # https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/config.json
        _row("minimax-m2", 62, 3072, 1536, 48, num_moe_experts=256, moe_ffn_hidden_size=1536, **_MINIMAX),
        _row("minimax-tiny", 4, 128, 64, 4, num_moe_experts=8, moe_ffn_hidden_size=64,
             **(_MINIMAX | _TINY | {"moe_router_topk": 2})),
        # https://huggingface.co/allenai/OLMoE-1B-7B-0125/blob/main/config.json
        _row("olmoe-1b-7b", 16, 2048, 1024, 16, num_moe_experts=64, moe_ffn_hidden_size=1024, **_OLMOE),
        _row("olmoe-tiny", 4, 128, 64, 4, num_moe_experts=8, moe_ffn_hidden_size=64,
             **(_OLMOE | _TINY | {"num_query_groups": 4, "moe_router_topk": 2})),
        # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json, and likewise. (How the angles of
        # these models are scaled changes no tensor's size: Megatron's own factors are applied here.)
        _row("deepseek-v2-lite", 27, 2048, 10944, 16, num_query_groups=16, num_moe_experts=64, moe_ffn_hidden_size=1408,
             moe_shared_expert_intermediate_size=2816, moe_layer_freq=_after(1, 27), **_DEEPSEEK_V2),
        _row("deepseek-v2", 60, 5120, 12288, 128, num_query_groups=128, num_moe_experts=160, moe_ffn_hidden_size=1536,
             moe_shared_expert_intermediate_size=3072, moe_layer_freq=_after(1, 60), q_lora_rank=1536,
             moe_router_num_groups=8, moe_router_group_topk=3, moe_router_topk_scaling_factor=16.0, **_DEEPSEEK_V2),
        _row("deepseek-v3", 61, 7168, 18432, 128, num_query_groups=128, num_moe_experts=256, moe_ffn_hidden_size=2048,
             moe_shared_expert_intermediate_size=2048, moe_layer_freq=_after(3, 61), **_DEEPSEEK_V3),
        _row("moonlight-16b-a3b", 27, 2048, 11264, 16, num_query_groups=16, num_moe_experts=64,
             moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=2816, moe_layer_freq=_after(1, 27),
             **(_NO_AUX | {"family": "deepseek_v3", "moe_router_topk": 6, "moe_router_topk_scaling_factor": 2.446,
                           "vocab_size": 163840, "rotary_base": 50000.0, "layernorm_epsilon": 1e-5})),
        # https://huggingface.co/zai-org/GLM-4.7-Flash/blob/main/config.json (whose layers are DeepSeek-V3's)
        _row("glm-4.7-flash", 47, 2048, 10240, 20, num_query_groups=20, num_moe_experts=64, moe_ffn_hidden_size=1536,
             moe_shared_expert_intermediate_size=1536, moe_layer_freq=_after(1, 47), q_lora_rank=768,
             **(_NO_AUX | {"family": "glm4_moe_lite", "qk_head_dim": 192, "v_head_dim": 256, "kv_channels": 256,
                           "moe_router_topk": 4, "moe_router_topk_scaling_factor": 1.8, "vocab_size": 154880,
                           "rotary_base": 1e6, "layernorm_epsilon": 1e-5})),
        _row("kimi-k2", 61, 7168, 18432, 64, num_query_groups=64, num_moe_experts=384, moe_ffn_hidden_size=2048,
             moe_shared_expert_intermediate_size=2048, moe_layer_freq=_after(1, 61),
             **(_DEEPSEEK_V3 | _NO_AUX | {"moe_router_topk_scaling_factor": 2.827, "vocab_size": 163840,
                                          "rotary_base": 50000.0, "family": "kimi_k2"})),
        _row("deepseek-tiny", 4, 128, 384, 4, num_moe_experts=8, moe_ffn_hidden_size=64,
             moe_shared_expert_intermediate_size=64, moe_layer_freq=_after(1, 4),
             **(_DEEPSEEK_V3 | _TINY | {"num_query_groups": 4, "kv_channels": 32, "q_lora_rank": 64,
                                        "kv_lora_rank": 32, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16,
                                        "v_head_dim": 32, "moe_router_topk": 4, "moe_router_num_groups": 4,
                                        "moe_router_group_topk": 2})),
        # https://huggingface.co/nvidia/Nemotron-Mini-4B-Instruct/blob/main/config.json, https://arxiv.org/abs/2407.14679
        # (Minitron), https://arxiv.org/abs/2402.16819 (15B) and https://arxiv.org/abs/2406.11704 (340B)
        _row("nemotron-mini-4b", 32, 3072, 9216, 24, **_NEMOTRON),
        _row("minitron-8b", 32, 4096, 16384, 48, **_NEMOTRON),
        _row("nemotron-4-15b", 32, 6144, 24576, 48, **_NEMOTRON),
        _row("nemotron-4-340b", 96, 18432, 73728, 96, **(_NEMOTRON | {"kv_channels": 192})),
        _row("nemotron-tiny", 4, 128, 512, 4, **(_NEMOTRON | _TINY)),
        # https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K/blob/main/config.json, and likewise, as in
        # src/megatron/bridge/models/nemotronh/nemotron_h_provider.py of Megatron-Bridge 0.3.1
        _row("nemotron-h-4b", 52, 3072, 12288, 32, mamba_num_heads=112,
             hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", **_HYBRID),
        _row("nemotron-h-8b", 52, 4096, 21504, 32, mamba_num_heads=128,
             hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", **_HYBRID),
        _row("nemotron-h-47b", 98, 8192, 30720, 64, mamba_num_heads=256, mamba_state_dim=256,
             hybrid_override_pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---"
                                     "M-M*-M-M-M-M-M-", **_HYBRID),
        _row("nemotron-h-56b", 118, 8192, 32768, 64, mamba_num_heads=256, mamba_state_dim=256,
             hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", **_HYBRID),
        _row("nemotron-nano-v2-9b", 56, 4480, 15680, 40, mamba_num_heads=128, mamba_head_dim=80,
             hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", **_HYBRID),
        _row("nemotron-nano-v2-12b", 62, 5120, 20480, 40, mamba_num_heads=128, mamba_head_dim=80,
             hybrid_override_pattern="M-M-M-M*-" * 6 + "M-M-M-M-", **_HYBRID),
        _row("nemotron-3-nano-4b", 42, 3136, 12544, 40, mamba_num_heads=96, mamba_head_dim=80,
             hybrid_override_pattern="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", **_HYBRID),
        _row("nemotron-3-nano-30b", 52, 2688, 1856, 32, **_NANO_3),
        _row("nemotron-h-tiny", 6, 128, 256, 4, mamba_num_heads=8, mamba_head_dim=32, mamba_state_dim=16,
             hybrid_override_pattern="MM-*M-", **(_HYBRID | _TINY | {"mamba_num_groups": 2})),
        _row("nemotron-3-tiny", 6, 128, 64, 4, mamba_head_dim=32, mamba_state_dim=16,
             **(_NANO_3 | _TINY | {"mamba_num_groups": 2, "mamba_num_heads": 8, "num_moe_experts": 8,
                                   "moe_router_topk": 2, "moe_ffn_hidden_size": 64,
                                   "moe_shared_expert_intermediate_size": 128, "hybrid_override_pattern": "MEM*EM"})),
        # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json
        _row("qwen3-next-80b-a3b", 48, 2048, 5120, 16, num_moe_experts=512, moe_router_topk=10, moe_ffn_hidden_size=512,
             moe_shared_expert_intermediate_size=512, **_QWEN3_NEXT_MOE),
        # The language models of https://huggingface.co/Qwen/Qwen3.5-27B/blob/main/config.json, and likewise
        _row("qwen3.5-text-0.8b", 24, 1024, 3584, 8, tied=True, **_SMALL_QWEN3_5),
        _row("qwen3.5-text-2b", 24, 2048, 6144, 8, tied=True, **_SMALL_QWEN3_5),
        _row("qwen3.5-text-4b", 32, 2560, 9216, 16, tied=True, **_QWEN3_5),
        _row("qwen3.5-text-9b", 32, 4096, 12288, 16, **_QWEN3_5),
        _row("qwen3.5-text-27b", 64, 5120, 17408, 24, **(_QWEN3_5 | {"linear_num_value_heads": 48})),
        _row("qwen3.5-text-35b-a3b", 40, 2048, 512, 16, num_moe_experts=256, moe_ffn_hidden_size=512,
             moe_shared_expert_intermediate_size=512, **_QWEN3_5_MOE),
        _row("qwen3.5-text-122b-a10b", 48, 3072, 1024, 32, num_moe_experts=256, moe_ffn_hidden_size=1024,
             moe_shared_expert_intermediate_size=1024, **(_QWEN3_5_MOE | {"linear_num_value_heads": 64})),
        _row("qwen3.5-text-397b-a17b", 60, 4096, 1024, 32, num_moe_experts=512, moe_ffn_hidden_size=1024,
             moe_shared_expert_intermediate_size=1024,
             **(_QWEN3_5_MOE | {"moe_router_topk": 10, "linear_num_value_heads": 64})),
        _row("qwen3-next-tiny", 4, 128, 384, 4, num_moe_experts=8, moe_ffn_hidden_size=64,
             moe_shared_expert_intermediate_size=64,
             **(_QWEN3_NEXT_MOE | _TINY | {"moe_router_topk": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
                                           "linear_num_key_heads": 2, "linear_num_value_heads": 4})),
        _row("phi-4-tiny", 4, 160, 560, 5, **(_PHI | _TINY | {"num_query_groups": 5})),
    )
}  # fmt: skip

HUGGING_FACE_NAMES = {
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "phi-4": "microsoft/phi-4",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    **{
        f"llama-{size}": f"meta-llama/Llama-{size.upper()}"
        for size in ("3.2-1b", "3.2-3b", "3.1-8b", "3.1-70b", "3.1-405b")
    },
    **{f"llama-2-{size}b": f"meta-llama/Llama-2-{size}b-hf" for size in (7, 13, 70)},
    "deepseek-llm-7b": "deepseek-ai/deepseek-llm-7b-base",
    "mimo-7b": "XiaomiMiMo/MiMo-7B-Base",
    "deepseek-r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen2-57b-a14b": "Qwen/Qwen2-57B-A14B",
    **{f"mixtral-{size}": f"mistralai/Mixtral-{size.replace('b', 'B')}-v0.1" for size in ("8x7b", "8x22b")},
    **{f"gpt-oss-{size}b": f"openai/gpt-oss-{size}b" for size in (20, 120)},
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0125",
    "glm-4.5": "zai-org/GLM-4.5",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "phi-3-mini-4k": "microsoft/Phi-3-mini-4k-instruct",
    "seed-coder-8b": "ByteDance-Seed/Seed-Coder-8B-Base",
    "falcon3-7b": "tiiuae/Falcon3-7B-Base",
    "gemma-7b": "google/gemma-7b",
    "gemma-2b": "google/gemma-2b",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "granite-3.3-2b": "ibm-granite/granite-3.3-2b-instruct",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "glm-4-9b": "zai-org/glm-4-9b-hf",
    "command-r7b": "CohereForAI/c4ai-command-r7b-12-2024",
    "phi-2": "microsoft/phi-2",
    "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Base",
    "nemotron-mini-4b": "nvidia/Nemotron-Mini-4B-Instruct",
    "minitron-8b": "nvidia/Minitron-8B-Base",
    "nemotron-4-340b": "nvidia/Nemotron-4-340B-Base",
    "nemotron-h-4b": "nvidia/Nemotron-H-4B-Base-8K",
    "nemotron-h-8b": "nvidia/Nemotron-H-8B-Base-8K",
    "nemotron-h-47b": "nvidia/Nemotron-H-47B-Base-8K",
    "nemotron-h-56b": "nvidia/Nemotron-H-56B-Base-8K",
    "nemotron-nano-v2-9b": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nemotron-nano-v2-12b": "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
    "nemotron-3-nano-4b": "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    "nemotron-3-nano-30b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501",
    "mistral-large-123b": "mistralai/Mistral-Large-Instruct-2407",
    **{f"qwen2.5-{size}b": f"Qwen/Qwen2.5-{size}B" for size in ("0.5", "1.5", "3", "7", "14", "32", "72")},
    **{f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
}
# Their config.json files differ in the base of the rotary embedding or the epsilon of norms. Qwen3-Coder's also has
# another width of a dense MLP, which neither model has, and another coefficient of the auxiliary loss, which
# Megatron-Bridge's provider replaces by the same number for both.
SAME_SIZES = {
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    **dict.fromkeys(("olmoe-1b-7b-0125", "olmoe-1b-7b-0924"), "olmoe-1b-7b"),
    **dict.fromkeys(("deepseek-r1", "deepseek-v3-0324", "deepseek-v3.1", "deepseek-r1-0528"), "deepseek-v3"),
    **dict.fromkeys(("mixtral-8x7b-v0.1", "mixtral-8x7b-instruct-v0.1"), "mixtral-8x7b"),
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "deepseek-coder-v2-lite": "deepseek-v2-lite",
    "deepseek-coder-v2": "deepseek-v2",
    **{f"kimi-k2-instruct{date}": "kimi-k2" for date in ("", "-0905")},
    "moonlight-16b-a3b-instruct": "moonlight-16b-a3b",
    "moonlight16b": "moonlight-16b-a3b",  # a folder of SkyRL's example
    "llama-3.3-70b": "llama-3.1-70b",
    **{f"nemotron-h-{size}b{words}": f"nemotron-h-{size}b" for size in (4, 8, 47, 56) for words in ("-base-8k", "-8k")},
    **{f"nvidia-nemotron-nano-{size}b-v2": f"nemotron-nano-v2-{size}b" for size in (9, 12)},
    "nvidia-nemotron-3-nano-4b": "nemotron-3-nano-4b",
    "minitron-4b": "nemotron-mini-4b",
    **{f"nvidia-nemotron-{name}-30b-a3b": "nemotron-3-nano-30b" for name in ("3-nano", "3.5-lightning")},
    "llama-3.1-nemotron-nano-8b-v1": "llama-3.1-8b",
    "qwq-32b": "qwen2.5-32b",
    **{f"llama-3-{size}b": f"llama-3.1-{size}b" for size in (8, 70)},
    **{f"deepseek-r1-distill-llama-{size}b": f"llama-3.1-{size}b" for size in (8, 70)},
    **{f"deepseek-r1-distill-qwen-{size}b": f"qwen2.5-{size}b" for size in (7, 14, 32)},
    **{f"mistral-7b-instruct-v0.{version}": f"mistral-7b-v0.{version}" for version in (1, 2, 3)},
    **{f"{name}-it": name for name in ("gemma-2b", "gemma-7b", "gemma-2-9b", "gemma-3-270m", "gemma-3-1b")},
    **{f"gemma-1.1-{size}-it": f"gemma-{size}" for size in ("2b", "7b")},
    "functiongemma-270m-it": "gemma-3-270m",
    "c4ai-command-r7b-12-2024": "command-r7b",
    "olmo-2-0425-1b": "olmo-2-1b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-large": "mistral-large-123b",
    **{f"qwen2-{size}b": f"qwen2.5-{size}b" for size in ("0.5", "1.5", "7", "72")},
    **{f"qwen2.5-math-{size}b": f"qwen2.5-{size}b" for size in ("1.5", "7", "72")},
    **{f"qwen2.5-coder-{size}b": f"qwen2.5-{size}b" for size in ("0.5", "1.5", "3", "7", "14", "32")},
}
"""Published models that have the sizes of another one."""
# Suffixes of checkpoints that have the same shapes as the model that they were made from.
_VARIANTS = re.compile(
    r"([-_](base|instruct|chat|thinking|reasoning|plus|rl|sft|2407|2411|2501|2507|bf16|hf|mcore|torch_dist|torch-dist|megatron"
    r"|fp8|int4|int8|1m))+$"
)


def known_names() -> str:
    """Returns the names of `ARCHITECTURES`: those that differ in their last part as ``qwen3-{4b,8b}``."""
    ends: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        start, _, end = name.rpartition("-")
        ends.setdefault(start, []).append(end)
    return ", ".join(
        f"{start}-{found[0]}" if len(found) == 1 else f"{start}-{{{','.join(found)}}}" for start, found in ends.items()
    )


def names_of_families() -> str:
    """Returns a name of each family, for a message of one line."""
    first = {model.family: name for name, model in reversed(ARCHITECTURES.items())}
    names = [name for name, model in ARCHITECTURES.items() if first[model.family] == name]
    return f"{', '.join(names)}, and others of these families (memlab predict --help)"


_MODEL_NAME = re.compile(r"[^./~][^/]*(/[^/]+)?|(.*/)?models--.*")
"""A name, with its owner or not, or a folder in a cache of Hugging Face; another path is no name of a model."""


def published_architecture(name: str) -> Architecture | None:
    """Returns the architecture of a published model, or of a checkpoint that was made from one; None if unknown.

    Args:
        name: Its name, ``OWNER/NAME`` on Hugging Face, or the path of a folder of such a name, in a cache too.
    """
    plain = plain_name(name)
    return ARCHITECTURES.get(SAME_SIZES.get(plain, plain))


def plain_name(name: str) -> str:
    """Returns the last part of a model's name in small letters, without the words for variants of the same shapes."""
    return _VARIANTS.sub("", model_name(name).lower().removeprefix("meta-"))


def find_architecture(name: str | Path) -> Architecture:
    """Finds an architecture by its name, or reads it from a local Hugging Face config.

    Args:
        name: A key of `ARCHITECTURES`, the path of a ``config.json`` or of a folder that holds one, or the name of a
            published model on Hugging Face.

    Raises:
        ValueError: If it is neither, or the config is damaged, or the model has parts that memlab does not model.
    """
    if not isinstance(name, (str, Path)):
        raise ValueError(
            f"architecture is {shortened(name)}, must be a name, a path or an Architecture: choose from "
            f"{names_of_families()}, or give the path of a config.json or its folder"
        )
    known = ARCHITECTURES.get(str(name))
    if known is not None:
        return known
    path = Path(name)
    names_model = _MODEL_NAME.fullmatch(str(name)) is not None
    try:
        config_path = path / "config.json" if path.is_dir() else path
        if not config_path.exists():
            if names_model and (published := published_architecture(str(name))) is not None:
                return published
            raise ValueError(
                f"architecture {shortened(str(name))} is neither a known name nor a Hugging Face config.json: "
                f"choose from {names_of_families()}, or give the path of a config.json or its folder"
            )
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(
            f"architecture {shortened(str(name))} cannot be read ({(error.strerror or '').lower()}): choose from "
            f"{names_of_families()}, or give the path of a config.json or its folder"
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
