"""Ranks as processes of this machine, started with the environment variables that ``torchrun`` sets.

They are forked from one small server, which imports torch and Megatron once: each rank would need 5 s for that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch


def on_processes(count: int, job: Callable[..., Any], *arguments: Any, folder: Path, seconds: float = 240) -> list[Any]:
    """Calls a function of a module of the tests in one process for each rank.

    Args:
        count: Number of ranks.
        job: The function. Its arguments and what it returns are pickled.
        *arguments: What it is called with, the same on every rank.
        folder: An empty folder for what the ranks write.
        seconds: When the ranks are killed that still run. They are killed at once when one of them fails.

    Returns:
        What the function returned, by rank.
    """
    # The ranks meet in a store of this process, as they do in that of torchrun's agent: no port can be taken meanwhile.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    (folder / "job").write_bytes(pickle.dumps((job, arguments)))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memlab.lab.preloaded"])
    ranks: list[BaseProcess] = []
    try:
        for rank in range(count):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(context.Process(target=_run_as_rank, args=(folder, environment)))
            ranks[-1].start()
        _wait(ranks, time.monotonic() + seconds)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    codes = [process.exitcode for process in ranks]
    logs = "".join(f"\nrank {rank}:\n{(folder / f'{rank}.log').read_text()}" for rank in range(count))
    assert not any(codes), f"exit codes {codes}, -9 was killed{logs}"
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(count)]  # noqa: S301  # our own


def _wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Waits until all have ended, one has failed, or the time is up."""
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def _run_as_rank(folder: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with (folder / f"{os.environ['RANK']}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    job, arguments = pickle.loads((folder / "job").read_bytes())  # noqa: S301  # our own
    gc.freeze()  # as in tests/conftest.py: what the job has imported
    result = job(*arguments)
    (folder / f"{os.environ['RANK']}.result").write_bytes(pickle.dumps(result))
