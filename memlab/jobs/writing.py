"""Writes a job for a framework: the lines to paste, and what the framework cannot say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.framework import Framework
from memlab.jobs.frameworks import framework_named
from memlab.jobs.job import Job
from memlab.jobs.keys import ABSENT
from memlab.jobs.model import HUGGING_FACE_NAMES


@dataclass(frozen=True, slots=True)
class Written:
    """A job in a framework's spelling."""

    lines: tuple[str, ...]
    """To paste into the framework's script or configuration."""
    unsaid: dict[str, str]
    """Fields of memlab that the framework cannot say, each with the reason."""


def written(framework_name: str, scenario: Scenario, settings: MemorySettings, *, source: Job | None = None) -> Written:
    """Writes a job for a framework.

    Args:
        framework_name: One of `FRAMEWORKS`.
        scenario: Of the job.
        settings: Of its steps.
        source: The job that it was read from. If that is of the same framework, only what differs from it is written.

    Raises:
        ValueError: If there is no such framework.
    """
    framework = framework_named(framework_name)
    if source is None or source.framework != framework.name or source.scenario is None or source.settings is None:
        lines = framework.render(_keys(framework, scenario, settings))
        return Written(tuple(lines), unsaid(framework, scenario, settings))
    before, own = source.scenario, source.settings
    if scenario.layout == before.layout:  # a shorter step or model was predicted in place of the job's
        scenario = replace(scenario, num_layers=before.num_layers, num_microbatches=before.num_microbatches)
    old = _keys(framework, before, own, all_keys=True)
    new = _keys(framework, scenario, settings, all_keys=True)
    values = {key: value for key, value in new.items() if value != old.get(key)}
    was = unsaid(framework, before, own)
    reasons = {name: reason for name, reason in unsaid(framework, scenario, settings).items() if name not in was}
    return Written(tuple(framework.render(values)), reasons)


def _keys(
    framework: Framework, scenario: Scenario, settings: MemorySettings, *, all_keys: bool = False
) -> dict[str, Any]:
    """Returns the values by key that differ from the framework's defaults, or all; each field by its first key."""
    fields = framework.compose(scenario, settings)
    done: set[str] = set()
    values: dict[str, Any] = {}
    for key in framework.keys:
        if key.field in done or key.field not in fields:
            continue
        done.add(key.field)
        value = fields[key.field]
        default = None if key.default is ABSENT else key.default
        if all_keys or value != default:
            values[key.name] = key.conversion.write(value)
    return values


def unsaid(framework: Framework, scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what a framework cannot say of a job, each with the reason."""
    changed: dict[str, Any] = settings.changed() | scenario.state.changed()
    if scenario.allocator != AllocatorSettings():
        changed["allocator"] = scenario.allocator
    if scenario.dtype != "bf16":
        changed["dtype"] = scenario.dtype
    if framework.complete_loss is not None and scenario.state.loss != framework.complete_loss:
        changed["loss"] = scenario.state.loss
    elif scenario.state.loss == framework.complete_loss:
        changed.pop("loss", None)
    reasons = {name: reason for name, reason in framework.cannot_write.items() if name in changed}
    reasons |= framework.cannot_write_of(settings)
    if scenario.packed_sequences is not None and not framework.packs(scenario):
        reasons["packed_sequences"] = f"{framework.title} has no key for so many sequences of a row"
    if scenario.routing != Routing():
        reasons["routing"] = "a router decides where tokens go"
    if scenario.expert_buffers:
        reasons["expert_buffers"] = "Megatron decides it by the layout"
    if scenario.layout.rank:
        reasons["rank"] = "a framework's file describes all ranks"
    names_model = any(key.field == "architecture" for key in framework.keys)
    if names_model and scenario.architecture.name not in HUGGING_FACE_NAMES and not framework.writes_sizes:
        reasons["architecture"] = "no published model has this name: give the path of the model's folder"
    return reasons
