"""Start and peak over the steps of several runs: the small charts, and the table beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memlab.units import MIB
from memlab.views.display import over_steps
from tests.unit.builders import record_of, training_step

PLAIN = record_of(training_step())
GROWING = [replace(PLAIN, static_bytes=number * MIB, peak_allocated_bytes=(number + 9) * MIB) for number in range(3)]


def test_each_run_has_a_chart_with_its_peaks_and_starts_from_zero() -> None:
    figure = over_steps({"<A>": GROWING, "B": GROWING[:2], "C": GROWING}).figure
    assert figure is not None
    assert [list(trace.y) for trace in figure.data][:5] == [[9, 10, 11], [0, 1, 2], [0] * 3, [9, 10], [0, 1]]
    assert [note.text for note in figure.layout.annotations] == ["<b>&lt;A&gt;</b>", "<b>B</b>", "<b>C</b>"]
    assert figure.layout.yaxis3.range[0] == 0
    assert figure.layout.yaxis3.domain[1] <= figure.layout.yaxis.domain[0], "the second row is below the first"


def test_the_table_has_a_column_per_step() -> None:
    lines = str(over_steps({"A": GROWING})).splitlines()
    assert [line.split()[2:] for line in lines] == [
        ["0", "1", "2"],
        ["0.00", "1.00", "2.00"],
        *[["9.00", "10.00", "11.00"], ["0.00"] * 3],
    ]
    with pytest.raises(ValueError, match="over_steps got no steps, must be at least one for each run"):
        over_steps({"A": []})
