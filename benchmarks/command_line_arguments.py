"""Prints the arguments of Megatron-LM, and of slime on top of it, as their own parsers have them, as JSON.

``python -m benchmarks.command_line_arguments MEGATRON_FOLDER [SLIME_FOLDER]`` imports the parsers of checkouts. What
they import beside torch is not needed to build a parser, so a stand-in takes its place. Each argument is printed by its
destination, as a log prints it, and by its flags, with underscores, with its default.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import typing
from unittest.mock import MagicMock

_STOOD_IN = {
    "apex", "einops", "flask", "flask_restful", "httpx", "nltk", "pydantic", "ray", "regex", "safetensors",
    "sentencepiece", "sglang", "sglang_router", "tensorboard", "tensordict", "tiktoken", "transformer_engine",
    "transformers", "triton", "wandb",
}  # fmt: skip


class _Base:
    def __init_subclass__(cls, **_: object) -> None:
        """Takes what pydantic's classes are told."""


class _StandIn(types.ModuleType):
    """A module that has every name."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = "2.16.0"

    def __getattr__(self, name: str) -> MagicMock:
        """Returns an object that can be called, has every attribute, and can be derived from."""
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=name)
        found.__mro_entries__ = lambda _: (_Base,)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] in _STOOD_IN
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: a stand-in has no code."""


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, str | float | bool | list[object] | None]:
    """Returns the default of each argument, by its destination and by its flags; of what switches off, false."""
    found = {}
    for action in parser._actions:  # argparse offers its arguments in no other way
        flags = [flag.lstrip("-").replace("-", "_") for flag in action.option_strings if flag.startswith("--")]
        default = action.default
        for name in (action.dest, *flags):
            is_off = name != action.dest and (isinstance(action, argparse._StoreFalseAction) or name.startswith("no_"))
            plain = default if isinstance(default, str | int | float | bool | list | None) else str(default)
            found[name] = False if is_off else plain
    found.pop("help", None)
    found.pop("==SUPPRESS==", None)
    return found


def main(folders: list[str]) -> None:
    """Prints the arguments of the parsers in these folders."""
    # torch looks at which of these libraries are there, so its parts that do are imported first.
    for part in ("torch.utils.flop_counter", "torch._dynamo", "torch._inductor.runtime.triton_heuristics"):
        importlib.import_module(part)
    sys.path[:0] = folders
    sys.meta_path.insert(0, _Finder())
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda function: function
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(parser)
    if len(folders) > 1:
        importlib.import_module("slime.utils.arguments").get_slime_extra_args_provider()(parser)
    print(json.dumps(arguments_of(parser)))


if __name__ == "__main__":
    main(sys.argv[1:])
