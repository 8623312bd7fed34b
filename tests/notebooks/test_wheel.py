"""memlab from its wheel, in an empty folder: the labs come with it, and a first nightly is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memlab._version import __version__
from memlab.cli import main
from tests.notebooks.in_process import cells_in_this_process

pytestmark = pytest.mark.notebook
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the files that it is made of, and installs it without what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("memlab", "labs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    pip += ["--ignore-installed", "--prefix", str(folder / "environment"), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (package,) = (folder / "environment").glob("**/site-packages/memlab")
    return package.parent


def memlab(site: Path, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "memlab", *line.split()]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_the_labs_are_copied_and_opened(site: Path, tmp_path: Path) -> None:
    offered = memlab(site, tmp_path, "lab")
    assert offered.returncode == 2
    assert offered.stderr.startswith(f"there is no labs folder in {tmp_path}, must be one")
    assert "memlab lab --copy-to labs" in offered.stderr
    opened = memlab(site, tmp_path, "lab --copy-to x -- --version")
    assert opened.returncode == 0, opened.stderr
    assert opened.stdout.startswith("the labs are in x: begin with 00_quickstart.ipynb\n4.")
    tracked = ["*.ipynb", "*.md", "book/*.md", "pictures/*", "results/*", "slurm_profile/*", "teaching/*.md"]
    files = {str(path.relative_to(tmp_path / "x")) for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(ROOT / "labs")) for each in tracked for path in (ROOT / "labs").glob(each)}
    again = memlab(site, tmp_path, "lab --copy-to x")
    assert again.stderr == "--copy-to is x, which is not empty, must be a new or an empty folder: choose another one\n"


def test_a_lab_of_the_wheel_is_run_by_its_name(site: Path, tmp_path: Path) -> None:
    checked = memlab(site, tmp_path, "run 02_recompute -p num_layers two")
    assert checked.stderr == "parameter num_layers is 'two', must be a whole number: give another value\n"
    unknown = memlab(site, tmp_path, "run 01_recomputation")
    assert "is no file and none of memlab's labs: choose from 00_quickstart, 01_one_layer, " in unknown.stderr
    assert list(tmp_path.iterdir()) == []


@cells_in_this_process()
@pytest.mark.slow
def test_a_first_nightly_is_written_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["nightly", "--init", "phi-4-tiny"]) == 0
    suite = "papermill_runs/suites/my_model.yaml"
    printed = capfd.readouterr().out
    assert [line.removeprefix("wrote ") for line in printed.splitlines() if line.startswith("wrote ")] == [
        "labs/my_model.ipynb",
        suite,
        ".github/workflows/memlab.yml",
    ]
    workflow = yaml.safe_load(Path(".github/workflows/memlab.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["my_model"]["steps"] if "run" in step]
    assert runs == ['pip install "$MEMLAB[cpu]"', f"memlab nightly {suite} --jobs 2"]
    assert workflow["jobs"]["my_model"]["env"]["MEMLAB"] == f"./memlab-{__version__}-py3-none-any.whl"
    assert main(["nightly", suite, "--jobs", "1", "--only", "4096", "--allow-missing"]) == 0
    assert main(["baseline", "update", suite]) == 0
    assert main(["nightly", suite, "--jobs", "1", "--only", "4096"]) == 0
    capfd.readouterr()
    assert main(["nightly", "--init"]) == 2
    assert "labs/my_model.ipynb exists, and --init overwrites nothing" in capfd.readouterr().err
    assert main(["nightly", "--init", "--jobs", "2"]) == 2
    assert "--jobs cannot be combined with --init, which runs no suite" in capfd.readouterr().err
    assert main(["nightly", suite, "--init"]) == 2
    assert main(["nightly"]) == 2
    assert "SUITE is missing: give a suite file, or let memlab nightly --init write" in capfd.readouterr().err


def test_a_config_is_named_as_the_notebook_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memlab.regression.starter import starter_files

    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    assert "'../config.json'" in starter_files("config.json")[Path("labs/my_model.ipynb")]
