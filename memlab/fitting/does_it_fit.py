"""Whether a step fits a GPU, by how much, and which single additions to its settings would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from memlab.config.backend_kind import KINDS
from memlab.config.exchange_buffers import exchange_buffers
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.vision import VISION_TOWERS
from memlab.fitting.candidates import candidates
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.measured_margin import (
    further_steps_of,
    keeps_fp8_gathers,
    limit_with_margin,
    measured_margin,
    needs_whole_reserve,
)
from memlab.fitting.outside_torch import outside_torch_of
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.jobs.frameworks.framework import NotModelled
from memlab.record.job_phases import JobPhases
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes


class Steps(Protocol):
    """Takes steps of one rank, or passes without backward."""

    def __call__(self, settings: MemorySettings, limit_bytes: int | None = None) -> StepRecord:
        """Takes a step under settings, with a limit for what torch may reserve, or without one."""

    def completes(self, record: StepRecord, limit_bytes: int) -> bool:
        """Returns whether a step that was taken without a limit also completes if torch may reserve only `limit_bytes`.

        If this is less than the step reserved, torch releases cached memory when it must, and may then find no block
        for a request.
        """


Verdict = Literal["fits", "may fit", "does not fit"]
"""On a measured or predicted step. "fits": even the upper end of its peak does (`memlab.fitting.peak_range`). "does not
fit": not even the lower end does. "may fit": something that memlab knows only as a bound decides."""
VERDICTS: tuple[Verdict, ...] = ("fits", "may fit", "does not fit")
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A setting that fits, as predicted by a step of its own."""

    settings: MemorySettings
    verdict: Verdict = "fits"
    """It fits, or may fit."""
    peak_allocated_bytes: int
    recomputed_operations: float
    """FLOPs that backward recomputes for one token, over all layers."""
    transferred_bytes: int
    """To the host in a step, and back."""

    def __str__(self) -> str:
        costs = []
        if self.recomputed_operations:
            costs.append(f"{self.recomputed_operations / 1e9:.2f} GFLOP recomputed per token")
        if self.transferred_bytes:
            costs.append(f"{format_bytes(self.transferred_bytes)} transferred to the host and back")
        only_may = ["may fit"] if self.verdict == "may fit" else []
        return ", ".join([f"{self.settings}: peak {format_bytes(self.peak_allocated_bytes)}", *costs, *only_may])


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A step compared with a GPU's memory."""

    gpu_memory_bytes: int
    outside_torch_bytes: int
    """Estimated, for the CUDA context, libraries and NCCL (`memlab.fitting.outside_torch`)."""
    most_outside_torch_bytes: int
    """As `outside_torch_bytes`, with the most that NCCL is likely to take."""
    peak_range: PeakRange
    start_bytes: int
    """What a step under these settings starts with at least: no recompute or activation offload changes it."""
    verdict: Verdict
    """Whether torch's allocator completes the step with what is left, releasing what it caches where it must."""
    verdict_with_most_outside: Verdict
    """The same, if `most_outside_torch_bytes` are used outside torch."""
    basis: str
    """What the verdict is based on, in words."""
    verdict_with_expandable_segments: Verdict | None = None
    """The verdict if torch's allocator has expandable segments; None unless only fragmentation prevents the step
    without them."""
    certain_bytes: int | None = None
    """What torch has to be able to reserve so that the step is sure to complete, where that is more than its peak
    (`needs_whole_reserve`), and even the upper end of the peak is within the limit."""
    alternatives: tuple[Alternative, ...] = ()
    """Settings that fit where the step does not, one addition each: by recomputed FLOPs, then by bytes transferred. A
    forward-only pass has none: they are about what is kept for backward."""
    not_tried: tuple[str, ...] = ()
    """In words, what might make it fit and was not tried, because the time for it was over."""
    num_tried: int = 0
    """Settings that were tried beside the step's own."""

    @property
    def fits(self) -> bool:
        """Whether the step completes: it fits, or may fit."""
        return self.verdict != "does not fit"

    @property
    def limit_bytes(self) -> int:
        """What torch may reserve: `gpu_memory_bytes` less `outside_torch_bytes`."""
        return self.gpu_memory_bytes - self.outside_torch_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """As predicted or measured."""
        return self.peak_range.peak_allocated_bytes

    @property
    def can_be_helped(self) -> bool:
        """Whether the step does not fit, and other settings might: they cannot lower what it starts with."""
        return self.verdict == "does not fit" and self.start_bytes <= self.limit_bytes

    @property
    def is_fragmented(self) -> bool:
        """Whether the peak is within the limit, and the step does not fit."""
        return self.verdict == "does not fit" and self.margin_bytes >= 0

    @property
    def margin_bytes(self) -> int:
        """What is left at the predicted peak; negative if the step is short by so much."""
        return self.limit_bytes - self.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        alternatives = [asdict(choice) | {"settings": choice.settings.to_dict()} for choice in self.alternatives]
        derived = {name: getattr(self, name) for name in ("fits", "margin_bytes", "peak_allocated_bytes")}
        derived |= {"peak_range": self.peak_range.to_dict()}
        return asdict(self) | derived | {"alternatives": alternatives}

    def __str__(self) -> str:
        size, outside = format_bytes(self.gpu_memory_bytes), format_bytes(self.outside_torch_bytes)
        margin = verdict_margin(self.verdict, self.limit_bytes, self.peak_range)
        if self.certain_bytes is not None:
            margin += (
                f"; the step is sure to complete with {format_bytes(self.certain_bytes)}, which is all that torch "
                "reserves without a limit, and what measured steps needed more"
            )
            if self.verdict == "fits":
                margin += f": {format_bytes(self.limit_bytes - self.certain_bytes)} to spare even so"
        if self.verdict_with_most_outside == self.verdict:
            return f"{self.verdict} {size} minus about {outside} outside torch{margin}; based on {self.basis}"
        with_most = self.verdict_with_most_outside
        less = verdict_margin(with_most, self.gpu_memory_bytes - self.most_outside_torch_bytes, self.peak_range)
        most = f"{with_most} if they take {format_bytes(self.most_outside_torch_bytes)}, the most that is likely{less}"
        return (
            f"{self.verdict} {size} if CUDA and NCCL take {outside}, as expected{margin}; {most}; based on {self.basis}"
        )


def verdict_margin(verdict: Verdict, limit_bytes: int, peak: PeakRange) -> str:
    """Says by how much a step fits or not, after the words of its verdict."""
    short_bytes = peak.peak_allocated_bytes - limit_bytes
    if verdict == "does not fit":
        if short_bytes <= 0:
            return ": the peak fits, but fragmentation leaves no block large enough"
        if peak.less_bytes:
            return (
                f": even the lower end of its peak ({peak}) is short by {format_bytes(peak.lower_bytes - limit_bytes)}"
            )
        return f": short by {format_bytes(short_bytes)} of allocated bytes"
    if peak.is_exact:
        why = ": the step may need more than predicted, and not every free byte can be used"
        less = f', not enough for "fits"{why}' if verdict == "may fit" else ""
        return f", with {format_bytes(-short_bytes)} to spare{less}"
    if verdict == "may fit":
        return f": its peak is {peak}, and torch can have {format_bytes(limit_bytes)}"
    return f", with {format_bytes(limit_bytes - peak.upper_bytes)} to spare at the upper end of its peak ({peak})"


def basis_of(scenario: Scenario, backend: str = "simulated", *, is_measured: bool = False) -> str:
    """Says what a verdict on a step is based on, and which routing a prediction assumes.

    Args:
        backend: Name of the backend whose step was predicted or measured: ``cpu``, or else a GPU's.
    """
    if is_measured:
        place = "a GPU" if KINDS[backend].has_allocator else "this CPU; it says nothing about a GPU"
        return f"a step that was measured on {place}"
    if not KINDS[backend].has_allocator:
        routing = f" with {scenario.routing} routing" if scenario.architecture.routes else ""
        return f"a step that was predicted for this CPU{routing}; it says nothing about a GPU"
    margin = measured_margin(scenario)
    routing = f" with {scenario.routing} routing" if scenario.architecture.routes else ""
    needed = f"{margin.steps} needed up to {margin.share:.1%} more than predicted (rounded up)"
    if scenario.architecture.routes and scenario.layout.expert_model_parallel_size > 1:
        needed += ", depending on their routers"
    if needs_whole_reserve(scenario):
        needed += '; with several micro-batches, "fits" includes all that torch reserves without a limit'
    kept = '; "fits" includes all that torch may keep of FP8 gathers' if keeps_fp8_gathers(scenario) else ""
    read = "; what DeepEP or HybridEP allocates is as read in its source, and was not measured"
    tower = scenario.state.vision_tower
    # Windows of a tower are those of images of one shape, which no option gives.
    near_square = "; images are as near to a square as their number of patches allows"
    images = near_square if tower and "window_size" in VISION_TOWERS[tower].config else ""
    return f"a predicted step{routing}{images}; {needed}{kept}{read if exchange_buffers(scenario).most_bytes else ''}"


class FitInterrupted(Interrupted[Fit]):
    """Ctrl-C after the verdict, while alternatives are predicted."""


def judge_fit(
    record: StepRecord,
    steps: Steps,
    gpu_memory_bytes: int,
    *,
    on_verdict: Callable[[], None] = lambda: None,
) -> Fit:
    """Compares a step with a GPU's memory, and where it does not fit, predicts what would.

    For the arguments see `judge_step`; `on_verdict` is called before anything else is predicted.

    Raises:
        FitInterrupted: At Ctrl-C, once there is a verdict.
    """
    fit = judge_step(record, steps, gpu_memory_bytes)
    on_verdict()
    return with_alternatives(fit, record, steps)


def judge_step(
    record: StepRecord, steps: Steps, gpu_memory_bytes: int, not_modelled: Sequence[NotModelled] = ()
) -> Fit:
    """Compares a step with a GPU's memory, and leaves open what else would fit.

    Args:
        record: A step that finished.
        steps: Takes further steps of the same scenario.
        gpu_memory_bytes: Of the whole GPU.
    """
    outside = outside_torch_of(record.scenario)
    limit_bytes = gpu_memory_bytes - outside.total_bytes
    is_measured = not KINDS[record.backend].is_prediction

    peak = PeakRange.of(record, not_modelled)

    def verdict_within(bytes_for_torch: int) -> Verdict:
        return judge(record, steps, bytes_for_torch, peak)

    verdict = verdict_within(limit_bytes)
    may_be_less = verdict != "does not fit" and outside.most_bytes > outside.total_bytes
    with_most = verdict_within(gpu_memory_bytes - outside.most_bytes) if may_be_less else verdict
    return Fit(
        gpu_memory_bytes=gpu_memory_bytes,
        outside_torch_bytes=outside.total_bytes,
        most_outside_torch_bytes=outside.most_bytes,
        peak_range=peak,
        start_bytes=max(0, record.static_bytes - record.residual_bytes - peak.less_bytes),
        verdict=verdict,
        verdict_with_most_outside=with_most,
        basis=basis_of(record.scenario, record.backend, is_measured=is_measured),
        certain_bytes=_certain_bytes(record, peak, limit_bytes) if verdict != "does not fit" else None,
    )


def with_alternatives(
    fit: Fit,
    record: StepRecord,
    steps: Steps,
    not_modelled: Sequence[NotModelled] = (),
    *,
    is_allowed: Callable[[MemorySettings], bool] = lambda settings: True,
) -> Fit:
    """Predicts what would fit, where a step does not.

    Args:
        steps: As for `judge_step`. A step that they stop ends the search; it and the others were not tried.
        is_allowed: Says which settings may be proposed.

    Raises:
        FitInterrupted: At Ctrl-C.
    """
    if not fit.can_be_helped or record.forward_only:
        return fit
    own, *choices = candidates(record.settings, record.scenario, depth=1, with_remedy=record.residual_bytes > 0)
    assert own == record.settings
    # Micro-batches with offload are not replayed: those settings may take the time of all others.
    choices = sorted(filter(is_allowed, choices), key=lambda settings: len(settings.offload_modules or ()))
    left = list(choices)
    found: list[Alternative] = []
    try:
        for each in _alternatives(left, steps, fit.limit_bytes, not_modelled):
            found += each
            left.pop(0)
    except KeyboardInterrupt:
        raise FitInterrupted(replace(fit, alternatives=_by_cost(found))) from None
    return replace(
        fit,
        alternatives=_by_cost(found),
        not_tried=(*fit.not_tried, *map(str, left)),
        num_tried=len(choices) - len(left),
    )


def _certain_bytes(record: StepRecord, peak: PeakRange, limit_bytes: int) -> int | None:
    """Returns with which limit the step is sure to complete; None unless its upper end is within this limit."""
    if not (peak.is_predicted and _needs_whole_reserve(record)) or peak.may_be_higher or peak.may_be_lower:
        return None
    reserved = _most_reserved_bytes(record) + peak.more_bytes
    certain = round(reserved * (1 + measured_margin(record.scenario).share))
    return certain if peak.upper_bytes <= limit_bytes else None


def _needs_whole_reserve(record: StepRecord) -> bool:
    return needs_whole_reserve(record.scenario) or record.late_free_bytes > 0


def _most_reserved_bytes(record: StepRecord) -> int:
    return (record.peak_reserved_bytes or 0) + record.late_free_bytes


def _by_cost(alternatives: list[Alternative]) -> tuple[Alternative, ...]:
    return tuple(sorted(alternatives, key=lambda one: (one.recomputed_operations, one.transferred_bytes)))


def _alternatives(
    choices: Sequence[MemorySettings], steps: Steps, limit_bytes: int, not_modelled: Sequence[NotModelled]
) -> Iterator[list[Alternative]]:
    """Takes a step under each of the settings until one is stopped; yields an alternative if it fits or may fit."""
    for settings in tuple(choices):
        other = steps(settings)
        if other.status == "interrupted":
            return
        verdict = judge(other, steps, limit_bytes, PeakRange.of(other, not_modelled))
        fitting = Alternative(
            settings=settings,
            verdict=verdict,
            peak_allocated_bytes=other.peak_allocated_bytes,
            recomputed_operations=recomputed_operations(settings, other.scenario),
            transferred_bytes=transferred_bytes(other),
        )
        yield [] if verdict == "does not fit" else [fitting]


def judge(record: StepRecord, steps: Steps, limit_bytes: int, peak: PeakRange | None = None) -> Verdict:
    """Returns the verdict on a step within a limit.

    Args:
        record: Of the step, without a limit.
        steps: Says whether the step completes within a limit.
        peak: Both ends of the step's peak; None is that of a step whose job memlab models as a whole.
    """
    if record.status != "ok":
        return "does not fit"
    peak = peak or PeakRange.of(record)
    least_bytes = limit_with_margin(limit_bytes, record.scenario) if peak.is_predicted else limit_bytes
    least_bytes -= peak.more_bytes
    is_doubtful = peak.is_predicted and _needs_whole_reserve(record)
    is_certain = not is_doubtful or _most_reserved_bytes(record) <= least_bytes
    # Where later steps find other blocks, a step may complete within a limit and fail within a larger one.
    both = (least_bytes, limit_bytes - peak.more_bytes) if further_steps_of(record.scenario) else (least_bytes,)
    if not peak.may_be_higher and is_certain and all(fits(record, steps, each) for each in both):
        return "fits"
    if peak.may_be_lower:
        return "may fit"
    # Without what causes take, blocks are others than in the predicted step: only the lower end itself is certain.
    fits_lower = peak.lower_bytes <= limit_bytes if peak.less_bytes else fits(record, steps, limit_bytes)
    return "may fit" if fits_lower else "does not fit"


def judge_phases(phases: JobPhases, peak: PeakRange) -> Verdict:
    """Returns the verdict on the phases of a job, whose bytes are known as well as the peak of its training step.

    Args:
        phases: On a GPU of known size.
        peak: Both ends of the peak of the training step.
    """
    left = [phase.left_for_engine_bytes if phase.left_bytes is None else phase.left_bytes for phase in phases.phases]
    least_left = min((num_bytes for num_bytes in left if num_bytes is not None), default=0)
    if least_left < 0:
        return "may fit" if peak.may_be_lower or least_left + peak.less_bytes >= 0 else "does not fit"
    most = peak.more_bytes + phases.late_free_bytes
    is_certain = phases.fits is True and not peak.may_be_higher and least_left >= most
    return "fits" if is_certain else "may fit"


def fits(record: StepRecord, steps: Steps, limit_bytes: int) -> bool:
    """Whether a step completes if torch may reserve `limit_bytes`. With less than it allocated, it never does.

    The peak of a step that did not finish is only a lower bound, so such a step never counts as fitting.
    """
    if record.status != "ok" or record.peak_allocated_bytes > limit_bytes:
        return False
    return record.peak_reserved_bytes is None or steps.completes(record, limit_bytes)


def completes_in_any_case(record: StepRecord, limit_bytes: int) -> bool:
    """Whether a step completes within a limit, whatever it requests.

    The first predicted step of a lab that reserved no more has completed within the limit already.
    """
    if record.peak_reserved_bytes is None or record.peak_reserved_bytes > limit_bytes:
        return False
    return record.step_index == 1 and KINDS[record.backend].is_prediction and not further_steps_of(record.scenario)


def transferred_bytes(record: StepRecord) -> int:
    """Returns what a step and the pause after it copy to the host and back; gradients are dropped, not copied."""
    groups = record.offloaded_bytes_by_group
    between_steps = sum(size for name, size in groups.items() if name != "gradients")
    return sum(record.offloaded_bytes_by_module.values()) + between_steps
