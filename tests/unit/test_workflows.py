"""The workflows of a fork: valid, and what they run is there."""

from __future__ import annotations

import re
import shlex
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
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(path):
        program, *arguments = shlex.split(command)
        if program.endswith("memlab"):
            values = build_parser().parse_args(arguments)
            assert (ROOT / values.suite).is_file()
        elif program == "make":
            target = re.sub(r"^\.venv", "$(VENV)", arguments[-1])
            assert f"\n{target}:" in makefile


def test_there_is_one_for_tests_and_one_for_the_nightly() -> None:
    assert {path.stem for path in WORKFLOWS} == {"tests", "nightly"}
