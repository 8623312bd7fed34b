"""Compares what a case measured with its baseline: which metrics are gated, how tightly, and which of them changed.

| metric | cpu, simulated | cuda |
| --- | --- | --- |
| bytes, counts and other numbers | exactly | within 0.1 %, bytes (and parts of a peak) also within 4 MiB |
| bytes of a category at the peak | exactly | as above, or as at another moment less than 4 MiB below the peak |
| a record's status | exactly | exactly |
| loss | exactly if torch, megatron-core and the processor are those of the baseline; else reported | reported |
| reserved bytes, times and rates | reported | reported |

Too low fails like too high: a peak that fell means that the step no longer does something, or that the baseline must
be updated. A loss is the sum of a million roundings, which another processor or another torch takes in another order.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.backend_kind import KINDS
from memlab.config.layout import Layout
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.regression.case_measurements import CUDA_SLACK_BYTES, Measured, MetricValue, RecordMeasured
from memlab.units import format_bytes

_CUDA_TOLERANCE = 0.001
_MODULES_OF = {
    "peak_": "peak_by_module",
    "activation_peak": "peak_by_module",
    "residual": "residual_by_module",
    "recomputed": "recomputed_by_module",
}
"""By the beginning of a metric's name: the field of a record that has the metric's bytes by module."""
_PARTS: dict[str, Any] = {
    "layout": Layout(),
    "state": TrainingState(),
    "allocator": AllocatorSettings(),
    "versions": Versions(),
}
"""Parts of a scenario whose values are compared one by one, with the usual values."""
_NUMERIC_PACKAGES = ("torch", "megatron-core")
"""The packages that compute what has an exact baseline: not on a GPU, where Transformer Engine computes too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricChange:
    """One gated metric that differs from its baseline."""

    record: str
    metric: str
    baseline: MetricValue | None
    """None if the baseline does not have the metric."""
    now: MetricValue | None
    """None if the run does not have the metric."""
    module: str = ""
    """The module that allocated the largest part of the change, as ``+8.00 MiB in decoder.layers.0.mlp``."""
    changed: str = ""
    """The parameters, settings and versions that differ from the baseline's."""

    @property
    def is_missing(self) -> bool:
        """Whether the baseline has nothing to compare the metric with."""
        return self.baseline is None

    @property
    def share(self) -> float:
        """The size of the change as a share of the baseline; infinite if one side has no number."""
        if isinstance(self.baseline, str) or isinstance(self.now, str) or not self.baseline or self.now is None:
            return math.inf
        return abs(self.now - self.baseline) / abs(self.baseline)

    @property
    def difference(self) -> str:
        """The size of the change, in words."""
        if self.baseline is None:
            return "not in the baseline"
        if self.now is None:
            return "gone"
        if isinstance(self.baseline, str) or isinstance(self.now, str):
            return "changed"
        delta = self.now - self.baseline
        share = f" ({delta / self.baseline:+.2%})" if self.baseline else ""
        if _counts_bytes(self.metric):
            return f"{'+' if delta > 0 else ''}{format_bytes(int(delta))}{share}"
        return f"{delta:+.6g}{share}"


def tolerance(metric: str, backend: str, *, same_rounding: bool) -> float | None:
    """Returns the share of its baseline by which a metric may differ; None if the metric is reported and never gated.

    Args:
        metric: Its name, as in `RecordMeasured.metrics`.
        same_rounding: Whether both sides were computed by the same packages on the same processor.
    """
    if metric.endswith(("seconds", "per_second", "_ms")) or "reserved" in metric:
        return None
    if metric == "status":
        return 0.0
    if metric == "loss" or metric.endswith("_loss"):
        return 0.0 if same_rounding and not KINDS[backend].on_gpu else None
    return _CUDA_TOLERANCE if KINDS[backend].on_gpu else 0.0


def has_same_rounding(baseline: Measured, now: Measured) -> bool:
    """Whether two measurements of one computation must agree to the last bit."""
    same_packages = all(baseline.versions.get(name) == now.versions.get(name) for name in _NUMERIC_PACKAGES)
    return same_packages and baseline.machine == now.machine


def compare_with_baseline(baseline: Measured, now: Measured, backend: str) -> list[MetricChange]:
    """Returns the gated metrics that changed, the most important first."""
    same_rounding = has_same_rounding(baseline, now)
    found: list[tuple[int, MetricChange]] = []
    for record in baseline.records | now.records:
        before = baseline.records.get(record, RecordMeasured(metrics={}))
        after = now.records.get(record, RecordMeasured(metrics={}))
        changed = "; ".join(_changes(baseline, now, before, after))
        for rank, metric in enumerate(after.metrics | before.metrics):
            share = tolerance(metric, backend, same_rounding=same_rounding)
            old, new = before.metrics.get(metric), after.metrics.get(metric)
            is_whole = isinstance(old, int) or isinstance(new, int)  # a ratio of bytes is not a number of bytes
            slack = CUDA_SLACK_BYTES if KINDS[backend].on_gpu and is_whole and _counts_bytes(metric) else 0
            if share is None or _agree(old, new, share, slack):
                continue
            if slack and (_is_near_peak(metric, old, after) or _is_near_peak(metric, new, before)):
                continue
            module = _module(metric, before, after)
            change = MetricChange(record=record, metric=metric, baseline=old, now=new, module=module, changed=changed)
            found.append((rank, change))
    return [change for _, change in sorted(found, key=lambda pair: pair[0])]


def _counts_bytes(metric: str) -> bool:
    return "bytes" in metric or metric.startswith("peak_")


def _agree(old: MetricValue | None, new: MetricValue | None, share: float, slack: int) -> bool:
    if slack and (old is None) != (new is None):
        old, new = old or 0, new or 0  # a category of which nothing was allocated has no metric
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return abs(new - old) <= max(share * abs(old), slack)
    return old == new


def _is_near_peak(metric: str, value: MetricValue | None, record: RecordMeasured) -> bool:
    """Whether a category may have so many bytes at a moment at which the step of a record nearly reaches its peak."""
    group, _, category = metric.partition("/")
    if group != "peak_by_category" or not record.most_near_peak or isinstance(value, str):
        return False
    least, most = record.least_near_peak.get(category, 0), record.most_near_peak.get(category, 0)
    return least - CUDA_SLACK_BYTES <= (value or 0) <= most + CUDA_SLACK_BYTES


def _changes(baseline: Measured, now: Measured, before: RecordMeasured, after: RecordMeasured) -> Iterator[str]:
    yield from _changed("parameter", baseline.parameters, now.parameters)
    if before.metrics and after.metrics:
        # The lines for the parameters name these already.
        scenarios = [_flat(side.scenario, without=now.parameters) for side in (before, after)]
        yield from _changed("scenario", *scenarios)
        yield from _changed("setting", before.settings, after.settings)
    yield from _changed("version of", baseline.versions, now.versions)


def _flat(scenario: Mapping[str, Any], *, without: Container[str]) -> dict[str, Any]:
    """Returns a scenario with the values of its parts as fields; what an older memlab did not have is usual."""
    flat = {name: value for name, value in scenario.items() if name not in _PARTS}
    for part, usual in _PARTS.items():
        if part not in without:
            flat |= asdict(usual) | scenario.get(part, {})
    return {name: value for name, value in flat.items() if name not in without}


def _changed(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in dict(before) | dict(after):
        if before.get(name) != after.get(name):
            yield f"{kind} {name}: {_shown(before.get(name))} -> {_shown(after.get(name))}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _module(metric: str, before: RecordMeasured, after: RecordMeasured) -> str:
    by_module = next((name for beginning, name in _MODULES_OF.items() if metric.startswith(beginning)), None)
    if by_module is None:
        return ""
    old: dict[str, int] = getattr(before, by_module)
    new: dict[str, int] = getattr(after, by_module)
    if any(figures.metrics.get(metric) and not parts for figures, parts in ((before, old), (after, new))):
        return ""  # the baseline is older than these figures, or the record has no timeline
    deltas = {name: new.get(name, 0) - old.get(name, 0) for name in old | new}
    # If the peak is at another moment, some modules have more bytes and some have fewer: name one that follows the sum.
    direction = 1 if sum(deltas.values()) >= 0 else -1
    name = max(deltas, key=lambda name: direction * deltas[name], default="")
    if not deltas.get(name):
        return ""
    sign = "+" if deltas[name] > 0 else ""
    return f"{sign}{format_bytes(deltas[name])} in {name or '(outside the modules)'}"
