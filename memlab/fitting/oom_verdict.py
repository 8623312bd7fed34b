"""Says of a step that ran out of memory why it did, and what would have been the cheapest way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memlab.fitting.suggestions import choices, expected_peak_bytes, retained_bytes
from memlab.record.out_of_memory import OutOfMemory, Suggestion, Verdict
from memlab.record.step_record import StepRecord
from memlab.units import GIB, format_bytes

USUAL_OUTSIDE_BYTES = 4 * GIB
"""What a job's own CUDA context, NCCL and libraries hold beside torch: 2.4 to 3.9 GiB a rank on H200s."""


def judge(record: StepRecord, records: Sequence[StepRecord]) -> StepRecord:
    """Gives a step that ran out of memory its verdict; any other record comes back as it is.

    The first of these that holds:

    - ``outside torch``: CUDA had less left than was asked for, what torch may hold would have been enough, and what
      others hold beyond `USUAL_OUTSIDE_BYTES` is the difference.
    - ``fragmentation``: what is not allocated is at least what was asked for, and no free block is that large, while
      the whole step would have found room in one piece.
    - ``retention``: what was alive from before the step and is none of parameters, gradients, optimizer state and
      workspaces (in backward: up to what earlier steps under these settings left) would have made the room that the
      whole step lacks.
    - ``spike``: a shorter step under the same settings fitted into this room; or some other setting fits, so it is the
      activations that are too many.
    - ``capacity``: no setting that is known fits: the static bytes and the least activations are more than there is.

    Args:
        record: The step.
        records: The lab's earlier steps; they are read for what fitted, and for what other settings need.

    Returns:
        The record with verdict, evidence, advice and suggestion in its `OutOfMemory`, and all of it as its message.
    """
    refused = record.out_of_memory
    if refused is None:
        return record
    records = [known for known in records if known.forward_only == record.forward_only]
    known = choices(record, records)
    room = refused.failed_allocation.step_room_bytes
    suggestion = next((choice for choice in known if choice.peak_bytes <= room), None)
    least = min(known, key=lambda choice: choice.peak_bytes, default=None)
    verdict, evidence = (
        _outside(refused)
        or _fragmentation(record, records)
        or _retention(record, records)
        or _spike(record, records, suggestion)
        or _capacity(refused, least)
    )
    advice = _advice(verdict, suggestion)
    judged = replace(refused, verdict=verdict, evidence=evidence, advice=advice, suggestion=suggestion)
    return replace(record, out_of_memory=judged, message=f"{verdict} in {_request(refused)}: {evidence}. {advice}")


_Found = tuple[Verdict, str] | None


def _outside(refused: OutOfMemory) -> _Found:
    refusal = refused.failed_allocation
    if refusal.device_free_bytes is None or refusal.outside_bytes is None or refusal.reserved_bytes is None:
        return None
    lacking = refusal.requested_bytes - refusal.device_free_bytes
    within_limit = refusal.reserved_bytes + refusal.requested_bytes <= refusal.limit_bytes
    if not within_limit or not 0 < lacking <= refusal.outside_bytes - USUAL_OUTSIDE_BYTES:
        return None
    return "outside torch", (
        f"CUDA had {format_bytes(refusal.device_free_bytes)} left, torch had reserved "
        f"{format_bytes(refusal.reserved_bytes)}, and something else holds {format_bytes(refusal.outside_bytes)} of "
        "the device"
    )


def _fragmentation(record: StepRecord, records: Sequence[StepRecord]) -> _Found:
    assert record.out_of_memory is not None
    refusal = record.out_of_memory.failed_allocation
    largest, unused = refusal.largest_free_bytes, refusal.unused_reserved_bytes
    not_allocated = refusal.step_room_bytes - refusal.allocated_bytes - refusal.pending_free_bytes
    if largest is None or not largest < refusal.requested_bytes <= not_allocated:
        return None
    if expected_peak_bytes(record, records) > refusal.step_room_bytes:
        return None
    more = f", and {format_bytes(not_allocated - unused)} are not reserved" if not_allocated > unused else ""
    return "fragmentation", (
        f"{format_bytes(unused)} of {format_bytes(refusal.reserved_bytes or 0)} reserved are unused, in pieces of at "
        f"most {format_bytes(largest)}{more}"
    )


def _retention(record: StepRecord, records: Sequence[StepRecord]) -> _Found:
    refused = record.out_of_memory
    assert refused is not None
    kept = retained_bytes(record, records)
    lacking = max(
        refused.failed_allocation.missing_bytes,
        expected_peak_bytes(record, records) - refused.failed_allocation.step_room_bytes,
    )
    if not 0 < lacking <= kept:
        return None
    if kept > refused.retained_bytes:
        return "retention", (
            f"earlier steps under these settings left {format_bytes(kept)} that nobody needs, {format_bytes(lacking)} "
            "were lacking"
        )
    largest = next(iter(refused.retained_by_module)) or "something outside the model"
    return "retention", (
        f"{format_bytes(kept)} from before the step were still alive and are no state of the training, most of it of "
        f"{largest}; {format_bytes(lacking)} were lacking"
    )


def _spike(record: StepRecord, records: Sequence[StepRecord], suggestion: Suggestion | None) -> _Found:
    refused = record.out_of_memory
    assert refused is not None
    tokens, room = (
        record.scenario.tokens_per_step // record.scenario.num_microbatches,
        refused.failed_allocation.step_room_bytes,
    )
    made = format_bytes(sum(refused.activations_by_module.values()))
    shorter = [
        known
        for known in records
        if known.status == "ok"
        and known.settings == record.settings
        and known.scenario.tokens_per_step // known.scenario.num_microbatches < tokens
        and known.peak_allocated_bytes <= room
    ]
    if shorter:
        longest = max(shorter, key=lambda known: known.peak_allocated_bytes)
        fitted = longest.scenario.tokens_per_step // longest.scenario.num_microbatches
        return "spike", (
            f"{tokens:,} tokens in a micro-batch, and {made} of activations so far; {fitted:,} tokens fitted, with "
            f"{format_bytes(longest.activation_peak_bytes)}"
        )
    if suggestion is None:
        return None
    return "spike", f"{made} of activations above {format_bytes(refused.static_bytes)} that every step needs"


def _capacity(refused: OutOfMemory, least: Suggestion | None) -> tuple[Verdict, str]:
    static, room = refused.static_bytes, format_bytes(refused.failed_allocation.step_room_bytes)
    if least is None:
        return "capacity", (
            f"parameters, gradients, optimizer state and workspaces take {format_bytes(static)} of {room}, and no "
            f"setting lowers what {refused.failed_allocation.phase} adds"
        )
    return "capacity", (
        f"{format_bytes(static)} for parameters, gradients, optimizer state and workspaces, and a peak of at least "
        f"{format_bytes(least.peak_bytes)} even under '{least.settings}', with room for {room}"
    )


def _request(refused: OutOfMemory) -> str:
    refusal = refused.failed_allocation
    allocated = f"{format_bytes(refusal.allocated_bytes)} of {format_bytes(refusal.limit_bytes)} allocated"
    return f"{refusal.place}, {format_bytes(refusal.requested_bytes)} asked for with {allocated}"


def _advice(verdict: Verdict, suggestion: Suggestion | None) -> str:
    cause = {
        "outside torch": "Free it (nvidia-smi names processes)",
        "fragmentation": "Start Python anew with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "retention": "Let go of it (lab.retained() names what modules hold)",
    }.get(verdict)
    if suggestion is not None:
        peak = format_bytes(suggestion.peak_bytes)
        is_seen = suggestion.source == "measured"
        fits = f"fits (measured: {peak})" if is_seen else f"may fit (estimated, saves at most down to {peak})"
        return (
            f"{cause}, or else '{suggestion.settings}' {fits}" if cause else f"Cheapest: '{suggestion.settings}' {fits}"
        )
    if cause:
        return f"{cause}: none of the known settings fits beside it"
    smaller = "bound the longest batch" if verdict == "spike" else "shorten the batch, cut layers, or take more devices"
    return f"None of the known settings fits: {smaller}"
