"""Predicts the passes of a teacher that has processes of its own, beside what the student leaves on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from memlab.allocator.pinned import PinnedMemory
from memlab.config.parameters import parameters_of_rank
from memlab.config.rollout import TeacherPass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import outside_torch_of
from memlab.lab.search_steps import stepping

_BYTES_OF_A_WEIGHT = 2
_WEIGHTS_ALONE = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
"""So a pass finds the weights on the device and no more, as of a model that was built without an optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPeaks:
    """What the process of a teacher holds on one rank, with the weights in DDP's buffers.

    NeMo-RL builds the teacher without DDP, each weight in a tensor of its own (``setup_model_and_optimizer`` in
    nemo_rl/models/megatron/setup.py, 7ea279ab): the same bytes, apart from the ends of blocks.
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
        """Predicts the passes on one rank.

        Args:
            teacher: Its passes.
            rank: Of the student, whose GPU the teacher's rank of the same number has.
            replay: As for a `Lab`.
        """
        scenario = teacher.on_rank(rank)
        with stepping(scenario, forward_only=True, replay=replay) as steps:
            record = steps(_WEIGHTS_ALONE)
        stepped = scenario.num_microbatches
        all_of_step = teacher.num_microbatches or stepped
        peaks = [record.peak_allocated_bytes, record.peak_active_bytes or 0, record.peak_reserved_bytes or 0]
        is_last = scenario.layout.pipeline_stage == scenario.layout.pipeline_model_parallel_size - 1
        if all_of_step > stepped and is_last:
            peaks = [peak + teacher.kept_bytes(all_of_step - stepped) for peak in peaks]
        # In the end all is there twice on the last stage, put together, and is received on the others.
        weights = record.offloaded_bytes_by_group.get("parameters", 0)
        together = record.static_bytes + weights + (1 + is_last) * teacher.kept_bytes(all_of_step)
        allocated, active, reserved = (max(peak, together) for peak in peaks)
        return cls(
            allocated_bytes=allocated,
            active_bytes=active,
            reserved_bytes=reserved,
            left_bytes=record.static_bytes,
            outside_torch_bytes=outside_torch_of(scenario).total_bytes,
            host_bytes=_pinned_bytes(scenario),
        )


def _pinned_bytes(scenario: Scenario) -> int:
    """Returns what torch's host allocator holds for a rank's weights in 16 bits, each in a block of its own."""
    pinned, layout, model = PinnedMemory(), scenario.layout, scenario.architecture
    for weight, layers in scenario.weights_of_rank.items():
        experts = max(1, weight.num_experts // layout.expert_model_parallel_size)
        for _ in range(layers * experts):
            pinned.allocate(_BYTES_OF_A_WEIGHT * math.prod(layout.shape_of(weight)))
    of_vocabulary = model.vocab_size * model.hidden_size // layout.tensor_model_parallel_size
    for _ in range(round(parameters_of_rank(scenario).vocabulary / of_vocabulary)):
        pinned.allocate(_BYTES_OF_A_WEIGHT * of_vocabulary)
    return pinned.reserved_bytes
