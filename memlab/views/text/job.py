"""A job of another framework as text: what memlab understood, and what it did not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.option import options_of, unread
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened
from memlab.jobs.any_model import OfAnyModel
from memlab.jobs.bounds import freezes_parameters
from memlab.jobs.frameworks.framework import NotModelled, Taken
from memlab.jobs.frameworks.registry import TABLES
from memlab.jobs.job import Job
from memlab.jobs.other_models import SHOWN
from memlab.jobs.writing import written
from memlab.units import format_bytes

_WIDTH = 118
_OF_WORKLOAD = ("global_batch_size", "world_size")
"""What a job says beside the options of a scenario."""
_OF_PHASES = (
    "is_colocated",
    "gpu_memory_utilization",
    "engine_ranks",
    "rollout_seq_length",
    "rollout_micro_batch_size",
)
"""What a job does between training steps, in short."""
_FEW_KEYS = 4
_OF_SCENARIO = options_of(Scenario)
_OWN_DEFAULTS: dict[str, Any] = {
    field.name: field.default for cls in (Layout, TrainingState, MemorySettings) for field in fields(cls)
} | {"micro_batch_size": 1, "dtype": "bf16", "recompute_modules": ("core_attn",)}


def job_table(job: Job, common: OfAnyModel | None = None) -> str:
    """Returns the report that ``memlab job`` prints; without a prediction, `common` is what holds for any model."""
    framework = TABLES[job.framework]
    causes = [f"{job.path.name}, {cause}" for cause in job.causes]
    parts = [
        causes,
        [f"{job.path.name}: a job of {framework.title} (names and defaults of {framework.source})"],
        _summary(job),
        [] if common is None else _of_any_model(common, job),
        _as_read(job.as_read) if common is None or not common.values else [],
    ]
    given = [taken for taken in job.taken if taken.place != "default"]
    defaults = [taken for taken in job.taken if taken.place == "default" and _says_something(taken)]
    parts.append(_taken(f"used ({len(given)})", given))
    if defaults:
        words = ", ".join(f"{taken.key}={_short(taken.value)}" for taken in defaults)
        parts.append([f"not in the file, so {framework.title}'s own defaults ({len(defaults)})", *_wrapped(words)])
    parts.append(_missing(job.not_modelled))
    parts.append(_without_effect(job.without_effect))
    if job.warnings:
        parts.append([f"warnings ({len(job.warnings)})", *(f"  {warning}" for warning in job.warnings)])
    return "\n\n".join("\n".join(part) for part in parts if part)


def lines_for(framework_name: str, scenario: Scenario, settings: MemorySettings, source: Job | None = None) -> str:
    """Returns the lines to paste into a framework's job, after what the framework cannot express."""
    done = written(framework_name, scenario, settings, source=source)
    is_change = source is not None and source.framework == framework_name
    title = "lines to change in the job" if is_change else "lines of the job"
    unsaid = [f"# {framework_name} cannot express {name}: {reason}" for name, reason in done.unsaid.items()]
    lines = done.lines or ("# nothing: the job has these settings already",)
    return "\n".join([f"# {title}, for {framework_name}:", *unsaid, *lines])


def _summary(job: Job) -> list[str]:
    if job.cannot_start is not None:
        named = [key for key in TABLES[job.framework].keys if {key.field, key.name} & {*job.refused_fields}]
        tries = ", ".join(dict.fromkeys(key.name for key in named))
        hint = [f"to try another value: --set KEY=VALUE, with one of these keys: {tries}"] if tries else []
        return [f"this job cannot start: {job.cannot_start}", *hint]
    if job.scenario is None or job.settings is None:
        return [f"memlab cannot predict this job: {job.not_supported}", *_at_least(job.at_least)]
    scenario, ranks = job.scenario, job.scenario.layout.world_size
    packed = "" if scenario.packed_sequences is None else f" in {scenario.packed_sequences} packed sequences"
    tokens = f"{scenario.seq_length:,} tokens{packed}"
    batches = "1 micro-batch" if scenario.num_microbatches == 1 else f"{scenario.num_microbatches} micro-batches"
    lines = [
        f"model      {scenario.architecture.name}, {scenario.num_layers} layers, {scenario.dtype}",
        f"layout     {scenario.layout}" + (f" ({ranks} ranks)" if ranks > 1 else ""),
        f"workload   {scenario.micro_batch_size} x {tokens} per micro-batch, {batches} per step{_range(job)}",
        f"state      {scenario.state}",
        f"settings   {job.settings}",
    ]
    if scenario.versions.changed():
        lines.append(f"versions   {scenario.versions}")
    if scenario.allocator != AllocatorSettings():
        lines.append(f"allocator  {scenario.allocator}")
    return lines


def _range(job: Job) -> str:
    """Returns how many micro-batches the job may have where it is not how many memlab predicts."""
    fewest, most = job.micro_batches or (0, 0)
    if job.scenario is None or {fewest, most} <= {0, job.scenario.num_microbatches}:
        return ""
    return f" (the job has {most})" if fewest == most else f" (the job has {fewest} to {most}, as the data decides)"


def _of_any_model(common: OfAnyModel, job: Job) -> list[str]:
    if common.cannot_start is not None:
        whose = "" if common.model else "with any model, "
        return [f"{whose}this job cannot start as its file stands: {common.cannot_start}"]
    if not common.values:
        return [f"with any model, memlab has to know this too: {question}" for question in common.questions]
    lines = _own_model(common.model) if common.model.get("fields") else []
    if common.model and common.models == (common.model["name"],):
        lines.append("of the job (read with models that have the values above; memlab predicts nothing of it)")
    elif common.is_own:
        lines.append("of the job (memlab predicts nothing of it)")
    else:
        lines.append(f"of any model (the same with {', '.join(common.models)} in place of the job's own)")
    for part in ("workload", "layout", "state", "allocator", "settings"):
        said = {name: v for name, v in common.values[part].items() if v not in (None, _OWN_DEFAULTS.get(name))}
        words = [name if value is True else f"{name} {_short(value)}" for name, value in said.items()]
        lines += _wrapped(f"{part:10} {', '.join(words) or 'default'}")
    if common.depends_on_model:
        lines += _wrapped(f"depends on the model: {', '.join(common.depends_on_model)}")
    of_job = {one.key for one in job.not_modelled}  # which the report lists in any case
    others = [one for one in common.not_modelled if one.key not in of_job]
    lines += [f"  not modelled: {_named(one)}: {one.effect}: {one.reason}" for one in others]
    return lines + [f"  {warning}" for warning in common.warnings if warning not in job.warnings]


def _as_read(values: dict[str, Any]) -> list[str]:
    """Returns the fields of a job that memlab cannot predict, by the part that has them."""
    parts = {"workload": Scenario, "layout": Layout, "state": TrainingState, "allocator": AllocatorSettings}
    own = [name for name in SHOWN if name not in _OF_SCENARIO and values.get(name) is not None]
    sizes = [f"{name} {_short(values[name])}" for name in own]
    lines = _wrapped(f"{'model':10} {', '.join(sizes)}") if sizes else []
    for part, cls in {**parts, "settings": MemorySettings}.items():
        read = options_of(cls).keys() - unread(cls, values).keys()
        said = {
            name: values[name] for name in options_of(cls) if values.get(name) not in (None, _OWN_DEFAULTS.get(name))
        }
        said = {name: value for name, value in said.items() if name in read}
        said |= {name: values[name] for name in _OF_WORKLOAD if part == "workload" and name in values}
        words = ", ".join(name if value is True else f"{name} {_short(value)}" for name, value in said.items())
        lines += _wrapped(f"{part:10} {words}") if words else []
    phases = [f"{name} {_short(values[name])}" for name in _OF_PHASES if values.get(name) is not None]
    lines += _wrapped(f"{'rollout':10} {', '.join(phases)}") if phases else []
    return ["as far as memlab read it", *lines] if lines else []


def _own_model(model: dict[str, Any]) -> list[str]:
    lacks = f", of which memlab does not have: {model['lacks']}" if model["lacks"] else ""
    words = [name if value is True else f"{name} {_short(value)}" for name, value in model["fields"].items()]
    return [f"of the model {model['name']}{lacks}", *_wrapped(", ".join(words)), f"  source: {model['source']}"]


def _at_least(kept: dict[str, int]) -> list[str]:
    if not kept:
        return []
    parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in kept.items())
    return [f"at least   {format_bytes(sum(kept.values()))} on the rank that keeps the most: {parts}"]


def _taken(title: str, taken: list[Taken]) -> list[str]:
    if not taken:
        return []
    keys = [f"{one.key} {_short(one.value)}" for one in taken]
    width = min(70, max(len(key) for key in keys))
    of_place = max(9, *(len(one.place) for one in taken))
    lines = []
    for key, one in zip(keys, taken, strict=True):
        same = one.key.rpartition(".")[2] == one.field
        meaning = _short(one.memlab_value) if same else f"{one.field} {_short(one.memlab_value)}"
        meaning = "" if same and one.value == one.memlab_value else meaning
        lines.append(f"  {one.place:{of_place}} {key:{width}}  {meaning}".rstrip())
    return [title, *lines]


def _says_something(taken: Taken) -> bool:
    """Whether a framework's default differs from what memlab takes without a job."""
    return taken.value is not None and taken.memlab_value != _OWN_DEFAULTS.get(taken.field, taken.field)


def _missing(missing: tuple[NotModelled, ...]) -> list[str]:
    unknown = [one for one in missing if one.effect == "unknown"]
    known = [one for one in missing if one.effect != "unknown"]
    lines = []
    if known:
        lines.append(
            f"not modelled ({len(known)}): because of these, a step needs more or less memory than memlab says"
        )
        words = {"more": "more", "less": "less", "either": "more or less"}
        lines += [f"  {one.place:9} {_named(one)}: {words[one.effect]}{_at_most(one)}: {one.reason}" for one in known]
    if unknown:
        lines.append(f"keys that memlab does not know ({len(unknown)})")
        lines += _wrapped(", ".join(_unknown_keys(unknown)))
    return lines


def _unknown_keys(unknown: list[NotModelled]) -> list[str]:
    """Returns the keys that the job's file itself has, and how many of each section its configurations have."""
    own = [one.key for one in unknown if " of " not in one.place]
    of_sections: dict[str, list[str]] = {}
    for one in unknown:
        if one.key not in own:
            of_sections.setdefault(one.key.partition(".")[0], []).append(one.key)
    for section, keys in of_sections.items():
        own += keys if len(keys) <= _FEW_KEYS else [f"{len(keys)} of {section}, such as {keys[0]}"]
    return own


def _at_most(missing: NotModelled) -> str:
    if missing.bound_bytes is None:
        return ""
    of_state = " of gradients and optimizer state, and in activations" if freezes_parameters(missing.key) else ""
    return f", by at most {format_bytes(missing.bound_bytes)}{of_state}"


def _named(missing: NotModelled) -> str:
    return missing.key if missing.value is None else f"{missing.key} {_short(missing.value)}"


def _without_effect(reasons: dict[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, reason in reasons.items():
        by_reason[reason].append(key)
    lines = [f"without effect on the prediction ({len(reasons)})"] if reasons else []
    for reason, keys in by_reason.items():
        lines += [f"  {reason}:", *_wrapped(", ".join(keys), "    ")]
    return lines


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(str(part) for part in value)
    return value if isinstance(value, str) and len(value) < 60 else shortened(value)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    lines = [indent]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > _WIDTH and lines[-1].strip():
            lines.append(indent)
        lines[-1] += word + " "
    return [line.rstrip() for line in lines]
