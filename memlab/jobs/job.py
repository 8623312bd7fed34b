"""A job that exists already in another framework: read from its file, explained, and written back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memlab.config.architectures import Architecture, find_architecture, published_architecture
from memlab.config.option import options_of
from memlab.config.rollout import Rollout, TeacherPass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened
from memlab.config.versions import Versions
from memlab.jobs.arguments import add_override
from memlab.jobs.bounds import bound, bounded_by, is_of_inference_engine
from memlab.jobs.building import (
    ALLOCATOR_VARIABLES,
    check_expert_ranks,
    recompute_of_all_layers,
    scenario_of,
    settings_of,
    with_layer_pattern,
)
from memlab.jobs.entries import Entries, Entry, parse_value
from memlab.jobs.environment import note_environment
from memlab.jobs.formats import read_file
from memlab.jobs.frameworks.cuda_graphs import complete_cuda_graphs
from memlab.jobs.frameworks.framework import CannotStartError, Framework, NotModelled, Reading, Taken
from memlab.jobs.frameworks.megatron_keys import SAID_OF_LAYERS, SAID_OF_MODELS
from memlab.jobs.frameworks.refused_options import check_core
from memlab.jobs.frameworks.registry import FRAMEWORKS, OF_OTHER_MODELS, framework_named, table_of
from memlab.jobs.model import architecture_named, architecture_of, missing_sizes
from memlab.jobs.model_names import lines_of_siblings, models_in
from memlab.jobs.other_models import OtherModel, of_config, of_sizes, other_model, shown_fields
from memlab.jobs.validation_passes import note_validation

_OF_EXPERTS = {name for name in (*SAID_OF_LAYERS, *options_of(TrainingState)) if "moe_" in name}
"""Fields that concern experts only, and that a job may give a model of any name."""
_TEACHER = "teacher."
"""The section of the file that describes the teacher."""
_TEACHER_NAME = f"{_TEACHER}model_name"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What memlab understood of a job's file, and what it did not."""

    path: Path
    framework: str
    """The framework's name, one of `TABLES`."""
    scenario: Scenario | None
    """None if the job cannot start, or if memlab does not model it."""
    settings: MemorySettings | None
    """None where `scenario` is None."""
    micro_batches: tuple[int, int] | None = None
    """The fewest and the most micro-batches of a copy in a step, where the data decides how many fill a budget."""
    rollout: Rollout | None = None
    """What a job of reinforcement learning does between training steps; None for other jobs."""
    cannot_start: str | None = None
    """The rule by which the framework itself refuses the job."""
    refused_fields: tuple[str, ...] = ()
    """Fields of memlab, or names of `Key.field`, whose values the rule of `cannot_start` refuses."""
    not_supported: str | None = None
    """Why memlab cannot predict the job, in one line."""
    lacks: tuple[str, ...] = ()
    """What memlab does not have, where it refuses the job for that: its model, a kind of layer, or an engine."""
    as_read: dict[str, Any] = None  # type: ignore[assignment]  # always given by `read`
    """Values by memlab's fields of a job that memlab cannot predict, as far as they were derived."""
    model: OtherModel | None = None
    """What is known of the model of a job that memlab cannot predict."""
    precision: str = ""
    """Why memlab does not have the type in which the job computes."""
    has_own_engine: bool = False
    """Whether memlab does not have the engine that trains, and has its fields."""
    at_least: dict[str, int] = None  # type: ignore[assignment]  # always given by `read`
    """Bytes by category that the rank that keeps the most has at least while the optimizer updates it, where memlab
    refuses a job of FSDP2 and knows its model; empty where it has a prediction, or knows of none."""
    guesses: tuple[str, ...] = ()
    """What the file does not say, and memlab takes a default or an example for."""
    questions: tuple[str, ...] = ()
    """What the user has to decide before memlab can predict the job, in whole sentences."""
    taken: tuple[Taken, ...] = ()
    """Keys that memlab used; those with the place ``default`` are not in the file."""
    without_effect: dict[str, str] = None  # type: ignore[assignment]  # always given by `read`
    """Keys that do not change memory, each with a reason."""
    not_modelled: tuple[NotModelled, ...] = ()
    causes: tuple[str, ...] = ()
    """What is wrong with the file itself, such as a command that ends too early: to be corrected first of all."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        format_name: str | None = None,
        overrides: Iterable[str] = (),
        version: str | None = None,
        architecture: str | Path | Architecture | None = None,
        world_size: int | None = None,
        arguments: Iterable[str] | None = None,
        fields_only: bool = False,
    ) -> Job:
        """Reads a job's file. Nothing in it is executed.

        Args:
            path: A script, a log, a configuration, or a folder with one.
            format_name: The framework whose file it is, one of `FRAMEWORKS`; None recognizes it. A name of
                `OF_OTHER_MODELS` reads the second model that the job trains.
            overrides: ``key=value`` in the framework's spelling; ``NAME=value`` sets a variable of a script.
            version: Version of the framework, if its defaults depend on the version.
            architecture: Replaces the job's own; None takes what the file says.
            world_size: Ranks of the job; None takes what the file says.
            arguments: What a script is started with, its ``$1`` and so on; None if that is not known.
            fields_only: Reads a job that computes in a type that memlab lacks as one in bf16, and one of an engine
                that it lacks as one of its own: the fields of the result are the job's, and its memory is not.

        Raises:
            ValueError: If memlab cannot understand the file; the message names the line where it is known.
        """
        try:
            values = None if arguments is None else list(arguments)
            return cls._read(Path(path), format_name, overrides, version, architecture, world_size, values, fields_only)
        except (ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"{Path(path).name}: a calculation with its values fails ({error}): correct its sizes"
            ) from error

    @classmethod
    def _read(
        cls,
        path: Path,
        format_name: str | None,
        overrides: Iterable[str],
        version: str | None,
        architecture: str | Path | Architecture | None,
        world_size: int | None,
        arguments: list[str] | None,
        fields_only: bool,
    ) -> Job:
        given = dict(_pair(text) for text in overrides)
        variables = {name: value for name, value in given.items() if _VARIABLE.fullmatch(name)}
        file_format, other = OF_OTHER_MODELS.get(format_name or "", (format_name, None))
        if file_format is not None:
            framework_named(file_format, OF_OTHER_MODELS)
        name, entries = read_file(path, variables, file_format, arguments)
        framework = other or table_of(name, {key: entry.value for key, entry in entries.by_key.items()} | given)
        environment = {
            name: text for name, text in variables.items() if name in {*entries.environment, *ALLOCATOR_VARIABLES}
        }
        entries.environment = entries.environment | environment
        own = {key.name for key in framework.keys}
        given_keys = {k: text for k, text in given.items() if k not in environment or k in own}
        unlisted = _override(framework, entries, given_keys)
        entries = framework.own_entries(entries)
        reading = Reading(path=path, entries=entries, version=version, warnings=list(entries.warnings))
        if version is None and (around := framework.version_around(reading.started)) is not None:
            reading.version, what = around
            reading.warnings.append(
                f"{what}, with the defaults of {reading.version}: memlab takes these; give --framework-version for "
                "another"
            )
        if world_size is not None:
            reading.values["world_size"] = world_size
        try:
            framework.read(reading)
        except ValueError as error:
            first = "".join(f"{cause}; " for cause in entries.causes[:1])
            raise ValueError(framework.as_in_file(f"{first}{error}")) from error
        if world_size is not None:
            reading.values["world_size"] = world_size
        job = _as_in_file(_built(cls, framework, reading, architecture, fields_only), framework.as_in_file)
        _check_read(unlisted, reading)
        missing = {one.key for one in job.not_modelled}
        for own_name, (_, table) in OF_OTHER_MODELS.items():
            # A second model's table has the name of the first one's, and what the second one is.
            if own_name.rpartition("-")[0] == framework.name and not missing.isdisjoint(table.decided_by):
                again = [f"{key}={text}" for key, text in given.items() if key not in unlisted]
                second = cls._read(path, own_name, again, version, None, world_size, arguments, fields_only)
                if table.is_teacher:
                    job = _with_teacher(job, second)
                    continue
                bounded = bounded_by(job.not_modelled, table.decided_by, second.scenario)
                job = replace(job, not_modelled=bounded)
        return job

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as JSON-ready values."""
        return {
            "path": str(self.path),
            "framework": self.framework,
            "scenario": None if self.scenario is None else self.scenario.to_dict(),
            "settings": None if self.settings is None else self.settings.to_dict(),
            "micro_batches": None if self.micro_batches is None else list(self.micro_batches),
            "rollout": None if self.rollout is None else self.rollout.to_dict(),
            "cannot_start": self.cannot_start,
            "not_supported": self.not_supported,
            "as_read": {name: _plain(value) for name, value in self.as_read.items()},
            "at_least": self.at_least,
            "taken": [
                {
                    "key": taken.key,
                    "value": _plain(taken.value),
                    "field": taken.field,
                    "memlab_value": _plain(taken.memlab_value),
                    "place": taken.place,
                }
                for taken in self.taken
            ],
            "without_effect": self.without_effect,
            "not_modelled": [
                {
                    "key": one.key,
                    "value": _plain(one.value),
                    "effect": one.effect,
                    "reason": one.reason,
                    "bound_bytes": one.bound_bytes,
                    "place": one.place,
                }
                for one in self.not_modelled
            ],
            "causes": list(self.causes),
            "warnings": list(self.warnings),
        }

    def required(self) -> tuple[Scenario, MemorySettings]:
        """Returns scenario and settings.

        Raises:
            ValueError: If the job cannot start or is not supported, with the reason.
        """
        if self.scenario is None or self.settings is None:
            cause = f"{self.causes[0]}; " if self.causes else ""
            raise ValueError(f"{self.path.name}: {cause}{self.cannot_start or self.not_supported}")
        return self.scenario, self.settings


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.strip().partition("=")
    key = key.rstrip().lstrip("+-")
    if key.startswith("~"):
        raise ValueError(f"--set is {shortened(text)}, and memlab cannot delete a key: give key=value")
    if not equals or not key:
        raise ValueError(f"--set is {shortened(text)}, must be key=value: give a key in the framework's spelling")
    return key, value


def _override(framework: Framework, entries: Entries, given: dict[str, str]) -> dict[str, str]:
    """Takes values above the file's; returns the keys in no list, each with its refusal if nobody reads it."""
    overrides = Entries()
    for name, text in given.items():
        if framework.style == "flags":
            overrides.add(name.replace("-", "_"), parse_value(text), None)
        else:
            add_override(overrides, name, text, None)
    unlisted = {}
    for key in overrides.by_key:
        if key not in entries.by_key and not framework.knows(key):
            names = {*framework.names(), *entries.environment, *entries.not_exported}
            near = difflib.get_close_matches(key, sorted(names), 1, 0.5)
            mean = f"did you mean {near[0]}" if near else f"memlab job lists the keys of {framework.title}"
            unlisted[key] = f"--set has the key {shortened(key)}, which memlab does not know: {mean}"
    entries.merge(overrides)
    return unlisted


def _check_read(unlisted: dict[str, str], reading: Reading) -> None:
    """Checks that a framework's module read each key of `_override` in code."""
    read = reading.known | {one.key for one in reading.taken}
    for key, refusal in unlisted.items():
        if key not in read:
            raise ValueError(refusal)


def _built(
    cls: type[Job],
    framework: Framework,
    reading: Reading,
    architecture: str | Path | Architecture | None,
    fields_only: bool,
) -> Job:
    scenario, settings, cannot_start, not_supported = None, None, None, None
    refused_fields: tuple[str, ...] = ()
    as_read: dict[str, Any] = {}
    model = _other_model(reading) if architecture is None else None
    precisions = [] if fields_only else reading.blocked["precision"]
    engines = [] if fields_only else reading.blocked["engine"]
    try:
        lacking = [*reading.blocked["job"], *engines, *precisions]
        found = with_layer_pattern(reading, _architecture(reading, architecture, lacking, model, framework))
        check_core(reading, found if architecture is None else None, framework.engine)
        _drop_experts(reading, found, is_own=architecture is None)
        framework.complete_of_model(reading, found)
        _drop_shared_experts(reading, found)
        complete_cuda_graphs(reading, found)
        reading.not_given.clear()
        framework.check(reading)
        scenario = scenario_of(reading, found, Versions(transformer_engine=framework.transformer_engine))
        settings = recompute_of_all_layers(reading, settings_of(reading), scenario)
        bound(reading, scenario, settings)
        _note_missing_sizes(reading, framework, scenario)
    except CannotStartError as error:
        scenario = None
        guessed = [*reading.guessed, *reversed(reading.not_given)]
        if guessed:
            names = ", ".join(dict.fromkeys(guessed))
            not_supported = (
                f"{names} is known only when the job runs, and with the default the framework refuses the job: give "
                f"--set {guessed[0]}=VALUE ({error})"
            )
        elif reading.unread:
            not_supported = (
                f"memlab does not know what {reading.unread} sets, and with defaults in its place the framework "
                f"refuses the job: give these values with --set ({error})"
            )
        elif own := _flags_of_a_fork(framework, reading):
            not_supported = (
                f"{framework.title} refuses the job, and a fork or an earlier version of it, with flags of its own "
                f"such as {own}, may not: {error}"
            )
        elif reading.other_program:
            not_supported = f"{framework.title} refuses the job, and {reading.other_program} may not: {error}"
        else:
            cannot_start, refused_fields = str(error), error.fields
    except ValueError as error:
        not_supported, scenario = str(error), None
        framework.complete_refused(reading)
    if reading.questions and cannot_start is None:
        not_supported, scenario, settings = not_supported or reading.questions[0], None, None
    as_read = _as_read(framework, reading) if cannot_start is None and scenario is None else {}
    refuses = cannot_start is None and not_supported is not None and not reading.questions
    _note_beside_the_step(reading)
    rollout = _rollout(reading, scenario)
    without_effect = _without_effect(framework, reading)
    unread = [f"what {reading.unread} sets"] if reading.unread else []
    return cls(
        path=reading.path,
        framework=framework.name,
        scenario=scenario,
        settings=settings if scenario is not None else None,
        micro_batches=reading.micro_batches if cannot_start is None else None,
        rollout=rollout,
        cannot_start=cannot_start,
        refused_fields=refused_fields,
        not_supported=not_supported,
        lacks=tuple(dict.fromkeys(reading.lacks)),
        as_read=as_read,
        model=model if scenario is None else None,
        precision="; ".join(precisions),
        has_own_engine=bool(engines),
        at_least=_least_kept(reading, architecture) if refuses else {},
        guesses=tuple(dict.fromkeys([*reading.guessed, *reading.assumed, *unread])),
        questions=tuple(dict.fromkeys(reading.questions)),
        taken=tuple(_last(reading.taken)),
        without_effect=without_effect,
        not_modelled=tuple(dict.fromkeys(_hashable(reading.not_modelled))),
        causes=tuple(dict.fromkeys(reading.entries.causes)),
        warnings=tuple(dict.fromkeys(reading.warnings)),
    )


def _without_effect(framework: Framework, reading: Reading) -> dict[str, str]:
    """Returns the keys that change nothing, each with the reason, and names those that memlab does not know."""
    without_effect = dict(reading.without_effect)
    said = {one.key for one in reading.taken} | {one.key for one in reading.not_modelled}
    others: list[str] = []
    for key, entry in reading.entries.by_key.items():
        if key in said or (entry.is_unknown and key in reading.known):  # a warning names it
            continue
        if key in reading.known or entry.value in ({}, None):
            without_effect.setdefault(
                key,
                "memlab predicts steps with this value in any case, or the key has no effect without another key that "
                "the job does not set",
            )
        elif framework.ignores(key):
            without_effect.setdefault(key, "the key does not concern the memory of a training step")
        elif reading.entries.is_of_framework(entry):
            others.append(key)
        else:
            reading.not_modelled.append(
                NotModelled(key, entry.value, "unknown", "memlab does not know this key", entry.place)
            )
    if others:
        reading.warnings.append(
            f"{len(others)} keys of the framework's own configuration beside the job are none that memlab knows, and "
            f"it leaves their values out: {', '.join(others[:3])}{', ...' * (len(others) > 3)}"
        )
    return without_effect


def _as_read(framework: Framework, reading: Reading) -> dict[str, Any]:
    """Returns the values of a job that memlab cannot predict, with its model's sizes and what it does between steps."""
    name = reading.values.get("architecture")
    model = reading.architecture or (None if name is None else published_architecture(str(name)))
    phases = {} if reading.rollout is None else reading.rollout.to_dict()
    phases = {f"rollout_{name}" if name in reading.values else name: value for name, value in phases.items()}
    values = {name: value for name, value in reading.values.items() if value is not None} | {"engine": framework.engine}
    if framework.engine == "fsdp2" and model is not None and not any(reading.blocked.values()):
        values = TrainingState().options() | values  # only the layout is refused, or the model's family
    return ({} if model is None else shown_fields(model)) | phases | dict(reading.values) | values


def _flags_of_a_fork(framework: Framework, reading: Reading) -> str:
    """Returns flags behind a program that the framework's own would refuse; nothing if there are none."""
    others = sorted(
        name
        for name in reading.entries.flags_of_program
        if name not in reading.known and not framework.knows(name) and name in reading.entries.by_key
    )
    return ", ".join(f"--{name.replace('_', '-')}" for name in others[:3])


def _note_missing_sizes(reading: Reading, framework: Framework, scenario: Scenario) -> None:
    """Says which sizes of a micro-batch the job does not give, where its framework has no default either."""
    for field, what in (("seq_length", "how long sequences are"), ("micro_batch_size", "the size of a micro-batch")):
        keys = [key.name for key in framework.keys if key.field == field]
        if reading.values.get(field) is None and keys and reading.entries.by_key.keys().isdisjoint(keys):
            reading.assumed.append(what)
            reading.warnings.append(
                f"{keys[0]} is not in the file, and {framework.title} has no default: memlab takes "
                f"{getattr(scenario, field):,}; give --set {keys[0]}=NUMBER"
            )


def _as_in_file(job: Job, named: Callable[[str], str]) -> Job:
    """Gives the keys of a second model the names that they have in the file."""
    if named is str:
        return job

    def told(text: str | None) -> str | None:
        return None if text is None else named(text)

    return replace(
        job,
        cannot_start=told(job.cannot_start),
        not_supported=told(job.not_supported),
        guesses=tuple(map(named, job.guesses)),
        questions=tuple(map(named, job.questions)),
        taken=tuple(replace(one, key=named(one.key)) for one in job.taken),
        without_effect={named(key): named(reason) for key, reason in job.without_effect.items()},
        not_modelled=tuple(replace(one, key=named(one.key), reason=named(one.reason)) for one in job.not_modelled),
        warnings=tuple(map(named, job.warnings)),
    )


def _with_teacher(job: Job, teacher: Job) -> Job:
    """Returns a student's job with the passes of its teacher among what it does between steps.

    Args:
        job: Of the student, in which the teacher's name is not modelled.
        teacher: The same file, read as the teacher's.
    """
    reason = _why_no_passes(job, teacher)
    if reason is not None:
        told = f"the teacher's passes between the steps are not predicted: {reason}"
        rows = (replace(one, reason=told) if one.key == _TEACHER_NAME else one for one in job.not_modelled)
        return replace(job, not_modelled=tuple(rows))
    assert job.rollout is not None and teacher.scenario is not None and teacher.rollout is not None, "it is predicted"
    passes = TeacherPass(scenario=teacher.scenario, num_microbatches=teacher.rollout.num_passes)
    own = {key: reason for key, reason in teacher.without_effect.items() if key.startswith(_TEACHER)}
    given = tuple(one for one in teacher.taken if one.key.startswith(_TEACHER) and one.place != "default")
    others = tuple(one for one in job.not_modelled if one.key != _TEACHER_NAME)
    return replace(
        job,
        rollout=replace(job.rollout, teacher=passes),
        taken=job.taken + given,
        without_effect={key: reason for key, reason in job.without_effect.items() if not key.startswith(_TEACHER)}
        | own,
        not_modelled=others + tuple(one for one in teacher.not_modelled if one.key.startswith(_TEACHER)),
        warnings=job.warnings + tuple(f"teacher: {each}" for each in teacher.warnings if each not in job.warnings),
    )


def _why_no_passes(job: Job, teacher: Job) -> str | None:
    """Returns why a teacher's passes are not predicted; None if they are."""
    if job.scenario is None or job.rollout is None:
        return "nor is what this job does between its steps"
    if job.rollout.engine_bytes is not None:
        return "Megatron's own engine generates, after which nothing of the student leaves the device for them"
    if teacher.scenario is None or teacher.rollout is None:
        return teacher.cannot_start or teacher.not_supported or "memlab predicts no passes of its model"
    return None


_OTHER_ACCELERATORS = {
    "Ascend's NPUs": re.compile(
        r"(HCCL|ASCEND|VLLM_ASCEND|TORCH_HCCL)_\w+(?<!_PORT_RANGE)|PYTORCH_NPU_ALLOC_CONF|NPUS?_PER_NODE|CPU_AFFINITY_CONF|use_flash_attn"
    ),
    "AMD's GPUs": re.compile(r"(HIP|ROCR)_VISIBLE_DEVICES|(MIOPEN|HSA|ROCM)_\w+"),
}
"""Variables that only jobs on devices of another maker set: of their collective library, compiler and driver, and
MindSpeed's field of Megatron's configuration (public scripts of verl, ms-swift and slime, August 2026). The ranges of
ports are in verl's own ``trainer/runtime_env.yaml``, which jobs on all devices use."""


def _note_beside_the_step(reading: Reading) -> None:
    """Notes what a framework's own keys do not say: devices, variables of the environment, validation, the engine."""
    _note_accelerator(reading)
    note_environment(reading)
    note_validation(reading)
    _drop_engine(reading)


def _note_accelerator(reading: Reading) -> None:
    environment = [name for name, text in reading.entries.environment.items() if text]
    overrides = [key.rpartition(".")[2] for key, entry in reading.entries.by_key.items() if "." in key and entry.value]
    for devices, names in _OTHER_ACCELERATORS.items():
        found = next(filter(names.fullmatch, [*environment, *reading.entries.not_exported, *overrides]), None)
        if found is not None:
            reading.warnings.append(
                f"{found} is set, as jobs on {devices} have it; memlab predicts the job on NVIDIA's GPUs, with "
                "Transformer Engine"
            )


def _rollout(reading: Reading, scenario: Scenario | None) -> Rollout | None:
    """Returns what the job does between training steps, if memlab can predict its log-probabilities."""
    if reading.rollout is None or scenario is None:
        return None
    if not reading.rollout.computes_log_probabilities:
        return reading.rollout
    try:
        reading.rollout.of_log_probabilities(scenario)
    except ValueError as error:
        reading.warnings.append(f"the pass for log-probabilities is not predicted: {error}")
        return None
    return reading.rollout


def _drop_experts(reading: Reading, architecture: Architecture, *, is_own: bool) -> None:
    """Moves keys that concern experts only, where a dense model has them, to those without effect.

    Raises:
        CannotStartError: If the job's own model has no experts to spread.
    """
    if architecture.routes:
        return
    if is_own:
        check_expert_ranks(reading, architecture)
    reason = "the model has no experts"
    for field in [one.field for one in reading.taken if one.field in _OF_EXPERTS]:
        reading.values.pop(field, None)
        reading.take_back(field, reason)
    reading.model(lambda key: "moe_" in key.rpartition(".")[2], reason)


def _drop_shared_experts(reading: Reading, architecture: Architecture) -> None:
    """Moves what concerns shared experts only, where a model has none, to what has no effect.

    See ``use_shared_expert`` in megatron/core/transformer/moe/moe_layer.py (0.16.1 and main of August 2026).
    """
    if architecture.moe_shared_expert_intermediate_size:
        return
    reading.values.pop("moe_shared_expert_overlap", None)
    reading.take_back("moe_shared_expert_overlap", "the model has no shared experts")


def _drop_engine(reading: Reading) -> None:
    """Moves what concerns an inference engine alone, where that has other GPUs, to what has no effect."""
    if reading.rollout is not None and not reading.rollout.is_colocated:
        reading.model(is_of_inference_engine, "the inference engine has other GPUs than the training")


def _hashable(missing: list[NotModelled]) -> list[NotModelled]:
    shown = [replace(one, value=_shown(one.value)) for one in missing]
    return [replace(one, value=str(one.value)) if isinstance(one.value, (list, dict)) else one for one in shown]


def _last(taken: list[Taken]) -> list[Taken]:
    return list({(one.key, one.field): replace(one, value=_shown(one.value)) for one in taken}.values())


def _shown(value: Any) -> Any:
    """Returns a value as tables print it."""
    return "known only when the job runs" if Entry("", value).is_unknown else value


_NOT_OF_THE_MODEL_ALONE = ("num_layers", "vocab_size", "moe_layer_freq")
"""Sizes that are read beside another architecture, or that are padded after reading."""


def _warn_of_replaced_sizes(reading: Reading, architecture: Architecture) -> None:
    """Says which sizes of the file a given architecture replaces."""
    replaced = [
        f"{one.key} {shortened(one.value)} ({one.place}) by {getattr(architecture, one.field)}"
        for one in reading.taken
        if one.place != "default"
        and one.field not in _NOT_OF_THE_MODEL_ALONE
        and one.memlab_value not in (None, getattr(architecture, one.field, one.memlab_value))
    ]
    if replaced:
        reading.warnings.append(f"--architecture {architecture.name} replaces {', '.join(replaced)}")


def _given_architecture(given: str | Path | Architecture) -> Architecture:
    return given if isinstance(given, Architecture) else find_architecture(given)


def _other_model(reading: Reading) -> OtherModel | None:
    """Returns what is known of the job's model, where memlab lacks it or a part of it."""
    name, values = reading.values.get("architecture"), reading.values
    if not missing_sizes(values) or (name is None and values.get("num_layers") and values.get("hidden_size")):
        return of_sizes(values, reading.path.stem)
    if name is None or published_architecture(str(name)) is not None:
        return None
    return of_config(str(name), reading.path.parent) or other_model(str(name))


def _architecture(
    reading: Reading,
    given: str | Path | Architecture | None,
    lacking: list[str],
    model: OtherModel | None,
    framework: Framework,
) -> Architecture:
    language_model = None
    if given is None:
        language_model = _language_model(model, framework, reading)
        lacking = lacking + reading.blocked["model"] + ([] if language_model else reading.blocked["towers"])
    if lacking:
        reading.lacks += [phrase.partition(": ")[2] for phrase in lacking]
        raise ValueError(f"memlab does not have what the job asks for: {'; '.join(dict.fromkeys(lacking))}")
    if given is not None:
        architecture = _given_architecture(given)
        _warn_of_replaced_sizes(reading, architecture)
        if replaced := reading.blocked["model"] + reading.blocked["towers"]:
            reading.warnings.append(
                f"--architecture {architecture.name} is predicted in place of what memlab does not have: "
                f"{'; '.join(dict.fromkeys(replaced))}"
            )
        return architecture
    if model is not None and language_model is not None:
        key = next(one.key for one in reading.taken if one.field == "architecture")
        reading.miss(key, "more", f"the model has {model.lacks}: memlab predicts its language model alone")
        return language_model
    try:
        return _own_architecture(reading)
    except ValueError as error:
        if model is not None and model.lacks:
            reading.lacks.append(model.lacks)
            raise ValueError(
                f"the model is {shortened(reading.values['architecture'])}, which has {model.lacks}"
                f"{_why_not_alone(model, framework)}: memlab names its fields and predicts nothing of it; give "
                "--architecture with a model like it for an estimate"
            ) from error
        if reading.values.get("architecture") is not None and missing_sizes(reading.values):
            reading.lacks.append(f"the model {shortened(reading.values['architecture'])}")
        elif missing_sizes(reading.values):
            reading.assumed.append("the model")
        raise


def _why_not_alone(model: OtherModel, framework: Framework) -> str:
    """Returns why memlab does not predict the language model without the parts beside it, where it has the model."""
    if not model.predicted():
        return ""
    if framework.engine == "megatron":
        return ", and Megatron-Bridge's provider freezes its language model"
    return ", beside which memlab predicts a language model with Megatron only"


_START = re.compile(r"(^|[.])pretrained_checkpoint$")
_OF_A_RUN = re.compile(
    r"(^|[._])((experiment|run|exp|project|wandb)_name|save|model_path|ckpt_path|pretrained_checkpoint)$"
)


def _language_model(model: OtherModel | None, framework: Framework, reading: Reading) -> Architecture | None:
    """Returns the language model of the job's model, where memlab predicts it without the towers beside it."""
    if model is None or framework.engine != "megatron":
        return None
    entries = reading.entries.by_key.items()
    trains = any(key.rpartition(".")[2] == "freeze_language_model" and one.value is False for key, one in entries)
    # ms-swift has its own providers (mcore-bridge).
    is_frozen = model.frozen_by_bridge and framework.name != "ms-swift" and not trains
    return None if is_frozen else model.predicted()


def _own_architecture(reading: Reading) -> Architecture:
    """Returns the architecture that the job's file names, or gives the sizes of.

    Raises:
        ValueError: If memlab does not know it, or a size is missing or breaks a rule.
    """
    if reading.architecture is not None:
        return reading.architecture
    name = reading.values.get("architecture")
    if name is not None and missing_sizes(reading.values):
        found, warning = architecture_named(str(name), reading.path.parent, _names_of_the_run(reading))
        if warning and warning not in reading.warnings:
            reading.warnings.append(warning)
        said = {one.field for one in reading.taken if one.place != "default"} - {"num_layers"}
        own = {name: reading.values.get(name) for name in SAID_OF_MODELS if name in said}
        return replace(found, **{name: value for name, value in own.items() if value is not None})
    if (started := _named_by_its_start(reading)) is not None:
        return started
    try:
        return architecture_of(reading.values, reading.path.stem)
    except ValueError as error:
        mentioned = models_in(_names_of_the_run(reading)) if missing_sizes(reading.values) else []
        if len(mentioned) != 1:
            raise
        raise ValueError(f"{error} (the job's names say {mentioned[0]})") from None


def _named_by_its_start(reading: Reading) -> Architecture | None:
    """Returns the model that the checkpoint from which a job starts is named by, where the job gives no size."""
    starts = [str(one.value) for key, one in reading.entries.by_key.items() if _START.search(key) and one.value]
    if len(starts) != 1 or any(reading.values.get(size) is not None for size in ("num_layers", "hidden_size")):
        return None
    named = models_in(starts)
    if len(named) != 1:
        return None
    warning = (
        f"the job names no model, and memlab takes {named[0]}, as the checkpoint is called from which it starts "
        f"({shortened(starts[0])}): give --architecture for another"
    )
    if warning not in reading.warnings:
        reading.warnings.append(warning)
    return find_architecture(named[0])


def _names_of_the_run(reading: Reading) -> list[str]:
    """Returns the names by which a user calls a job: of its file and of its run."""
    entries = reading.entries.by_key.items()
    of_run = [str(one.value) for key, one in entries if _OF_A_RUN.search(key) and isinstance(one.value, str)]
    model = str(reading.values.get("architecture") or "")
    # A model that memlab knows needs no other file.
    siblings = [] if published_architecture(model) is not None else lines_of_siblings(reading.path, model)
    return [reading.path.stem, *of_run, *siblings]


def _least_kept(reading: Reading, given: str | Path | Architecture | None) -> dict[str, int]:
    """Returns `Job.at_least`.

    FSDP2 shares each parameter among ranks, and so do pipeline stages, tensor and expert parallel ranks: the rank that
    keeps the most has no less than the model divided by all ranks that have one copy of it (HSDP has several).
    """
    ranks = (reading.values.get("world_size") or 0) // (reading.values.get("dp_replicate_size") or 1)
    if not reading.kept_of_parameter or not ranks:
        return {}
    try:
        model = _own_architecture(reading) if given is None else _given_architecture(given)
        count = model.with_layers(reading.values.get("num_layers") or model.num_layers).num_parameters
    except ValueError:
        return {}
    return {category: of_one * count // ranks for category, of_one in reading.kept_of_parameter.items()}


__all__ = ["FRAMEWORKS", "Job"]
