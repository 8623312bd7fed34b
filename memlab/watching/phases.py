"""The phases of any training loop: forward, backward, optimizer and save, in any order and number.

Nothing is put on the model: a copy of it, or a file that it is saved to, is that of the program. torch's own functions
are replaced for the block instead, and act on the thread of the block only.
"""

from __future__ import annotations

import pkgutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab.meter.labels import Labels
from memlab.upstream.patching import patched
from memlab.vocabulary import PHASES

_FORWARD, _BACKWARD, _OPTIMIZER, _SAVE = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "save"))
_SAVES = ("torch.serialization._save", "torch.serialization._legacy_save")
_DISTRIBUTED_SAVES = (
    "torch.distributed.checkpoint.state_dict_saver._save_state_dict",
    "torch.distributed.checkpoint.staging.DefaultStager.stage",
    "torch.distributed.checkpoint.staging.BlockingAsyncStager.stage",
)


class Phases:
    """Enters a phase when the program does.

    Forward begins with the forward of one of the model's modules, or of a module around them, and lasts until backward:
    it includes the loss. Backward is one call of autograd's engine (``backward()`` or ``torch.autograd.grad``). A
    module whose forward runs in it is recomputed. The phase ``optimizer`` is the method ``step`` of any optimizer, and
    ``save`` is a checkpoint that is written: ``torch.save``, or ``save`` and the copying part of ``async_save`` of
    ``torch.distributed.checkpoint``. All else is ``idle``.

    Args:
        any_thread: Whether backward may run on a thread of autograd's own, as on a GPU.
        after_backward: Called when a backward has ended.
        before_update: Called with the optimizer before its step.
        after_update: Called with the optimizer after its step.
        around_save: Called when a save begins, and when it has ended.
    """

    def __init__(
        self,
        labels: Labels,
        *,
        any_thread: bool,
        after_backward: Callable[[], None],
        before_update: Callable[[torch.optim.Optimizer], None],
        after_update: Callable[[torch.optim.Optimizer], None],
        around_save: Callable[[], None],
    ) -> None:
        self._labels = labels
        self._any_thread = any_thread
        self._after_backward = after_backward
        self._before_update = before_update
        self._after_update = after_update
        self._around_save = around_save
        self._thread: threading.Thread | None = None
        """That of the block, while it lasts."""
        self._in_backward = False
        self._modules: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        """The model's modules with their codes, by identity: the program may free them, as it could without a meter."""
        self._around_updates: list[tuple[str, int]] = []
        """The phase in which each optimizer step began, and the identity of the frame that calls its hooks, outermost
        first; some of the steps may have raised an error."""
        self._step_code: CodeType | None = None
        """Of the function that calls an optimizer's step with its hooks."""
        self._num_recomputing = 0
        """How many modules whose forward backward has called are running, one inside the other."""
        self._recomputation = ExitStack()

    @contextmanager
    def following(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[None]:
        """Follows a model's modules, given with their names, every optimizer, autograd and saves through the block."""
        self._modules = {id(module): (weakref.ref(module), self._labels.code(name)) for name, module in modules}
        del modules
        self._thread = threading.current_thread()
        replacements = {
            "torch.nn.Module._call_impl": self._followed_call(torch.nn.Module._call_impl),
            "torch.autograd._engine_run_backward": self._followed_backward(
                torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            ),
        }
        with ExitStack() as stack:
            stack.callback(setattr, self, "_thread", None)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(patched(replacements))
            stack.enter_context(_saves_followed(self._followed_save))
            yield

    def _is_here(self) -> bool:
        """Whether this thread is the block's, or runs its backward while the block's thread waits."""
        return threading.current_thread() is self._thread or (self._any_thread and self._in_backward)

    def _code_of(self, module: torch.nn.Module) -> int | None:
        """Returns the code of one of the model's modules, 0 for a module around one; None for any other."""
        reference, code = self._modules.get(id(module), (None, 0))
        if reference is not None and reference() is module:
            return code
        children = (self._modules.get(id(child)) for child in module._modules.values() if child is not None)
        return 0 if any(child is not None for child in children) else None

    def _followed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # What torch compiles is compiled as it is without a meter.
            if torch.compiler.is_compiling() or not self._is_here():
                return call(module, *args, **kwargs)
            code = self._code_of(module)
            if code is None:
                return call(module, *args, **kwargs)
            self._before_forward()
            self._labels.begin_module(code)
            output = None
            try:
                output = call(module, *args, **kwargs)
            finally:
                self._labels.end_module(output)
                self._after_forward()
            return output

        return followed

    def _before_forward(self) -> None:
        if self._labels.phase == _BACKWARD:
            if not self._num_recomputing:
                self._recomputation.enter_context(self._labels.recompute())
            self._num_recomputing += 1
        elif self._labels.phase != _FORWARD:
            self._drop_failed_updates()
            self._labels.enter_phase("forward")

    def _after_forward(self) -> None:
        if self._num_recomputing:
            self._num_recomputing -= 1
            if not self._num_recomputing:
                self._recomputation.close()

    def _followed_backward(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def followed(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_here() or self._labels.phase == _BACKWARD:  # the latter of a reentrant checkpoint
                return run_backward(outputs, *args, **kwargs)
            self._labels.enter_phase("backward")
            with ExitStack() as stack:
                # On a GPU autograd has a thread of its own, whose allocations get their labels when a hook runs on it.
                nodes = {node for node in (getattr(output, "grad_fn", None) for output in outputs) if node is not None}
                for node in nodes:
                    stack.callback(node.register_prehook(lambda _: self._labels.changed()).remove)
                try:
                    self._in_backward = True
                    return run_backward(outputs, *args, **kwargs)
                finally:
                    self._in_backward = False
                    self._num_recomputing = 0
                    self._recomputation.close()
                    self._drop_failed_updates()
                    self._labels.enter_phase("optimizer" if self._around_updates else "idle")
                    self._after_backward()

        return followed

    def _followed_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_here() or self._labels.phase == _SAVE:  # one save may call another
                return save(*args, **kwargs)
            outer = PHASES[self._labels.phase]
            self._labels.enter_phase("save")
            self._around_save()
            try:
                return save(*args, **kwargs)
            finally:
                self._labels.enter_phase(outer)
                self._around_save()

        return followed

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        self._before_update(optimizer)
        self._step_code = sys._getframe(1).f_code
        if self._labels.phase != _BACKWARD:  # autograd's own thread has another stack
            self._drop_failed_updates(num_without_phase=1)
        is_after_error = self._labels.phase == _OPTIMIZER and not self._around_updates
        outer = "idle" if is_after_error else PHASES[self._labels.phase]
        self._around_updates.append((outer, id(sys._getframe(1))))
        self._labels.enter_phase("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
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


@contextmanager
def _saves_followed(followed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces the functions in which torch writes a checkpoint, each by what `followed` makes of it, for the block."""
    names = _SAVES + (_DISTRIBUTED_SAVES if "torch.distributed.checkpoint" in sys.modules else ())
    with patched({name: followed(pkgutil.resolve_name(name)) for name in names}):
        yield
