"""The process of one headless run, as the runner sees it: started, monitored, and ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from memlab.import_path import variables_that_import_memlab
from memlab.record.notebook_result import RUN_FOLDER_VARIABLE

_KILL_SECONDS = 30
_EXEC_SECONDS = 1
_MAX_MESSAGE_LETTERS = 500


def execute(
    notebook: Path,
    parameters: Mapping[str, object],
    folder: Path,
    timeout_seconds: float,
    on_progress: Callable[[str], object],
    variables: Mapping[str, str],
) -> str:
    """Executes a notebook in a process of its own; no process of the run is left when this returns.

    Args:
        notebook: An absolute path.
        folder: Takes ``notebook.ipynb``, ``environment.json``, ``log.txt`` and what `finish` writes.
        on_progress: Called with one line for each cell that begins.
        variables: Environment variables, in addition to those of this process.

    Returns:
        Where and why the execution failed, or an empty text.
    """
    request = json.dumps({"notebook": str(notebook), "parameters": dict(parameters)})
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-m", "memlab.regression.run.execute", request],
            cwd=folder,
            env={
                **os.environ,
                **variables_that_import_memlab(),
                **variables,
                RUN_FOLDER_VARIABLE: str(folder),
                "PLOTLY_RENDERER": "plotly_mimetype",
            },
            stdin=subprocess.PIPE,  # stays open: where it ends, this process was killed, and the run ends itself
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches the runner alone, which then ends the run
        ) as process,
    ):
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines))
        reader.start()
        try:
            return _monitor(process, lines, time.monotonic() + timeout_seconds, on_progress)
        except TimeoutError as error:
            return f"{error}: it was killed at its limit of {timeout_seconds:g} s: allow more time, or run less"
        finally:
            end_processes(folder)
            reader.join()


def _monitor(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    deadline: float,
    on_progress: Callable[[str], object],
) -> str:
    started = time.monotonic()
    where, failure = "before its first cell", ""
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            message: dict[str, Any] = json.loads(line)
            if "failure" in message:
                failure = message["failure"].partition("\n")[0][:_MAX_MESSAGE_LETTERS]
                continue
            number, num_cells, heading = message["cell"], message["num_cells"], message["heading"]
            where = f"in cell {number} of {num_cells} ({heading})"
            on_progress(f"[{number:>2}/{num_cells}] {time.monotonic() - started:6.1f} s  {heading}")
        exit_code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired) as error:
        raise TimeoutError(where) from error
    if exit_code == 0:
        return ""
    return f"{where}: {failure or f'its process ended with {_exit_name(exit_code)}'}"


def _read(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _exit_name(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def end_processes(folder: Path) -> None:
    """Kills every process of the runs in a folder, except this one: the runs themselves, kernels, and their children.

    Jupyter starts a kernel in a session of its own, out of reach of a signal to the run's process group. But a process
    of the run has the run's folder in its environment. One that was started with another environment is a descendant
    of the run's process, which on Linux adopts its orphans (`execute.main`); elsewhere such an orphan is not found.

    Raises:
        RuntimeError: If a process does not end, as one that waits for a broken disk.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while found := _processes_of(folder):
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in found)
            raise RuntimeError(f"processes {numbers} of the run in {folder} do not end: end them by hand")
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself in between
                process.kill()
        time.sleep(0.02)


def _processes_of(folder: Path) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    # Not psutil.process_iter: it keeps its objects, and since 6.0 does not look whether a number belongs to another
    # process by now. Of such an object, `children` and `kill` say that there is no process, although there is one.
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended, or is another user's
            process = psutil.Process(pid)
            if _has_folder(process, folder):
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if process.pid != os.getpid() and _is_running(process)}


def _has_folder(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return os.environ.get(RUN_FOLDER_VARIABLE) == str(folder)
    run_folder = _environment(process).get(RUN_FOLDER_VARIABLE)
    return run_folder is not None and Path(run_folder).is_relative_to(folder)


def _environment(process: psutil.Process) -> dict[str, str]:
    """Returns a process's environment, which the kernel shows only at the end of exec: after `Popen` has returned.

    Until then, on a busy machine for tens of milliseconds, a process has its program and neither arguments nor
    environment. Only what takes a second for that is taken for one that has no environment.
    """
    if environment := dict[str, str](process.environ()):
        return environment
    deadline = time.monotonic() + _EXEC_SECONDS
    while process.exe() and not process.cmdline() and time.monotonic() < deadline:
        time.sleep(0.001)
    return dict(process.environ())


def _is_running(process: psutil.Process) -> bool:
    """Whether a process runs: a killed orphan stays a zombie until its parent collects it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
