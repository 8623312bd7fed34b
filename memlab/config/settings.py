"""The memory settings of one training step, and the rules that hold on any model.

Names and defaults are Megatron-Core's (``megatron/core/transformer/transformer_config.py``, 0.16.1). A setting that
Megatron refuses, or accepts and then fails with or ignores by mistake, is refused here, in one line. What only some
models refuse or ignore is in `memlab.config.model_restrictions`. Panel, notebook, command line and nightly all show the
same texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

from memlab.config.parts.moe import Experts
from memlab.config.validation import check_number, check_whole_number, is_whole_number, shortened

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
CheckpointInputRemedy = Literal["detach", "clear_gradient", "release_storage"]

RECOMPUTE_GRANULARITIES = ("full", "selective")
RECOMPUTE_METHODS = ("uniform", "block")
CHECKPOINT_INPUT_REMEDIES = ("detach", "clear_gradient", "release_storage")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
SINCE_MEGATRON_0_19 = (
    "activation_offload_fraction",
    "delta_offload_bytes_across_pp_ranks",
    "fine_grained_offloading_max_inflight_offloads",
)
"""Settings of activation offload that megatron-core 0.16 does not have."""
_MOST_BYTES = 2**50
KEPT_ON_HOST = ("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """What is recomputed, what is offloaded during a step, and what is kept on the host between steps.

    The default is plain Megatron: nothing is recomputed, nothing is offloaded. Lists of modules are stored as tuples in
    a fixed order, so that equivalent settings compare equal.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    recompute_granularity: RecomputeGranularity | None = None
    """``full`` recomputes whole layers, ``selective`` recomputes `recompute_modules`, None recomputes nothing."""
    recompute_method: RecomputeMethod | None = None
    """Under ``full``: ``uniform`` checkpoints all layers in groups, ``block`` checkpoints each of the first layers."""
    recompute_num_layers: int | None = None
    """Under ``full``: layers per checkpoint (uniform), or the number of layers that are recomputed (block)."""
    recompute_modules: tuple[str, ...] | None = None
    """Under ``selective``: some of `RECOMPUTE_MODULES`; Megatron's default is only ``core_attn``."""
    checkpoint_input_remedy: CheckpointInputRemedy | None = None
    """Remedy for the input and gradient that a checkpoint of an MoE layer keeps alive after its backward: ``detach``,
    ``clear_gradient`` or ``release_storage``, which `memlab.engines.megatron.retention.remedies` explains."""
    offload_modules: tuple[str, ...] | None = None
    """Modules whose saved tensors go to the host between forward and backward: some of `OFFLOAD_MODULES`."""
    min_offloaded_tensor_size: int = 1024 * 1024
    """Smallest saved tensor, in elements, that `offload_modules` transfers to the host."""
    activation_offload_fraction: float = 1.0
    """Share of the groups of `offload_modules` that are transferred, from 0 to 1. (A group is what a module saves in
    one layer.) In each pass, the later groups stay on the device. Needs megatron-core 0.19."""
    delta_offload_bytes_across_pp_ranks: int = 0
    """How many more bytes of `offload_modules` each pipeline stage leaves on the device than the stage before it,
    because later stages have fewer passes in flight. Needs megatron-core 0.19."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """How many transfers to the host, per offload module, may still be in progress while the model computes. With 0,
    the model waits for each transfer; with None, it waits for no transfer. Needs megatron-core 0.19."""
    offload_parameters: bool = False
    """Keep the parameters on the host between steps (copied to the host and back)."""
    offload_gradients: bool | None = None
    """Drop the gradient buffers between steps (nothing is copied; they come back as zeros). None takes the value of
    `offload_optimizer` when the settings are made; ``dataclasses.replace`` keeps that value."""
    offload_optimizer: bool = False
    """Keep main parameters and Adam's moments on the host between steps (copied to the host and back)."""
    offload_optimizer_except_update: bool = False
    """Keep main parameters and Adam's moments on the host between steps, and also during forward and backward: they
    are on the device only while the optimizer updates the parameters. Gradients stay on the device unless
    `offload_gradients` is set."""

    def __post_init__(self) -> None:
        self._set("recompute_modules", _modules("recompute_modules", self.recompute_modules, RECOMPUTE_MODULES))
        self._set("offload_modules", _modules("offload_modules", self.offload_modules, OFFLOAD_MODULES))
        self._check_recompute()
        self._check_offload()
        _one_of("checkpoint_input_remedy", self.checkpoint_input_remedy, CHECKPOINT_INPUT_REMEDIES)
        for name in KEPT_ON_HOST:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "offload_gradients" and value is None):
                raise ValueError(
                    f"{name} is {shortened(value)}, must be True or False: True frees device memory between steps"
                )

        # By default gradients follow the optimizer: between steps they contain nothing that it has not used
        # (SkyRL #563).
        if self.offload_gradients is None:
            self._set("offload_gradients", self.offload_optimizer)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_recompute(self) -> None:
        granularity, modules = self.recompute_granularity, self.recompute_modules
        _one_of("recompute_granularity", granularity, RECOMPUTE_GRANULARITIES)
        _one_of("recompute_method", self.recompute_method, RECOMPUTE_METHODS)
        if self.recompute_num_layers is not None:
            check_whole_number("recompute_num_layers", self.recompute_num_layers, action="give the number of layers")
        if granularity == "full":
            if self.recompute_method is None:
                raise ValueError(
                    "recompute_granularity 'full' needs a recompute_method: choose 'uniform' (every layer, in groups) "
                    "or 'block' (the first layers)"
                )
            if self.recompute_num_layers is None:
                raise ValueError(
                    f"recompute_method {self.recompute_method!r} needs recompute_num_layers: give the number of layers "
                    + ("in a checkpoint, for example 1" if self.recompute_method == "uniform" else "to recompute")
                )
        else:
            for name in ("recompute_method", "recompute_num_layers"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but only recompute_granularity 'full' reads it, and "
                        f"granularity is {granularity!r}: leave {name} out, or choose granularity 'full'"
                    )
        if granularity == "selective":
            self._set("recompute_modules", modules or ("core_attn",))
        elif modules is not None:
            raise ValueError(
                f"recompute_modules is {list(modules)}, but only recompute_granularity 'selective' reads it, and "
                f"granularity is {granularity!r}: choose granularity 'selective', or leave recompute_modules out"
            )

    def _check_offload(self) -> None:
        offload = self.offload_modules or ()
        if not is_whole_number(self.min_offloaded_tensor_size, at_least=0):
            raise ValueError(
                f"min_offloaded_tensor_size is {shortened(self.min_offloaded_tensor_size)}, must be a whole number of "
                "elements, 0 or more: use 0 to offload tensors of any size"
            )
        check_number(
            "activation_offload_fraction",
            self.activation_offload_fraction,
            None,
            1,
            action="give a share from 0 to 1",
        )
        delta, inflight = self.delta_offload_bytes_across_pp_ranks, self.fine_grained_offloading_max_inflight_offloads
        check_whole_number("delta_offload_bytes_across_pp_ranks", delta, 0, _MOST_BYTES, action="give bytes")
        if inflight is not None:
            check_whole_number(SINCE_MEGATRON_0_19[-1], inflight, 0, _MOST_BYTES, action="give a number, or None")
        if "attn_proj" in offload and "core_attn" not in offload:
            raise ValueError(
                "offload_modules has 'attn_proj' without 'core_attn': attn_proj's input is core_attn's output, which "
                "core_attn's backward needs on the device: add 'core_attn' or leave 'attn_proj' out"
            )
        recomputed = self.recompute_modules or ()
        inside_moe = [name for name in offload if name in Experts.offload_modules]
        if inside_moe and "moe" in recomputed:
            names = " and ".join(f"'{name}'" for name in inside_moe)
            raise ValueError(
                f"offload_modules has {inside_moe} under selective recompute of 'moe': the whole MoE part is "
                f"recomputed, so no tensor inside it is saved for backward: leave {names} out, or recompute 'moe_act' "
                "instead of 'moe'"
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
            words.append(f"full {self.recompute_method} {self.recompute_num_layers}")
        if self.recompute_granularity == "selective":
            words.append("recompute " + "+".join(self.recompute_modules or ()))
        if self.checkpoint_input_remedy:
            words.append(self.checkpoint_input_remedy.replace("_", " "))
        if self.offload_modules:
            words.append("offload " + "+".join(self.offload_modules))
        words += [f"{name} {value}" for name, value in self.changed().items() if name in SINCE_MEGATRON_0_19]
        host = [name for name in ("parameters", "gradients", "optimizer") if getattr(self, f"offload_{name}")]
        if host:
            words.append("on host " + "+".join(host))
        if self.offload_optimizer_except_update:
            words.append("optimizer on host except update")
        return ", ".join(words) or "none"


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


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ValueError(
            f"{name} is {shortened(value)}, must be one of {', '.join(choices)}, or None: choose one of them"
        )


def _modules(name: str, value: object, choices: tuple[str, ...]) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        remedy = (
            f"write [{shortened(value)}] for a single one"
            if isinstance(value, str)
            else f"name some of {', '.join(choices)}"
        )
        raise ValueError(f"{name} is {shortened(value)}, must be a list of module names: {remedy}")
    given = list(value)
    if not given:
        raise ValueError(f"{name} is an empty list: name at least one of {', '.join(choices)}, or leave {name} out")
    unknown = [module for module in given if module not in choices]
    if unknown:
        raise ValueError(
            f"{name} has {shortened(unknown)}, which memlab does not model: choose from {', '.join(choices)}"
        )
    return tuple(module for module in choices if module in given)
