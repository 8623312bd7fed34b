"""Which draw of a random routing a pass through a MoE layer has: recomputing one must choose the same experts again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from memlab.config.routing import Routing


@dataclass(slots=True)
class _Layer:
    """The passes through a layer in one step."""

    index: int
    """Of the whole model, from 0, whichever pipeline stage has it."""
    num_passes: int = 0
    to_recompute: deque[int] = field(default_factory=deque)
    """Passes without gradients, oldest first: backward recomputes the micro-batches in the order of their forward."""


class RoutingDraws:
    """Numbers the passes through the MoE layers of a model within a step."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._layers: WeakKeyDictionary[Any, _Layer] = WeakKeyDictionary()

    def add_layers(self, layers: Iterable[Any]) -> None:
        """Takes the MoE layers of a model chunk, whose dispatchers begin the passes."""
        for layer in layers:
            self._layers[layer.mlp.token_dispatcher] = _Layer(layer.layer_number - 1)

    def begin_step(self) -> None:
        """Starts over: every step has the same batch."""
        for layer in self._layers.values():
            layer.num_passes = 0
            layer.to_recompute.clear()

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Lets a pass in the block have the draw of the next one, which is then what it would be without that pass."""
        before = [(layer, layer.num_passes, layer.to_recompute.copy()) for layer in self._layers.values()]
        yield
        for layer, num_passes, to_recompute in before:
            layer.num_passes, layer.to_recompute = num_passes, to_recompute

    def of_pass(self, dispatcher: Any) -> tuple[int, int]:
        """Returns the layer of the model and the micro-batch of the pass that a layer's dispatcher begins.

        Megatron's checkpoints run forward without gradients, and again with gradients in backward
        (``megatron/core/tensor_parallel/random.py``, 0.16.1 and 0.19.2).
        """
        layer = self._layers[dispatcher]
        if torch.is_grad_enabled() and layer.to_recompute:
            return layer.index, layer.to_recompute.popleft()
        number = layer.num_passes
        layer.num_passes += 1
        if not torch.is_grad_enabled():
            layer.to_recompute.append(number)
        return layer.index, number
