"""Which settings would have fitted where a step ran out of memory, the cheapest first.

What a lab has measured goes before what is reckoned. Reckoned is a bound: a setting frees at most what was alive and
was born where it acts, and adds at least what backward makes again at one time. So one that is proposed may still turn
out not to fit; its own record then says so, and the next proposal is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.settings_on_model import check_on_model, checkpoints_moe_layers, without_effect
from memlab.fitting.bounds import (
    OFFLOADED,
    RECOMPUTED,
    Born,
    born_in_layers,
    born_in_whole_step,
    checkpoint_bytes,
    num_checkpoints,
    offloaded_bytes,
    recomputed_bytes,
    recomputed_operations,
)
from memlab.fitting.candidates import supersets
from memlab.record.out_of_memory import OutOfMemory, Suggestion
from memlab.record.step_record import StepRecord

_LOGITS_BYTES = 6
"""A token and word of the vocabulary, at least: the logits in bf16, and in fp32 for the loss."""

Cost = tuple[float, int]
"""Operations that are made twice, bytes that move."""


def choices(record: StepRecord, records: Sequence[StepRecord]) -> list[Suggestion]:
    """Reckons the peak that a step which ran out of memory would have had under other settings.

    Args:
        record: The step, with its `OutOfMemory`.
        records: The lab's earlier steps.

    Returns:
        Each setting once: those that were measured at this workload, then the others; each by cost, first what
        recomputes nothing, then by recomputed operations and by bytes that move. None of them is refused by
        `MemorySettings` or known to be without effect here, and none ran out of memory itself with as much room.
    """
    measured = dict(_measured(record, records))
    skip = {choice.settings for choice in measured} | _known_too_large(record, records)
    reckoned = {choice: cost for choice, cost in _reckoned(record, records) if choice.settings not in skip}
    return [*sorted(measured, key=measured.__getitem__), *sorted(reckoned, key=reckoned.__getitem__)]


def expected_peak_bytes(record: StepRecord, records: Sequence[StepRecord]) -> int:
    """Returns the least that the whole step would have needed under its own settings."""
    refused = _evidence(record)
    return max(_refused_bytes(refused), *_needs(record, records, born_in_whole_step(refused, record.scenario)))


def retained_bytes(record: StepRecord, records: Sequence[StepRecord]) -> int:
    """Returns the most that was kept alive and that nobody needed when a step ran out of memory.

    In forward it is what was there at the step's start and still alive. Backward leaves the same anew, layer after
    layer: there it is up to what earlier steps under the same settings left.
    """
    refused = _evidence(record)
    repeats = (known for known in records if _fitted_with(known, record.scenario, record.settings))
    left = [known.residual_bytes for known in repeats if refused.failed_allocation.phase not in ("load", "forward")]
    return max([refused.retained_bytes, *left])


def _measured(record: StepRecord, records: Sequence[StepRecord]) -> Iterator[tuple[Suggestion, Cost]]:
    for known in records:
        settings = known.settings
        if settings == record.settings or known.without_effect or not _fitted_with(known, record.scenario, settings):
            continue
        peak = known.peak_allocated_bytes + _foreign_bytes(_evidence(record))
        moved = sum(known.offloaded_bytes_by_module.values()) + sum(known.offloaded_bytes_by_group.values())
        choice = Suggestion(settings=settings, peak_bytes=peak, source="measured")
        yield choice, (recomputed_operations(settings, known.scenario), moved)


def _known_too_large(record: StepRecord, records: Sequence[StepRecord]) -> set[MemorySettings]:
    room = _evidence(record).failed_allocation.step_room_bytes
    refused = (known for known in records if known.scenario == record.scenario and known.out_of_memory is not None)
    return {record.settings} | {
        known.settings for known in refused if _evidence(known).failed_allocation.step_room_bytes >= room
    }


def _reckoned(record: StepRecord, records: Sequence[StepRecord]) -> Iterator[tuple[Suggestion, Cost]]:
    refused, scenario = _evidence(record), record.scenario
    if refused.failed_allocation.phase not in ("forward", "backward"):
        return  # what does not fit there are the static bytes and what the optimizer adds
    at_refusal = born_in_layers(refused.activations_by_module, scenario)
    whole = born_in_whole_step(refused, scenario)
    needs = _needs(record, records, whole)
    for settings in _candidates(record, records):
        frees = _freed(settings, whole, record, records)
        again = recomputed_bytes(settings, whole, scenario) // num_checkpoints(settings, scenario)
        # The first layers are recomputed last, when the others' backward has freed what they held.
        again = 0 if settings.recompute_method == "block" else again // scenario.most_passes_in_flight
        peak = max(
            _refused_bytes(refused) - _freed(settings, at_refusal, record, records),
            *(need - frees for need in needs),
            refused.static_bytes + sum(whole.values()) - frees + again,
        )
        elsewhere = [_peak_at(scenario, known) for known in records if known.settings == settings]
        if any(elsewhere):
            peak = max(elsewhere) + _foreign_bytes(refused)
        if frees > 0:
            cost = recomputed_operations(settings, scenario), offloaded_bytes(settings, whole, scenario)
            yield Suggestion(settings=settings, peak_bytes=peak, source="estimated, at most"), cost


def _freed(settings: MemorySettings, born: Born, record: StepRecord, records: Sequence[StepRecord]) -> int:
    again = recomputed_bytes(settings, born, record.scenario)
    freed = again + offloaded_bytes(settings, born, record.scenario) - checkpoint_bytes(settings, born, record.scenario)
    adds_remedy = settings.checkpoint_input_remedy not in (None, record.settings.checkpoint_input_remedy)
    return freed + (retained_bytes(record, records) if adds_remedy else 0)


def _refused_bytes(refused: OutOfMemory) -> int:
    refusal = refused.failed_allocation
    return refusal.allocated_bytes + refusal.pending_free_bytes + refusal.requested_bytes


def _needs(record: StepRecord, records: Sequence[StepRecord], whole: Born) -> list[int]:
    """Returns bounds from below of the step's peak under its own settings, beside the moment that was refused.

    The first is of the loss, where all layers' activations and the logits are alive; the others are what the same
    settings needed in other steps, in proportion to the tokens.
    """
    refused, scenario = _evidence(record), record.scenario
    made = refused.activations_by_module
    others = sum(made.values()) - sum(born_in_layers(made, scenario).values())
    sees_loss = scenario.layout.pipeline_stage == scenario.layout.pipeline_model_parallel_size - 1
    before_loss = refused.failed_allocation.module.startswith(("decoder.layers", "embedding"))
    if sees_loss and refused.failed_allocation.phase == "forward" and before_loss:
        others += scenario.tokens_of_rank * scenario.architecture.vocab_size * _LOGITS_BYTES
    peaks = [_peak_at(scenario, known) for known in records if known.settings == record.settings]
    at_loss = refused.static_bytes + sum(whole.values()) + others
    return [at_loss, *(peak + _foreign_bytes(refused) for peak in peaks if peak)]


def _peak_at(scenario: Scenario, known: StepRecord) -> int:
    """Reckons a known step's peak at another workload; 0 where the two cannot be held against each other."""
    workload = ("seq_length", "micro_batch_size", "num_microbatches", "seed")
    moved = replace(known.scenario, **{name: getattr(scenario, name) for name in workload})
    if known.status != "ok" or moved != scenario or known.offloaded_bytes_by_group:
        return 0
    longer = scenario.tokens_of_rank / known.scenario.tokens_of_rank
    return max(known.peak_allocated_bytes, known.static_bytes + int(known.activation_peak_bytes * longer))


def _candidates(record: StepRecord, records: Sequence[StepRecord]) -> Iterator[MemorySettings]:
    """Yields settings that do all that the step's did, and more of it.

    Nothing that waits on the host between steps alone: within a step everything is back on the device.
    """
    settings, scenario = record.settings, record.scenario
    model, is_full = scenario.architecture, settings.recompute_granularity == "full"
    too_small = scenario.tokens_of_rank * model.hidden_size < settings.min_offloaded_tensor_size
    smallest = 0 if too_small else settings.min_offloaded_tensor_size
    offloads = [
        {"offload_modules": modules, "min_offloaded_tensor_size": smallest}
        for modules in supersets(settings.offload_modules, OFFLOADED)
        if not is_full
    ]
    selective = [
        {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in supersets(settings.recompute_modules, RECOMPUTED)
        if not is_full
    ]
    wanted: list[dict[str, Any]] = [*offloads, *selective, *_whole_layers(settings, scenario)]
    wanted += [one | other for one in selective for other in offloads]
    if checkpoints_moe_layers(settings, model) and settings.checkpoint_input_remedy is None:
        wanted.append({"checkpoint_input_remedy": "detach"})
    seen = (known for known in records if known.scenario == scenario)
    idle = {
        name for known in seen if known.settings.min_offloaded_tensor_size <= smallest for name in known.without_effect
    }
    before = {f"offload_modules:{name}" for name in settings.offload_modules or ()}
    for values in wanted:
        candidate = _allowed(settings, values, scenario)
        if candidate is None:
            continue
        modules = {f"offload_modules:{name}" for name in candidate.offload_modules or ()}
        adds_nothing = without_effect(candidate, model).keys() - without_effect(settings, model).keys()
        if not adds_nothing and not (modules - before) & idle:
            yield candidate


def _whole_layers(settings: MemorySettings, scenario: Scenario) -> Iterator[dict[str, Any]]:
    if settings.recompute_method == "uniform":
        return
    full = {"recompute_granularity": "full", "recompute_modules": None}
    for count in range((settings.recompute_num_layers or 0) + 1, scenario.num_layers_of_chunk):
        yield full | {"recompute_method": "block", "recompute_num_layers": count}
    yield full | {"recompute_method": "uniform", "recompute_num_layers": 1}


def _allowed(settings: MemorySettings, values: dict[str, Any], scenario: Scenario) -> MemorySettings | None:
    try:
        candidate = replace(settings, **values)
        check_on_model(candidate, scenario)
    except ValueError:
        return None  # a rule of the settings: this is no choice
    return candidate


def _fitted_with(known: StepRecord, scenario: Scenario, settings: MemorySettings) -> bool:
    return known.status == "ok" and (known.scenario, known.settings) == (scenario, settings)


def _foreign_bytes(refused: OutOfMemory) -> int:
    """Returns what was there from before the step and no module of the model made: it stays, whatever is set."""
    return refused.retained_by_module.get("", 0)


def _evidence(record: StepRecord) -> OutOfMemory:
    assert record.out_of_memory is not None
    return record.out_of_memory
