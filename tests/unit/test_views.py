"""Colours, figures, tables and what a notebook cell receives. Figures are read as data; no browser draws here."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import pytest

from memlab.analysis.diagnosis import Finding
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, MemorySettings
from memlab.record.offload_audit import ModuleAccount, OffloadAudit, StillResident
from memlab.record.out_of_memory import FailedAllocation, OutOfMemory
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import GIB, KIB, MIB
from memlab.views.display import View, compare, show
from memlab.views.figures.compare import compare_figure
from memlab.views.figures.palette import CATEGORY_LOOKS, INK, PHASE_OPACITIES, series_look
from memlab.views.figures.resample import AXES, Axis
from memlab.views.figures.timeline import timeline_figure
from memlab.views.panel.static_files import page_code
from memlab.views.text.audits import offload_blocks
from memlab.views.text.columns import LINE_WIDTH, MINUS, Table, as_html, as_text, in_unit
from memlab.views.text.compare import compare_blocks, record_names
from memlab.views.text.difference import comparison_text
from memlab.views.text.record import grouped_modules, record_table
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

from .builders import TimelineBuilder, out_of_memory, random_timeline, record_of, scenario, training_step

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
EVERYTHING = MemorySettings(offload_modules=OFFLOAD_MODULES, offload_parameters=True, offload_optimizer=True)
PLAIN = record_of(training_step())
RECOMPUTED = record_of(training_step(recompute=True), FULL)

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
DICHROMACY = {
    "normal sight": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
CATEGORY_COLOURS = [look.colour for look in CATEGORY_LOOKS.values()]
SERIES_COLOURS = [series_look(position).colour for position in range(5)]


def linear_rgb(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    xyz = to_xyz @ rgb / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def seen_distance(one: str, other: str, sight: str) -> float:
    """CIE76 distance of two colours as an eye without one kind of cone sees them."""
    matrix = DICHROMACY[sight]
    labs = [cielab(np.clip(matrix @ linear_rgb(colour), 0, 1)) for colour in (one, other)]
    return float(np.linalg.norm(labs[0] - labs[1]))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((float(linear_rgb(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [CATEGORY_COLOURS, SERIES_COLOURS], ids=["categories", "series"])
@pytest.mark.parametrize("sight", DICHROMACY)
def test_palette_stays_apart_for_colour_blind_readers(sight: str, colours: list[str]) -> None:
    assert min(seen_distance(one, other, sight) for one, other in combinations(colours, 2)) >= 12


def test_no_two_compared_steps_have_a_colour_of_one_name() -> None:
    """Two violets were 43 apart, far enough for every eye and one word in a sentence."""
    assert min(seen_distance(*pair, "normal sight") for pair in combinations(SERIES_COLOURS, 2)) >= 50


def test_compared_steps_wear_no_category_s_colour() -> None:
    pairs = [(series, category) for series in SERIES_COLOURS for category in CATEGORY_COLOURS]
    assert min(seen_distance(*pair, "normal sight") for pair in pairs) >= 12


@pytest.mark.parametrize("background", ["#FFFFFF", "#111111"], ids=["light", "dark"])
def test_text_and_lines_read_on_light_and_dark_pages(background: str) -> None:
    assert contrast(INK, background) >= 4
    assert min(contrast(colour, background) for colour in SERIES_COLOURS) >= 2.9


def test_the_panel_explains_the_pinned_line_in_its_colour() -> None:
    (line,) = re.findall(r"memlab-pinned-line::before \{[^}]*dashed (#\w+)", page_code("panel.css"))
    assert line == series_look(4).colour


def test_colour_is_never_the_only_sign() -> None:
    assert len({look.pattern for look in CATEGORY_LOOKS.values()}) == len(CATEGORIES)
    assert len({(series_look(at).colour, series_look(at).dash) for at in range(30)}) == 30
    assert len({series_look(at).dash for at in range(6)}) == 6


def test_every_category_and_phase_has_one_look() -> None:
    assert sorted(CATEGORY_LOOKS) == sorted(CATEGORIES)
    assert tuple(PHASE_OPACITIES) == PHASES


# Figures


def areas(figure: go.Figure) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in figure.data if trace.stackgroup}


def total_of(figure: go.Figure) -> go.Scatter:
    return next(trace for trace in figure.data if trace.name == "total")


def texts(figure: go.Figure) -> str:
    """All that is written on a figure, as one line without markup."""
    titles = [figure.layout.title.text, figure.layout.xaxis.title.text]
    parts = [*(text or "" for text in titles), *(annotation.text for annotation in figure.layout.annotations)]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", " ".join(parts)))


def totals_event_by_event(timeline: Timeline, pool: str) -> list[int]:
    total, totals = 0, []
    for code, delta in zip(timeline.pool, timeline.delta_bytes, strict=True):
        total += int(delta) if POOLS[code] == pool else 0
        totals.append(total)
    return totals[timeline.first_step_event :]


@pytest.mark.parametrize("above_start", [True, False], ids=["above the start", "from zero"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "timeline",
    [
        pytest.param(training_step(), id="a step"),
        pytest.param(training_step(recompute=True, scale=KIB), id="a tiny step"),
        pytest.param(random_timeline(1500), id="no order"),
        pytest.param(random_timeline(1500, instants=9), id="many equal times"),
    ],
)
def test_stack_adds_up_to_the_total_at_every_drawn_point(timeline: Timeline, pool: str, *, above_start: bool) -> None:
    figure = timeline_figure(record_of(timeline), pool, "event", above_start=above_start)
    truth = totals_event_by_event(timeline, pool)
    if not any(truth):
        assert not figure.data
        return
    unit_bytes = {"GiB": GIB, "MiB": MIB, "KiB": KIB}[figure.layout.yaxis.title.text[-4:-1]]
    stacked = sum(trace.y.astype(np.float64) for trace in areas(figure).values())
    drawn = total_of(figure)
    exact = np.array([truth[int(at)] for at in drawn.x])
    assert np.array_equal(drawn.y, (exact / unit_bytes).astype(np.float32))
    assert stacked * unit_bytes == pytest.approx(exact, rel=2**-22, abs=0)


def test_all_areas_share_one_row_of_places() -> None:
    # plotly stacks by place; with different rows it would fill in zeros where times are equal.
    figure = timeline_figure(record_of(random_timeline(20_000, instants=50)))
    xs = [trace.x.tolist() for trace in areas(figure).values()]
    assert all(x == xs[0] for x in xs)


def test_categories_stand_in_one_order_and_empty_ones_are_left_out() -> None:
    assert list(areas(timeline_figure(PLAIN))) == ["held throughout", "activations", "temporary"]
    assert list(areas(timeline_figure(PLAIN, above_start=False))) == [
        "parameters",
        "gradients",
        "optimizer state",
        "workspace",
        "activations",
        "temporary",
    ]
    for figure in (timeline_figure(PLAIN), timeline_figure(RECOMPUTED), timeline_figure(PLAIN, above_start=False)):
        for name, look in CATEGORY_LOOKS.items():
            if name in areas(figure):
                assert areas(figure)[name].fillcolor == look.colour
                assert areas(figure)[name].fillpattern.shape == look.pattern


def test_lines_are_steps_not_slopes() -> None:
    assert {trace.line.shape for trace in timeline_figure(PLAIN).data if trace.mode == "lines"} == {"hv"}
    lines = [trace for trace in compare_figure(PLAIN, RECOMPUTED).data if trace.mode != "markers"]
    assert {trace.line.shape for trace in lines} == {"hv"}


def test_the_axis_starts_at_what_was_held_throughout_and_says_so() -> None:
    figure = timeline_figure(PLAIN)
    held = PLAIN.static_bytes
    assert figure.layout.yaxis.range[0] == held / GIB
    assert f"{held / GIB:.3f} GiB held throughout: " in texts(figure)
    assert timeline_figure(PLAIN, above_start=False).layout.yaxis.range[0] == 0
    assert "held throughout" not in texts(timeline_figure(PLAIN, above_start=False))


def test_the_axis_starts_at_zero_where_little_was_held() -> None:
    step = TimelineBuilder()
    step.opening("parameters", 10)
    step.event(30, "activations", after=1)
    assert timeline_figure(record_of(step.build())).layout.yaxis.range[0] == 0


def test_the_peak_is_marked_and_broken_down() -> None:
    figure = timeline_figure(PLAIN)
    timeline = PLAIN.timeline
    assert timeline is not None
    marker = next(trace for trace in figure.data if trace.mode == "markers")
    assert marker.y[0] * GIB == max(totals_event_by_event(timeline, "device")) == PLAIN.peak_allocated_bytes
    assert marker.x[0] == timeline.nanoseconds[timeline.peak_index()] / 1e6
    parts = PLAIN.peak_by_category
    assert f"peak {PLAIN.peak_allocated_bytes / GIB:.3f} GiB" in texts(figure)
    assert f"activations {parts['activations'] / GIB:.3f}, temporary {parts['temporary'] / GIB:.3f}" in texts(figure)
    assert "grew most: mlp.experts.linear_fc1 x 4, 2.000 GiB" in texts(figure)


@pytest.mark.parametrize("axis", AXES)
def test_phases_are_named_where_their_name_fits(axis: Axis) -> None:
    figure = timeline_figure(PLAIN, axis=axis)
    names = [annotation.text for annotation in figure.layout.annotations]
    assert names[:2] == ["forward", "backward"]
    assert ("opt" in names) == (axis == "time"), "a narrow phase has its short name, a very narrow one none"
    bands = [shape for shape in figure.layout.shapes if shape.type == "rect" and shape.yanchor == 1]
    assert len(bands) == 3
    assert [band.x0 for band in bands] == [0.0, bands[0].x1, bands[1].x1]
    assert bands[-1].x1 < figure.layout.xaxis.range[1], "the border covers nothing of the last event"


def test_pointing_at_a_moment_names_the_phase_and_the_modules_that_grew_most() -> None:
    timeline = PLAIN.timeline
    assert timeline is not None
    text = total_of(timeline_figure(PLAIN)).text
    assert len(text) == len(total_of(timeline_figure(PLAIN)).x)
    peak = timeline.peak_index() - timeline.num_opening_events + 1
    assert text[peak].startswith("backward<br>output_layer +1.758 GiB")


def test_the_modules_named_are_those_that_fill_the_drawn_pool() -> None:
    step = TimelineBuilder()
    step.event(5 * MIB, "activations", "on the device", after=1)
    step.event(3 * MIB, "activations", "on the host", pool="host", after=1)
    for pool, size in (("device", "5.00 MiB"), ("host", "3.00 MiB")):
        figure = timeline_figure(record_of(step.build()), pool)
        assert total_of(figure).text[-1].endswith(f"<br>on the {pool} +{size}")
        assert f"grew most: on the {pool}, {size}" in texts(figure)


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("device", "allocated on the device"),
        ("host", "allocated on the host"),
        ("on_chip", "on chip, not part of the device's bytes"),
    ],
)
def test_title_and_axis_say_which_pool(pool: str, words: str) -> None:
    figure = timeline_figure(record_of(random_timeline(500)), pool)
    assert words in figure.layout.title.text
    assert words in figure.layout.yaxis.title.text
    assert str(scenario()) in texts(figure)
    assert "simulated" in texts(figure)


def test_figures_are_transparent_and_bring_no_theme() -> None:
    for figure in (timeline_figure(PLAIN), compare_figure(PLAIN, RECOMPUTED)):
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0, 0, 0, 0)"
        assert not figure.layout.template.layout.to_plotly_json()
        assert figure.layout.font.color == INK


@pytest.mark.parametrize(("scale", "unit"), [(1, "GiB"), (KIB, "MiB"), (MIB, "KiB")], ids=["large", "small", "tiny"])
def test_a_figure_has_the_unit_that_its_peak_fills(scale: int, unit: str) -> None:
    figure = timeline_figure(record_of(training_step(scale=scale)))
    assert figure.layout.yaxis.title.text == f"allocated on the device ({unit})"
    assert re.search(rf"peak 52\.\d+ {unit}", texts(figure))


def test_a_hundred_gibibytes_are_drawn_to_the_byte() -> None:
    step = TimelineBuilder()
    step.opening("parameters", 100 * GIB)
    step.event(1, "temporary", after=1)
    figure = timeline_figure(record_of(step.build()))
    assert total_of(figure).y[-1] * GIB == 100 * GIB + 1
    assert figure.layout.yaxis.range[0] < figure.layout.yaxis.range[1]


def test_a_step_that_allocates_nothing_new_is_drawn() -> None:
    step = TimelineBuilder()
    step.opening("parameters", GIB)
    step.event(0, "temporary", after=1)
    record = record_of(step.build())
    for figure in (timeline_figure(record), compare_figure(record, record)):
        assert figure.layout.yaxis.range == (1.0, 2.0)


@pytest.mark.parametrize("above_start", [True, False])
@pytest.mark.parametrize("axis", AXES)
def test_a_single_event_is_drawn(axis: Axis, *, above_start: bool) -> None:
    step = TimelineBuilder()
    step.event(3 * KIB, "activations", "decoder")
    figure = timeline_figure(record_of(step.build()), axis=axis, above_start=above_start)
    assert "peak 3.0 KiB" in texts(figure)


@pytest.mark.parametrize("num_events", [0, 1])
def test_a_timeline_without_bytes_says_that_nothing_was_seen(num_events: int) -> None:
    step = TimelineBuilder()
    for _ in range(num_events):
        step.event(0, "activations")
    record = record_of(step.build())
    for figure in (timeline_figure(record), compare_figure(record, record)):
        assert "nothing allocated on the device was seen" in texts(figure)
        assert not figure.data


def test_a_step_next_to_one_without_bytes_is_still_compared() -> None:
    empty = record_of(TimelineBuilder().build())
    names = [trace.name for trace in compare_figure(empty, RECOMPUTED, PLAIN).data if trace.name]
    assert [name.split(": ")[0] for name in names] == ["full uniform 1", "none, step 3"]


def test_events_that_all_have_one_time_get_a_hint() -> None:
    record = record_of(random_timeline(500, instants=1))
    assert "axis='event'" in texts(timeline_figure(record))
    assert "axis='event'" not in texts(timeline_figure(record, axis="event"))


def test_a_step_that_ran_out_of_memory_shows_its_status_and_message() -> None:
    failed = out_of_memory(RECOMPUTED)
    without_timeline = replace(failed, timeline=None)
    for figure in (
        timeline_figure(failed),
        timeline_figure(without_timeline),
        compare_figure(PLAIN, failed),
        compare_figure(PLAIN, without_timeline),
    ):
        assert failed.message in texts(figure)
        assert "out of memory" in texts(figure)
    for table in (record_table(failed), as_text(compare_blocks(PLAIN, failed))):
        assert failed.message in re.sub(r"\s+", " ", table)
        assert re.search("out.of.memory", table)


@pytest.mark.parametrize("draw", [timeline_figure, show, lambda record: compare(PLAIN, record)])
def test_a_record_without_timeline_says_what_to_do(draw: Any) -> None:
    with pytest.raises(ValueError, match=r"step 3 \(none\) has no timeline.*take the step again.*record_table"):
        draw(replace(PLAIN, timeline=None))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"pool": "disk"}, "pool is 'disk', must be one of device, host, on_chip"),
        ({"axis": "frames"}, "axis is 'frames', must be one of time, event"),
    ],
)
def test_a_wrong_choice_is_named_with_the_right_ones(choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_figure(PLAIN, **choice)


def test_words_from_outside_are_not_read_as_markup() -> None:
    failed = replace(out_of_memory(PLAIN), message="<b>full</b> & done")
    assert "&lt;b&gt;full&lt;/b&gt; &amp; done" in timeline_figure(failed).layout.title.text


# Comparison


def test_compared_steps_name_each_peak_and_its_difference() -> None:
    figure = compare_figure(PLAIN, RECOMPUTED)
    peaks = [record.peak_allocated_bytes for record in (PLAIN, RECOMPUTED)]
    markers = [trace for trace in figure.data if trace.mode == "markers"]
    assert [marker.y[0] * GIB for marker in markers] == peaks
    saved = f"{(peaks[0] - peaks[1]) / GIB:.3f}"
    names = [trace.name for trace in figure.data if trace.name]
    assert names == [
        f"none: peak {peaks[0] / GIB:.3f} GiB",
        f"full uniform 1: peak {peaks[1] / GIB:.3f} (\N{MINUS SIGN}{saved}) GiB",
    ]
    assert f"{peaks[1] / GIB:.3f} (\N{MINUS SIGN}{saved})" in texts(figure)


def test_compared_steps_are_told_apart_by_dash_and_colour() -> None:
    lines = [trace.line for trace in compare_figure(*[PLAIN] * 6).data if trace.name]
    assert len({line.dash for line in lines}) == 6
    assert len({(line.color, line.dash) for line in lines}) == 6


def label_boxes(figure: go.Figure) -> list[tuple[float, float, float]]:
    """Left, right and bottom of each label at a peak, in pixels of the narrowest plot, a letter 6.5 wide."""
    low, high = figure.layout.yaxis.range
    boxes = []
    for label in (label for label in figure.layout.annotations if label.yref != "paper"):
        x, width = label.x / figure.layout.xaxis.range[1] * 510, 6.5 * len(label.text)
        left = x + 8 if label.xanchor == "left" else x - 8 - width
        boxes.append((left, left + width, (label.y - low) / (high - low) * 320 + (label.yshift or 0)))
    return boxes


def test_no_vertical_line_strikes_through_the_label_of_a_peak() -> None:
    step = TimelineBuilder(phase="forward")
    for delta_bytes, count in ((MIB, 60), (-MIB, 2)):
        for _ in range(count):
            step.event(delta_bytes, "activations", after=1.0)
    step.phase = "backward"
    for _ in range(120):
        step.event(-MIB // 4, "activations", after=1.0)
    ends_forward = record_of(step.build())
    for figure in (timeline_figure(ends_forward), compare_figure(ends_forward, PLAIN, ends_forward)):
        low, high = figure.layout.yaxis.range
        lines = [shape for shape in figure.layout.shapes if shape.type == "line"]
        labels = [label for label in figure.layout.annotations if label.yref != "paper"]
        assert lines and labels
        for label, line in product(labels, lines):
            beside = (line.x0 - label.x) / figure.layout.xaxis.range[1] * 700 * (1 if label.xanchor == "left" else -1)
            ends = [y * (high - low) + low if line.yref == "paper" else y for y in (line.y0, line.y1)]
            bottom, top = (
                label.y + (label.yshift + 17 * rows) * (high - low) / 320 for rows in (0, 1 + label.text.count("<br>"))
            )
            assert not 0 < beside < 40 or ends[1] <= bottom + 1e-9 or ends[0] >= top - 1e-9


def test_labels_above_one_another_are_in_the_order_of_their_peaks() -> None:
    def peaking_at(num_bytes: int) -> StepRecord:
        step = TimelineBuilder(phase="forward")
        step.opening("parameters", GIB)
        step.event(num_bytes, "activations", after=1.0)
        step.event(-num_bytes, "activations", after=1.0)
        return record_of(step.build())

    lowest, highest, between = (
        bottom for _, _, bottom in label_boxes(compare_figure(*map(peaking_at, (3, 5 * GIB, GIB))))
    )
    assert lowest < between < highest


@pytest.mark.parametrize("records", [[PLAIN] * 4, [PLAIN, RECOMPUTED, PLAIN], [RECOMPUTED, PLAIN]])
def test_labels_of_peaks_cover_neither_each_other_nor_a_line(records: list[StepRecord]) -> None:
    figure = compare_figure(*records)
    boxes = label_boxes(figure)
    assert len(boxes) == len(records)
    for (left, right, bottom), (other_left, other_right, other_bottom) in combinations(boxes, 2):
        assert right <= other_left or other_right <= left or abs(bottom - other_bottom) >= 16.9
    low, high = figure.layout.yaxis.range
    for trace in (trace for trace in figure.data if trace.mode != "markers"):
        x, y = trace.x / figure.layout.xaxis.range[1] * 510, (trace.y - low) / (high - low) * 320
        for left, right, bottom in boxes:
            assert y[(x > left) & (x < right)].max() <= bottom + 0.01


def test_compared_phases_are_laid_over_each_other() -> None:
    figure = compare_figure(PLAIN, RECOMPUTED)
    names = [annotation for annotation in figure.layout.annotations if annotation.yref == "paper"]
    assert [name.text for name in names][:2] == ["forward", "backward"]
    edges = [shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.yref == "paper"]
    lines = [trace for trace in figure.data if trace.mode != "markers"]
    for line in lines:
        phases = list(line.text)
        assert line.x[phases.index("backward")] == pytest.approx(edges[0], abs=0.01)
        assert line.x[phases.index("optimizer")] == pytest.approx(edges[1], abs=0.01)
        assert (line.x[0], line.x[-1]) == (0.0, 100.0)
    assert len(lines[0].x) != len(lines[1].x), "the steps differ in their events"


def test_a_label_far_from_its_peak_is_joined_to_it() -> None:
    figure = compare_figure(*[PLAIN] * 4)
    joins = [shape for shape in figure.layout.shapes if shape.yref != "paper"]
    shifts = [label.yshift for label in figure.layout.annotations if label.yref != "paper"]
    assert len(joins) == sum(shift > 17 for shift in shifts) > 0
    assert {(join.x0, join.y0) for join in joins} == {
        (trace.x[0], trace.y[0]) for trace in figure.data if trace.mode == "markers"
    }


def test_a_step_between_load_and_offload_is_compared_phase_by_phase() -> None:
    def step(*phases: str) -> StepRecord:
        builder = TimelineBuilder()
        builder.opening("parameters", MIB)
        for phase in phases:
            builder.phase = phase
            for _ in range(10):
                builder.event(MIB, "activations", after=1)
        return record_of(builder.build())

    figure = compare_figure(step("forward", "backward"), step("load", "forward", "backward", "offload"))
    lines = [trace for trace in figure.data if trace.mode != "markers"]
    starts = [line.x[list(line.text).index("backward")] for line in lines]
    assert starts[0] == pytest.approx(starts[1])
    assert lines[0].x[-1] < lines[1].x[-1] == 100
    other_order = compare_figure(step("forward", "backward"), step("backward", "forward", "forward"))
    assert {trace.x[-1] for trace in other_order.data if trace.mode != "markers"} == {100.0}


def test_compared_scenarios_are_named_where_they_differ() -> None:
    other = record_of(training_step(2), scenario=scenario(num_layers=2), backend="cuda")
    assert record_names([PLAIN, other]) == ["none (4 layers, simulated)", "none (2 layers, cuda)"]
    assert record_names([PLAIN, RECOMPUTED]) == ["none", "full uniform 1"]
    assert record_names([PLAIN, replace(PLAIN, step_index=4)]) == ["none, step 3", "none, step 4"]
    assert "qwen3-30b-a3b, 1 x 4096 tokens, bf16 " in texts(compare_figure(PLAIN, other))
    assert str(scenario()) in texts(compare_figure(PLAIN, RECOMPUTED))
    assert as_text(compare_blocks(PLAIN, other)).startswith("qwen3-30b-a3b, 1 x 4096 tokens, bf16;")
    stranger = replace(PLAIN, scenario=Scenario.of(architecture="phi-4"))
    assert as_text(compare_blocks(PLAIN, stranger)).startswith("different scenarios")


def test_ranks_of_one_job_are_told_apart_under_what_they_share() -> None:
    ranks = [
        replace(PLAIN, scenario=replace(PLAIN.scenario, layout=Layout(tensor_model_parallel_size=2, rank=rank)))
        for rank in (0, 1)
    ]
    assert record_names(ranks) == ["none (rank 0)", "none (rank 1)"]
    assert as_text(compare_blocks(*ranks)).startswith("qwen3-30b-a3b, 4 layers, 1 x 4096 tokens, bf16, TP2;")


def test_the_compared_axis_says_where_it_starts() -> None:
    assert "(GiB, from 46.8" in compare_figure(PLAIN, RECOMPUTED).layout.yaxis.title.text
    step = TimelineBuilder()
    step.opening("parameters", GIB)
    step.event(2, "activations", after=1)
    figure = compare_figure(PLAIN, record_of(step.build()))
    assert figure.layout.yaxis.range[0] == 0
    assert figure.layout.yaxis.title.text == "allocated on the device (GiB)"


def test_a_step_that_is_loaded_is_drawn_from_what_it_starts_with() -> None:
    step = TimelineBuilder(phase="load")
    step.opening("workspace", MIB)
    step.event(8 * GIB, "parameters", after=1.0)
    step.phase = "forward"
    step.event(GIB, "activations", after=1.0)
    loaded = record_of(step.build())
    assert compare_figure(loaded, loaded).layout.yaxis.range[0] == 0


@pytest.mark.parametrize("num_records", [0, 1])
def test_a_comparison_needs_two_steps(num_records: int) -> None:
    with pytest.raises(ValueError, match=f"compare_figure got {num_records} records, must be at least 2: add a step"):
        compare_figure(*[PLAIN] * num_records)


# Tables


def busy_record() -> StepRecord:
    return replace(
        PLAIN,
        backend="cuda",  # a simulated step has no time
        settings=EVERYTHING,
        residual_bytes=512,
        host_bytes=3 * GIB,
        offloaded_bytes_by_module={"expert_fc1": 2 * GIB},
        offloaded_bytes_by_group={"optimizer state": 24 * GIB},
        load_seconds=0.25,
        without_effect={"offload_modules:attn_norm": "the norm before attention is fused into linear_qkv, " * 4},
        peak_by_module={"decoder." + "long_name." * 12 + "end": 40 * GIB, "": 39 * GIB} | PLAIN.peak_by_module,
    )


def test_record_table_names_everything_that_was_measured() -> None:
    table = record_table(busy_record())
    for words in (
        r"settings: offload attn_norm\+qkv_linear",
        r"device, the step's peak +52\.871 +56,769,904,640 +100\.0%",
        r"  optimizer state +31\.199 ",
        r"  activations +5\.457 ",
        r"device, activation peak above the start +6\.043 ",
        r"device, residual at the step's end +<0\.001 +512 +0\.0%",
        r"host, the step's peak +3\.000 ",
        r"offloaded in the step: expert_fc1 +2\.000 ",
        r"device, removed after the step: optimizer state +24\.000 ",
        r"outside the model's modules",
        r"  \.\.\.\S*long_name\.end",
        r"offload_modules attn_norm: the norm before",
        r"step 105\.1 ms \(loading 250\.0 ms, offloading 0\.0 ms\), 38,972 tokens/s, loss 12\.333740",
    ):
        assert re.search(words, table), words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_phase": "backward"}, "peak 5.000 GiB (2.000 GiB above the start), "),
        ({"peak_phase": ""}, "peak 5.000 GiB (2.000 GiB above the start), "),
        ({"peak_phase": "optimizer"}, "peak 5.000 GiB (2.000 GiB above the start, in the optimizer phase), "),
        ({"peak_phase": "idle", "peak_allocated_bytes": 3 * GIB}, "peak 3.000 GiB (at the start), "),
    ],
)
def test_a_record_in_one_line_says_how_far_its_own_peak_is_above_the_start(changes: dict[str, Any], words: str) -> None:
    sizes = {"static_bytes": 3 * GIB, "peak_allocated_bytes": 5 * GIB, "activation_peak_bytes": -128 * KIB}
    record = replace(PLAIN, **(sizes | changes))
    assert words in str(record)
    assert re.search(r"device, activation peak below the start +(<?0\.\d+) +131,072 ", record_table(record))


def modules_listed(record: StepRecord) -> dict[str, int]:
    """The rows of a record's table that list modules, with their bytes."""
    lines = record_table(record).splitlines()
    start = next(number for number, line in enumerate(lines) if "by the module" in line) + 1
    stop = next(number for number, line in enumerate(lines) if "at the step's start" in line)
    rows = [re.fullmatch(r"  (.*?)  +\S+  +([\d,]+)  +\S+%", line) for line in lines[start:stop]]
    return {row[1]: int(row[2].replace(",", "")) for row in rows if row}


def test_the_table_of_the_host_shows_what_stays_there_and_what_grew() -> None:
    """Without a browser, the table is all that a reader sees of `show(step, pool="host")`."""
    step = TimelineBuilder()
    step.opening("parameters", 40 * MIB)
    step.opening("activations", 8 * MIB, "decoder.layers.0.self_attention", pool="host")
    for step.phase, size in (("forward", 2 * MIB), ("backward", -2 * MIB)):
        step.event(size, "activations", "decoder.layers.0.mlp.experts", pool="host", after=1)
    record = record_of(step.build())
    for thing in (record, record.timeline):
        table = show(thing, pool="host").table
        assert "the peak of the host is in forward of decoder.layers.0.mlp.experts" in table
        rows = re.findall(r"(?m)^host, (.*?)  +(\d+\.\d\d) .* (\S+%)$", table)
        assert rows == [
            ("the step's peak", "10.00", "100.0%"),
            ("at the step's start", "8.00", "80.0%"),
            ("what grew from the start to the peak", "2.00", "20.0%"),
            ("at the step's end", "8.00", "80.0%"),
        ]
        assert "device" not in table and "40.00" not in table


def test_what_grew_is_named_by_its_own_categories_and_not_by_those_of_the_peak() -> None:
    """As when a copy is pinned again: parameters grow by 2 MiB, and a temporary copy of 2 MiB comes beside them."""
    step = TimelineBuilder()
    step.opening("parameters", 2 * MIB, pool="host")
    for category in ("temporary", "parameters"):
        step.event(2 * MIB, category, pool="host")
    rows = re.findall(r"(?m)^  (.*?)  +(\d+\.\d\d) ", show(record_of(step.build()), pool="host").table)
    assert [row for row in rows if "," in row[0]] == [
        ("parameters, temporary", "6.00"),
        ("parameters, temporary", "4.00"),
    ]


def test_record_table_shows_ten_modules_and_the_rest_as_one() -> None:
    sizes = {f"decoder.module_{number}": GIB - number for number in range(23)}
    listed = modules_listed(replace(PLAIN, peak_by_module=sizes, peak_allocated_bytes=sum(sizes.values())))
    assert list(listed)[10:] == ["others (13)"]
    assert sum(listed.values()) == sum(sizes.values())


def test_the_same_module_of_all_layers_is_one_row() -> None:
    listed = modules_listed(PLAIN)
    assert sum(listed.values()) == PLAIN.peak_allocated_bytes
    fc1 = {name: size for name, size in PLAIN.peak_by_module.items() if name.endswith("linear_fc1")}
    assert listed["mlp.experts.linear_fc1 x\N{NO-BREAK SPACE}4"] == sum(fc1.values())
    sizes = {"decoder.layers.0.mlp": 4, "decoder.layers.1.mlp": 3, "decoder.layers.0": 2, "decoder.layers.1": 2}
    sizes |= {"embedding": 6, "decoder.layers.3.self_attention": 5}
    grouped = {name.replace("\N{NO-BREAK SPACE}", " "): size for name, size in grouped_modules(sizes, {}).items()}
    assert [*grouped.items()] == [
        ("mlp x 2", 7),
        ("embedding", 6),
        ("decoder.layers.3.self_attention", 5),
        ("decoder.layers x 2", 4),
    ]


def test_what_no_module_made_is_named_by_the_training_state_that_it_is() -> None:
    state = {"parameters": GIB, "optimizer state": 6 * GIB}
    peak = replace(PLAIN, peak_by_category=state, peak_by_module={"": 7 * GIB + 5})
    assert modules_listed(peak) == {"parameters, optimizer state and others": 7 * GIB + 5}
    exactly = modules_listed(replace(peak, peak_by_module={"": 7 * GIB}))
    assert exactly == {"parameters, optimizer state": 7 * GIB}
    elsewhere = modules_listed(replace(peak, peak_by_module={"": GIB}))
    assert elsewhere == {"(outside the model's modules)": GIB}


def test_compare_table_holds_every_step_against_the_first() -> None:
    lines = as_text(
        compare_blocks(PLAIN, RECOMPUTED, replace(PLAIN, settings=EVERYTHING, residual_bytes=512))
    ).splitlines()
    units = next(line.split() for line in lines if line.split()[:1] == ["GiB"])
    assert units == [*["GiB"] * 7, "ms"]
    rows = {line.split()[0]: line.split() for line in lines if line}
    saved = f"{(PLAIN.peak_allocated_bytes - RECOMPUTED.peak_allocated_bytes) / GIB:.3f}"
    assert rows["none"][1:3] == [f"{PLAIN.peak_allocated_bytes / GIB:.3f}", "0.000"]
    assert rows["full"][3:5] == [f"{RECOMPUTED.peak_allocated_bytes / GIB:.3f}", saved]
    assert rows["none"][-3:] == ["105.1", "38,972", "12.333740"]


def test_a_prediction_has_no_time_in_a_table() -> None:
    predicted = replace(RECOMPUTED, backend="simulated", loss=None, tokens_per_second=0.0)
    rows = {line.split()[0]: line.split() for line in as_text(compare_blocks(PLAIN, predicted)).splitlines() if line}
    assert rows["full"][-3:] == ["-", "-", "-"]
    assert rows["none"][-3:] == ["105.1", "38,972", "12.333740"]


def test_a_table_of_predictions_has_no_columns_of_times_and_loss() -> None:
    predicted = [replace(step, tokens_per_second=0.0, loss=None) for step in (PLAIN, RECOMPUTED)]
    assert "tokens/s" not in as_text(compare_blocks(*predicted)) and "loss" not in as_text(compare_blocks(*predicted))
    assert "tokens/s" in as_text(compare_blocks(predicted[0], replace(RECOMPUTED, tokens_per_second=9.0))), (
        "one has a rate"
    )


def test_compare_table_keeps_quiet_about_what_a_failed_step_did_not_measure() -> None:
    table = as_text(compare_blocks(PLAIN, replace(out_of_memory(RECOMPUTED), settings=MemorySettings())))
    row = next(line.split() for line in table.splitlines() if line.startswith("none (out of memory)"))
    peak = f"{RECOMPUTED.peak_allocated_bytes / GIB:.3f}"
    assert row[4:6] == [peak, "-"]
    assert row[-3:] == ["-", "-", "-"]
    failed_first = as_text(compare_blocks(out_of_memory(PLAIN), RECOMPUTED))
    assert " saved " in failed_first.partition("\n")[2], "the line above the table explains this column"


def test_columns_are_aligned_and_lines_fit_the_page() -> None:
    for table in (
        record_table(busy_record()),
        as_text(compare_blocks(PLAIN, busy_record(), out_of_memory(busy_record()))),
    ):
        assert max(len(line) for line in table.splitlines()) <= LINE_WIDTH
        assert not re.search(r"[ \t]+$", table, re.MULTILINE)
    ends = {line.rindex("%") for line in record_table(PLAIN).splitlines() if line.endswith("%")}
    assert len(ends) == 1


def test_tables_need_no_timeline_and_no_bytes() -> None:
    empty = record_of(None)
    assert "device, the step's peak" in record_table(empty)
    assert "none" in as_text(compare_blocks(empty))
    with pytest.raises(ValueError, match="compare got 0 records"):
        compare_blocks()


@pytest.mark.parametrize(
    ("num_bytes", "unit_bytes", "text"),
    [
        (3 * GIB, GIB, "3.000"),
        (512, GIB, "<0.001"),
        (-512, GIB, "-<0.001"),
        (0, GIB, "0.000"),
        (-MIB // 2, MIB, "-0.50"),
        (1500, KIB, "1.5"),
        (7, 1, "7"),
    ],
)
def test_a_few_bytes_are_never_written_as_none(num_bytes: int, unit_bytes: int, text: str) -> None:
    assert in_unit(num_bytes, unit_bytes) == text


# Display


@pytest.mark.parametrize("view", [show(PLAIN), compare(PLAIN, RECOMPUTED)], ids=["show", "compare"])
def test_a_cell_gets_the_figure_and_its_text_twin(view: View) -> None:
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == str(view) == repr(view) == view.table
    drawn = bundle["application/vnd.plotly.v1+json"]
    assert json.loads(json.dumps(drawn)) == drawn
    assert drawn["layout"]["title"] == view.figure.to_plotly_json()["layout"]["title"]
    assert go.Figure({"data": drawn["data"], "layout": drawn["layout"]}) == view.figure


def test_compare_shows_a_table_above_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.publish_display_data", shown.append)
    view = compare(PLAIN, RECOMPUTED)
    view._ipython_display_()
    assert list(shown[0]) == ["text/html", "text/plain"]
    assert shown[0]["text/plain"] == view.table
    assert "application/vnd.plotly.v1+json" in shown[1]
    with pytest.raises(NotImplementedError):
        show(PLAIN)._ipython_display_()


def test_a_table_is_the_same_as_text_and_as_html() -> None:
    view = compare(PLAIN, replace(RECOMPUTED, without_effect={"offload_modules:attn_norm": "<fused>"}))
    rows = re.findall(r"<tr>(.*?)</tr>", view.html)
    cells = [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows[1:]]
    assert [row[0] for row in cells] == ["none", "full uniform 1"]
    lines = [line.split() for line in view.table.splitlines() if line.startswith(("none", "full")) and ":" not in line]
    assert [" ".join(row).replace(MINUS, "-").split() for row in cells] == lines
    assert "device memory, allocated; saved = first row minus this row" in view.html
    assert "full uniform 1: offload_modules attn_norm had no effect (&lt;fused&gt;)" in view.html
    assert "full uniform 1: offload_modules attn_norm had no effect (<fused>)" in view.table


def test_modules_without_effect_for_one_reason_share_a_line() -> None:
    idle = {"offload_modules:core_attn": "one", "offload_modules:qkv_linear": "two", "offload_modules:attn_proj": "one"}
    lines = compare(PLAIN, replace(RECOMPUTED, without_effect=idle | {"fp8_recipe": "one"})).table.splitlines()
    assert [line for line in lines if "no effect" in line] == [
        "full uniform 1: offload_modules core_attn, attn_proj had no effect (one)",
        "full uniform 1: offload_modules qkv_linear had no effect (two)",
        "full uniform 1: fp8_recipe had no effect (one)",
    ]


def test_a_page_writes_the_minus_sign_and_text_the_hyphen() -> None:
    blocks = [Table([["setting", "saved"], ["full-size", "-5.09"], ["-1", "-<0.01 (-3%)"], ["none", "-"]])]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", as_html(blocks))
    assert cells == ["full-size", f"{MINUS}5.09", "-1", f"{MINUS}&lt;0.01 ({MINUS}3%)", "none", "-"]
    assert "-5.09" in as_text(blocks)


def test_a_page_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")

    def write_half(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space"):
        View(None, "a table").save(page)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def test_what_a_title_cuts_off_is_whole_below_it() -> None:
    modules = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
    settings = MemorySettings(recompute_granularity="selective", recompute_modules=modules)
    step = record_of(training_step(recompute=True), settings)
    text = timeline_figure(step).layout.title.text
    assert "...: memory" in text.partition("<br>")[0] and f"settings: {settings}" in re.sub(r"<[^>]*>", " ", text)


def test_a_difference_without_timelines_says_what_is_unknown() -> None:
    predicted, measured = (replace(PLAIN, backend=name, timeline=None) for name in ("simulated", "cpu"))
    assert "unknown without both timelines" in comparison_text(predicted, measured)


def test_a_saved_page_is_dark_where_its_reader_s_system_is(tmp_path: Path) -> None:
    for name, view in (("table", View(None, "a table")), ("figure", show(PLAIN))):
        head, _, _ = view.save(tmp_path / f"{name}.html").read_text().partition("</head>")
        assert head.count("name='color-scheme' content='light dark'") == 1


def test_a_view_does_not_change() -> None:
    view = show(PLAIN)
    with pytest.raises(FrozenInstanceError):
        view.table = ""  # type: ignore[misc]


def test_show_passes_its_choices_on() -> None:
    record = record_of(random_timeline(400))
    view = show(record, pool="host", axis="event", above_start=True)
    assert view.figure == timeline_figure(record, "host", "event", above_start=True)
    measured = replace(PLAIN, backend="cpu")
    assert show(measured).figure == timeline_figure(measured, above_start=False), "a figure starts at zero"
    assert compare(PLAIN, RECOMPUTED, axis="event").figure == compare_figure(PLAIN, RECOMPUTED, axis="event")


def test_a_predicted_step_is_drawn_over_events() -> None:
    """Its times are those of the prediction, where replayed layers take none."""
    assert PLAIN.backend == "simulated"
    assert show(PLAIN).figure == timeline_figure(PLAIN, axis="event", above_start=False)
    assert show(PLAIN, axis="time").figure == timeline_figure(PLAIN, above_start=False)


def test_display_imports_plotly_only_when_it_draws_and_torch_never() -> None:
    code = (
        "import sys, memlab.views.display; late = 'plotly' not in sys.modules; "
        "import memlab.views.figures.timeline; assert late and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def account(saved: int, **changes: int) -> OffloadAudit:
    """An account of two layers' worth of one module; `changes` are places of its bytes at the moment."""
    places = {
        "away_bytes": 0,
        "still_resident_bytes": 0,
        "back_bytes": 0,
        "copied_twice_bytes": 0,
        "not_due_bytes": 0,
    } | changes
    moved = sum(places.values())
    module = ModuleAccount(
        name="core_attn",
        saved_bytes=moved + 30 * MIB,
        too_small_bytes=10 * MIB,
        last_group_bytes=20 * MIB,
        transferred_bytes=moved,
        **places,
    )
    held = tuple(
        StillResident(
            name="core_attn",
            shape=(4,),
            num_bytes=places["still_resident_bytes"] // 2,
            holders=(f"node of decoder.layers.{layer}.proj",),
        )
        for layer in range(2 if places["still_resident_bytes"] else 0)
    )
    return OffloadAudit(
        plain=record_of(None, activation_peak_bytes=900 * MIB),
        offloaded=record_of(
            None, MemorySettings(offload_modules=["core_attn"]), activation_peak_bytes=900 * MIB - saved
        ),
        modules=(module,),
        still_resident=held,
        plain_peak="forward of gpt_model",
        offloaded_peak="backward of mlp",
        freed_bytes=places["away_bytes"],
    )


class Leaf(NamedTuple):
    holder: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    input_bytes: int
    gradient_bytes: int


def shown_things() -> dict[str, tuple[Any, list[str]]]:
    """What a lab returns, and what has to be read of it."""
    leaves = [
        Leaf(f"decoder.layers.{layer}.mlp.probs", ("TopK", *["Node"] * 40), (4, 8), MIB, MIB) for layer in range(4)
    ]
    failed = OutOfMemory(
        failed_allocation=FailedAllocation(
            phase="forward", module="m", nanoseconds=0, requested_bytes=GIB, allocated_bytes=1, limit_bytes=2
        ),
        alive_by_category={"parameters": 7},
        alive_by_module={},
        activations_by_module={},
        verdict="spike",
        evidence="3 tokens",
        advice="Bound it",
    )
    finding = Finding(kind="steady", evidence="every step starts at 1 GiB", advice="No action is needed")
    return {
        "a record": (PLAIN, ["the step's peak"]),
        "a timeline": (training_step(), [r"a timeline of \d+ events", "the step's peak"]),
        "an offload audit": (account(70 * MIB, away_bytes=80 * MIB), ["offload core_attn", "expected"]),
        "groups used": ({"forward": ("parameters",), "load": ()}, ["phase +parameters +gradients", "forward +yes +-"]),
        "retained": (leaves, [r"decoder.layers.\*.mlp.probs keeps 4 inputs of shape \[4, 8\]", "4.00 MiB", "TopK ->"]),
        "nothing retained": ([], ["Nothing was found"]),
        "out of memory": (failed, ["spike: 3 tokens. Bound it", "requested 1.000 GiB", "limit 2 B", "parameters 7 B"]),
        "findings": ([finding], ["steady: every step"]),
        "bytes": ({"expert_fc1": 3 * MIB}, [r"expert_fc1 +3.00 MiB +3,145,728"]),
        "words": ({"offload": "has no effect"}, ["offload: has no effect"]),
        "an empty dict": ({}, ["the dict is empty"]),
    }


@pytest.mark.parametrize("kind", shown_things())
def test_show_writes_what_a_lab_returns_in_words(kind: str) -> None:
    thing, words = shown_things()[kind]
    view = show(thing)
    for word in words:
        assert re.search(word, view.table), view.table
    assert max(len(line) for line in view.table.splitlines()) <= LINE_WIDTH
    assert not re.search(r"[{}]|\bLeaf\(|object at", view.table)
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == view.table
    assert ("text/html" in bundle) != (view.figure is not None)


def test_show_writes_several_audits_as_rows_of_one_table() -> None:
    audits = [account(70 * MIB, away_bytes=80 * MIB), account(0)]
    assert show(*audits).table == as_text(offload_blocks(*audits))


@pytest.mark.parametrize("things", [(), (3,), (PLAIN, PLAIN), (PLAIN, {})])
def test_show_says_what_it_takes(things: Any) -> None:
    with pytest.raises(ValueError, match=r"show got .* must be .*: "):
        show(*things)


def test_audit_table_shows_terms_that_add_up_and_who_holds_what() -> None:
    table = as_text(offload_blocks(account(70 * MIB, away_bytes=80 * MIB, still_resident_bytes=20 * MIB)))
    assert re.search(r"offload core_attn +100.00 +100.00 +20.00 +10.00 +70.00 +0.70\n", table)
    assert "twice" not in table, "a term that is 0 in every row is left out"
    assert "2 tensors of core_attn, 20.00 MiB, still held by node of decoder.layers.*.proj" in table
    assert "peaks in backward of mlp, without offload in forward of gpt_model" in table
    assert "expected, by Megatron's rules = still resident + peak elsewhere + saved;" in table
    assert max(len(line) for line in table.splitlines()) <= LINE_WIDTH


def test_audit_table_has_no_share_of_nothing() -> None:
    idle = replace(account(0), modules=())
    assert re.search(r"^offload core_attn [ 0]+ -$", as_text(offload_blocks(idle)), re.MULTILINE)


def test_audit_table_of_every_term_is_no_wider_than_a_line() -> None:
    full = account(1, away_bytes=2, still_resident_bytes=2 * GIB, back_bytes=5, copied_twice_bytes=7, not_due_bytes=11)
    lines = as_text(offload_blocks(full, account(0))).splitlines()
    assert max(len(line) for line in lines) <= LINE_WIDTH
