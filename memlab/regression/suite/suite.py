"""A suite: which labs run every night, with which parameters. The whole file is checked before anything runs.

Example:
    A block is one lab; its matrix makes one case per combination, and names the case after the combination::

        backend: cpu
        timeout_seconds: 300
        cases:
          - lab: 00_quickstart
            matrix:
              seq_length: [512, 1024]
              num_layers: [2, 4]
          - lab: 00_quickstart
            name: quickstart-default
            timeout_seconds: 600
            parameters: {seq_length: 1024}
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from memlab.config.backend_kind import KINDS
from memlab.config.validation import shortened
from memlab.regression.suite.notebooks import check_record_cell, read_notebook
from memlab.regression.suite.parameters import INTERACTIVE, Parameter, ParameterValue, read_parameters, resolve
from memlab.regression.suite.written_yaml import Written, read_written_yaml

BACKEND_PARAMETER = "backend"
"""A lab that has a parameter of this name gets the suite's backend."""
RANKS_PARAMETER = "num_ranks"
"""A lab that has a parameter of this name starts so many processes."""
PAGE_FILE, JUNIT_FILE, SUMMARY_FILE, PLOTLY_FILE = "index.html", "junit.xml", "summary.json", "plotly.min.js"
"""The files of a run's folder, next to which each case has a folder named after it."""

_SUITE_KEYS = ("backend", "baselines", "timeout_seconds", "cases")
_BLOCK_KEYS = ("lab", "name", "timeout_seconds", "parameters", "matrix")
CASE_NAME = re.compile(r"(?!.*\.failed$)[A-Za-z0-9][A-Za-z0-9_.+=,-]{0,119}")
_RESERVED_NAMES = (PAGE_FILE, JUNIT_FILE, SUMMARY_FILE, PLOTLY_FILE)
_MAX_CASES = 1000
_MAX_RANKS = 16
"""Of a case, whose processes all start on one machine: on a CPU each takes about 0.5 GB before it builds a model."""
_WEEK_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One lab with one set of parameters."""

    name: str
    """Also names the case's folder in a run, and its baseline's file."""
    notebook: Path
    parameters: dict[str, ParameterValue]
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A suite file that was read and checked."""

    path: Path
    backend: str
    baselines: str
    """Name of the folder of its baselines: the backend's, or that of the kind of GPU that the suite is written for."""
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def shown_path(self) -> Path:
        """The path relative to the current folder, if it is in it."""
        return self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path

    @property
    def runs_folder(self) -> Path:
        """The folder of the kept runs."""
        return _home(self.path) / "runs"

    @property
    def baselines_folder(self) -> Path:
        """The folder of the suite's baselines."""
        return _home(self.path) / "baselines" / self.baselines

    def select(self, pattern: str | None) -> tuple[Case, ...]:
        """Returns the cases whose name contains a pattern, in which ``*`` and ``?`` match any letters.

        Args:
            pattern: None selects all cases.

        Raises:
            ValueError: If the pattern is empty, or no case's name contains it.
        """
        if pattern == "":
            raise ValueError("pattern '' is empty, must be a part of a case's name: leave --only out to run all cases")
        chosen = tuple(case for case in self.cases if pattern is None or fnmatchcase(case.name, f"*{pattern}*"))
        if not chosen:
            names = ", ".join(case.name for case in self.cases[:5])
            names += f" and {len(self.cases) - 5} more in {self.shown_path}" if len(self.cases) > 5 else ""
            raise ValueError(f"pattern {shortened(pattern)} is in no case's name: choose a part of {names}")
        return chosen


def read_suite(path: Path | str) -> Suite:
    """Reads a suite file and checks it against the labs that it names.

    Args:
        path: A YAML file. In a folder ``suites`` it uses the folders ``runs`` and ``baselines`` next to that folder,
            and the ``labs`` one level up; elsewhere those of ``papermill_runs`` in the current folder.

    Raises:
        ValueError: In one line, for a key, lab, parameter, value or name that is wrong.
    """
    try:
        path = Path(path).resolve()
        is_file = path.is_file()
    except OSError as error:
        raise ValueError(f"suite {str(path)[:100]}... cannot be read ({error.strerror}): give a YAML file") from error
    if not is_file:
        raise ValueError(f"suite {path} does not exist: give a YAML file such as papermill_runs/suites/cpu.yaml")
    values = _mapping(read_written_yaml(path), str(path))
    _check_keys(values, str(path), _SUITE_KEYS, required=("backend", "cases"))
    backend = values["backend"]
    if not isinstance(backend, str) or backend not in KINDS:
        raise ValueError(
            f"{path}: backend is {shortened(backend)}, must be one of {', '.join(KINDS)}: choose one of them"
        )
    baselines = values.get("baselines", backend)
    if not isinstance(baselines, str) or not CASE_NAME.fullmatch(baselines):
        raise ValueError(
            f"{path}: baselines is {shortened(baselines)}, must name a folder: write e.g. `baselines: h200`"
        )
    blocks = values["cases"]
    if not isinstance(blocks, list) or not blocks:
        raise ValueError(f"{path}: cases is {shortened(blocks)}, must be a list of blocks: write `- lab: NAME`")
    labs = _Labs(_home(path).parent / "labs")
    cases: dict[str, Case] = {}
    names: set[str] = set()
    for number, block in enumerate(blocks, start=1):
        where = f"{path}, block {number}"
        for case in _cases({"timeout_seconds": values.get("timeout_seconds", "1800")}, block, where, labs, backend):
            if case.name.lower() in names:  # a file system may take upper and lower case for the same
                raise ValueError(f"{where}: case name {case.name} is taken, must be unique: give the block a name")
            if len(cases) == _MAX_CASES:
                raise ValueError(f"{where}: the suite has more than {_MAX_CASES} cases: split it into several files")
            cases[case.name] = case
            names.add(case.name.lower())
    return Suite(path=path, backend=backend, baselines=baselines, cases=tuple(cases.values()))


def _home(path: Path) -> Path:
    return path.parents[1] if path.parent.name == "suites" else Path.cwd() / "papermill_runs"


@dataclass(slots=True)
class _Labs:
    """The labs that a suite may name, each read once."""

    folder: Path
    parameters: dict[str, dict[str, Parameter]] = field(default_factory=dict)

    def read(self, name: Written, where: str) -> tuple[Path, dict[str, Parameter]]:
        known = sorted(path.stem for path in self.folder.glob("*.ipynb"))
        if not isinstance(name, str) or name not in known:
            choices = f"choose from {', '.join(known)}" if known else "that folder has none"
            raise ValueError(
                f"{where}: lab is {shortened(name)}, must be a notebook in {self.folder} without .ipynb: {choices}"
            )
        path = self.folder / f"{name}.ipynb"
        if name not in self.parameters:
            try:
                notebook = read_notebook(path)
                check_record_cell(notebook)
                self.parameters[name] = read_parameters(notebook)
            except ValueError as error:
                raise ValueError(f"{where}: lab {name}: {error}") from error
        return path, self.parameters[name]


def _cases(defaults: dict[str, Written], block: Written, where: str, labs: _Labs, backend: str) -> Iterator[Case]:
    values = defaults | _mapping(block, where)
    _check_keys(values, where, _BLOCK_KEYS, required=("lab",))
    notebook, parameters = labs.read(values["lab"], where)
    fixed = _mapping(values.get("parameters", {}), f"{where}: parameters")
    matrix = _mapping(values.get("matrix", {}), f"{where}: matrix")
    columns: list[list[Written]] = []
    for name, column in matrix.items():
        if name in fixed:
            raise ValueError(f"{where}: {name} is under parameters and under matrix: keep one of them")
        if not isinstance(column, list) or not column:
            raise ValueError(
                f"{where}: matrix {name} is {shortened(column)}, must be a list of values: write [one, two]"
            )
        columns.append(column)
    num_cases = math.prod(map(len, columns))
    if num_cases > _MAX_CASES:
        raise ValueError(
            f"{where}: the matrix makes {num_cases:,} cases, must make at most {_MAX_CASES}: take values out"
        )
    stem = values.get("name", values["lab"])
    for combination in product(*columns):
        varied = dict(zip(matrix, combination, strict=True))
        given: dict[str, Written] = fixed | varied
        if BACKEND_PARAMETER in parameters and BACKEND_PARAMETER not in given:
            given[BACKEND_PARAMETER] = backend
        try:
            checked = resolve(parameters, given)
        except ValueError as error:
            raise ValueError(f"{where} ({stem}): {error}") from error
        checked.pop(INTERACTIVE, None)
        _check_ranks(checked, f"{where} ({stem})")
        named = varied if "name" in values else fixed | varied
        name = "-".join([str(stem), *(f"{key}={_word(checked[key])}" for key in named)])
        if not CASE_NAME.fullmatch(name):
            rule = "must be at most 120 letters, digits and _ . + = , -"
            raise ValueError(
                f"{where}: case name {shortened(name)} cannot name a folder, {rule}: give the block a name"
            )
        if name.lower() in _RESERVED_NAMES:
            raise ValueError(f"{where}: case name {name} is that of a file of the run: give the block another name")
        yield Case(
            name=name, notebook=notebook, parameters=checked, timeout_seconds=_seconds(values["timeout_seconds"], where)
        )


def _check_ranks(parameters: Mapping[str, ParameterValue], where: str) -> None:
    num_ranks = parameters.get(RANKS_PARAMETER, 1)
    if isinstance(num_ranks, int) and not 1 <= num_ranks <= _MAX_RANKS:
        raise ValueError(
            f"{where}: {RANKS_PARAMETER} is {num_ranks}, must be from 1 to {_MAX_RANKS}, which all start on one "
            "machine: give fewer, and predict larger jobs"
        )


def _word(value: ParameterValue) -> str:
    if isinstance(value, list):
        return "+".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mapping(value: Written, where: str) -> dict[str, Written]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {shortened(value)} is not a mapping: write `name: value` lines")
    return value


def _check_keys(values: Mapping[str, Written], where: str, known: Collection[str], required: Collection[str]) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: unknown key {shortened(key)}: choose from {', '.join(known)}")
    for key in required:
        if key not in values:
            raise ValueError(f"{where}: key {key!r} is missing: add a line `{key}: ...`")


def _seconds(value: Written, where: str) -> float:
    seconds = float(value) if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII) else 0.0
    if not 0 < seconds <= _WEEK_SECONDS:
        raise ValueError(
            f"{where}: timeout_seconds is {shortened(value)}, must be above 0 and at most a week: give another"
        )
    return seconds
