"""Tracks which module is running: in forward by module hooks, in backward by the autograd nodes made in each module.

Every autograd node carries a sequence number, which grows with each node made on a thread (``Node.sequence_nr`` in
``torch/csrc/autograd/function.h``). The module that was current at that number made the node. Backward runs nodes
from the highest number down (``CompareNodeTaskTime`` in ``torch/csrc/autograd/engine.h``), so of the nodes that were
made one after another in one module only the one with the highest number needs a hook.

Example: module A makes two nodes, calls B, which makes two nodes, and then makes one more.

    sequence number   10   11   12   13   14
    made in           A    A    B    B    A

The tracker notes ``(10, A), (12, B), (14, A)``. A node with number 13 was made in B: `bisect_right` finds the last note
at or before 13. Backward runs 14, 13, 12, 11, 10. Hooks go on 14 (A begins), 13 (B begins) and 11 (A again).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

_MODULE_KEY = "memlab_module"
# A parameter has one, and no module's forward makes it.
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined,unused-ignore]  # torch 2.15 declares it


def module_of(node: Any) -> int:
    """Returns the code of the module in which an autograd node was made; 0 if no tracked module made it."""
    return node.metadata.get(_MODULE_KEY, 0)


class ModuleTracker:
    """Reports each change of the running module.

    Args:
        current: Returns the code of the running module.
        on_enter: Called with a module's code when its forward or its part of backward begins.
        on_return: Called with the outer module's code when an inner module's forward ends.
    """

    def __init__(
        self,
        current: Callable[[], int],
        on_enter: Callable[[int], None],
        on_return: Callable[[int], None],
    ) -> None:
        self._current = current
        self._on_enter = on_enter
        self._on_return = on_return
        self._outer: list[int] = []
        """The modules that called the running one, outermost first."""
        # The notes of the module docstring since the outermost module began: `_codes[i]` ran from `_numbers[i]` on.
        self._numbers: list[int] = []
        self._codes: list[int] = []

    def track(self, modules: Iterable[tuple[int, torch.nn.Module]]) -> list[RemovableHandle]:
        """Puts hooks on modules, each under its code; returns the handles that remove the hooks."""
        hooks: list[RemovableHandle] = []
        for code, module in modules:
            hooks.append(module.register_forward_pre_hook(partial(self._before_forward, code)))
            hooks.append(module.register_forward_hook(self._after_forward, always_call=True))
        return hooks

    def _before_forward(self, code: int, module: torch.nn.Module, args: Any) -> None:
        self.begin(code)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.end(output)

    def restart(self) -> None:
        """Forgets modules whose forward never ended: torch runs no hook after an error that is not an `Exception`."""
        self._outer.clear()

    def begin(self, code: int) -> None:
        """Begins a module's forward."""
        current = self._current()
        if not self._outer:
            self._numbers, self._codes = [0], [current]
        self._outer.append(current)
        self._note(code)
        self._on_enter(code)

    def end(self, output: object) -> None:
        """Ends the forward that was begun last; a tensor, or the tensors of a tuple or list, are what it returned."""
        outer = self._outer.pop() if self._outer else 0
        self._note(outer)
        self._on_return(outer)
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        self._mark_nodes([tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)])

    def _note(self, code: int) -> None:
        self._numbers.append(_get_sequence_nr())
        self._codes.append(code)

    def _mark_nodes(self, waiting: list[Any]) -> None:
        """Writes its module's code on every new node of a graph, and puts a hook where backward changes modules.

        Args:
            waiting: Nodes of a module's outputs. The walk stops at marked nodes, so each node is visited once.
        """
        new: dict[int, tuple[Any, int]] = {}
        while waiting:
            node = waiting.pop()
            if node is None or _MODULE_KEY in node.metadata:
                continue
            number = node._sequence_nr()
            code = self._codes[bisect_right(self._numbers, number) - 1]
            node.metadata[_MODULE_KEY] = code
            new[number] = node, code
            # In a layer of 128 experts most of the next nodes are the weights' AccumulateGrad.
            waiting.extend(
                [following for following, _ in node.next_functions if type(following) is not _AccumulateGrad]
            )
        for number, (node, code) in new.items():
            runs_before, its_code = new.get(number + 1, (None, None))
            # A checkpoint runs a backward of its own inside its node and leaves another module current.
            if its_code != code or isinstance(runs_before, BackwardCFunction):
                node.register_prehook(partial(self._before_backward, code))

    def _before_backward(self, code: int, grad_outputs: Any) -> None:
        self._on_enter(code)
