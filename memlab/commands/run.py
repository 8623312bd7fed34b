"""Runs a lab headless, with parameters, into a folder of its own."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.commands.shared.output import check_writable_folder, out_path
from memlab.commands.shared.process import terminate_on_signal
from memlab.lab_files import labs_folder

if TYPE_CHECKING:
    from memlab.regression.run.runner import PreparedLab

_RUNS_FOLDER = Path("papermill_runs") / "runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "notebook",
        type=Path,
        metavar="NOTEBOOK",
        help="the lab to run: a path such as labs/00_quickstart.ipynb, or a name such as 02_recompute, which memlab "
        "looks for in the folder labs here, and then among its own labs",
    )
    parser.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter of the notebook; give -p once per parameter",
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="time limit in seconds (default: 1800)"
    )
    parser.add_argument(
        "--out",
        type=out_path,
        metavar="FOLDER",
        help=f"folder for the result (default: a new folder in {_RUNS_FOLDER})",
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Checks notebook, parameters and folder; nothing has run yet.

    Raises:
        ValueError: If one of them is wrong.
    """
    from memlab.regression.run.runner import prepare_lab

    names = [name for name, _ in arguments.parameters]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"parameter {twice[0]} is given twice, must be given once: leave one -p {twice[0]} out")
    if arguments.out is not None:
        check_writable_folder(arguments.out)
    notebook = _notebook(arguments.notebook)
    output = arguments.out or _new_folder(notebook.stem)
    lab = prepare_lab(notebook, dict(arguments.parameters), output, arguments.timeout)
    return lambda: _run(lab)


def _notebook(given: Path) -> Path:
    """Returns the path of a notebook that is given by its path, or by the name of a lab.

    A name is looked up in ``labs`` of the current folder, which may be an edited copy, before memlab's own labs. A lab
    whose number has changed is found by the rest of its name.
    """
    if given.exists():
        return given
    is_name = not given.suffix and len(given.parts) == 1
    folders = [labs_folder(), Path("labs")] if is_name else [given.parent]
    file = f"{given.name}.ipynb" if is_name else given.name
    labs = {path.name: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}
    if file in labs:
        return labs[file]
    renumbered = [name for name in labs if _without_number(name) == _without_number(file) != file]
    if len(renumbered) == 1:
        print(f"{given} has another number now: {Path(renumbered[0]).stem}", flush=True)
        return labs[renumbered[0]]
    if not is_name:
        return given
    names = ", ".join(Path(name).stem for name in labs)
    raise ValueError(f"notebook {given} is no file and none of memlab's labs: choose from {names}, or give a path")


def _without_number(name: str) -> str:
    return re.sub(r"^\d\d_", "", name)


def _new_folder(stem: str) -> Path:
    """Names a folder that does not exist; if another run takes it meanwhile, the run takes the next number."""
    name = f"{datetime.now(UTC):%Y-%m-%d_%H%M%S}_{stem[:100]}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(_RUNS_FOLDER.joinpath, names) if not path.exists())


def _run(lab: PreparedLab) -> int:
    from memlab.regression.run.runner import LabFailedError

    print(f"running {_shown(lab.notebook)}", flush=True)
    try:
        with terminate_on_signal():
            run = lab.run(on_progress=_print)
    except OSError as error:
        print(
            f"the run cannot be written to {_shown(lab.folder)} ({error.strerror or error}): nothing of it was kept: "
            "free some space, or give another folder with --out",
            file=sys.stderr,
        )
        return 1
    except LabFailedError as failure:
        kept = ", ".join(sorted(path.name for path in failure.folder.iterdir()))
        print(f"{failure}\nkept in {_shown(failure.folder)}: {kept}", file=sys.stderr)
        return 1
    print(f"done in {run.seconds:.1f} s")
    print(f"  notebook  {_shown(run.folder / 'notebook.ipynb')}")
    print(f"  page      {_shown(run.folder / 'page.html')}")
    return 0


def _print(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run goes on; the last lines below find that nothing reads them
        print(line.encode("utf-8", "backslashreplace").decode("utf-8"), flush=True)


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
