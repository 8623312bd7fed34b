"""Puts off the import of sympy until a size is a symbol: on a CPU and on fake tensors sizes are numbers.

torch computes shapes in Python (``torch/_refs``, ``torch/_meta_registrations.py``), which asks
``torch.fx.experimental.symbolic_shapes`` about each (torch 2.11 to 2.15). That imports sympy: a tenth of the processor
time of a short command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from threading import Lock
from types import ModuleType
from typing import Any

import torch

from memlab.upstream.compiler_on_demand import within_no_step

_SHAPES, _SYMPY = "torch.fx.experimental.symbolic_shapes", "sympy"
_lock = Lock()


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
    stand_ins = {name: _StandIn(name) for name in (_SHAPES, _SYMPY)}
    sys.modules.update(stand_ins)
    sys.meta_path.insert(0, _InPlace(stand_ins))
    package, _, name = _SHAPES.rpartition(".")
    setattr(sys.modules[package], name, sys.modules[_SHAPES])


class _StandIn(ModuleType):
    """A module before its import, which makes this object the module: whoever holds it has no second one."""

    is_put_off = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        spec = PathFinder.find_spec(name, getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", None))
        if spec is not None:
            vars(self).update({key: value for key, value in vars(module_from_spec(spec)).items() if key != "__path__"})

    def __getattr__(self, name: str) -> Any:
        asks_package = self.is_put_off and self.__name__ == _SYMPY and name in ("__path__", "__all__", "__version__")
        if name.startswith("__") and not asks_package:
            raise AttributeError(name)  # `inspect` asks every module for such names
        if self.is_put_off and self.__name__ == _SHAPES and name in _OF_NUMBERS:
            return _of_numbers(self, name)
        if self.is_put_off and name == "Basic" and sys._getframe(1).f_globals.get("__name__") == "torch._prims_common":
            return _NothingYet  # it asks of a number whether it is a symbol
        module = self.imported()
        if module is self and name not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(module, name)

    def __dir__(self) -> list[str]:
        return sorted(vars(self.imported()))

    def imported(self) -> ModuleType:
        """Returns the module when its import has ended, or as far as it is if this thread imports it."""
        with _lock:
            if self.is_put_off:
                self.is_put_off = False
                if sys.modules.get(self.__name__) is self:
                    del sys.modules[self.__name__]
        if self.__name__ == _SHAPES:
            return within_no_step(_SHAPES)
        return import_module(
            self.__name__
        )  # it imports nothing that a step replaces, and one may run on another thread


class _InPlace(MetaPathFinder, Loader):
    """Imports into a stand-in, with the locks of Python's import: other threads wait until it has ended."""

    def __init__(self, stand_ins: dict[str, _StandIn]) -> None:
        self._stand_ins = dict(stand_ins)
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module that has a stand-in and is not imported yet."""
        if fullname not in self._stand_ins:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
            self._stand_ins[fullname].is_put_off = False
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the stand-in."""
        return self._stand_ins[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Imports the module, as which it looks from now on like any other."""
        name, spec = module.__name__, module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loaders[name]
        self._loaders[name].exec_module(module)
        del self._stand_ins[name], vars(module)["is_put_off"]
        module.__class__ = ModuleType


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
