"""A nightly and its faults: each ends in a clear message and a true exit code, and touches no earlier run."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest

from memlab.cli import main
from memlab.regression.run.kept_runs import free_name, kept_runs, publish, remove_oldest, staged
from memlab.regression.summary import Summary, read_summary
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import RECORD
from tests.notebooks.small_suites import files_below, result_of, summary_of, write_suite

pytestmark = pytest.mark.notebook

GREEN = "backend: cpu\ntimeout_seconds: 120\ncases:\n  - {lab: small, matrix: {name: [good, planted, damaged]}}\n"
FAULTY = GREEN + (
    "  - {lab: small, matrix: {name: [killed, exits, unknown]}}\n"
    "  - {lab: small, name: limited, timeout_seconds: 10, parameters: {name: slow}}\n"
)
ONE = "backend: cpu\ncases:\n  - {lab: small, name: one}\n"


def memlab(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "memlab", *map(str, arguments)]


def runs_of(root: Path) -> list[Path]:
    return kept_runs(root / "papermill_runs" / "runs")


def is_running(pid_file: Path) -> bool:
    pid = int(pid_file.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@dataclass(frozen=True)
class Night:
    """Green runs, baselines taken from them and two of those spoiled, and a run in which everything goes wrong."""

    root: Path
    output: str
    exit_codes: list[int]
    green_run: dict[str, bytes]
    baselines: dict[str, bytes]

    @property
    def summary(self) -> Summary:
        return read_summary(runs_of(self.root)[-1])


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    root = tmp_path_factory.mktemp("night")
    suite = write_suite(root, GREEN)
    green = f"nightly {suite} --jobs 1"
    with cells_in_this_process():
        codes = [main(command.split()) for command in (f"{green} --allow-missing", f"baseline update {suite}", green)]
    folder = root / "papermill_runs" / "baselines" / "cpu"
    planted = folder / "small-name=planted.json"
    planted.write_text(planted.read_text().replace('"peak_allocated_bytes": 30', '"peak_allocated_bytes": 31'))
    (folder / "small-name=damaged.json").write_text('{"backend": ')
    suite.write_text(FAULTY)
    (run, _) = runs_of(root)
    before = files_below(run), files_below(folder)
    done = subprocess.run(memlab("nightly", suite, "--jobs", "2"), check=False, capture_output=True, text=True)
    return Night(root, done.stdout + done.stderr, [*codes, done.returncode], *before)


def test_a_green_suite_exits_with_0_and_a_red_one_with_1(night: Night) -> None:
    assert night.exit_codes == [0, 0, 0, 1]
    assert len(runs_of(night.root)) == 3
    assert night.summary.headline == "6 of 7 cases failed"
    assert "6 of 7 cases failed in" in night.output


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("small-name=good", "passed", ""),
        ("small-name=planted", "changed", "1 metric differs from the baseline of"),
        ("small-name=damaged", "bad baseline", "damaged.json is not valid JSON"),
        ("small-name=killed", "failed", "in cell 3 of 4 (Part 1): the kernel died"),
        ("small-name=exits", "failed", "before cell 4 of 4: the kernel exited early"),
        (
            "small-name=unknown",
            "no baseline",
            "it has no baseline yet: look at its values, then memlab baseline update",
        ),
        ("limited", "failed", "it was killed at its limit of 10 s"),
    ],
)
def test_each_fault_is_named_with_its_case(night: Night, case: str, status: str, message: str) -> None:
    (result,) = [result for result in night.summary.results if result.name == case]
    assert (result.status, message in result.message) == (status, True), result.message
    assert "\n" not in result.message
    run = runs_of(night.root)[-1]
    assert (run / result.folder / "log.txt").is_file()
    assert result.folder == (f"{case}.failed" if status == "failed" else case)
    (junit,) = [c for c in ET.fromstring((run / "junit.xml").read_text()).iter("testcase") if c.get("name") == case]
    kinds = {"passed": [], "failed": ["error"]}.get(status, ["failure"])
    assert [child.tag for child in junit if child.tag != "system-out"] == kinds


def test_a_planted_difference_is_reported_with_metric_baseline_and_now(night: Night) -> None:
    (line,) = [line for line in night.output.splitlines() if "peak_allocated_bytes" in line]
    assert line.split()[:5] == ["plain", "peak_allocated_bytes", "31", "30", "-1"]
    html = (runs_of(night.root)[-1] / "index.html").read_text()
    first_screen = html[: html.index("All cases")].replace("<wbr>", "")
    assert "<b>peak_allocated_bytes</b> of plain (none) -1 B" in first_screen


def test_earlier_runs_and_baselines_are_untouched(night: Night) -> None:
    assert files_below(runs_of(night.root)[0]) == night.green_run
    assert files_below(night.root / "papermill_runs" / "baselines" / "cpu") == night.baselines
    assert not list((night.root / "papermill_runs" / "runs").glob(".*nightly*"))


def test_a_run_is_whole_and_its_pages_share_one_plotly(night: Night) -> None:
    run = runs_of(night.root)[-1]
    names = {path.name for path in run.iterdir() if not path.is_dir()}
    assert names == {"index.html", "junit.xml", "summary.json", "plotly.min.js"}
    assert not list(run.glob(".*"))
    case = {path.name for path in (run / "small-name=good").iterdir()}
    assert case == {"notebook.ipynb", "page.html", "metrics.json", "records", "environment.json", "log.txt"}
    assert re.fullmatch(r"[-0-9]+_nocommit_cpu(-[2-9])?", run.name), "later runs of the same second have numbers"


def test_progress_says_when_a_case_begins_and_how_it_ended(night: Night) -> None:
    assert "small-name=good: started" in night.output
    assert "/7] small-name=killed: FAILED: small.ipynb failed in cell 3" in night.output
    assert "/7] small-name=good: passed (" in night.output
    assert "/7] small-name=planted: CHANGED: 1 metric differs from the baseline of" in night.output


def test_a_run_with_a_failed_case_makes_no_baseline(night: Night) -> None:
    suite = night.root / "papermill_runs" / "suites" / "small.yaml"
    assert main(["baseline", "update", str(suite)]) == 2


@pytest.mark.slow
def test_two_nightlies_at_once_keep_both_runs(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, ONE)
    # Before nbformat, whose imports take a second less after it.
    code = "import sys, memlab.regression; from memlab.cli import main\n"
    code += "from tests.notebooks.in_process import cells_in_this_process\n"
    code += "with cells_in_this_process(): sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "nightly", str(suite), "--allow-missing"]
    root = Path(__file__).parents[2]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    runs = runs_of(tmp_path)
    assert len(runs) == 2
    assert {output.splitlines()[-1] for output in outputs} == {f"report: {run / 'index.html'}" for run in runs}
    assert all((run / "one" / "metrics.json").is_file() for run in runs)
    assert [read_summary(run).name for run in runs] == [run.name for run in runs]


def test_ctrl_c_before_the_first_case_has_ended_ends_every_process_and_keeps_nothing(tmp_path: Path) -> None:
    pids = [tmp_path / "one", tmp_path / "two"]
    blocks = "".join(f"  - {{lab: small, name: {path.name}, parameters: {{name: 'slow{path}'}}}}\n" for path in pids)
    suite = write_suite(tmp_path, f"backend: cpu\ncases:\n{blocks}  - {{lab: small, name: waiting}}\n")
    earlier = tmp_path / "papermill_runs" / "runs" / "2026-01-01-000000_abc_cpu"
    earlier.mkdir(parents=True)
    summary_of(result_of("one")).write(earlier)
    before = files_below(tmp_path / "papermill_runs")
    with subprocess.Popen(memlab("nightly", suite, "--jobs", "2"), stderr=subprocess.PIPE, text=True) as process:
        while not all(path.is_file() and path.read_text() for path in pids):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in complaint
    assert "interrupted: no case had ended, so nothing of this run was kept" in complaint
    assert not any(map(is_running, pids))
    assert files_below(tmp_path / "papermill_runs") == before


def test_a_nightly_that_is_ended_keeps_the_cases_that_had_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    suite = write_suite(
        tmp_path,
        "backend: cpu\ncases:\n  - {lab: small, name: one}\n"
        f"  - {{lab: small, name: two, parameters: {{name: 'slow{pid}'}}}}\n  - {{lab: small, name: three}}\n",
    )
    command = memlab("nightly", suite, "--jobs", "1", "--allow-missing")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not (pid.is_file() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "ended early: 2 of 3 cases did not run, 0 failed" in output
    assert "Traceback" not in output
    (run,) = runs_of(tmp_path)
    summary = read_summary(run)
    assert [result.status for result in summary.results] == ["new", "not run", "not run"]
    assert (run / "one" / "page.html").is_file()
    assert "ended early" in (run / "index.html").read_text()
    assert ET.parse(run / "junit.xml").getroot().get("errors") == "2"
    assert not is_running(pid)
    # What was measured is measured: a baseline may be taken from it, and from it alone.
    assert main(["baseline", "update", str(suite)]) == 0
    assert [path.stem for path in (tmp_path / "papermill_runs" / "baselines" / "cpu").iterdir()] == ["one"]


@cells_in_this_process()
def test_a_disk_that_fills_up_at_the_end_keeps_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, ONE)
    assert main(["nightly", str(suite), "--allow-missing"]) == 0
    before = files_below(tmp_path / "papermill_runs")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("memlab.regression.nightly.publish", full)
    assert main(["nightly", str(suite), "--allow-missing"]) == 1
    complaint = capfd.readouterr().err
    assert "cannot be written (No space left on device): nothing of this run was kept" in complaint
    assert "earlier runs and baselines are unchanged: free some space, keep fewer runs with --keep" in complaint
    assert complaint.count("\n") == 1
    assert files_below(tmp_path / "papermill_runs") == before
    assert not list((tmp_path / "papermill_runs" / "runs").glob(".*nightly*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """A prefix under which a command finds a disk of 8 MiB, of which plotly.js takes 5, in the folder `disk`."""
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size=8m none {tmp_path / "disk"} && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let a user mount a small disk")
    return prefix


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_case_fails_the_case_and_keeps_the_run(tmp_path: Path, small_disk: list[str]) -> None:
    suite = write_suite(tmp_path, ONE.replace("}", ", parameters: {name: filling}}"))
    command = memlab("nightly", suite, "--allow-missing", "--out", tmp_path / "disk")
    # The disk is gone with the command, so the command prints what it kept.
    show = ["sh", "-c", '"$@"; code=$?; cat "$0"/2*/summary.json; exit $code', tmp_path / "disk"]
    done = subprocess.run([*small_disk, *show, *command], check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "1 of 1 case failed" in done.stdout
    kept = json.loads(done.stdout[done.stdout.index('{\n "status": "red"') :])
    assert "No space left on device" in kept["results"][0]["message"]


def test_only_the_newest_runs_are_kept(tmp_path: Path) -> None:
    by_hand = tmp_path / "2020-01-01_by_hand"
    by_hand.mkdir()
    for day in range(1, 6):
        name = f"2026-01-0{day}_abc_cpu"
        with staged(tmp_path, name, print) as staging:
            summary_of(result_of(), name=name).write(staging)
            publish(staging, tmp_path / name)
            history = [(run, read_summary(run)) for run in kept_runs(tmp_path)]
            remove_oldest(history, 3, pytest.fail)
    assert [run.name[:10] for run in kept_runs(tmp_path)] == ["2026-01-03", "2026-01-04", "2026-01-05"]
    assert by_hand.is_dir(), "only the nightly's own runs are removed"
    assert not list(tmp_path.glob(".*nightly*"))


def test_two_runs_of_one_second_have_two_names(tmp_path: Path) -> None:
    for expected in ("one", "one-2", "one-3"):
        with staged(tmp_path, "one", print) as staging:
            summary_of(result_of()).write(staging)
            assert free_name(tmp_path, "one") == expected
            publish(staging, tmp_path / expected)
    assert len(kept_runs(tmp_path)) == 3


def test_what_a_killed_nightly_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    with staged(tmp_path, "living", print) as living:
        killed = tmp_path / ".killed.nightly-0"
        killed.mkdir()
        (killed / ".alive").touch()
        with staged(tmp_path, "mine", print) as staging:
            summary_of(result_of()).write(staging)
            publish(staging, tmp_path / "mine")
        assert not killed.exists()
        assert living.is_dir()
        assert kept_runs(tmp_path) == [tmp_path / "mine"]


@cells_in_this_process()
def test_an_unreadable_run_is_named_and_left_out_of_the_trend(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, ONE)
    spoiled = tmp_path / "papermill_runs" / "runs" / "2026-01-01_abc_cpu"
    spoiled.mkdir(parents=True)
    (spoiled / "summary.json").write_text("{")
    assert main(["nightly", str(suite), "--allow-missing"]) == 0
    assert "/summary.json is not valid JSON" in capfd.readouterr().out


@cells_in_this_process()
def test_a_record_of_another_backend_fails_its_case(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, ONE)
    lab = tmp_path / "labs" / "small.ipynb"
    notebook = json.loads(lab.read_text())
    notebook["cells"][-1]["source"] = RECORD.replace('backend="cpu"', 'backend="cuda"')
    lab.write_text(json.dumps(notebook))
    assert main(["nightly", str(suite), "--allow-missing"]) == 1
    assert "record plain was made on cuda, but the suite says cpu" in capfd.readouterr().out


def test_a_lab_that_leaves_the_backend_open_runs_on_the_suite_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, ONE.replace("backend: cpu", "backend: simulated"))
    lab = tmp_path / "labs" / "small.ipynb"
    notebook = json.loads(lab.read_text())
    # A record has what the kernel was given, so that it needs no torch: tests/unit/test_simulated_backend.py opens a lab.
    of_the_kernel = RECORD.replace('backend="cpu"', 'backend=os.environ["MEMLAB_BACKEND"]')
    notebook["cells"][-1]["source"] = f"import os\n{of_the_kernel}"
    lab.write_text(json.dumps(notebook))
    monkeypatch.setenv("MEMLAB_BACKEND", "cpu")
    assert main(["nightly", str(suite), "--allow-missing"]) == 0, capfd.readouterr()
