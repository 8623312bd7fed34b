"""The page of results: what stands in it is what the records say."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from memlab.analysis.accuracy import pairs_of
from memlab.analysis.limits import Limit
from memlab.cli import main
from memlab.config.from_json import parse_json
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.predictions import predict_limit
from memlab.record.step_record import StepRecord
from memlab.views.text.accuracy import accuracy_page, limits_page
from memlab.views.text.results import Result, results_page
from tests.unit.builders import record_of
from tests.unit.corruption import corruptions

GIB = 2**30
PLAIN = record_of(None, peak_allocated_bytes=10 * GIB)
OFFLOADED = replace(
    PLAIN,
    settings=MemorySettings(offload_modules=["core_attn"]),
    peak_allocated_bytes=9 * GIB,
    offloaded_bytes_by_module={"core_attn": 2 * GIB},
)


def rows_of(*results: Result) -> list[list[str]]:
    lines = [line for line in results_page(results).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_setting_is_compared_with_plain_by_the_median_of_its_steps() -> None:
    plain, offloaded = rows_of(Result(PLAIN, (0.2, 0.1, 0.9)), Result(OFFLOADED, (0.3, 0.25, 0.2)))
    assert plain[:3] == ["none", "10.000", ""]
    assert offloaded[:6] == ["offload core_attn", "9.000", "1.000", "2.000", "", "0.50"]
    assert offloaded[8:] == ["250", "", "1.25", f"{PLAIN.scenario.tokens_per_step / 0.25:,.0f}"]


def test_a_training_state_is_compared_with_the_default_state_in_a_table_of_its_own() -> None:
    plain = replace(PLAIN, static_bytes=6 * GIB, peak_phase="forward")
    state = TrainingState(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    record = replace(
        plain,
        scenario=replace(plain.scenario, state=state),
        static_bytes=4 * GIB,
        peak_allocated_bytes=11 * GIB,
        peak_phase="optimizer",
        host_bytes=2 * GIB,
    )
    default, changed = rows_of(Result(plain, (0.2,)), Result(record, (0.3,)))
    assert default[:6] == ["default state", "6.000", "", "10.000", "", "forward"]
    name = "use_precision_aware_optimizer, exp_avg_dtype bf16"
    assert changed == [name, "4.000", "2.000", "11.000", "-1.000", "optimizer", "", "2.000", "", "300", "", "1.50"]


def test_layers_of_multi_token_prediction_that_a_pipeline_layout_places_are_in_both_tables() -> None:
    layout = Layout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tmL")
    usual = TrainingState(mtp_num_layers=1)
    scenario = replace(PLAIN.scenario, num_layers=2, layout=layout, state=usual)
    plain = replace(PLAIN, scenario=scenario)
    changed = replace(plain, scenario=replace(scenario, state=replace(usual, use_precision_aware_optimizer=True)))
    lines = results_page([Result(plain, (0.2,)), Result(changed, (0.3,))]).splitlines()
    assert sum(line.startswith("## ") for line in lines) == 1
    first, second = pairs_of([plain, changed], [plain, changed])
    assert first.default_state is None and second.default_state is first


def test_the_spread_is_the_middle_half_of_the_steps() -> None:
    steps = tuple(0.1 + 0.01 * number for number in range(11))  # 100 to 200 ms: the middle half is 120 to 180
    assert rows_of(Result(PLAIN, steps))[0][8:11] == ["150", "40%", "1.00"]


def test_a_result_without_times_has_only_bytes() -> None:
    state = replace(PLAIN, scenario=replace(PLAIN.scenario, state=TrainingState(apply_rope_fusion=True)))
    without_times = Result.from_dict(Result(OFFLOADED, ()).to_dict())
    plain, offloaded, *_, changed = rows_of(Result(PLAIN, (0.2,)), without_times, Result(state, ()))
    assert plain[8:11] == ["200", "", "1.00"]
    assert offloaded[1:3] == ["9.000", "1.000"]
    assert offloaded[8:] == [""] * 4 and changed[9:] == [""] * 3
    assert "Each step time" not in results_page([Result(PLAIN, ()), Result(OFFLOADED, ())])


def test_a_table_names_every_machine_of_its_rows() -> None:
    other = replace(OFFLOADED, hardware={"GPU": "another"}, versions={"torch": "3"})
    page = results_page([Result(PLAIN, (0.1,)), Result(OFFLOADED, (0.1,)), Result(other, (0.1, 0.1))], "an H200")
    assert "Measured on GPU an H200 or another; torch 3. Each step time is the median of 1 to 2 steps." in page


def test_a_step_that_ran_out_of_memory_says_so_and_no_more() -> None:
    failed = replace(OFFLOADED, status="out_of_memory")
    assert rows_of(Result(PLAIN, (0.1,)), Result(failed, (0.1,)))[1][1:3] == ["out of memory", ""]


def test_results_without_a_plain_one_are_refused() -> None:
    with pytest.raises(ValueError, match="has no result without settings"):
        results_page([Result(OFFLOADED, (0.1,))])
    with pytest.raises(ValueError, match="are empty"):
        results_page([])


def test_the_command_writes_the_page_that_the_records_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result(PLAIN, (0.1,)), Result(OFFLOADED, (0.2,))]
    records, page = tmp_path / "gpu.jsonl", tmp_path / "RESULTS.md"
    records.write_text("".join(json.dumps(result.to_dict()) + "\n" for result in results))
    assert main(["results", str(records), "--out", str(page)]) == 0
    assert page.read_text().strip() == results_page(results).strip()
    records.write_text('{"record": {}}\n')
    assert main(["results", str(records)]) == 2
    assert "line 1: fields are ['record'], must be record and seconds" in capsys.readouterr().err
    records.write_bytes(b"\x80\xff\x00")
    assert main(["results", str(records)]) == 2
    assert re.search(r"gpu\.jsonl, line 1: the line is not valid JSON .*: measure it again\n$", capsys.readouterr().err)
    assert main(["results", str(tmp_path / "none.jsonl")]) == 2


def test_a_result_reads_back() -> None:
    result = Result(OFFLOADED, (0.1, 0.2))
    again = Result.from_dict(json.loads(json.dumps(result.to_dict())))
    assert isinstance(again.record, StepRecord)
    assert again == result


def test_scenarios_that_read_alike_have_tables_of_their_own() -> None:
    other = replace(PLAIN, scenario=replace(PLAIN.scenario, seed=5), peak_allocated_bytes=20 * GIB)
    rows = rows_of(
        Result(PLAIN, (0.1,)), Result(other, (0.1,)), Result(replace(OFFLOADED, scenario=other.scenario), (0.1,))
    )
    assert [row[2] for row in rows if row[0] == "offload core_attn"] == ["11.000"]


def test_a_page_in_no_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "labs/results/h200_settings.jsonl", "--out", "/nowhere/page.md"]) == 2
    assert "make it, or choose another file" in capsys.readouterr().err


def test_a_limit_is_bisected_and_read_back() -> None:
    free = replace(PLAIN, peak_reserved_bytes=20 * GIB)

    def completes(limit_bytes: int) -> bool:
        return limit_bytes >= 12 * GIB

    found = Limit.find(free, completes)
    assert found.fails_bytes < 12 * GIB <= found.fits_bytes <= found.fails_bytes * 1.0006
    for expected_gib in (11.999, 12.001, 12.05, 15, 30):  # what is expected may be wrong
        near = Limit.find(free, completes, expected_bytes=int(expected_gib * GIB))
        assert near.fails_bytes < 12 * GIB <= near.fits_bytes <= near.fails_bytes * 1.0006
    text = json.dumps(found.to_dict())
    assert Limit.from_dict(json.loads(text)) == found
    for damaged in corruptions(text.encode(), "json", seed=1):
        with suppress(ValueError):
            Limit.from_dict(parse_json(damaged, "the line", "measure it again"))
    with pytest.raises(ValueError, match="has no fits_bytes"):
        Limit.from_dict({name: value for name, value in found.to_dict().items() if name != "fits_bytes"})
    with pytest.raises(ValueError, match="must be two positive numbers in ascending order"):
        Limit.from_dict(found.to_dict() | {"fails_bytes": found.fits_bytes})
    with pytest.raises(ValueError, match="so it has no limit"):
        Limit.find(replace(PLAIN, status="out_of_memory"), completes)


def test_the_page_in_the_repository_explains_its_columns_as_memlab_does() -> None:
    committed = (Path(__file__).parents[2] / "labs" / "RESULTS.md").read_text(encoding="utf-8")
    predicted = predict_limit(Scenario.of("phi-4-tiny", num_layers=1, seq_length=32), MemorySettings())
    results = results_page([Result(PLAIN, (0.1,))])
    for page in (results, limits_page([(predicted, predicted)]), accuracy_page(pairs_of([PLAIN], [PLAIN]))):
        explained, *_ = re.split(r"\n(?:## \S+, |### |The largest error)", page)
        columns = [line for line in page.splitlines() if line.startswith(("| setting |", "| step |"))]
        assert columns
        assert all(part in committed for part in (explained.strip(), *columns))


def test_limits_that_are_predicted_too_low_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = predict_limit(Scenario.of("phi-4-tiny", num_layers=1, seq_length=32), MemorySettings())
    for factor, error, is_too_low in ((1.0, "+0.00%", "no"), (1.25, "-20.00%", "yes")):
        ends = {name: int(getattr(predicted, name) * factor) for name in ("fails_bytes", "fits_bytes")}
        page = limits_page([(replace(predicted, **ends), predicted)])
        (row,) = (line.split(" | ") for line in page.splitlines() if line.startswith("| phi-4-tiny"))
        assert (row[4], row[6].rstrip(" |")) == (error, is_too_low)
        assert f"largest error of 1 limits is {error}. In {int(factor > 1)} of the 1 cases" in page
    records, limits = tmp_path / "gpu.jsonl", tmp_path / "limits.jsonl"
    records.write_text(json.dumps(Result(PLAIN, (0.1,)).to_dict()) + "\n")
    limits.write_text(json.dumps(predicted.to_dict() | {"fits_bytes": "12"}) + "\n")
    assert main(["results", str(records), "--limits", str(limits)]) == 2
    assert "limits.jsonl, line 1: fits_bytes is '12', must be a whole number" in capsys.readouterr().err


def free(limit_bytes: int | None) -> StepRecord:
    """A step that completes with any memory."""
    return replace(PLAIN, peak_reserved_bytes=20 * GIB)
