"""Many measured settings as one Markdown page: what each saves and costs, on which hardware and with which versions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.analysis.limits import Limit
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB

_COLUMNS = (
    "setting",
    "peak GiB",
    "saved GiB",
    "transferred GiB",
    "recomputed GiB",
    "R",
    "residual GiB",
    "reserved GiB",
    "step ms",
    "spread",
    "time ratio",
    "tokens/s",
)

_STATE_COLUMNS = (
    "training state",
    "start GiB",
    "freed GiB",
    "peak GiB",
    "saved GiB",
    "peak in",
    "reserved GiB",
    "host GiB",
    "pinned GiB",
    "step ms",
    "spread",
    "time ratio",
)

_FEWEST_FOR_SPREAD = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One setting: the record of a steady step, and how long that step and its repetitions took."""

    record: StepRecord
    seconds: tuple[float, ...]
    """Empty if other programs used the GPU or the host meanwhile: the step's bytes are right then, its time is not."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Builds a result from one line of a results file.

        Raises:
            ValueError: If a field is missing or unknown.
        """
        if set(values) != {"record", "seconds"}:
            if "scenario" in values:
                raise ValueError(
                    "it is a measured step, must be a result with record and seconds: give the file with --steps"
                )
            raise ValueError(f"fields are {sorted(values)}, must be record and seconds: measure the settings again")
        seconds = values["seconds"]
        if not isinstance(seconds, list) or not all(_is_time(second) for second in seconds):
            raise ValueError(f"seconds are {seconds!r}, must be a list of positive numbers: measure the settings again")
        return cls(StepRecord.from_dict(values["record"]), tuple(seconds))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {"record": self.record.to_dict(), "seconds": list(self.seconds)}


def results_page(results: Iterable[Result], hardware: str = "") -> str:
    """Writes a table of settings and one of training states per scenario, each compared with plain Megatron.

    Args:
        results: Results of any scenarios; each scenario has one without settings, in the default training state.
        hardware: What the steps ran on, for records that do not say it.

    Raises:
        ValueError: If a scenario has no completed result without settings, or there is no result.
    """
    groups: dict[Scenario, list[Result]] = {}
    for result in results:
        groups.setdefault(result.record.scenario.in_default_state, []).append(result)
    if not groups:
        raise ValueError("the results are empty, must be at least one: measure some settings first")
    lines = [_HEAD.strip(), ""]
    for scenario, group in groups.items():
        name = f"{scenario}"
        plain = next(
            (result for result in group if _is_plain(result.record) and result.record.status == "ok"),
            None,
        )
        if plain is None:
            raise ValueError(f"{name} has no result without settings, must have one to compare with: measure it")
        lines += [f"## {name}", measured_on([result.record for result in group], hardware) + _repeats(group), ""]
        settings = [result for result in group if result.record.scenario == scenario]
        states = [result for result in group if result not in settings]
        if len(settings) > 1 or not states:
            lines += [*_table(_COLUMNS, [_row(result, plain) for result in settings]), ""]
        if states:
            lines += [*_table(_STATE_COLUMNS, [_state_row(result, plain) for result in (plain, *states)]), ""]
    return "\n".join(lines)


_HEAD = """
# Results
This page shows what each recompute and offload module, and each option of the training state, saves and costs. Each
table names the hardware that it was measured on. `memlab results` writes this page from measured records; do not edit
it by hand.

- **peak**: the most bytes allocated at any moment of the step, including parameters, gradients and optimizer state.
- **saved**: the peak without settings minus this peak. If it is negative, the setting raises the peak.
- **transferred**: bytes that activation offload copied to the host. **recomputed**: bytes that backward recomputed.
- **R**: saved / transferred, or saved / recomputed if nothing was transferred. R is 1 if each of these bytes lowers the
  peak by one byte. (The offload audit defines its own R: saved / expected.)
- **residual**: bytes still allocated after the step, without parameters, gradients, optimizer state and workspace.
- **reserved**: the most device memory that torch's allocator held during the step.
- **step**: the time of the whole step, with the meter on. **spread**: the interquartile range of the step times,
  divided by their median. Step times vary if the CPU launches kernels more slowly than the GPU runs them. If the
  spread is large, do not rely on the times. **time ratio**: the step time divided by the step time without settings.
  A row has no times if other programs used the GPU or the host while it was measured.

Tables of training states have some columns of their own:

- **start**: bytes allocated when the step begins. **freed**: the start in the default state minus this start.
- **peak in**: the phase of the step in which the peak is reached.
- **host**: the most host memory in use during the step. **pinned**: page-locked host memory that torch holds at the
  step's end; torch rounds each request up to a power of two. Several states were measured one after the other in one
  process, and torch keeps such memory for later requests. So a row with a value in *pinned* and none in *host* (such as
  `cross_entropy_loss_fusion`) shows what an earlier state left over: its own step used no host memory.
"""


def measured_on(steps: Iterable[StepRecord | Limit], hardware: str = "") -> str:
    """Returns a sentence that names the hardware and the versions of steps: each part once, with all its values.

    Args:
        steps: What was measured.
        hardware: The hardware of those steps whose record does not name it.
    """
    parts: dict[str, dict[str, set[str]]] = {}
    steps = list(steps)
    for environment in [step.hardware or {"GPU": hardware or "not recorded"} for step in steps] + [
        step.versions for step in steps
    ]:
        for name, value in environment.items():
            head, _, detail = value.partition(", ")
            parts.setdefault(name, {}).setdefault(head, set()).add(detail)
    return "Measured on " + "; ".join(f"{name} {_alternatives(values)}" for name, values in parts.items()) + "."


def _alternatives(values: dict[str, set[str]]) -> str:
    texts = []
    for head, details in sorted(values.items()):
        known = " or ".join(sorted(details - {""}))
        texts.append(f"{head} ({known})" if known else head)
    return " or ".join(texts)


def _repeats(results: Sequence[Result]) -> str:
    counts = sorted({len(result.seconds) for result in results if result.seconds})
    if not counts:
        return ""
    if counts == [1]:
        return " Each step time was measured once."
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f" Each step time is the median of {number} steps."


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _row(result: Result, plain: Result) -> tuple[str, ...]:
    record = result.record
    if record.status != "ok":
        return (str(record.settings), record.status.replace("_", " "), *[""] * (len(_COLUMNS) - 2))
    saved = plain.record.peak_allocated_bytes - record.peak_allocated_bytes
    transferred = sum(record.offloaded_bytes_by_module.values())
    touched = transferred or record.recomputed_bytes
    tokens = record.scenario.tokens_per_step
    return (
        str(record.settings),
        _gib(record.peak_allocated_bytes),
        _gib(saved) if record is not plain.record else "",
        _gib(transferred) if transferred else "",
        _gib(record.recomputed_bytes) if record.recomputed_bytes else "",
        f"{saved / touched:.2f}" if touched else "",
        _gib(record.residual_bytes) if record.residual_bytes else "0",
        "" if record.peak_reserved_bytes is None else _gib(record.peak_reserved_bytes),
        *_times(result, plain),
        f"{tokens / statistics.median(result.seconds):,.0f}" if result.seconds else "",
    )


def _state_row(result: Result, plain: Result) -> tuple[str, ...]:
    record, default = result.record, plain.record
    if record.status != "ok":
        return (str(record.scenario.state), record.status.replace("_", " "), *[""] * (len(_STATE_COLUMNS) - 2))
    changes = ("", "")
    if record is not default:
        freed = default.static_bytes - record.static_bytes
        changes = _gib(freed), _gib(default.peak_allocated_bytes - record.peak_allocated_bytes)
    settings = "" if record.settings == MemorySettings() else f", {record.settings}"
    return (
        f"{record.scenario.state}{settings}",
        _gib(record.static_bytes),
        changes[0],
        _gib(record.peak_allocated_bytes),
        changes[1],
        record.peak_phase,
        "" if record.peak_reserved_bytes is None else _gib(record.peak_reserved_bytes),
        _gib(record.host_bytes) if record.host_bytes >= MIB else "",
        _gib(record.host_reserved_bytes or 0) if (record.host_reserved_bytes or 0) >= MIB else "",
        *_times(result, plain),
    )


def _times(result: Result, plain: Result) -> tuple[str, str, str]:
    if not result.seconds:
        return "", "", ""
    step = statistics.median(result.seconds)
    ratio = f"{step / statistics.median(plain.seconds):.2f}" if plain.seconds else ""
    return f"{step * 1e3:.0f}", _spread(result.seconds), ratio


def _is_plain(record: StepRecord) -> bool:
    return record.settings == MemorySettings() and record.scenario == record.scenario.in_default_state


def _spread(seconds: Sequence[float]) -> str:
    if len(seconds) < _FEWEST_FOR_SPREAD:
        return ""
    first, median, third = statistics.quantiles(seconds, n=4)
    return f"{(third - first) / median:.0%}"


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f}"
