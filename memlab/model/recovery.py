"""Makes a model usable again after a step that ended halfway, in an out-of-memory, a stop or an error."""

from __future__ import annotations

import gc
import traceback

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.tensor_parallel import random

from memlab.model import toggles
from memlab.model.build import LiveModel
from memlab.model.retention import drop_graphs
from memlab.model.upstream_versions import forget_pending_offload
from memlab.settings import MemorySettings


def recover(live: LiveModel, settings: MemorySettings, error: BaseException) -> None:
    """Undoes what a step leaves behind when it does not reach its end.

    Args:
        live: The model.
        settings: Those that stand; they are applied anew, so that Megatron's offload manager starts over.
        error: What ended the step. Its frames hold the step's tensors, and are emptied.
    """
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
    random._unset_checkpointing()
    for part in getattr(live.optimizer, "chained_optimizers", [live.optimizer]):
        # torch fills a parameter's state one tensor after another; a half-filled one would be taken for whole.
        for state in part.optimizer.state.values():
            if not {"exp_avg", "exp_avg_sq"} <= state.keys():
                state.clear()
    for module in live.modules():
        forget_pending_offload(module)
    drop_graphs(live)
    _empty_offload_groups(live)
    toggles.apply(live, settings)
    gc.collect()


def _empty_offload_groups(live: LiveModel) -> None:
    """Lets go of what offload groups still hold that forward opened and did not come to close.

    Megatron opens ``mlp_norm``'s group before the MLP and closes it after it (``transformer_layer.py``). A tensor in it
    leads through its graph to autograd nodes that hold the group: a cycle that no collection sees, and that keeps the
    failed step's activations for good (0.16.1).
    """
    for chunk in PipelineOffloadManager.get_instance()._cached_chunks_forward:
        for group in chunk.offload_groups:
            group._tensors.clear()
