"""Records of the steps of a lab's model: what was measured, and what the model and its meter say after it."""

from __future__ import annotations

from typing import Any

import torch

from memlab.allocator.rules import rounded_bytes
from memlab.backends.cuda import own_device
from memlab.config import without_effect
from memlab.engines.residency.host_buffer import registered_bytes
from memlab.lab.environment import hardware, versions
from memlab.lab.lab_model import LabModel
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.step_record import Status, StepRecord
from memlab.record.timeline import Timeline


class StepRecords:
    """Makes the records of a model's steps."""

    def __init__(self, model: LabModel) -> None:
        self._model = model
        # Read on the thread that opens the lab, where torch.cuda is torch's own on every backend.
        self._hardware = hardware(own_device() if model.backend.kind.on_gpu else None)

    def make(self, measured: dict[str, Any], timeline: Timeline) -> StepRecord:
        """Makes the record of the step that has just ended, of what it has measured and of its timeline."""
        model, meter = self._model, self._model.meter
        residual_bytes = meter.uncategorised_bytes()
        if measured.get("status") == "out_of_memory" and meter.out_of_memory is not None:
            measured["out_of_memory"] = OutOfMemory.at(
                meter.out_of_memory, timeline, passes_in_flight=model.labels.passes_in_flight
            )
        # Not in what a repeated step takes over: the limit may be another one.
        measured["without_effect"] = measured["without_effect"] | model.scenario.allocator.without_effect(
            has_allocator=model.backend.kind.has_allocator, has_limit=meter.device_memory_bytes is not None
        )
        return StepRecord.from_timeline(
            timeline,
            scenario=model.scenario,
            settings=model.settings,
            backend=model.backend.name,
            versions=versions(
                model.scenario.engine, model.scenario.versions if model.backend.kind.is_prediction else None
            ),
            hardware=dict(self._hardware),
            step_index=model.num_steps - 1,
            residual_bytes=residual_bytes,
            host_reserved_bytes=self._host_reserved_bytes(),
            kept_gather_bytes=meter.kept_gather_bytes if model.scenario.versions.keeps_freed_gathers else 0,
            late_free_bytes=meter.late_free_bytes,
            uncollected_bytes=self._uncollected_bytes(timeline),
            tokens_per_second=self._tokens_per_second(measured),
            **measured,
        )

    def offload_seen(self, *, forward_only: bool) -> dict[str, Any]:
        """Returns what the step has offloaded of activations, and which settings had no effect."""
        model = self._model
        idle = without_effect.in_forward_only_pass(model.settings) if forward_only else model.engine.without_effect()
        idle |= without_effect.beside_cpu_optimizer(model.settings, model.scenario.state)
        return {
            "offloaded_bytes_by_module": model.engine.offloaded_bytes,
            "without_effect": idle | without_effect.of_scenario(model.scenario),
        }

    def ended_early(self, error: Exception, *, forward_only: bool) -> dict[str, Any]:
        """Returns what is recorded of a step that ran out of memory or was stopped."""
        status: Status = "interrupted"
        message = f"stopped in {error}: run the step again"
        if isinstance(error, torch.OutOfMemoryError):
            status = "out_of_memory"
            remedy = "shorten" if forward_only else "recompute or offload more, or shorten"
            message = f"{error}: {remedy} the sequence"
        return {"status": status, "message": message, **self.offload_seen(forward_only=forward_only)}

    def _uncollected_bytes(self, timeline: Timeline) -> int:
        """Returns what `StepRecord.uncollected_bytes` documents: of the copies, what is on the device at the peak."""
        if not self._model.backend.kind.is_prediction:
            return 0
        copies = self._model.engine.uncollected_copies()
        num_bytes = sum(rounded_bytes(copy.untyped_storage().nbytes()) for copy in copies)
        return num_bytes and min(num_bytes, timeline.breakdown(timeline.peak_index()).get("optimizer state", 0))

    def _tokens_per_second(self, measured: dict[str, Any]) -> float:
        if "loss" not in measured or self._model.backend.kind.is_prediction:
            return 0.0
        return self._model.scenario.tokens_per_step / float(measured["step_seconds"])

    def _host_reserved_bytes(self) -> int | None:
        by_torch = self._model.meter.host_reserved_bytes()
        return None if by_torch is None else by_torch + registered_bytes()
