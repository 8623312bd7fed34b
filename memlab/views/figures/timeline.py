"""One step as a plotly figure: its memory by category, the phases along the axis, and the peak.

At each drawn point the stack adds up to the pool's bytes, to the seven digits of the single-precision numbers that a
notebook stores.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from memlab.config.settings import MemorySettings
from memlab.record.step_record import StepRecord
from memlab.record.timeline import IntArray, Timeline
from memlab.record.transfer import GROUPS
from memlab.record.watch_record import WatchRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.figures.frame import (
    AXIS_TITLES,
    BAND_HEIGHT,
    FLOOR_HEIGHT,
    PLOT_HEIGHT,
    Drawing,
    axis_end,
    blank,
    check_choice,
    drawn_values,
    folded,
    frame,
    interrupt_lines,
    mark_floor,
    mark_peak,
    mark_phases,
    messages,
    phase_names,
    set_ranges,
    timeline_of,
)
from memlab.views.figures.palette import CATEGORY_LOOKS, INK, PATTERN_INK, TRANSPARENT
from memlab.views.figures.resample import AXES, Axis, DrawnPoints, largest_modules, module_growth, phase_spans, resample
from memlab.views.text.columns import in_unit
from memlab.views.text.record import grouped_modules, module_name, rank_words
from memlab.vocabulary import CATEGORIES, POOLS

POOL_TITLES = {
    "device": "allocated on the device",
    "host": "allocated on the host",
    "on_chip": "on chip, not part of the device's bytes",
    "pending_free": "freed on the device, and still in use by another stream",
    "reserved": "reserved by torch's allocator",
}
HELD = "held throughout"
"""Name of the clear area below the others."""
_STATUS_TITLES = {"ok": "", "out_of_memory": ", out of memory", "interrupted": ", interrupted"}
_LETTERS_OF_SETTINGS = 48
"""In a title; longer settings are also on a line of their own."""
_SHARE_TO_NAME = 0.01
"""What grew by less than this share of the peak is not named."""
_BARE_PLOT_HEIGHT = 170
"""Pixels: at least this is left of a bare figure for its plot."""
_LETTERS_AT_PEAK = 42
"""On a line of the label of a peak in the figure's middle."""


def timeline_figure(
    step: StepRecord | WatchRecord | Timeline,
    pool: str = "device",
    axis: Axis = "time",
    *,
    above_start: bool = True,
) -> go.Figure:
    """Draws the bytes of one step by category, the phases along the axis, and the peak with what made it up.

    Args:
        step: A record with its timeline, which one that ran out of memory need not have; what `memlab.watch` yields;
            or a timeline alone.
        pool: One of ``"device"``, ``"host"``, ``"on_chip"``.
        axis: ``"time"`` in milliseconds, or ``"event"``, which gives every event the same width.
        above_start: Starts the bytes axis at what the pool held from the step's start to its end, category by category,
            where that is more than a quarter of the peak: parameters and optimizer state would press all else flat. A
            band below the plot says how much is below the axis. False starts the axis at 0.

    Raises:
        ValueError: If the record has no timeline, or pool or axis is none of the choices.
    """
    return timeline_drawing(step, pool, axis, above_start=above_start, is_bare=False).figure()


def timeline_drawing(
    step: StepRecord | WatchRecord | Timeline, pool: str, axis: Axis, *, above_start: bool, is_bare: bool
) -> Drawing:
    """Draws what `timeline_figure` draws, in plain dictionaries."""
    check_choice("pool", pool, POOLS)
    check_choice("axis", axis, AXES)
    title, lines, timeline = _title(step, pool)
    points = resample(timeline, pool, axis) if timeline else None
    if timeline is None or points is None or not points.total_bytes.any():
        nothing = blank(title, [*lines, f"nothing {POOL_TITLES[pool]} was seen"])
        nothing.layout["height"] = None if is_bare else nothing.layout["height"]
        return nothing
    peak_bytes = int(points.total_bytes[points.peak])
    unit_bytes, unit = binary_unit(peak_bytes)
    outlines = _allocator_outlines(timeline, points) if pool == "device" else {}
    held = points.held_bytes
    if not above_start or held.sum() * 4 <= peak_bytes:
        held = np.zeros_like(held)
    held_bytes = int(held.sum())
    x_title = AXIS_TITLES[axis]
    if outlines and axis == "time":
        x_title += ", by the program's clock"
    if axis == "time" and len(points) > 1 and points.position[-1] == 0:
        x_title = "all events have the same time: axis='event' gives each its own place"
    floor_height = FLOOR_HEIGHT if held_bytes else 0
    y_title = f"on the {pool}" if is_bare else POOL_TITLES[pool]  # a bare chart is low, and its page has the words
    drawing = frame(title, lines, x_title, f"{y_title} ({unit})", band_height=BAND_HEIGHT, floor_height=floor_height)
    if is_bare:
        margin = {"l": 58, "r": 12, "t": BAND_HEIGHT + 8, "b": 44 + floor_height}
        drawing.layout["title"]["text"] = ""
        drawing.layout |= {"height": None, "margin": margin, "showlegend": False}
    drawing.traces += stack_of(points, held, unit_bytes, unit)
    drawing.traces.append(_total_line(timeline, points, pool, unit_bytes, unit))
    drawing.traces += _outline_traces(outlines, points, unit_bytes, unit)
    if is_bare:
        _shorten_hover_texts(drawing, phase_names(timeline, points), unit)
    end = axis_end([points])
    mark_phases(drawing, phase_spans(timeline, axis), end)
    if held_bytes:
        floor = f"{in_unit(held_bytes, unit_bytes)} {unit} held throughout"
        mark_floor(drawing, floor if is_bare else f"{floor}: {_parts(held, unit_bytes)}")
    label = _peak_label(timeline, points, held, pool)
    if is_bare:
        label = [f"<b>peak {in_unit(peak_bytes, unit_bytes)} {unit}</b>"]
    highest_bytes = max([peak_bytes, *(int(num_bytes.max()) for num_bytes in outlines.values())])
    height = _BARE_PLOT_HEIGHT if is_bare else PLOT_HEIGHT
    lowest, highest = held_bytes / unit_bytes, highest_bytes / unit_bytes
    pixels = set_ranges(drawing, end, lowest, highest, num_lines=len(label), plot_height=height)
    above = pixels * (highest_bytes - peak_bytes) / unit_bytes
    mark_peak(drawing, points, unit_bytes, "<br>".join(label), end, shift=above, plot_height=height)
    interrupt_lines(drawing)
    return drawing


def _title(step: StepRecord | WatchRecord | Timeline, pool: str) -> tuple[str, list[str], Timeline | None]:
    """Returns the figure's title, the lines below it, and the timeline if there is one to draw."""
    what = f"memory {POOL_TITLES[pool]}"
    if isinstance(step, Timeline):
        return what.capitalize(), [f"a timeline of {len(step):,} events"], step if len(step) else None
    if isinstance(step, WatchRecord):
        name = html.escape(textwrap.shorten(step.name, _LETTERS_OF_SETTINGS, placeholder=" ..."), quote=False)
        title = f"{name}{_STATUS_TITLES[step.status]}: {what}"
        return title, [f"{step.model}, on {step.backend}", *messages([step])], timeline_of(step)
    settings = html.escape(_short(f"{step.settings}"), quote=False)
    away = _away_between_steps(step.settings)
    name = "Offload between steps" if away else settings
    name = "No recompute, no offload" if step.settings == MemorySettings() else name
    passes = ", forward only" if step.forward_only else ""
    title = f"{name}{passes}{_STATUS_TITLES[step.status]}: {what}"
    lines = [f"{step.scenario}, on {step.backend}{rank_words(step.scenario.layout)}", *messages([step])]
    if away:
        lines.insert(0, f"off the device between steps: {away}")
    elif settings != f"{step.settings}":
        lines.insert(0, f"settings: {step.settings}")
    return title, lines, timeline_of(step)


def _away_between_steps(settings: MemorySettings) -> str:
    """Names what is not on the device between steps; empty if that is nothing, or the settings set anything else."""
    host = {
        f"offload_{name}": getattr(settings, f"offload_{name}") for name in ("parameters", "gradients", "optimizer")
    }
    if settings != MemorySettings(**host):
        return ""
    return ", ".join(group for group, is_away in zip(GROUPS, host.values(), strict=True) if is_away)


def _short(text: str) -> str:
    return textwrap.shorten(text.replace("+", " +"), _LETTERS_OF_SETTINGS, placeholder=" ...").replace(" +", "+")


def _parts(num_bytes: IntArray, unit_bytes: int, most: int = 3) -> str:
    """Names the largest categories of some bytes, of shape [categories], and how many others there are."""
    largest = [code for code in np.argsort(-num_bytes, kind="stable") if num_bytes[code] > 0]
    # A space that does not break keeps a name and its number on one line.
    named = [
        f"{CATEGORIES[code]}\N{NO-BREAK SPACE}{in_unit(int(num_bytes[code]), unit_bytes)}" for code in largest[:most]
    ]
    return ", ".join([*named, *([f"{len(largest) - most} more"] if len(largest) > most else [])])


def stack_of(points: DrawnPoints, held: IntArray, unit_bytes: int, unit: str) -> list[dict[str, Any]]:
    """Returns the filled areas by category, over a clear one for what is held throughout if the axis leaves that out.

    Args:
        held: Bytes by category that are left out, of shape [categories].

    Returns:
        Scatter traces, the lowest area first.
    """
    # All traces share one x array: plotly then stacks them point by point, also where times are equal.
    on_axis = slice(points.num_on_axis)
    common: dict[str, Any] = {"x": drawn_values(points.position[on_axis]), "stackgroup": "pool", "mode": "lines"}
    traces = []
    if held.any():
        base: dict[str, Any] = {"name": HELD, "fillcolor": TRANSPARENT, "showlegend": False}
        base |= {"line": {"width": 0, "color": INK, "shape": "hv"}}
        base |= {"y": drawn_values(np.full(points.num_on_axis, held.sum() / unit_bytes))}
        traces.append(common | base | {"hovertemplate": f"%{{y:.3f}} {unit}"})
    for category, look in CATEGORY_LOOKS.items():
        code = CATEGORIES.index(category)
        above = points.category_bytes[code, on_axis] - held[code]
        if not above.any():
            continue
        also = f" above the {format_bytes(int(held[code]))} held" if held[code] else ""
        area = {
            "y": drawn_values(above / unit_bytes),
            "name": category,
            "line": {"width": 0.5, "color": look.colour, "shape": "hv"},
            "fillpattern": {"shape": look.pattern, "bgcolor": look.colour, "fgcolor": PATTERN_INK}
            | {"size": 7, "solidity": 0.25},
            "fillcolor": look.colour,
            "hovertemplate": f"%{{y:.3f}} {unit}{also}",
        }
        traces.append(common | area)
    return traces


def _total_line(timeline: Timeline, points: DrawnPoints, pool: str, unit_bytes: int, unit: str) -> dict[str, Any]:
    """The outline of the stack; its texts are shown when a reader points at a moment."""
    texts = []
    modules = largest_modules(timeline, points.event_index, pool)
    for phase, largest in zip(phase_names(timeline, points), modules, strict=True):
        names = "".join(f"<br>{html.escape(module_name(name))} +{format_bytes(size)}" for name, size in largest)
        texts.append(phase + names)
    return {
        "x": drawn_values(points.position[: points.num_on_axis]),
        "y": drawn_values(points.total_bytes[: points.num_on_axis] / unit_bytes),
        "name": "total",
        "text": texts[: points.num_on_axis],
        "mode": "lines",
        "line": {"width": 0.8, "color": INK, "shape": "hv"},
        "showlegend": False,
        "hovertemplate": f"%{{y:.3f}} {unit}, %{{text}}",
    }


def _shorten_hover_texts(drawing: Drawing, phases: Sequence[str], unit: str) -> None:
    """Shortens the hover texts of a bare chart to bytes and phase: a longer one would not fit beside the point."""
    drawing.layout["hovermode"] = "x"
    for trace in drawing.traces:
        del trace["hovertemplate"]
        if "stackgroup" in trace:
            trace["hoverinfo"] = "skip"
        elif trace["name"] == "total":
            trace["text"] = list(phases[: len(trace["y"])])
            trace["hovertemplate"] = f"%{{y:.2f}} {unit}<br>%{{text}}<extra></extra>"
        else:
            trace["hovertemplate"] = f"{trace['name'].split()[0]} %{{y:.2f}} {unit}<extra></extra>"


def _allocator_outlines(timeline: Timeline, points: DrawnPoints) -> dict[str, IntArray]:
    """What only a real allocator has above the allocated bytes, of shape [points] each."""
    reserved = timeline.total_bytes("reserved")[points.event_index]
    pending = timeline.total_bytes("pending_free")[points.event_index]
    outlines = {"active (another stream still uses it)": points.total_bytes + pending} if pending.any() else {}
    return outlines | ({"reserved by torch": reserved} if reserved.any() else {})


def _outline_traces(
    outlines: dict[str, IntArray], points: DrawnPoints, unit_bytes: int, unit: str
) -> Iterator[dict[str, Any]]:
    for name, num_bytes in outlines.items():
        yield {
            "x": drawn_values(points.position[: points.num_on_axis]),
            "y": drawn_values(num_bytes[: points.num_on_axis] / unit_bytes),
            "name": name,
            "mode": "lines",
            "line": {"width": 1.2, "color": INK, "shape": "hv"}
            | {"dash": "dash" if name.startswith("reserved") else "dot"},
            "hovertemplate": f"%{{y:.3f}} {unit}",
        }


def _peak_label(timeline: Timeline, points: DrawnPoints, held: IntArray, pool: str) -> list[str]:
    """The lines at the peak: its size, its parts above the start of the axis, and what grew most since the start."""
    total = int(points.total_bytes[points.peak])
    unit_bytes, unit = binary_unit(total)
    head = f"<b>peak {in_unit(total, unit_bytes)} {unit}</b>"
    if held.any():
        held_bytes = int(held.sum())
        head += f" = {in_unit(held_bytes, unit_bytes)} held + {in_unit(total - held_bytes, unit_bytes)}"
    lines = [head, *folded(_parts(points.category_bytes[:, points.peak] - held, unit_bytes), _LETTERS_AT_PEAK)]
    grown = grouped_modules(module_growth(timeline, int(points.event_index[points.peak]), pool), {})
    largest = [(name, size) for name, size in list(grown.items())[:1] if size >= total * _SHARE_TO_NAME]
    for name, size in largest:
        size_text = format_bytes(size).replace(" ", "\N{NO-BREAK SPACE}")
        lines += folded(f"grew most: {name}, {size_text}", _LETTERS_AT_PEAK)
    return lines
