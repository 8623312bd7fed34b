"""Megatron's manager of fine-grained activation offload, one a process: started over, emptied, kept out of a pass.

All that is done to ``PipelineOffloadManager`` of ``megatron/core/pipeline_parallel/fine_grained_activation_offload.py``
(0.16.1, 0.19.2); what its groups do in a step is followed in `memlab.model.offload.watch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from memlab.model.build import LiveModel


def start_over() -> None:
    """Puts a new manager in the place of the old one; it learns the model's groups in its next step, then a warm-up.

    The old one's host buffers go now: in 0.19 it is part of a cycle, and would keep them until the next collection.
    """
    PipelineOffloadManager.get_instance().cpu_tensor_pool.clear()
    PipelineOffloadManager.reset_instance()


def empty_groups() -> None:
    """Lets go of what groups still hold that forward opened and did not come to close.

    Megatron opens ``mlp_norm``'s group before the MLP and closes it after it (``transformer_layer.py``). A tensor in it
    leads through its graph to autograd nodes that hold the group: a cycle that no collection sees, and that keeps the
    failed step's activations for good (0.16.1).
    """
    for chunk in PipelineOffloadManager.get_instance()._cached_chunks_forward:
        for group in chunk.offload_groups:
            group._tensors.clear()


def forget() -> None:
    """Drops the manager, and its buffers with it."""
    PipelineOffloadManager.OFFLOAD_MGR = None


@contextmanager
def suspended(live: LiveModel) -> Iterator[None]:
    """Runs the block without activation offload, and leaves the manager as it was.

    As NeMo-RL's ``suspend_activation_offload_for_forward_only`` does (NeMo-RL #2279): a pass without backward would
    otherwise be the manager's warm-up, or use up the groups of the training step that follows.
    """
    manager = PipelineOffloadManager.get_instance()
    active = manager.do_offload
    with patch.object(live.config, "fine_grained_activation_offloading", False):
        if active:
            manager.disable_offload()
        try:
            yield
        finally:
            if active:
                manager.enable_offload()
