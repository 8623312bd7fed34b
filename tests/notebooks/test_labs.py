"""The labs themselves: each keeps the conventions, and each runs headless."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import memlab
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.regression.suite.notebooks import (
    FOLD_INPUT_TAG,
    HIDE_INPUT_TAG,
    INTERACTIVE_TAG,
    PARAMETERS_TAG,
    RECORD_TAG,
    has_tag,
    read_notebook,
)
from memlab.regression.suite.parameters import INTERACTIVE, read_parameters
from tests.notebooks.small_labs import run_lab

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))
TAGS = {PARAMETERS_TAG, INTERACTIVE_TAG, RECORD_TAG, "exercise", HIDE_INPUT_TAG, FOLD_INPUT_TAG}
every_lab = pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_labs() -> None:
    assert LABS


@every_lab
def test_a_lab_is_committed_stripped(path: Path) -> None:
    notebook = read_notebook(path)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert set(notebook.metadata) <= {"kernelspec"}, "no language_info, no papermill, no widgets"
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@every_lab
def test_jupyterlab_hides_the_code_that_a_page_leaves_out(path: Path) -> None:
    """A quiz names its right answer. JupyterLab does not know the tags: it reads the metadata."""
    for cell in read_notebook(path).cells:
        is_hidden = cell.metadata.get("jupyter") == {"source_hidden": True}
        assert is_hidden == (has_tag(cell, HIDE_INPUT_TAG) or has_tag(cell, FOLD_INPUT_TAG))
        assert is_hidden or not cell.source.startswith("quiz(")
        assert is_hidden or "jupyter" not in cell.metadata


@every_lab
def test_no_paragraph_begins_like_a_heading(path: Path) -> None:
    lines = [
        line for cell in read_notebook(path).cells if cell.cell_type == "markdown" for line in cell.source.splitlines()
    ]
    assert not [line for line in lines if re.match(r"#+[^# ]", line)], "a page shows '#2634 was fixed' as a heading"


@every_lab
def test_a_lab_is_short_enough_for_a_sitting(path: Path) -> None:
    """What a reader can leave folded does not count, and a sentence that only stands in parentheses can go."""
    text = "\n\n".join(cell.source for cell in read_notebook(path).cells if cell.cell_type == "markdown")
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>") == text.count("</summary>")
    assert len(re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL).split()) <= 3500
    assert re.findall(r"(?<=[.!?:* \n][ \n])\([A-Z`*][^()]*[.!?:]\)", text) == []


@every_lab
def test_a_lab_has_its_parts_in_order(path: Path) -> None:
    notebook = read_notebook(path)
    title, *_ = notebook.cells
    assert title.cell_type == "markdown"
    assert title.source.startswith("# ")
    assert "**It takes**" in title.source, "in time and memory"
    assert INTERACTIVE in read_parameters(notebook)
    cells = code_cells(notebook)
    assert has_tag(cells[0], PARAMETERS_TAG)
    assert has_tag(cells[-1], RECORD_TAG)
    assert "finish(" in cells[-1].source
    predict = next(index for index, cell in enumerate(notebook.cells) if cell.source.startswith("## Predict"))
    first_step = next(index for index, cell in enumerate(notebook.cells) if ".step(" in cell.source)
    assert predict < first_step, "the reader guesses before the first figure"
    (summary,) = (cell.source for cell in notebook.cells if "## What you can take away\n" in cell.source)
    numbers = re.findall(r"^(\d+)\. ", summary.partition("## What you can take away\n")[2], flags=re.MULTILINE)
    assert numbers == ["1", "2", "3", "4", "5"], "five things to take away"


@every_lab
def test_a_lab_holds_no_logic(path: Path) -> None:
    cells = code_cells(read_notebook(path))
    of_the_reader = [cell for cell in cells if has_tag(cell, HIDE_INPUT_TAG) or has_tag(cell, "exercise")]
    assert len(cells) - len(of_the_reader) <= 20, "quizzes and exercises left out"
    for cell in cells:
        assert set(cell.metadata.get("tags", [])) <= TAGS
        assert cell.source.count("\n") < 15
        forbidden = (ast.ClassDef, ast.While, ast.Try, *(() if has_tag(cell, "exercise") else (ast.FunctionDef,)))
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, forbidden), "only a reader writes functions, in an exercise"


@every_lab
def test_an_exercise_forgets_the_answer_of_an_earlier_run(path: Path) -> None:
    """A typo in the name of the answer would leave the older one to be judged."""
    for cell in code_cells(read_notebook(path)):
        for marked in re.findall(r"(?m)^ *(\w[\w, =]*) = .*  # change me$", cell.source):
            names = re.findall(r"\w+", marked)
            assert f"{' = '.join(names)} = None  # forget an older answer" in cell.source.splitlines()


@every_lab
def test_an_answer_written_as_a_loop_changes_no_case_of_the_next_run(path: Path) -> None:
    """A loop leaves the letters of the marked line as names of the notebook, and its cell runs again after that."""

    def read(node: ast.AST, of_comprehension: frozenset[str] = frozenset()) -> set[str]:
        if isinstance(node, ast.Name):
            return {node.id} - of_comprehension if isinstance(node.ctx, ast.Load) else set()
        of_comprehension |= {
            name.id
            for each in getattr(node, "generators", [])
            for name in ast.walk(each.target)
            if isinstance(name, ast.Name)
        }
        return {name for child in ast.iter_child_nodes(node) for name in read(child, of_comprehension)}

    cells = [cell.source for cell in code_cells(read_notebook(path)) if has_tag(cell, INTERACTIVE_TAG)]
    letters = {
        name
        for cell in cells
        for marked in re.findall(r"for ([\w, ]+) in \w+\]  # change me", cell)
        for name in marked.split(", ")
    }
    assert sorted(letters & {name for cell in cells for name in read(ast.parse(cell))}) == []


@every_lab
def test_a_lab_imports_only_the_public_api_and_the_standard_library(path: Path) -> None:
    for cell in code_cells(read_notebook(path)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "memlab" or (node.module or "").split(".")[0] in sys.stdlib_module_names
                assert node.module != "memlab" or {alias.name for alias in node.names} <= set(memlab.__all__)
            assert not isinstance(node, ast.Import), cell.source


@pytest.mark.last
def test_every_name_attribute_and_argument_in_a_cell_exists(tmp_path: Path) -> None:
    """Running all cells that no other test runs takes a minute, and reading them as programs ten seconds, or forty without mypy's cache."""
    for path in LABS:
        # As in one program: the rules are per file, so that the package's own files stay as mypy has cached them.
        lines = ["# mypy: no-strict-optional, allow-redefinition", "from IPython.display import display"]
        lines += [cell.source for cell in code_cells(read_notebook(path))]
        (tmp_path / f"lab_{path.stem}.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", *map(str, tmp_path.iterdir())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    found = [
        line for line in ended.stdout.splitlines() if line.endswith(("[attr-defined]", "[call-arg]", "[name-defined]"))
    ]
    # The types know neither that the record of a lab on ranks is a JobRecord, nor what a cell adds to an object.
    of_jobs = "|".join(name for name in dir(JobRecord) if not hasattr(StepRecord, name))
    is_right = re.compile(rf'"StepRecord" has no attribute "({of_jobs})"|"UserDict\[Any, Any\]" has no attribute')
    assert [Path(line).name for line in found if not is_right.search(line)] == []


@every_lab
def test_a_lab_links_to_the_glossary(path: Path) -> None:
    assert "(GLOSSARY.md)" in read_notebook(path).cells[0].source


@every_lab
def test_an_exercise_is_skipped_headless_and_ends_with_its_check(path: Path) -> None:
    for cell in code_cells(read_notebook(path)):
        if has_tag(cell, "exercise"):
            assert has_tag(cell, INTERACTIVE_TAG)
            last = ast.parse(cell.source).body[-1]
            assert ast.unparse(last).startswith("check(")
            assert cell.source.count("  # change me") == 1


@pytest.mark.notebook
@pytest.mark.slow  # in JupyterLab tests/browser/test_quickstart.py runs it
def test_the_quickstart_runs_headless(tmp_path: Path) -> None:
    lab = next(path for path in LABS if path.stem == "00_quickstart")
    progress: list[str] = []
    run = run_lab(lab, {"num_layers": 2}, tmp_path / "run", timeout_seconds=300, on_progress=progress.append)
    records = run.metrics["records"]
    assert len(records) == 10
    for family in ("qwen3", "phi4"):
        plain = records[f"{family}-plain"]
        assert all(record["loss"] == plain["loss"] for name, record in records.items() if name.startswith(family))
        for lower in ("full", "selective", "offload"):
            assert records[f"{family}-{lower}"]["peak_allocated_bytes"] < plain["peak_allocated_bytes"]
        assert records[f"{family}-on-host"]["static_bytes"] < plain["static_bytes"] / 10
    page = (run.folder / "page.html").read_text()
    assert page.count("Plotly.newPlot(") == 8, "six timelines and two comparisons, and plotly.js does not call itself"
    assert page.count("plotly.js v") == 1
    assert ' src="http' not in page
    assert len(progress) == 19
