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
            # Not the variables of a make that runs these tests, such as the folder of its virtual environment.
            wanted = ["/usr/bin/env", "-u", "MAKEFLAGS", "-u", "MAKEOVERRIDES", "make", "--dry-run", arguments[-1]]
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
        p.stem for p in (ROOT / "papermill_runs" / "suites").glob("*.yaml") if not p.stem.startswith("h200")
    )


def test_only_the_workflow_of_newest_releases_may_fail() -> None:
    assert {path.stem for path in WORKFLOWS} == {"tests", "nightly", "newest", "book"}
    assert [path.stem for path in WORKFLOWS if "continue-on-error: true" in path.read_text()] == ["newest"]
