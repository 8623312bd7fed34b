"""The phases of any training loop, found by hooks: forward, backward and optimizer, in any order and number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab.meter.labels import Labels
from memlab.upstream.patching import patched
from memlab.vocabulary import PHASES

_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))


class Phases:
    """Enters a phase when the program does.

    Forward begins with the forward of one of the model's modules, and lasts until backward: it includes the loss.
    Backward is one call of autograd's engine (``backward()`` or ``torch.autograd.grad``). A module whose forward runs
    in it is recomputed. The phase ``optimizer`` is the method ``step`` of any optimizer. All else is ``idle``.

    Args:
        labels: Whose phase is set.
        after_backward: Called when a backward has ended.
        before_update: Called with the optimizer before its step.
        after_update: Called with the optimizer after its step.
    """

    def __init__(
        self,
        labels: Labels,
        after_backward: Callable[[], None],
        before_update: Callable[[torch.optim.Optimizer], None],
        after_update: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._labels = labels
        self._after_backward = after_backward
        self._before_update = before_update
        self._after_update = after_update
        self._around_updates: list[tuple[str, int]] = []
        """The phase in which each optimizer step began, and the identity of the frame that calls its hooks, outermost
        first; some of the steps may have raised an error."""
        self._step_code: CodeType | None = None
        """Of the function that calls an optimizer's step with its hooks."""
        self._num_recomputing = 0
        """How many modules whose forward backward has called are running, one inside the other."""
        self._recomputation = ExitStack()

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Follows the model, every optimizer, and autograd through the block."""
        labels = self._labels
        modules = [(name or type(model).__name__, module) for name, module in model.named_modules()]
        with ExitStack() as stack:
            for _, module in modules:  # before those of `labels`, which write down the phase
                stack.callback(module.register_forward_pre_hook(self._before_forward).remove)
                stack.callback(module.register_forward_hook(self._after_forward, always_call=True).remove)
            stack.callback(labels.release)
            stack.callback(labels.detach)
            labels.attach(modules)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            replacement = self._followed(run_backward)
            stack.enter_context(patched({"torch.autograd._engine_run_backward": replacement}))
            yield

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self._labels.phase == _BACKWARD:
            if not self._num_recomputing:
                self._recomputation.enter_context(self._labels.recompute())
            self._num_recomputing += 1
        elif self._labels.phase != _FORWARD:
            self._drop_failed_updates()
            self._labels.enter_phase("forward")

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._num_recomputing:
            self._num_recomputing -= 1
            if not self._num_recomputing:
                self._recomputation.close()

    def _followed(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def followed(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._labels.phase == _BACKWARD:  # of a reentrant checkpoint
                return run_backward(outputs, *args, **kwargs)
            self._labels.enter_phase("backward")
            with ExitStack() as stack:
                # On a GPU autograd has a thread of its own, whose allocations get their labels when a hook runs on it.
                nodes = {node for node in (getattr(output, "grad_fn", None) for output in outputs) if node is not None}
                for node in nodes:
                    stack.callback(node.register_prehook(lambda _: self._labels.changed()).remove)
                try:
                    return run_backward(outputs, *args, **kwargs)
                finally:
                    self._num_recomputing = 0  # no hook follows an error that is not an `Exception`
                    self._recomputation.close()
                    self._drop_failed_updates()
                    self._labels.enter_phase("optimizer" if self._around_updates else "idle")
                    self._after_backward()

        return followed

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before_update(optimizer)
        self._step_code = sys._getframe(1).f_code
        if self._labels.phase != _BACKWARD:  # autograd's own thread has another stack
            self._drop_failed_updates(num_without_phase=1)
        is_after_error = self._labels.phase == _OPTIMIZER and not self._around_updates
        outer = "idle" if is_after_error else PHASES[self._labels.phase]
        self._around_updates.append((outer, id(sys._getframe(1))))
        self._labels.enter_phase("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._after_update(optimizer)
        # Forward and backward go on where an optimizer stepped inside them, as in a hook on a gradient.
        outer, frame = "idle", id(sys._getframe(1))
        while self._around_updates:  # a step that raised an error inside this one is still there
            outer, began_in = self._around_updates.pop()
            if began_in == frame:
                break
        self._labels.enter_phase(outer if outer in {"backward", "optimizer"} else "idle")

    def _drop_failed_updates(self, num_without_phase: int = 0) -> None:
        """Forgets the optimizer steps that raised an error, after which no hook is called: they run no more.

        Args:
            num_without_phase: How many of the running steps have no phase yet.
        """
        if not self._around_updates:
            return
        frame: FrameType | None = sys._getframe()
        num_running = 0
        while frame is not None:
            num_running += frame.f_code is self._step_code
            frame = frame.f_back
        del self._around_updates[num_running - num_without_phase :]
