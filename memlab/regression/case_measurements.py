"""What a case measured, as plain data: a run keeps it in its summary, and a baseline is made of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from memlab.config.architectures import Architecture
from memlab.config.backend_kind import KINDS
from memlab.config.from_json import build, read_json
from memlab.config.scenario import Scenario
from memlab.config.settings import NEWER_SETTINGS, MemorySettings
from memlab.cpu_info import processor_features, processor_name
from memlab.record.notebook_result import RECORD_NAME
from memlab.record.saved_records import load_record
from memlab.record.step_record import StepRecord
from memlab.regression.one_line import one_line
from memlab.regression.suite.parameters import ParameterValue

MetricValue: TypeAlias = int | float | str

CUDA_SLACK_BYTES = 4 * 1024**2
"""The caching allocator leaves remainders of up to 1 MiB unsplit, depending on the blocks that happen to be cached: a
difference of two large peaks on a GPU is off by a few of them."""
LEFT_TO_FINISH = "let `finish` alone write it"
LAB = "(lab)"
"""In the place of a record's name: the metrics that a lab passed to `finish` in addition to its records."""

_METRICS = (
    "status",
    "peak_allocated_bytes",
    "activation_peak_bytes",
    "static_bytes",
    "residual_bytes",
    "host_bytes",
    "recomputed_bytes",
    "loss",
    "step_seconds",
)
_VECTOR_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_METRICS_BY_NAME = ("offloaded_bytes_by_module", "offloaded_bytes_by_group", "peak_by_category", "peak_by_phase")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordMeasured:
    """The figures of one record, and the scenario and settings that they were measured under."""

    metrics: dict[str, MetricValue]
    """By name, the most important first; a figure by module or category as ``peak_by_category/activations``."""
    peak_by_module: dict[str, int] = field(default_factory=dict)
    """Shows where a difference comes from; it is not compared by itself."""
    residual_by_module: dict[str, int] = field(default_factory=dict)
    recomputed_by_module: dict[str, int] = field(default_factory=dict)
    """Like `peak_by_module`, for the bytes left at the end of the step and the bytes that backward recomputed."""
    least_near_peak: dict[str, int] = field(default_factory=dict)
    most_near_peak: dict[str, int] = field(default_factory=dict)
    """Of a GPU's record, by category: see `Timeline.categories_near_peak`, within `CUDA_SLACK_BYTES`."""
    scenario: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings that are on."""

    @property
    def settings_name(self) -> str:
        """The settings as tables and legends name them; empty if there are none."""
        return str(MemorySettings.from_dict(self.settings)) if self.settings else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one case."""

    lab: str
    parameters: dict[str, ParameterValue]
    versions: dict[str, str]
    machine: str
    """The processor: floating-point results are only equal on equal processors."""
    records: dict[str, RecordMeasured]
    hardware: dict[str, str] = field(default_factory=dict)
    """What the records were measured on, as `StepRecord.hardware`; the report shows it, and it is never compared."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """Builds what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown, or not of its type, or a number is not finite.
        """
        measured = build(cls, values, "it", finite=True)
        measured.check()
        return measured

    def check(self) -> None:
        """Checks what the types of the fields do not say.

        Raises:
            ValueError: If a record has no status or peak, or a layout that is not a mapping.
        """
        for name, record in self.records.items():
            if name != LAB and not isinstance(record.metrics.get("peak_allocated_bytes"), int):
                raise ValueError(f"records.{name} has no peak_allocated_bytes, must have a whole number")
            if name != LAB and not isinstance(record.metrics.get("status"), str):
                raise ValueError(f"records.{name} has no status, must have a text")
            for part in ("layout", "state", "allocator", "versions"):
                if not isinstance(record.scenario.get(part, {}), dict):
                    raise ValueError(f"records.{name}.scenario.{part} is not a mapping")


def read_measured(folder: Path, lab: str, parameters: Mapping[str, ParameterValue], backend: str) -> Measured:
    """Reads the figures that a lab's last cell wrote into the folder of its run.

    Raises:
        ValueError: If ``metrics.json`` or a record is damaged, or a record was made on another backend.
    """
    path = folder / "metrics.json"
    values = read_json(path, LEFT_TO_FINISH)
    try:
        written = build(_Written, values, "it", finite=True)
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read ({one_line(error)}): {LEFT_TO_FINISH}") from error
    records: dict[str, RecordMeasured] = {}
    hardware: dict[str, str] = {}
    for name in written.records:
        if not RECORD_NAME.fullmatch(name):
            raise ValueError(f"{path.name} names a record {name!r}, which is not a folder: let `finish` alone write it")
        record = load_record(folder / "records" / name)
        values = record.to_dict()
        if values["backend"] != backend:
            raise ValueError(
                f"record {name} was made on {values['backend']}, but the suite says {backend}: "
                "let the lab leave the backend open, or name this one in the suite"
            )
        hardware |= record.hardware
        metrics = {key: values[key] for key in _METRICS if values.get(key) is not None}  # a watched block has no loss
        for key in _METRICS_BY_NAME:
            metrics |= {f"{key}/{part}": num_bytes for part, num_bytes in values.get(key, {}).items()}
        near_peak = {}
        if KINDS[backend].on_gpu and record.timeline is not None:
            near_peak = record.timeline.categories_near_peak(CUDA_SLACK_BYTES)
        records[name] = RecordMeasured(
            metrics=metrics,
            peak_by_module=values["peak_by_module"],
            residual_by_module=record.residual_by_module,
            recomputed_by_module=record.recomputed_by_module,
            least_near_peak={name: least for name, (least, _) in near_peak.items()},
            most_near_peak={name: most for name, (_, most) in near_peak.items()},
            scenario=_unusual(values["scenario"]) if isinstance(record, StepRecord) else {"model": record.model},
            settings=_on(values["settings"]) if isinstance(record, StepRecord) else {},
        )
    if written.extra:
        records[LAB] = RecordMeasured(metrics=dict(written.extra))
    measured = Measured(
        lab=lab,
        parameters=dict(parameters),
        versions=written.versions,
        machine=_machine(),
        records=records,
        hardware=hardware,
    )
    return Measured.from_dict(measured.to_dict())  # a record on disk may be damaged in ways that only a number shows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """What ``metrics.json`` holds: see `finish`."""

    records: dict[str, dict[str, int | float | str | bool | None]]
    extra: dict[str, int | float]
    versions: dict[str, str]


def _on(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that are on, and ``offload_gradients`` where it is off while the optimizer is offloaded."""
    stay = {"offload_gradients"} if settings["offload_optimizer"] else set()
    usual = MemorySettings()  # baselines from before these settings existed do not name them
    idle = {name for name in NEWER_SETTINGS if settings[name] == getattr(usual, name)}
    return {
        name: value
        for name, value in settings.items()
        if value is not None and (value is not False or name in stay) and name not in idle
    }


def _machine() -> str:
    """Names the processor and its vector units: a virtual machine's model name alone says little."""
    features = processor_features()
    return " ".join([platform.machine(), processor_name(), *(name for name in _VECTOR_UNITS if name in features)])


def _unusual(scenario: dict[str, Any]) -> dict[str, Any]:
    """Returns a scenario for a reader: the architecture by name, and what is usual in nested parts left out."""
    usual = Scenario.of(architecture=Architecture(**scenario["architecture"])).to_dict()
    nested = ("layout", "routing", "expert_buffers", "state", "allocator", "versions")
    rest = {name: value for name, value in scenario.items() if name not in nested or value != usual[name]}
    for part in ("state", "allocator", "versions"):
        if part in rest:  # many options, few of which are changed
            rest[part] = {name: value for name, value in rest[part].items() if value != usual[part][name]}
    return rest | {"architecture": scenario["architecture"]["name"]}
