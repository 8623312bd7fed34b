"""What Megatron keeps: as workspace between steps, and for the whole process until it is released.

megatron-core does not free a model when its last name is dropped: caches and singletons refer to it. All of them are
listed here, with their file (megatron-core 0.16.1 and 0.19.2).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from memlab.engines import retained_leaves, transformer_engine_caches
from memlab.engines.megatron.activation_offload import manager as offload_manager
from memlab.engines.megatron.build import LiveModel, release_optimizer, take_apart
from memlab.engines.megatron.fp8_caches import fp8_caches
from memlab.engines.megatron.megatron_versions import auxiliary_losses, forget_auxiliary_losses
from memlab.live_objects import instances_of

_ROPES = (RotaryEmbedding, YarnRotaryEmbedding)
_FIRST_SCALE = MTPLossAutoScaler.main_loss_backward_scale
"""Megatron's own, on the host, until a step replaces it."""


def workspace(live: LiveModel) -> Iterator[torch.Tensor]:
    """Yields the tensors that Megatron keeps by name between steps, other than parameters.

    A tensor that is allocated after a step, and neither here nor in `Residency.tensors`, is retained by mistake.
    """
    has_fp8 = live.scenario.state.fp8_format is not None
    yield from live.graph_workspaces
    if live.layer_graphs is not None:
        yield from live.layer_graphs.tensors()
    for module in live.modules():
        yield from _tensors_in(module._buffers)
        if has_fp8:
            yield from fp8_caches(module)
    for owner in owners_of_tensors(live):
        yield from _tensors_in(vars(owner))
    for part in live.optimizers:
        yield from _tensors_in(vars(part))
        yield from _tensors_in(vars(part.optimizer))
    # models/common/embeddings/ caches the angles by module and sequence length in lru_caches; yarn's has pairs with a
    # factor.
    for rope in _ROPES:
        values = gc.get_referents(rope.forward)
        pairs = [value for value in values if isinstance(value, tuple)]
        yield from _tensors_in(dict(enumerate([*values, *(one for pair in pairs for one in pair)])))
    # tensor_parallel/layers.py gathers the sequence for the output layer into a buffer that it keeps.
    yield from _tensors_in(parallel_state.get_global_memory_buffer().buffer)
    # transformer/moe/moe_utils.py
    yield from _tensors_in({"scale": MoEAuxLossAutoScaler.main_loss_backward_scale})
    yield from auxiliary_losses()
    # transformer/multi_token_prediction.py
    yield from _tensors_in(MTPLossLoggingHelper.tracker)
    if live.config.mtp_num_layers is not None:
        yield from _tensors_in({"scale": MTPLossAutoScaler.main_loss_backward_scale})
    yield from transformer_engine_caches.tensors()


def owners_of_tensors(live: LiveModel) -> Iterator[Any]:
    """Yields what keeps tensors as plain attributes from one step to the next: modules, and their token dispatchers."""
    for module in live.modules():
        yield from (owner for _, owner in retained_leaves.owners_of_tensors("", module))


def empty_caches_of_steps() -> None:
    """Empties the process-wide caches that a step fills: after it they are as they were when the model was built."""
    _forget_angles()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    forget_auxiliary_losses()
    _forget_losses_of_extra_layers()
    parallel_state.get_global_memory_buffer().buffer.clear()
    transformer_engine_caches.forget_causal_masks()
    transformer_engine_caches.forget_unused_gradients()


def _tensors_in(attributes: dict[Any, Any]) -> Iterator[torch.Tensor]:
    return (value for value in attributes.values() if isinstance(value, torch.Tensor))


def release(live: LiveModel, *, leave: bool = True) -> None:
    """Clears the model's objects and megatron-core's references to it, so that its memory is freed.

    Args:
        live: The model; it is empty afterwards.
        leave: Also leave the process group. Without, another model of the same layout can be built in it.
    """
    try:
        release_optimizer(live)
        take_apart(live.chunks)
        take_apart(live.reference)
        live.config = None
    finally:
        # After an error too, so that another model can be built.
        forget() if leave else forget_model()


def forget() -> None:
    """Empties megatron-core's process-wide state and leaves the process group."""
    for _, release_references in process_wide_holders():
        release_references()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def forget_model() -> None:
    """Empties megatron-core's process-wide state, except for the process groups."""
    for _, release_references in _holders_of_a_model():
        release_references()
    parallel_state.get_global_memory_buffer().buffer.clear()
    gc.collect()


def process_wide_holders() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields what refers to a model after its last name is dropped: a description, and a function that ends it."""
    yield from _holders_of_a_model()
    yield "process groups and the global memory buffer", parallel_state.destroy_model_parallel


def _holders_of_a_model() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "token dispatchers (graph of their probabilities -> parameters -> DDP's hooks -> model)", _empty_dispatchers
    yield "the caches of angles of RotaryEmbedding.forward and YarnRotaryEmbedding.forward", _forget_angles
    yield "the scale of the auxiliary loss", lambda: setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    yield "the log of auxiliary losses", forget_auxiliary_losses
    yield "the losses of multi-token prediction and their scale", _forget_losses_of_extra_layers
    yield "the offload manager's buffers", offload_manager.forget
    yield "random states", _forget_random_states
    for name, _, empty in transformer_engine_caches.caches():
        yield name, empty
    yield "cuBLAS workspaces", transformer_engine_caches.clear_torch_caches


def _forget_angles() -> None:
    for rope in _ROPES:
        rope.forward.cache_clear()


def _forget_losses_of_extra_layers() -> None:
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = _FIRST_SCALE


def _empty_dispatchers() -> None:
    # The cycle runs through autograd's nodes in C++, where Python's garbage collector does not look.
    for dispatcher in instances_of([MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher, MoEFlexTokenDispatcher]):
        vars(dispatcher).clear()
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None


def _forget_random_states() -> None:
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
