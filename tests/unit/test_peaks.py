"""Peaks side by side: what the bars and their table say, and the ranks that they are most often of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.analysis.diagnosis import worst
from memlab.cli import main
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.lab.lab import Lab
from memlab.lab.predictions import predict_ranks
from memlab.units import GIB
from memlab.views.display import View, peaks
from memlab.views.figures.palette import CATEGORY_LOOKS
from memlab.views.text.columns import LINE_WIDTH
from memlab.vocabulary import CATEGORIES
from tests.unit.builders import out_of_memory, record_of, training_step

OUTSIDE_BYTES = estimate_outside_torch(Layout()).total_bytes
PLAIN = record_of(training_step())
RECOMPUTING = record_of(training_step(recompute=True), MemorySettings(offload_optimizer=True))


def bars(view: View) -> dict[str, tuple[float, ...]]:
    return {trace.name: trace.y for trace in view.figure.data}


def test_the_parts_of_a_bar_add_up_to_the_peak() -> None:
    view = peaks({"plain": PLAIN, "other": RECOMPUTING})
    drawn = bars(view)
    for place, record in enumerate((PLAIN, RECOMPUTING)):
        assert sum(sizes[place] for sizes in drawn.values()) * GIB == pytest.approx(record.peak_allocated_bytes)
    assert list(drawn) == [
        name for name in CATEGORY_LOOKS if any(name in r.peak_by_category for r in (PLAIN, RECOMPUTING))
    ]
    for trace in view.figure.data:
        look = CATEGORY_LOOKS[trace.name]
        pattern = trace.marker.pattern
        assert (trace.marker.color, pattern.shape, pattern.bgcolor) == (look.colour, look.pattern, look.colour)


def test_a_bar_s_name_tells_its_bytes_and_phase_and_the_highest_is_bold() -> None:
    records = {"plain": PLAIN, "<other>": RECOMPUTING}
    highest = max(records, key=lambda name: records[name].peak_allocated_bytes)
    for name, text in zip(records, peaks(records).figure.layout.xaxis.ticktext, strict=True):
        shown, size, phase = text.split("<br>")
        assert shown == name.replace("<", "&lt;").replace(">", "&gt;")
        assert (size.startswith("<b>"), phase) == (name == highest, "(backward)")
        assert f"{records[name].peak_allocated_bytes / GIB:.3f} GiB" in size


def test_a_gpu_is_a_line_at_what_it_leaves_torch_or_told_of_where_it_is_far_above() -> None:
    near = PLAIN.peak_allocated_bytes + OUTSIDE_BYTES
    view = peaks({"plain": PLAIN}, [str(near), str(near + 1), "900GiB"])
    assert [shape.y0 for shape in view.figure.layout.shapes] == pytest.approx([(near - OUTSIDE_BYTES) / GIB] * 2)
    names = [note for note in view.figure.layout.annotations if note.text.endswith(" left")]
    assert abs((names[0].yshift or 0) - (names[1].yshift or 0)) >= 30, "no name, which has two lines, stands on another"
    (name,) = (note.text for note in peaks({"plain": PLAIN}, ["55GiB"]).figure.layout.annotations if "GPU" in note.text)
    assert name == f"55 GiB GPU:<br>{55 - OUTSIDE_BYTES / GIB:.1f} GiB left", "the line is at the second number"
    assert "above all bars: 900 GiB GPU (897.576 GiB)" in view.figure.layout.title.text


def test_the_table_says_to_the_byte_which_peaks_a_gpu_has_room_for() -> None:
    room = PLAIN.peak_allocated_bytes + OUTSIDE_BYTES
    failed = out_of_memory(PLAIN)
    table = str(peaks({"plain": PLAIN, "failed": failed}, [str(room), str(room - 1)]))
    verdicts = [line.rpartition(": ")[2] for line in table.splitlines() if line.startswith(f"A {str(room)[:5]}")]
    assert verdicts == ["plain.", "none of these peaks is within it."]
    assert "GPU leaves 52.871 GiB for torch: these peaks are within it: plain." in table
    assert "fit" not in table, "a peak alone does not say whether a step fits"
    assert f"failed: {failed.message}"[:40] in table


def test_the_table_has_every_category_and_lines_fit_the_page() -> None:
    known = [name for name in CATEGORIES if name != "unlabelled"]  # which only another program's snapshot has
    all_of_them = replace(PLAIN, peak_by_category=dict.fromkeys(known, 100 * GIB), peak_allocated_bytes=800 * GIB)
    table = str(peaks({"a name that is as long as a setting's": all_of_them, "plain": PLAIN}))
    assert max(map(len, table.splitlines())) <= LINE_WIDTH
    for word in (word for name in known for word in name.split()):
        assert word in table


def test_moments_are_told_once_for_all_that_share_one() -> None:
    table = str(peaks({"one": PLAIN, "two, three": PLAIN}))
    (line,) = [line for line in table.splitlines() if line.startswith("  backward")]
    assert line.endswith(": one; two, three")
    assert "  -, without a timeline: bare" in str(peaks({"bare": replace(PLAIN, timeline=None)}))


def test_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="peaks got 0 records, must be at least 1"):
        peaks({})


SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64}


def test_a_rank_of_every_kind_is_the_command_s(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = Layout(expert_model_parallel_size=2, data_parallel_size=2, pipeline_model_parallel_size=2)
    records = predict_ranks("qwen3-moe-tiny", layout, routing="skewed:2", num_microbatches=2, **SMALL)
    flags = (
        "--world-size 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-microbatches 2 --rank all"
    )
    command = (
        f"predict qwen3-moe-tiny --num-layers 2 --seq-length 64 --routing skewed:2 {flags} --out {tmp_path} --json"
    )
    assert main(command.split()) == 0
    told = json.loads(capfd.readouterr().out)
    assert list(records) == [f"rank-{rank}" for rank in range(4)]
    assert [r.peak_allocated_bytes for r in records.values()] == [r["peak_allocated_bytes"] for r in told["ranks"]]
    assert worst(records.values()).scenario.layout.rank == told["worst_rank"]
    page = (tmp_path / "ranks.html").read_text(encoding="utf-8")
    assert "rank 3" in page and "Plotly.newPlot" in page and ' src="http' not in page


def test_alike_ranks_are_looked_at_once_and_named_ones_alone() -> None:
    layout = Layout(expert_model_parallel_size=2, data_parallel_size=2)
    of_a_lab: dict[str, Any] = {"replay": False, "state": None, "allocator": None}
    assert list(predict_ranks("qwen3-moe-tiny", layout, **SMALL, **of_a_lab)) == ["rank-0"]
    assert list(predict_ranks("qwen3-moe-tiny", layout, ranks=[1], **SMALL)) == ["rank-1"]


def test_a_lab_that_was_asked_what_fits_is_as_it_was() -> None:
    with Lab("phi-4-tiny", num_layers=4, seq_length=2048, backend="simulated") as lab:
        plain = lab.step()
        lab.device_memory_bytes = 10**12
        fit = lab.fit(plain, plain.peak_allocated_bytes - 8 * 2**20 + OUTSIDE_BYTES)
        assert lab.device_memory_bytes == 10**12
        assert not fit.fits and fit.alternatives
        for choice in fit.alternatives:
            assert f"{choice}".startswith(f"{choice.settings}: peak")
        assert lab.fit(plain, "80GiB").fits
