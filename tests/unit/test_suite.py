"""What a suite file may say, and what is refused before anything runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from memlab.cli import main
from memlab.regression.suite.notebooks import read_notebook
from memlab.regression.suite.suite import read_suite
from tests.notebooks.small_labs import write_lab
from tests.notebooks.small_suites import write_suite

# A billion values, written in 3,000.
WIDE = f"a: &a [{', '.join('x' * 200)}]\nb: [{', '.join(['*a'] * 200)}]\nbackend: cpu\n"
BLOCK = "backend: cpu\ncases:\n  - lab: small\n    "


def test_a_matrix_makes_a_case_of_every_combination_with_a_name_that_says_which(tmp_path: Path) -> None:
    suite = read_suite(
        write_suite(
            tmp_path,
            BLOCK + "matrix:\n      count: [1, 8]\n      modules: [[a, b], []]\n    parameters: {rate: 1e-4}\n"
            "  - {lab: small, name: by-hand, timeout_seconds: 2.5, parameters: {name: 'on'}}\n",
        )
    )
    assert [case.name for case in suite.cases] == [
        "small-rate=0.0001-count=1-modules=a+b",
        "small-rate=0.0001-count=1-modules=none",
        "small-rate=0.0001-count=8-modules=a+b",
        "small-rate=0.0001-count=8-modules=none",
        "by-hand",
    ]
    assert suite.cases[0].parameters == {"rate": 1e-4, "count": 1, "modules": ["a", "b"]}
    assert (suite.cases[0].timeout_seconds, suite.cases[4].timeout_seconds) == (1800.0, 2.5)
    assert suite.runs_folder == tmp_path / "papermill_runs" / "runs"
    assert suite.baselines_folder == tmp_path / "papermill_runs" / "baselines" / "cpu"
    assert [case.name for case in suite.select("count=8*a+b")] == ["small-rate=0.0001-count=8-modules=a+b"]
    assert suite.select(None) == suite.cases


def test_a_case_can_merge_the_keys_of_others(tmp_path: Path) -> None:
    first = "backend: cpu\ncases:\n  - &a {lab: small, name: one, parameters: &p {rate: 0.5, count: 2}}\n"
    second = "  - &b {<<: *a, name: two, timeout_seconds: 7}\n  - {parameters: {count: 3, <<: [{rate: 2}, *p]}, <<: [*b, *a], name: three}\n"
    cases = read_suite(write_suite(tmp_path, first + second)).cases
    assert [(case.name, case.parameters, case.timeout_seconds) for case in cases] == [
        ("one", {"rate": 0.5, "count": 2}, 1800.0),
        ("two", {"rate": 0.5, "count": 2}, 7.0),
        ("three", {"rate": 2.0, "count": 3}, 7.0),
    ]
    for cases_ in ("[{<<: text}]", "[{<<: [1]}]", "&x {<<: *x}"):
        with pytest.raises(ValueError, match=r"<< stands for no mapping|nested more than 8 deep"):
            read_suite(write_suite(tmp_path, f"backend: cpu\ncases: {cases_}\n"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("rate: 1e-4", 1e-4),  # text in YAML 1.1
        ("rate: .5", 0.5),
        ("count: 010", 10),  # 8 in YAML 1.1
        ("name: on", "on"),  # true in YAML 1.1
        ("name: no", "no"),
        ("name: 1:30", "1:30"),  # 90 in YAML 1.1
        ("name: 2026-01-02", "2026-01-02"),  # a date in YAML 1.1
        ("name: null", "null"),
        ("modules: [no, on]", ["no", "on"]),
        ("modules: a,b", ["a", "b"]),
    ],
)
def test_a_value_means_what_the_labs_parameter_says(tmp_path: Path, written: str, read: object) -> None:
    suite = read_suite(write_suite(tmp_path, f"{BLOCK}name: case\n    parameters:\n      {written}\n"))
    assert list(suite.cases[0].parameters.values()) == [read]


def test_a_lab_with_a_backend_parameter_is_given_the_suites(tmp_path: Path) -> None:
    path = write_suite(tmp_path, BLOCK + "name: case\n")
    write_lab(tmp_path / "labs", parameters="backend: str = 'auto'\nmodules: list[str] = []", name="small")
    assert read_suite(path).cases[0].parameters == {"backend": "cpu"}


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "is empty, must be a mapping"),
        ("- a\n", "['a'] is not a mapping"),
        ("backend: [cpu\n", "line 2: not valid YAML (expected ',' or ']'"),
        ("backend: cpu\nbackend: cpu\n", "line 2: 'backend' is twice in one mapping"),
        ("cases: []\n", "key 'backend' is missing"),
        ("backend: cpu\n", "key 'cases' is missing"),
        ("backend: cpu\ncases: []\n", "cases is [], must be a list of blocks"),
        ("backend: tpu\ncases: [{lab: small}]\n", "backend is 'tpu', must be one of cpu"),
        ("backend: auto\ncases: [{lab: small}]\n", "backend is 'auto', must be one of cpu"),
        (
            "backend: cpu\ntimeout: 3\ncases: []\n",
            "unknown key 'timeout': choose from backend, baselines, timeout_seconds, cases",
        ),
        ("backend: cpu\ntimeout_seconds: 1e3\ncases: [{lab: small}]\n", "timeout_seconds is '1e3', must be above 0"),
        ("backend: cpu\ncases:\n  - lab: smal\n", "lab is 'smal', must be a notebook in"),
        (BLOCK + "parametres: {}\n", "unknown key 'parametres': choose from lab, name, timeout_seconds, parameters"),
        (BLOCK + "parameters: {cuont: 1}\n", "unknown parameter cuont: choose from count, rate, name, modules"),
        (BLOCK + "parameters: {count: 1e3}\n", "parameter count is '1e3', must be a whole number"),
        (BLOCK + "parameters: {count: 1_0}\n", "parameter count is '1_0', must be a whole number"),
        (BLOCK + "parameters: {count: [1]}\n", "parameter count is ['1'], must be a whole number"),
        (BLOCK + "parameters: {interactive: true}\n", "parameter interactive is False in every headless run"),
        (BLOCK + "matrix: {count: 1}\n", "matrix count is '1', must be a list of values"),
        (BLOCK + "matrix: {count: []}\n", "matrix count is [], must be a list of values"),
        (
            BLOCK + "matrix: {count: [1]}\n    parameters: {count: 1}\n",
            "count is under parameters and under matrix",
        ),
        (BLOCK + "matrix: {count: [1, 01]}\n", "case name small-count=1 is taken, must be unique"),
        (BLOCK + "name: a/b\n", "case name 'a/b' cannot name a folder"),
        (BLOCK + "name: ../a\n", "case name '../a' cannot name a folder"),
        (BLOCK + "name: a.failed\n", "case name 'a.failed' cannot name a folder"),
        (BLOCK + "name: summary.json\n", "case name summary.json is that of a file of the run: give the block another"),
        (BLOCK + "name: Index.html\n", "case name Index.html is that of a file of the run"),
        (BLOCK + "name: junit.xml\n", "case name junit.xml is that of a file of the run"),
        (BLOCK + "name: plotly.min.js\n", "case name plotly.min.js is that of a file of the run"),
        (BLOCK + "name: one\n  - {lab: small, name: ONE}\n", "case name ONE is taken, must be unique"),
        (
            BLOCK + f"matrix: {{count: {[*range(100)]}, rate: {[*range(100)]}}}\n",
            "the matrix makes 10,000 cases, must make at most 1000",
        ),
        (BLOCK + f"name: {'x' * 5000}\n", "xxx cannot name a folder"),
        (BLOCK + "parameters: {count: " + "9" * 5000 + "}\n", "999, must be a whole number"),
        ("backend: cpu\ncases: " + "[" * 5000 + "]" * 5000 + "\n", "nested without an end, must be at most 8 deep"),
        (WIDE, "more than 20,000 values, must be fewer: take anchors and aliases out"),
        ("#" * 300_000, "has more than 262,144 letters: split it into several files"),
        ("backend: &a [*a]\ncases: [{lab: small}]\n", "nested more than 8 deep"),
        ("backend: cpu\n? [a]\n: b\n", "a key must be a plain word"),
    ],
)
@pytest.mark.parametrize("command", ["nightly", "baseline update"])
def test_a_wrong_suite_exits_with_2_and_one_line(
    tmp_path: Path, text: str, refusal: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_suite(tmp_path, text)
    assert main([*command.split(), str(path)]) == 2
    printed, complaint = capfd.readouterr()
    assert printed == ""
    assert refusal in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "papermill_runs" / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("--only=", "pattern '' is empty, must be a part of a case's name: leave --only out to run all cases"),
        ("--out=", "argument --out: the path is empty, must name a file or folder"),
        ("--only nope", "pattern 'nope' is in no case's name: choose a part of case"),
        ("--jobs 0", "jobs is 0, must be at least 1"),
        ("--keep 0", "keep is 0, must be at least 1"),
        ("--jobs x", "argument --jobs: invalid int value: 'x'"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_one_line(
    tmp_path: Path, arguments: str, refusal: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_suite(tmp_path, BLOCK + "name: case\n")
    assert main(["nightly", str(path), *arguments.split()]) == 2
    complaint = capfd.readouterr().err
    assert refusal in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(("number", "is_sensible"), [("0", False), ("1", True), ("16", True), ("17", False)])
def test_a_case_has_as_many_ranks_as_one_machine_starts(tmp_path: Path, number: str, is_sensible: bool) -> None:
    path = write_suite(tmp_path, BLOCK + f"parameters: {{num_ranks: {number}}}\n")
    write_lab(tmp_path / "labs", parameters="num_ranks: int = 4", name="small")
    if is_sensible:
        assert read_suite(path).cases[0].parameters == {"num_ranks": int(number)}
    else:
        with pytest.raises(ValueError, match=rf"\(small\): num_ranks is {number}, must be from 1 to 16"):
            read_suite(path)


def test_a_lab_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write_suite(tmp_path, BLOCK + "name: case\n")
    write_lab(tmp_path / "labs", record=None, name="small")
    with pytest.raises(ValueError, match="block 1: lab small: the last code cell is not tagged 'record'"):
        read_suite(path)
    with pytest.raises(ValueError, match=r"suite .*missing.yaml does not exist"):
        read_suite(tmp_path / "missing.yaml")


@pytest.mark.parametrize("text", ["[]", "null", '{"cells": null}', "[" * 100_000, "", "\x00"], ids=len)
def test_a_file_that_is_not_a_notebook_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = write_suite(tmp_path, BLOCK + "name: case\n")
    (tmp_path / "labs" / "small.ipynb").write_text(text)
    with pytest.raises(ValueError, match="is not a valid notebook") as refusal:
        read_suite(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ids", [[], ["same", "same", "same"]], ids=["none", "equal"])
def test_a_notebook_whose_cells_have_no_or_equal_ids_is_read_without_a_warning(tmp_path: Path, ids: list[str]) -> None:
    write_lab(tmp_path, name="small")
    lab = tmp_path / "small.ipynb"
    values = json.loads(lab.read_text())
    for cell in values["cells"]:
        del cell["id"]
    for cell, name in zip(values["cells"], ids, strict=False):
        cell["id"] = name
    lab.write_text(json.dumps(values))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert len(read_notebook(lab).cells) == len(values["cells"])
    assert seen == []


@pytest.mark.parametrize("damage", ["tags", "source", "cells"])
def test_a_notebook_whose_fields_have_other_types_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = write_suite(tmp_path, BLOCK + "name: case\n")
    lab = tmp_path / "labs" / "small.ipynb"
    values = json.loads(lab.read_text())
    match damage:
        case "tags":
            values["cells"][1]["metadata"]["tags"] = None
        case "source":
            values["cells"][1]["source"] = 5
        case "cells":
            values["cells"] = None
    lab.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is not a valid notebook") as refusal:
        read_suite(path)
    assert "\n" not in str(refusal.value)


def test_a_suite_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="suite ") as refusal:
            read_suite(path)
        assert "\n" not in str(refusal.value)


def test_predicted_baselines_agree_with_measured_ones() -> None:
    baselines = Path(__file__).parents[2] / "papermill_runs" / "baselines"
    pairs = [(path, baselines / "h200" / path.name) for path in (baselines / "simulated").glob("*.json")]
    num_records = 0
    for predicted, measured in ((json.loads(p.read_text()), json.loads(m.read_text())) for p, m in pairs if m.exists()):
        before, after = (side["measured"]["records"] for side in (measured, predicted))
        assert before.keys() == after.keys()
        for name in before.keys() - {"(lab)"}:
            known, told = before[name]["metrics"], after[name]["metrics"]
            assert told["status"] == known["status"]
            assert told["peak_allocated_bytes"] == pytest.approx(known["peak_allocated_bytes"], rel=1e-4), name
            num_records += 1
    assert num_records > 50


def test_the_projects_suites_are_whole() -> None:
    for path in (Path(__file__).parents[2] / "papermill_runs" / "suites").glob("*.yaml"):
        suite = read_suite(path)
        baselines = {path.stem for path in suite.baselines_folder.glob("*.json")}
        assert baselines == {case.name for case in suite.cases}
