"""Which settings would have fitted where a step ran out of memory, the cheapest first.

What a lab has measured goes before what is estimated. An estimate is a bound from below (`StepEstimate`), so a
suggested setting may still not fit; its own record then says so, and the next suggestion is another.
"""

from __future__ import annotations

from collections.abc import Iterator

from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import candidates, smallest_offloaded
from memlab.fitting.estimate import StepEstimate, offloaded_bytes
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.record.out_of_memory import Suggestion

Cost = tuple[float, int]
"""Recomputed FLOPs per token, bytes transferred."""


def suggestions(estimate: StepEstimate) -> list[Suggestion]:
    """Returns the peaks that a step which ran out of memory would have had under other settings.

    Returns:
        Each setting once: those that were measured at this workload, then the others; each by cost, first what
        recomputes nothing, then by recomputed FLOPs and by bytes transferred. None of them is refused by
        `MemorySettings` or known to be without effect here, and none ran out of memory itself with as much memory.
    """
    measured = dict(_measured(estimate))
    skip = {suggestion.settings for suggestion in measured} | _known_too_large(estimate)
    estimated = {choice: cost for choice, cost in _estimated(estimate) if choice.settings not in skip}
    return [*sorted(measured, key=measured.__getitem__), *sorted(estimated, key=estimated.__getitem__)]


def _measured(estimate: StepEstimate) -> Iterator[tuple[Suggestion, Cost]]:
    record = estimate.record
    # What had no effect in this step either does not speak against another setting, nor do the allocator's options:
    # some of them have an effect only with a memory limit.
    same = record.without_effect.keys() | record.scenario.allocator.changed().keys()
    for known in estimate.earlier_records:
        is_other = known.settings != record.settings and known.scenario == record.scenario and known.status == "ok"
        if is_other and not known.without_effect.keys() - same:
            peak = known.peak_allocated_bytes + estimate.outside_model_bytes
            transferred = sum(known.offloaded_bytes_by_module.values()) + sum(known.offloaded_bytes_by_group.values())
            suggestion = Suggestion(settings=known.settings, peak_bytes=peak, source="measured")
            yield suggestion, (recomputed_operations(known.settings, known.scenario), transferred)


def _known_too_large(estimate: StepEstimate) -> set[MemorySettings]:
    """Returns the settings under which a step ran out of memory with as much memory as this one, or more."""
    return {estimate.record.settings} | {
        known.settings
        for known in estimate.earlier_records
        if known.scenario == estimate.record.scenario
        and known.out_of_memory is not None
        and known.out_of_memory.failed_allocation.step_capacity_bytes >= estimate.limit_bytes
    }


def _estimated(estimate: StepEstimate) -> Iterator[tuple[Suggestion, Cost]]:
    settings, scenario = estimate.record.settings, estimate.record.scenario
    if estimate.failure.failed_allocation.phase not in ("forward", "backward"):
        return  # what does not fit there are the static bytes and what the optimizer adds
    idle = _seen_without_effect(estimate)
    own = set(settings.offload_modules or ())
    for candidate in candidates(settings, scenario, with_remedy=True, every_block=True):
        added = set(candidate.offload_modules or ()) - own
        if not estimate.covers(candidate) or added & idle or estimate.freed_bytes(candidate) <= 0:
            continue
        peak = estimate.peak_bytes(candidate)
        cost = recomputed_operations(candidate, scenario), offloaded_bytes(candidate, estimate.whole_step, scenario)
        yield Suggestion(settings=candidate, peak_bytes=peak, source="estimated, at least"), cost


def _seen_without_effect(estimate: StepEstimate) -> set[str]:
    """Returns the offload modules that did nothing in an earlier step, though tensors as small might be offloaded."""
    smallest = smallest_offloaded(estimate.record.settings, estimate.record.scenario)
    names = {
        name
        for known in estimate.earlier_records
        if known.scenario == estimate.record.scenario and known.settings.min_offloaded_tensor_size <= smallest
        for name in known.without_effect
    }
    return {name.removeprefix("offload_modules:") for name in names if name.startswith("offload_modules:")}
