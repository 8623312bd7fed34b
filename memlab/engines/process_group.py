"""The process group of one rank, joined with the others or alone as one rank of any layout."""

from __future__ import annotations

import sys
from typing import Any

import torch

from memlab.config.layout import Layout
from memlab.started_ranks import check_meeting_point, rank, world_size

_store: list[Any] = []
"""The store of the ranks that this process has joined, if it has."""


def join_alone(layout: Layout) -> None:
    """Joins a process group as one rank of a layout, without the others: they answer at once, with nothing.

    On one rank every collective is the identity. The ``fake`` group allocates nothing for it, like NCCL; gloo would
    copy the whole gradient buffer.
    """
    # Importing it registers the group.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    _join("fake", layout)


def join_with_nccl(layout: Layout) -> None:
    """Joins the process group of the ranks that ``torchrun`` started, or one of this rank alone."""
    if layout.world_size > 1:
        join_others("nccl")
    else:
        _join("nccl", layout)


def join_with_gloo(layout: Layout) -> None:
    """Joins the process group of the ranks that ``torchrun`` started on CPUs; a rank alone needs none of gloo."""
    if layout.world_size > 1:
        join_others("gloo")
    else:
        join_alone(layout)


def join_others(distributed_backend: str) -> None:
    """Joins the process group of the ranks that ``torchrun`` started; each time under keys of its own.

    The store of ``torchrun`` keeps its keys as long as the job, and NCCL's groups number theirs from 0
    (``ProcessGroupNCCL.cpp``, torch 2.11): a rank could read the first group's id for the second, and wait forever.
    """
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    number = store.add(f"joined by {rank}", 1)  # every rank opens the same labs, so the numbers agree
    own_keys = torch.distributed.PrefixStore(f"memlab-{number}", store)  # type: ignore[attr-defined]
    _store[:] = [own_keys]
    _init(distributed_backend, own_keys, rank, world_size)


def agreed_with_rank_0(decision: bool) -> bool:
    """Returns the decision of rank 0; every rank of a joined job must call it, and waits until rank 0 has.

    The ranks use the store and no collective operation, which would allocate.
    """
    (store,) = _store
    rank = torch.distributed.get_rank()
    key = f"decision {store.add(f'decided by {rank}', 1)}"
    if rank == 0:
        store.set(key, str(int(decision)))
    return bool(int(store.get(key)))


def require_started_ranks(layout: Layout) -> None:
    """Checks that as many ranks were started as the layout has, and that this process is the one that it names.

    Raises:
        ValueError: If not.
    """
    started, own = world_size(), rank()
    if started != layout.world_size:
        raise ValueError(
            f"the layout ({layout}) has {layout.world_size} ranks, and {started} were started: start them with "
            f"torchrun --nproc-per-node {layout.world_size} -m memlab measure ..., or choose backend 'simulated', "
            "which predicts one rank of any layout"
        )
    if started > 1 and own != layout.rank:
        raise ValueError(
            f"rank of the layout is {layout.rank}, and torchrun started this process as rank {own}, which must be the "
            f"same: give Layout(..., rank=int(os.environ['RANK']))"
        )
    check_meeting_point()


def _join(distributed_backend: str, layout: Layout) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # missing from torch's stubs
    _init(distributed_backend, store, layout.rank, layout.world_size)


def _init(distributed_backend: str, store: Any, rank: int, world_size: int) -> None:
    # torch replaces the hook for uncaught errors, once more for each group, and each adds the rank to every line.
    excepthook = sys.excepthook
    try:
        torch.distributed.init_process_group(distributed_backend, store=store, rank=rank, world_size=world_size)
    finally:
        sys.excepthook = excepthook
