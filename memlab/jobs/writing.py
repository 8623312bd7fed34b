"""Writes a job for a framework: the lines to paste, and what the framework cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import HUGGING_FACE_NAMES
from memlab.config.model_restrictions import checkpoints_moe_layers
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.framework import Framework
from memlab.jobs.frameworks.keys import ABSENT, Key
from memlab.jobs.frameworks.registry import FRAMEWORKS, writer_of
from memlab.jobs.job import Job


@dataclass(frozen=True, slots=True)
class Written:
    """A job in a framework's spelling."""

    lines: tuple[str, ...]
    """To paste into the framework's script or configuration."""
    unsaid: dict[str, str]
    """Fields of memlab that the framework cannot express, each with the reason."""


GPU_DECIDES = {
    "non_tn_fp8_gemm": "the GPU that a job runs on decides it",
    "pad_packed_values": "the version of Megatron-Core, or the framework's patch of it, decides it",
    "cuda_graph_modules": "megatron-core 0.18 has another key for it than versions before: give that of yours",
}
"""Options that memlab writes no key for, each with the reason."""


def written(framework_name: str, scenario: Scenario, settings: MemorySettings, *, source: Job | None = None) -> Written:
    """Writes a job for a framework.

    Args:
        framework_name: One of `FRAMEWORKS`.
        source: The job that it was read from. If that is of the same framework, only what differs from it is written.

    Raises:
        ValueError: If there is no such framework.
    """
    framework = writer_of(framework_name, scenario.engine)
    reasons = unsaid(framework, scenario, settings)
    if source is None or source.framework != framework.name or source.scenario is None or source.settings is None:
        values = _values(framework, framework.compose(scenario, settings))
        return Written(tuple(_lines(framework, values, scenario)), reasons)
    before, own = source.scenario, source.settings
    if replace(scenario.layout, rank=before.layout.rank) == before.layout:
        # A shorter step or model was predicted in place of the job's, or one of its ranks.
        scenario = replace(scenario, num_layers=before.num_layers, num_microbatches=before.num_microbatches)
    was, is_now = _fields(before, own), _fields(scenario, settings)
    reasons = {name: reason for name, reason in reasons.items() if was[name] != is_now[name]}
    old, new = framework.compose(before, own), framework.compose(scenario, settings)
    changed = [field for field, value in new.items() if value != old.get(field)]
    values = _changes(framework, source, new, changed)
    texts = {name.partition(".")[0] for name in values if framework.style == "flags" and "." in name}
    lost = [one.key for one in source.not_modelled if one.effect == "unknown" and one.key.partition(".")[0] in texts]
    keep = [f"# keep {', '.join(lost)}, which memlab does not know"] if lost else []
    return Written((*keep, *_lines(framework, values, scenario)), reasons)


def _lines(framework: Framework, values: dict[str, Any], scenario: Scenario) -> list[str]:
    """Returns the lines of a job; with flags, a tensor parallel size has sequence parallelism beside it."""
    lines = framework.render(values)
    if not scenario.layout.sequence_parallel:
        lines = [line for line in lines if not line.replace("_", "-").startswith("--sequence-parallel")]
    return lines


def _values(framework: Framework, composed: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by key that differ from the framework's defaults; each field by its first key."""
    first = _first_keys(framework)
    changed = [
        field
        for field, key in first.items()
        if field in composed and composed[field] != (None if key.default is ABSENT else key.default)
    ]
    fields = {*changed, *_beside(framework, changed)}
    values = {key.name: key.conversion.write(composed[field]) for field, key in first.items() if field in fields}
    return {name: value for name, value in values.items() if not framework.leaves_out(value)}


def _beside(framework: Framework, changed: Iterable[str]) -> set[str]:
    """Returns the fields whose keys are written beside those of fields that change."""
    return {framework.written_with[field] for field in changed if field in framework.written_with}


def _changes(framework: Framework, source: Job, composed: dict[str, Any], changed: list[str]) -> dict[str, Any]:
    """Returns the values by key that change fields of a job: of the keys by which its file sets them, or of the first.

    A key that the job shall not have any more is `ABSENT` where the framework leaves keys out, else None.
    """
    first = _first_keys(framework)
    given = {(one.field, one.key) for one in source.taken if one.place != "default"}
    own = {key.name: key.field for key in framework.keys}
    shared = {name for field, name in given if field in changed and own.get(name) != field}
    values: dict[str, Any] = {}
    for field in {*changed, *_beside(framework, changed), *(field for field, name in given if name in shared)}:
        named = [key for key in framework.keys if (field, key.name) in given]
        if field in first and not any(key.field == field for key in named):
            named.append(first[field])
        for key in named:
            values[key.name] = key.conversion.write(composed[key.field]) if key.field in composed else None
    in_file = {name for _, name in given}
    if framework.style == "flags":
        values |= _rest_of_texts(framework, composed, values, in_file)
    ordered = {key.name: values[key.name] for key in framework.keys if key.name in values}
    said = {name: ABSENT if framework.leaves_out(value) else value for name, value in ordered.items()}
    return {name: value for name, value in said.items() if value is not ABSENT or name in in_file}


def _rest_of_texts(
    framework: Framework, composed: dict[str, Any], values: dict[str, Any], in_file: set[str]
) -> dict[str, Any]:
    """Returns the other values by key of the JSON texts that change: a flag's text is replaced as a whole."""
    flags = {name.partition(".")[0] for name in values if "." in name}
    others = _values(framework, composed).keys() | in_file
    return {
        key.name: key.conversion.write(composed[key.field])
        for key in framework.keys
        if key.name.partition(".")[0] in flags and key.name in others - values.keys() and key.field in composed
    }


def _first_keys(framework: Framework) -> dict[str, Key]:
    """Returns the first key of each field, by which memlab writes it."""
    first: dict[str, Key] = {}
    for key in framework.keys:
        first.setdefault(key.field, key)
    return first


def _fields(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns all fields of a job by their names."""
    parts = (scenario, scenario.layout, settings)
    return {
        field.name: getattr(part, field.name) for part in parts for field in fields(part)
    } | scenario.state.options()


def writable(framework_name: str, scenario: Scenario, base: MemorySettings) -> Callable[[MemorySettings], bool]:
    """Returns a function that says whether a framework can express other settings of a job as well as its own.

    Args:
        framework_name: One of `FRAMEWORKS`.
        base: The job's own settings. What the framework cannot express of them restricts nothing.

    Raises:
        ValueError: If there is no such framework.
    """
    framework = writer_of(framework_name, scenario.engine)
    before = unsaid(framework, scenario, base).keys()
    return lambda settings: unsaid(framework, scenario, settings).keys() <= before


def check_engine_of(framework_name: str, scenario: Scenario) -> None:
    """Checks that a framework has the engine of a scenario.

    Raises:
        ValueError: If it has another one, or there is no such framework.
    """
    framework = writer_of(framework_name, scenario.engine)
    if framework.engine != scenario.engine:
        others = ", ".join(name for name in FRAMEWORKS if writer_of(name, scenario.engine).engine == scenario.engine)
        raise ValueError(
            f"--as is {framework.name!r}, whose jobs memlab writes for engine {framework.engine!r}, and engine is "
            f"{scenario.engine!r}: choose one of {others}, or leave --as out"
        )


def unsaid(framework: Framework, scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what a framework cannot express of a job, each with the reason."""
    changed = _changed(framework, scenario, settings)
    no_key = changed - {key.field for key in framework.keys} - framework.without_own_key
    reasons = dict.fromkeys(sorted(no_key), f"{framework.title} has no key for it")
    reasons |= {name: reason for name, reason in (GPU_DECIDES | framework.cannot_write).items() if name in changed}
    reasons |= framework.cannot_write_of(scenario, settings)
    if scenario.packed_sequences is not None and not framework.packs(scenario):
        reasons["packed_sequences"] = f"{framework.title} has no key for this number of sequences in a row"
    reasons |= _padded_rows(framework, scenario)
    if scenario.engine != framework.engine:
        reasons["engine"] = f"memlab writes jobs of {framework.title} for engine {framework.engine!r} only"
    if scenario.routing != Routing():
        reasons["routing"] = "a router decides where tokens go"
    if scenario.expert_buffers:
        reasons["expert_buffers"] = "Megatron decides it by the layout"
    if scenario.layout.has_whole_sequences and framework.style != "flags" and framework.engine == "megatron":
        reasons["sequence_parallel"] = f"memlab writes jobs of {framework.title} with sequence parallelism only"
    if scenario.layout.rank:
        reasons["rank"] = "a framework's file describes all ranks"
    if scenario.architecture.norms_all_heads and "hidden_size" in {key.field for key in framework.keys}:
        reasons["norms_all_heads"] = (
            f"{framework.title} has no key for norms over all heads: give a layer specification"
        )
    names_model = any(key.field == "architecture" for key in framework.keys)
    if names_model and scenario.architecture.name not in HUGGING_FACE_NAMES and not framework.writes_sizes:
        reasons["architecture"] = "no published model has this name: give the path of the model's folder"
    return reasons


def _padded_rows(framework: Framework, scenario: Scenario) -> dict[str, str]:
    """Names sequences, or rows of packed ones, that a framework would pad, because the job computes in FP8."""
    layout, state, pads = scenario.layout, scenario.state, framework.padding_in_fp8
    if pads is None or state.fp8_format is None:
        return {}
    context = layout.context_parallel_size
    unit = layout.tensor_model_parallel_size * (2 * context if context > 1 else 1)
    of_sequence, of_row = pads(unit, context, state.fp8_recipe)
    what, multiple = ("sequences", of_sequence) if scenario.packed_sequences is None else ("packed rows", of_row)
    if scenario.seq_length % multiple == 0:
        return {}
    return {"seq_length": f"{framework.title} pads {what} in FP8 to a multiple of {multiple} tokens"}


def _changed(framework: Framework, scenario: Scenario, settings: MemorySettings) -> set[str]:
    """Names the fields that a framework has to express: those with another value than it takes by itself."""
    changed = {*settings.changed(), *scenario.state.changed()} - framework.fixed.keys()
    own = _fields(scenario, settings)
    usual = {"allocator": AllocatorSettings(), "dtype": "bf16"} | framework.fixed
    changed |= {name for name, value in usual.items() if own[name] != value}
    if scenario.layout.pipeline_model_parallel_size == 1:
        changed.discard("deallocate_pipeline_outputs")
    is_checkpointing = checkpoints_moe_layers(settings, scenario.architecture)
    return changed if is_checkpointing else changed - {"checkpoint_input_remedy"}
