"""What steps free compared with the first, when they start and at their peaks: the table and the bars."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memlab.units import GIB
from memlab.views.display import savings
from memlab.views.text.columns import LINE_WIDTH
from tests.unit.builders import out_of_memory, record_of, training_step

PLAIN = record_of(training_step())
FREES_AT_REST_ONLY = replace(
    record_of(None, without_effect={"fp8_recipe": "no fp8_format is given"}),
    static_bytes=PLAIN.static_bytes - 2 * GIB,
    peak_allocated_bytes=PLAIN.peak_allocated_bytes + 3 * GIB,
    peak_phase="optimizer",
)
BOTH = {"plain": PLAIN, "<bf16 moments>": FREES_AT_REST_ONLY}


def test_a_row_says_what_is_freed_at_the_start_and_at_the_peak_in_one_unit() -> None:
    table = str(savings(BOTH))
    (row,) = [line.split() for line in table.splitlines() if line.startswith("<bf16 moments> ")]
    start, peak = FREES_AT_REST_ONLY.static_bytes, FREES_AT_REST_ONLY.peak_allocated_bytes
    assert row[2:7] == [f"{start / GIB:.3f}", "2.000", f"{peak / GIB:.3f}", "-3.000", "optimizer"]
    assert "<bf16 moments>: fp8_recipe had no effect (no fp8_format is given)" in table
    assert max(map(len, table.splitlines())) <= LINE_WIDTH


def test_a_bar_ends_at_the_peak_and_its_two_parts_meet_at_the_start() -> None:
    figure = savings(BOTH).figure
    assert figure is not None
    starts, added = (trace.x for trace in figure.data)
    for place, record in enumerate(BOTH.values()):
        assert starts[place] * GIB == pytest.approx(record.static_bytes)
        assert (starts[place] + added[place]) * GIB == pytest.approx(record.peak_allocated_bytes)
    assert [line.x0 * GIB for line in figure.layout.shapes] == pytest.approx(
        [PLAIN.static_bytes, PLAIN.peak_allocated_bytes]
    )
    assert figure.layout.yaxis.ticktext == ("plain", "&lt;bf16 moments&gt;")
    assert (figure.layout.title.y, figure.layout.title.pad.t) == (1.0, 20), "a low figure does not cut off its title"
    assert [note.text.partition("(")[2] for note in figure.layout.annotations] == ["backward)", "optimizer)"]


def test_a_column_without_a_value_is_left_out() -> None:
    unknown = replace(PLAIN, timeline=None, peak_phase=None, host_bytes=0)
    shown = savings({"first": unknown, "second": unknown})
    assert "peak is" not in str(shown) and "host" not in str(shown)
    assert shown.figure is not None
    assert not any("(" in note.text for note in shown.figure.layout.annotations)
    assert "host" in str(savings({"first": unknown, "second": replace(unknown, host_bytes=1)}))


def test_a_step_that_did_not_finish_frees_nothing_that_is_known() -> None:
    table = str(savings({"plain": PLAIN, "failed": out_of_memory(PLAIN)}))
    (row,) = [line.split() for line in table.splitlines() if line.startswith("failed ")]
    assert row.count("-") == 2
    with pytest.raises(ValueError, match="savings got 0 records, must be at least 1"):
        savings({})
