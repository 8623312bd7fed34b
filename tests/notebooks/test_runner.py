"""What the runner takes for a run, and what it leaves of a failed one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from memlab.record.step_record import StepRecord
from memlab.regression.run.notebook_page import write_page
from memlab.regression.run.papermill_engine import MAX_SHOWN_LETTERS, OutputBound
from memlab.regression.run.readable_notebook import make_readable
from memlab.regression.run.runner import LabFailedError, LabRun, prepare_lab
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import RECORD, run_lab, set_tag, write_lab

WRITE_PIDS = """\
import os, subprocess, pathlib, time
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(name).write_text(f"{os.getpid()} {orphan.pid}")
"""
WRITE_PIDS_WITHOUT_ENVIRONMENT = (
    WRITE_PIDS
    + """\
other = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
pathlib.Path(name).write_text(f"{os.getpid()} {orphan.pid} {other.pid}")
"""
)
"""Also a process that does not know of which run it is: only Linux lets the runner adopt it."""


_PRINT_TRANSPORT = """\
from ipykernel.connect import get_connection_info
print("transport", get_connection_info(unpack=True)["transport"])
"""


def assert_nothing_reads_as_a_run(folder: Path) -> None:
    assert not folder.exists()
    assert not list(folder.parent.glob(".*running*"))
    assert not list(folder.parent.rglob("metrics.json*"))
    assert not list(folder.parent.rglob("records*"))


def assert_ended(pids_file: Path) -> None:
    for pid in map(int, pids_file.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_leaves_notebook_page_metrics_records_environment_and_log(tmp_path: Path) -> None:
    printing = "import os\nos.system('echo from the shell')\nprint(count, rate, name, modules, interactive)"
    lab = write_lab(tmp_path, printing, _PRINT_TRANSPORT)
    before = lab.read_bytes()
    progress: list[str] = []
    run = run_lab(
        lab,
        {"count": "8", "rate": "1e-4", "name": "on", "modules": "expert_fc1,moe_act"},
        tmp_path / "runs" / "one",
        timeout_seconds=120,
        on_progress=progress.append,
    )
    assert lab.read_bytes() == before
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "environment.json",
        "log.txt",
        "metrics.json",
        "notebook.ipynb",
        "page.html",
        "records",
    ]
    transport = "transport ipc" if sys.platform == "linux" else "transport tcp"
    assert transport in (run.folder / "log.txt").read_text(), "a port could be taken before the kernel binds it"
    printed = "8 0.0001 on ['expert_fc1', 'moe_act'] False"
    assert printed in (run.folder / "log.txt").read_text()
    page = (run.folder / "page.html").read_text()
    assert printed in page.replace("&#39;", "'")
    assert "<script" not in page, "no figure, no plotly.js"
    assert run.parameters == {
        "count": 8,
        "rate": 1e-4,
        "name": "on",
        "modules": ["expert_fc1", "moe_act"],
        "interactive": False,
    }
    assert run.metrics["records"]["plain"]["peak_allocated_bytes"] == 30
    assert run.metrics["extra"] == {"count": 8}
    assert StepRecord.load(run.folder / "records" / "plain").loss == 1.5
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["packages"]["papermill"]
    headings = [line.split("s  ")[-1] for line in progress]
    assert headings == ["A small lab", "the parameters of this run", "Part 1", "Part 2", "Record"]
    assert progress[0].startswith("[ 1/5]")


QUIZ = "from IPython.display import HTML\ndisplay(HTML('<details><summary>Two?</summary>Right.</details>'))"


def test_a_page_reads_like_a_report(tmp_path: Path) -> None:
    lab = write_lab(tmp_path, QUIZ, "print(count)", parameters="count: int = 1  # of something\nname: str = 'a'")
    set_tag(lab, 3, "hide-input")
    notebook = nbformat.read(lab, as_version=4)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell("## Nothing here"))
    nbformat.write(notebook, lab)
    page = (run_lab(lab, {"count": 8}, tmp_path / "run", timeout_seconds=120).folder / "page.html").read_text()
    assert "<tr><th>count</th><td><strong>8</strong></td><td>of something</td></tr><tr><th>name</th><td>a</td>" in page
    assert page.index("</h1>") < page.index("<th>count</th>") < page.index("Part 1")
    assert "<title>A small lab</title>" in page
    assert "Nothing here" not in page, "the section has nothing but parameters"
    assert re.search(r"<details open[^>]*><summary>Two\?", page)
    code = "".join(re.findall(r'<div class="highlight.*?</div>', page, re.DOTALL))
    assert "count" in code, "the code of the second part, and none that only runs the lab"
    assert [word for word in ("HTML", "injected", "name", "finish") if word in code] == []


def written_page(run: Path, text: str, labs: Path) -> str:
    """Returns the page of a lab that nobody has run: one cell of text, no parameters."""
    run.mkdir(parents=True)
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), run / "notebook.ipynb")
    write_page(run / "notebook.ipynb", run / "page.html", labs)
    return (run / "page.html").read_text()


def test_a_page_finds_what_its_lab_links_to(tmp_path: Path) -> None:
    text = (
        "# A lab\n[a](README.md#b) [c](../c/d.md) [e](#e) [f](https://example.org/f.md) [g](/g.md) [h](mailto:h@i.org)"
    )
    page = written_page(tmp_path / "runs" / "one", text, tmp_path / "labs & more")
    hrefs = [unescape(href) for href in re.findall(r'<a href="([^"]+)">[a-h]<', page)]
    from_here = "../../labs & more"
    as_written = ["#e", "https://example.org/f.md", "/g.md", "mailto:h@i.org"]
    assert hrefs == [f"{from_here}/README.md#b", f"{from_here}/../c/d.md", *as_written]


def test_a_page_has_no_colour_that_is_the_same_in_light_and_dark(tmp_path: Path) -> None:
    page = written_page(tmp_path / "run", "# A lab", tmp_path)
    style = page[page.index("<style>") : page.index("</style>")]
    scheme = r"@media \(prefers-color-scheme: (light|dark)\) \{((?:[^{}]*\{[^{}]*\})*)[^{}]*\}"
    (first, dark), *of_code = re.findall(scheme, style)
    assert [first, *(name for name, _ in of_code)] == ["dark", "light", "dark"]
    assert all(".highlight .k" in rules for _, rules in of_code)
    light, rules = re.sub(scheme, "", style).split("}", 1)
    assert "color-scheme: light dark" in light
    assert re.findall(r"--\w+(?=:)", light) == re.findall(r"--\w+(?=:)", dark)
    assert not re.search(r"#[0-9a-f]{3}", rules), "a colour that has no name"


def test_formulas_that_the_reader_is_to_find_are_folded_on_a_page_for_learners() -> None:
    for as_report in (False, True):
        cell = nbformat.v4.new_code_cell("P = 2 * h", metadata={"tags": ["fold-input"]})
        make_readable(nbformat.v4.new_notebook(cells=[cell]), as_report=as_report)
        assert ("hide-input" in cell.metadata["tags"]) == (not as_report), "MyST-NB's tag for code behind a button"
        assert "remove-input" not in cell.metadata["tags"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[LabRun, Path]:
    """A run with an interactive cell, with much output, and with processes that its lab leaves; and their numbers."""
    folder = tmp_path_factory.mktemp("whole")
    printing = "for _ in range(4): print('p' * 500_000)\nprint('the last line')"
    sitting = "raise RuntimeError('somebody should sit here')"
    lab = write_lab(folder, sitting, printing, "print('printed after')", WRITE_PIDS_WITHOUT_ENVIRONMENT)
    set_tag(lab, 3, "interactive-only")
    pids = folder / "pids"
    return run_lab(lab, {"name": str(pids)}, folder / "run", timeout_seconds=120), pids


def test_an_interactive_cell_is_skipped_and_the_run_still_whole(whole_run: tuple[LabRun, Path]) -> None:
    run, _ = whole_run
    assert "somebody" not in (run.folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cuont": 1}, "unknown parameter cuont: choose from count, rate, name, modules"),
        ({"count": "eight"}, "parameter count is 'eight', must be a whole number"),
        ({"count": "1e3"}, "parameter count is '1e3', must be a whole number"),
        ({"count": 1.5}, "parameter count is 1.5, must be a whole number"),
        ({"count": True}, "parameter count is True, must be a whole number"),
        ({"rate": "nan"}, "parameter rate is 'nan', must be a finite number"),
        ({"name": True}, "parameter name is True, must be text"),
        ({"modules": ["a", 1]}, "parameter modules is ['a', 1], must be a list of names"),
        ({"interactive": True}, "parameter interactive is False in every headless run"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_runs(
    tmp_path: Path, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=r"must be|choose from|leave it out") as refusal:
        run_lab(write_lab(tmp_path), parameters, tmp_path / "runs" / "run", timeout_seconds=120)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (None, "0 cells are tagged 'parameters'"),
        ("a: int = 1\na: int = 2", "parameter a is twice"),
        ("a: int = 1\nb = a * 2", "line 2, `b = a * 2`, has no literal value: derive values in the next cell"),
        ("import os", "is not a `name: type = literal`"),
        ("a: int = '8'", "has the default '8', must be a whole number"),
        ("a: str | None = None", "is of type str | None, must be one of int, float, bool, str, list[str]"),
        ("a = {'b': 1}", "is of type dict"),
        ("a: int =", "parameters cell, line 1: invalid syntax"),
    ],
)
def test_a_parameters_cell_holds_only_typed_literals(tmp_path: Path, cell: str | None, message: str) -> None:
    with pytest.raises(ValueError, match="parameter") as refusal:
        run_lab(write_lab(tmp_path, parameters=cell), {}, tmp_path / "run", timeout_seconds=120)
    assert message in str(refusal.value)


def test_two_parameters_cells_are_refused(tmp_path: Path) -> None:
    lab = write_lab(tmp_path, "x = 1")
    set_tag(lab, 3, "parameters")
    with pytest.raises(ValueError, match="2 cells are tagged 'parameters', must be exactly one"):
        run_lab(lab, {}, tmp_path / "run", timeout_seconds=120)


def test_a_file_that_is_not_a_notebook_is_refused(tmp_path: Path) -> None:
    lab = write_lab(tmp_path)
    lab.write_text("{ not json")
    with pytest.raises(ValueError, match="is not a valid notebook"):
        run_lab(lab, {}, tmp_path / "run", timeout_seconds=120)
    with pytest.raises(ValueError, match=r"does not exist: give the path of an \.ipynb file"):
        run_lab(tmp_path / "missing.ipynb", {}, tmp_path / "run", timeout_seconds=120)


def test_a_lab_without_a_record_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the last code cell is not tagged 'record'"):
        run_lab(write_lab(tmp_path, record=None), {}, tmp_path / "run", timeout_seconds=120)


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "kept").write_text("")
    with pytest.raises(ValueError, match="is not empty, and a run overwrites nothing"):
        run_lab(write_lab(tmp_path), {}, tmp_path / "run", timeout_seconds=120)


@pytest.mark.parametrize(
    ("sources", "record", "message"),
    [
        (["1 / 0"], "", "failed in cell 3 of 4 (Part 1): ZeroDivisionError: division by zero"),
        pytest.param(
            ["import sys\nsys.exit(0)", "2"],
            "",
            "failed before cell 4 of 5: the kernel exited early",
            marks=pytest.mark.slow,  # test_nightly.py has such a case too
        ),
        (["RECORD"], "", "finish must be called once"),
        (
            ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"],
            "",
            "failed in cell 3 of 4 (Part 1): the kernel died",
        ),
    ],
    ids=["error", "sys.exit", "finish twice", "kernel killed"],
)
def test_a_run_that_did_not_come_to_its_end_is_a_failure(
    tmp_path: Path, sources: list[str], record: str, message: str
) -> None:
    assert_is_a_failure(tmp_path, sources, record, message)


@pytest.mark.parametrize("sources", [[], ["RECORD"]], ids=["no finish", "early finish"])
@cells_in_this_process()
def test_a_run_whose_last_cell_wrote_no_metrics_is_a_failure(tmp_path: Path, sources: list[str]) -> None:
    assert_is_a_failure(tmp_path, sources, "print('the end')", "failed in its last cell: it wrote no metrics")


def assert_is_a_failure(tmp_path: Path, sources: list[str], record: str, message: str) -> None:
    lab = write_lab(
        tmp_path, *[RECORD if source == "RECORD" else source for source in sources], record=record or RECORD
    )
    if "1 / 0" in sources:
        set_tag(lab, 3, "hide-input")
    folder = tmp_path / "runs" / "run"
    with pytest.raises(LabFailedError) as failure:
        run_lab(lab, {}, folder, timeout_seconds=120)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)
    assert_nothing_reads_as_a_run(folder)
    # What helps to understand it is kept under a name that says failed.
    assert failure.value.folder == folder.with_name("run.failed")
    assert sorted(path.name for path in failure.value.folder.iterdir()) == [
        "environment.json",
        "log.txt",
        "notebook.ipynb",
        "page.html",
    ]
    page = (failure.value.folder / "page.html").read_text()
    assert 'class="failure"' in page
    if "1 / 0" in sources:
        shown = re.findall(r'<div class="highlight.*?</div>', page, re.DOTALL)
        assert any('">1</span>' in code and '">0</span>' in code for code in shown), "whatever the tag of its cell"


def test_a_run_over_its_limit_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    lab = write_lab(tmp_path, WRITE_PIDS + "time.sleep(600)")
    folder = tmp_path / "runs" / "run"
    with pytest.raises(LabFailedError, match=r"in cell 3 of 4 \(Part 1\): it was killed at its limit of 15 s"):
        run_lab(lab, {"name": str(pids)}, folder, timeout_seconds=15)
    assert_nothing_reads_as_a_run(folder)
    assert_ended(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process can adopt orphans")
def test_processes_that_a_lab_leaves_behind_are_ended_even_with_another_environment(
    whole_run: tuple[LabRun, Path],
) -> None:
    _, pids = whole_run
    assert len(pids.read_text().split()) == 3
    assert_ended(pids)


def test_an_interrupted_run_leaves_nothing_and_ends_processes_even_with_another_environment(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt(line: str) -> None:
        if "Part 2" in line:
            raise KeyboardInterrupt

    writes = WRITE_PIDS_WITHOUT_ENVIRONMENT if sys.platform == "linux" else WRITE_PIDS
    lab = write_lab(tmp_path, writes, "time.sleep(600)")
    folder = tmp_path / "runs" / "run"
    with pytest.raises(KeyboardInterrupt):
        run_lab(lab, {"name": str(pids)}, folder, timeout_seconds=120, on_progress=interrupt)
    assert not list(folder.parent.iterdir())
    assert len(pids.read_text().split()) == (3 if sys.platform == "linux" else 2)
    assert_ended(pids)


HOSTILE = {
    "removes its folder": (
        "import shutil; shutil.rmtree(os.environ['MEMLAB_RUN_FOLDER'])",
        "small lab {x}.ipynb failed ",
    ),
    "log is a folder": ("(folder / 'log.txt').unlink(); (folder / 'log.txt').mkdir()", "small lab {x}.ipynb failed "),
}
HOSTILE_TO_THE_RUNNER = {
    "plants a link": ("(folder / 'link').symlink_to('/')", "in its folder: link is a link, must be a file or folder"),
    "writes its own metrics": ("(folder / 'metrics.json').write_text('[')", "metrics.json already exists"),
}
"""What the process of the run does not notice."""


@pytest.mark.parametrize(("source", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_notebook_that_spoils_its_own_folder_is_a_failure_with_a_log(
    tmp_path: Path, source: str, message: str
) -> None:
    assert_is_a_failure_with_a_log(tmp_path, source, message)


@pytest.mark.parametrize(("source", "message"), HOSTILE_TO_THE_RUNNER.values(), ids=HOSTILE_TO_THE_RUNNER)
@cells_in_this_process()
def test_what_a_notebook_leaves_in_its_folder_for_the_runner_is_a_failure_with_a_log(
    tmp_path: Path, source: str, message: str
) -> None:
    assert_is_a_failure_with_a_log(tmp_path, source, message)


def assert_is_a_failure_with_a_log(tmp_path: Path, source: str, message: str) -> None:
    prologue = "import os, pathlib; folder = pathlib.Path(os.environ['MEMLAB_RUN_FOLDER'])\n"
    with pytest.raises(LabFailedError) as failure:
        run_lab(write_lab(tmp_path, prologue + source), {}, tmp_path / "runs" / "run", timeout_seconds=120)
    assert message in str(failure.value)
    assert str(failure.value) in (failure.value.folder / "log.txt").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run.failed"]


@cells_in_this_process()
def test_an_error_of_the_runner_is_a_failure_with_its_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(_: Path) -> str:
        raise TypeError("two\nlines")

    monkeypatch.setattr("memlab.regression.run.runner._judge", judge)
    with pytest.raises(LabFailedError, match=r"failed outside of its cells: TypeError: two lines$") as failure:
        run_lab(write_lab(tmp_path), {}, tmp_path / "run", timeout_seconds=120)
    assert "in judge" in (failure.value.folder / "log.txt").read_text()


@cells_in_this_process()
def test_two_runs_into_one_folder_are_both_kept(tmp_path: Path) -> None:
    lab = write_lab(tmp_path)
    prepared = [prepare_lab(lab, {}, tmp_path / "run", timeout_seconds=120) for _ in range(2)]
    folders = [one.run(lambda _: None).folder for one in prepared]
    assert folders == [tmp_path / "run", tmp_path / "run-2"]
    assert all((folder / "metrics.json").is_file() for folder in folders)


def test_what_a_notebook_prints_is_bounded_and_the_run_is_whole(whole_run: tuple[LabRun, Path]) -> None:
    run, _ = whole_run
    log = (run.folder / "log.txt").read_text()
    for name in ("log.txt", "notebook.ipynb", "page.html"):
        text = (run.folder / name).read_text()
        assert len(text) < 1.2 * 2**20
        assert text.count("[left out: the cell prints more than 1,048,576 letters]") == 1
    assert "the last line" not in log
    assert "printed after" in log


def message_of(kind: str, **content: object) -> dict[str, Any]:
    return {"msg_type": kind, "content": content}


def test_an_output_that_does_not_fit_into_the_notebook_is_left_out_and_a_smaller_one_after_it_is_kept() -> None:
    bound = OutputBound()
    large, small = ({"text/html": "h" * size} for size in (MAX_SHOWN_LETTERS // 2, 100))
    shown = [
        bound.bounded(message_of("display_data", data=data, metadata={}), cell_index=number)
        for number, data in enumerate([large, large, small])
    ]
    first, second, third = (message["content"]["data"] for message in shown if message is not None)
    assert first == large
    assert second == {"text/plain": f"[left out: the notebook shows more than {MAX_SHOWN_LETTERS:,} letters]"}
    assert third == small


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    lines = ["first", "x" * 10**7, "last"]
    message = OutputBound().bounded(message_of("error", evalue="y" * 10**6, traceback=lines), cell_index=0)
    assert message is not None
    text = "\n".join(message["content"]["traceback"])
    assert (text.startswith("first"), text.endswith("last"), len(text) < 110_000) == (True, True, True)
    assert len(message["content"]["evalue"]) == 10_000


@cells_in_this_process()
def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    source = "import os\nlog = open(os.path.join(os.environ['MEMLAB_RUN_FOLDER'], 'log.txt'), 'a')\n"
    source += "log.write('beginning' + 'x' * 2**25 + 'end')\nlog.flush()"
    run = run_lab(write_lab(tmp_path, source), {}, tmp_path / "run", timeout_seconds=120)
    text = (run.folder / "log.txt").read_text()
    assert len(text) < 9 * 2**20
    assert "[left out]" in text
    assert "xxxend" in text


def test_a_run_whose_runner_is_killed_ends_with_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    lab = write_lab(tmp_path, WRITE_PIDS + "time.sleep(600)")
    command = [sys.executable, "-m", "memlab", "run", str(lab), "-p", "name", str(pids)]
    with subprocess.Popen([*command, "--out", str(tmp_path / "runs" / "run")], stdout=subprocess.DEVNULL) as process:
        while not (pids.is_file() and pids.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 60
    while list((tmp_path / "runs").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_ended(pids)
    assert not list((tmp_path / "runs").iterdir())
