"""Megatron's manager of fine-grained activation offload, one per process: restarted, emptied, suspended for a pass.

All that memlab does to ``PipelineOffloadManager`` of
``megatron/core/pipeline_parallel/fine_grained_activation_offload.py``
(0.16.1, 0.19.2); `memlab.engines.megatron.activation_offload.transfer_watch` follows what its groups do in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from memlab.engines.megatron.build import LiveModel
from memlab.upstream.patching import patched

_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"


def start_over() -> None:
    """Replaces the manager by a new one, which learns the model's groups in its next step, a warm-up.

    The old one's host buffers are freed now: in 0.19 it is part of a reference cycle, and would keep them until the
    next garbage collection.
    """
    PipelineOffloadManager.get_instance().cpu_tensor_pool.clear()
    PipelineOffloadManager.reset_instance()


def empty_groups() -> None:
    """Drops the tensors of groups that forward opened and did not close.

    Megatron opens ``mlp_norm``'s group before the MLP and closes it after the MLP (``transformer_layer.py``). A tensor
    in it leads through its graph to autograd nodes that refer to the group: a cycle that garbage collection does not
    see, and that keeps the failed step's activations for good (0.16.1).
    """
    for chunk in PipelineOffloadManager.get_instance()._cached_chunks_forward:
        for group in chunk.offload_groups:
            group._tensors.clear()


def forget() -> None:
    """Drops the manager and its buffers."""
    PipelineOffloadManager.OFFLOAD_MGR = None


@contextmanager
def suspended(live: LiveModel) -> Iterator[None]:
    """Runs the block without activation offload, and leaves the manager unchanged.

    A forward-only pass would otherwise be the manager's warm-up, or use the groups of the next training step.
    NeMo-RL does the same (``suspend_activation_offload_for_forward_only``, NeMo-RL #2279).
    """
    manager = PipelineOffloadManager.get_instance()
    active = manager.do_offload
    with patched({f"{_CONFIG}.fine_grained_activation_offloading": False}, on=live.config):
        if active:
            manager.disable_offload()
        try:
            yield
        finally:
            if active:
                manager.enable_offload()
