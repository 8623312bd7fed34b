"""Above the plots of a figure are its title and at most two lines, each whole: what is below it has the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.pareto_front import SearchResult
from memlab.fitting.search import search
from memlab.units import GIB
from memlab.views.display import peaks
from memlab.views.figures.compare import compare_figure
from memlab.views.figures.over_steps import over_steps_figure
from memlab.views.figures.ranks import MOST_DRAWN, ranks_figure
from memlab.views.figures.savings import savings_figure
from memlab.views.figures.search import search_figure
from memlab.views.figures.timeline import timeline_figure
from tests.unit.builders import job_of, record_of, training_step
from tests.unit.test_search import PLAIN as NO_SETTING
from tests.unit.test_search import machine, predicting

FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
HOST = MemorySettings(offload_parameters=True, offload_optimizer=True)
PLAIN, RECOMPUTED = record_of(training_step()), record_of(training_step(recompute=True), FULL)
ONE = {"plain": PLAIN, "recomputed": RECOMPUTED}
MANY = job_of(Layout(pipeline_model_parallel_size=2, data_parallel_size=MOST_DRAWN))
FIGURES: dict[str, Callable[[], go.Figure]] = {
    "a step": lambda: timeline_figure(PLAIN),
    "a step above its start": lambda: timeline_figure(RECOMPUTED, above_start=True),
    "a step between whose neighbours much is on the host": lambda: timeline_figure(record_of(training_step(), HOST)),
    "two steps": lambda: compare_figure(PLAIN, RECOMPUTED),
    "a prediction and a measurement": lambda: compare_figure(PLAIN, replace(PLAIN, backend="cuda")),
    "peaks": lambda: peaks(ONE).figure,
    "peaks and three GPUs": lambda: peaks(ONE, ["60GiB", "80GiB", "900GiB"]).figure,
    "savings": lambda: savings_figure(ONE),
    "runs": lambda: over_steps_figure({"one": [PLAIN, RECOMPUTED], "other": [PLAIN]}),
    "ranks": lambda: ranks_figure(job_of(Layout(pipeline_model_parallel_size=4))),
    "ranks above their start": lambda: ranks_figure(MANY, above_start=True),
}


def lines_above(figure: go.Figure) -> list[str]:
    _, *lines = figure.layout.title.text.split("<br>")
    return lines


@pytest.fixture(scope="module")
def found() -> SearchResult:
    scenario = Scenario.of(architecture="qwen3-moe-tiny")
    machine_of_59 = predicting(machine(1, scenario), 59 * GIB)
    return search(NO_SETTING, [scenario], machine_of_59, 59 * GIB, resolution_bytes=GIB // 4)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_at_most_two_lines_above_it(name: str) -> None:
    lines = lines_above(FIGURES[name]())
    assert len(lines) <= 2, lines


@pytest.mark.parametrize(("num_left", "fits"), [(0, True), (0, False), (1234, True), (1234, False)])
def test_the_figure_of_a_search_has_two_lines_and_its_legend_has_the_marks(
    found: SearchResult, num_left: int, *, fits: bool
) -> None:
    points = tuple(replace(point, verdict="fits" if fits else "does not fit") for point in found.points)
    limit = 1000 * GIB if fits else GIB
    figure = search_figure(replace(found, points=points, num_left=num_left, limit_bytes=limit))
    above = lines_above(figure)
    assert len(above) == 2, above
    assert ("nothing fits" in above[1]) == (not fits)
    assert ("CUT SHORT: 1234 not tried" in above[1]) == bool(num_left)
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert len(legend) == len(set(legend))
    assert "faint: not on the front" in legend
