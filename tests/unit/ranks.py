"""Ranks as threads of one process, with real values and a process group between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from memlab.backends.cpu import cuda_replaced

if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11 asks for it when a group is destroyed, and does not have it
    ThreadLocalWorld.comms = []


def on_ranks(count: int, job: Callable[[int, Any], None]) -> None:
    """Runs a job on threads, given each one's rank and the group of all."""
    world = _install_threaded_pg()
    store, problems = torch.distributed.HashStore(), []  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        try:
            torch.distributed.init_process_group("threaded", rank=rank, world_size=count, store=store)
            job(rank, torch.distributed.group.WORLD)
            torch.distributed.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  # it is raised again on the test's own thread
            problems.append(error)
            ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    with cuda_replaced():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    ProcessLocalGroup.reset()
    _uninstall_threaded_pg()
    assert world is not None
    if problems:
        raise problems[0]
