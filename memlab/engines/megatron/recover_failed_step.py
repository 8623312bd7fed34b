"""Makes a model usable again after a step that did not reach its end: an out-of-memory, a stop or an error."""

from __future__ import annotations

import gc
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from memlab.config.settings import MemorySettings
from memlab.engines.megatron import apply_settings, cpu_optimizer
from memlab.engines.megatron.activation_offload import manager as offload_manager
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.data_parallel_overlap import forget_communication
from memlab.engines.megatron.megatron_versions import forget_pending_offload
from memlab.engines.retained_leaves import drop_graphs
from memlab.engines.step_errors import release_tensors


def recover(live: LiveModel, settings: MemorySettings, error: BaseException) -> None:
    """Undoes what a step leaves behind when it does not reach its end.

    Args:
        settings: The current ones; they are applied again, so that Megatron's offload manager restarts.
        error: What ended the step; `release_tensors` is applied to it.
    """
    release_tensors(error)
    random._unset_checkpointing()
    for part in live.optimizers:
        for optimizer in cpu_optimizer.with_inner(part.optimizer):
            _clear_incomplete_states(optimizer)
    forget_communication(live)
    for module in live.modules():
        forget_pending_offload(module)
        forget_discarded_outputs(module)
    drop_graphs(live)
    offload_manager.empty_groups()
    apply_settings.apply(live, settings)
    gc.collect()


def forget_discarded_outputs(module: torch.nn.Module) -> None:
    """Drops what a checkpoint keeps from forward until backward recomputes the output that it discarded.

    A module keeps its last ``CheckpointWithoutOutput`` as an attribute, and that keeps the inputs with the graph of the
    whole step (``tensor_parallel/random.py``). Only the module's next checkpoint takes its place, and there is none if
    other settings follow.
    """
    for checkpoint in vars(module).values():
        if isinstance(checkpoint, random.CheckpointWithoutOutput):
            checkpoint.run_function = checkpoint.rng_states = checkpoint.outputs = checkpoint.ctx = None


def _clear_incomplete_states(optimizer: Any) -> None:
    # Adam adds a state's tensors one by one, and would take an incomplete state for a complete one. Transformer
    # Engine's adds main parameters before it writes them: where one state is incomplete, none of the group is kept.
    is_precision_aware = getattr(optimizer, "master_weights", None)
    names = {"exp_avg", "exp_avg_sq"} | ({"master_param"} if is_precision_aware else set())
    incomplete = [state for state in optimizer.state.values() if not names <= state.keys()]
    for group in optimizer.param_groups if is_precision_aware else ():
        states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
        if any(not names <= state.keys() for state in states):
            incomplete += states
    for state in incomplete:
        state.clear()
