"""Values of a Hugging Face ``config.json``, each checked as it is read. A field that is null counts as left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memlab.config.validation import check_number, check_whole_number, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelType:
    """A kind of Hugging Face config whose layers memlab has: what they consist of, and what a left-out field means.

    The values are those of transformers 5.24, ``models/*/configuration_*.py`` and ``modeling_*.py``.
    """

    num_key_value_heads: int | None = None
    """None takes as many as attention heads."""
    head_dim: int | None = None
    """None divides the hidden size by the attention heads."""
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    qk_norm_field: str = ""
    """The field that says whether queries and keys are normalised, if one does."""
    qkv_bias_field: str = ""
    """The field that says whether queries, keys and values have biases, if one does and other matrices have none."""
    has_qkv_bias: bool = False
    """Whether they have where this field is left out."""
    rotary_percent: float = 1.0
    """The share of the channels that is rotated, where the field is left out."""
    uses_window: bool = True
    """Whether a ``sliding_window`` counts where ``use_sliding_window`` is left out."""
    has_window: bool = False
    """Whether a ``sliding_window`` below the longest sequence is that of all layers, which memlab has."""
    window: int | None = None
    """The ``sliding_window`` of such a kind, where the field is left out; null there is none."""
    experts: Literal["own width", "width of the MLP"] | None = None
    shared_expert_gate: bool = False
    multi_latent_attention: bool = False
    has_sinks: bool = False
    """Whether it is of gpt-oss' kind: sinks, biases of all matrices, and a clamped gate of experts."""
    has_delta_net: bool = False
    """Whether it is of Qwen3-Next's kind: gated delta net in most layers, and a gate of attention's output."""
    norms_all_heads: bool = False
    norms_all_heads_fused: bool = False
    normalizes_topk: bool = True
    """Whether the probabilities of a token's experts add up to 1, where ``norm_topk_prob`` is left out."""
    is_gemma: bool = False
    """Whether it has GELU gates."""
    ties_embeddings: bool = False
    """Whether the embedding is the output layer too, where the field is left out."""
    window_rotary_base: float | None = None
    """The only rotary base of layers with windows that memlab has of it, where that is another one."""
    window_pattern: int = 0
    """Whether it is of Gemma 2's kind, with windows in all but one of so many layers; 0 is another kind."""
    soft_caps: tuple[float | None, float | None] = (None, None)
    """The only soft caps of attention scores and of logits that memlab has of it."""
    expert_bias: bool = False
    """Whether its router has a bias of each expert, whatever the fields say."""
    has_squared_relu: bool = False
    """Whether it is of Nemotron's kind: LayerNorm, and MLPs of squared ReLU without a gate, in all layers."""
    is_hybrid: bool = False
    """Whether a pattern says which layers are Mamba, attention, an MLP of squared ReLU, or experts of it."""
    has_gelu: bool = False
    """Whether it is of Phi-2's kind: LayerNorm, biases of all matrices, and MLPs of GELU without a gate."""
    epsilon: str = "rms_norm_eps"
    """The field of what norms add to the variance."""
    dropout: Mapping[str, float] = field(default_factory=dict)
    """The fields of dropout of its published models, each with the only share that memlab has of it."""
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    topk_method: str | None = None
    """How a router of DeepSeek's kind chooses, where the field is left out."""
    scoring_func: str = "softmax"


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """The values by name.

    Its methods raise `ValueError` where a field is missing, or of another kind.
    """

    values: dict[str, Any]

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1."""
        value = self._field(name, default)
        check_whole_number(name, value, action="correct it")
        return int(value)

    def whole_or_null(self, name: str) -> int | None:
        """Returns a whole number of at least 1, or None where the field is null; it must not be left out."""
        return None if self._field(name, None) is None else self.whole(name)

    def whole_of_either(self, *names: str) -> int:
        """Returns a whole number that has several names; those that are there must agree."""
        found = {name: self.whole(name) for name in names if name in self.values} or {names[0]: self.whole(names[0])}
        if len(set(found.values())) > 1:
            given = " and ".join(f"{name} {number}" for name, number in found.items())
            raise ValueError(f"it has {given}, two names for the same number: leave the wrong one out")
        return next(iter(found.values()))

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number of at least 0."""
        value = self._field(name, default)
        check_number(name, value, above=None, at_most=1e300, action="correct it")
        return float(value)

    def number_of_either(self, *names: str, default: float) -> float:
        """Returns a number of at least 0 that has several names: that of the first which is there."""
        return next((self.number(name) for name in names if self.values.get(name) is not None), default)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns true or false."""
        value = self._field(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shortened(value)}, must be true or false: correct it")
        return value

    def says(self, name: str, *, default: bool = False) -> bool:
        """Whether a field that may be left out says so; False without a name."""
        return bool(name) and self.flag(name, default=default)

    def _field(self, name: str, default: Any) -> Any:
        if default is None and name not in self.values:
            raise ValueError(f"field {name!r} is missing: give the whole Hugging Face config.json")
        value = self.values.get(name)
        return default if value is None and default is not None else value
