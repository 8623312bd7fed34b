"""Predicts the pass of a frozen model that has shards of its own, beside what the trained one leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from memlab.config.rollout import ReferencePass
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import outside_torch_of
from memlab.lab.search_steps import stepping
from memlab.record.step_record import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePeaks:
    """What the pass holds on one rank, with what is there of the trained model; nothing without such a pass."""

    held_bytes: int = 0
    """Reserved at the peak of the pass."""
    peaks: tuple[int | None, int | None, int | None] = (None, None, None)
    """As in `JobPhase`."""
    left_bytes: int = 0
    """What stays in all other phases."""
    outside_torch_bytes: int = 0
    """An estimate, of a process of its own."""
    host_bytes: int = 0
    late_free_bytes: int = 0
    """As `StepRecord.late_free_bytes`."""

    @classmethod
    def of(cls, own: ReferencePass, trained: StepRecord, passed: StepRecord | None, *, replay: bool) -> Self:
        """Predicts the pass after that of the trained model, whose labs are closed.

        FSDP1 leaves the root gathered after forward, until a backward: of the trained model in this pass, and of the
        frozen one in all phases (``_post_forward_reshard`` in torch/distributed/fsdp/_runtime_utils.py, 2.11; verl
        0.9.1 frees it with ``fsdp_size`` above 1 only, in ``EngineEvalModeCtx``). Moving FSDP2's parameters frees
        gathered ones.

        Args:
            passed: The trained model's pass, if there is one.
        """
        scenario = own.of(trained.scenario)
        with stepping(scenario, forward_only=True, replay=replay) as steps:
            frozen = steps(MemorySettings())
        workspace, shards = (frozen.peak_by_category.get(name, 0) for name in ("workspace", "parameters"))
        held = frozen.peak_reserved_bytes or frozen.peak_allocated_bytes
        if own.policy_is_away:  # SkyRL's workers are processes of their own
            return cls(
                held_bytes=held + trained.peak_by_category.get("workspace", 0),
                peaks=(frozen.peak_allocated_bytes, frozen.peak_active_bytes, frozen.peak_reserved_bytes),
                left_bytes=workspace,
                outside_torch_bytes=outside_torch_of(scenario).total_bytes,
                host_bytes=shards or frozen.host_bytes,
                late_free_bytes=frozen.late_free_bytes,
            )
        is_first = scenario.state.fsdp_version == 1
        on_host = shards if own.is_on_host and is_first else 0
        stays = trained if passed is None or (trained.settings.offload_parameters and not is_first) else passed
        # One process has one set of workspaces.
        beside = stays.static_bytes - on_host - workspace
        left = max(0, frozen.static_bytes - on_host - workspace)
        peaks = (frozen.peak_allocated_bytes, frozen.peak_active_bytes, frozen.peak_reserved_bytes)
        return cls(
            held_bytes=held + beside,
            peaks=tuple(None if peak is None else peak + beside for peak in peaks),  # type: ignore[arg-type]
            left_bytes=left,
            host_bytes=on_host or frozen.host_bytes,
            late_free_bytes=frozen.late_free_bytes,
        )
