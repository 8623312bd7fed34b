"""Puts off the import of sympy until a size is a symbol: on a CPU and on fake tensors sizes are numbers.

torch computes shapes in Python (``torch/_refs``, ``torch/_meta_registrations.py``), which asks
``torch.fx.experimental.symbolic_shapes`` about each (torch 2.11 to 2.15). That imports sympy: a tenth of the processor
time of a short command. The stand-ins are no whole modules to someone who looks at them, so this is for processes that
run no code but memlab's (`memlab.own_process`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from memlab.upstream.compiler_on_demand import within_no_step

_SHAPES, _SYMPY = "torch.fx.experimental.symbolic_shapes", "sympy"


def _same(value: Any) -> Any:
    return value


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _same),
    **dict.fromkeys(("guarding_hint_or_throw", "statically_known_true"), _same),
    "has_guarding_hint": lambda value: True,
    "is_nested_int": lambda value: False,
    "free_unbacked_symbols": lambda value: set(),
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "sym_eq": lambda first, second: (
        tuple(first) == tuple(second) if isinstance(first, (tuple, list)) else first == second
    ),
}
"""What the functions of `_SHAPES` answer where nothing is a symbol."""


def put_off() -> None:
    """Lets stand-ins answer for both modules until one of them is asked about a symbol, or for anything else."""
    if _SYMPY in sys.modules or _SHAPES in sys.modules:
        return
    specs = {name: find_spec(name) for name in (_SHAPES, _SYMPY)}
    for name, spec in specs.items():
        sys.modules[name] = _StandIn(name)
        sys.modules[name].__spec__ = spec
    package, _, name = _SHAPES.rpartition(".")
    setattr(sys.modules[package], name, sys.modules[_SHAPES])


class _StandIn(ModuleType):
    """A module before its import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (self.__name__ == _SHAPES or name not in ("__path__", "__all__", "__version__")):
            raise AttributeError(name)  # `inspect` asks every module for its file
        if self.__name__ == _SHAPES and name in _OF_NUMBERS:
            return _of_numbers(self, name)
        if name == "Basic" and sys._getframe(1).f_globals.get("__name__") == "torch._prims_common" and self.is_put_off:
            return _NothingYet  # it asks of a number whether it is a symbol
        return getattr(self.imported(), name)

    @property
    def is_put_off(self) -> bool:
        """Whether the module is not imported yet."""
        return sys.modules.get(self.__name__) is self

    def imported(self) -> ModuleType:
        """Returns the module itself."""
        if self.is_put_off:
            del sys.modules[self.__name__]
        return within_no_step(self.__name__)


class _NothingYet:
    """Takes the place of ``sympy.Basic`` while there is no object of it."""


def _of_numbers(module: _StandIn, name: str) -> Callable[..., Any]:
    answer = _OF_NUMBERS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        return answer(*args) if all(map(_is_plain, args)) else getattr(module.imported(), name)(*args, **kwargs)

    return call


def _is_plain(value: Any) -> bool:
    """Whether a value has no symbol."""
    if isinstance(value, torch.Tensor):
        return not value._has_symbolic_sizes_strides
    if isinstance(value, (tuple, list)):
        return all(type(each) is int for each in value)
    return type(value) in (bool, int)
