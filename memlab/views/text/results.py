"""Many measured settings as one Markdown page: what each saves and costs, with the versions that were seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.units import GIB

_COLUMNS = (
    "setting",
    "peak GiB",
    "saved GiB",
    "moved GiB",
    "made again GiB",
    "R",
    "left GiB",
    "reserved GiB",
    "step ms",
    "spread",
    "x",
    "tokens/s",
)

_FEWEST_FOR_SPREAD = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One setting: the record of a steady step, and how long that step and its repetitions took."""

    record: StepRecord
    seconds: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Builds a result from one line of a results file.

        Raises:
            ValueError: If a field is missing or unknown.
        """
        if set(values) != {"record", "seconds"}:
            if "scenario" in values:
                raise ValueError(
                    "a measured step where a result must be, with record and seconds: give it with --steps"
                )
            raise ValueError(f"fields are {sorted(values)}, must be record and seconds: write the file anew")
        return cls(StepRecord.from_dict(values["record"]), tuple(values["seconds"]))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {"record": self.record.to_dict(), "seconds": list(self.seconds)}


def results_page(results: Iterable[Result]) -> str:
    """Writes a table for each scenario, in the order of the results; each setting is held against the scenario's plain.

    Args:
        results: Of any scenarios; each has one without settings.

    Raises:
        ValueError: If a scenario has no result without settings, or there is no result.
    """
    groups: dict[Scenario, list[Result]] = {}
    for result in results:
        groups.setdefault(result.record.scenario, []).append(result)
    if not groups:
        raise ValueError("the results are empty, must be at least one: measure some settings first")
    lines = [_HEAD.strip(), ""]
    for scenario, group in groups.items():
        name = f"{scenario}"
        plain = next((result for result in group if result.record.settings == MemorySettings()), None)
        if plain is None:
            raise ValueError(f"{name} has no result without settings, must have one to hold others against: measure it")
        versions = ", ".join(f"{package} {version}" for package, version in plain.record.versions.items())
        repeats = min(len(result.seconds) for result in group)
        lines += [f"## {name}", f"On {plain.record.backend}: {versions}. Median of {repeats} steps.", ""]
        lines += _table([_row(result, plain) for result in group])
        lines.append("")
    return "\n".join(lines)


_HEAD = """
# Results
What each recompute and offload module saves and costs, measured on the machine that each table names. Made by
`memlab results` from the records beside this page, never by hand.

- **peak**: the most bytes allocated in the step, parameters, gradients and optimizer state included.
- **saved**: plain's peak less this one; below zero it costs.
- **moved**: what activation offload copied to the host. **made again**: what backward computed a second time.
- **R** = saved / moved, or saved / made again where nothing moved: 1 if each byte touched was a byte off the peak.
- **left**: alive after the step beyond parameters, gradients and optimizer state.
- **reserved**: the most that torch's allocator held of the device.
- **step**: forward, backward and optimizer, metered. **spread**: from the first to the third quarter of the steps, as a
  share of the median; where it is wide, the host was slower than the GPU, and times tell little. **x**: against plain.
"""


def _row(result: Result, plain: Result) -> tuple[str, ...]:
    record = result.record
    if record.status != "ok":
        return (str(record.settings), record.status.replace("_", " "), *[""] * (len(_COLUMNS) - 2))
    saved = plain.record.peak_allocated_bytes - record.peak_allocated_bytes
    moved = sum(record.offloaded_bytes_by_module.values())
    touched = moved or record.recomputed_bytes
    step, plain_step = statistics.median(result.seconds), statistics.median(plain.seconds)
    return (
        str(record.settings),
        _gib(record.peak_allocated_bytes),
        _gib(saved) if record is not plain.record else "",
        _gib(moved) if moved else "",
        _gib(record.recomputed_bytes) if record.recomputed_bytes else "",
        f"{saved / touched:.2f}" if touched else "",
        _gib(record.residual_bytes) if record.residual_bytes else "0",
        "" if record.peak_reserved_bytes is None else _gib(record.peak_reserved_bytes),
        f"{step * 1e3:.0f}",
        _spread(result.seconds),
        f"{step / plain_step:.2f}",
        f"{record.scenario.tokens_per_step / step:,.0f}",
    )


def _spread(seconds: Sequence[float]) -> str:
    if len(seconds) < _FEWEST_FOR_SPREAD:
        return ""
    first, median, third = statistics.quantiles(seconds, n=4)
    return f"{(third - first) / median:.0%}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "| --- |" + " ---: |" * (len(_COLUMNS) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f}"
