"""Resampling, compared with plain Python loops that look at every event."""

from __future__ import annotations

import numpy as np
import pytest

from memlab.record.timeline import Timeline
from memlab.views.figures.compare import compare_figure
from memlab.views.figures.resample import AXES, Axis, DrawnPoints, largest_modules, phase_spans, resample
from memlab.views.figures.timeline import timeline_figure
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

from .builders import TimelineBuilder, random_timeline, record_of, training_step

CASES = [
    pytest.param(random_timeline(30_000, seed=1), id="an instant an event"),
    pytest.param(random_timeline(30_000, seed=2, instants=40), id="40 instants"),
    pytest.param(random_timeline(30_000, seed=3, num_opening_events=0), id="nothing at the start"),
    pytest.param(training_step(), id="a step"),
]


def held_after_every_event(timeline: Timeline, pool: str) -> list[list[int]]:
    """The bytes of each category after every event, counted one event at a time."""
    held, rows = [0] * len(CATEGORIES), []
    for code, delta, category in zip(timeline.pool, timeline.delta_bytes, timeline.category, strict=True):
        if POOLS[code] == pool:
            held[category] += int(delta)
        rows.append(held.copy())
    return rows


def of_the_step(timeline: Timeline, rows: list[list[int]]) -> list[list[int]]:
    return rows[timeline.first_step_event :]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("timeline", CASES)
def test_resampling_keeps_the_peak_to_the_byte(timeline: Timeline, pool: str, axis: Axis) -> None:
    points = resample(timeline, pool, axis, num_bins=20)
    totals = [sum(row) for row in of_the_step(timeline, held_after_every_event(timeline, pool))]
    assert points.total_bytes[points.peak] == points.total_bytes.max() == max(totals)
    first = len(timeline) - len(totals)
    assert points.event_index[points.peak] == first + totals.index(max(totals))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("timeline", CASES)
def test_each_drawn_point_holds_what_the_pool_held_right_after_its_event(timeline: Timeline, axis: Axis) -> None:
    points = resample(timeline, axis=axis, num_bins=20)
    rows = held_after_every_event(timeline, "device")
    for point, event in enumerate(points.event_index):
        assert points.category_bytes[:, point].tolist() == rows[event]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("timeline", CASES[:3])
def test_each_bin_keeps_its_first_last_lowest_and_highest_event(timeline: Timeline, axis: Axis) -> None:
    num_bins = 25
    first = timeline.first_step_event
    totals = [sum(row) for row in held_after_every_event(timeline, "device")]
    times = timeline.nanoseconds.tolist()
    bins: dict[int, list[int]] = {}
    busy = [event for event in range(first, len(timeline)) if timeline.phase[event] != PHASES.index("idle")]
    for event in range(first, len(timeline)):
        if axis == "time":  # what comes after the step's end is one bin with it
            at, start, end = min(times[event], times[busy[-1]]), times[first], times[busy[-1]]
        else:
            at, start, end = event, first, len(times) - 1
        bins.setdefault((at - start) * num_bins // (end - start + 1), []).append(event)
    wanted = set()
    for events in bins.values():
        wanted |= {events[0], events[-1], min(events, key=totals.__getitem__), max(events, key=totals.__getitem__)}
    assert set(resample(timeline, axis=axis, num_bins=num_bins).event_index.tolist()) == wanted


def test_a_long_timeline_becomes_a_few_points_from_its_start_to_its_end() -> None:
    timeline = random_timeline(50_000)
    points = resample(timeline)
    assert 600 < len(points) <= 4 * 300 + 1
    assert points.event_index[[0, -1]].tolist() == [timeline.num_opening_events - 1, len(timeline) - 1]
    assert points.position[[0, -1]].tolist() == [0.0, timeline.nanoseconds[-1] / 1e6]


def test_a_short_timeline_is_drawn_whole() -> None:
    timeline = training_step()
    events = range(timeline.num_opening_events - 1, len(timeline))
    assert resample(timeline).event_index.tolist() == list(events)
    assert resample(timeline, axis="event").position.tolist() == list(range(len(events)))
    assert len(resample(random_timeline(200, instants=1, num_opening_events=1))) == 200


@pytest.mark.parametrize("timeline", CASES)
def test_held_bytes_are_the_least_that_any_event_left_drawn_or_not(timeline: Timeline) -> None:
    rows = of_the_step(timeline, held_after_every_event(timeline, "device"))
    points = resample(timeline, num_bins=3)
    assert points.held_bytes.tolist() == [min(column) for column in zip(*rows, strict=True)]


def test_a_category_s_dip_counts_even_where_no_point_is_drawn() -> None:
    step = TimelineBuilder()
    step.opening("gradients", 5)
    for category, delta in (
        ("temporary", 6),
        ("gradients", -4),
        ("temporary", 8),
        ("gradients", 4),
        ("temporary", -14),
    ):
        step.event(delta, category, after=1)
    points = resample(step.build(), num_bins=1)
    assert len(points) < 6
    assert 1 not in points.category_bytes[CATEGORIES.index("gradients")]
    assert points.held_bytes[CATEGORIES.index("gradients")] == 1


def test_a_timeline_without_events_gives_no_points() -> None:
    points = resample(TimelineBuilder().build())
    assert len(points) == 0
    assert points.category_bytes.shape == (len(CATEGORIES), 0)
    assert not points.held_bytes.any()


def test_events_that_all_have_one_time_keep_their_start_end_and_extremes() -> None:
    timeline = random_timeline(10_000, instants=1)
    assert set(timeline.nanoseconds) == {0}
    points = resample(timeline)
    totals = [sum(row) for row in of_the_step(timeline, held_after_every_event(timeline, "device"))]
    assert {totals[0], totals[-1], min(totals), max(totals)} == set(points.total_bytes.tolist())


def naive_largest(timeline: Timeline, event: int, pool: str, count: int) -> list[tuple[str, int]]:
    alive = dict.fromkeys(timeline.modules, 0)
    for number in range(timeline.num_opening_events, event + 1):
        if POOLS[timeline.pool[number]] == pool and PHASES[timeline.phase[number]] != "load":
            alive[timeline.modules[timeline.module[number]]] += int(timeline.delta_bytes[number])
    ranked = sorted(alive.items(), key=lambda item: -item[1])
    return [(name, size) for name, size in ranked[:count] if size > 0]


@pytest.mark.parametrize("num_modules", [1, 20, 5000], ids="{} modules".format)
@pytest.mark.parametrize("pool", POOLS)
def test_the_largest_modules_are_those_that_grew_most_since_the_step_began(pool: str, num_modules: int) -> None:
    # With 5000 modules the points do not fit into one block.
    timeline = random_timeline(8_000, num_modules=num_modules)
    points = resample(timeline, pool)
    named = largest_modules(timeline, points.event_index, pool, count=3)
    assert len(named) == len(points)
    for point in np.linspace(0, len(points) - 1, 12).astype(int):
        assert named[point] == naive_largest(timeline, points.event_index[point], pool, 3)


def test_what_was_loaded_back_did_not_grow() -> None:
    step = TimelineBuilder(phase="load")
    step.event(100, "parameters", "loaded")
    step.phase = "forward"
    step.event(1, "activations", "grown")
    assert largest_modules(step.build(), np.array([0, 1])) == [[], [("grown", 1)]]


@pytest.mark.parametrize("axis", AXES)
def test_phase_spans_follow_each_other_without_gaps(axis: Axis) -> None:
    timeline = training_step()
    spans = phase_spans(timeline, axis)
    assert [span.phase for span in spans] == ["forward", "backward", "optimizer"]
    edges = [0.0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == resample(timeline, axis=axis).position[-1]
    backward = timeline.phase.tolist().index(PHASES.index("backward"))
    starts = {"time": timeline.nanoseconds[backward] / 1e6, "event": backward - timeline.num_opening_events + 1}
    assert spans[1].start == starts[axis]


def test_a_phase_too_narrow_to_see_goes_to_the_one_before() -> None:
    step = TimelineBuilder()
    for phase, milliseconds in (("forward", 500.0), ("idle", 0.1), ("forward", 300.0), ("backward", 200.0)):
        step.phase = phase
        step.event(1, "activations")
        step.event(1, "activations", after=milliseconds)
    assert [(span.phase, span.start) for span in phase_spans(step.build())] == [("forward", 0.0), ("backward", 800.1)]


def test_the_last_phase_is_always_wide_enough_to_see() -> None:
    step = TimelineBuilder()
    for phase, milliseconds in (("forward", 500.0), ("backward", 499.0), ("optimizer", 1.0)):
        step.phase = phase
        step.event(1, "activations")
        step.event(1, "activations", after=milliseconds)
    spans = phase_spans(step.build())
    assert [(span.phase, span.start) for span in spans] == [("forward", 0.0), ("backward", 500.0), ("optimizer", 995.0)]
    assert [span.end for span in spans] == [500.0, 995.0, 1000.0]


def test_the_time_axis_ends_with_the_step_and_not_with_its_recovery() -> None:
    step = TimelineBuilder(phase="forward")
    for _ in range(80):
        step.event(1, "activations", after=1.0)
    step.phase = "idle"
    step.event(-80, "activations", after=900.0)
    timeline = step.build()
    points = resample(timeline)
    assert (points.end, points.num_on_axis, len(points)) == (80.0, 80, 81)
    assert [(span.phase, span.end) for span in phase_spans(timeline)] == [("forward", 80.0)]
    assert resample(timeline, axis="event").end == 80 == len(timeline) - 1
    start, end = timeline_figure(record_of(timeline)).layout.xaxis.range
    assert (start, end) == (0.0, pytest.approx(80.8)), "a little more, so that the last event is seen"
    compared = compare_figure(record_of(timeline), record_of(training_step()), axis="time")
    assert max(compared.data[0].x) == 80.0


def test_a_timeline_with_nothing_after_its_start_has_no_phases() -> None:
    step = TimelineBuilder()
    step.opening("parameters", 5)
    assert phase_spans(step.build()) == []
    assert isinstance(resample(step.build()), DrawnPoints)
    assert resample(step.build()).total_bytes.tolist() == [5]
