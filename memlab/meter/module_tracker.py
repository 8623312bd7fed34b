"""Follows a model's modules: in forward by their hooks, in backward by the autograd nodes that were made in them.

A node carries the number that autograd had reached when it was made (``Node.sequence_nr``), so the module at work at
that number is its own. Backward runs nodes from the highest number down (``torch/csrc/autograd/engine.h``,
``CompareNodeTaskTime``): of nodes made one after another in one module only the first that runs needs a hook.
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

_OWN_MODULE = "memlab_module"
# Part of a parameter, and of no module's forward.
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def module_of(node: Any) -> int:
    """Returns the code of the module in which an autograd node was made; 0 where none was followed."""
    code: int = node.metadata.get(_OWN_MODULE, 0)
    return code


class ModuleFollower:
    """Says which module takes over.

    Args:
        standing: Returns the code of the module at work.
        take_over: Called with the code of the module that begins, forward or backward.
        give_back: Called with the code of the module that goes on when an inner one ends.
    """

    def __init__(
        self,
        standing: Callable[[], int],
        take_over: Callable[[int], None],
        give_back: Callable[[int], None],
    ) -> None:
        self._standing = standing
        self._take_over = take_over
        self._give_back = give_back
        self._outer: list[int] = []
        """Modules whose forward waits for an inner one's."""
        # Since the outermost module began: from which of autograd's numbers on, which module was at work.
        self._numbers: list[int] = []
        self._codes: list[int] = []

    def follow(self, modules: Iterable[tuple[int, torch.nn.Module]]) -> list[RemovableHandle]:
        """Hooks modules under their codes; returns what takes the hooks off."""
        hooks: list[RemovableHandle] = []
        for code, module in modules:
            hooks.append(module.register_forward_pre_hook(partial(self._enter, code)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return hooks

    def restart(self) -> None:
        """Forgets modules that never ended: torch leaves their hooks out where what ends them is no `Exception`."""
        self._outer.clear()

    def _enter(self, code: int, module: torch.nn.Module, args: Any) -> None:
        standing = self._standing()
        if not self._outer:
            self._numbers, self._codes = [0], [standing]
        self._outer.append(standing)
        self._note(code)
        self._take_over(code)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        outer = self._outer.pop() if self._outer else 0
        self._note(outer)
        self._give_back(outer)
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        self._mark([tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)])

    def _note(self, code: int) -> None:
        self._numbers.append(_get_sequence_nr())
        self._codes.append(code)

    def _mark(self, waiting: list[Any]) -> None:
        """Walks back to nodes that are marked already, so each node is visited once."""
        new: dict[int, tuple[Any, int]] = {}
        while waiting:
            node = waiting.pop()
            if node is None or _OWN_MODULE in node.metadata:
                continue
            number = node._sequence_nr()
            code = self._codes[bisect_right(self._numbers, number) - 1]
            node.metadata[_OWN_MODULE] = code
            new[number] = node, code
            # Of 128 experts' weights these are most of what a layer's nodes lead to.
            waiting.extend([made for made, _ in node.next_functions if type(made) is not _AccumulateGrad])
        for number, (node, code) in new.items():
            before, code_before = new.get(number + 1, (None, None))
            # A function in Python may run a backward of its own, as checkpoints do, and leave another module behind.
            if code_before != code or isinstance(before, BackwardCFunction):
                node.register_prehook(partial(self._in_backward, code))

    def _in_backward(self, code: int, grad_outputs: Any) -> None:
        self._take_over(code)
