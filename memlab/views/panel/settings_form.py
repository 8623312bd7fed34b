"""Settings while they are being edited: what the controls show, whether it breaks a rule or not.

`MemorySettings`, `TrainingState` and `AllocatorSettings` cannot hold a combination that breaks a rule, and the way from
one setting to another often leads through one. A `SettingsForm` can hold it; its methods `settings` and `scenario`
raise the error with the rule's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memlab.config import without_effect
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.config.model_restrictions import check_on_model, not_in_megatron
from memlab.config.option import EngineName, Option, options_of, unread
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError


def _controlled(*classes: type) -> dict[str, Option]:
    return {name: one for cls in classes for name, one in options_of(cls).items() if one.group}


STATE_OPTIONS = _controlled(TrainingState, AllocatorSettings)
"""What the controls under the button have."""
OPTIONS = _controlled(MemorySettings, Scenario) | STATE_OPTIONS
"""All options with a control, by name."""


def of_engine(options: Mapping[str, Option], engine: EngineName) -> dict[str, Option]:
    """Returns the options that an engine has."""
    return {name: one for name, one in options.items() if engine in one.engines}


LABELS = {name: one.label or name for name, one in OPTIONS.items()}
"""What the panel calls each. What is on the host has the words that name it in `MemorySettings`."""
_UNTIL_CHOSEN: dict[str, Any] = {
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": ("core_attn",),
    "offload_modules": (),
}
"""What controls show that cannot show None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsForm:
    """The value of each option with a control.

    Values that do not apply are not read. So a method that was chosen under full recompute is still chosen after a
    change to selective and back.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(cls, settings: MemorySettings, scenario: Scenario) -> SettingsForm:
        """Returns the form of some settings in some scenario."""
        usual = {name: one.default for name, one in OPTIONS.items()} | _UNTIL_CHOSEN
        smallest = settings.min_offloaded_tensor_size
        return cls(values=usual | {"min_offloaded_tensor_size": smallest}).with_run(settings, scenario)

    def with_values(self, **values: Any) -> SettingsForm:
        """Returns this form with other values."""
        return replace(self, values={**self.values, **values})

    def with_run(self, settings: MemorySettings, scenario: Scenario) -> SettingsForm:
        """Returns this form with other settings in another scenario."""
        workload = {name: getattr(scenario, name) for name in _controlled(Scenario)}
        of_run = workload | scenario.state.options() | scenario.allocator.to_dict()
        return self.with_settings(settings).with_values(**of_run)

    def with_settings(self, settings: MemorySettings) -> SettingsForm:
        """Returns this form with other settings; fields that those settings do not set or read keep their values."""
        values = {name: getattr(settings, name) for name in MemorySettings.__slots__}
        if settings.offload_modules is None:
            del values["min_offloaded_tensor_size"]
        if settings.offload_gradients == settings.offload_optimizer:
            values["offload_gradients"] = None
        values["offload_modules"] = values["offload_modules"] or ()
        kept = {name: value for name, value in values.items() if value is not None or name not in _UNTIL_CHOSEN}
        return self.with_values(**kept)

    def with_preset(self, settings: MemorySettings, state: TrainingState, smallest_tensor: int) -> SettingsForm:
        """Returns a form with these settings and this state; all else is Megatron's default.

        The workload and the allocator's options stay.

        Args:
            smallest_tensor: Shown where the settings do not offload modules, in elements.
        """
        usual = {name: OPTIONS[name].default for name in MemorySettings.__slots__} | _UNTIL_CHOSEN
        usual["min_offloaded_tensor_size"] = smallest_tensor
        return self.with_values(**usual, **state.options()).with_settings(settings)

    def toggled(self, field: str, module: str, *, on: bool) -> SettingsForm:
        """Returns this form with one module of a field of modules ticked or not."""
        ticked = {*self.values[field]} - {module} | ({module} if on else set())
        return self.with_values(**{field: tuple(name for name in OPTIONS[field].choices if name in ticked)})

    def settings(self, scenario: Scenario) -> MemorySettings:
        """Returns the settings.

        Raises:
            ValueError: If they break a rule, by themselves or on the scenario's model.
        """
        values = self._of(MemorySettings) | {name: OPTIONS[name].default for name in self._not_read()}
        values["offload_modules"] = values["offload_modules"] or None
        settings = as_read(MemorySettings(**values))
        check_on_model(settings, scenario)
        return settings

    @property
    def state(self) -> TrainingState:
        """The training state.

        Raises:
            ValueError: If it breaks a rule.
        """
        # Those without a control too: a lab keeps what it was opened with.
        values = {name: self.values[name] for name in options_of(TrainingState) if name in self.values}
        if values["lora_rank"] is None:
            values = {name: value for name, value in values.items() if not name.startswith("lora_")}
        return TrainingState.of_options(values)

    @property
    def allocator(self) -> AllocatorSettings:
        """The options of torch's allocator.

        Raises:
            ValueError: If they break a rule.
        """
        return AllocatorSettings(**self._of(AllocatorSettings))

    def scenario(self, scenario: Scenario) -> Scenario:
        """Returns the scenario with this form's workload, training state and allocator options.

        Raises:
            ValueError: If a value breaks its rule.
        """
        workload = self._of(Scenario)
        packed = scenario.packed_sequences_in(workload["seq_length"])
        return replace(scenario, **workload, packed_sequences=packed, state=self.state, allocator=self.allocator)

    def _of(self, cls: type) -> dict[str, Any]:
        return {name: self.values[name] for name in _controlled(cls)}

    def _not_read(self) -> dict[str, str]:
        """The options that a rule refuses beside the others' values, each with the reason: they are left out."""
        reasons = unread(MemorySettings, self.values)
        return {name: reason for name, reason in reasons.items() if OPTIONS[name].needs_value}

    def not_applicable(self, architecture: Architecture) -> dict[str, str]:
        """Finds the controls that have no effect under this form, or could only lead to an error.

        Returns:
            Reasons by ``field`` or ``field:module``. A setting that the installed megatron-core does not have, but that
            has a value, as a run elsewhere had it, is left out, so that it can be taken back.
        """
        not_read, reasons = self._not_read(), {}
        for name, one in _controlled(MemorySettings).items():
            if one.kind == "modules":
                for module in one.choices:
                    reason = reason_against(name, module, architecture) or not_read.get(name, "")
                    reasons[f"{name}:{module}"] = reason
            else:
                is_set = self.values[name] != one.default
                reasons[name] = not_read.get(name) or ("" if is_set else not_in_megatron(one))
        if not architecture.keeps_graph:
            remedy = without_effect.of_settings(MemorySettings(checkpoint_input_remedy="detach"), architecture)
            reasons["checkpoint_input_remedy"] = remedy["checkpoint_input_remedy"]
        return {name: reason for name, reason in reasons.items() if reason}


def in_labels(text: str) -> str:
    """Writes the fields that a sentence names as the panel's labels."""
    pattern = rf"\b({'|'.join(sorted(LABELS, key=len, reverse=True))})\b"
    return re.sub(pattern, lambda found: f"'{LABELS[found[0]]}'", text)


def as_read(settings: MemorySettings) -> MemorySettings:
    """Returns the settings without a smallest tensor that no offload module reads: two that do the same are equal."""
    if settings.offload_modules is not None:
        return settings
    return replace(settings, min_offloaded_tensor_size=OPTIONS["min_offloaded_tensor_size"].default)


def reason_against(field: str, module: str, architecture: Architecture) -> str:
    """Why a module, by itself, breaks a rule or has no effect on an architecture; empty if it has an effect."""
    values: dict[str, Any] = {field: (module, "core_attn") if module == "attn_proj" else (module,)}
    if field == "recompute_modules":
        values["recompute_granularity"] = "selective"
    settings = MemorySettings(**values)
    try:
        check_on_model(settings, Scenario.of(architecture))
    except RuleError as error:
        return str(error)
    return without_effect.of_settings(settings, architecture).get(f"{field}:{module}", "")
