"""What each part of a layer says of itself: weights, operations, what it keeps for backward, modules and rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, Self

from memlab.config.config_json import ConfigJson, ModelType
from memlab.config.validation import check_number, check_whole_number

Normalization = Literal["RMSNorm", "LayerNorm"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a layer."""

    name: str
    """In the layer, as Megatron names it; the experts' have a number after it."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    split: int | None = None
    """The dimension that tensor parallel ranks share; None is whole on each rank."""
    num_experts: int = 0
    """How many experts have such a weight each; 0 if it is not an expert's."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is one operand of a matrix product."""
        return len(self.shape) == 2  # that of a convolution has three dimensions

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter; of all experts together."""
        return prod(self.shape) * (self.num_experts or 1)


def norm_weights(name: str, size: int, normalization: Normalization) -> tuple[Weight, ...]:
    """Returns the parameters of a norm: a weight, and of LayerNorm a bias.

    Args:
        name: Of the norm in the layer, up to the word ``weight``.
    """
    words = ("weight", "bias") if normalization == "LayerNorm" else ("weight",)
    return tuple(Weight(f"{name}{word}", (size,)) for word in words)


def norm_kept_bytes(normalization: Normalization) -> int:
    """Returns what a norm keeps of each row beside tensors: a reciprocal in fp32, and of LayerNorm a mean."""
    return 8 if normalization == "LayerNorm" else 4


class SharedSize(NamedTuple):
    """A size that ranks share, and must divide."""

    field: str
    """What messages call it."""
    what: str
    """What it counts, in words."""
    amount: int
    ranks: Literal["tensor_model_parallel_size", "expert_tensor_parallel_size", "expert_model_parallel_size"]
    """The size of the layout by which it is divided."""

    @property
    def is_of_a_matrix(self) -> bool:
        """Whether it is a width of weight matrices, which FP8 limits too."""
        return self.ranks != "expert_model_parallel_size" and not self.field.endswith(("_heads", "_groups"))


@dataclass(frozen=True)
class Part(ABC):
    """A part of a layer; its fields are fields of `Architecture`, by Megatron's names."""

    most: ClassVar[Mapping[str, int]]
    """The largest value of each whole number: some ten times what any published model has."""
    ranges: ClassVar[Mapping[str, tuple[float | None, float]]] = {}
    """Of other numbers, what they must be above (or at least 0 where there is none), and at most."""
    megatron: ClassVar[Mapping[str, Any]] = {}
    """Fields of Megatron's ``TransformerConfig`` that are the same in every model with this part."""
    recompute_modules: ClassVar[tuple[str, ...]] = ()
    """Those of Megatron's ``recompute_modules`` that exist only in layers with this part."""
    offload_modules: ClassVar[tuple[str, ...]] = ()
    """The same of ``offload_modules``."""
    effective: ClassVar[tuple[str, ...]] = ()
    """What has an effect in layers with this part, although the other part of the layer says that it has none."""
    offload_groups: ClassVar[tuple[str, ...]] = ()
    """The groups of ``offload_modules`` that begin in a layer after another one has ended, in their order."""
    routes: ClassVar[bool] = False
    """Whether it sends tokens to experts, so that the rows of its matrices are known only when the step runs."""
    keeps_graph: ClassVar[bool] = False
    """Whether it keeps the graph of its last forward pass, and with it the input of a checkpoint around the layer."""

    @classmethod
    def of(cls, model: object) -> Self:
        """Takes the part's fields from a model that has them."""
        return cls(**{field.name: getattr(model, field.name) for field in fields(cls)})

    def check(self, name: str) -> None:
        """Checks the part's fields.

        Raises:
            ValueError: If a value is not of its kind or range, or two values contradict each other.
        """
        for field, at_most in self.most.items():
            check_whole_number(f"{name}: {field}", getattr(self, field), at_most=at_most, action="correct it")
        for field, (above, largest) in self.ranges.items():
            check_number(f"{name}: {field}", getattr(self, field), above, largest, action="correct it")

    @property
    def without_effect(self) -> Mapping[str, str]:
        """What Megatron accepts and ignores in layers with this part: ``field:module`` to the reason."""
        return {}

    @property
    def megatron_spec(self) -> dict[str, Any]:
        """Arguments of Megatron's ``get_gpt_layer_with_transformer_engine_spec`` for a layer with this part."""
        return {}

    def groups_in_turn(self, offloaded: Collection[str]) -> list[str]:
        """Returns those of `offload_groups` that a layer has with these offload modules."""
        return [name for name in self.offload_groups if name in offloaded]

    @classmethod
    @abstractmethod
    def of_config(cls, config: ConfigJson, kind: ModelType) -> dict[str, Any]:
        """Reads the part's fields from a Hugging Face ``config.json``."""

    @abstractmethod
    def weights(self) -> tuple[Weight, ...]:
        """Returns the parameters of one layer."""

    @abstractmethod
    def shared_sizes(self) -> tuple[SharedSize, ...]:
        """Returns the sizes that ranks share."""

    @property
    @abstractmethod
    def largest_row(self) -> int:
        """The most elements that one token has in any activation, before anything is split over ranks."""

    def operations(self, attended: float) -> float:
        """Returns the FLOPs of a forward pass for one token, in one layer; a product of [1, n] and [n, m] is 2 n m.

        Args:
            attended: Tokens of a sequence.
        """
        return sum(2.0 * weight.num_elements for weight in self.weights() if weight.is_matrix)

    @abstractmethod
    def operations_of_modules(self, attended: float) -> dict[str, float]:
        """Returns the FLOPs, as `operations`, of each of Megatron's ``recompute_modules`` that the part has."""

    @abstractmethod
    def kept_bytes(self, tokens: int, recompute: str) -> int:
        """Returns what the part keeps for backward in one layer: the formula of the cheat sheet.

        In `memlab.engines.megatron.layers`, the functions that save it are written as Transformer Engine's are.

        Args:
            tokens: Of a sequence, on one rank.
            recompute: ``none``, ``full``, or one of the modules of `formulas`.
        """


class FeedForward(Part):
    """A part that computes each token by itself: after attention, or a layer of its own."""

    formulas: ClassVar[tuple[str, ...]]
    """What `kept_bytes` has a formula for."""
