"""The step that a command is asked for: what its flags say, laid over a job or over a model with its defaults."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from memlab.commands.shared.job_flags import job_of_flags
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture, find_architecture
from memlab.config.families import FAMILIES
from memlab.config.layout import MOST_RANKS, Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import LOSS_OPTIONS, TrainingState
from memlab.config.validation import check_whole_number
from memlab.config.versions import Versions

if TYPE_CHECKING:
    from memlab.jobs.job import Job

_Options = TypeVar("_Options", MemorySettings, TrainingState, AllocatorSettings)
_MANY_PASSES = 4
"""Per pipeline stage. Micro-batches beyond a few repeat what was allocated before."""
_TOGETHER = ("recompute_", "offload_modules", "logprobs_chunk_size", "fp8_", "cross_entropy_")
"""Beginnings of names: a flag of such a group replaces all of the job's settings of the group."""


@dataclass(frozen=True, slots=True)
class AskedStep:
    """What is run, under which settings, and the job that says so."""

    scenario: Scenario
    on_ranks: list[Scenario]
    """On the rank that is asked for, or on one rank of each kind."""
    settings: MemorySettings
    job: Job | None
    """None without ``--job``."""


def asked_step(arguments: argparse.Namespace, *, rank: int | None = 0, measured_ranks: int | None = None) -> AskedStep:
    """Reads the job's file, if there is one, and lays over it what the flags say.

    Args:
        arguments: Of `measure`, `predict` or `search`.
        rank: The rank to measure or predict; None is one rank of each kind.
        measured_ranks: The ranks that there are, where a command measures; a single one takes no layout from a job.
            None takes what ``--world-size`` or the job says.

    Raises:
        ValueError: If the file cannot be understood, there is neither a job nor a model, or a value breaks its rule.
    """
    job = job_of_flags(arguments)
    given = _given(arguments, Scenario)
    source = given.pop("architecture", None)  # a job has taken it already
    world_size = measured_ranks if measured_ranks is not None else arguments.world_size
    layout, state, allocator, settings = Layout(), TrainingState(), AllocatorSettings(), MemorySettings()
    versions = Versions()
    if job is not None:
        source, settings = job.required()
        if getattr(arguments, "forward_only", False) and job.rollout is not None:
            source = job.rollout.of_log_probabilities(source)
        for note in _notes(job, source, given.get("num_microbatches", source.num_microbatches), measured_ranks):
            print(f"{job.path.name}: {note}", file=sys.stderr)
        given = {"packed_sequences": _packed_sequences(arguments, source)} | given
        state, allocator = source.state, source.allocator
        if measured_ranks is None:
            world_size, versions = source.layout.world_size, source.versions
        elif source.versions != versions:
            print(f"{job.path.name}: the job has {source.versions}, a measured step what is installed", file=sys.stderr)
        if measured_ranks != 1:
            layout = source.layout
    given["layout"] = _laid_over(layout, arguments, 1 if world_size is None else world_size, rank or 0)
    given["state"], given["allocator"] = _overlaid(state, arguments), _overlaid(allocator, arguments)
    given["versions"] = replace(versions, **_given(arguments, Versions))
    given["versions"].require_known()
    settings = _overlaid(settings, arguments)
    if job is None and source is not None:
        given["layout"] = _as_published(given["layout"], find_architecture(source), given.get("num_layers"))
    scenario = Scenario.of(source, **given)
    on_ranks = scenario.on_ranks(rank)
    check_on_model(settings, scenario)
    if getattr(arguments, "as_framework", None) is not None:
        from memlab.jobs.writing import check_engine_of

        check_engine_of(arguments.as_framework, scenario)
    return AskedStep(scenario, on_ranks, settings, job)


def _given(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the flags that were given for a class's fields; the defaults stay the class's own."""
    names = [*options_of(cls), *(field.name for field in fields(cls))]
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _overlaid(of_job: _Options, arguments: argparse.Namespace) -> _Options:
    given = _given(arguments, type(of_job))
    replaced = tuple(group for group in _TOGETHER if any(name.startswith(group) for name in given))
    if "loss" in given:  # other losses read other options; whether logits are in fp32 is the model's, if it returns any
        is_inside = given["loss"] == "cross_entropy"
        replaced += tuple(name for name in LOSS_OPTIONS if is_inside or name != "fp32_output")
    kept = {name: value for name, value in of_job.changed().items() if not name.startswith(replaced)}
    if isinstance(of_job, TrainingState):
        return TrainingState.of_options(kept | given)
    return type(of_job)(**kept | given)


def _laid_over(of_job: Layout, arguments: argparse.Namespace, world_size: int, rank: int) -> Layout:
    """Returns the job's layout with the sizes that the flags give, and as many copies of the model as the ranks make.

    Raises:
        ValueError: If a size breaks its rule, or the ranks do not divide.
    """
    check_whole_number("world_size", world_size, at_most=MOST_RANKS)
    sizes = {field.name: getattr(of_job, field.name) for field in fields(Layout)} | _given(arguments, Layout)
    splits = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    tensor, context, pipeline = (sizes[name] for name in splits)
    per_copy = tensor * context * pipeline
    copies = getattr(arguments, "data_parallel_size", None)
    if copies is not None:
        check_whole_number("data_parallel_size", copies, at_most=MOST_RANKS)
        if arguments.world_size not in (None, copies * per_copy):
            raise ValueError(
                f"--data-parallel-size is {copies} with --world-size {arguments.world_size}, and these copies of the "
                f"model make {copies * per_copy} ranks: leave one of the two out"
            )
        world_size = copies * per_copy
    if per_copy > 0 and world_size % per_copy:
        raise ValueError(
            f"the number of ranks is {world_size}, must be a multiple of {per_copy} (tensor {tensor} x context "
            f"{context} x "
            f"pipeline {pipeline}): use {per_copy} ranks (measure --ranks, torchrun --nproc-per-node, or predict "
            "--world-size), or change a size"
        )
    return Layout(**sizes | {"data_parallel_size": world_size // max(1, per_copy), "rank": rank})


def _as_published(layout: Layout, model: Architecture, num_layers: int | None) -> Layout:
    """Returns the layout with which a whole model is trained whose number of layers hardly any number divides."""
    whole = num_layers in (None, model.num_layers) and FAMILIES[model.family].shorter_last_stage
    split = layout.with_shorter_last_stage(model.num_layers) if whole else layout
    if split != layout:
        last, stages = split.num_layers_in_last_pipeline_stage, layout.pipeline_model_parallel_size
        print(
            f"{model.name}: {stages} stages do not divide its {model.num_layers} layers, so the last stage has {last}, "
            "as in Megatron-Bridge's recipe (--num-layers-in-last-pipeline-stage)",
            file=sys.stderr,
        )
    return split


def _packed_sequences(arguments: argparse.Namespace, of_job: Scenario) -> int | None:
    """Returns the job's packed sequences; those of a row of another length are as long as the job's."""
    keeps_scores = arguments.attention_backend == "unfused" or arguments.transformer_impl == "local"
    if (arguments.micro_batch_size or 1) > 1 or keeps_scores:
        return None
    tokens = arguments.seq_length or of_job.seq_length
    packed, ranks = of_job.packed_sequences_in(tokens), arguments.context_parallel_size or 1
    return packed if packed is None or ranks == 1 else max(1, min(packed, tokens // (2 * ranks)))


def _notes(job: Job, scenario: Scenario, num_microbatches: int, measured_ranks: int | None) -> list[str]:
    """Says what the user should know of a job before its figures.

    Args:
        num_microbatches: Of the step that is asked for.
        measured_ranks: The ranks that there are, where a command measures.
    """
    notes = [*job.causes, *job.warnings]
    missing = [f"{one.key} ({one.effect})" for one in job.not_modelled if one.effect != "unknown"]
    if missing:
        words = "; ".join(missing)
        notes.append(
            f"memlab does not model these keys, so the job may need more or less memory than memlab says: {words} "
            f"(memlab job {job.path} explains each)"
        )
    stages = scenario.layout.pipeline_model_parallel_size
    if num_microbatches > _MANY_PASSES * stages:
        shorter = f"--num-microbatches {2 * stages} makes the step shorter"
        notes.append(f"a step has {num_microbatches} micro-batches, which take a while: {shorter}")
    if measured_ranks == 1 and scenario.layout.world_size > 1:
        notes.append(
            f"only one rank is measured, although the job's layout is {scenario.layout}: --ranks N starts more ranks"
        )
    return notes
