"""Writes a course for a teacher into a new folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from memlab.commands.shared.output import check_new_folder, out_path
from memlab.commands.shared.process import terminate_on_signal
from memlab.lab_files import labs_folder

_LINKED = ("*.md", "results", "book/*.md", "pictures", "slurm_profile")
"""What the labs link to and read. The plans of lectures tell outcomes, so only the teacher's folder has them."""

_LOG = "LOG.md"
_LOG_OF_STUDENTS = "# Log\n\nWhat was found during development tells answers to exercises. Your teacher has it.\n"
"""Pages and labs link to the log."""

_NBGRADER_FILE = "nbgrader_config.py"
_NBGRADER = """\
c = get_config()  # nbgrader defines it, and reads this file in the folder in which it is started
c.CourseDirectory.course_id = "memlab"
c.CourseDirectory.source_directory = "."  # the folder student is the assignment "student"
c.ClearSolutions.enabled = False  # it would also remove the lines that students change
c.ExecutePreprocessor.timeout = 600  # seconds for a cell
"""
"""For nbgrader 0.9, with which it was tried."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("folder", type=out_path, metavar="FOLDER", help="the new folder of the course")
    parser.add_argument(
        "--run",
        action="store_true",
        help="first run each lab, so that its slides have figures; without it, slides have text only",
    )
    parser.add_argument(
        "--install",
        metavar="REQUIREMENT",
        help="also write what Binder and Colab need: what pip installs there, such as the address of a wheel or of a "
        "repository of yours. No package index has memlab, so there is no default",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks the folder and finds the labs.

    Raises:
        ValueError: If the folder is not empty or in the labs, or there are no labs.
    """
    source = labs_folder()
    check_new_folder("FOLDER", arguments.folder, source)
    return lambda: _write(source, arguments.folder, arguments.install, runs=arguments.run)


def _write(source: Path, folder: Path, requirement: str | None, *, runs: bool) -> int:
    import nbformat
    from plotly.offline import get_plotlyjs

    from memlab.course.notebooks import solved_notebook, student_notebook
    from memlab.course.slides import PLOTLY_FILE, slides_of
    from memlab.regression.suite.notebooks import read_notebook

    for name in ("student", "solutions", "slides"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for plan in sorted((source / "teaching").glob("*.md")):
        shutil.copy(plan, folder)
    (folder / _NBGRADER_FILE).write_text(_NBGRADER, encoding="utf-8")
    num_failed = 0
    for path in sorted(source.glob("*.ipynb")):
        lab = read_notebook(path)
        nbformat.write(student_notebook(lab, requirement), folder / "student" / path.name)
        nbformat.write(solved_notebook(lab), folder / "solutions" / path.name)
        executed = _executed(path, folder) if runs else path
        num_failed += executed is None
        page = slides_of(read_notebook(executed or path))
        (folder / "slides" / f"{path.stem}.slides.html").write_text(page, encoding="utf-8")
        print(f"wrote {path.stem}", flush=True)
    for linked in sorted(path for pattern in _LINKED for path in source.glob(pattern)):
        for of in ("student", "solutions"):
            _copy(linked, folder / of / linked.relative_to(source))
    if (source / _LOG).exists():
        (folder / "student" / _LOG).write_text(_LOG_OF_STUDENTS, encoding="utf-8")
    if runs:
        (folder / "slides" / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
    if requirement is not None:
        index = "--extra-index-url https://download.pytorch.org/whl/cpu\n"
        (folder / "binder").mkdir()
        (folder / "binder" / "requirements.txt").write_text(f"{index}{requirement}\n", encoding="utf-8")
        (folder / "binder" / "runtime.txt").write_text("python-3.11\n", encoding="utf-8")
    print(f"the course is in {folder}: begin with README.md")
    return 1 if num_failed else 0


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source, target)


def _executed(path: Path, folder: Path) -> Path | None:
    """Runs a lab; returns its notebook with outputs, or None if it failed."""
    from memlab.regression.run.runner import LabFailedError, prepare_lab

    try:
        with terminate_on_signal():
            run = prepare_lab(path, {}, folder / "runs" / path.stem, 1800.0).run(lambda _: None)
    except LabFailedError as failure:
        print(f"{failure}, so its slides have text only", file=sys.stderr)
        return None
    return run.folder / "notebook.ipynb"
