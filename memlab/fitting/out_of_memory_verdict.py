"""Why a step ran out of memory, and the cheapest way to make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memlab.allocator.rules import SMALL_REQUEST_BYTES
from memlab.fitting.estimate import StepEstimate
from memlab.fitting.suggestions import suggestions
from memlab.record.out_of_memory import FailedAllocation, Suggestion, Verdict
from memlab.record.step_record import StepRecord
from memlab.units import GIB, format_bytes

USUAL_OUTSIDE_BYTES = 4 * GIB
"""What a job's own CUDA context, NCCL and libraries hold outside torch: 2.4 to 3.9 GiB per rank on H200s."""

_MODULES_OF_THE_LOSS = ("gpt_model", "fp32_output", "loss")
"""Megatron computes the cross entropy in the GPTModel, outside its inner modules."""
_USUAL_CHUNK_SIZE = 1024
"""SkyRL's default."""


def judge(record: StepRecord, earlier_records: Sequence[StepRecord]) -> StepRecord:
    """Gives a step that ran out of memory its verdict; any other record comes back unchanged.

    The first of these that holds:

    - ``outside torch``: CUDA had less left than was requested, what torch may hold would have been enough, and what
      others hold beyond `USUAL_OUTSIDE_BYTES` is the difference.
    - ``fragmentation``: what is not allocated is at least what was requested, no free block that the request may take
      is that large, and the whole step would have fitted without gaps.
    - ``retention``: what was allocated before the step and is not parameters, gradients, optimizer state or workspaces
      (in backward: up to what earlier steps under these settings left) is at least what the whole step is short by.
    - ``spike``: a shorter step under the same settings fitted into this memory; or some other setting fits, so it is
      the activations that are too many.
    - ``capacity``: no setting that is known fits: the static bytes and the least activations exceed the memory.

    Args:
        earlier_records: Of the lab: they show what fitted, and what other settings need.

    Returns:
        The record with verdict, evidence, advice and suggestion in its `OutOfMemory`, and all of it as its message.
    """
    failure = record.out_of_memory
    if failure is None:
        return record
    comparable = [
        known
        for known in earlier_records
        if known.forward_only == record.forward_only and known.scenario.state == record.scenario.state
    ]
    estimate = StepEstimate(record, comparable)
    known = suggestions(estimate)
    suggestion = next((choice for choice in known if choice.peak_bytes <= estimate.limit_bytes), None)
    least = min(known, key=lambda choice: choice.peak_bytes, default=None)
    verdict, evidence = (
        _outside(failure.failed_allocation)
        or _fragmentation(estimate)
        or _retention(estimate)
        or _spike(estimate, suggestion)
        or _capacity(estimate, least)
    )
    advice = _advice(verdict, suggestion, has_expandable_segments=record.scenario.allocator.expandable_segments)
    judged = replace(failure, verdict=verdict, evidence=evidence, advice=advice, suggestion=suggestion)
    message = f"{verdict} in {_request(failure.failed_allocation)}: {evidence}. {advice}"
    return name_smaller_loss(replace(record, out_of_memory=judged, message=message))


def name_smaller_loss(record: StepRecord) -> StepRecord:
    """Adds to a step that ran out of memory in the loss which option of the training state makes the loss smaller.

    Any other record comes back unchanged, as does one whose loss does not copy all logits in fp32.
    """
    failure, state = record.out_of_memory, record.scenario.state
    if failure is None or failure.failed_allocation.module not in _MODULES_OF_THE_LOSS:
        return record
    if not state.copies_logits_in_fp32:
        return record
    if state.loss == "cross_entropy":
        option = "cross_entropy_loss_fusion and cross_entropy_fusion_impl 'te'"
    elif state.can_copy_chunks_of_logits:
        option = f"logprobs_chunk_size {_USUAL_CHUNK_SIZE}"
    else:
        return record
    smaller = f"The loss copies all logits in fp32; with {option} it does not"
    advice = f"{failure.advice}. {smaller}" if failure.advice else smaller
    return replace(record, out_of_memory=replace(failure, advice=advice), message=f"{record.message}. {smaller}")


_Found = tuple[Verdict, str] | None


def _outside(failed: FailedAllocation) -> _Found:
    if failed.device_free_bytes is None or failed.outside_bytes is None or failed.reserved_bytes is None:
        return None
    short_by = failed.requested_bytes - failed.device_free_bytes
    within_limit = failed.reserved_bytes + failed.requested_bytes <= failed.limit_bytes
    if not within_limit or not 0 < short_by <= failed.outside_bytes - USUAL_OUTSIDE_BYTES:
        return None
    return "outside torch", (
        f"CUDA had {format_bytes(failed.device_free_bytes)} left, torch had reserved "
        f"{format_bytes(failed.reserved_bytes)}, and something else holds {format_bytes(failed.outside_bytes)} of "
        "the device"
    )


def _fragmentation(estimate: StepEstimate) -> _Found:
    failed = estimate.failure.failed_allocation
    largest, unused = failed.largest_free_bytes, failed.unused_reserved_bytes
    not_allocated = estimate.limit_bytes - failed.allocated_bytes - failed.pending_free_bytes
    if largest is None or not largest < failed.requested_bytes <= not_allocated:
        return None
    if estimate.expected_peak_bytes > estimate.limit_bytes:
        return None
    more = f", and {format_bytes(not_allocated - unused)} are not reserved" if not_allocated > unused else ""
    where = f"in blocks of at most {format_bytes(largest)}"
    if not largest:
        where = "but no block that the request may take is free"
    elif failed.requested_bytes <= SMALL_REQUEST_BYTES:
        where = (
            f"of which the largest free block is {format_bytes(largest)} in the segments that torch keeps for requests "
            f"of at most {format_bytes(SMALL_REQUEST_BYTES)}"
        )
    return "fragmentation", (
        f"{format_bytes(unused)} of {format_bytes(failed.reserved_bytes or 0)} reserved are unused, {where}{more}"
    )


def _retention(estimate: StepEstimate) -> _Found:
    failure, kept = estimate.failure, estimate.retained_bytes
    short_by = max(failure.failed_allocation.missing_bytes, estimate.expected_peak_bytes - estimate.limit_bytes)
    if not 0 < short_by <= kept:
        return None
    if kept > failure.retained_bytes:
        return "retention", (
            f"earlier steps under these settings left {format_bytes(kept)} that no step needs; the step is short by "
            f"{format_bytes(short_by)}"
        )
    largest = next(iter(failure.retained_by_module)) or "something outside the model"
    return "retention", (
        f"{format_bytes(kept)} from before the step are still allocated and are not training state, the largest "
        f"part allocated by {largest}; the step is short by {format_bytes(short_by)}"
    )


def _spike(estimate: StepEstimate, suggestion: Suggestion | None) -> _Found:
    record, failure = estimate.record, estimate.failure
    tokens = _micro_batch_tokens(record)
    allocated = format_bytes(sum(failure.activations_by_module.values()))
    shorter = [
        known
        for known in estimate.earlier_records
        if known.status == "ok"
        and known.settings == record.settings
        and _micro_batch_tokens(known) < tokens
        and known.peak_allocated_bytes <= estimate.limit_bytes
    ]
    if shorter:
        longest = max(shorter, key=lambda known: known.peak_allocated_bytes)
        fitted = _micro_batch_tokens(longest)
        return "spike", (
            f"{tokens:,} tokens in a micro-batch, and {allocated} of activations so far; a step with {fitted:,} "
            f"tokens fitted, and added {format_bytes(longest.activation_peak_bytes)}; this step started at "
            f"{format_bytes(record.static_bytes)}, and the one that fitted at {format_bytes(longest.static_bytes)}"
        )
    if suggestion is None:
        return None
    return "spike", f"{allocated} of activations above {format_bytes(failure.static_bytes)} that every step needs"


def _micro_batch_tokens(record: StepRecord) -> int:
    return record.scenario.seq_length * record.scenario.micro_batch_size


def _capacity(estimate: StepEstimate, least: Suggestion | None) -> tuple[Verdict, str]:
    static, limit = format_bytes(estimate.failure.static_bytes), format_bytes(estimate.limit_bytes)
    if least is None:
        return "capacity", (
            f"parameters, gradients, optimizer state and workspaces take {static} of {limit}, and no setting lowers "
            f"what {estimate.failure.failed_allocation.phase} adds"
        )
    return "capacity", (
        f"{static} for parameters, gradients, optimizer state and workspaces, and a peak of at least "
        f"{format_bytes(least.peak_bytes)} even under '{least.settings}', where the limit is {limit}"
    )


def _request(failed: FailedAllocation) -> str:
    allocated = f"{format_bytes(failed.allocated_bytes)} of {format_bytes(failed.limit_bytes)} allocated"
    return f"{failed.place}, {format_bytes(failed.requested_bytes)} requested with {allocated}"


def _advice(verdict: Verdict, suggestion: Suggestion | None, *, has_expandable_segments: bool) -> str:
    causes = {
        "outside torch": "Free it (nvidia-smi names processes)",
        "retention": "Release it (lab.retained() names what modules hold)",
    }
    if not has_expandable_segments:
        causes["fragmentation"] = (
            "Restart Python with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves less memory unused"
        )
    cause = causes.get(verdict)
    if suggestion is not None:
        peak = format_bytes(suggestion.peak_bytes)
        is_measured = suggestion.source == "measured"
        fits = f"fits (measured: {peak})" if is_measured else f"may fit (estimated: at least {peak})"
        return f"{cause}, or '{suggestion.settings}' {fits}" if cause else f"Cheapest: '{suggestion.settings}' {fits}"
    if cause:
        return f"{cause}: no other known setting fits"
    shorter, less = "limit the length of the longest batch", "take a shorter batch, fewer layers or more devices"
    smaller = shorter if verdict == "spike" else less
    return f"None of the known settings fits: {smaller}"
