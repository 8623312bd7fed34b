"""What one step did, as plain data: it holds no tensor, saves to disk and loads again in another process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memlab.config.backend_kind import BackendName
from memlab.config.from_json import build
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import shortened
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.record_folder import read_record, without_format, write_record
from memlab.record.snapshot_writer import write_snapshot
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.vocabulary import RESIDUAL_CATEGORIES

Status = Literal["ok", "out_of_memory", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The measurements of one training step. Bytes are device bytes unless a name says host."""

    scenario: Scenario
    settings: MemorySettings
    backend: BackendName
    versions: dict[str, str]
    """The versions of memlab, Python, torch and everything else that decides the numbers, by package."""
    step_index: int
    """Number of steps that the lab had taken before this one, including warm-up steps."""
    static_bytes: int
    """Bytes allocated when the step began, before anything was loaded from the host."""
    peak_allocated_bytes: int
    """The most bytes allocated at any moment of the step."""
    activation_peak_bytes: int
    """The peak of forward and backward, minus `static_bytes`."""
    peak_by_category: dict[str, int]
    """`peak_allocated_bytes` by category, the largest first."""
    peak_by_module: dict[str, int]
    """The same bytes by the module that allocated them, the largest first."""
    residual_bytes: int
    """Bytes allocated at the step's end, except parameters, gradients, optimizer state and workspaces."""
    peak_phase: str = ""
    """Phase in which `peak_allocated_bytes` was reached: one of `memlab.vocabulary.PHASES`; empty in older records."""
    host_bytes: int
    """The most bytes on the host at any moment of the step: what was offloaded, a CPU optimizer's state, the batch."""
    offloaded_bytes_by_module: dict[str, int] = field(default_factory=dict)
    """Bytes of saved tensors that `offload_modules` transferred to the host in this step, by offload module."""
    offloaded_bytes_by_group: dict[str, int] = field(default_factory=dict)
    """Bytes that left the device at the step's end: parameters, gradients (dropped), optimizer state."""
    peak_active_bytes: int | None = None
    """The peak of allocated bytes plus those freed while another stream still used them. This field and the next three
    exist only on a GPU, real or simulated."""
    peak_reserved_bytes: int | None = None
    """The most bytes that torch's allocator had reserved, used or not."""
    unused_reserved_bytes: int | None = None
    """Reserved bytes that nothing used when the allocated bytes peaked: cached, or fragmented."""
    late_free_bytes: int = 0
    """By how much torch may reserve more than `peak_reserved_bytes`, if the GPU is behind the program, because blocks
    that FSDP1 has freed wait for other streams (`memlab.meter.late_frees`). Only predictions have it."""
    host_reserved_bytes: int | None = None
    """Pinned host memory that is reserved when the step ends: torch rounds each request up to a power of two, and
    keeps what is freed. Predictions have it too. `host_bytes` counts what tensors requested, pinned or pageable,
    without rounding."""
    kept_gather_bytes: int = 0
    """By how much the real peak may exceed `peak_allocated_bytes`, because torch keeps tensors of tensor-parallel FP8
    gathers until a later collective; how many it keeps depends on timing. Only predictions have it: a measured peak
    contains what was kept."""
    uncollected_bytes: int = 0
    """By how much the real peak may be lower than `peak_allocated_bytes`, because Python's garbage collector has freed
    the fp32 copies of a CPU optimizer that Megatron discards; whether it has by then depends on what else the process
    allocates. `TrainingState.manual_gc` collects them, and then it is 0. Only predictions have it."""
    recomputed_bytes: int = 0
    """Bytes that backward recomputed."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Settings that Megatron accepted and that had no effect in this step, each with the reason."""
    load_seconds: float = 0.0
    """Time to load parameters, gradients and optimizer state; exactly 0.0 if nothing was transferred."""
    offload_seconds: float = 0.0
    """Time to offload them again; exactly 0.0 if nothing was transferred."""
    step_seconds: float = 0.0
    """Time of the whole step, including loading and offloading. On the simulated backend it is the time of the
    simulation, not a prediction."""
    tokens_per_second: float = 0.0
    loss: float | None = None
    """Mean loss over all tokens of the step, also those of the other copies of the model, so every rank that computes a
    loss has the same one. None on pipeline stages before the last, in a prediction, and if the step ended early."""
    forward_only: bool = False
    """Whether the step was a pass without gradients, backward and optimizer (`Lab.forward_only`)."""
    is_steady: bool = True
    """Whether later steps repeat this one. They do if it finished, and if the step before it, a warm-up step or not,
    finished with the same settings, training state, allocator options, workload and device memory. Between the two,
    nothing may have rebuilt the model, moved its tensors or applied the settings again, and no forward-only pass may
    have had another workload, changed how much is allocated, or added groups to Megatron's offload manager
    (``suspend_offload=False``). No step in the block of a `Lab.tap` is steady.
    A forward-only pass is steady if it finished after a warm-up of its own (``warm_up=True``). Records of older
    versions do not have the field and count as steady: commands always take the warm-up step, and `Lab.step` does by
    default."""
    status: Status = "ok"
    hardware: dict[str, str] = field(default_factory=dict)
    """What the step ran on, such as the GPU's model and memory, driver and processor; empty in records of 0.1.0."""
    message: str = ""
    """If the status is not ``ok``: why the step ended, and what to do."""
    out_of_memory: OutOfMemory | None = None
    """If the step ran out of memory: the evidence, and the verdict."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_timeline(cls, timeline: Timeline, **others: Any) -> StepRecord:
        """Builds a record, and takes from the timeline every number that it contains."""
        scanned = timeline.scanned()
        peak = scanned.peak_index()
        reserved_bytes = scanned.bytes_at(peak, "reserved")
        if reserved_bytes:
            active_bytes = scanned.bytes_at(peak) + scanned.bytes_at(peak, "pending_free")
            others = {
                "peak_active_bytes": scanned.peak_active_bytes(),
                "peak_reserved_bytes": scanned.peak_bytes("reserved"),
                "unused_reserved_bytes": reserved_bytes - active_bytes,
            } | others
        return cls(
            static_bytes=scanned.opening_bytes,
            peak_allocated_bytes=scanned.bytes_at(peak),
            peak_phase=scanned.peak_phase(),
            activation_peak_bytes=scanned.peak_bytes(phases=("forward", "backward")) - scanned.opening_bytes,
            peak_by_category=scanned.breakdown(peak),
            peak_by_module=scanned.breakdown(peak, by="module"),
            host_bytes=scanned.peak_bytes("host"),
            recomputed_bytes=scanned.allocated_bytes_of("recomputed"),
            timeline=timeline,
            **others,
        )

    @property
    def residual_by_module(self) -> dict[str, int]:
        """`residual_bytes` by the module that allocated them, the largest first; empty without a timeline."""
        if self.timeline is None:
            return {}
        return self.timeline.breakdown(len(self.timeline) - 1, by="module", categories=RESIDUAL_CATEGORIES)

    @property
    def recomputed_by_module(self) -> dict[str, int]:
        """`recomputed_bytes` by the module that recomputed them; empty without a timeline."""
        return {} if self.timeline is None else self.timeline.allocated_bytes_by_module("recomputed")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the timeline as JSON-ready values."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "timeline"}
        refused = self.out_of_memory
        return values | {
            "scenario": self.scenario.to_dict(),
            "settings": self.settings.to_dict(),
            "out_of_memory": None if refused is None else refused.to_dict(),
        }

    def save(self, folder: Path | str) -> Path:
        """Writes ``record.json`` and ``timeline.npz`` into a folder, which is made if it is missing.

        Raises:
            ValueError: If the folder has a record already, or cannot be written to.
            OSError: If the disk is full. Nothing of the record is left then.
        """
        return write_record(folder, self.to_dict(), self.timeline)

    def export_snapshot(self, path: Path | str) -> Path:
        """Writes a memory snapshot that https://pytorch.org/memory_viz opens and `Timeline.from_snapshot` reads.

        Every storage is labelled with its module, category and phase. Addresses are made up.

        Args:
            path: Path of the pickle; its folder has to exist.

        Raises:
            ValueError: If the record has no timeline.
        """
        if self.timeline is None:
            raise ValueError(
                "this record has no timeline to export: take the step again, or load the folder where it was saved"
            )
        return write_snapshot(self.timeline, path)

    @classmethod
    def load(cls, folder: Path | str) -> StepRecord:
        """Reads what `save` wrote, and what memlab 0.1.0 wrote, which had no format number.

        Raises:
            ValueError: If the folder holds no record, a newer memlab wrote it, or it is damaged.
        """
        values, timeline = read_record(folder)
        try:
            return cls.from_dict(without_format(values), timeline)
        except ValueError as error:
            path = Path(folder) / "record.json"
            raise ValueError(f"{path} is not a whole record ({error}): take the step again") from error

    @classmethod
    def from_dict(cls, values: dict[str, Any], timeline: Timeline | None = None) -> StepRecord:
        """Builds a record from what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown, or not of its type.
        """
        if not isinstance(values, dict):
            raise ValueError(f"the record is {shortened(values)}, must be an object")
        read: dict[str, Any] = {"timeline": timeline}
        if "scenario" in values:
            read["scenario"] = Scenario.from_dict(_with_versions(values["scenario"], values.get("versions")))
        if "settings" in values:
            read["settings"] = MemorySettings.from_dict(values["settings"])
        if values.get("out_of_memory") is not None:
            read["out_of_memory"] = OutOfMemory.from_dict(values["out_of_memory"])
        record = build(cls, values, "the record", **read)
        for name in ("static_bytes", "peak_allocated_bytes", "host_bytes"):
            if getattr(record, name) < 0:
                raise ValueError(f"{name} is {getattr(record, name)}, must be 0 or more")
        return record

    def __str__(self) -> str:
        if self.status != "ok":
            return f"{self.settings}: {self.status}: {self.message}"
        loss = "" if self.loss is None else f", loss {self.loss:.6f}"
        name = f"{self.settings}, forward only" if self.forward_only else f"{self.settings}"
        peak = f"peak {format_bytes(self.peak_allocated_bytes)} ({self._above_start()})"
        return f"{name}: {peak}, {self.step_seconds * 1e3:.0f} ms{loss}"

    def _above_start(self) -> str:
        # Not `activation_peak_bytes`: that of forward and backward may be lower than the peak, and than the start.
        above = self.peak_allocated_bytes - self.static_bytes
        if not above:
            return "at the start"
        phase = "" if self.peak_phase in ("", "forward", "backward") else f", in the {self.peak_phase} phase"
        return f"{format_bytes(above)} above the start{phase}"


def _with_versions(scenario: Any, installed: Any) -> Any:
    """Returns a record's scenario with the version of Transformer Engine that measured it, if it has none of its own.

    Records of memlab 0.3.0 and older have none. Where TE was not installed, they are predictions for 2.12.
    """
    engine = installed.get("transformer-engine") if isinstance(installed, dict) else None
    if not isinstance(scenario, dict) or "versions" in scenario or not re.match("[0-9]", str(engine)):
        return scenario
    return scenario | {"versions": {"transformer_engine": engine}}
