"""Predicts what a training step needs, at full size and without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memlab.analysis.diagnosis import worst
from memlab.commands.shared.asked_step import AskedStep, asked_step
from memlab.commands.shared.exit_codes import EXIT_CODES
from memlab.commands.shared.job_flags import add_writing_option
from memlab.commands.shared.output import add_record_arguments, claimed_folder, save_record
from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.commands.shared.step_flags import (
    add_job_arguments,
    add_pass_arguments,
    add_step_arguments,
    limit_for_torch,
    memory_size,
    rank_or_all,
)
from memlab.commands.shared.step_progress import ProgressLines
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import VERDICTS, Fit, FitInterrupted, Verdict, judge, judge_fit, judge_phases
from memlab.fitting.outside_torch import outside_torch_of
from memlab.fitting.peak_range import PeakRange
from memlab.jobs.frameworks.framework import NotModelled
from memlab.jobs.writing import writable
from memlab.lab.job_phases import phases_of, predict_phases
from memlab.lab.search_steps import SimulatedSteps, StepInterrupted, stepping
from memlab.record.job_phases import JobPhases
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes, remaining
from memlab.views.text.job import lines_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags: those of `measure`, and those of a job and a GPU that this machine does not have."""
    add_step_arguments(parser)
    add_job_arguments(parser)
    add_pass_arguments(parser)
    add_record_arguments(parser)
    add_writing_option(parser)
    parser.add_argument(
        "--rank",
        type=rank_or_all,
        default=0,
        metavar="N|all",
        help="predict rank N (default 0); with all, predict one rank of each kind (ranks of one kind need the same "
        "memory) and mark the rank with the highest peak",
    )
    parser.add_argument(
        "--gpu-memory",
        type=memory_size,
        metavar="SIZE",
        help="say whether the step fits a GPU with this much memory, such as 79GiB (what CUDA reports for a GPU of 80 "
        "GB); memlab subtracts its estimate of what is used outside torch. The exit code is 0 if the step fits, 1 if "
        "it does not fit, and 3 if it may fit: something that memlab knows only as a bound decides. If the step does "
        "not fit, memlab lists single settings with which it would fit",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks everything that can be checked without a model.

    Raises:
        ValueError: If a value breaks its rule, or the output folder is not empty.
    """
    asked = asked_step(arguments, rank=arguments.rank)
    if arguments.gpu_memory is not None:
        limit_for_torch(arguments.gpu_memory, asked.scenario)
    for flag in ("forward_only", "device_memory"):
        if arguments.gpu_memory is not None and getattr(arguments, flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} cannot be combined with --gpu-memory, which judges a training step with "
                "the whole GPU: leave one of the two out"
            )
    if arguments.snapshot and arguments.out is None:
        raise ValueError("--snapshot has no folder to write to: give --out FOLDER")
    claimed = ExitStack()
    claimed.enter_context(claimed_folder(arguments.out))

    def job() -> int:
        exit_code = _predict(asked, arguments, claimed)
        if arguments.as_framework is not None:
            print(f"\n{lines_for(arguments.as_framework, asked.scenario, asked.settings, asked.job)}")
        return exit_code

    return job


@dataclass(slots=True)
class _Predicted:
    """What is known so far: Ctrl-C keeps it."""

    not_modelled: tuple[NotModelled, ...]
    """What the job does and memlab does not predict."""
    records: list[StepRecord] = field(default_factory=list)
    ranges: list[PeakRange] = field(default_factory=list)
    """Of the records; their timelines have what the lower end needs."""
    verdicts: list[Verdict] = field(default_factory=list)
    steps: SimulatedSteps | None = None
    """Have taken the step of `judged`, and know its requests."""
    fit: Fit | None = None
    phases: JobPhases | None = None
    is_interrupted: bool = False

    @property
    def judged(self) -> StepRecord:
        """The worst of the ranks."""
        least = max(self.verdicts, key=VERDICTS.index, default=None)
        judged = zip(self.records, self.verdicts, strict=False)
        return worst([record for record, verdict in judged if verdict == least] or self.records)

    @property
    def exit_code(self) -> int:
        """That of the worst verdict."""
        if self.is_interrupted:
            return 130
        if any(record.status != "ok" for record in self.records):
            return EXIT_CODES["does not fit"]
        verdicts: list[Verdict] = [] if self.fit is None else [self.fit.verdict]
        if self.phases is not None and self.phases.gpu_memory_bytes is not None:
            verdicts.append(judge_phases(self.phases, self.judged_range))
        return EXIT_CODES[max(verdicts, key=VERDICTS.index, default="fits")]

    @property
    def judged_range(self) -> PeakRange:
        """Both ends of the peak of the worst rank."""
        return self.ranges[self.records.index(self.judged)]


def _predict(asked: AskedStep, arguments: argparse.Namespace, claimed: ExitStack) -> int:
    job, scenarios = asked.job, asked.on_ranks
    rollout = None if job is None or arguments.device_memory or arguments.forward_only else job.rollout
    found = _Predicted(() if job is None else job.not_modelled)
    with claimed, stdout_reserved_for_result():
        try:
            _take_steps(found, scenarios, asked.settings, rollout, arguments)
            if arguments.gpu_memory is not None:
                found.fit = _fit(found, arguments)
            if rollout is not None and found.phases is None:
                found.phases = predict_phases(
                    found.judged.scenario,
                    asked.settings,
                    rollout,
                    arguments.gpu_memory,
                    replay=arguments.replay,
                    on_progress=ProgressLines("phases of the job"),
                )
        except KeyboardInterrupt as interrupt:
            _keep(found, interrupt, len(scenarios))
    print(_result(found, as_json=arguments.json))
    return found.exit_code


def _take_steps(
    found: _Predicted,
    scenarios: list[Scenario],
    settings: MemorySettings,
    rollout: Rollout | None,
    arguments: argparse.Namespace,
) -> None:
    started = time.monotonic()
    for number, scenario in enumerate(scenarios, 1):
        rank = scenario.layout.rank
        progress = ProgressLines(f"rank {rank}")
        with stepping(
            scenario, forward_only=arguments.forward_only, replay=arguments.replay, on_progress=progress
        ) as steps:
            record = steps(settings, arguments.device_memory)
            if arguments.out is not None:
                folder = arguments.out / f"rank-{rank}" if len(scenarios) > 1 else arguments.out
                save_record(record, folder, snapshot=arguments.snapshot)
            found.records.append(record)
            found.ranges.append(PeakRange.of(record, found.not_modelled))
            if arguments.gpu_memory is not None:
                limit_bytes = limit_for_torch(arguments.gpu_memory, scenario)
                found.verdicts.append(judge(record, steps, limit_bytes, found.ranges[-1]))
            if found.judged is record:
                found.steps = steps
            if rollout is not None and len(scenarios) == 1:  # of several ranks, the worst one has phases
                found.phases = phases_of(record, steps, rollout, arguments.gpu_memory, replay=arguments.replay)
        if len(scenarios) > 1:
            left = remaining(time.monotonic() - started, number, len(scenarios) - number)
            peak = format_bytes(record.peak_allocated_bytes)
            print(f"{number} of {len(scenarios)} ranks predicted{left}: rank {rank}: {peak}", file=sys.stderr)
    if arguments.out is not None and len(found.records) > 1:
        _save_page(found.records, arguments.out)


def _keep(found: _Predicted, interrupt: KeyboardInterrupt, num_ranks: int) -> None:
    """Says what Ctrl-C left; of a single step that was running, the part that was taken is kept.

    Raises:
        KeyboardInterrupt: If there is nothing to keep.
    """
    found.is_interrupted = True
    if isinstance(interrupt, FitInterrupted):
        found.fit = interrupt.found
    if len(found.records) == num_ranks:
        words = "the list of settings that would fit, or the phases of the job, may be incomplete"
    elif found.records:
        words = f"{len(found.records)} of {num_ranks} ranks were predicted"
    elif isinstance(interrupt, StepInterrupted):
        words = "the numbers are those of the part of the step that was taken"
        found.records.append(interrupt.found)
    else:
        raise interrupt
    print(f"interrupted: {words}", file=sys.stderr)


def _fit(found: _Predicted, arguments: argparse.Namespace) -> Fit:
    """Judges a step, and keeps the alternatives that fit on all ranks.

    Raises:
        FitInterrupted: At Ctrl-C, once there is a verdict.
    """
    judged, not_modelled = found.judged, found.not_modelled
    others = [record.scenario for record in found.records if record is not judged]
    fit = None
    try:
        assert found.steps is not None, "they have taken the step"
        with closing(found.steps) as steps:
            steps.on_progress = ProgressLines("what would fit")
            is_allowed = writable(arguments.as_framework, judged.scenario, judged.settings)
            fit = judge_fit(judged, steps, arguments.gpu_memory, not_modelled, is_allowed=is_allowed)
        fit = _with_expandable_segments(fit, found, replay=arguments.replay)
        return _on_all_ranks(fit, others, not_modelled, replay=arguments.replay)
    except FitInterrupted as interrupted:
        fit = interrupted.found
        raise FitInterrupted(replace(fit, alternatives=()) if others else fit) from None
    except KeyboardInterrupt:
        if fit is None:
            raise
        raise FitInterrupted(replace(fit, alternatives=())) from None


def _with_expandable_segments(fit: Fit, found: _Predicted, *, replay: bool) -> Fit:
    """Takes the steps again with expandable segments, if nothing but fragmentation keeps them from completing."""
    own = found.records[0].scenario.allocator
    if not fit.is_fragmented or own.expandable_segments:
        return fit
    worst_verdict: Verdict = "fits"
    for each in found.records:
        scenario = replace(each.scenario, allocator=replace(own, expandable_segments=True))
        with stepping(scenario, replay=replay) as steps:
            record = steps(each.settings)
            verdict = judge(record, steps, fit.limit_bytes, PeakRange.of(record, found.not_modelled))
        worst_verdict = max(worst_verdict, verdict, key=VERDICTS.index)
        if verdict == "does not fit":
            break
    return replace(fit, verdict_with_expandable_segments=worst_verdict)


def _on_all_ranks(fit: Fit, others: list[Scenario], not_modelled: tuple[NotModelled, ...], *, replay: bool) -> Fit:
    """Keeps the alternatives that fit on the other ranks too, each with the largest peak and the worst verdict."""
    left = list(fit.alternatives)
    for scenario in others if left else []:
        tried, left = left, []
        with stepping(scenario, replay=replay) as steps:
            for choice in tried:
                record = steps(choice.settings)
                verdict = judge(record, steps, fit.limit_bytes, PeakRange.of(record, not_modelled))
                if verdict != "does not fit":
                    peak = max(choice.peak_allocated_bytes, record.peak_allocated_bytes)
                    worst_verdict = max(choice.verdict, verdict, key=VERDICTS.index)
                    left.append(replace(choice, peak_allocated_bytes=peak, verdict=worst_verdict))
    return replace(fit, alternatives=tuple(left))


def _save_page(records: list[StepRecord], folder: Path) -> None:
    """Writes the ranks side by side, as ``ranks.html``."""
    from memlab.views.display import peaks

    peaks({f"rank {record.scenario.layout.rank}": record for record in records}).save(folder / "ranks.html")


def _result(found: _Predicted, *, as_json: bool) -> str:
    records, judged, fit, phases = found.records, found.judged, found.fit, found.phases
    layout = judged.scenario.layout
    if as_json:
        values = _with_range(records[0], found) if len(records) == 1 else JobRecord.of(records).to_dict()
        if len(records) > 1:
            values["ranks"] = [_with_range(record, found) for record in JobRecord.of(records).ranks]
        verdict = {} if fit is None else {"fit": fit.to_dict() | {"rank": layout.rank}}
        of_job = {} if phases is None else {"phases": phases.to_dict()}
        return json.dumps(values | verdict | of_job, indent=2)
    from memlab.views.text.job_phases import phases_table
    from memlab.views.text.peak_range import range_lines
    from memlab.views.text.ranks import ranks_table
    from memlab.views.text.record import record_table

    lines = [] if fit is None else [*_verdict(found, fit), ""]
    lines += [record_table(records[0]) if len(records) == 1 else ranks_table(records)]
    ends = [] if not found.ranges else range_lines(found.judged_range)
    lines += ["", *ends] if ends else []
    if 1 < len(records) < layout.world_size:
        lines.append(
            f"one rank of each kind is shown: every other one of the {layout.world_size} ranks needs as much memory as "
            "one of these"
        )
    elif len(records) == 1 and len(judged.scenario.ranks_of_every_kind) > 1:
        lines.append(other_ranks_line(layout))
    if phases is not None:
        lines += ["", phases_table(phases, found.judged_range)]
    return "\n".join([*lines, "", str(outside_torch_of(judged.scenario))])


def _with_range(record: StepRecord, found: _Predicted) -> dict[str, Any]:
    """Returns a record's values, with both ends of its peak where memlab knows something only as a bound."""
    ranges = (peak for each, peak in zip(found.records, found.ranges, strict=False) if each is record)
    peak = next(ranges, None)
    return record.to_dict() | ({} if peak is None or peak.is_exact else {"peak_range": peak.to_dict()})


def _verdict(found: _Predicted, fit: Fit) -> list[str]:
    """Says whether the step fits, and what would: the answer, so it is printed first."""
    layout = found.judged.scenario.layout
    name = f"rank {layout.rank} " if layout.world_size > 1 else ""
    if len(found.records) > 1 and fit.verdict == "fits":
        name = "each rank "
    if found.is_interrupted and not fit.alternatives:
        return [f"{name}{fit}"]  # what would fit was not tried to the end
    return [f"{name}{fit}", *_alternatives(fit, found.judged.scenario.allocator)]


def other_ranks_line(layout: Layout) -> str:
    """Says that the numbers are those of one rank only."""
    return (
        f"this is rank {layout.rank}, one of {layout.world_size} ranks; other ranks may need more or less "
        "memory: predict --rank all shows one of each kind"
    )


def _alternatives(fit: Fit, own: AllocatorSettings) -> list[str]:
    if fit.fits:
        return []
    verdict = fit.verdict_with_expandable_segments
    if verdict is None or verdict == "does not fit":
        return _alternative_settings(fit)
    options = replace(own, expandable_segments=True)
    expandable = f"the step {verdict} with PYTORCH_CUDA_ALLOC_CONF={options}: add --expandable-segments to predict this"
    return [expandable, *(_alternative_settings(fit) if fit.alternatives else [])]


def _alternative_settings(fit: Fit) -> list[str]:
    if not fit.alternatives:
        if fit.start_bytes > fit.limit_bytes:
            start, limit = format_bytes(fit.start_bytes), format_bytes(fit.limit_bytes)
            starts = f"no setting helps: a step starts with {start}, and torch can have only {limit}"
            return [f"{starts}: take another training state, another layout, or more GPUs"]
        combined = "no single setting makes it fit: let memlab search combine them"
        return [f"{combined}, or take another training state, a smaller batch, or more GPUs"]
    may = ", or may where a line says so" if any(choice.verdict == "may fit" for choice in fit.alternatives) else ""
    return [
        f"each of these settings would make it fit{may}, the cheapest first:",
        *(f"  {choice}" for choice in fit.alternatives),
    ]
