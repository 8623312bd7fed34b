"""`memlab run` as a process: its output, its exit codes, and its end on a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memlab.cli import main
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import write_lab


@cells_in_this_process()
def test_a_run_says_where_notebook_and_page_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = write_lab(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(lab), "-p", "count", "8"]) == 0
    printed, complaint = capfd.readouterr()
    assert complaint == ""
    for label in ("notebook", "page"):
        path = next(line.split(maxsplit=1)[1] for line in printed.splitlines() if line.startswith(f"  {label}"))
        assert (tmp_path / path).is_file()
        assert path.startswith("papermill_runs/runs/")


@pytest.mark.parametrize(
    ("given", "found", "said"),
    [
        ("02_small", "labs/02_small.ipynb", ""),
        ("labs/02_small.ipynb", "labs/02_small.ipynb", ""),
        ("07_small", "labs/02_small.ipynb", "07_small has another number now: 02_small\n"),
        ("labs/07_small.ipynb", "labs/02_small.ipynb", "labs/07_small.ipynb has another number now: 02_small\n"),
        ("other", "memlab/other.ipynb", ""),
        ("labs/small.ipynb", "labs/small.ipynb", ""),
        (
            "01_other_small",
            None,
            "notebook 01_other_small is no file and none of memlab's labs: choose from 02_small, other, or give a path\n",
        ),
    ],
)
def test_a_lab_is_found_in_the_current_folder_first_and_under_its_former_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    found: str | None,
    said: str,
) -> None:
    for folder, names in (("labs", ["02_small"]), ("memlab", ["02_small", "other"])):
        (tmp_path / folder).mkdir()
        for name in names:
            write_lab(tmp_path / folder, name=name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memlab.commands.run.labs_folder", lambda: Path("memlab"))
    prepared: list[Path] = []
    monkeypatch.setattr("memlab.regression.run.runner.prepare_lab", lambda notebook, *_: prepared.append(notebook))
    monkeypatch.setattr("memlab.commands.run._run", lambda _: 0)
    assert main(["run", given]) == (0 if found else 2)
    assert prepared == ([Path(found)] if found else [])
    out, complaint = capsys.readouterr()
    assert (out or complaint) == said


def test_a_failed_run_exits_with_1_and_says_what_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lab = write_lab(tmp_path, "1 / 0")
    earlier = tmp_path / "run.failed" / "notes.txt"
    earlier.parent.mkdir()
    earlier.write_text("kept")
    assert main(["run", str(lab), "--out", str(tmp_path / "run")]) == 1
    complaint = capfd.readouterr().err
    assert "failed in cell 3 of 4 (Part 1): ZeroDivisionError: division by zero" in complaint
    assert f"kept in {tmp_path / 'run.failed-2'}: environment.json, log.txt, notebook.ipynb, page.html\n" in complaint
    assert earlier.read_text() == "kept", "a run overwrites nothing"


def test_a_terminated_run_ends_its_processes_and_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    lab = write_lab(
        tmp_path, "import os, pathlib, time\npathlib.Path(name).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    command = [sys.executable, "-m", "memlab", "run", str(lab), "-p", "name", str(pid_file)]
    with subprocess.Popen([*command, "--out", str(tmp_path / "runs" / "run")]) as process:
        while not (pid_file.is_file() and pid_file.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not list((tmp_path / "runs").iterdir())
