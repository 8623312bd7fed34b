"""Where sizes are numbers, the stand-in for torch's symbolic shapes answers as torch does."""

import importlib
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from memlab.upstream import symbols_on_demand
from memlab.upstream.hidden_modules import hidden

pytestmark = [pytest.mark.versions, pytest.mark.filterwarnings("ignore::FutureWarning")]

shapes, sympy = sys.modules[ShapeEnv.__module__], sys.modules["sympy"]  # by now imported
_NUMBERS = [0, 1, 2, 7]
_ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    **{
        name: [(True,), (False,)] for name in ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious")
    },
    "statically_known_true": [(True,), (False,)],
    "guarding_hint_or_throw": [(each,) for each in (*_NUMBERS, True, False)],
    "has_guarding_hint": [(each,) for each in _NUMBERS],
    "is_nested_int": [(each,) for each in _NUMBERS],
    "free_unbacked_symbols": [(3,), ((2, 3),), (torch.empty(2, 3, device="meta"),)],
    "sym_and": [each for count in (1, 2, 3) for each in product((True, False), repeat=count)],
    "sym_or": [each for count in (1, 2, 3) for each in product((True, False), repeat=count)],
    "sym_eq": [(2, 2), (2, 3), ((1, 2), [1, 2]), ([1, 2], (1, 3)), ((1,), (1, 1)), (torch.Size([2]), (2,)), ((), [])],
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts both modules off, and the imported ones back afterwards."""
    for name in (shapes.__name__, "sympy"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.fx.experimental, "symbolic_shapes", shapes)
    symbols_on_demand.put_off()
    monkeypatch.setitem(sys.modules, "sympy", sympy)  # what sympy consists of is imported already, and must stay one
    return sys.modules[shapes.__name__]


def test_of_numbers_the_stand_in_answers_as_torch_does(stand_in: Any) -> None:
    assert _ARGUMENTS.keys() == symbols_on_demand._OF_NUMBERS.keys()
    assert stand_in is torch.fx.experimental.symbolic_shapes is not shapes
    for name, cases in _ARGUMENTS.items():
        for arguments in cases if hasattr(shapes, name) else ():  # other versions of torch may not ask it
            assert getattr(stand_in, name)(*arguments) == getattr(shapes, name)(*arguments), (name, arguments)
    assert stand_in.is_put_off


def test_of_a_symbol_torch_itself_answers(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols_on_demand, "within_no_step", lambda name: sys.modules.setdefault(name, shapes))
    size = ShapeEnv().create_unbacked_symint()
    assert not stand_in.guard_or_false(size == 3)
    assert stand_in.guard_or_true(size == 3)
    assert len(stand_in.free_unbacked_symbols(torch.empty(size, 2, device="meta"))) == 1
    assert stand_in.DimDynamic is DimDynamic


def test_no_value_is_a_symbol_before_sympy_is_imported() -> None:
    module = symbols_on_demand._StandIn("sympy")
    asks = eval("lambda sympy, value: isinstance(value, sympy.Basic)", {"__name__": "torch._prims_common"})  # noqa: S307
    assert asks(module, sympy.Integer(1))  # it is imported here, so that it answers itself
    sys.modules["sympy"], imported = module, sys.modules["sympy"]
    try:
        assert not asks(module, 1)
        assert module.is_put_off
    finally:
        sys.modules["sympy"] = imported


def test_a_hidden_module_is_absent_or_imported_when_it_is_asked() -> None:
    later = ["distutils_of_memlab", "distutils_of_memlab.part"]
    with hidden(["json.made_up"], later):
        with pytest.raises(ImportError):
            importlib.import_module("json.made_up")
        package = importlib.import_module(later[0])
        assert package.part is importlib.import_module(later[1])
    assert not {*later, "json.made_up"} & sys.modules.keys()
    with hidden(["json"], ["wave"]):
        assert importlib.import_module("json").loads("1") == 1  # it was imported before
        later_wave = importlib.import_module("wave")
    assert later_wave.Error is importlib.import_module("wave").Error
