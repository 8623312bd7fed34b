"""Predicted over measured: terms that add up to the byte, each named by what was done to the step, drawn and written."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import memlab.lab.lab
from memlab.allocator import caching_allocator
from memlab.analysis.difference import ROUNDING, PeakDifference, difference_of, obstacles
from memlab.backends import find_backend
from memlab.backends.simulated import of_the_cpu_backend
from memlab.cli import main
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.residency import residency
from memlab.lab.lab import Lab
from memlab.meter import caching_memory
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.units import KIB, MIB
from memlab.views.display import compare
from memlab.views.figures.compare import compare_figure
from memlab.views.figures.palette import CATEGORY_LOOKS
from memlab.views.text.columns import LINE_WIDTH, as_text
from memlab.views.text.compare import compare_blocks
from memlab.views.text.difference import comparison_text, difference_blocks, difference_lines, difference_rows
from memlab.vocabulary import CATEGORIES, PHASES, POOLS
from tests.unit.builders import TimelineBuilder, out_of_memory, random_timeline, record_of, scenario, training_step
from tests.unit.test_simulated_backend import measured_on_an_h200

MEASURED = Path(__file__).parent / "data" / "measured"
SMALL = {"num_layers": 2, "seq_length": 64}
EXACT = {name: getattr(of_the_cpu_backend(), name) for name in ("meter", "fill_workspaces", "active")}
"""Of a simulated backend without an allocator."""


def rounded(timeline: Timeline, seed: int = 0, up_to: int = KIB) -> Timeline:
    """Gives every storage some rounding, from its birth to its death."""
    of_storage = np.random.default_rng(seed).integers(0, up_to, int(timeline.storage.max()) + 1)
    rounding = of_storage[timeline.storage] * np.sign(timeline.delta_bytes)
    return replace(timeline, rounding_bytes=rounding, delta_bytes=timeline.delta_bytes + rounding)


def split(predicted: StepRecord, measured: StepRecord) -> PeakDifference:
    difference = difference_of([predicted, measured])
    assert difference is not None
    return difference


def differing(difference: PeakDifference) -> dict[tuple[str, str | None], int]:
    return {(term.name, term.module): term.difference_bytes for term in difference.terms if term.difference_bytes}


def measured_as(timeline: Timeline | None, **changes: Any) -> StepRecord:
    return record_of(timeline, backend="cuda", **changes)


def changed(timeline: Timeline, add_bytes: int, *, name: str, module: str) -> Timeline:
    """Makes every storage of a category and module larger, or smaller."""
    category = timeline.category == CATEGORIES.index(name)
    mask = category & (timeline.module == timeline.modules.index(module)) & (timeline.pool == POOLS.index("device"))
    assert mask.any()
    return replace(timeline, delta_bytes=timeline.delta_bytes + mask * add_bytes * np.sign(timeline.delta_bytes))


def plain_words(text: str) -> str:
    return re.sub(r"(\s|<[^>]*>)+", " ", text)


# Terms


@pytest.mark.parametrize("kind", ["rounded", "no rounding", "no timeline", "one timeline"])
@pytest.mark.parametrize("seed", range(12))
def test_terms_and_rows_add_up_to_the_byte(seed: int, kind: str) -> None:
    timelines = [random_timeline(40 + 60 * seed, 2 * seed + side, num_modules=5 + seed) for side in range(2)]
    if kind == "rounded":
        timelines = [rounded(timeline, seed, MIB) for timeline in timelines]
    predicted, measured = record_of(timelines[0]), measured_as(timelines[1])
    if kind.endswith("timeline"):
        measured = replace(measured, timeline=None)
        predicted = predicted if kind.startswith("one") else replace(predicted, timeline=None)
    difference = split(predicted, measured)
    rows = difference_rows(difference)
    assert sum(term.predicted_bytes for term in difference.terms) == predicted.peak_allocated_bytes
    assert sum(term.measured_bytes for term in difference.terms) == measured.peak_allocated_bytes
    assert sum(row.difference_bytes for row in rows) == difference.difference_bytes
    told = [term for row in rows for term in row.terms]
    assert len(told) == len(set(told)) == sum(1 for term in difference.terms if term.difference_bytes)
    assert (ROUNDING in {term.name for term in difference.terms}) == (kind == "rounded") == difference.rounding_is_known
    for name, size in predicted.peak_by_category.items():
        parts = sum(term.predicted_bytes for term in difference.terms if term.name == name)
        assert parts == size or (kind == "rounded" and size - parts >= 0)


def test_equal_steps_have_no_term_but_zeros() -> None:
    timeline = rounded(training_step())
    difference = split(record_of(timeline), measured_as(timeline))
    assert differing(difference) == {}
    assert difference_lines(difference)[0] == "the predicted peak is the measured one to the byte"
    figure = compare_figure(record_of(timeline), measured_as(timeline))
    assert not any(trace.type == "bar" for trace in figure.data)


def test_each_term_is_named_by_what_was_done() -> None:
    plain = training_step()
    predicted, act = record_of(rounded(plain)), "decoder.layers.1.mlp.experts.moe_act"
    more = changed(plain, 5 * MIB, name="activations", module=act)
    less = changed(more, -MIB, name="workspace", module="decoder.layers.0.self_attention.linear_qkv")
    assert differing(split(predicted, measured_as(rounded(less)))) == {
        ("activations", act): 5 * MIB,
        ("workspace", None): -MIB,
    }
    coarse = differing(split(predicted, measured_as(rounded(plain, seed=1, up_to=MIB))))
    assert coarse.keys() == {(ROUNDING, None)} and coarse[ROUNDING, None] > MIB


def test_a_module_that_one_side_alone_knows_belongs_to_the_one_around_it() -> None:
    plain = training_step()
    act = "decoder.layers.1.mlp.experts.moe_act"
    inside = replace(plain, modules=tuple(name + ".kernel" * (name == act) for name in plain.modules))
    around = act.removesuffix(".moe_act")
    terms = differing(split(record_of(plain), measured_as(inside)))
    assert terms.keys() <= {(name, place) for name in CATEGORIES for place in (act, around)}
    by_name: dict[str, int] = {}
    for (name, _), size in terms.items():
        by_name[name] = by_name.get(name, 0) + size
    assert not any(by_name.values()), "nothing but the place differs"


def test_where_one_side_does_not_tell_its_rounding_it_stays_in_the_categories() -> None:
    plain = training_step()
    without = split(record_of(rounded(plain)), measured_as(plain))
    assert not without.rounding_is_known
    assert sum(differing(without).values()) == without.difference_bytes < 0
    assert "does not count the allocator's rounding separately" in as_text(difference_blocks(without))


def test_peaks_at_different_moments_are_said_to_be() -> None:
    plain = training_step()
    at_end = changed(plain, 9000 * MIB, name="temporary", module="decoder.layers.3")
    difference = split(record_of(plain), measured_as(at_end))
    assert (difference.predicted_peak, difference.measured_peak) == (
        "backward of output_layer",
        "optimizer of decoder.layers.3",
    )
    update = (plain.phase == PHASES.index("optimizer")) & (plain.module == plain.modules.index("decoder.layers.3"))
    assert difference.predicted_there_bytes == plain.total_bytes()[update].max() < plain.peak_bytes()
    words = "compare these two moments: the predicted peak is in backward of output_layer, the measured one in"
    assert words in plain_words(as_text(difference_blocks(difference)))
    assert "both peak in backward of output_layer" in as_text(
        difference_blocks(split(record_of(plain), measured_as(plain)))
    )


# Which steps are compared


def test_two_steps_of_one_backend_are_compared_as_ever() -> None:
    one, other = record_of(training_step()), record_of(training_step(recompute=True))
    for backend in ("simulated", "cuda"):
        pair = [replace(record, backend=backend) for record in (one, other)]
        assert difference_of(pair) is None and obstacles(pair) == []
        assert comparison_text(*pair) == as_text(compare_blocks(*pair))
        assert not [trace for trace in compare_figure(*pair).data if trace.type == "bar"]


def test_the_order_does_not_matter_and_a_third_record_ends_it() -> None:
    predicted, measured = record_of(training_step()), measured_as(rounded(training_step()))
    assert split(predicted, measured).to_dict() == split(measured, predicted).to_dict()
    assert difference_of([predicted, measured, measured]) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"scenario": scenario(seq_length=1024)},
            "differ in seq_length (4096 predicted, 1024 measured); take the same",
        ),
        ({"scenario": scenario(architecture="phi-4")}, "differ in architecture.name (qwen3-30b-a3b predicted, phi-4"),
        ({"settings": MemorySettings(offload_optimizer=True)}, "offload_optimizer (False predicted, True measured)"),
        ({"forward_only": True}, "differ in forward_only (False predicted, True measured)"),
        ({"is_steady": False}, "differ in is_steady (True predicted, False measured)"),
        ({"status": "interrupted"}, "a step did not finish; take two steps that do"),
    ],
)
def test_apples_are_not_held_against_pears(changes: Any, words: str) -> None:
    predicted, measured = record_of(training_step()), measured_as(training_step(), **changes)
    assert difference_of([predicted, measured]) is None
    assert words in plain_words(comparison_text(predicted, measured))
    assert words in plain_words(compare_figure(predicted, measured).layout.title.text)


def test_what_a_prediction_has_no_values_for_is_no_obstacle() -> None:
    predicted = record_of(training_step(), scenario=scenario(routing="skewed:3"))
    assert obstacles([predicted, measured_as(training_step(), scenario=scenario(seed=7))]) == []
    assert obstacles([predicted, out_of_memory(measured_as(training_step()))]) != []


# Real steps


@pytest.fixture(scope="module")
def on_cpu() -> StepRecord:
    with Lab("qwen3-moe-tiny", backend="cpu", **SMALL) as lab:
        lab.step()
        return lab.step()


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepRecord]:
    """Predicts the step that was measured, on a simulated backend that is changed."""

    def predict(settings: MemorySettings | None = None, **changes: Any) -> StepRecord:
        backend = replace(find_backend("simulated"), **changes)
        with monkeypatch.context() as patched:
            patched.setattr(memlab.lab.lab, "find_backend", lambda name: backend)
            with Lab("qwen3-moe-tiny", **SMALL) as lab:
                lab.step(settings)
                return lab.step(settings)

    return predict


def test_on_the_cpu_and_predicted_without_an_allocator_only_the_optimizer_s_counts_differ(
    on_cpu: StepRecord, predict: Any
) -> None:
    exact = predict(**EXACT)
    (term,) = differing(split(exact, on_cpu)).items()
    # torch's AdamW counts its steps in a tensor of 4 bytes a weight, Transformer Engine's in a number.
    assert term[0] == ("optimizer state", "") and term[1] % 4 == 0 and term[1] < KIB


def test_of_a_load_in_the_step_only_the_block_that_makes_a_segment_differs_from_the_cpu(
    predict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block makes torch's allocator reserve one segment for many tensors; the CPU has no such allocator."""
    settings = MemorySettings(
        recompute_granularity="selective",
        recompute_modules=("moe",),
        offload_optimizer=True,
        offload_optimizer_except_update=True,
    )
    with Lab("qwen3-moe-tiny", backend="cpu", **SMALL) as lab:
        on_cpu = lab.step(settings)
    given = predict(settings, **EXACT)
    assert given.peak_allocated_bytes - on_cpu.peak_allocated_bytes > KIB
    monkeypatch.setattr(residency, "_make_segment", lambda away: away[-1][1])
    exact = predict(settings, **EXACT)
    # The rest are AdamW's counts of steps, in tensors of 4 bytes.
    terms = differing(split(exact, on_cpu))
    assert {name for name, _ in terms} <= {"optimizer state", "temporary"}
    assert all(size % 4 == 0 and abs(size) < KIB for size in terms.values())


def test_the_allocator_and_the_workspaces_are_terms_of_their_own(
    on_cpu: StepRecord, predict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = differing(split(predict(), on_cpu))
    assert {name for name, _ in terms} == {ROUNDING, "workspace", "optimizer state"}
    assert terms[ROUNDING, None] < 0
    without = differing(split(predict(fill_workspaces=lambda is_moe: None), on_cpu))
    assert {name for name, _ in without} == {ROUNDING, "optimizer state"}
    monkeypatch.setattr(caching_memory, "new_allocator", caching_allocator.CachingAllocator)  # not the compiled one
    monkeypatch.setattr(caching_allocator, "rounded_bytes", lambda size: -(-size // 2048) * 2048)
    coarse = differing(split(predict(fill_workspaces=lambda is_moe: None), on_cpu))
    assert coarse[ROUNDING, None] < 2 * without[ROUNDING, None]
    assert coarse.keys() == without.keys()


@pytest.mark.parametrize(
    "settings",
    [
        MemorySettings(offload_parameters=True, offload_optimizer=True),
        MemorySettings(offload_modules=("core_attn", "moe_act"), min_offloaded_tensor_size=0),
    ],
    ids=str,
)
def test_storages_that_shrink_and_grow_in_place_leave_rounding_alone(settings: MemorySettings, predict: Any) -> None:
    exact = predict(settings, **EXACT)
    given = predict(settings, fill_workspaces=lambda is_moe: None)
    difference = split(given, replace(exact, backend="cpu"))
    assert differing(difference).keys() == {(ROUNDING, None)}
    assert difference.difference_bytes < 0
    assert given.timeline is not None and given.timeline.rounding_bytes is not None
    on_device = given.timeline.pool == POOLS.index("device")
    assert (np.cumsum(given.timeline.rounding_bytes[on_device]) >= 0).all()


def test_what_an_h200_needed_is_told_by_category() -> None:
    wanted = [
        (scenario, settings, metrics)
        for scenario, settings, metrics in measured_on_an_h200("quickstart-*4096")
        if scenario["architecture"] == "phi-4"
    ]
    assert len(wanted) > 1
    with Lab("phi-4", num_layers=4, seq_length=4096, backend="simulated") as lab:
        for values, settings, metrics in wanted:
            by_category = {
                key.partition("/")[2]: size for key, size in metrics.items() if key.startswith("peak_by_category/")
            }
            measured = measured_as(
                None,
                scenario=Scenario.of(**values),
                settings=settings,
                peak_allocated_bytes=metrics["peak_allocated_bytes"],
                peak_by_category=by_category,
            )
            difference = split(lab.step(settings), measured)
            terms = differing(difference)
            assert sum(terms.values()) == difference.difference_bytes
            assert {"parameters", "gradients"}.isdisjoint(name for name, _ in terms)
            assert max(abs(size) for size in terms.values()) <= 2 * KIB, terms


@pytest.mark.parametrize("folder", sorted(MEASURED.iterdir()), ids=lambda folder: folder.name)
def test_kept_measurements_are_predicted(folder: Path) -> None:
    """Each folder is what ``memlab measure ... --out tests/unit/data/measured/NAME`` saved, on any backend."""
    measured = StepRecord.load(folder)
    workload = {each.name: getattr(measured.scenario, each.name) for each in fields(Scenario)}
    with Lab(**workload, backend="simulated") as lab:
        lab.step(measured.settings)
        difference = split(lab.step(measured.settings), measured)
    sums = dict.fromkeys(CATEGORIES, 0)
    for term in difference.terms:
        sums[term.name] = sums.get(term.name, 0) + term.difference_bytes
    assert sum(sums.values()) == difference.difference_bytes
    assert sums["parameters"] == sums["gradients"] == 0
    if measured.backend == "cpu":
        assert difference.predicted_peak == difference.measured_peak
        # A GPU's norms have a workspace in backward, which is temporary memory.
        of_gpus = {ROUNDING, "workspace", "temporary", "optimizer state"}
        assert {name for name, size in sums.items() if size} <= of_gpus
    elif difference.rounding_is_known:
        assert difference.predicted_peak == difference.measured_peak
        assert sums["optimizer state"] == 0, "requested bytes: what the allocator adds is apart"
        assert abs(difference.difference_bytes - sums[ROUNDING]) <= KIB, as_text(difference_blocks(difference))
    else:
        assert abs(difference.difference_bytes) <= 0.005 * measured.peak_allocated_bytes, as_text(
            difference_blocks(difference)
        )


# What is drawn and written


def bars(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.type == "bar"]


def pair() -> tuple[StepRecord, StepRecord]:
    plain = training_step()
    more = changed(plain, 5 * MIB, name="activations", module="decoder.layers.1.mlp.experts.moe_act")
    less = changed(more, -MIB, name="workspace", module="decoder.layers.0.self_attention.linear_qkv")
    for layer in range(4):
        less = changed(less, 2 * MIB, name="activations", module=f"decoder.layers.{layer}.mlp.router")
    return record_of(rounded(plain)), measured_as(rounded(less, seed=1, up_to=MIB))


def test_the_picture_leads_from_one_peak_to_the_other() -> None:
    predicted, measured = pair()
    figure, rows = compare_figure(predicted, measured), difference_rows(split(predicted, measured))
    end = 0.0
    for bar, row in zip(bars(figure), rows, strict=True):
        assert bar.base[0] * MIB == end and bar.x[0] * MIB == row.difference_bytes
        end += bar.x[0] * MIB
        look = CATEGORY_LOOKS.get(row.name)
        assert (bar.marker.color, bar.marker.pattern.shape) == (
            (look.colour, look.pattern) if look else ("rgba(0, 0, 0, 0)", None)
        )
    assert end == measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    ends = [
        trace for trace in figure.data if trace.xaxis == "x2" and trace.type == "scatter" and trace.mode == "markers"
    ]
    assert [trace.x[0] * MIB for trace in ends] == [0, end]
    lines = [trace.line.color for trace in figure.data if trace.name and trace.type == "scatter"]
    assert [trace.marker.color for trace in ends] == lines
    low, high = figure.layout.xaxis2.range
    assert low < 0 and high * MIB > max(end, *(bar.base[0] * MIB for bar in bars(figure)))
    assert figure.layout.xaxis2.title.text == "allocated above the predicted peak (MiB)"


def test_the_two_plots_keep_their_pixels_and_do_not_touch() -> None:
    predicted, measured = pair()
    one, both = compare_figure(predicted, predicted).layout, compare_figure(predicted, measured).layout
    plots = both.height - both.margin.t - both.margin.b
    assert plots * (both.yaxis.domain[1] - both.yaxis.domain[0]) == pytest.approx(320)
    assert both.yaxis2.domain[1] * plots < plots * both.legend.y - 19 < plots * both.yaxis.domain[0] - 60
    assert [(layout.title.y, layout.title.pad.t) for layout in (one, both)] == [(1.0, 20)] * 2, "pixels from the top"


def test_the_picture_says_what_the_table_says() -> None:
    predicted, measured = pair()
    view = compare(predicted, measured)
    table = view.table.partition("from predicted to measured")[2]
    rows = difference_rows(split(predicted, measured))
    labels = [re.sub(r"<[^>]*>", " ", note.text) for note in view.figure.layout.annotations if note.yref == "y2"]
    assert len(labels) == len(rows) + 2
    for label, row in zip(labels[: len(rows)], rows, strict=True):
        assert row.name in label and row.label.split("layers.")[-1] in label
        assert f"{row.difference_bytes:+,}" in table
    assert "decoder.layers.*.mlp.router (4 layers)" in table
    assert max(len(line) for line in view.table.splitlines()) <= LINE_WIDTH
    for words in difference_lines(split(predicted, measured)):
        assert words in table


def test_the_table_s_numbers_are_the_data_s() -> None:
    predicted, measured = pair()
    difference = split(predicted, measured)
    lines = as_text(difference_blocks(difference)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("the step's peak"))
    numbers = [(line.startswith("  "), int(line.split()[-1].replace(",", ""))) for line in lines[start:]]
    total, *rest = numbers
    assert total[1] == difference.difference_bytes == sum(size for is_module, size in rest if not is_module)
    named = [size for is_module, size in rest if not is_module]
    assert next(abs(size) for size in named if size) == max(abs(size) for size in named)


def test_beyond_the_largest_the_modules_of_a_category_are_one_row() -> None:
    plain = training_step()
    much = plain
    for number, module in enumerate(
        sorted({name for name in plain.modules if "layers.2" in name or "layers.1" in name})
    ):
        if (plain.module[plain.category == CATEGORIES.index("activations")] == plain.modules.index(module)).any():
            much = changed(much, (number % 5 + 1) * (-1) ** number * MIB, name="activations", module=module)
    difference = split(record_of(plain), measured_as(much))
    rows = difference_rows(difference)
    assert len(rows) <= 10
    assert re.fullmatch(r"the other \d modules?", rows[-1].label)
    assert sum(row.difference_bytes for row in rows) == difference.difference_bytes
    sizes = [abs(row.difference_bytes) for row in rows[:-1]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_prediction_is_drawn_phase_by_phase_unless_another_axis_is_chosen() -> None:
    predicted, measured = pair()
    assert "phases aligned" in compare_figure(predicted, measured).layout.xaxis.title.text
    assert "(ms)" in compare_figure(predicted, measured, axis="time").layout.xaxis.title.text
    assert "events since" in compare_figure(predicted, measured, axis="event").layout.xaxis.title.text


def test_the_peak_of_a_sparse_timeline_has_its_label_on_the_time_axis() -> None:
    dice = random.Random("sparse")
    for _ in range(40):
        step = TimelineBuilder(phase="forward")
        for num_bytes in (MIB, MIB, 3 * MIB, -2 * MIB):
            step.event(num_bytes, "activations", after=dice.uniform(0.001, 3))
        record = record_of(step.build())
        compare_figure(record, record, axis="time")


@contextmanager
def saved(folder: Path, **records: StepRecord) -> Iterator[list[str]]:
    yield [str(record.save(folder / name)) for name, record in records.items()]


def test_the_command_prints_the_text_the_json_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, measured = pair()
    with saved(tmp_path, predicted=predicted, measured=measured) as folders:
        page = tmp_path / "page.html"
        assert main(["compare", *folders, "--out", str(page)]) == 0
        assert capsys.readouterr().out == comparison_text(predicted, measured) + "\n"
        assert "decoder.layers.*.mlp.router (4 layers)" in page.read_text()
        assert main(["compare", *folders, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["difference"] == split(predicted, measured).to_dict()
        terms = found["difference"]["terms"]
        assert sum(term["difference_bytes"] for term in terms) == found["difference"]["difference_bytes"]
        assert main(["compare", folders[0], folders[0], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["difference"] is None


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(training_step())
    with saved(tmp_path, whole=record, bare=replace(record, timeline=None)) as (whole, bare):
        record.save(tmp_path / "job" / "rank-0")
        for arguments, words in (
            ([whole], "arguments are required: FOLDER"),
            ([whole, str(tmp_path)], "holds no record.json"),
            ([whole, str(tmp_path / "job")], "one per rank: give one of them"),
            ([whole, bare, "--out", str(tmp_path / "page.html")], "has no timeline"),
            (
                [whole, whole, "--out", str(tmp_path / "none" / "page.html")],
                "is not a folder: make it, or choose another file",
            ),
        ):
            assert main(["compare", *arguments]) == 2
            printed = capsys.readouterr()
            assert printed.out == "" and words in printed.err and printed.err.count("\n") == 1
