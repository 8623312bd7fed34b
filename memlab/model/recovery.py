"""Makes a model usable again after a step that did not reach its end: an out-of-memory, a stop or an error."""

from __future__ import annotations

import gc
import traceback

from megatron.core.tensor_parallel import random

from memlab.config.settings import MemorySettings
from memlab.model import toggles
from memlab.model.build import LiveModel
from memlab.model.compat import forget_pending_offload
from memlab.model.offload import manager as offload_manager
from memlab.model.retention.retained_leaves import drop_graphs


def recover(live: LiveModel, settings: MemorySettings, error: BaseException) -> None:
    """Undoes what a step leaves behind when it does not reach its end.

    Args:
        live: The model.
        settings: The current ones; they are applied again, so that Megatron's offload manager restarts.
        error: What ended the step. Its frames hold the step's tensors, and are emptied.
    """
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
    random._unset_checkpointing()
    for part in live.optimizers:
        # torch adds a state's tensors one by one, and would take an incomplete state for a complete one.
        for state in part.optimizer.state.values():
            if not {"exp_avg", "exp_avg_sq"} <= state.keys():
                state.clear()
    for module in live.modules():
        forget_pending_offload(module)
    drop_graphs(live)
    offload_manager.empty_groups()
    toggles.apply(live, settings)
    gc.collect()
