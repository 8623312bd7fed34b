"""Small figures for the report, as inline SVG: the trend of a metric, and a step's memory over the baseline's.

They take their colours from the page's style sheet, so that they are readable in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from memlab.record.timeline import Timeline
from memlab.views.figures.resample import DrawnPoints, resample

_TREND_WIDTH, _TREND_HEIGHT, _TREND_MARGIN = 110, 20, 4
_STEP_WIDTH, _STEP_HEIGHT = 480, 90
_NUM_BINS = 60


def trend(values: Sequence[float | None], baseline: float | None, label: str, *, is_off: bool) -> str:
    """Draws a metric over the kept runs, the newest at the right, with its baseline as a dashed line.

    Args:
        values: One per run, the oldest first; None for a run that does not have the metric.
        baseline: None if the metric has no baseline.
        is_off: Whether the newest value differs by more than the comparison allows.
    """
    known = [value for value in values if value is not None]
    around = known if baseline is None else [*known, baseline]
    if not around:
        return ""
    low, high = min(around), max(around)

    def height(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{_TREND_HEIGHT - _TREND_MARGIN - share * (_TREND_HEIGHT - 2 * _TREND_MARGIN):.1f}"

    step = (_TREND_WIDTH - 2 * _TREND_MARGIN) / max(len(values) - 1, 1)
    across = [_TREND_WIDTH - _TREND_MARGIN - step * (len(values) - 1 - number) for number in range(len(values))]
    points = [f"{x:.1f},{height(value)}" for x, value in zip(across, values, strict=True) if value is not None]
    parts = []
    if baseline is not None:
        parts.append(f'<path class="was" d="M0 {height(baseline)}H{_TREND_WIDTH}"/>')
    parts.append(f'<polyline class="now" points="{" ".join(points)}"/>')
    if values[-1] is not None:
        off = " off" if is_off else ""
        parts.append(f'<circle class="dot{off}" cx="{across[-1]:.1f}" cy="{height(values[-1])}" r="2.5"/>')
    return _svg("trend", _TREND_WIDTH, _TREND_HEIGHT, label, parts)


def step_outline(now: Timeline, baseline: Timeline | None, label: str) -> str:
    """Draws the device bytes of a step event by event, over those of the baseline if there is one.

    The axis is in events, not time: they are the same every night, so the lines of two equal steps coincide.

    Args:
        baseline: The step of a kept run that agreed with the baseline.
    """
    drawn = [resample(timeline, axis="event", num_bins=_NUM_BINS) for timeline in (baseline, now) if timeline]
    drawn = [points for points in drawn if len(points)]
    if not drawn:
        return ""
    low = min(int(points.total_bytes.min()) for points in drawn)
    high = max(int(points.total_bytes.max()) for points in drawn)
    end = max(float(points.position[-1]) for points in drawn) or 1.0
    classes = ("was", "now") if len(drawn) == 2 else ("now",)
    parts = [
        f'<path class="{name}" d="{_path(points, low, max(high - low, 1), end)}"/>'
        for name, points in zip(classes, drawn, strict=True)
    ]
    return _svg("step", _STEP_WIDTH, _STEP_HEIGHT, label, parts)


def _path(points: DrawnPoints, low: int, span: int, end: float) -> str:
    across = np.rint(points.position / end * (_STEP_WIDTH - 4) + 2).astype(int)
    down = np.rint(_STEP_HEIGHT - 3 - (points.total_bytes - low) / span * (_STEP_HEIGHT - 6)).astype(int)
    return f"M{across[0]} {down[0]}" + "".join(f"H{x}V{y}" for x, y in zip(across[1:], down[1:], strict=True))


def _svg(name: str, width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
