"""Settings while they are being edited: what the controls show, whether it breaks a rule or not.

`MemorySettings`, `TrainingState` and `AllocatorSettings` cannot hold a combination that breaks a rule, and the way from
one setting to another often leads through one. A `SettingsForm` can hold it; its methods `settings` and `scenario`
raise the error with the rule's text.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.config.model_restrictions import check_on_model, without_effect
from memlab.config.scenario import Scenario
from memlab.config.settings import (
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    SINCE_MEGATRON_0_19,
    CheckpointInputRemedy,
    MemorySettings,
    RecomputeGranularity,
    RecomputeMethod,
    validation_error,
)
from memlab.config.training_state import TrainingState

LABELS = {
    "recompute_granularity": "granularity",
    "recompute_method": "method",
    "recompute_num_layers": "layers",
    "checkpoint_input_remedy": "remedy for retention",
    "min_offloaded_tensor_size": "smallest tensor (elements)",
    "activation_offload_fraction": "share of groups offloaded",
    "delta_offload_bytes_across_pp_ranks": "extra bytes per later stage",
    "fine_grained_offloading_max_inflight_offloads": "copies at once (-1: no limit)",
    "offload_parameters": "parameters",
    "offload_gradients": "gradients",
    "offload_optimizer": "optimizer",
    "offload_optimizer_except_update": "optimizer except update",
    "seq_length": "tokens",
    "micro_batch_size": "micro-batch",
}
"""What the panel calls each field. What is on the host has the words that name it in `MemorySettings`."""
MODULE_FIELDS = {"recompute_modules": RECOMPUTE_MODULES, "offload_modules": OFFLOAD_MODULES}


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsForm:
    """Fields of `MemorySettings`, of the workload, of the training state and of torch's allocator.

    Values that do not apply are not read. So a method that was chosen under full recompute is still chosen after a
    change to selective and back.
    """

    recompute_granularity: RecomputeGranularity | None = None
    recompute_method: RecomputeMethod | None = "uniform"
    recompute_num_layers: int | None = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    checkpoint_input_remedy: CheckpointInputRemedy | None = None
    offload_modules: tuple[str, ...] = ()
    min_offloaded_tensor_size: int = 1024 * 1024
    activation_offload_fraction: float = 1.0
    delta_offload_bytes_across_pp_ranks: int = 0
    fine_grained_offloading_max_inflight_offloads: int | None = None
    offload_parameters: bool = False
    offload_gradients: bool | None = None
    offload_optimizer: bool = False
    offload_optimizer_except_update: bool = False
    seq_length: int
    micro_batch_size: int
    state_values: dict[str, Any] = dataclasses.field(default_factory=lambda: TrainingState().to_dict())
    """The fields of `TrainingState`, all of them."""
    allocator_values: dict[str, Any] = dataclasses.field(default_factory=lambda: AllocatorSettings().to_dict())
    """The fields of `AllocatorSettings`, all of them."""

    @classmethod
    def of(cls, settings: MemorySettings, scenario: Scenario) -> SettingsForm:
        """Returns the form of some settings in some scenario."""
        form = cls(
            min_offloaded_tensor_size=settings.min_offloaded_tensor_size,
            seq_length=scenario.seq_length,
            micro_batch_size=scenario.micro_batch_size,
        )
        return form.with_run(settings, scenario)

    def with_run(self, settings: MemorySettings, scenario: Scenario) -> SettingsForm:
        """Returns this form with other settings in another scenario."""
        return replace(
            self.with_settings(settings),
            seq_length=scenario.seq_length,
            micro_batch_size=scenario.micro_batch_size,
            state_values=scenario.state.to_dict(),
            allocator_values=scenario.allocator.to_dict(),
        )

    def with_settings(self, settings: MemorySettings) -> SettingsForm:
        """Returns this form with other settings; fields that those settings do not set or read keep their values."""
        values = settings.to_dict()
        if settings.offload_modules is None:
            del values["min_offloaded_tensor_size"]
        if settings.offload_gradients == settings.offload_optimizer:
            values["offload_gradients"] = None
        values["offload_modules"] = values["offload_modules"] or ()
        kept: dict[str, Any] = {
            name: tuple(value) if name in MODULE_FIELDS else value
            for name, value in values.items()
            if value is not None or name in _MAY_BE_NONE
        }
        return replace(self, **kept)

    def with_preset(self, settings: MemorySettings, state: TrainingState, smallest_tensor: int) -> SettingsForm:
        """Returns a form with these settings and this state; all else is Megatron's default.

        The workload and the allocator's options stay.

        Args:
            settings: Memory settings.
            state: Training state.
            smallest_tensor: Shown where the settings do not offload modules, in elements.
        """
        form = SettingsForm(
            min_offloaded_tensor_size=smallest_tensor,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            state_values=state.to_dict(),
            allocator_values=self.allocator_values,
        )
        return form.with_settings(settings)

    def toggled(self, field: str, module: str, *, on: bool) -> SettingsForm:
        """Returns this form with one module of a field of modules ticked or not."""
        ticked = {*getattr(self, field)} - {module} | ({module} if on else set())
        return replace(self, **{field: tuple(name for name in MODULE_FIELDS[field] if name in ticked)})  # type: ignore[arg-type]  # one name stands for either field

    def settings(self, scenario: Scenario) -> MemorySettings:
        """Returns the settings.

        Raises:
            ValueError: If they break a rule, by themselves or on the scenario's model.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in MemorySettings.__slots__}
        for name in _not_read(self.recompute_granularity):
            values[name] = None
        values["offload_modules"] = self.offload_modules or None
        settings = as_read(MemorySettings(**values))
        check_on_model(settings, scenario)
        return settings

    def scenario(self, scenario: Scenario) -> Scenario:
        """Returns the scenario with this form's workload, training state and allocator options.

        Raises:
            ValueError: If a value breaks its rule.
        """
        allocator = AllocatorSettings(**self.allocator_values)
        return replace(self._on(scenario, TrainingState(**self.state_values)), allocator=allocator)

    def check_workload(self, scenario: Scenario) -> None:
        """Checks the workload alone: no rule of the training state is applied.

        Raises:
            ValueError: If a value breaks its rule.
        """
        self._on(scenario, TrainingState())

    def _on(self, scenario: Scenario, state: TrainingState) -> Scenario:
        return replace(
            scenario,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            packed_sequences=scenario.packed_sequences_in(self.seq_length),
            state=state,
        )

    def not_applicable(self, architecture: Architecture) -> dict[str, str]:
        """Finds the controls that have no effect under this form, or could only lead to an error.

        Returns:
            Reasons in the words of the rule, by ``field`` or ``field:module``. They leave out the value that was
            tried to find the rule: the control has another one.
        """
        granularity = self.recompute_granularity
        chosen: dict[str, Any] = {"recompute_granularity": granularity}
        if granularity == "full":
            chosen |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        reasons: dict[str, str] = {}
        for field in _not_read(granularity):
            if field not in MODULE_FIELDS:
                reasons[field] = _without_value(_rule_text(**chosen, **{field: getattr(self, field) or _ANY[field]}))
        if not architecture.routes:
            remedy = without_effect(MemorySettings(checkpoint_input_remedy="detach"), architecture)
            reasons["checkpoint_input_remedy"] = remedy["checkpoint_input_remedy"]
        for field, modules in MODULE_FIELDS.items():
            for module in modules:
                reason = _reason_against(field, module, architecture)
                if not reason and field in _not_read(granularity):
                    reason = _without_value(_rule_text(**chosen, **{field: (module,)}))
                if reason:
                    reasons[f"{field}:{module}"] = reason
        return reasons | self._not_in_megatron(architecture)

    def _not_in_megatron(self, architecture: Architecture) -> dict[str, str]:
        """Finds the controls of settings that the installed megatron-core does not have.

        One with another value than the default, as a run elsewhere had it, is left out, so that it can be taken back.
        """
        reasons = {}
        for field, value in _SET_SINCE_0_19.items():
            if getattr(self, field) == getattr(MemorySettings(), field):
                reasons[field] = _without_value(_refusal(MemorySettings(**{field: value}), architecture))
        return {field: reason for field, reason in reasons.items() if reason}


_MAY_BE_NONE = (
    "recompute_granularity",
    "checkpoint_input_remedy",
    "offload_gradients",
    "fine_grained_offloading_max_inflight_offloads",
)
_SET_SINCE_0_19: dict[str, Any] = dict(zip(SINCE_MEGATRON_0_19, (0.5, 1, 0), strict=True))
"""A value that is not the default for each of them."""
_ANY: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1}


def in_labels(text: str) -> str:
    """Writes the fields that a sentence names as the panel's labels."""
    pattern = rf"\b({'|'.join(sorted(LABELS, key=len, reverse=True))})\b"
    return re.sub(pattern, lambda found: f"'{LABELS[found[0]]}'", text)


def as_read(settings: MemorySettings) -> MemorySettings:
    """Returns the settings without a smallest tensor that no offload module reads: two that do the same are equal."""
    if settings.offload_modules is not None:
        return settings
    return replace(settings, min_offloaded_tensor_size=MemorySettings().min_offloaded_tensor_size)


def _not_read(granularity: RecomputeGranularity | None) -> tuple[str, ...]:
    """The fields that Megatron ignores under a granularity."""
    full, selective = ("recompute_method", "recompute_num_layers"), ("recompute_modules",)
    return {None: (*full, *selective), "full": selective, "selective": full}.get(granularity, ())


def _rule_text(**values: Any) -> str:
    text = validation_error(**values)
    assert text, f"no rule refuses {values}"
    return text


def _without_value(text: str) -> str:
    """Returns what a rule says after the field and its value, and before the values of others and the advice."""
    return text.partition(", but ")[2].partition(", and ")[0].partition(": ")[0]


def _reason_against(field: str, module: str, architecture: Architecture) -> str:
    """Why a module, by itself, breaks a rule or has no effect on an architecture; empty if it has an effect."""
    values: dict[str, Any] = {field: (module, "core_attn") if module == "attn_proj" else (module,)}
    if field == "recompute_modules":
        values["recompute_granularity"] = "selective"
    settings = MemorySettings(**values)
    refusal = _refusal(settings, architecture)
    return refusal or without_effect(settings, architecture).get(f"{field}:{module}", "")


def _refusal(settings: MemorySettings, architecture: Architecture) -> str:
    """Why a model refuses settings; empty if it does not."""
    try:
        check_on_model(settings, Scenario.of(architecture))
    except ValueError as error:
        return str(error)
    return ""
