"""A small process that ends the engines when the process that started them is gone, however it ended.

``python -m memlab.ranks.guard FOLDER`` reads numbers of processes from its standard input, one per line. When the input
ends, it kills them with everything that they started, and removes the folder.
"""

from __future__ import annotations

import shutil
import signal
import sys
from contextlib import suppress

import psutil


def main() -> None:
    """Waits for the end of the input, then ends all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its input ends
    pids = [int(line) for line in sys.stdin]
    end_trees(pids)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


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
    psutil.wait_procs(processes, timeout=5)


if __name__ == "__main__":
    main()
