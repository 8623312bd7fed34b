"""Writes the values of Megatron-Bridge's recipes that memlab reads, from the source of the named version.

``python -m benchmarks.bridge_recipes`` downloads the package, follows the assignments of each recipe function without
running it, and writes ``memlab/jobs/frameworks/bridge_recipes.json``: the recipes of the models that memlab knows, with
the keys that its tables have. ``--check`` compares instead, and exits with 1 if something differs. A function that does
more than assign (a loop, a model of its own class) is left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.framework_defaults import packages_in
from memlab.config.architectures import published_architecture
from memlab.jobs.frameworks.bridge import BRIDGE
from memlab.jobs.frameworks.bridge_recipes import RECIPES, VERSION

_SECTIONS = ("model", "train", "optimizer", "ddp", "dataset", "comm_overlap", "mixed_precision", "peft")


class NotFollowedError(Exception):
    """A statement that is no assignment of a plain value."""


@dataclass(slots=True)
class Package:
    """The recipes of a package: their functions and constants by module."""

    root: Path
    _modules: dict[str, ast.Module] = field(default_factory=dict)

    def module(self, name: str) -> ast.Module:
        """Returns the syntax of a module of the package."""
        if name not in self._modules:
            path = self.root / name.replace(".", "/")
            file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
            self._modules[name] = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
        return self._modules[name]

    def origin(self, module: str, name: str) -> tuple[str, str]:
        """Returns where an imported name is from."""
        for node in ast.walk(self.module(module)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return node.module or "", alias.name
        return module, name

    def values(self, module: str, name: str) -> dict[str, Any]:
        """Returns what a recipe function sets, by key.

        Raises:
            NotFollowedError: If it does more than assign.
        """
        module, name = self.origin(module, name)
        function = next(
            (one for one in self.module(module).body if isinstance(one, ast.FunctionDef) and one.name == name), None
        )
        if function is None:
            raise NotFollowedError
        values: dict[str, Any] = {}
        for statement in function.body:
            if isinstance(statement, ast.If) and "peft" in ast.unparse(statement):
                values["peft"] = "lora"
                for one in statement.body:  # peft_cfg.dim = 8
                    if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Attribute):
                        values[f"peft.{one.targets[0].attr}"] = ast.literal_eval(one.value)
            elif isinstance(statement, ast.Expr) and "apply_flex_dispatcher_backend(cfg" in ast.unparse(statement):
                values |= {"model.moe_token_dispatcher_type": "flex"}
            elif isinstance(statement, ast.Assign):
                self._assign(module, statement, values)
            elif not isinstance(statement, (ast.Expr, ast.Return)):
                raise NotFollowedError
        return values

    def _assign(self, module: str, statement: ast.Assign, values: dict[str, Any]) -> None:
        target, value = ast.unparse(statement.targets[0]), statement.value
        key = target.removeprefix("cfg.")
        if target == "cfg" and isinstance(value, ast.Call) and not value.args:
            name = ast.unparse(value.func)
            if name == "ConfigContainer":
                values |= dict(self._arguments(module, value, ""))
            elif not value.keywords:
                values |= self.values(module, name)
            else:
                raise NotFollowedError
        elif key == "model" and "AutoBridge.from_hf_pretrained" in ast.unparse(value):
            names = [one.args[0] for one in ast.walk(value) if isinstance(one, ast.Call) and one.args]
            if len(names) != 1:
                raise NotFollowedError
            values["model.hf_model_id"] = self._plain(module, names[0])
        elif key == "mixed_precision" or (key == "comm_overlap" and isinstance(value, ast.Call)):
            values |= dict(self._arguments(module, value, f"{key}."))
            if key == "mixed_precision":
                values[key] = ast.unparse(value.func) if isinstance(value, ast.Call) else self._plain(module, value)
        elif key == "model":
            raise NotFollowedError
        elif target.startswith("cfg.") and key.partition(".")[0] in _SECTIONS and "." in key:
            values[key] = self._plain(module, value)

    def _arguments(self, module: str, value: ast.expr, prefix: str) -> Iterator[tuple[str, Any]]:
        for keyword in value.keywords if isinstance(value, ast.Call) else ():
            key = f"{prefix}{keyword.arg}"
            if isinstance(keyword.value, ast.Call):
                yield from self._arguments(module, keyword.value, f"{key}.")
            elif key.partition(".")[0] in _SECTIONS:
                yield key, self._plain(module, keyword.value)

    def _plain(self, module: str, node: ast.expr) -> Any:
        text = ast.unparse(node)
        if text.startswith("torch."):
            return text.removeprefix("torch.")
        if isinstance(node, ast.Name):
            for one in self.module(module).body:
                if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == text:
                    return self._plain(module, one.value)
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None


def recipes(root: Path) -> dict[str, dict[str, Any]]:
    """Returns the values of the recipes that memlab can use, by the names of their functions and aliases."""
    package, found = Package(root), {}
    for file in sorted((root / "megatron/bridge/recipes").rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        names = [one.name for one in package.module(module).body if isinstance(one, ast.FunctionDef)]
        names += [
            alias.asname
            for one in package.module(module).body
            if isinstance(one, ast.ImportFrom)
            for alias in one.names
            if alias.asname
        ]
        for name in names:
            try:
                values = package.values(module, name) if name.endswith("_config") else {}
            except NotFollowedError:
                continue
            if published_architecture(str(values.get("model.hf_model_id"))) is not None:
                found[name] = _read(values)
    return dict(sorted(found.items()))


_READ = BRIDGE.names() - {"mixed_precision"} | {"peft", "model.sequence_parallel"}
"""Of a recipe for mixed precision, the fields are written; memlab reads those of another one by its name."""


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what memlab reads of a recipe's values."""
    name = values.get("mixed_precision")
    kept = {key: value for key, value in sorted(values.items()) if key in _READ}
    if name == "bf16_mixed":
        return {"mixed_precision.bf16": True, "mixed_precision.grad_reduce_in_fp32": True} | kept
    return kept if name is None else {"mixed_precision": name} | kept


def main(arguments: list[str] | None = None) -> int:
    """Writes the file, or compares it; returns 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        (root,) = packages_in(Path(folder), (f"megatron-bridge=={VERSION}",))
        found = recipes(root)
    text = json.dumps(found, indent=1) + "\n"
    if given.check:
        differing = sorted(name for name in {*found, *RECIPES} if found.get(name) != RECIPES.get(name))
        print(f"megatron-bridge {VERSION}: {len(found)} recipes, {len(differing)} differ", *differing, sep="\n  ")
        return 1 if differing else 0
    (Path(__file__).parents[1] / "memlab/jobs/frameworks/bridge_recipes.json").write_text(text)
    print(f"megatron-bridge {VERSION}: {len(found)} recipes, {len(text):,} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
