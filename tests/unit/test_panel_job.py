"""The panel on a lab with several ranks: all of them at once, one alone, two compared, and ranks that fail."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.ranks.group import RankFailed
from memlab.record.job_record import JobRecord
from memlab.record.timeline import Timeline
from memlab.units import format_bytes
from memlab.views.figures.ranks import CHOICE
from memlab.views.panel import exports
from memlab.views.panel.panel import Panel
from memlab.views.panel.run import columns, rows
from memlab.views.panel.search_state import SearchState
from memlab.views.panel.state import LabState
from tests.unit.fake_lab import FakeJobLab, FakeLab


@pytest.fixture
def panel() -> Any:
    shown = Panel(FakeJobLab())
    yield shown
    shown.close()


def drawn(panel: Panel) -> dict[str, Any]:
    """Returns the traces of the chart that have a uid, by it."""
    return {trace["uid"]: trace for trace in panel.timeline.chart.picture["traces"] if trace.get("uid")}


def total_bytes(panel: Panel) -> float:
    """Returns the highest total of the one rank that the chart shows."""
    picture = panel.timeline.chart.picture
    arrays = [memoryview(array).cast("d") for array in picture["arrays"]]
    unit = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    title = picture["layout"]["yaxis"]["title"]["text"]
    return max(arrays[drawn(panel)["total"]["y"]["array"]]) * unit[title.rpartition("(")[2].partition(")")[0]]


def test_stop_says_that_the_ranks_end_a_step_together_and_the_row_says_where_it_ended(panel: Panel) -> None:
    state, lab = panel.state, panel.state.lab
    assert "on all ranks together, before the optimizer" in panel.run_bar.stop.tooltip
    lab.holds = True
    state.run()
    notices: list[str] = []
    state.observe(lambda change: notices.append(change["new"]), names=["notice"])
    state.stop()
    assert "Stopping: the step ends on all ranks together, before the optimizer." in notices
    assert state.shown.message.startswith("rank 0: stopped in forward: run the step again; until then its peak")


def test_a_run_shows_all_ranks_and_a_click_enlarges_one(panel: Panel) -> None:
    state = panel.state
    state.run()
    assert [uid for uid in drawn(panel) if uid.startswith(CHOICE)] == [f"{CHOICE}-{rank}" for rank in range(4)]
    assert panel.timeline.moment.layout.display == "none"
    assert panel.timeline.moment.layout not in [part.layout for part in (panel, panel.timeline.box, panel.runs.box)]
    assert "worst" in panel.timeline.breakdown.value
    panel.timeline._look_at_point(2)
    assert "run 1, rank 2" in panel.timeline.title.value
    assert total_bytes(panel) == pytest.approx(state.shown.job.rank(2).peak_allocated_bytes)
    assert panel.timeline.moment.layout.display == "flex"
    state.look_at(5)
    assert "event 5" in panel.timeline.breakdown.value
    panel.timeline.all_ranks.click()
    assert state.shows_all_ranks and state.moment is None
    assert f"{CHOICE}-3" in drawn(panel)
    state.show_rank(0)
    assert "run 1, rank 0" in panel.timeline.title.value


def test_the_list_of_ranks_does_what_a_click_does_and_follows_it(panel: Panel) -> None:
    state, choice = panel.state, panel.timeline.rank
    assert choice.layout.display == "none", "there is no rank to choose before the first run"
    state.run()
    assert choice.layout.display is None
    assert [name for name, _ in choice.options] == ["all", "0, worst", "1", "2", "3"]
    choice.value = 3
    assert state.one_rank == 3
    state.show_rank(1)
    assert choice.value == 1
    state.run()
    assert (choice.value, state.one_rank) == (1, 1), "the next run shows the same rank"
    with pytest.raises(ValueError, match="rank is 7, and the shown run has no record of it"):
        state.show_rank(7)


def test_two_ranks_of_a_run_are_compared(panel: Panel) -> None:
    state = panel.state
    state.run()
    state.show_rank(0)
    state.pin()
    assert panel.runs.pin.description == "Unpin"
    state.show_rank(3)
    assert panel.runs.pin.description == "Pin"
    pinned = drawn(panel)["pinned"]
    assert pinned["name"].startswith("pinned: run 1, rank 0")
    state.table_open = True
    assert "compared with the pinned run 1, rank 0" in panel.table.value
    assert "(rank 0)" in panel.table.value and "(rank 3)" in panel.table.value
    state.show_rank(0)
    assert not drawn(panel)["pinned"]["visible"]
    state.pin()
    assert state.pinned is None


def test_one_rank_is_compared_under_two_settings(panel: Panel) -> None:
    state = panel.state
    state.run()
    state.pin()
    state.edit(recompute_granularity="full")
    state.run()
    names = [trace.get("name") for trace in panel.timeline.chart.picture["traces"]]
    assert names.count("pinned run, the same rank") == 4
    state.show_rank(2)
    assert drawn(panel)["pinned"]["name"].startswith("pinned: run 1, rank 2")
    assert float(rows(state.runs, state.pinned)[1]["difference"]) == 0


def test_the_table_names_the_worst_rank_and_the_spread() -> None:
    state = LabState(FakeJobLab())
    state.run()
    (row,) = rows(state.runs, None)
    job = state.shown.job
    assert f"{row['peak']} MiB" == format_bytes(job.rank(0).peak_allocated_bytes)
    assert row["worst_rank"] == f"0 ({format_bytes(job.spread_bytes)})"
    assert "worst_rank" in columns(state.runs)
    (line,) = csv.DictReader(io.StringIO(exports.table_csv(state.runs, None)))
    assert line["worst_rank"] == row["worst_rank"]
    of_one_rank = LabState(FakeLab())
    of_one_rank.run()
    assert "worst_rank" not in columns(of_one_rank.runs)


def test_a_rank_that_runs_out_of_memory_is_named_and_the_panel_lives(panel: Panel) -> None:
    state, lab = panel.state, panel.state.lab
    state.show_rank(None)
    lab.outcome, lab.lost = {"status": "out_of_memory", "message": "the device is full", "loss": None}, (0, 2)
    state.run()
    assert rows(state.runs, None)[0]["message"].startswith("rank 1: the device is full")
    assert rows(state.runs, None)[0]["worst_rank"] == "1", "what the other ranks held then is no spread of peaks"
    assert [uid for uid in drawn(panel) if uid.startswith(CHOICE)] == [f"{CHOICE}-1", f"{CHOICE}-3"]
    lab.outcome, lab.lost = {}, ()
    state.run()
    assert state.shown.is_ok


def test_a_rank_that_fails_is_a_row_and_the_panel_lives(panel: Panel) -> None:
    state, lab = panel.state, panel.state.lab
    lab.outcome = RankFailed(2, "is lost: engine 2 has ended", {})
    state.run()
    (row,) = rows(state.runs, None)
    assert row["status"] == "error"
    assert row["message"] == str(lab.outcome), "it says by itself what happens next"
    assert not state.busy
    lab.outcome = {}
    state.run()
    assert state.shown.is_ok and state.shows_all_ranks


def test_progress_before_the_first_phase_says_that_the_ranks_start(panel: Panel) -> None:
    lab = panel.state.lab
    lab.holds = True
    panel.state.run()
    lab.progress(phase="starting the ranks", module="", done=0, total=0)
    assert panel.run_bar.place.value == "starting the ranks"
    lab.end()


def test_the_workload_is_sent_only_if_it_changes() -> None:
    lab = FakeJobLab()
    sent: list[Any] = []
    lab.set_workload = sent.append  # type: ignore[assignment,method-assign]
    LabState(lab).run()
    assert not sent, "the ranks of a job would be started for it, without a word of progress"


def test_a_search_is_of_the_worst_rank() -> None:
    state = LabState(FakeJobLab())
    state.run()
    layout = replace(state.lab.scenario.layout, rank=2)
    state.lab.scenario = replace(state.lab.scenario, layout=layout)  # type: ignore[misc]
    asked: list[Any] = []

    def start(scenario: Any, *_: Any, **__: Any) -> None:
        asked.append(scenario)

    search = SearchState(state, start)
    search.limit = "1GiB"
    search.start()
    (scenario,) = asked
    assert scenario.layout.rank == state.shown.job.worst_rank
    assert f"(only rank {state.shown.job.worst_rank})" in search.notice


def test_exports_of_a_job(panel: Panel, tmp_path: Path) -> None:
    state = panel.state
    state.export_folder = str(tmp_path)
    state.run()
    job = state.shown.job
    saved = JobRecord.load(panel.runs.export("run"))
    assert [record.peak_allocated_bytes for record in saved.ranks] == [one.peak_allocated_bytes for one in job.ranks]
    worst = panel.runs.export("snapshot")
    assert "rank-0" in worst.name
    assert Timeline.from_snapshot(worst).peak_bytes() == job.peak_allocated_bytes
    assert panel.runs.export("html").exists()
    state.show_rank(3)
    one = panel.runs.export("snapshot")
    assert Timeline.from_snapshot(one).peak_bytes() == job.rank(3).peak_allocated_bytes
    assert "rank-3" in panel.runs.export("html").name
    assert "--ranks 4" in exports.measure_command(state.shown)
