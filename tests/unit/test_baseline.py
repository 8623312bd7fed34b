"""What is compared with a baseline and how tightly, and how baselines are read, written and updated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memlab.cli import main
from memlab.regression.baseline import Baseline, baseline_path, read_baseline, write_baseline
from memlab.regression.case_measurements import CUDA_SLACK_BYTES, Measured, MetricValue
from memlab.regression.compare import compare_with_baseline
from memlab.regression.report.summary_text import changes
from memlab.regression.summary import read_summary
from memlab.units import MIB
from tests.notebooks.small_suites import measured, result_of, summary_of, write_suite
from tests.unit.builders import TimelineBuilder

PEAK = "peak_allocated_bytes"
SUITE = "backend: cpu\ncases:\n  - {lab: small, name: one, parameters: {count: 1}}\n  - {lab: small, name: two}\n"


def baseline_of(values: Measured, case: str = "one") -> Baseline:
    return Baseline(backend="cpu", case=case, date="2026-01-01", commit="abc1234", measured=values)


@pytest.mark.parametrize(
    ("metric", "now", "backend", "is_red"),
    [
        (PEAK, 2**20 + 1, "cpu", True),
        (PEAK, 2**20 - 1, "cpu", True),
        (PEAK, 2**20 + 1, "simulated", True),
        (PEAK, 5 * 2**20, "cuda", False),
        (PEAK, 5 * 2**20 + 1, "cuda", True),
        ("reserved_bytes", 7, "cuda", False),
        ("step_seconds", 9.0, "cpu", False),
        ("tokens_per_second", 9.0, "cpu", False),
        ("loss", 1.5000001, "cpu", True),
        ("loss", 1.5000001, "cuda", False),
        ("status", "out_of_memory", "cuda", True),
        ("ratio", 0.5, "cpu", True),
        ("peak_ratio", 0.5, "cuda", True),
    ],
)
def test_bytes_are_exact_on_the_cpu_and_times_are_never_gated(
    metric: str, now: MetricValue, backend: str, is_red: bool
) -> None:
    before = measured(ratio=0.75, reserved_bytes=1, tokens_per_second=1.0)
    after = measured(**{"ratio": 0.75, "reserved_bytes": 1, "tokens_per_second": 1.0, metric: now})
    assert [d.metric for d in compare_with_baseline(before, after, backend)] == ([metric] if is_red else [])


@pytest.mark.parametrize(("now", "is_red"), [(1.0009, False), (0.9991, False), (1.0011, True), (0.9989, True)])
def test_bytes_on_a_gpu_may_be_off_by_a_thousandth(now: float, is_red: bool) -> None:
    before, after = (measured(**{PEAK: int(size * 10 * 2**30)}) for size in (1.0, now))
    assert bool(compare_with_baseline(before, after, "cuda")) == is_red


@pytest.mark.parametrize(
    ("before", "after", "is_red"),
    [(252, 253, False), (252, 248, False), (252, 257, True), (0, 1, False), (1, 0, False), (0, 5, True), (5, 0, True)],
)
def test_a_part_of_a_gpu_s_peak_may_be_off_by_the_allocator_s_remainders(before: int, after: int, is_red: bool) -> None:
    metric = "peak_by_category/workspace"
    # A category of which nothing was alive is no metric at all.
    sides = [measured(**({metric: mebibytes * 2**20} if mebibytes else {})) for mebibytes in (before, after)]
    assert [d.metric for d in compare_with_baseline(*sides, "cuda")] == ([metric] if is_red else [])
    assert [d.metric for d in compare_with_baseline(*sides, "cpu")] == [metric]


def test_the_parts_of_a_gpu_s_peak_may_be_those_of_another_moment_that_nearly_reaches_it() -> None:
    # Unsplit remainders decide which of the two moments is the peak.
    step = TimelineBuilder()
    step.opening("parameters", 300 * MIB)
    for mebibytes, category in ((30, "workspace"), (-30, "workspace"), (28, "activations")):
        step.event(mebibytes * MIB, category)
    near_peak = step.build().categories_near_peak(CUDA_SLACK_BYTES)
    assert near_peak == {
        "parameters": (300 * MIB, 300 * MIB),
        "activations": (0, 28 * MIB),
        "workspace": (0, 30 * MIB),
    }
    metric = "peak_by_category/workspace"
    before, after = measured(**{metric: 30 * MIB}), measured(**{metric: 0})
    assert [d.metric for d in compare_with_baseline(before, after, "cuda")] == [metric]
    least, most = ({name: ends[end] for name, ends in near_peak.items()} for end in (0, 1))
    (name, record), *_ = after.records.items()
    after.records[name] = replace(record, least_near_peak=least, most_near_peak=most)
    assert compare_with_baseline(before, after, "cuda") == []
    assert [d.metric for d in compare_with_baseline(before, after, "cpu")] == [metric]
    more = measured(**{metric: 36 * MIB})
    assert [d.metric for d in compare_with_baseline(more, after, "cuda")] == [metric]


def test_a_loss_is_only_gated_where_packages_and_processor_are_the_same() -> None:
    now = measured(loss=1.6)
    assert compare_with_baseline(measured(), now, "cpu")
    for other in (
        replace(now, machine="aarch64"),
        replace(now, versions=now.versions | {"torch": "3"}),
        replace(now, versions=now.versions | {"megatron-core": "0.19.2"}),
    ):
        assert not compare_with_baseline(measured(), other, "cpu")
    assert compare_with_baseline(
        measured(), replace(now, versions=now.versions | {"memlab": "1", "python": "3.12"}), "cpu"
    )


def test_a_metric_or_record_that_is_new_or_gone_is_a_change() -> None:
    before, after = measured(gone_bytes=1), measured(came_bytes=2)
    differences = compare_with_baseline(before, after, "cpu")
    assert {(d.metric, d.difference, d.is_missing) for d in differences} == {
        ("gone_bytes", "gone", False),
        ("came_bytes", "not in the baseline", True),
    }
    without = replace(after, records={})
    assert {d.difference for d in compare_with_baseline(before, without, "cpu")} == {"gone"}
    assert all(d.is_missing for d in compare_with_baseline(without, after, "cpu"))


def test_a_change_names_module_parameter_setting_and_version() -> None:
    before, after = measured(), measured(**{PEAK: 2**20 + 2**16})
    record = replace(
        after.records["plain"],
        peak_by_module={"decoder.layers.0.mlp": 2**19, "decoder.layers.1.mlp": 2**19 + 2**16},
        settings={"offload_modules": ["expert_fc1"]},
        scenario={"architecture": "phi-4-tiny", "seq_length": 128},
    )
    after = replace(
        after,
        records={"plain": record},
        parameters={"seq_length": 128},
        versions=after.versions | {"torch": "3"},
    )
    (difference,) = compare_with_baseline(before, after, "cpu")
    assert difference.difference == "+64.0 KiB (+6.25%)"
    assert difference.module == "+64.0 KiB in decoder.layers.1.mlp"
    assert changes(result_of(differences=(difference,))) == [
        "parameter seq_length: 64 -> 128",
        "setting offload_modules: expert_fc1+moe_act -> expert_fc1",
        "version of torch: 2 -> 3",
    ]
    (unexplained,) = compare_with_baseline(before, measured(**{PEAK: 1}), "cpu")
    assert changes(result_of(differences=(unexplained,))) == [
        "nothing but the code since the baseline's commit (parameters, settings and versions are the same)"
    ]


def test_the_sizes_of_a_layout_that_changed_are_named_and_a_size_that_a_baseline_lacks_is_the_usual_one() -> None:
    before, after = measured(), measured(**{PEAK: 1})
    old = {"tensor_model_parallel_size": 1, "data_parallel_size": 4}
    new = {"tensor_model_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1}
    for side, layout in ((before, old), (after, new)):
        side.records["plain"].scenario["layout"] = layout
    (difference,) = compare_with_baseline(before, after, "cpu")
    assert difference.changed == "scenario tensor_model_parallel_size: 1 -> 2"


def test_the_named_module_changed_in_the_direction_of_the_peak() -> None:
    after = measured(**{PEAK: 2**20 + 2**10})
    modules = {"decoder.layers.0.mlp": 0, "decoder.layers.1.mlp": 2**20 + 2**10}
    after = replace(after, records={"plain": replace(after.records["plain"], peak_by_module=modules)})
    assert compare_with_baseline(measured(), after, "cpu")[0].module == "+513.0 KiB in decoder.layers.1.mlp"
    assert compare_with_baseline(after, measured(), "cpu")[0].module == "-513.0 KiB in decoder.layers.1.mlp"


@pytest.mark.parametrize("kind", ["residual", "recomputed"])
def test_residual_and_recomputed_bytes_have_modules_of_their_own(kind: str) -> None:
    before, after = measured(**{f"{kind}_bytes": 0}), measured(**{f"{kind}_bytes": 2**16})
    figures = replace(after.records["plain"], **{f"{kind}_by_module": {"decoder.layers.1": 2**16}})
    (difference,) = compare_with_baseline(before, replace(after, records={"plain": figures}), "cpu")
    assert difference.module == "+64.0 KiB in decoder.layers.1"


def test_a_dropped_offload_module_is_named() -> None:
    after = measured()
    del after.records["plain"].metrics["offloaded_bytes_by_module/moe_act"]
    (difference,) = compare_with_baseline(measured(), after, "cpu")
    assert (difference.metric, difference.difference) == ("offloaded_bytes_by_module/moe_act", "gone")


def test_a_baseline_reads_back_and_holds_no_time(tmp_path: Path) -> None:
    path = baseline_path(tmp_path / "cpu", "one")
    write_baseline(path, baseline_of(measured()))
    read = read_baseline(path)
    assert read is not None
    assert not compare_with_baseline(read.measured, measured(step_seconds=9.0), "cpu")
    assert "seconds" not in path.read_text()
    assert list(path.parent.iterdir()) == [path]
    keys = [line.strip().partition(":")[0] for line in path.read_text().splitlines() if line.startswith("     ")]
    assert keys == sorted(keys), "a metric a line, sorted: a refresh is read as a diff"
    assert read_baseline(tmp_path / "missing.json") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"measured": {}}', "\xff", '{"measured": {"records": {"a": {"metrics": {"b": null}}}}}'],
)
def test_a_corrupted_baseline_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(
        ValueError,
        match=r"one\.json (cannot be read|is not valid JSON) .*git checkout -- one\.json.*memlab baseline update",
    ) as e:
        read_baseline(path)
    assert "\n" not in str(e.value)
    write_baseline(path, baseline_of(measured()))
    path.write_text(path.read_text().replace('"status": "ok"', '"status": null'))
    with pytest.raises(ValueError, match="status is None"):
        read_baseline(path)
    path.unlink()
    write_baseline(path, baseline_of(measured(), case="two"))
    with pytest.raises(ValueError, match="it is of case two"):
        read_baseline(path)


@pytest.fixture
def suite_with_a_run(tmp_path: Path) -> Path:
    """A suite, and a run of both its cases."""
    path = write_suite(tmp_path, SUITE)
    one, two = replace(measured(), parameters={"count": 1}), replace(measured(), parameters={})
    write_run(tmp_path, one, two)
    return path


def write_run(root: Path, one: Measured | None, two: Measured | None, date: str = "2026-01-02") -> Path:
    results = [
        result_of(name, measured=values, status="passed" if values else "failed")
        for name, values in (("one", one), ("two", two))
    ]
    folder = root / "papermill_runs" / "runs" / f"{date}-030405_abc1234_cpu"
    folder.mkdir(parents=True)
    summary_of(*results, name=folder.name).write(folder)
    assert [result.name for result in read_summary(folder).results] == ["one", "two"]
    return folder


def baselines(suite: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (suite.parents[1] / "baselines" / "cpu").glob("*")}


def test_an_update_prints_old_and_new_and_touches_nothing_else(
    suite_with_a_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = suite_with_a_run.parents[2]
    assert main(["baseline", "update", str(suite_with_a_run)]) == 0
    assert "one: new, 5 metrics of 1 records" in capfd.readouterr().out
    first = baselines(suite_with_a_run)
    assert set(first) == {"one.json", "two.json"}
    changed = measured(**{PEAK: 2**20 + 2**10})
    write_run(root, replace(changed, parameters={"count": 1}), replace(changed, parameters={}), date="2026-01-03")
    assert main(["baseline", "update", str(suite_with_a_run), "--only", "one"]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed == [
        "from 2026-01-03-030405_abc1234_cpu",
        "one: plain peak_allocated_bytes: 1,048,576 -> 1,049,600 (+1.0 KiB (+0.10%))",
    ]
    second = baselines(suite_with_a_run)
    assert second["two.json"] == first["two.json"]
    assert json.loads(second["one.json"])["measured"]["records"]["plain"]["metrics"][PEAK] == 2**20 + 2**10
    run = root / "papermill_runs" / "runs" / "2026-01-02-030405_abc1234_cpu"
    assert main(["baseline", "update", str(suite_with_a_run), "--run", str(run)]) == 0
    assert baselines(suite_with_a_run) == first
    assert "two: unchanged" in capfd.readouterr().out


def test_an_update_takes_modules_over_that_explain_the_same_metrics(
    suite_with_a_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["baseline", "update", str(suite_with_a_run)]) == 0
    figures = replace(measured().records["plain"], residual_by_module={"decoder.layers.0": 64})
    now = replace(measured(), records={"plain": figures})
    root = suite_with_a_run.parents[2]
    write_run(root, replace(now, parameters={"count": 1}), replace(now, parameters={}), date="2026-01-03")
    assert main(["baseline", "update", str(suite_with_a_run), "--only", "one"]) == 0
    assert capfd.readouterr().out.endswith("one: no metric is beyond its tolerance; the bytes by module are new\n")
    assert '"residual_by_module": {"decoder.layers.0": 64}' in baselines(suite_with_a_run)["one.json"]


def test_an_update_whose_reader_leaves_early_writes_every_baseline(suite_with_a_run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "memlab", "baseline", "update", str(suite_with_a_run)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # else the lines of a small suite stay in a buffer
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    assert baselines(suite_with_a_run).keys() == {"one.json", "two.json"}


def test_an_update_names_a_newer_run_that_cannot_be_read(
    suite_with_a_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = suite_with_a_run.parents[1] / "runs"
    (kept,) = runs.iterdir()
    newer = runs / "2027-01-01-000000_abc1234_cpu" / "summary.json"
    newer.parent.mkdir()
    newer.write_text("{")
    assert main(["baseline", "update", str(suite_with_a_run)]) == 0
    damaged, chosen, *_ = capfd.readouterr().out.splitlines()
    assert damaged.startswith("left out: ") and "cpu/summary.json is not valid JSON" in damaged
    assert chosen == f"from {kept.name}"
    (kept / "summary.json").write_text("[]")
    assert main(["baseline", "update", str(suite_with_a_run)]) == 2
    assert f"holds no run of small on cpu (left out: {kept / 'summary.json'} cannot be read" in capfd.readouterr().err


def test_an_update_replaces_a_corrupted_baseline(suite_with_a_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "update", str(suite_with_a_run)]) == 0
    damaged = suite_with_a_run.parents[1] / "baselines" / "cpu" / "two.json"
    damaged.write_text("{")
    assert main(["baseline", "update", str(suite_with_a_run)]) == 0
    assert "two: new, instead of a file that could not be read" in capfd.readouterr().out
    assert read_baseline(damaged) is not None


def test_an_update_refuses_a_run_that_is_not_whole(suite_with_a_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = suite_with_a_run.parents[2]
    failed = write_run(root, replace(measured(), parameters={"count": 1}), None, date="2026-01-04")
    other = write_run(root, replace(measured(), parameters={"count": 2}), None, date="2026-01-05")
    refusals = {
        "": "has failed cases, must have none for baselines to be taken from it: fix two",
        f"--run {failed}": "has failed cases",
        f"--run {root}": "holds no summary.json",
    }
    for arguments, refusal in refusals.items():
        assert main(["baseline", "update", str(suite_with_a_run), *arguments.split()]) == 2
        assert refusal in capfd.readouterr().err
    summary_of(result_of("one", measured=replace(measured(), parameters={"count": 2}))).write(other)
    assert main(["baseline", "update", str(suite_with_a_run), "--run", str(other)]) == 2
    assert "case one was run with {'count': 2}, and the suite now says {'count': 1}" in capfd.readouterr().err
    (other / "summary.json").write_text("{")
    assert main(["baseline", "update", str(suite_with_a_run), "--run", str(other)]) == 2
    assert "summary.json is not valid JSON" in capfd.readouterr().err
    assert baselines(suite_with_a_run) == {}


def test_an_update_without_a_run_says_what_to_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "update", str(write_suite(tmp_path, SUITE))]) == 2
    assert "holds no run of small on cpu: run memlab nightly" in capfd.readouterr().err


def test_a_full_disk_leaves_the_old_baselines(
    suite_with_a_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = suite_with_a_run.parents[1] / "baselines" / "cpu"
    write_baseline(folder / "one.json", baseline_of(replace(measured(**{PEAK: 1}), parameters={"count": 1})))
    before = baselines(suite_with_a_run)

    def full(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert main(["baseline", "update", str(suite_with_a_run)]) == 1
    refusal = (
        f"{folder} cannot be written (No space left on device): baselines that are not named above are as they were"
    )
    assert capfd.readouterr().err.startswith(refusal)
    assert baselines(suite_with_a_run) == before
