"""What is shown of a job: small timelines on common axes, and a table with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.record.job_record import JobRecord
from memlab.units import GIB
from memlab.views.display import compare, show
from memlab.views.figures.ranks import CHOICE, MOST_DRAWN, ranks_drawing, ranks_figure
from memlab.views.text.columns import LINE_WIDTH
from memlab.views.text.ranks import ranks_table
from tests.unit.builders import job_of, out_of_memory, record_of, scenario, training_step

STAGES = Layout(pipeline_model_parallel_size=4)
MIXED = Layout(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, data_parallel_size=2)
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def totals(figure: go.Figure) -> dict[int, go.Scatter]:
    return {trace.customdata[0]: trace for trace in figure.data if (trace.uid or "").startswith(CHOICE)}


@pytest.mark.parametrize("layout", [STAGES, MIXED, Layout(data_parallel_size=2)], ids=str)
def test_every_rank_is_drawn_with_its_own_peak_on_common_axes(layout: Layout) -> None:
    job = job_of(layout)
    figure = ranks_figure(job)
    drawn = totals(figure)
    assert list(drawn) == list(range(layout.world_size))
    for rank, trace in drawn.items():
        assert max(trace.y) * GIB == pytest.approx(job.rank(rank).peak_allocated_bytes)
    axes = [(trace.xaxis.replace("x", "xaxis"), trace.yaxis.replace("y", "yaxis")) for trace in drawn.values()]
    assert len({str(figure.layout[name].range) for names in axes for name in names}) == 2, "one range across, one up"


def test_the_areas_of_a_rank_add_up_to_its_total() -> None:
    for above_start in (False, True):
        figure = ranks_figure(job_of(MIXED), above_start=above_start)
        for trace in totals(figure).values():
            areas = [area.y for area in figure.data if area.stackgroup and area.xaxis == trace.xaxis]
            np.testing.assert_allclose(np.sum(areas, axis=0), trace.y, rtol=1e-5)


def test_stages_are_below_each_other_and_nothing_overlaps() -> None:
    figure = ranks_figure(job_of(MIXED))
    boxes = []
    for rank, trace in totals(figure).items():
        across = figure.layout[trace.xaxis.replace("x", "xaxis")].domain
        up = figure.layout[trace.yaxis.replace("y", "yaxis")].domain
        boxes.append((rank // MIXED.ranks_of_a_stage, across, up))
    for stage, _, up in boxes:
        assert all(up[0] > other[1] for below, _, other in boxes if below > stage)
    for number, (_, across, up) in enumerate(boxes):
        for _, other_across, other_up in boxes[number + 1 :]:
            beside = across[1] < other_across[0] or other_across[1] < across[0]
            assert beside or up[1] < other_up[0] or other_up[1] < up[0]


def test_the_worst_rank_is_named_once_and_by_more_than_a_colour() -> None:
    job = job_of(STAGES)
    texts = [note.text for note in ranks_figure(job).layout.annotations]
    (worst,) = [text for text in texts if "worst" in text]
    assert worst.startswith(f"<b>stage 0, rank {job.worst_rank}: ")
    assert [line for line in ranks_table(job.ranks).splitlines() if "worst" in line.split()][-1].split()[0] == "0"


def test_the_table_is_the_twin_of_the_figure() -> None:
    job = job_of(STAGES)
    view = show(job)
    rows = [line.split() for line in view.table.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"] == [row[1] for row in rows]
    for row, record in zip(rows, job.ranks, strict=True):
        assert float(row[2]) == pytest.approx(record.peak_allocated_bytes / GIB, abs=1e-3)
        less = (job.peak_allocated_bytes - record.peak_allocated_bytes) / GIB
        assert float(row[6]) == pytest.approx(less, abs=1e-3)
    assert all(len(line) <= LINE_WIDTH for line in view.table.splitlines())
    assert "<table" in view.html


def test_of_many_ranks_the_fullest_are_drawn_and_the_figure_says_so() -> None:
    one = training_step(scale=1024)
    layout = Layout(data_parallel_size=MOST_DRAWN + 8)
    ranks = [
        record_of(one, scenario=scenario(layout=replace(layout, rank=rank)), peak_allocated_bytes=1000 - rank)
        for rank in range(layout.world_size)
    ]
    figure = ranks_figure(JobRecord.of(ranks))
    assert list(totals(figure)) == list(range(MOST_DRAWN))
    assert f"The {MOST_DRAWN} ranks with the highest peaks, of {MOST_DRAWN + 8}" in figure.layout.title.text


def test_a_job_that_ran_out_of_memory_names_the_rank_and_those_without_a_record() -> None:
    ranks = list(job_of(STAGES).ranks)
    job = JobRecord.of([out_of_memory(ranks[1]), ranks[2]])
    view = show(job)
    for text in (view.figure.layout.title.text, view.table):
        words = " ".join(text.replace("<br>", " ").split())
        assert "out of memory: rank 1: the device is full" in words
        assert "ranks 0, 3 have no record" in words
    assert list(totals(view.figure)) == [1, 2]


def test_a_job_trains_on_the_tokens_of_all_copies_in_the_time_of_its_slowest_rank() -> None:
    ranks = job_of(MIXED).ranks
    job = JobRecord.of([replace(record, step_seconds=0.1 + record.scenario.layout.rank) for record in ranks])
    assert job.step_seconds == pytest.approx(7.1)
    assert job.tokens_per_second == pytest.approx(2 * 2 * 4096 / 7.1), "two copies, two micro-batches of 4096 tokens"


def test_two_settings_of_a_job_are_compared_rank_by_rank() -> None:
    plain, full = job_of(STAGES), job_of(STAGES, FULL)
    full = JobRecord.of([replace(record, peak_allocated_bytes=10 * GIB) for record in full.ranks])
    view = compare(plain, full)
    rows = [line.split() for line in view.table.split("rank by rank")[1].splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for row, record in zip(rows, plain.ranks, strict=True):
        assert float(row[3]) == 10
        assert float(row[4]) == pytest.approx(record.peak_allocated_bytes / GIB - 10, abs=1e-3)
    assert "rank by rank" not in compare(plain, job_of(MIXED)).table


def test_two_ranks_of_a_job_are_compared_by_their_numbers() -> None:
    job = job_of(STAGES)
    view = compare(job.rank(0), job.rank(3))
    assert "none (rank 0)" in view.table and "none (rank 3)" in view.table
    assert [trace.name for trace in view.figure.data if trace.name and "rank 3" in trace.name]


def test_a_pinned_step_is_a_line_over_the_same_rank() -> None:
    job, other = job_of(STAGES), job_of(STAGES, FULL)
    figure = ranks_drawing(job, "device", "time", above_start=False, pinned=other).figure()
    lines = [trace for trace in figure.data if trace.name == "pinned run, the same rank"]
    assert len(lines) == STAGES.world_size
    assert sum(bool(line.showlegend) for line in lines) == 1
    for rank, line in enumerate(lines):
        assert max(line.y) * GIB == pytest.approx(other.rank(rank).peak_allocated_bytes)
