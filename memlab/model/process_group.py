"""The process groups of one rank: joined with the others, or alone as a rank of any layout, and Megatron's seeds."""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from memlab.config.layout import Layout
from memlab.model.config import interleaved_chunks


def join_process_group(distributed_backend: str, seed: int, layout: Layout) -> None:
    """Joins the job's process group, which is this rank alone without a layout, and seeds Megatron's random states.

    Raises:
        ValueError: If the layout has more ranks than were started.
    """
    if distributed_backend in ("fake", "simulated"):
        # Importing it registers the backend. On one rank every collective is the identity, and this one allocates
        # nothing for it, like NCCL; gloo would copy the whole gradient buffer.
        from torch.testing._internal.distributed import fake_pg  # noqa: F401
    if distributed_backend == "simulated":
        _join_alone("fake", layout)
        _initialize(seed, layout)
        return
    if layout.world_size > 1:
        torch.distributed.init_process_group(distributed_backend)
    else:
        _join_alone(distributed_backend, layout)
    _initialize(seed, layout)


def require_ranks(distributed_backend: str, layout: Layout) -> None:
    """Holds a layout against the ranks that were started.

    Raises:
        ValueError: If it has others.
    """
    if distributed_backend == "simulated":
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if distributed_backend == "fake" and max(started, layout.world_size) > 1:
        raise ValueError(
            f"the layout ({layout}) has {layout.world_size} ranks, {started} were started, and the cpu backend steps "
            "one alone: choose backend 'simulated' for one rank of any layout, or 'cuda'"
        )
    if started != layout.world_size:
        raise ValueError(
            f"the layout ({layout}) has {layout.world_size} ranks, and {started} were started: start them with "
            f"torchrun --nproc-per-node {layout.world_size} -m memlab measure ..., or choose backend 'simulated', "
            "which predicts one rank of any layout"
        )


def _join_alone(distributed_backend: str, layout: Layout) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # missing from torch's stubs
    # torch marks each line of an error with the rank, once more for every group that was joined.
    with patch.object(sys, "excepthook", sys.excepthook):
        torch.distributed.init_process_group(
            distributed_backend, store=store, rank=layout.rank, world_size=layout.world_size
        )


def _initialize(seed: int, layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=interleaved_chunks(layout),
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
