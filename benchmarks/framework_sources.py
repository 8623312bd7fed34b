"""Reads the configuration classes of a framework from its source: importing it would need the libraries of GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """A default that is no literal, such as ``torch.float32`` or a call, as the source has it."""

    source: str

    def __str__(self) -> str:
        return self.source


@dataclass(slots=True)
class Sources:
    """Folders that hold packages, each as it would stand on Python's path."""

    folders: Sequence[Path]
    _modules: dict[str, tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]] = field(default_factory=dict)

    def module(self, name: str) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]:
        """Returns the classes of a module, and the module and the name that each of its imported names has there."""
        if name not in self._modules:
            paths = [folder / name.replace(".", "/") for folder in self.folders]
            files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
            found = next((file for file in files if file.is_file()), None)
            tree = ast.parse("" if found is None else found.read_text(encoding="utf-8"))
            nodes = list(ast.walk(tree))
            is_package = found is not None and found.name == "__init__.py"
            imported = {
                alias.asname or alias.name: (_origin(name, node, is_package=is_package), alias.name)
                for node in nodes
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            self._modules[name] = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, imported
        return self._modules[name]

    def keys(
        self,
        module: str,
        name: str,
        prefix: str = "",
        skipped: Sequence[str] = (),
        around: tuple[tuple[str, str], ...] = (),
    ) -> dict[str, Any]:
        """Returns the fields of a class with their defaults, and in place of a field of another class its fields.

        Args:
            module: Where the class is, such as ``verl.workers.config.engine``.
            name: Of the class.
            prefix: Before each key, with a dot at its end.
            skipped: Keys whose own classes are not entered.
            around: The classes that hold this one, which a field that names one of them does not enter again.
        """
        keys: dict[str, Any] = {}
        for owner, one in self._assignments(module, name):
            key = f"{prefix}{one.target.id}"  # type: ignore[union-attr]  # `_assignments` yields names only
            inner = [] if key in skipped else [other for other in self._classes_in(owner, one) if other not in around]
            if not inner:
                keys[key] = _default(one.value)
            for inner_module, inner_name in inner:
                keys |= self.keys(inner_module, inner_name, f"{key}.", skipped, (*around, (module, name)))
        return keys

    def _assignments(self, module: str, name: str) -> Iterator[tuple[str, ast.AnnAssign]]:
        """Yields the fields of a class and of those that it is derived from, base classes first.

        The last base class comes first, since a dataclass takes a default from the first base class that has it.
        """
        found = self.find(module, name)
        if found is None:
            return
        owner, node = found
        for base in reversed(node.bases):
            yield from self._assignments(owner, ast.unparse(base).rpartition(".")[2].partition("[")[0])
        for one in node.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(one.annotation):
                yield owner, one

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Returns the module that defines a class, and the class; follows ``from … import … as …``."""
        for _ in range(20):  # more than any chain of imports
            classes, imported = self.module(module)
            if name in classes:
                return module, classes[name]
            if name not in imported:
                return None
            module, name = imported[name]
        return None

    def _classes_in(self, module: str, one: ast.AnnAssign) -> Iterator[tuple[str, str]]:
        """Yields the classes with fields that an annotation names, also in quotes, in `Optional` and in unions."""
        for node in ast.walk(one.annotation):
            text = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and (found := self.find(module, text)) is not None:
                owner, cls = found
                if any(True for _ in self._assignments(owner, cls.name)):
                    yield owner, cls.name


def _origin(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """Returns the module that an import names, also where it counts from the own one by dots."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    kept = parents[: len(parents) - node.level + is_package]
    return ".".join([*kept, node.module] if node.module else kept)


def _default(node: ast.expr | None) -> Any:
    """Returns a field's default as a value, or the source of it where it is computed."""
    if node is None:
        return Text("required")
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = given.get("default_factory")
        if "default" in given:
            return _default(given["default"])
        if isinstance(factory, ast.Lambda):
            return _default(factory.body)
        text = "required" if factory is None else ast.unparse(factory)
        return {"list": [], "dict": {}}.get(text, Text(text))
    if isinstance(node, ast.BinOp):
        left, right = _default(node.left), _default(node.right)
        operations = {ast.Mult: lambda: left * right, ast.Pow: lambda: left**right}
        return operations.get(type(node.op), lambda: Text(ast.unparse(node)))()
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Text(ast.unparse(node))
