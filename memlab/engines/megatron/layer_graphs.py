"""CUDA graphs of layers by Transformer Engine, in a prediction: what their capture and their replays allocate.

A capture runs each layer's own forward and backward in the graphs' pool, in the order in which steps run them. What
Transformer Engine keeps of them is kept here; a replay computes nothing and allocates nothing but what the rest of the
layer does. A layer with experts is in a graph up to its router, or up to the rows that are sent to experts. Read in
megatron-core 0.16.1 (``TECudaGraphHelper``) and Transformer Engine 2.16.1 (``pytorch/graph.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule

from memlab.config.cublas import CUBLAS_WORKSPACE_BYTES
from memlab.engines.megatron.build import LiveModel
from memlab.meter.repeater import Repeater

_Tensors = tuple[torch.Tensor, ...]


@dataclass(eq=False)
class _Graph:
    """The two graphs of one layer and one of the micro-batches in flight."""

    layer: Any
    arguments: _Arguments
    outputs: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Of the hidden states and of the parameters; Transformer Engine keeps those of the last backward pass."""
    shapes: list[torch.Tensor] = field(default_factory=list)
    is_trained: list[bool] = field(default_factory=list)
    """Of each output, whether it has a gradient; how many rows experts get has none."""
    shapes_of_gradients: list[torch.Tensor | None] = field(default_factory=list)

    def __call__(self, hidden: torch.Tensor, **others: Any) -> _Tensors:
        return _Replay.apply(self, hidden, *self.parameters)


@dataclass(eq=False)
class _Arguments:
    """The static inputs of one pass."""

    hidden: torch.Tensor
    others: dict[str, torch.Tensor]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *_: torch.Tensor) -> _Tensors:
        ctx.graph = graph
        outputs = tuple(_uncounted(each) if each.is_meta else each.clone() for each in graph.shapes)
        ctx.mark_non_differentiable(*(each for each, kept in zip(outputs, graph.is_trained, strict=True) if not kept))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(None if each is None else _uncounted(each) for each in ctx.graph.shapes_of_gradients)


def _uncounted(like: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor that the meter does not count: its memory is the graph's."""
    return Repeater.stand_in(like.shape, like.stride(), like.dtype)


class LayerGraphs:
    """The graphs of the layers of one rank, captured when this is made."""

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._layers = [
            [layer for layer in chunk.module.decoder.layers if cuda_graphs._layer_is_graphable(layer, live.config)]
            for chunk in live.chunks
        ]
        self._free: deque[_Arguments] = deque()
        """The inputs of passes whose backward is over."""
        self._angles: torch.Tensor | None = None
        self._workspaces: list[torch.Tensor] = []
        """cuBLAS's of the routers in graphs: one for each thread, forward's and autograd's, on the stream of the
        warm-up, and one for each on the stream that is captured."""
        self._gradients_of_outputs: dict[Any, list[torch.Tensor]] = {}
        """By the shapes of the outputs: a backward pass reads them, and no other runs at the same time."""
        self._has_begun = False
        torch.cuda.empty_cache()
        order = _order(live)
        self._graphs = self._static_inputs(order)
        cuda_graphs._set_capture_start()
        try:
            self._warm_up()
            self._capture(order)
        finally:
            cuda_graphs._set_capture_end()
        for chunk, layers, passes in zip(live.chunks, self._layers, self._graphs, strict=True):
            for place, layer in enumerate(layers):
                layer.cuda_graphs = [graphs[place] for graphs in passes]
                if live.scenario.state.overlap_param_gather:
                    layer.setup_manual_hooks(chunk._make_forward_pre_hook)
            chunk.zero_grad_buffer()
        torch.cuda.empty_cache()

    def drop(self) -> None:
        """Frees the graphs: the layers are eager again."""
        for layer in chain(*self._layers):
            layer.cuda_graphs, layer.cuda_graph_manual_hooks = [], []
        self._graphs.clear()
        self._gradients_of_outputs.clear()
        self._free.clear()
        self._workspaces.clear()
        self._angles = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what is allocated between steps."""
        for graph in chain.from_iterable(chain(*passes) for passes in self._graphs):
            yield graph.arguments.hidden
            yield from graph.arguments.others.values()
            yield from (each for each in graph.gradients if each is not None)
        yield from chain(*self._gradients_of_outputs.values())
        yield from self._workspaces

    def _static_inputs(self, order: list[int]) -> list[list[list[_Graph]]]:
        """Makes the inputs of all passes in flight; returns the graphs by chunk, pass and layer."""
        graphs: list[list[list[_Graph]]] = [[] for _ in self._layers]
        in_flight: list[deque[list[_Graph]]] = [deque() for _ in self._layers]
        for number in order:
            chunk = abs(number) - 1
            if number < 0:
                self._free.extend(graph.arguments for graph in in_flight[chunk].popleft())
                continue
            model = self._live.chunks[chunk].module
            graphs[chunk].append([_Graph(layer, self._arguments(layer, model)) for layer in self._layers[chunk]])
            in_flight[chunk].append(graphs[chunk][-1])
        return graphs

    def _arguments(self, layer: Any, model: Any) -> _Arguments:
        if self._free:
            return self._free.popleft()
        scenario = self._live.scenario
        others = layer.get_layer_static_inputs(scenario.seq_length, scenario.micro_batch_size)
        hidden = others.pop("hidden_states")
        modules = scenario.state.cuda_graph_modules
        takes_angles = model.position_embedding_type == "rope" and not layer.config.multi_latent_attention
        if takes_angles and (not modules or "attn" in modules):
            if self._angles is None:
                length = model.rotary_pos_emb.get_rotary_seq_len(None, model.decoder, hidden, layer.config, None)
                self._angles = model.rotary_pos_emb(length)
            others["rotary_pos_emb"] = self._angles
        return _Arguments(hidden, others)

    def _warm_up(self) -> None:
        """Runs each pass once, on a stream of its own. Transformer Engine runs several, which allocate the same."""
        with torch.cuda.stream(torch.cuda.Stream()):
            for graph in chain.from_iterable(chain(*passes) for passes in self._graphs):
                outputs = _with_gradients(_outputs(graph))
                self._multiply_with_torch(graph, 2)
                with _without_gradients(graph) as inputs:
                    torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
                    graph.parameters = [each for each in inputs[1:] if each.grad is not None]
                del outputs

    def _capture(self, order: list[int]) -> None:
        """Captures all passes in their order, and keeps of each what Transformer Engine keeps then."""
        forward, backward = ([iter(passes) for passes in self._graphs] for _ in range(2))
        last: _Graph | None = None
        for number in order:
            chunk = abs(number) - 1
            if number > 0:
                for graph in next(forward[chunk]):
                    with self._captured():
                        graph.outputs = _outputs(graph)
                        self._multiply_with_torch(graph, 3)
                    graph.shapes = [_uncounted(each) if each.is_meta else each for each in graph.outputs]
                    graph.is_trained = [each.requires_grad for each in graph.outputs]
                continue
            before: _Graph | None = None
            for graph in reversed(next(backward[chunk])):
                self._capture_backward(graph)
                if before is not None:
                    before.gradients = []
                before = graph
            if last is not None:
                last.gradients = []
            last = before

    def _capture_backward(self, graph: _Graph) -> None:
        outputs = _with_gradients(graph.outputs)
        key = tuple((each.shape, each.dtype) for each in outputs)
        if key not in self._gradients_of_outputs:
            self._gradients_of_outputs[key] = [torch.empty_like(each) for each in outputs]
        with _without_gradients(graph) as inputs, self._captured():
            self._multiply_with_torch(graph, 4)
            torch.autograd.backward(outputs, self._gradients_of_outputs[key])
            del outputs
            graph.gradients = [each.grad for each in inputs]
        graph.shapes_of_gradients = [None if each is None else _uncounted(each) for each in graph.gradients]
        graph.outputs = []

    def _multiply_with_torch(self, graph: _Graph, num_workspaces: int) -> None:
        """Allocates cuBLAS's workspaces until there are so many, if the graph has a router, which torch multiplies."""
        if graph.layer.is_moe_layer and "moe_router" in (self._live.scenario.state.cuda_graph_modules or ()):
            while len(self._workspaces) < num_workspaces:
                self._workspaces.append(torch.empty(CUBLAS_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))

    @contextmanager
    def _captured(self) -> Iterator[None]:
        """Captures the block; all graphs share one pool."""
        pool: Any = self if self._has_begun else None
        self._has_begun = True
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            yield


def replay_arguments(layer: Any, *given: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what a replay is called with: Megatron adds a mask of zeros to graphs of attention.

    It takes the place of ``TransformerLayer._get_te_cuda_graph_replay_args``, which asks for Transformer Engine.
    """
    taken, others = GraphableMegatronModule._get_te_cuda_graph_replay_args(layer, *given, **named)
    if "attention_mask" in others:
        config, (hidden,) = layer.config, taken
        length = hidden.size(0) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        shape = (hidden.size(1), 1, length, length * config.context_parallel_size)
        others["attention_mask"] = torch.zeros(shape, dtype=torch.bool, device="cuda")
    return taken, others


def _outputs(graph: _Graph) -> list[torch.Tensor]:
    return [*graph.layer(graph.arguments.hidden, **graph.arguments.others)]


def _with_gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in outputs if each.requires_grad]


@contextmanager
def _without_gradients(graph: _Graph) -> Iterator[list[Any]]:
    """Yields the inputs whose gradients a backward pass makes; they have the gradients that they had afterwards."""
    parameters = graph.parameters or [each for each in graph.layer.parameters() if each.requires_grad]
    inputs = [graph.arguments.hidden, *parameters]
    before = [each.grad for each in inputs]
    for each in inputs:
        each.grad = None
    try:
        yield inputs
    finally:
        for each, gradient in zip(inputs, before, strict=True):
            each.grad = gradient


def _order(live: LiveModel) -> list[int]:
    """Returns the order of passes: the numbers of chunks from 1 on, below 0 for backward."""
    layout, scenario = live.scenario.layout, live.scenario
    if layout.pipeline_model_parallel_size == 1:
        return [1, -1]
    chunks, group = len(live.chunks), live.config.microbatch_group_size_per_vp_stage
    _, _, warm_up, _ = schedules.get_pp_rank_microbatches(scenario.num_microbatches, chunks, group, False)
    table = schedules.get_schedule_table(scenario.num_microbatches, chunks, group)
    return cuda_graphs.convert_schedule_table_to_order(warm_up, chunks, table)
