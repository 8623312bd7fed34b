"""The memory settings of one training step, and the rules that hold on any model.

Names and defaults are Megatron-Core's (``megatron/core/transformer/transformer_config.py``, 0.16.1). A setting that
Megatron refuses, or accepts and then fails with or ignores by mistake, is refused here, in one line. What only some
models refuse is in `memlab.config.model_restrictions`, and what they ignore in `memlab.config.without_effect`. Panel,
notebook, command line and nightly all show the same texts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

from memlab.config.option import check_options, checked_modules, option, options_of
from memlab.config.parts.moe import Experts
from memlab.config.validation import RuleError, shortened

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
CheckpointInputRemedy = Literal["detach", "clear_gradient", "release_storage"]

MODULES = {
    "attn_norm": "the norm before attention (if it is a module of its own)",
    "qkv_linear": "the linear layer that makes queries, keys and values",
    "core_attn": "attention without its linear layers (scores, softmax, and their product with the values)",
    "attn_proj": "the linear layer after attention (needs core_attn, too)",
    "mlp_norm": "the norm before the MLP or the experts (if it is a module of its own)",
    "expert_fc1": "the first linear layer of the experts of an MoE layer",
    "moe_act": "the activation function of the experts of an MoE layer",
    "layernorm": "the norms before attention and before the MLP or the experts (those that are modules of their own)",
    "mla_up_proj": "the projections from the latent vectors of latent attention, and the rotation",
    "mlp": "the MLP of a dense layer",
    "shared_experts": "the MLP beside the experts that all tokens pass through",
    "moe": "the whole MoE part of a layer (router and experts)",
}
"""What each module of a layer is that is recomputed or offloaded by itself; the glossary has the terms."""
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
KEPT_ON_HOST = ("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update")
_MOST_BYTES = 2**50
_FULL = {"group": "Recompute", "needs": "recompute_granularity", "needs_value": "full", "megatron": "model"}
_OF_FSDP2: dict[str, Any] = {
    "group": "Recompute",
    "needs": "recompute_granularity",
    "needs_value": "full",
    "engines": ("fsdp2",),
}
_OFFLOAD = {"group": "Offload during the step", "megatron": "model"}
_NEWER_OFFLOAD = {
    "group": "Offload, in newer versions of megatron-core",
    "needs": "offload_modules",
    "megatron": "model",
}
_ON_HOST: dict[str, Any] = {
    "group": "On host between steps",
    "words": {"device": False, "host": True},
    "engines": ("megatron", "fsdp2"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """What is recomputed, what is offloaded during a step, and what is kept on the host between steps.

    The default is plain Megatron: nothing is recomputed, nothing is offloaded. Lists of modules are stored as tuples in
    a fixed order, so that equivalent settings compare equal.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    recompute_granularity: RecomputeGranularity | None = option(
        None,
        "full: backward recomputes whole layers; selective: it recomputes only `recompute_modules`",
        group="Recompute",
        label="granularity",
        megatron="model",
        engines=("megatron", "fsdp2"),
    )
    """None recomputes nothing."""
    recompute_method: RecomputeMethod | None = option(
        None,
        "uniform recomputes all layers, in groups with one checkpoint each, block only the first ones, with one "
        "checkpoint per layer",
        **_FULL,
        label="method",
        engines=("megatron", "fsdp2"),
    )
    recompute_num_layers: int | None = option(
        None,
        "layers per checkpoint (uniform), or number of layers to recompute (block)",
        **_FULL,
        label="layers",
        engines=("megatron", "fsdp2"),
        advice="give the number of layers",
    )
    recompute_modules: tuple[str, ...] | None = option(
        None,
        f"recompute some of {', '.join(RECOMPUTE_MODULES)}",
        group="Recompute",
        needs="recompute_granularity",
        needs_value="selective",
        choices=RECOMPUTE_MODULES,
        megatron="model",
    )
    """Megatron's default is only ``core_attn``."""
    selective_ac: bool = option(
        False,
        "keep what attention and every second product of matrices return, and recompute the rest of a layer",
        **_OF_FSDP2,
        label="keep every second product",
    )
    """``activation_checkpointing: selective`` of NeMo Automodel, and torchtitan's ``SelectiveAC``."""
    checkpoint_every: int | None = option(
        None,
        "recompute only every N-th of these layers (default: each of them)",
        **_OF_FSDP2,
        label="every N-th layer",
        shown_for_none=1,
        at_most=2**14,
        advice="give a number of layers",
    )
    """torchtitan's selective checkpoints of layers, which begin with the N-th."""
    checkpoint_input_remedy: CheckpointInputRemedy | None = option(
        None,
        "how to free the inputs that checkpoints of MoE layers keep allocated after backward (default: none)",
        group="Recompute",
        label="remedy for retention",
        words={
            "none": None,
            "detach": "detach",
            "clear gradient": "clear_gradient",
            "release storage": "release_storage",
        },
    )
    """It frees their gradients too. `memlab.engines.megatron.retention.remedies` explains each remedy."""
    offload_modules: tuple[str, ...] | None = option(
        None,
        "copy the saved tensors of these modules to the host in forward, and back for backward: some of "
        f"{', '.join(OFFLOAD_MODULES)}",
        **_OFFLOAD,
        choices=OFFLOAD_MODULES,
    )
    min_offloaded_tensor_size: int = option(
        1024 * 1024,
        "offload only tensors of at least N elements (default 1048576, as in Megatron)",
        **_OFFLOAD,
        label="smallest tensor (elements)",
        needs="offload_modules",
        at_least=0,
        advice="use 0 to offload tensors of any size",
    )
    activation_offload_fraction: float = option(
        1.0,
        "share of the groups to offload, 0 to 1; a group is what a module saves in one layer (default 1)",
        **_NEWER_OFFLOAD,
        since=(0, 19),
        label="share of groups offloaded",
        at_most=1,
        advice="give a share from 0 to 1",
    )
    """In each pass, the later groups stay on the device."""
    delta_offload_bytes_across_pp_ranks: int = option(
        0,
        "number of bytes that each pipeline stage leaves on the device in addition to those of the stage before it "
        "(default 0)",
        **_NEWER_OFFLOAD,
        since=(0, 19),
        label="extra bytes per later stage",
        at_least=0,
        at_most=_MOST_BYTES,
        advice="give bytes",
    )
    """Later stages have fewer passes in flight."""
    fine_grained_offloading_max_inflight_offloads: int | None = option(
        None,
        "number of transfers per offload module that may still be in progress while the model computes (default: no "
        "limit)",
        **_NEWER_OFFLOAD,
        since=(0, 18),
        label="copies at once (-1: no limit)",
        shown_for_none=-1,
        at_least=0,
        at_most=_MOST_BYTES,
        advice="give a number, or None",
    )
    """With 0, the model waits for each transfer; with None, it waits for no transfer."""
    offload_parameters: bool = option(
        False, "keep parameters on the host between steps", **_ON_HOST, label="parameters"
    )
    """They are copied to the host and back."""
    # Gradients are dropped, not copied: between steps the optimizer has already used them.
    offload_gradients: bool | None = option(
        None,
        "free the gradient buffers between steps (default: yes if `offload_optimizer` is given, otherwise no)",
        group="On host between steps",
        label="gradients",
        engines=("megatron", "fsdp2"),
        words={"as optimizer": None, "device": False, "dropped": True},
    )
    """Nothing is copied; they come back as zeros. None takes the value of `offload_optimizer` when the settings are
    made; ``dataclasses.replace`` keeps that value."""
    offload_optimizer: bool = option(
        False, "keep optimizer state on the host between steps", **_ON_HOST, label="optimizer"
    )
    """Main parameters and Adam's moments, which are copied to the host and back."""
    offload_optimizer_except_update: bool = option(
        False,
        "keep optimizer state on the host in forward and backward too, and load it only for the update",
        **_ON_HOST,
        label="optimizer except update",
    )
    """Gradients stay on the device unless `offload_gradients` is set."""

    def __post_init__(self) -> None:
        for name, one in options_of(MemorySettings).items():
            if one.kind == "modules":
                self._set(name, checked_modules(one, getattr(self, name)))
        check_options(self)
        self._check_recompute()
        self._check_offload()

        # By default gradients follow the optimizer: between steps they contain nothing that it has not used
        # (SkyRL #563).
        if self.offload_gradients is None:
            self._set("offload_gradients", self.offload_optimizer)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_recompute(self) -> None:
        granularity = self.recompute_granularity
        for name, one in options_of(MemorySettings).items():
            value = getattr(self, name)
            if one.needs == "recompute_granularity" and one.needs_value != granularity and value != one.default:
                shown = list(value) if isinstance(value, tuple) else repr(value)
                raise RuleError(
                    f"{name} is {shown}, but only {one.needed} reads it, and granularity is "
                    f"{granularity!r}: leave {name} out, or choose {one.needed}",
                    *(name, "recompute_granularity"),
                )
        if granularity == "full" and self.recompute_method is None:
            raise RuleError(
                "recompute_granularity 'full' needs a recompute_method: choose 'uniform' (every layer, in groups) "
                "or 'block' (the first layers)",
                *("recompute_granularity", "recompute_method"),
            )
        if granularity == "full" and self.recompute_num_layers is None:
            raise RuleError(
                f"recompute_method {self.recompute_method!r} needs recompute_num_layers: give the number of layers "
                + ("in a checkpoint, for example 1" if self.recompute_method == "uniform" else "to recompute"),
                *("recompute_method", "recompute_num_layers"),
            )
        if granularity == "selective":
            self._set("recompute_modules", self.recompute_modules or ("core_attn",))

    def _check_offload(self) -> None:
        offload = self.offload_modules or ()
        if "attn_proj" in offload and "core_attn" not in offload:
            raise RuleError(
                "offload_modules has 'attn_proj' without 'core_attn': attn_proj's input is core_attn's output, which "
                "core_attn's backward needs on the device: add 'core_attn' or leave 'attn_proj' out",
                "offload_modules",
            )
        recomputed = self.recompute_modules or ()
        inside_moe = [name for name in offload if name in Experts.offload_modules]
        if inside_moe and "moe" in recomputed:
            names = " and ".join(f"'{name}'" for name in inside_moe)
            raise RuleError(
                f"offload_modules has {inside_moe} under selective recompute of 'moe': the whole MoE part is "
                f"recomputed, so no tensor inside it is saved for backward: leave {names} out, or recompute 'moe_act' "
                "instead of 'moe'",
                *("offload_modules", "recompute_modules"),
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-ready values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: object) -> MemorySettings:
        """Builds settings from JSON values.

        Raises:
            ValueError: If a key is unknown, or a rule is broken.
        """
        if not isinstance(values, dict):
            raise ValueError(f"settings are {shortened(values)}, must be an object: give setting and value pairs")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"unknown settings {shortened(unknown)}: choose from {', '.join(known)}")
        return cls(**values)

    def changed(self) -> dict[str, Any]:
        """Returns the fields that a caller must give to build equal settings, in the order of the class."""
        default = _default(self.offload_optimizer)
        return {
            name: value
            for name in self.__slots__
            if (value := getattr(self, name)) != getattr(default, name) or (name == "offload_optimizer" and value)
        }

    def __str__(self) -> str:
        """A short name for tables and legends, such as ``full uniform 1`` or ``offload expert_fc1+moe_act``."""
        words: list[str] = []
        if self.recompute_granularity == "full":
            kept = " selective" * self.selective_ac + f" every {self.checkpoint_every}" * bool(self.checkpoint_every)
            words.append(f"full {self.recompute_method} {self.recompute_num_layers}{kept}")
        if self.recompute_granularity == "selective":
            words.append("recompute " + "+".join(self.recompute_modules or ()))
        if self.checkpoint_input_remedy:
            words.append(self.checkpoint_input_remedy.replace("_", " "))
        if self.offload_modules:
            words.append("offload " + "+".join(self.offload_modules))
        words += [f"{name} {value}" for name, value in self.changed().items() if name in NEWER_SETTINGS]
        host = [name for name in ("parameters", "gradients", "optimizer") if getattr(self, f"offload_{name}")]
        if host:
            words.append("on host " + "+".join(host))
        if self.offload_optimizer_except_update:
            words.append("optimizer on host except update")
        return ", ".join(words) or "none"


NEWER_SETTINGS = tuple(name for name, one in options_of(MemorySettings).items() if one.since)
"""Settings of activation offload that megatron-core 0.16 does not have."""


@cache
def _default(offload_optimizer: bool) -> MemorySettings:
    return MemorySettings(offload_optimizer=offload_optimizer)


def validation_error(**fields: Any) -> str | None:
    """Returns the text with which `MemorySettings` refuses these fields, or None if it accepts them."""
    try:
        MemorySettings(**fields)
    except ValueError as error:
        return str(error)
    return None
