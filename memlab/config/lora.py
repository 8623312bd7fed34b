"""Low-rank adapters beside a frozen model: which linears have them, and what they consist of.

Names and defaults are those of Megatron-Bridge's ``LoRA`` (``src/megatron/bridge/peft/lora.py``, 0.6.2), with PEFT's
word ``rank`` for its ``dim``. What the adapters compute is in `memlab.engines.megatron.adapters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from memlab.config.option import check_options, option
from memlab.config.parts.part import Weight
from memlab.config.validation import RuleError, shortened

DropoutPosition = Literal["pre", "post"]
Library = Literal["megatron_bridge", "mcore_bridge"]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of the linears that adapters can be added to."""
_ADAPTERS = {"group": "LoRA", "rebuilds": "model"}
_WITHOUT_CONTROL = _ADAPTERS | {"group": ""}
"""The panel has the rank and the linears: what else adapters have hardly changes bytes, or is rarely asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA:
    """Adapters of low rank, which alone are trained: ``W x`` becomes ``W x + alpha / rank * out(in(x))``.

    The model's own parameters are frozen: they have no gradients, no main parameters and no moments.

    Raises:
        ValueError: If a rule is broken.
    """

    rank: int = option(
        32, "train low-rank adapters of this rank, and freeze the model (default: train the model)", at_most=2**16,
        **_ADAPTERS,
    )  # fmt: skip
    alpha: float = option(
        32, "scale the adapters' outputs by this number over the rank (default 32)", at_most=1e6, **_WITHOUT_CONTROL
    )
    """Changes no bytes."""
    dropout: float = option(
        0.0, "drop this share of an adapter's values, 0 to 1 (default 0)", at_most=1, **_WITHOUT_CONTROL
    )
    dropout_position: DropoutPosition = option(
        "pre", "drop an adapter's inputs (pre) or outputs (post) (default pre)", **_WITHOUT_CONTROL
    )
    target_modules: tuple[str, ...] = option(
        LINEARS,
        "linears that have adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or patterns of whole names with "
        "asterisks (default: all four in every layer)",
        choices=LINEARS,
        **_ADAPTERS,
    )
    """A pattern, such as ``*.layers.0.*.linear_qkv``, is compared with the whole name, such as
    ``decoder.layers.0.self_attention.linear_qkv``. Megatron numbers the layers of each model chunk from 0."""
    library: Library = option(
        "megatron_bridge",
        "whose adapters they are: Megatron-Bridge's, one for all experts of a rank (default megatron_bridge), or "
        "ms-swift's, one for each expert (mcore_bridge)",
        **_WITHOUT_CONTROL,
    )
    """Those of Megatron-Bridge consist of Megatron-Core's linears. Its further kinds, such as one adapter for each
    expert, are not modelled. Those of ms-swift consist of Transformer Engine's. Under tensor parallelism, the former
    split the first matrix over the ranks and gather its input and its output; the latter have it whole on each rank,
    and gather its output only (``LoraParallelLinear`` in ``tuners/lora.py`` of mcore-bridge 1.6.5)."""
    enable_input_require_grads: bool = option(
        False, "let the output of the frozen embedding require a gradient, as ms-swift always does", **_WITHOUT_CONTROL
    )
    """Otherwise it does only under full recompute, whose backward would not run without it."""

    def __post_init__(self) -> None:
        check_options(self, prefix="lora_")
        if not 0 <= self.dropout < 1:
            raise RuleError(
                f"lora_dropout is {self.dropout}, must be below 1, since nothing would be left: give a smaller share",
                "lora_dropout",
            )
        if isinstance(self.target_modules, list):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        modules = self.target_modules
        if not isinstance(modules, tuple) or not modules or not all(isinstance(name, str) for name in modules):
            raise RuleError(
                f"lora_target_modules is {shortened(modules)}, must name linears, such as {', '.join(LINEARS)}: name "
                "at least one",
                "lora_target_modules",
            )
        for name in modules:
            if not name.endswith(("*", *LINEARS)):
                raise RuleError(
                    f"lora_target_modules has {shortened(name)}, must have {', '.join(LINEARS)}, or patterns that end "
                    "with one of them or with *, since memlab predicts no adapters of others: leave it out",
                    "lora_target_modules",
                )

    def adapts(self, name: str) -> bool:
        """Whether a linear has an adapter, by its name in the model chunk."""
        own = name.rpartition(".")[2]
        return own in LINEARS and any(own == target or _matches(target, name) for target in self.target_modules)

    def adapted(self, number: int, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Yields the weights of those linears of a layer that have adapters.

        Args:
            number: Of the layer in its model chunk.
            weights: Of the layer.
        """
        for weight in weights:
            if weight.is_matrix and self.adapts(f"decoder.layers.{number}.{weight.name.removesuffix('.weight')}"):
                yield weight

    def weights(self, linear: Weight, ranks_of_experts: int) -> tuple[Weight, Weight]:
        """Returns the two weights of a linear's adapter.

        Of the first, tensor parallel ranks share what they share of the linear's: its rows, or its columns. Of the
        second they always share the rows (``ParallelLinearAdapter`` in ``peft/utils.py``). Of ms-swift's two, they
        share only that which has the linear's split side.

        Args:
            linear: The linear's weight.
            ranks_of_experts: The expert parallel ranks, each of which has adapters that its experts share.
        """
        name, (outputs, inputs), count = linear.name.removesuffix(".weight"), linear.shape, linear.num_experts
        if count and self.library == "megatron_bridge":
            count = ranks_of_experts
        splits: tuple[int | None, int | None] = linear.split, 0
        if self.library == "mcore_bridge":
            splits = (None, linear.split) if linear.split == 0 else (linear.split, None)
        return (
            Weight(f"{name}.adapter.linear_in.weight", (self.rank, inputs), splits[0], count),
            Weight(f"{name}.adapter.linear_out.weight", (outputs, self.rank), splits[1], count),
        )


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is that of a name, as Megatron-Bridge's ``wildcard_match`` decides it (``peft/utils.py``)."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None
