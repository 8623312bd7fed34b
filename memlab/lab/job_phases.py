"""Predicts the phases of a job of reinforcement learning on one rank."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import outside_torch_of
from memlab.fitting.weight_sync import bytes_of_sync
from memlab.lab.search_steps import SimulatedSteps, stepping
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
    of_allocated: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> JobPhases:
    """Predicts a training step, and its job's phases as `phases_of` does.

    Args:
        scenario: The training steps, on the rank to predict.
        settings: Of the steps.
        rollout: What the job does between them.
        gpu_memory_bytes: Of each GPU; None leaves out what is left.
        replay: As for a `Lab`.
        of_allocated: As for `phases_of`.
        on_progress: Called with the progress of the training step.

    Raises:
        ValueError: If memlab refuses the workload of the forward-only pass.
    """
    with stepping(scenario, replay=replay, on_progress=on_progress) as steps:
        return phases_of(steps(settings), steps, rollout, gpu_memory_bytes, of_allocated=of_allocated)


def phases_of(
    trained: StepRecord,
    steps: SimulatedSteps,
    rollout: Rollout,
    gpu_memory_bytes: int | None = None,
    *,
    of_allocated: bool = False,
) -> JobPhases:
    """Predicts a forward-only pass on the model of a training step, if the job has one, and adds up the phases.

    A training step begins with loading what is on the host, and ends with offloading it again.

    Args:
        trained: The step.
        steps: Has taken the step.
        rollout: What the job does between its steps.
        gpu_memory_bytes: Of each GPU; None leaves out what is left.
        of_allocated: Whether passes count what is allocated at their peaks, and not what the allocator reserves.

    Raises:
        ValueError: If memlab refuses the workload of the forward-only pass.
    """
    held_at_peak = _allocated_bytes if of_allocated else _held_bytes
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
    if rollout.reference_pass is not None and rollout.reference_pass.policy_is_away:  # in a process of its own
        outside += outside_torch_of(rollout.reference_pass.of(scenario)).total_bytes
    has_weights = rollout.is_colocated and rollout.engine_has_own_weights
    weights = _BYTES_OF_A_WEIGHT * rollout.num_weights_of_engine(scenario) if has_weights else 0
    engine = _engine_bytes(rollout, weights, gpu_memory_bytes)
    # Where a job gives the bytes beside the weights, the engine is Megatron's: it pauses the weights as a whole.
    beside = engine if rollout.engine_bytes is None or engine is None else engine - weights
    asleep = 0 if rollout.engine_sleeps else beside
    of_sync = weights if rollout.engine_sleeps else engine
    gathered = _bucket_bytes(scenario, rollout)
    frozen = _reference_pass(trained, passed, rollout, held_at_peak, steps)
    generating = between + reference_between
    synced += reference_between if rollout.syncs_from_host else reference
    if rollout.is_colocated and not rollout.engine_has_own_weights:
        generating += parameters
    if rollout.engine_bytes is not None:  # Megatron copies weights from tensor to tensor
        gathered = 0
    kept = rollout.kept_buffer_bytes
    if gathered is None and rollout.bucket_share and gpu_memory_bytes is not None and of_sync is not None:
        free = gpu_memory_bytes - outside - between - synced - kept - of_sync
        gathered = int(max(0, free) * rollout.bucket_share)
    if gathered is not None and rollout.sender is not None:
        gathered = bytes_of_sync(scenario, rollout, gathered)
    log_probabilities = []
    if passed is not None:
        freed = sum(passed.peak_by_category.get(name, 0) for name in rollout.freed_for_log_probabilities)
        held = max(held_at_peak(passed), between + parameters + _beside_a_pass(passed.scenario, rollout))
        log_probabilities = [("log-probabilities", held + loaded - parameters + reference - freed, asleep)]
    if rollout.reference_pass is not None:
        log_probabilities.append(("reference model", frozen.held_bytes, asleep))
    kept += frozen.kept_bytes
    training = (
        ("generation", generating, engine),
        *log_probabilities,
        ("training step", held_at_peak(trained) + reference, asleep),
        ("weight sync", between + synced + (gathered or 0), of_sync),
    )
    return JobPhases(
        rank=scenario.layout.rank,
        is_colocated=rollout.is_colocated,
        gpu_memory_bytes=gpu_memory_bytes,
        outside_torch_bytes=outside,
        gathered_bytes=gathered,
        phases=tuple(
            JobPhase(
                name=name,
                training_bytes=num_bytes + kept,
                engine_bytes=engine_bytes,
                left_for_engine_bytes=None
                if gpu_memory_bytes is None
                else gpu_memory_bytes - outside - num_bytes - kept,
            )
            for name, num_bytes, engine_bytes in training
        ),
        host_bytes_of_rank=max(trained.host_bytes, trained.host_reserved_bytes or 0)
        + (reference - reference_between + frozen.host_bytes)
        + rollout.host_copies_of_shards * trained.peak_by_category["parameters"],
        ranks_per_node=min(rollout.ranks_per_node, scenario.layout.world_size),
        reference_bytes=reference,
        kept_buffer_bytes=kept,
    )


class _Frozen(NamedTuple):
    """A frozen model with shards of its own."""

    held_bytes: int = 0
    """At the peak of its pass, with what is on the device of the trained one."""
    kept_bytes: int = 0
    """On the device in all other phases."""
    host_bytes: int = 0


def _reference_pass(
    trained: StepRecord,
    passed: StepRecord | None,
    rollout: Rollout,
    held_at_peak: Callable[[StepRecord], int],
    steps: SimulatedSteps,
) -> _Frozen:
    """Predicts the pass of a frozen model with shards of its own, if the job has one, after the policy's.

    FSDP1 leaves the root gathered after forward, until a backward: of the trained model in this pass, and of the frozen
    one in all other phases (``_post_forward_reshard`` in torch/distributed/fsdp/_runtime_utils.py, 2.11; verl 0.9.1
    frees it with ``fsdp_size`` above 1 only, in ``EngineEvalModeCtx``). Moving FSDP2's parameters frees gathered ones.
    """
    own = rollout.reference_pass
    if own is None:
        return _Frozen()
    steps.close()  # one process has one model
    with stepping(own.of(trained.scenario), forward_only=True, replay=steps.replay) as others:
        frozen = others(MemorySettings())
    is_first, workspace = trained.scenario.state.fsdp_version == 1, frozen.peak_by_category.get("workspace", 0)
    shards, held = frozen.peak_by_category.get("parameters", 0), held_at_peak(frozen)
    if own.policy_is_away:  # a process of its own, whose workspaces stay
        of_trained = trained.peak_by_category.get("workspace", 0)
        host_bytes = shards or frozen.host_bytes
        return _Frozen(held_bytes=held - workspace + of_trained, kept_bytes=workspace, host_bytes=host_bytes)
    on_host = shards if own.is_on_host and is_first else 0
    stays = trained if passed is None or (trained.settings.offload_parameters and not is_first) else passed
    kept = max(0, frozen.static_bytes - on_host - workspace)
    return _Frozen(
        held_bytes=held - on_host - workspace - kept + stays.static_bytes,
        kept_bytes=kept,
        host_bytes=on_host or frozen.host_bytes,
    )


def _beside_a_pass(scenario: Scenario, rollout: Rollout) -> int:
    """Returns what a forward-only pass has beside shards where it gathers the whole model, or computes an entropy."""
    model = scenario.architecture.with_layers(scenario.num_layers)
    width = 2 if scenario.dtype == "bf16" else 4
    gathered = width * model.num_parameters // scenario.layout.tensor_model_parallel_size
    tokens = min(scenario.tokens_of_rank, rollout.entropy_tokens or scenario.tokens_of_rank)
    entropy = model.vocab_size * (width * scenario.tokens_of_rank + rollout.entropy_bytes_of_logit * tokens)
    return max(gathered if rollout.gathers_model_for_passes else 0, entropy if rollout.entropy_bytes_of_logit else 0)


def _allocated_bytes(record: StepRecord) -> int:
    return record.peak_allocated_bytes


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
    bucket = rollout.bucket_bytes + of_weight if rollout.bucket_overflows else max(rollout.bucket_bytes, of_weight)
    return rollout.bucket_copies * bucket
