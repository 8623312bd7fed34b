"""When a predicted step captures CUDA graphs, and what the capture of a whole iteration allocates beside an eager step.

Read in megatron-core 0.16.1 and 0.19.2 (``full_cuda_graph.py``) and torch 2.11, and measured on an H200
(``labs/results/h200_cuda_graphs.jsonl``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memlab.config.cublas import CUBLAS_WORKSPACE_BYTES, multiplies_with_torch
from memlab.config.model_restrictions import keeps_gradients_in_graph
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.layer_graphs import LayerGraphs, replay_arguments
from memlab.meter.labels import used_by_another_stream
from memlab.upstream.patching import patched

_REPLAY_ARGUMENTS = "megatron.core.transformer.transformer_layer.TransformerLayer._get_te_cuda_graph_replay_args"

EAGER_STEPS = 2
"""Before the capture: the first allocates Adam's state, and the second is what all others are like. Megatron takes
three by default (``cuda_graph_warmup_steps``), and at least one."""


@contextmanager
def captured(live: LiveModel) -> Iterator[None]:
    """Captures the block, a step's forward and backward, or replays layers in it, after the job's eager steps."""
    if live.scenario.state.cuda_graph_impl == "none":
        yield
        return
    live.num_eager_steps = live.num_eager_steps + 1 if has_optimizer_state(live) else 0
    if live.num_eager_steps < EAGER_STEPS:
        yield
        return
    if live.scenario.state.cuda_graph_impl == "transformer_engine":
        live.layer_graphs = live.layer_graphs or LayerGraphs(live)
        with patched({_REPLAY_ARGUMENTS: replay_arguments}):
            yield
        return
    live.graph_workspaces.clear()
    with ExitStack() as entered:
        entered.enter_context(torch.cuda.graph(torch.cuda.CUDAGraph()))
        if multiplies_with_torch(live.scenario):
            entered.enter_context(_allocating_workspaces(live))
        if keeps_gradients_in_graph(live.scenario):
            entered.enter_context(_keeping_gradients(live))
        yield


def has_optimizer_state(live: LiveModel) -> bool:
    """Whether the model has been updated."""
    return any(part.optimizer.state for part in live.optimizers)


@contextmanager
def _allocating_workspaces(live: LiveModel) -> Iterator[None]:
    """Allocates cuBLAS's workspaces as the output layer first multiplies: one in forward, and one on autograd's thread.

    cuBLAS has one for each stream, and the stream that is captured is a new one (``CublasHandlePool.cpp``).
    """
    held = live.graph_workspaces

    def allocate(number: int) -> None:
        if len(held) < number:
            held.append(torch.empty(CUBLAS_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))

    def multiplied(_module: torch.nn.Module, _given: Any, output: Any) -> None:
        allocate(1)
        logits = output[0] if isinstance(output, tuple) else output
        if logits.requires_grad:
            logits.register_hook(lambda _: allocate(2))

    models = [chunk.module for chunk in live.chunks if chunk.module.post_process]
    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.output_layer.register_forward_hook(multiplied).remove)
        yield


@contextmanager
def _keeping_gradients(live: LiveModel) -> Iterator[None]:
    """Keeps the memory of each gradient that autograd adds to its parameter until the capture ends."""
    with ExitStack() as hooks:
        for parameter in live.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(used_by_another_stream).remove)
        yield
