"""Predicts what a training step needs, at full size and without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memlab.analysis.diagnosis import worst
from memlab.commands.shared.asked_step import AskedStep, asked_step
from memlab.commands.shared.exit_codes import EXIT_CODES
from memlab.commands.shared.job_flags import add_writing_option, writable_as
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
from memlab.config.layout import Layout
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import (
    VERDICTS,
    Fit,
    FitInterrupted,
    Verdict,
    judge,
    judge_phases,
    judge_step,
    with_alternatives,
)
from memlab.fitting.outside_torch import outside_torch_of
from memlab.fitting.peak_range import PeakRange
from memlab.jobs.frameworks.framework import NotModelled
from memlab.lab.job_phases import phases_of, predict_phases
from memlab.lab.search_steps import SimulatedSteps, StepInterrupted, stepping
from memlab.record.job_phases import JobPhases
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes, remaining

_SECONDS_FOR_ADVICE = 60.0
"""For what would fit, after the prediction and its verdict."""


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
        f"not fit, memlab lists single settings with which it would fit, after the prediction; it tries them for "
        f"{_SECONDS_FOR_ADVICE:.0f} seconds at most, and names those that were left",
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
            from memlab.views.text.job import lines_for

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
    is_printed = False
    with claimed:
        try:
            with stdout_reserved_for_result():
                _take_steps(found, scenarios, asked.settings, rollout, arguments)
                if arguments.gpu_memory is not None:
                    found.fit = _judge(found, arguments)
                if rollout is not None and found.phases is None:
                    found.phases = predict_phases(
                        found.judged.scenario,
                        asked.settings,
                        rollout,
                        arguments.gpu_memory,
                        replay=arguments.replay,
                        on_progress=ProgressLines("phases of the job"),
                    )
            if found.fit is not None and found.fit.can_be_helped:
                if not arguments.json:
                    print(_result(found, as_json=False), flush=True)
                    is_printed = True
                with stdout_reserved_for_result():
                    found.fit = _advised(found, found.fit, arguments)
        except KeyboardInterrupt as interrupt:
            _keep(found, interrupt, len(scenarios))
    if not is_printed:
        print(_result(found, as_json=arguments.json))
    if not arguments.json and found.fit is not None and (advice := _advice(found, found.fit)):
        print("\n".join(["", *advice]))
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


def _judge(found: _Predicted, arguments: argparse.Namespace) -> Fit:
    assert found.steps is not None, "they have taken the step"
    with closing(found.steps) as steps:
        return judge_step(found.judged, steps, arguments.gpu_memory, found.not_modelled)


def _advised(found: _Predicted, fit: Fit, arguments: argparse.Namespace) -> Fit:
    """Predicts what would fit on all ranks, as far as the time for it goes.

    Raises:
        FitInterrupted: At Ctrl-C.
    """
    judged = found.judged
    others = [record.scenario for record in found.records if record is not judged]
    progress = ProgressLines(f"what would fit, for {_SECONDS_FOR_ADVICE:.0f} s at most")
    advice = _Advice(found.not_modelled, arguments.replay, progress, time.monotonic() + _SECONDS_FOR_ADVICE)
    of_verdict = fit
    try:
        fit = advice.with_expandable_segments(fit, found.records)
        is_allowed = writable_as(arguments.as_framework, judged.scenario, judged.settings)
        with advice.stepping(judged.scenario) as steps:
            fit = with_alternatives(fit, judged, steps, found.not_modelled, is_allowed=is_allowed)
        return advice.on_all_ranks(fit, others)
    except FitInterrupted as interrupted:
        fit = interrupted.found
        raise FitInterrupted(replace(fit, alternatives=()) if others else fit) from None
    except KeyboardInterrupt:
        raise FitInterrupted(of_verdict) from None


@dataclass(frozen=True, slots=True)
class _Advice:
    """Predicts what would fit, until its time is over."""

    not_modelled: tuple[NotModelled, ...]
    replay: bool
    progress: ProgressLines
    stop_at: float
    """On the clock of `time.monotonic`."""

    @contextmanager
    def stepping(self, scenario: Scenario) -> Iterator[SimulatedSteps]:
        """Returns a context whose value takes steps of a scenario until the time is over."""
        with stepping(scenario, replay=self.replay, on_progress=self.progress) as steps:
            steps.stop_at = self.stop_at
            yield steps

    def with_expandable_segments(self, fit: Fit, records: list[StepRecord]) -> Fit:
        """Takes the steps again with expandable segments, if nothing but fragmentation keeps them from completing."""
        own = records[0].scenario.allocator
        if not fit.is_fragmented or own.expandable_segments:
            return fit
        worst_verdict: Verdict = "fits"
        for each in records:
            scenario = replace(each.scenario, allocator=replace(own, expandable_segments=True))
            with self.stepping(scenario) as steps:
                record = steps(each.settings)
                if record.status == "interrupted":
                    return replace(fit, not_tried=("expandable segments",))
                verdict = judge(record, steps, fit.limit_bytes, PeakRange.of(record, self.not_modelled))
            worst_verdict = max(worst_verdict, verdict, key=VERDICTS.index)
            if verdict == "does not fit":
                break
        return replace(fit, verdict_with_expandable_segments=worst_verdict)

    def on_all_ranks(self, fit: Fit, others: list[Scenario]) -> Fit:
        """Keeps the alternatives that fit on the other ranks too, each with the largest peak and the worst verdict."""
        left, not_tried = list(fit.alternatives), list(fit.not_tried)
        for scenario in others if left else []:
            tried, left = left, []
            with self.stepping(scenario) as steps:
                for choice in tried:
                    record = steps(choice.settings)
                    if record.status == "interrupted":
                        not_tried.append(str(choice.settings))
                        continue
                    verdict = judge(record, steps, fit.limit_bytes, PeakRange.of(record, self.not_modelled))
                    if verdict != "does not fit":
                        peak = max(choice.peak_allocated_bytes, record.peak_allocated_bytes)
                        worst_verdict = max(choice.verdict, verdict, key=VERDICTS.index)
                        left.append(replace(choice, peak_allocated_bytes=peak, verdict=worst_verdict))
        return replace(fit, alternatives=tuple(left), not_tried=tuple(not_tried))


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
    """Says whether the step fits, and whether any setting can help: the answer, so it is printed first."""
    layout = found.judged.scenario.layout
    name = f"rank {layout.rank} " if layout.world_size > 1 else ""
    if len(found.records) > 1 and fit.verdict == "fits":
        name = "each rank "
    if fit.fits or fit.can_be_helped:
        return [f"{name}{fit}"]
    start, limit = format_bytes(fit.start_bytes), format_bytes(fit.limit_bytes)
    starts = f"no setting helps: a step starts with {start}, and torch can have only {limit}"
    return [f"{name}{fit}", f"{starts}: take another training state, another layout, or more GPUs"]


def other_ranks_line(layout: Layout) -> str:
    """Says that the numbers are those of one rank only."""
    return (
        f"this is rank {layout.rank}, one of {layout.world_size} ranks; other ranks may need more or less "
        "memory: predict --rank all shows one of each kind"
    )


def _advice(found: _Predicted, fit: Fit) -> list[str]:
    """Says what would make the step fit, and what was not tried."""
    if not fit.can_be_helped or (found.is_interrupted and not fit.alternatives):
        return []
    lines = []
    verdict = fit.verdict_with_expandable_segments
    if verdict is not None and verdict != "does not fit":
        options = replace(found.judged.scenario.allocator, expandable_segments=True)
        how = f"PYTORCH_CUDA_ALLOC_CONF={options}: add --expandable-segments to predict this"
        lines.append(f"the step {verdict} with {how}")
    return lines + _alternative_settings(fit, is_alone=not lines)


def _alternative_settings(fit: Fit, *, is_alone: bool = True) -> list[str]:
    lines = []
    if fit.alternatives:
        is_doubtful = any(choice.verdict == "may fit" for choice in fit.alternatives)
        may = ", or may where a line says so" if is_doubtful else ""
        lines = [
            f"each of these settings would make it fit{may}, the cheapest first:",
            *(f"  {choice}" for choice in fit.alternatives),
        ]
    elif is_alone:
        none = "no single setting that was tried makes it fit" if fit.not_tried else "no single setting makes it fit"
        none = none if fit.num_tried or not fit.not_tried else "no other setting was tried"
        combined = f"{none}: let memlab search combine them"
        lines = [f"{combined}, or take another training state, a smaller batch, or more GPUs"]
    if fit.not_tried:
        over = f"not tried, because {_SECONDS_FOR_ADVICE:.0f} s were over"
        lines.append(
            f"{over}: {'; '.join(fit.not_tried)}; predict these with their flags, or let memlab search try them"
        )
    return lines
