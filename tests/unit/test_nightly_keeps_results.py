"""Nothing that goes wrong in one case, one baseline or one earlier run takes the results of the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pytest

from memlab.cli import main
from memlab.record.notebook_result import RUN_FOLDER_VARIABLE
from memlab.record.step_record import StepRecord
from memlab.regression import nightly
from memlab.regression.baseline import read_baseline
from memlab.regression.case_measurements import read_measured
from memlab.regression.nightly import NothingKeptError, Options, run_suite
from memlab.regression.report import report
from memlab.regression.run.kept_runs import kept_runs
from memlab.regression.run.process import end_processes
from memlab.regression.run.runner import LabRun, PreparedLab
from memlab.regression.suite.suite import Suite, read_suite
from memlab.regression.summary import CaseResult, Summary, read_summary
from tests.notebooks.small_suites import write_suite
from tests.unit.builders import record_of, training_step
from tests.unit.corruption import corruptions

NUM_CORRUPTIONS = 200
GOOD = f"small-count={NUM_CORRUPTIONS}"
TWO = "backend: cpu\ncases:\n  - {lab: small, matrix: {count: [0, 1]}}\n"
ALL = f"backend: cpu\ncases:\n  - {{lab: small, matrix: {{count: {[*range(NUM_CORRUPTIONS + 1)]}}}}}\n"


@dataclass
class Nightly:
    """A suite whose cases are done at once: each writes the same record, and then what a test lets it do."""

    root: Path
    faults: dict[str, Callable[[Path], object]] = field(default_factory=dict)
    """By case: called with the case's folder, after it was written."""
    lines: list[str] = field(default_factory=list)
    record: StepRecord = field(default_factory=lambda: replace(record_of(training_step()), backend="cpu"))

    def suite(self, text: str) -> Suite:
        return read_suite(write_suite(self.root, text))

    def run(self, suite: Suite, *, only: str | None = None, **options: int | bool) -> tuple[Summary, Path]:
        cases = [case for case in suite.cases if only in (None, case.name)]
        return run_suite(suite, cases, Options(**options), self.lines.append)  # type: ignore[arg-type]

    @property
    def runs(self) -> list[Path]:
        return kept_runs(self.root / "papermill_runs" / "runs")

    @property
    def baselines(self) -> Path:
        return self.root / "papermill_runs" / "baselines" / "cpu"


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nightly]:
    night = Nightly(tmp_path)

    def run(lab: PreparedLab, on_progress: Callable[[str], object] = print) -> LabRun:
        night.record.save(lab.folder / "records" / "plain")
        metrics = {"records": {"plain": {"loss": 1.5}}, "extra": {"ratio": 0.5}, "versions": {"torch": "2"}}
        (lab.folder / "metrics.json").write_text(json.dumps(metrics))
        night.faults.get(lab.folder.name, lambda _: None)(lab.folder)
        return LabRun(notebook=lab.notebook, parameters={}, folder=lab.folder, metrics=metrics, seconds=0.1)

    monkeypatch.setattr(PreparedLab, "run", run)
    monkeypatch.setattr(nightly, "_write_plotly", lambda _: None)
    yield night
    assert not list(tmp_path.rglob(".*nightly*")), "no staging folder stays"


def by_name(summary: Summary) -> dict[str, CaseResult]:
    return {result.name: result for result in summary.results}


def raising(error: BaseException) -> Callable[[Path], object]:
    def fault(_: Path) -> None:
        raise error

    return fault


def measuring(record: StepRecord) -> Callable[[Path], object]:
    """A fault that replaces the record of its case."""

    def fault(folder: Path) -> None:
        shutil.rmtree(folder / "records")
        record.save(folder / "records" / "plain")

    return fault


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        RuntimeError("two\nlines"),
        KeyError("x"),
        RecursionError(),
        ValueError("\ud800"),
    ],
    ids=repr,
)
def test_an_error_in_one_case_fails_that_case_and_keeps_the_others(night: Nightly, error: Exception) -> None:
    night.faults["small-count=1"] = raising(error)
    summary, folder = night.run(night.suite(TWO), allow_missing=True)
    assert [result.status for result in summary.results] == ["new", "failed"]
    assert night.runs == [folder]
    message = by_name(summary)["small-count=1"].message
    assert message
    assert "\n" not in message
    log = (folder / "small-count=1" / "log.txt").read_text()
    assert "Traceback" in log
    assert type(error).__name__ in log
    assert ET.parse(folder / "junit.xml").getroot().get("errors") == "1"
    assert read_summary(folder).results == summary.results


@pytest.mark.parametrize("step", ["compare_with_baseline", "read_measured", "read_baseline", "prepare_lab"])
def test_an_error_while_a_case_is_judged_fails_that_case(
    night: Nightly, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = night.suite(TWO)
    night.run(suite, allow_missing=True)
    assert main(["baseline", "update", str(suite.path)]) == 0
    original, calls = getattr(nightly, step), count()

    def fails_once(*arguments: object, **options: object) -> object:
        if next(calls) == 0:
            raise TypeError("unforeseen")
        return original(*arguments, **options)

    monkeypatch.setattr(nightly, step, fails_once)
    summary, folder = night.run(suite)
    assert sorted(result.status for result in summary.results) == ["failed", "passed"]
    (failed,) = summary.red
    assert failed.message == "TypeError: unforeseen"
    assert "fails_once" in (folder / failed.folder / "log.txt").read_text()


def test_an_error_while_a_case_is_reported_fails_that_case(night: Nightly, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = night.suite(TWO)
    original = report.CaseBodies.body

    def body(self: report.CaseBodies, result: CaseResult) -> str:
        if result.name == "small-count=1" and result.status != "failed":
            raise TypeError("cannot be drawn")
        return original(self, result)

    monkeypatch.setattr(report.CaseBodies, "body", body)
    summary, folder = night.run(suite, allow_missing=True)
    assert [result.status for result in summary.results] == ["new", "failed"]
    assert read_summary(folder).headline == "1 of 2 cases failed"
    assert "cannot be drawn" in (folder / "small-count=1" / "log.txt").read_text()
    assert "TypeError: cannot be drawn" in (folder / "index.html").read_text()


def test_an_error_of_the_page_itself_is_raised_and_the_results_are_kept(
    night: Nightly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report._Page, "html", raising(TypeError("the page")))
    with pytest.raises(TypeError, match="the page"):
        night.run(night.suite(TWO), allow_missing=True)
    (run,) = night.runs
    assert read_summary(run).headline == "2 cases passed"


@pytest.mark.parametrize("name", ["summary.json.partial", "junit.xml", "index.html"])
def test_a_disk_that_fills_up_with_the_report_keeps_the_results_that_were_written(
    night: Nightly, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = night.suite(TWO)
    write_text = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        if path.name == name:
            write_text(path, text[: len(text) // 2], **options)
            raise OSError(28, "No space left on device")
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["nightly", str(suite.path), "--allow-missing"]) == 1
    complaint = capfd.readouterr().err
    assert complaint.count("\n") == 1
    if name == "summary.json.partial":
        assert "cannot be written (No space left on device): nothing of this run was kept" in complaint
        assert night.runs == []
    else:
        (run,) = night.runs
        assert f"(No space left on device): the results are kept in {run / 'summary.json'}" in complaint
        assert read_summary(run).headline == "2 cases passed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_while_the_report_is_written_keeps_every_case_and_says_so(
    night: Nightly, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = night.suite(TWO)
    original = nightly.write_reports

    def write_reports(*arguments: object) -> Summary:
        os.kill(os.getpid(), number)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nightly, "write_reports", write_reports)
    assert main(["nightly", str(suite.path), "--allow-missing"]) == 128 + number
    printed = capfd.readouterr()
    assert "all of its cases had ended, and all are kept" in printed.out
    assert "nothing" not in printed.err
    (run,) = night.runs
    assert read_summary(run).headline == "2 cases passed"
    assert (run / "index.html").is_file()


@pytest.mark.parametrize("ending", ["first", "second"])
def test_a_signal_during_a_case_keeps_the_cases_before_it(
    night: Nightly, ending: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = night.suite(TWO)
    name = "small-count=0" if ending == "first" else "small-count=1"
    killed: list[Path] = []
    monkeypatch.setattr(nightly, "end_processes", killed.append)

    def interrupt(_: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not killed:  # as a kernel runs until it is killed
            signal.pthread_sigmask(signal.SIG_BLOCK, [])
        raise RuntimeError("killed")

    night.faults[name] = interrupt
    assert main(["nightly", str(suite.path), "--allow-missing", "--jobs", "1"]) == 128 + signal.SIGTERM
    printed = capfd.readouterr()
    if ending == "first":
        assert "no case had ended, so nothing of this run was kept" in printed.err
        assert night.runs == []
    else:
        assert "1 of 2 cases had ended, and are kept; 1 did not run" in printed.out
        assert [result.status for result in read_summary(night.runs[0]).results] == ["new", "not run"]


def test_a_nightly_that_ends_before_its_first_case_says_that_nothing_is_kept(night: Nightly) -> None:
    suite = night.suite(TWO)
    job = nightly._Night(suite, suite.cases, Options(), night.lines.append)
    job.ending.set()
    with pytest.raises(NothingKeptError):
        job.run()


def test_progress_that_no_process_reads_does_not_end_the_nightly(night: Nightly) -> None:
    suite = night.suite(TWO)
    summary, _ = run_suite(suite, suite.cases, Options(allow_missing=True), raising(BrokenPipeError()))  # type: ignore[arg-type]
    assert summary.headline == "2 cases passed"


def damaged_copies(path: Path, kind: str) -> list[bytes]:
    return list(corruptions(path.read_bytes(), kind, seed=20261122, count=NUM_CORRUPTIONS))  # type: ignore[arg-type]


def assert_one_line(error: ValueError, *words: str) -> None:
    assert str(error)
    assert all(word in str(error) for word in words)
    assert "\n" not in str(error)
    assert len(str(error)) < 1000, str(error)
    str(error).encode()


def test_a_damaged_baseline_fails_its_own_case_only(night: Nightly) -> None:
    night.record = replace(night.record, timeline=None)  # 200 steps less to draw
    suite = night.suite(ALL)
    night.run(suite, only=GOOD, allow_missing=True)
    assert main(["baseline", "update", str(suite.path), "--only", GOOD]) == 0
    num_refused = 0
    for number, copy in enumerate(damaged_copies(night.baselines / f"{GOOD}.json", "json")):
        path = night.baselines / f"small-count={number}.json"
        path.write_bytes(copy.replace(GOOD.encode(), path.stem.encode()))
        try:
            read_baseline(path)
        except ValueError as error:
            num_refused += 1
            assert_one_line(error, path.name, "git checkout")
    assert num_refused > NUM_CORRUPTIONS // 2
    summary, folder = night.run(suite)
    results = by_name(summary)
    assert results[GOOD].status == "passed"
    assert {result.status for result in summary.results} <= {"passed", "changed", "bad baseline"}
    assert sum(result.status == "bad baseline" for result in summary.results) == num_refused
    assert read_summary(folder).headline == summary.headline
    ET.parse(folder / "junit.xml")


def test_a_damaged_metrics_file_fails_its_own_case_only(night: Nightly) -> None:
    night.record = replace(night.record, timeline=None)  # 200 steps less to draw
    suite = night.suite(ALL)
    _, folder = night.run(suite, only=GOOD, allow_missing=True)
    copies = damaged_copies(folder / GOOD / "metrics.json", "json")
    case, num_refused = folder / GOOD, 0
    for copy in copies:
        (case / "metrics.json").write_bytes(copy)
        try:
            read_measured(case, "small", {}, "cpu")
        except ValueError as error:
            num_refused += 1
            assert_one_line(error)
    assert num_refused > NUM_CORRUPTIONS // 2
    for number, copy in enumerate(copies):
        night.faults[f"small-count={number}"] = lambda folder, copy=copy: (folder / "metrics.json").write_bytes(copy)  # type: ignore[misc]
    summary, folder = night.run(suite, allow_missing=True)
    assert by_name(summary)[GOOD].status == "new"
    assert len(summary.red) == num_refused
    assert {result.status for result in summary.results} == {"new", "failed"}


def test_a_damaged_summary_of_an_earlier_run_is_named_and_left_out_of_the_trend(night: Nightly) -> None:
    suite = night.suite(TWO)
    _, first = night.run(suite, allow_missing=True)
    num_refused = 0
    for number, copy in enumerate(damaged_copies(first / "summary.json", "json")):
        run = first.with_name(f"{first.name}-{number}")
        run.mkdir()
        (run / "summary.json").write_bytes(copy)
        try:
            read_summary(run)
        except ValueError as error:
            num_refused += 1
            assert_one_line(error, "summary.json", "remove its run")
    assert num_refused > NUM_CORRUPTIONS // 2
    night.lines.clear()
    summary, folder = night.run(suite, allow_missing=True, keep=1000)
    assert summary.headline == "2 cases passed"
    assert sum(line.startswith("left out: ") for line in night.lines) == num_refused
    assert "2 cases passed" in (folder / "index.html").read_text()


@pytest.mark.parametrize(
    "text", ["null", "1", "[]", '"x"', "", "{", "[" * 100_000, "1" * 5000, '{"results": NaN}', "{}"], ids=len
)
def test_a_kept_summary_that_is_not_one_does_not_stop_the_nightly(night: Nightly, text: str) -> None:
    spoiled = night.root / "papermill_runs" / "runs" / "2026-01-01_abc_cpu" / "summary.json"
    spoiled.parent.mkdir(parents=True)
    spoiled.write_text(text)
    summary, _ = night.run(night.suite(TWO), allow_missing=True)
    assert summary.headline == "2 cases passed"
    assert any(line.startswith("left out: ") and "summary.json" in line for line in night.lines)
    assert spoiled.read_text() == text


def test_a_damaged_suite_is_refused_in_one_line_or_read(night: Nightly) -> None:
    path = night.suite(TWO).path
    project = (Path(__file__).parents[2] / "papermill_runs" / "suites" / "cpu.yaml").read_bytes()
    own = project.replace(b"seq_length", b"count").replace(b"num_layers", b"rate").replace(b"architecture", b"name")
    for lab in (b"00_quickstart", b"02_recompute", b"03_activation_offload"):
        own = own.replace(lab, b"small")
    num_refused = 0
    for content in (TWO.encode(), own[: own.index(b"  # Where every byte")]):
        for copy in corruptions(content, "text", seed=20261122, count=NUM_CORRUPTIONS):
            path.write_bytes(copy)
            try:
                read_suite(path)
            except ValueError as error:
                num_refused += 1
                assert_one_line(error)
    assert num_refused > NUM_CORRUPTIONS // 2


@pytest.mark.parametrize("damage", ["zeros", "half", "list", "gone", "folder"])
def test_a_damaged_step_of_an_earlier_run_is_reported_and_not_drawn(night: Nightly, damage: str) -> None:
    suite = night.suite(TWO)
    _, first = night.run(suite, allow_missing=True)
    assert main(["baseline", "update", str(suite.path)]) == 0
    record = first / "small-count=1" / "records" / "plain"
    timeline = record / "timeline.npz"
    content = timeline.read_bytes()
    match damage:
        case "zeros":
            timeline.write_bytes(content[: len(content) // 2] + bytes(8) + content[len(content) // 2 + 8 :])
        case "half":
            timeline.write_bytes(content[: len(content) // 2])
        case "list":
            (record / "record.json").write_text("[]")
        case "gone":
            (record / "record.json").unlink()
        case "folder":
            (record / "record.json").unlink()
            (record / "record.json").mkdir()
    summary, folder = night.run(suite)
    assert [result.status for result in summary.results] == ["passed", "passed"]
    page = (folder / "index.html").read_text()
    assert page.count(f"the step of run {first.name} is not drawn") == 1


def test_a_number_that_is_not_finite_in_a_baseline_never_passes(night: Nightly) -> None:
    suite = replace(night.suite(TWO), backend="cuda")
    record = replace(record_of(training_step()), backend="cuda")
    for name in ("small-count=0", "small-count=1"):
        night.faults[name] = measuring(record)
    night.run(suite, allow_missing=True)
    refresh = nightly.read_baseline  # what the nightly reads with is what this test writes for
    assert main(["baseline", "update", str(suite.path)]) == 2, "the suite file says cpu"
    from memlab.regression.refresh_baselines import plan_refresh

    list(plan_refresh(suite, suite.cases).write())
    path = night.baselines / "small-count=0.json"
    for number in ("Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 400):
        good = path.read_text()
        value = refresh(path).measured.records["plain"].metrics["host_bytes"]  # type: ignore[union-attr]
        path.write_text(good.replace(f'"host_bytes": {value}', f'"host_bytes": {number}'))
        assert path.read_text() != good
        summary, _ = night.run(suite)
        assert [result.status for result in summary.results] == ["bad baseline", "passed"]
        path.write_text(good)


def test_metrics_that_are_not_finite_fail_their_case(night: Nightly) -> None:
    spoiled = replace(record_of(training_step()), backend="cpu", loss=float("nan"))
    night.faults["small-count=0"] = measuring(spoiled)
    text = '{"records": {"plain": {}}, "extra": {"ratio": NaN}, "versions": {}}'
    night.faults["small-count=1"] = lambda folder: (folder / "metrics.json").write_text(text)
    summary, _ = night.run(night.suite(TWO), allow_missing=True)
    assert ["must be finite" in result.message for result in summary.results] == [True, True]


def test_a_notebook_that_removes_the_folder_of_the_run_fails_and_the_run_is_kept(night: Nightly) -> None:
    night.faults["small-count=1"] = lambda folder: shutil.rmtree(folder.parent)
    summary, folder = night.run(night.suite(TWO), allow_missing=True)
    assert night.runs == [folder]
    assert [result.status for result in summary.results] == ["new", "failed"]
    assert (folder / "index.html").is_file()


def test_runs_are_kept_per_suite(night: Nightly) -> None:
    suite = night.suite(TWO)
    other = replace(suite, path=suite.path.with_name("other.yaml"))
    for number in range(3):
        night.run(suite, allow_missing=True, keep=2)
        if number == 0:
            night.run(other, allow_missing=True, keep=2)
    names = [read_summary(run).suite for run in night.runs]
    assert sorted(names) == ["other", "small", "small"]


def test_the_newest_run_is_the_one_made_last_even_if_the_clock_was_set_back(
    night: Nightly, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = night.suite(TWO)
    monkeypatch.setattr(nightly, "run_name", lambda *_: next(names))
    names = iter(["2030-01-01-000000_abc_cpu", "2020-01-01-000000_abc_cpu", "2019-01-01-000000_abc_cpu"])
    night.run(suite, allow_missing=True)
    night.run(suite, allow_missing=True)
    from memlab.regression.refresh_baselines import plan_refresh

    assert plan_refresh(suite, suite.cases).summary.name == "2020-01-01-000000_abc_cpu"
    night.run(suite, allow_missing=True, keep=2)
    assert [run.name[:4] for run in night.runs] == ["2019", "2020"], "the run made first is removed first"


def test_an_old_run_that_is_a_link_is_unlinked_and_what_it_links_to_stays(night: Nightly) -> None:
    suite = night.suite(TWO)
    _, first = night.run(suite, allow_missing=True)
    elsewhere = night.root / "elsewhere"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    summary, folder = night.run(suite, allow_missing=True, keep=1)
    assert summary.headline == "2 cases passed"
    assert night.runs == [folder]
    assert (elsewhere / "summary.json").is_file()


def test_an_old_run_that_cannot_be_removed_is_named_and_the_nightly_stays_green(
    night: Nightly, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = night.suite(TWO)
    night.run(suite, allow_missing=True)
    monkeypatch.setattr(Path, "rename", lambda path, target, rename=Path.rename: (
        raising(PermissionError(13, "Permission denied"))(path) if "removed" in str(target) else rename(path, target)
    ))  # fmt: skip
    assert main(["nightly", str(suite.path), "--allow-missing", "--keep", "1"]) == 0
    assert "could not be removed (Permission denied): remove it by hand" in capfd.readouterr().out
    assert len(night.runs) == 2


def test_a_folder_of_runs_that_cannot_be_written_is_one_line(night: Nightly, capfd: pytest.CaptureFixture[str]) -> None:
    suite = night.suite(TWO)
    (night.root / "file").write_text("")
    assert main(["nightly", str(suite.path), "--out", str(night.root / "file" / "runs")]) == 2
    complaint = capfd.readouterr().err
    assert f"but {night.root / 'file'} is not a folder: choose another path" in complaint
    assert complaint.count("\n") == 1


def test_a_record_is_read_as_it_was_saved(night: Nightly) -> None:
    """The stub writes what a lab writes: without this, every test above could pass on a run that measured nothing."""
    summary, folder = night.run(night.suite(TWO), allow_missing=True)
    record = StepRecord.load(folder / "small-count=0" / "records" / "plain")
    measured = by_name(summary)["small-count=0"].measured
    assert measured is not None
    assert measured.records["plain"].metrics["peak_allocated_bytes"] == record.peak_allocated_bytes
    assert measured.records["(lab)"].metrics == {"ratio": 0.5}


def test_what_a_killed_nightly_left_running_is_ended_by_the_next_one(night: Nightly) -> None:
    abandoned = night.root / "papermill_runs" / "runs" / ".2026_abc_cpu.nightly-0"
    case = abandoned / ".one.running-0"
    case.mkdir(parents=True)
    (abandoned / ".alive").touch()
    environment = {RUN_FOLDER_VARIABLE: str(case)}
    with subprocess.Popen(["/bin/sleep", "600"], env=environment, start_new_session=True) as kernel:
        (known,) = (process for process in psutil.process_iter() if process.pid == kernel.pid)
        known._ident = (kernel.pid, 0.0)  # as psutil knows an earlier process that had this number
        try:
            night.run(night.suite(TWO), allow_missing=True)
            assert kernel.wait(timeout=60) == -signal.SIGKILL
        finally:
            kernel.kill()  # where it was not ended: the end of the block waits for it
    assert not abandoned.exists()


def test_a_process_that_is_only_being_started_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux shows the environment late in exec: of 600 new processes, 15 to 70 had none when `Popen` had returned."""
    too_early = 3  # reads

    def late(read: Callable[[psutil.Process], Any]) -> Callable[[psutil.Process], Any]:
        def read_late(process: psutil.Process) -> Any:
            nonlocal too_early
            if process.pid != kernel.pid or too_early <= 0:
                return read(process)
            too_early -= 1
            return type(read(process))()

        return read_late

    environ, cmdline = psutil.Process.environ, psutil.Process.cmdline
    with subprocess.Popen(["/bin/sleep", "600"], env={RUN_FOLDER_VARIABLE: str(tmp_path)}) as kernel:
        monkeypatch.setattr(psutil.Process, "environ", late(environ))
        monkeypatch.setattr(psutil.Process, "cmdline", late(cmdline))
        try:
            end_processes(tmp_path)
            assert kernel.wait(timeout=60) == -signal.SIGKILL
        finally:
            kernel.kill()
