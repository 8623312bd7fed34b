"""Puts off the import of torch's compiler until something is compiled: a step on a CPU or on fake tensors never is.

torch imports ``torch._dynamo`` when it first calls a function that its compiler must leave alone
(``torch/_compile.py``, torch 2.11 to 2.15): operations on fake tensors, optimizers. That takes 0.6 s of processor time
and 50 MB. Until it is imported there are no compiled frames, so the compiler has nothing to leave alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.upstream.patching import originals

_NAME = "torch._dynamo"


def put_off() -> None:
    """Lets a stand-in answer for ``torch._dynamo`` until more is asked of it than to leave functions alone."""
    if _NAME not in sys.modules:
        stand_in = _StandIn(_NAME)
        stand_in.__spec__ = find_spec(_NAME)
        sys.modules[_NAME] = stand_in
        sys.meta_path.insert(0, _Submodules())


def compiled_when_called(function: Any = None, **options: Any) -> Any:
    """Stands for ``torch.compile``: compiles a function at its first call, without inductor, which needs a GPU's tools.

    Args:
        function: What to compile; None to decorate one.
        **options: As ``torch.compile`` takes them.
    """
    if function is None:
        return functools.partial(compiled_when_called, **options)

    @functools.cache
    def compiled() -> Any:
        return torch.compile(function, **{"backend": lambda graph, _: graph, **options})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return call


def within_no_step(name: str) -> ModuleType:
    """Imports a module, also within a step: it must not find replacements in place of originals."""
    with originals(), _disable_current_modes(), torch._C.DisableTorchFunction():
        return import_module(name)


class _StandIn(ModuleType):
    """``torch._dynamo`` before its import; any name that is not defined here imports it."""

    __path__: Sequence[str] = ()  # type: ignore[assignment]  # `_Submodules` finds what is below
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # for ``init_process_group``: nothing is cached yet

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        return getattr(_imported(), name)

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Ends a graph: there is none, or the caller would not have got here."""

    @staticmethod
    def disable(function: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any) -> Any:
        """Leaves a function alone once there is a compiler."""
        if function is None or wrapping:
            return _imported().disable(function, recursive, wrapping=wrapping, **options)

        @functools.cache
        def left_alone() -> Callable[..., Any]:
            left: Callable[..., Any] = _imported().disable(function, recursive, wrapping=False, **options)
            return left

        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if _is_put_off() else left_alone())(*args, **kwargs)

        return call


class _Submodules(MetaPathFinder, Loader):
    """Imports the compiler as a whole where one of its modules is asked for; that module may be among the imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module below ``torch._dynamo``; None for any other, and once that is imported."""
        if not fullname.startswith(f"{_NAME}.") or not _is_put_off():
            return None
        compiler = _imported()
        return (
            ModuleSpec(fullname, self) if fullname in sys.modules else PathFinder.find_spec(fullname, compiler.__path__)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module that has just been imported."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module has run."""


def _is_put_off() -> bool:
    return isinstance(sys.modules[_NAME], _StandIn)


def _imported() -> ModuleType:
    if _is_put_off():
        stand_in = sys.modules.pop(_NAME)
        try:
            within_no_step(_NAME)
        except BaseException:
            sys.modules[_NAME] = stand_in
            raise
    return sys.modules[_NAME]
