"""Predicts the passes of a teacher that has processes of its own, beside what the student leaves on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Self

from memlab.allocator.pinned import PinnedMemory
from memlab.allocator.rules import SMALL_REQUEST_BYTES, rounded_bytes, segment_bytes, splits_remainder
from memlab.config.cublas import CUBLAS_THREADS, CUBLAS_WORKSPACE_BYTES, multiplies_with_torch
from memlab.config.parameters import parameters_of_rank
from memlab.config.rollout import TeacherPass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import outside_torch_of
from memlab.lab.search_steps import stepping
from memlab.record.step_record import StepRecord

_BYTES_OF_A_WEIGHT = 2
_WEIGHTS_ALONE = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
"""So a pass finds the weights on the device and no more, as of a model that was built without an optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPeaks:
    """What the process of a teacher holds on one rank.

    NeMo-RL builds the teacher without DDP, each weight in a tensor of its own (``setup_model_and_optimizer`` in
    nemo_rl/models/megatron/setup.py, 7ea279ab), and its process never runs backward. memlab's lab has DDP's buffers
    and the workspace of autograd's thread: the ends of the weights' blocks are added, and the workspace is taken away.
    On an H200 the peaks of eight teachers were 0.00 to 0.02 % off (``labs/results/h200_teacher_passes.jsonl``).
    """

    allocated_bytes: int
    """At the peak of its passes, as the next two."""
    active_bytes: int
    reserved_bytes: int
    left_bytes: int
    """What stays while the weights are on the host, such as workspaces."""
    outside_torch_bytes: int
    """An estimate: the process has CUDA's context and NCCL's buffers for itself, in all phases."""
    host_bytes: int
    """Of the weights, pinned: ``Module.to`` copies each without waiting."""

    @classmethod
    def of(cls, teacher: TeacherPass, rank: int, *, replay: bool) -> Self:
        """Predicts the passes on one rank, whose GPU is that of the student's rank of the same number."""
        scenario = teacher.on_rank(rank)
        with stepping(scenario, forward_only=True, replay=replay) as steps:
            record = steps(_WEIGHTS_ALONE)
        if scenario.engine == "fsdp2":
            return cls._of_shards(record)
        stepped = scenario.num_microbatches
        all_of_step = teacher.num_microbatches or stepped
        beyond = _ends_of_weights(scenario) - _workspace_of_backward(scenario)
        found = (record.peak_allocated_bytes, record.peak_active_bytes or 0, record.peak_reserved_bytes or 0)
        peaks = [peak + beyond for peak in found]
        is_last = scenario.layout.pipeline_stage == scenario.layout.pipeline_model_parallel_size - 1
        if all_of_step > stepped and is_last:
            peaks = [peak + teacher.kept_bytes(all_of_step - stepped) for peak in peaks]
        # In the end all is there twice on the last stage, put together, and is received on the others.
        weights = record.offloaded_bytes_by_group.get("parameters", 0)
        together = record.static_bytes + beyond + weights + (1 + is_last) * teacher.kept_bytes(all_of_step)
        allocated, active, reserved = (max(peak, together) for peak in peaks)
        return cls(
            allocated_bytes=allocated,
            active_bytes=active,
            reserved_bytes=reserved,
            left_bytes=record.static_bytes - _workspace_of_backward(scenario),
            outside_torch_bytes=outside_torch_of(scenario, trains=False).total_bytes,
            host_bytes=_pinned_bytes(scenario),
        )

    @classmethod
    def _of_shards(cls, record: StepRecord) -> Self:
        """Returns those of FSDP2, which sends each micro-batch's logits to the host, where the shards are not pinned.

        Moving them frees what a pass leaves gathered (``FSDPModule._apply`` of torch 2.11; ``get_topk_logits`` and
        ``offload_after_refit`` in nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py, NeMo-RL 7ea279ab).
        """
        of_backward = _workspace_of_backward(record.scenario)
        return cls(
            allocated_bytes=record.peak_allocated_bytes - of_backward,
            active_bytes=(record.peak_active_bytes or 0) - of_backward,
            reserved_bytes=(record.peak_reserved_bytes or 0) - of_backward,
            left_bytes=record.peak_by_category.get("workspace", 0) - of_backward,
            outside_torch_bytes=outside_torch_of(record.scenario).total_bytes,
            host_bytes=record.offloaded_bytes_by_group.get("parameters", 0) or record.host_bytes,
        )


def _workspace_of_backward(scenario: Scenario) -> int:
    return CUBLAS_WORKSPACE_BYTES * (CUBLAS_THREADS - 1) * multiplies_with_torch(scenario)


def _tensors_of_weights(scenario: Scenario) -> Iterator[int]:
    """Yields the bytes of each tensor of a rank's weights, in 16 bits."""
    layout, model = scenario.layout, scenario.architecture
    for weight, layers in scenario.weights_of_rank.items():
        experts = max(1, weight.num_experts // layout.expert_model_parallel_size)
        yield from repeat(_BYTES_OF_A_WEIGHT * math.prod(layout.shape_of(weight)), layers * experts)
    of_vocabulary = model.vocab_size * model.hidden_size // layout.tensor_model_parallel_size
    yield from repeat(
        _BYTES_OF_A_WEIGHT * of_vocabulary, round(parameters_of_rank(scenario).vocabulary / of_vocabulary)
    )


def _ends_of_weights(scenario: Scenario) -> int:
    """Returns what blocks of weights have beyond them: what is left of a segment and is not split off."""
    if scenario.allocator.expandable_segments:
        return 0
    blocks = (rounded_bytes(size) for size in _tensors_of_weights(scenario) if size > SMALL_REQUEST_BYTES)
    ends = (segment_bytes(size) - size for size in blocks)
    return sum(end for end in ends if not splits_remainder(end, in_small_segment=False))


def _pinned_bytes(scenario: Scenario) -> int:
    """Returns what torch's host allocator holds for a rank's weights, each in a block of its own."""
    pinned = PinnedMemory()
    for size in _tensors_of_weights(scenario):
        pinned.allocate(size)
    return pinned.reserved_bytes
