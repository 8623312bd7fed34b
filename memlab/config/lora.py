"""Low-rank adapters beside a frozen model: which linears have them, and what they consist of.

Names and defaults are those of Megatron-Bridge's ``LoRA`` (``src/megatron/bridge/peft/lora.py``, 0.6.2), with PEFT's
word ``rank`` for its ``dim``. What the adapters compute is in `memlab.engines.megatron.adapters`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.option import check_options, option
from memlab.config.parts.part import Weight
from memlab.config.validation import RuleError, shortened

DropoutPosition = Literal["pre", "post"]
Library = Literal["megatron_bridge", "mcore_bridge"]
LibraryOfFsdp2 = Literal["peft", "automodel"]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of the linears of layers that adapters can be added to."""
OF_LATENT_ATTENTION = (
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
)  # fmt: skip
"""Those of latent attention, which has no ``linear_qkv``."""
EXTRA_LAYERS = "mtp.layers.{}"
"""Layers of multi-token prediction."""
EXTRA_LAYER = f"{EXTRA_LAYERS}.transformer_layer"
"""The transformer layer in one of them, which megatron-core 0.17 has renamed."""
OF_LINEAR_ATTENTION = ("in_proj", "out_proj")
"""Those of layers of Mamba, and of gated delta net."""
JOINING, OUTPUT_LAYER = "eh_proj", "output_layer"
PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""The parts of fused linears: each has an adapter in the canonical form (``CanonicalLoRA`` of Megatron-Bridge)."""
CANONICAL = (*PARTS["linear_qkv"], "linear_proj", *PARTS["linear_fc1"], "linear_fc2")
_WHOLE = {part: linear for linear, parts in PARTS.items() for part in parts}
_ADAPTABLE = (*LINEARS, *OF_LATENT_ATTENTION, *OF_LINEAR_ATTENTION, JOINING, OUTPUT_LAYER)
OF_PARAMETERS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
"""The parameters in which transformers 5 has all experts of a layer, with Megatron's names."""
ROUTER = "gate"
"""What transformers calls a router."""
OF_ROUTED_LAYERS = (ROUTER, "w1", "w2", "w3")
"""Names that only routers and experts of transformers' models have."""
OF_TRANSFORMERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "linear_proj": ("o_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1"),
    "linear_fc2": ("down_proj", "fc2"),
    OUTPUT_LAYER: ("lm_head",),
}
"""The names of transformers for what Megatron calls so."""
NAMES_OF_TRANSFORMERS = tuple(name for names in OF_TRANSFORMERS.values() for name in names)
_ADAPTERS: dict[str, Any] = {"group": "LoRA", "rebuilds": "model", "engines": ("megatron", "fsdp2")}
_WITHOUT_CONTROL = _ADAPTERS | {"group": ""}
_OF_MEGATRON = _WITHOUT_CONTROL | {"engines": ("megatron",)}
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
        "linears that have adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, output_layer, eh_proj of "
        "multi-token prediction, those of latent attention such as linear_kv_down_proj, in_proj and out_proj of Mamba "
        "and gated delta net, in the canonical form linear_q, linear_k, linear_v, linear_fc1_gate, linear_fc1_up, with "
        "engine fsdp2 q_proj and the other names of transformers, or patterns of whole names with asterisks (default: "
        "the first four in every layer)",
        choices=LINEARS,
        **_ADAPTERS,
    )
    """A pattern, such as ``*.layers.0.*.linear_qkv``, is compared with the whole name, such as
    ``decoder.layers.0.self_attention.linear_qkv``. Megatron numbers the layers of each model chunk from 0. An empty
    list is all linears, the output layer too, but not those of experts, which are grouped, nor those down to latent
    vectors, which are whole on each rank (``match`` in ``peft/module_matcher.py``)."""
    exclude_modules: tuple[str, ...] = option(
        (),
        "linears, or patterns, that have no adapters although the list of target modules is empty",
        **_WITHOUT_CONTROL,
    )
    library: Library = option(
        "megatron_bridge",
        "whose adapters they are: Megatron-Bridge's (default megatron_bridge), or ms-swift's, one for each expert "
        "(mcore_bridge)",
        **_OF_MEGATRON,
    )
    """Those of Megatron-Bridge consist of Megatron-Core's linears, those of ms-swift of Transformer Engine's. Under
    tensor parallelism, the former split the first matrix over the ranks and gather its input and its output; the latter
    have it whole on each rank, and gather its output only (``LoraParallelLinear`` in ``tuners/lora.py`` of
    mcore-bridge 1.6.5)."""
    fsdp2_library: LibraryOfFsdp2 = option(
        "peft",
        "whose adapters they are: PEFT's, in fp32 (default peft), or NeMo Automodel's, in the type of the shards, "
        "which keep less for backward (automodel)",
        **(_WITHOUT_CONTROL | {"engines": ("fsdp2",)}),
    )
    """`memlab.engines.fsdp2.adapters` has what both compute."""
    fused_experts: bool = option(
        False,
        "adapt the parameters in which transformers has all experts of a layer, and the router, where target modules "
        "name their linears or are empty, as PEFT does since 0.20",
        **(_WITHOUT_CONTROL | {"engines": ("fsdp2",)}),
    )
    """Excluded modules do not concern them (``_convert_peft_config_moe`` in utils/transformers_weight_conversion.py of
    PEFT 0.21.2). PEFT 0.18 has no such adapters, and 0.19 none where all linears are asked for."""
    enable_input_require_grads: bool = option(
        False, "let the output of the frozen embedding require a gradient, as ms-swift always does", **_WITHOUT_CONTROL
    )
    """Otherwise it does only under full recompute, whose backward would not run without it."""
    share_expert_adapters: bool = option(True, "share one adapter among all experts of a rank", **_OF_MEGATRON)
    """``GroupedExpertLinearAdapter`` in ``peft/utils.py`` of Megatron-Bridge 0.6.2 is one for each expert."""
    normalize_moe_lora: bool = option(
        False, "divide the rank of experts' adapters by the experts of a token", **_OF_MEGATRON
    )

    def __post_init__(self) -> None:
        check_options(self, prefix="lora_")
        if not 0 <= self.dropout < 1:
            raise RuleError(
                f"lora_dropout is {self.dropout}, must be below 1, since nothing would be left: give a smaller share",
                "lora_dropout",
            )
        for field in ("target_modules", "exclude_modules"):
            names = getattr(self, field)
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise RuleError(
                    f"lora_{field} is {shortened(names)}, must be a list of names, such as {', '.join(LINEARS)}: "
                    "correct it",
                    f"lora_{field}",
                )
            object.__setattr__(self, field, tuple(names))
        if self.library == "mcore_bridge" and not self.target_modules:
            raise RuleError(
                f"lora_target_modules is empty with lora_library {self.library!r}, must name linears there, since only "
                f"Megatron-Bridge takes an empty list for all of them: name {', '.join(LINEARS)}",
                *("lora_target_modules", "lora_library"),
            )
        self._check_kind()
        if self.exclude_modules and self.target_modules:
            raise RuleError(
                f"lora_exclude_modules is {shortened(list(self.exclude_modules))} with lora_target_modules "
                f"{shortened(list(self.target_modules))}, must be empty there by a rule of Megatron-Bridge: empty one "
                "of the two",
                *("lora_exclude_modules", "lora_target_modules"),
            )
        of_experts = OF_ROUTED_LAYERS if self.fused_experts else ()
        for name in (name for name in self.target_modules if name not in of_experts):
            if not name.endswith(("*", "*_proj", *_ADAPTABLE, *_WHOLE, *NAMES_OF_TRANSFORMERS)):
                raise RuleError(
                    f"lora_target_modules has {shortened(name)}, must have {', '.join((*_ADAPTABLE, *_WHOLE))}, with "
                    f"engine fsdp2 {', '.join(NAMES_OF_TRANSFORMERS)}, or patterns that end with one of them or with "
                    "*, since memlab predicts no adapters of others: leave it out",
                    "lora_target_modules",
                )

    def _check_kind(self) -> None:
        """Checks what only Megatron-Bridge's adapters can be, and that the canonical form has its own names."""
        parts = [name for name in self.target_modules if name.endswith(tuple(_WHOLE))]
        of_bridge = {
            "lora_target_modules": shortened(parts[0]) if parts else None,
            "lora_share_expert_adapters": None if self.share_expert_adapters else False,
            "lora_normalize_moe_lora": self.normalize_moe_lora or None,
        }
        for name, value in of_bridge.items():
            if value is not None and self.library == "mcore_bridge":
                raise RuleError(
                    f"{name} is {value} with lora_library {self.library!r}, which only Megatron-Bridge has: leave one "
                    "of the two out",
                    *(name, "lora_library"),
                )
        whole = [name for name in self.target_modules if name.endswith(("*", *PARTS))]
        if parts and whole:
            raise RuleError(
                f"lora_target_modules has {shortened(whole[0])} and {shortened(parts[0])}, must have parts of linears "
                f"or whole linears by a rule of Megatron-Bridge's canonical form: name {', '.join(CANONICAL)}",
                "lora_target_modules",
            )

    @property
    def is_canonical(self) -> bool:
        """Whether parts of linears have adapters, as in Megatron-Bridge's canonical form."""
        return any(name.endswith(tuple(_WHOLE)) for name in self.target_modules)

    def adapts(self, name: str, *, is_grouped: bool = False) -> bool:
        """Whether a linear has an adapter.

        Args:
            name: In the model chunk.
            is_grouped: Whether it is the linear of experts.
        """
        own = name.rpartition(".")[2]
        if own not in _ADAPTABLE:
            return False
        if self.target_modules:
            return any(own == linear or _matches(linear, name) for linear in self._parts_by_linear)
        is_of_other_class = is_grouped or own.endswith("_down_proj")
        return not (is_of_other_class or any(own == one or _matches(one, name) for one in self.exclude_modules))

    def unused_targets(self, names: Iterable[str]) -> list[str]:
        """Returns the targets that name none of some linears, which have their names in the model chunk."""
        owns = {name: name.rpartition(".")[2] for name in names}
        return [
            target
            for target in self.target_modules
            for linear in replace(self, target_modules=(target,), exclude_modules=())._parts_by_linear
            if not any(own == linear or _matches(linear, name) for name, own in owns.items())
        ]

    def adapts_module(self, name: str) -> bool:
        """Whether a linear of transformers' model has an adapter, by its own name or by Megatron's for it."""
        own = name.rpartition(".")[2]
        listed = self.target_modules or self.exclude_modules
        is_listed = any(own == one or own in OF_TRANSFORMERS.get(one, ()) or _matches(one, name) for one in listed)
        return is_listed if self.target_modules else not is_listed

    def adapts_router(self) -> bool:
        """Whether a router of transformers' model has an adapter."""
        return self.fused_experts and (not self.target_modules or ROUTER in self.target_modules)

    def adapts_experts(self, parameter: str, linears: Collection[str]) -> bool:
        """Whether a parameter in which transformers' model has all experts of a layer has an adapter.

        Args:
            parameter: ``gate_up_proj`` or ``down_proj``.
            linears: The linears of an expert that it stands for, by the names that PEFT takes.

        Raises:
            RuleError: If only one of two is named.
        """
        if not self.fused_experts or not self.target_modules or OF_PARAMETERS[parameter] in self.target_modules:
            return self.fused_experts
        found = [name for name in linears if name in self.target_modules]
        if 0 < len(found) < len(linears):
            raise RuleError(
                f"lora_target_modules names {found[0]} and not all of {', '.join(linears)}, which PEFT refuses, since "
                f"transformers has them as one parameter {parameter}: name all or none",
                "lora_target_modules",
            )
        return bool(found)

    def parts(self, name: str) -> tuple[str, ...]:
        """Returns the parts of a linear with an adapter each, in the order in which they run; of a whole linear none.

        Megatron-Bridge has no parts of experts' linears (``CanonicalLoRA.transform`` in ``peft/canonical_lora.py``).

        Args:
            name: Of a linear with adapters, in the model chunk.
        """
        own = name.rpartition(".")[2]
        found = next((each for one, each in self._parts_by_linear.items() if own == one or _matches(one, name)), ())
        is_expert = name.endswith(".mlp.experts.linear_fc1")
        return () if is_expert else tuple(part for part in PARTS.get(own, ()) if part in found)

    @property
    def _parts_by_linear(self) -> dict[str, tuple[str, ...]]:
        """The names or patterns of linears, each with those of its parts that the targets name."""
        found: dict[str, tuple[str, ...]] = {}
        for target in self.target_modules:
            part = next((one for one in _WHOLE if target.endswith(one)), None)
            linear = target if part is None else target.removesuffix(part) + _WHOLE[part]
            found[linear] = (*found.get(linear, ()), *([] if part is None else [part]))
        return found

    def adapted(
        self, number: int, weights: Iterable[Weight], place: str = "decoder.layers.{}"
    ) -> Iterator[tuple[Weight, str]]:
        """Yields the weights of those linears of a layer that have adapters, and the linears' names in the model chunk.

        Args:
            number: Of the layer in its model chunk.
            place: Where the layer is in the chunk; in one of multi-token prediction, `EXTRA_LAYER`, or `EXTRA_LAYERS`
                for what joins hidden states and embeddings.
        """
        for weight in weights:
            name = f"{place.format(number)}.{weight.name.removesuffix('.weight')}"
            if weight.is_matrix and self.adapts(name, is_grouped=bool(weight.num_experts)):
                yield weight, name

    def rank_of(self, linear: Weight, model: Architecture, layout: Layout) -> int:
        """Returns the rank of a linear's adapter.

        With `normalize_moe_lora`, that of experts is rounded up where tensor parallel ranks share its rows
        (``align_expert_dim_for_tp`` in ``peft/utils.py``).
        """
        if not (self.normalize_moe_lora and linear.num_experts):
            return self.rank
        rank, ranks = self.rank // model.moe_router_topk, layout.expert_tensor_size
        return rank if linear.split == 1 else -(-rank // ranks) * ranks

    def weights(self, linear: Weight, name: str, model: Architecture, layout: Layout) -> Iterator[Weight]:
        """Yields the weights of a linear's adapter, or of those of its parts.

        Of the first, tensor parallel ranks share what they share of the linear's: its rows, or its columns; its rows
        too where each rank has the whole linear. Of the second they always share the rows (``ParallelLinearAdapter`` in
        ``peft/utils.py``). Of ms-swift's two, they share only that which has the linear's split side.

        Args:
            name: Of the linear in the model chunk.
            layout: Of the ranks; of Megatron-Bridge's, an expert parallel rank has one adapter for its experts.
        """
        own, (outputs, inputs), count = linear.name.removesuffix(".weight"), linear.shape, linear.num_experts
        rank = self.rank_of(linear, model, layout)
        if count and self.library == "megatron_bridge" and self.share_expert_adapters:
            count = layout.expert_model_parallel_size
        splits: tuple[int | None, int | None] = linear.split or 0, 0
        if self.library == "mcore_bridge":
            splits = (None, linear.split) if linear.split == 0 else (linear.split, None)
        for part in self.parts(name) or ("",):
            adapter = f"{own}.adapter{part and '.adapter_' + part.rpartition('_')[2]}"
            rows = rows_of_part(part, model, outputs) if part else outputs
            yield Weight(f"{adapter}.linear_in.weight", (rank, inputs), splits[0], count)
            yield Weight(f"{adapter}.linear_out.weight", (rows, rank), splits[1], count)


def rows_of_part(part: str, model: Architecture, rows: int) -> int:
    """Returns how many rows of a fused linear's weight are those of one of its parts."""
    if part in PARTS["linear_fc1"]:
        return rows // 2
    heads = model.num_attention_heads if part == "linear_q" else model.num_query_groups
    return heads * model.kv_channels


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is that of a name, as Megatron-Bridge's ``wildcard_match`` decides it (``peft/utils.py``)."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None
