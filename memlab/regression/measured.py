"""What a case measured, as plain data: what a run keeps in its summary, and what a baseline is made of."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from memlab.config.architectures import Architecture
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.regression.suite.parameters import ParameterValue

MetricValue: TypeAlias = int | float | str

LAB = "(lab)"
"""Stands in the place of a record's name for the metrics that a lab handed over beside its records."""

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
_METRICS_BY_NAME = ("offloaded_bytes_by_module", "offloaded_bytes_by_group", "peak_by_category")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordMeasured:
    """The figures of one record, and what they were measured under."""

    metrics: dict[str, MetricValue]
    """By name, what matters most first; those by module or category as ``peak_by_category/activations``."""
    peak_by_module: dict[str, int] = field(default_factory=dict)
    """Says where a difference comes from; not compared by itself."""
    residual_by_module: dict[str, int] = field(default_factory=dict)
    recomputed_by_module: dict[str, int] = field(default_factory=dict)
    """Like `peak_by_module`, of what is left at the step's end, and of what backward made again."""
    scenario: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Those that are on."""

    @property
    def settings_name(self) -> str:
        """The settings as tables and legends name them; empty where there are none."""
        return str(MemorySettings.from_dict(self.settings)) if self.settings else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one case."""

    lab: str
    parameters: dict[str, ParameterValue]
    versions: dict[str, str]
    machine: str
    """The processor: results of floating point are only equal on equal ones."""
    records: dict[str, RecordMeasured]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """Builds what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown, or not of its type.
        """
        try:
            records = {name: RecordMeasured(**record) for name, record in values["records"].items()}
            measured = cls(**dict(values) | {"records": records})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"fields are missing or unknown ({error})") from error
        wrong = [
            f"{record}: {name} is {value!r}"
            for record, figures in measured.records.items()
            for name, value in figures.metrics.items()
            if isinstance(value, bool) or not isinstance(value, (int, float, str))
        ]
        if wrong or not all(isinstance(part, dict) for part in (measured.parameters, measured.versions)):
            raise ValueError(wrong[0] if wrong else "parameters or versions are no mapping")
        return measured


def read_measured(folder: Path, lab: str, parameters: Mapping[str, ParameterValue], backend: str) -> Measured:
    """Reads the figures that a lab's last cell left in the folder of its run.

    Raises:
        ValueError: If a record was made on another backend.
    """
    handed_over = json.loads((folder / "metrics.json").read_text())
    records = {}
    for name in handed_over["records"]:
        record = StepRecord.load(folder / "records" / name)
        values = record.to_dict()
        if values["backend"] != backend:
            raise ValueError(
                f"record {name} was made on {values['backend']}, but the suite says {backend}: "
                "let the lab leave the backend open, or name this one in the suite"
            )
        metrics = {key: values[key] for key in _METRICS if values[key] is not None}
        for key in _METRICS_BY_NAME:
            metrics |= {f"{key}/{part}": num_bytes for part, num_bytes in values[key].items()}
        scenario = _told(values["scenario"])
        records[name] = RecordMeasured(
            metrics=metrics,
            peak_by_module=values["peak_by_module"],
            residual_by_module=record.residual_by_module,
            recomputed_by_module=record.recomputed_by_module,
            scenario=scenario,
            settings=_on(values["settings"]),
        )
    if handed_over["extra"]:
        records[LAB] = RecordMeasured(metrics=handed_over["extra"])
    return Measured(
        lab=lab, parameters=dict(parameters), versions=handed_over["versions"], machine=_machine(), records=records
    )


def _on(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that are on, and gradients that stay while the optimizer goes."""
    stay = {"offload_gradients"} if settings["offload_optimizer"] else set()
    return {
        name: value for name, value in settings.items() if value is not None and (value is not False or name in stay)
    }


def _machine() -> str:
    """Names the processor and its vector units: a virtual machine's model name alone says little."""
    facts = {"model name": platform.processor() or "unknown processor", "flags": ""}
    information = Path("/proc/cpuinfo")
    for line in information.read_text(errors="replace").splitlines() if information.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() in facts:
            facts[name.strip()] = value.strip()
    units = [name for name in _VECTOR_UNITS if name in facts["flags"].split()]
    return " ".join([platform.machine(), facts["model name"], *units])


def _told(scenario: dict[str, Any]) -> dict[str, Any]:
    """Returns a scenario as plain values for a reader, without what is as it always is: one rank, balanced experts."""
    usual = Scenario.of(architecture=Architecture(**scenario["architecture"])).to_dict()
    nested = ("layout", "routing", "expert_buffers")
    rest = {name: value for name, value in scenario.items() if name not in nested or value != usual[name]}
    return rest | {"architecture": scenario["architecture"]["name"]}
