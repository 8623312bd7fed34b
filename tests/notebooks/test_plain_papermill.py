"""Plain papermill, without `memlab run`: it parses every lab's parameters, and runs a lab from any folder."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from memlab import TrainingState
from memlab.lab_files import labs_folder
from memlab.record.measured_steps import measured_steps
from memlab.regression.suite.notebooks import read_notebook
from memlab.regression.suite.parameters import read_parameters

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))
every_lab = pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)


@every_lab
def test_papermill_parses_the_parameters_of_a_lab(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns about a line with two equal signs, of which the second may be in the comment, and leaves it out."""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        parsed = papermill.inspect_notebook(path)
        papermill.execute_notebook(path, "out.ipynb", {"interactive": False}, prepare_only=True, progress_bar=False)
    assert [record.message for record in caplog.records] == []
    wanted = {name: (each.type_name, each.default) for name, each in read_parameters(read_notebook(path)).items()}
    assert {
        name: (each["inferred_type_name"], ast.literal_eval(each["default"])) for name, each in parsed.items()
    } == wanted
    cells = nbformat.read("out.ipynb", as_version=4).cells
    assert [cell.source for cell in cells if "injected-parameters" in cell.metadata.get("tags", [])] == [
        "# Parameters\ninteractive = False\n"
    ]


@every_lab
def test_a_lab_finds_its_files_from_any_folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for cell in read_notebook(path).cells:
        tree = ast.parse(cell.source if cell.cell_type == "code" else "")
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="measured_steps"), args=[ast.Constant(value=str(name)), *_]):
                    found.append(name)
                case ast.BinOp(left=ast.Call(func=ast.Name(id="labs_folder")), right=ast.Constant(value=str(name))):
                    found.append(name)
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        files = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w/]+\.(json|jsonl|csv)", text)]
        assert set(files) <= set(found), "a path that only the folder of the labs has"
    assert [name for name in found if not (labs_folder() / name).is_file()] == []


def test_measured_steps_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert measured_steps("results/h200_settings.jsonl", "phi-4", num_layers=4, seq_length=4096)["none"].status == "ok"
    with pytest.raises(ValueError, match=r"^results/none.jsonl is not a file: give a file such as results/"):
        measured_steps("results/none.jsonl", "phi-4")


def test_options_of_the_state_may_be_one_text_as_papermill_gives_it() -> None:
    text = "grad_reduce_in_bf16,attention_backend=unfused"
    assert TrainingState.from_options(text) == TrainingState.from_options(text.split(","))
    assert TrainingState.from_options("") == TrainingState()


@pytest.mark.notebook
@pytest.mark.slow  # that papermill parses the parameters, and that a lab finds its files, is tested above
def test_a_lab_runs_from_another_folder_as_the_readme_says(tmp_path: Path) -> None:
    """Its exercises run as they are: their checks say what is missing, and the notebook goes on."""
    (line,) = re.findall(r"^papermill .*$", (ROOT / "labs" / "README.md").read_text(), re.MULTILINE)
    words = line.split()
    assert words[:3] == ["papermill", "02_recompute.ipynb", "out.ipynb"]
    small = ["-p", "num_layers", "2", "-p", "seq_length", "64"]
    command = [sys.executable, "-m", "papermill", str(ROOT / "labs" / words[1]), *words[2:], *small]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    executed = (tmp_path / "out.ipynb").read_text()
    assert '"residual_bytes"' in executed and "not yet: " in executed
