"""The workflows of a fork: valid, and what they run is there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from memlab.cli import build_parser

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(path: Path) -> list[str]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text())
    assert True in workflow, "YAML 1.1 reads the key `on` as true; GitHub does not"
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    for command in commands(path):
        program, *arguments = shlex.split(command)
        if program.endswith("memlab"):
            values = build_parser().parse_args(arguments)
            assert "suite" not in values or (ROOT / values.suite).is_file()
        elif program == "make":
            wanted = ["/usr/bin/env", "make", "--dry-run", arguments[-1]]
            subprocess.run(wanted, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_step_that_is_asked_for_its_outputs_is_there(path: Path) -> None:
    text = path.read_text()
    asked = set(re.findall(r"steps\.(\w+)\.", text))
    assert asked == set(re.findall(r"^ +(?:- )?id: (\w+)$", text, re.MULTILINE))


def test_tonights_run_is_told_from_the_kept_ones_and_from_what_was_left(tmp_path: Path) -> None:
    nightly = ROOT / ".github" / "workflows" / "nightly.yml"
    (command,) = [command for command in commands(nightly) if "GITHUB_OUTPUT" in command]
    runs = tmp_path / "papermill_runs" / "runs"
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    for name, age in (
        ("2026-01-01-000000_abc_cpu", 9000),
        ("2026-01-02-000000_abc_cpu", -9),
        (".2026-01-02_cpu.x", -9),
    ):
        (runs / name).mkdir(parents=True)
        os.utime(runs / name, (time.time() - age,) * 2)
    output = tmp_path / "output"
    for expected in ("papermill_runs/runs/2026-01-02-000000_abc_cpu", ""):
        subprocess.run(
            ["/bin/bash", "-ec", command], check=True, cwd=tmp_path, env=os.environ | {"GITHUB_OUTPUT": str(output)}
        )
        assert output.read_text().splitlines()[-1] == f"run={expected}"
        shutil.rmtree(runs / "2026-01-02-000000_abc_cpu", ignore_errors=True)


def test_the_nightly_runs_every_suite_that_needs_no_gpu() -> None:
    (nightly,) = [path for path in WORKFLOWS if path.stem == "nightly"]
    suites = re.findall(r"papermill_runs/suites/(\w+)\.yaml", "\n".join(commands(nightly)))
    assert sorted(suites) == sorted(
        p.stem for p in (ROOT / "papermill_runs" / "suites").glob("*.yaml") if p.stem not in ("h200", "h200x2")
    )


def test_only_the_workflow_of_newest_releases_may_fail() -> None:
    assert {path.stem for path in WORKFLOWS} == {"tests", "nightly", "newest", "book"}
    assert [path.stem for path in WORKFLOWS if "continue-on-error: true" in path.read_text()] == ["newest"]


def run_ci(folder: Path, make: str, *, has_other: bool) -> subprocess.CompletedProcess[str]:
    """Runs .ci/run on a copy of nothing but itself, where `make` is a line of bash and the installed Python is 3.11."""
    programs = {"bin/make": make, ".venv/bin/python": "echo Python 3.11.9"}
    if has_other:
        programs |= {"pyenv/versions/3.12.4/bin/python": "true"}
    for name, line in programs.items():
        program = folder / name
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": str(folder / "pyenv")}
    return subprocess.run([folder / ".ci" / "run"], env=environment, check=False, capture_output=True, text=True)


@pytest.mark.skipif(Path("/usr/bin/python3.12").exists(), reason="this machine's own Python 3.12 is taken first")
def test_ci_runs_all_tests_and_on_the_other_python_those_that_depend_on_versions(tmp_path: Path) -> None:
    done = run_ci(tmp_path, "echo ${*: -1}; echo $* >&2", has_other=True)
    assert (done.returncode, done.stdout) == (0, "test\ntest-versions\n")
    other = tmp_path / "pyenv" / "versions" / "3.12.4" / "bin" / "python"
    assert done.stderr.splitlines()[-1] == f"--no-print-directory PYTHON={other} VENV=.venv-3.12 test-versions"


@pytest.mark.skipif(Path("/usr/bin/python3.12").exists(), reason="this machine has the other Python")
def test_ci_says_what_it_has_not_run_where_there_is_no_other_python(tmp_path: Path) -> None:
    done = run_ci(tmp_path, "echo ${*: -1}", has_other=False)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["test", "not run: the tests that depend on versions, because this machine has no Python 3.12"],
    )


def test_ci_ends_with_the_first_run_that_fails(tmp_path: Path) -> None:
    done = run_ci(tmp_path, "echo 3 failed; exit 1", has_other=True)
    assert (done.returncode, done.stdout) == (1, "3 failed\n")
