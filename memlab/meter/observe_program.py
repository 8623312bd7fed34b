"""A dispatch mode for any program, which may have tensors of its own classes and leave the mode on another thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from memlab.meter.observers import ObserveResults

_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: list[Any] = []
"""Calls that the main thread has yet to make: Python does not keep them."""


class ObserveProgram(ObserveResults):
    """`ObserveResults` for a program that torch may compile, with the operations inside tensors that are wrappers.

    torch keeps dispatch modes per thread, and only that thread can take one off. A generator that has entered the mode
    may be closed, or collected as garbage, on another one. From then on the mode reports nothing. The main thread takes
    it off before its next Python call; on another thread it stays, without a report, as long as the thread.
    """

    def __enter__(self) -> Any:
        self._thread, self._is_over = threading.current_thread(), False
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        if threading.current_thread() is not self._thread:
            if self._thread is threading.main_thread():
                _call_on_main_thread(self._take_off)
            _push_mode(self)  # so that torch, which restores its flags here, takes off this mode and no other
        elif _get_current_dispatch_mode() is not self:
            self._take_off()
            return
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile under the mode, which is off meanwhile; else ``fullgraph=True`` fails (torch 2.13)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_over:
            return func(*args, **(kwargs or {}))
        # While this runs, the mode is off. A wrapper's own operations are seen if torch asks the wrapper next, with the
        # mode on; not if the program has a mode of its own, which torch would then pass over.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types) and not torch._C._len_torch_dispatch_stack():
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _take_off(self) -> bool:
        """Takes the mode off this thread; returns False while it is off for the moment, because it runs.

        The program may have entered modes since, and not left them yet: they stay.
        """
        above: list[Any] = []
        try:
            while torch._C._len_torch_dispatch_stack():
                mode = _pop_mode()
                if mode is self:
                    break
                above.append(mode)
            else:
                return False
        finally:
            for mode in reversed(above):
                _push_mode(mode)
        if above:  # torch's flags become what they were before this mode when the next one is left
            for name, flags in vars(self).items():
                if name.startswith("old_") and flags:
                    vars(above[-1])[name][-1] = flags.pop()
        return True


def _call_on_main_thread(call: Callable[[], bool]) -> None:
    """Makes the main thread call something between two of its Python instructions, again until it returns True."""

    def make(_: Any) -> int:
        if call():
            _pending.remove(pending)
        else:
            ctypes.pythonapi.Py_AddPendingCall(pending, None)
        return 0

    pending = _PENDING_CALL(make)
    _pending.append(pending)
    ctypes.pythonapi.Py_AddPendingCall(pending, None)
