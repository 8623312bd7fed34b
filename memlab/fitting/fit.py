"""Whether a step fits a GPU, by how much, and the single settings that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.config.settings_on_model import check_on_model, without_effect
from memlab.fitting.bounds import recomputed_operations
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.record.step_record import StepRecord
from memlab.units import format_bytes

Step = Callable[[MemorySettings, int | None], StepRecord]
"""Takes a step under settings, with so many bytes that torch may reserve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A setting that fits, as predicted by a step of its own."""

    settings: MemorySettings
    peak_allocated_bytes: int
    recomputed_operations: float
    """That backward makes a second time for one token, over all layers."""
    moved_bytes: int
    """To the host in a step, and back."""

    def __str__(self) -> str:
        costs = []
        if self.recomputed_operations:
            costs.append(f"{self.recomputed_operations / 1e9:.2f} GFLOP a token made twice")
        if self.moved_bytes:
            costs.append(f"{format_bytes(self.moved_bytes)} moved to the host and back")
        return ", ".join([f"{self.settings}: peak {format_bytes(self.peak_allocated_bytes)}", *costs])


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A step held against a GPU's memory."""

    gpu_memory_bytes: int
    outside_torch_bytes: int
    """Estimated, for the CUDA context, libraries and NCCL (`memlab.fitting.outside_torch`)."""
    peak_allocated_bytes: int
    start_bytes: int
    """Of the peak, what a step under these settings starts with: no recompute or activation offload changes it."""
    fits: bool
    """Whether torch's allocator gets through the step with what is left, giving back what it caches where it must."""
    alternatives: tuple[Alternative, ...] = ()
    """Settings that fit where the step does not, one thing more each: by recomputed operations, then moved bytes."""

    @property
    def margin_bytes(self) -> int:
        """What is left at the peak; negative for what is lacking."""
        return self.gpu_memory_bytes - self.outside_torch_bytes - self.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        alternatives = [asdict(choice) | {"settings": choice.settings.to_dict()} for choice in self.alternatives]
        return asdict(self) | {"margin_bytes": self.margin_bytes, "alternatives": alternatives}

    def __str__(self) -> str:
        room = (
            f"{format_bytes(self.gpu_memory_bytes)} less about {format_bytes(self.outside_torch_bytes)} outside torch"
        )
        margin = format_bytes(abs(self.margin_bytes))
        if self.fits:
            return f"fits {room}, with {margin} to spare"
        if self.margin_bytes >= 0:
            return f"does not fit {room}: the peak would leave {margin}, in pieces that are too small"
        return f"does not fit {room}: {margin} are lacking"


def judge_fit(record: StepRecord, step: Step, gpu_memory_bytes: int) -> Fit:
    """Holds a step against a GPU, and where it does not fit, predicts what would.

    Args:
        record: A step that ran to its end.
        step: Takes another step of the same scenario.
        gpu_memory_bytes: Of the whole GPU.
    """
    outside_torch_bytes = estimate_outside_torch(record.scenario.layout).total_bytes
    room = gpu_memory_bytes - outside_torch_bytes
    fits_now = fits(record, step, room)
    start_bytes = record.static_bytes - record.residual_bytes
    alternatives = (
        []
        if fits_now or start_bytes > room
        else [
            Alternative(
                settings=other.settings,
                peak_allocated_bytes=other.peak_allocated_bytes,
                recomputed_operations=recomputed_operations(other.settings, other.scenario),
                moved_bytes=moved_bytes(other),
            )
            for other in (step(settings, None) for settings in _one_thing_more(record))
            if fits(other, step, room)
        ]
    )
    return Fit(
        gpu_memory_bytes=gpu_memory_bytes,
        outside_torch_bytes=outside_torch_bytes,
        peak_allocated_bytes=record.peak_allocated_bytes,
        start_bytes=start_bytes,
        fits=fits_now,
        alternatives=tuple(sorted(alternatives, key=lambda one: (one.recomputed_operations, one.moved_bytes))),
    )


def fits(record: StepRecord, step: Step, room_bytes: int) -> bool:
    """Whether a step gets through with so many bytes that torch may reserve; asks for another step if need be."""
    if record.peak_allocated_bytes > room_bytes:
        return False
    reserved = record.peak_reserved_bytes
    return reserved is None or reserved <= room_bytes or step(record.settings, room_bytes).status == "ok"


def moved_bytes(record: StepRecord) -> int:
    """Returns what a step and the pause after it take to the host and back; gradients are dropped, not copied."""
    groups = record.offloaded_bytes_by_group
    between_steps = sum(size for name, size in groups.items() if name != "gradients")
    return sum(record.offloaded_bytes_by_module.values()) + between_steps


def _one_thing_more(record: StepRecord) -> Iterator[MemorySettings]:
    """Yields settings that recompute or offload one module more, or all layers, or mend what checkpoints keep."""
    settings, scenario = record.settings, record.scenario
    recomputed, offloaded = settings.recompute_modules or (), settings.offload_modules or ()
    wanted: list[dict[str, Any]] = []
    if record.residual_bytes and settings.checkpoint_input_remedy is None:
        wanted.append({"checkpoint_input_remedy": "detach"})
    if settings.recompute_method != "uniform":  # where every layer is recomputed, offload happens inside backward
        wanted += [{"offload_modules": (*offloaded, name)} for name in OFFLOAD_MODULES if name not in offloaded]
    if settings.recompute_granularity != "full":
        wanted += [
            {"recompute_granularity": "selective", "recompute_modules": (*recomputed, name)}
            for name in RECOMPUTE_MODULES
            if name not in recomputed
        ]
        whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        wanted.append(whole | {"recompute_modules": None})
    before = without_effect(settings, scenario.architecture).keys()
    for values in wanted:
        try:
            choice = replace(settings, **values)
            check_on_model(choice, scenario)
        except ValueError:
            continue  # a rule of the settings: this is no choice
        if not without_effect(choice, scenario.architecture).keys() - before:
            yield choice
