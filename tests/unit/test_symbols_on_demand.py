"""Where sizes are numbers, the stand-in for torch's symbolic shapes answers as torch does."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from memlab.upstream import symbols_on_demand
from memlab.upstream.hidden_modules import hidden
from memlab.upstream.patching import swapped

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
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
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
    assert not asks(module, 1)
    assert module.is_put_off
    module.is_put_off = False  # its import has begun
    assert asks(module, sympy.Integer(1))


def test_whoever_holds_a_stand_in_has_the_module_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("import time, made_up.part\ntime.sleep(0.01)\nlast = 1")
    (tmp_path / "made_up" / "part.py").write_text("import made_up")
    monkeypatch.syspath_prepend(tmp_path)
    held = symbols_on_demand._StandIn("made_up")
    monkeypatch.setattr(sys, "meta_path", [symbols_on_demand._InPlace({"made_up": held}), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "made_up", held)
    assert held.__file__ == str(tmp_path / "made_up" / "__init__.py")
    assert held.is_put_off
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: held.last, range(4))) == [1] * 4
    assert importlib.import_module("made_up.part").made_up is held is sys.modules.pop("made_up.part").made_up
    assert type(held) is ModuleType
    assert {"last", "part"} < set(dir(held))
    assert importlib.reload(held) is held
    del sys.modules["made_up.part"]
    with pytest.raises(AttributeError, match=r"^module 'made_up' has no attribute 'is_put_off'$"):
        held.is_put_off  # noqa: B018


def test_completions_of_a_stand_in_are_those_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up.py").write_text("import importlib; first = importlib.here")
    monkeypatch.syspath_prepend(tmp_path)
    held = symbols_on_demand._StandIn("made_up")
    monkeypatch.setattr(sys, "meta_path", [symbols_on_demand._InPlace({"made_up": held}), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "made_up", held)
    with swapped([(importlib, "here", 1)]):
        assert "first" in dir(held)  # a step on another thread keeps what it has replaced


def test_a_stand_in_can_be_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_again").mkdir()
    (tmp_path / "loaded_again" / "__init__.py").write_text("import loaded_again.part as part")
    (tmp_path / "loaded_again" / "part.py").write_text("import loaded_again")
    monkeypatch.syspath_prepend(tmp_path)
    held = symbols_on_demand._StandIn("loaded_again")
    monkeypatch.setattr(sys, "meta_path", [symbols_on_demand._InPlace({"loaded_again": held}), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "loaded_again", held)
    assert importlib.reload(held) is held is sys.modules.pop("loaded_again.part").loaded_again


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
