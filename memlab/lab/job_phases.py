"""Predicts the phases of a job of reinforcement learning on one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import outside_torch_of
from memlab.fitting.weight_sync import bytes_of_sync
from memlab.lab.reference_pass import ReferencePeaks
from memlab.lab.search_steps import SimulatedSteps, stepping
from memlab.lab.teacher_pass import TeacherPeaks
from memlab.record.job_phases import JobPhase, JobPhases
from memlab.record.step_record import StepRecord

if TYPE_CHECKING:
    from memlab.lab.progress import Progress

_BYTES_OF_A_WEIGHT = 2
"""Engines take weights in bf16."""


def predict_phases(
    scenario: Scenario,
    settings: MemorySettings,
    rollout: Rollout,
    gpu_memory_bytes: int | None = None,
    *,
    replay: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> JobPhases:
    """Predicts a training step, and its job's phases as `phases_of` does.

    Args:
        scenario: The training steps, on the rank to predict.
        gpu_memory_bytes: Of each GPU; None leaves out what is left.
        on_progress: Called with the progress of the training step.

    Raises:
        ValueError: If memlab refuses the workload of the forward-only pass.
    """
    with stepping(scenario, replay=replay, on_progress=on_progress) as steps:
        return phases_of(steps(settings), steps, rollout, gpu_memory_bytes, replay=replay)


def phases_of(
    trained: StepRecord,
    steps: SimulatedSteps,
    rollout: Rollout,
    gpu_memory_bytes: int | None = None,
    *,
    replay: bool = True,
) -> JobPhases:
    """Predicts the passes between training steps that the job has, and adds up the phases.

    Log-probabilities are a forward-only pass on the model of the training step. A teacher is another model, and so is a
    reference model that has shards of its own: each is on a lab of its own, for which that of the steps is closed.

    A training step begins with loading what is on the host, and ends with offloading it again.

    Args:
        gpu_memory_bytes: Of each GPU; None leaves out what is left.

    Raises:
        ValueError: If memlab refuses the workload of the forward-only pass.
    """
    scenario, settings, passed = trained.scenario, trained.settings, None
    if rollout.computes_log_probabilities:
        passed = steps.pass_after(trained, rollout.of_log_probabilities(scenario))
    between = trained.static_bytes
    away = trained.offloaded_bytes_by_group
    parameters = away.get("parameters", 0)
    # What log-probabilities and weight sync find on the device, beyond what is there between steps.
    loaded = sum(away.values()) if rollout.offloads_for_generation_only else parameters
    synced = 0 if rollout.syncs_from_host else loaded
    reference = trained.peak_by_category["parameters"] if rollout.has_reference_model else 0
    reference_between = 0 if settings.offload_parameters else reference
    outside = outside_torch_of(scenario).total_bytes
    teacher, frozen = _others(trained, passed, steps, rollout, replay=replay)
    outside += frozen.outside_torch_bytes + (0 if teacher is None else teacher.outside_torch_bytes)
    has_weights = rollout.is_colocated and rollout.engine_has_own_weights
    weights = _BYTES_OF_A_WEIGHT * rollout.num_weights_of_engine(scenario) if has_weights else 0
    engine = _engine_bytes(rollout, weights, gpu_memory_bytes)
    # Where a job gives the bytes beside the weights, the engine is Megatron's: it pauses the weights as a whole.
    beside = engine if rollout.engine_bytes is None or engine is None else engine - weights
    asleep = 0 if rollout.engine_sleeps else beside
    of_sync = weights if rollout.engine_sleeps else engine
    generating = between + reference_between
    synced += reference_between if rollout.syncs_from_host else reference
    if rollout.is_colocated and not rollout.engine_has_own_weights:
        generating += parameters
    kept, free = rollout.kept_buffer_bytes, None
    if gpu_memory_bytes is not None and of_sync is not None:
        free = gpu_memory_bytes - outside - between - synced - kept - of_sync
    gathered = _gathered_bytes(scenario, rollout, free)
    left = frozen.left_bytes if teacher is None else teacher.left_bytes
    phases, beside_pass = [_Phase("generation", generating + left, engine)], 0
    if passed is not None:
        freed = sum(passed.peak_by_category.get(name, 0) for name in rollout.freed_for_log_probabilities)
        # What forward leaves gathered, as FSDP1 does the root, is there when the entropy is computed.
        at_least = passed.static_bytes + parameters + _beside_a_pass(passed.scenario, rollout)
        beside_pass = loaded - parameters + reference - freed + left
        held = max(_held_bytes(passed), at_least) + beside_pass
        phases.append(_Phase("log-probabilities", held, asleep, _peaks(passed, at_least)))
    if rollout.reference_pass is not None:
        phases.append(_Phase("reference model", frozen.held_bytes, asleep, frozen.peaks))
    if teacher is not None:
        freed = sum(trained.peak_by_category.get(name, 0) for name in rollout.freed_for_teacher)
        of_teacher = (teacher.allocated_bytes, teacher.active_bytes, teacher.reserved_bytes)
        phases.append(_Phase("teacher's passes", between - freed + teacher.reserved_bytes, asleep, of_teacher))
    phases.append(_Phase("training step", _held_bytes(trained) + reference + left, asleep, _peaks(trained)))
    phases.append(_Phase("weight sync", between + synced + (gathered or 0) + left, of_sync))
    host = max(trained.host_bytes, trained.host_reserved_bytes or 0) + (teacher.host_bytes if teacher else 0)
    late = max(record.late_free_bytes for record in (trained, frozen, passed or trained))
    host += frozen.host_bytes + rollout.host_copies_of_shards * trained.peak_by_category.get("parameters", 0)
    most = _most_with_cached(rollout, trained, passed, frozen, generating + left, (beside_pass, reference + left))
    return JobPhases(
        rank=scenario.layout.rank,
        is_colocated=rollout.is_colocated,
        gpu_memory_bytes=gpu_memory_bytes,
        outside_torch_bytes=outside,
        gathered_bytes=gathered,
        phases=tuple(
            JobPhase(
                name=phase.name,
                training_bytes=phase.num_bytes + kept,
                engine_bytes=phase.engine_bytes,
                left_for_engine_bytes=None
                if gpu_memory_bytes is None
                else gpu_memory_bytes - outside - phase.num_bytes - kept,
                allocated_bytes=phase.peaks[0],
                active_bytes=phase.peaks[1],
                reserved_bytes=phase.peaks[2],
                most_reserved_bytes=most.get(phase.name),
            )
            for phase in phases
        ),
        host_bytes_of_rank=host + reference - reference_between,
        ranks_per_node=min(rollout.ranks_per_node, scenario.layout.world_size),
        reference_bytes=reference,
        late_free_bytes=late,
        kept_buffer_bytes=kept,
        teacher_left_bytes=None if teacher is None else left,
    )


def _others(
    trained: StepRecord, passed: StepRecord | None, steps: SimulatedSteps, rollout: Rollout, *, replay: bool
) -> tuple[TeacherPeaks | None, ReferencePeaks]:
    """Predicts the passes of models on labs of their own, for which that of the steps is closed."""
    teacher, frozen = None, ReferencePeaks()
    if rollout.teacher is not None:
        steps.close()
        teacher = TeacherPeaks.of(rollout.teacher, trained.scenario.layout.rank, replay=replay)
    if rollout.reference_pass is not None:
        steps.close()
        frozen = ReferencePeaks.of(rollout.reference_pass, trained, passed, replay=replay)
    return teacher, frozen


class _Phase(NamedTuple):
    name: str
    num_bytes: int
    """What training and teacher hold, without the buffers that every phase counts."""
    engine_bytes: int | None
    peaks: tuple[int | None, int | None, int | None] = (None, None, None)
    """As in `JobPhase`."""


def _peaks(record: StepRecord, at_least: int = 0) -> tuple[int | None, int | None, int | None]:
    peaks = (record.peak_allocated_bytes, record.peak_active_bytes, record.peak_reserved_bytes)
    return tuple(None if peak is None else max(peak, at_least) for peak in peaks)  # type: ignore[return-value]


def _most_with_cached(
    rollout: Rollout,
    trained: StepRecord,
    passed: StepRecord | None,
    frozen: ReferencePeaks,
    start: int,
    beside: tuple[int, int],
) -> dict[str, int]:
    """Returns what torch holds at most in each pass, by name, if nothing that is cached serves a later one.

    What is not in memlab's pass, such as an entropy, finds no block there either. A policy that is offloaded has the
    cache emptied after its own passes, and that of the reference model stays until the training step has ended: of the
    2.7 GiB that one left on an H200, a step used all but the 0.6 of its stream (verl 0.9.1, ``to`` of its FSDP engine).

    Args:
        passed: The policy's pass, if there is one.
        start: What is allocated before the first pass and after each.
        beside: What is on the device beside the policy's pass, and beside the training step.

    Returns:
        By pass; of an offloaded policy not that of the reference model, which memlab predicts too low. Nothing where
        no pass finds what another one has cached.
    """
    shares_process = rollout.reference_pass is not None and not rollout.reference_pass.policy_is_away
    if not (rollout.keeps_cache or shares_process):
        return {}
    own = {}
    if passed is not None:
        own["log-probabilities"] = _most_reserved(passed) + _beside_a_pass(passed.scenario, rollout) + beside[0]
    if frozen.peaks[2] is not None:
        own["reference model"] = frozen.peaks[2] + frozen.late_free_bytes
    own["training step"] = _most_reserved(trained) + beside[1]
    if not rollout.keeps_cache:
        own["training step"] += max(0, own.pop("reference model", 0) - start)
        return own
    held = accumulate((max(0, reserved - start) for reserved in own.values()), initial=start)
    return dict(zip(own, islice(held, 1, None), strict=True))


def _most_reserved(record: StepRecord) -> int:
    return (record.peak_reserved_bytes or record.peak_allocated_bytes) + record.late_free_bytes


def _beside_a_pass(scenario: Scenario, rollout: Rollout) -> int:
    """Returns what a forward-only pass has beside shards where it gathers the whole model, or computes an entropy."""
    model = scenario.architecture.with_layers(scenario.num_layers)
    width = 2 if scenario.dtype == "bf16" else 4
    gathered = width * model.num_parameters // scenario.layout.tensor_model_parallel_size
    tokens = min(scenario.tokens_of_rank, rollout.entropy_tokens or scenario.tokens_of_rank)
    entropy = model.vocab_size * (width * scenario.tokens_of_rank + rollout.entropy_bytes_of_logit * tokens)
    return max(gathered if rollout.gathers_model_for_passes else 0, entropy if rollout.entropy_bytes_of_logit else 0)


def _held_bytes(record: StepRecord) -> int:
    return record.peak_reserved_bytes or record.peak_allocated_bytes


def _engine_bytes(rollout: Rollout, weights_bytes: int, gpu_memory_bytes: int | None) -> int | None:
    if not rollout.is_colocated:
        return 0
    if rollout.engine_bytes is not None:
        return weights_bytes + rollout.engine_bytes
    if gpu_memory_bytes is None or rollout.gpu_memory_utilization is None:
        return None
    return int(gpu_memory_bytes * rollout.gpu_memory_utilization)


def _gathered_bytes(scenario: Scenario, rollout: Rollout, free_bytes: int | None) -> int | None:
    """Returns what the weight sync has on the device beside the shards or the weights; None where that is not known.

    Args:
        scenario: Of the training steps.
        free_bytes: Of the GPU as the sync begins; None where that is not known.
    """
    if rollout.engine_bytes is not None:  # Megatron copies weights from tensor to tensor
        return 0
    bucket = _bucket_bytes(scenario, rollout)
    if bucket is None and rollout.bucket_share and free_bytes is not None:
        bucket = int(max(0, free_bytes) * rollout.bucket_share)
    return bucket if bucket is None or rollout.sender is None else bytes_of_sync(scenario, rollout, bucket)


def _bucket_bytes(scenario: Scenario, rollout: Rollout) -> int | None:
    """Returns what one bucket takes with its copies: what its key says, and of Megatron's weights at least the largest.

    What FSDP's weights take beside it is added by `bytes_of_sync`.
    """
    if rollout.sender is not None:
        return None if rollout.bucket_bytes is None else rollout.bucket_copies * rollout.bucket_bytes
    if rollout.sends_adapters:
        return _BYTES_OF_A_WEIGHT * max(prod(weight.shape) for weight in scenario.weights_of_adapters())
    if rollout.bucket_bytes is None:
        return None
    model = scenario.architecture
    weights = model.weights_of(range(scenario.num_layers))
    largest = max(model.vocab_size * model.hidden_size, *(prod(weight.shape) for weight in weights))
    of_weight = _BYTES_OF_A_WEIGHT * largest
    if rollout.gathers_beside_bucket:
        return rollout.bucket_copies * rollout.bucket_bytes + of_weight * min(
            2, scenario.layout.tensor_model_parallel_size
        )
    bucket = rollout.bucket_bytes + of_weight if rollout.bucket_overflows else max(rollout.bucket_bytes, of_weight)
    return rollout.bucket_copies * bucket
