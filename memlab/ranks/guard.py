"""A small process that ends the engines when the process that started them is gone, however it ended.

``python -m memlab.ranks.guard FOLDER`` waits for the end of its standard input. Then it kills all processes of the
cluster whose profile is in the folder, and removes the folder.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from contextlib import suppress

import psutil

PROFILE = "IPP_PROFILE_DIR"
"""Names the folder in the environment of what ipyparallel starts (9.2), and so of what that starts. A tree of processes
would not do: if the controller is killed, its schedulers go on, and are no longer below any process of the cluster."""
_END_SECONDS = 5
_MOST_ROUNDS = 5
"""In how many rounds processes are ended that were starting others."""


def main() -> None:
    """Waits for the end of the input, then ends all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its input ends
    sys.stdin.read()
    for _ in range(_MOST_ROUNDS):
        pids = [process.pid for process in psutil.process_iter() if _is_of(process, sys.argv[1])]
        if not pids:
            break
        end_trees(pids)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def _is_of(process: psutil.Process, folder: str) -> bool:
    with suppress(psutil.Error):  # another user's, or it has just ended
        return bool(process.environ().get(PROFILE) == folder)
    return False


def end_trees(pids: list[int]) -> None:
    """Kills processes and everything that they started, and waits until they are gone."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _END_SECONDS
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has, and whose parent does not ask how, is still listed."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


if __name__ == "__main__":
    main()
