"""Following Python functions without running them, compared with Python, which runs them."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from memlab.jobs.python.follower import Follower
from memlab.jobs.python.package import Package
from memlab.jobs.python.values import NotFollowedError, Section, Unknown

_CLASSES = """
import copy
from copy import deepcopy
import os
import sys
from dataclasses import dataclass, field, replace

BIG = os.environ.get("BIG")
if BIG:
    WIDTH = 8
else:
    WIDTH = 4
NUMBER, TEXT = 4096, "bf16"
LENGTHS = {"16k": 16 * 1024, "64k": 65_536}

@dataclass
class Model:
    layers: int = 2
    size: int = NUMBER
    modules: list = field(default_factory=lambda: ["attn"])
    name: str = None

    def grow(self, by=1):
        self.layers += by
        return self

@dataclass
class Wide(Model):
    width: int = 8

@dataclass
class Config:
    model: Model = None
    train: dict = field(default_factory=dict)

def base(layers=2, *, name="base", **more):
    cfg = Config(model=Wide(layers=layers, name=name))
    for key, value in more.items():
        setattr(cfg.model, key, value)
    return cfg
"""
_BODIES = {
    "assignments": "cfg = base()\ncfg.model.layers = 3\ncfg.model.size = cfg.model.layers * NUMBER\nreturn cfg",
    "arguments": "return base(5, name=TEXT, width=3)",
    "branches": "cfg = base()\nif cfg.model.size > 100 and not cfg.train:\n    cfg.model.layers = 7\nelse:\n    cfg.model.layers = 8\nreturn cfg",
    "loops": "cfg = base()\nfor index, name in enumerate(['a', 'b']):\n    cfg.model.modules.append(f'{name}{index}')\nreturn cfg",
    "comprehensions": "cfg = base()\ncfg.train = {k: v // 2 for k, v in LENGTHS.items() if v > 20000}\ncfg.model.modules = [x + 1 for x in range(4) if x % 2]\nreturn cfg",
    "copies": "cfg = base()\nother = deepcopy(cfg)\nother.model.layers = 9\ncfg.model.width = other.model.layers\nreturn cfg",
    "replacing": "cfg = base()\ncfg.model = replace(cfg.model, layers=4)\nreturn cfg",
    "sharing": "cfg = base()\nmodel = cfg.model\nmodel.layers = 6\nreturn cfg",
    "methods": "cfg = base()\ncfg.model.grow().grow(by=3)\nreturn cfg",
    "getattr": "cfg = base()\ncfg.model.width = getattr(cfg.model, 'layers', 0) + getattr(cfg, 'absent', 5)\nreturn cfg",
    "isinstance": "cfg = base()\nif not isinstance(cfg.model, str) and isinstance(TEXT, (str, int)):\n    cfg.model.layers = 1\nreturn cfg",
    "unpacking": "cfg = base()\ncfg.model.layers, cfg.model.size = divmod(17, 5)\nreturn cfg",
    "dicts": "cfg = base()\ncfg.train = {**LENGTHS, 'x': 1}\ncfg.train.update({'y': 2})\ncfg.train['z'] = cfg.train.pop('x')\nreturn cfg",
    "closures": "factor = 3\ndef inner(value):\n    return value * factor\ncfg = base()\ncfg.model.layers = inner(5)\nreturn cfg",
    "lambdas": "pick = lambda a, b=2: a if a > b else b\ncfg = base()\ncfg.model.layers = pick(1)\nreturn cfg",
    "conditional": "cfg = base()\ncfg.model.name = 'yes' if cfg.model.layers == 2 else 'no'\nreturn cfg",
    "defaults": "cfg = Config(Model())\nreturn cfg",
    "none": "cfg = base()\ncfg.model.name = None\ncfg.model.layers = (cfg.model.name or 'four') == 'four'\nreturn cfg",
    "slices": "cfg = base()\ncfg.model.modules = [1, 2, 3, 4][1:-1] + ['x'] * 2\nreturn cfg",
    "texts": "cfg = base()\ncfg.model.name = ','.join('A-B-C'.lower().split('-'))\nreturn cfg",
    "augmented": "cfg = base()\ncfg.model.layers += 3\ncfg.model.layers *= 2\nreturn cfg",
    "changing in place": "cfg = base()\nsame, names = cfg.model.modules, {'a': 1}\nsame += ['x']\ncfg.train = names\nnames |= {'b': 2}\nreturn cfg",
    "the else of a loop": "cfg = base()\nfor _ in range(2):\n    pass\nelse:\n    cfg.model.layers = 6\nreturn cfg",
    "classes of numbers": "cfg = base()\ncfg.model.layers = 3 if isinstance(True, int) else 4\nreturn cfg",
    "early return": "cfg = base()\nif cfg.model.layers:\n    return cfg\ncfg.model.layers = 0\nreturn cfg",
    "chains": "cfg = base()\ncfg.model.layers = cfg.model.size = 1 < 2 <= 2\nreturn cfg",
    "deleting": "cfg = base()\nvalue = 3\ncfg.model.layers = value\ndel value\nreturn cfg",
}
_HOSTILE = {
    "a machine": "import os\ncfg = base()\nif os.environ.get('X'):\n    cfg.model.layers = 3\nreturn cfg",
    "a machine's constant": "cfg = base()\nif BIG:\n    cfg.model.layers = 3\nreturn cfg",
    "a machine's absent constant": "cfg = base()\nif BIG is not None:\n    cfg.model.layers = 3\nreturn cfg",
    "another package's constant": "cfg = base()\nif sys.flags.debug:\n    cfg.model.layers = 3\nreturn cfg",
    "a constant below a branch": "cfg = base()\nif WIDTH == 8:\n    cfg.model.layers = 3\nreturn cfg",
    "an attribute by its name": "setattr(os.environ.get('X'), 'layers', 3)\nreturn base()",
    "a file": "cfg = base()\nfor line in open('x'):\n    cfg.model.layers = 3\nreturn cfg",
    "no end": "def again():\n    return again()\nreturn again()",
    "many steps": "cfg = base()\nfor a in range(9999):\n    for b in range(9999):\n        cfg.model.layers = a + b\nreturn cfg",
    "many elements": "return 'x' * 10 ** 9",
    "many numbers": "return [x for x in range(10 ** 9)]",
    "a loop": "while True:\n    pass",
    "raises": "raise ValueError('no')",
    "a fault": "return [1][5]",
    "another method": "return 'x'.encode().hex()",
}


def _followed(body: str, folder: Path) -> Any:
    (folder / "made").mkdir()
    (folder / "made/recipes.py").write_text(_source(body))
    return Follower(Package(folder)).call_named("made.recipes", "recipe")


def _source(body: str) -> str:
    return _CLASSES + "\ndef recipe():\n" + "".join(f"    {line}\n" for line in body.splitlines())


def _values(one: Any) -> Any:
    if isinstance(one, Section):
        return {name: _values(value) for name, value in (one.defaults | one.values).items()}
    return {name: _values(value) for name, value in vars(one).items()} if hasattr(one, "__dict__") else one


@pytest.mark.parametrize("name", _BODIES)
def test_a_followed_function_returns_what_python_returns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made")
    monkeypatch.setitem(sys.modules, "made", module)  # where dataclasses look for annotations
    exec(_source(_BODIES[name]), module.__dict__)  # noqa: S102  the text is this file's
    assert _values(_followed(_BODIES[name], tmp_path)) == _values(module.recipe())


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_cannot_be_known_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFollowedError):
        _followed(_HOSTILE[name], tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        "os.cpu_count() * 2",
        "BIG",
        "WIDTH",
        "BIG or 4",
        "LENGTHS.get(BIG, 4)",
        "getattr(Config(model=BIG), 'model', 4)",
        "f'{4:02d}'",
        "os.PathLike(4)",
    ],
)
def test_what_depends_on_the_machine_is_unknown_where_no_branch_needs_it(value: str, tmp_path: Path) -> None:
    made = _followed(f"cfg = base()\ncfg.model.layers = {value}\nreturn cfg", tmp_path)
    assert isinstance(made.get("model").get("layers"), Unknown)
    assert made.get("model").get("name") == "base"
