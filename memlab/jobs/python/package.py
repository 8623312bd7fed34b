"""The modules of a Python package on disk, found and parsed by their names; none is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memlab.jobs.python.values import NotFollowedError

_MOST_BYTES = 2 * 2**20


@dataclass(slots=True)
class Package:
    """The folder that holds a package, and the modules of it that were asked for."""

    root: Path
    """The folder with the package's first folder, such as ``src``."""
    _parsed: dict[str, tuple[tuple[Path, int, int], ast.Module | None]] = field(default_factory=dict)
    """By a module's name, its syntax, with what tells whether its file has changed since."""

    def file_of(self, module: str) -> Path | None:
        """Returns the file of a module, or None if the package does not have it."""
        path = self.root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def has(self, module: str) -> bool:
        """Whether a module is the package's own."""
        return self.file_of(module) is not None

    def module(self, name: str) -> ast.Module:
        """Returns the syntax of a module.

        Raises:
            NotFollowedError: If there is none, or if it cannot be parsed.
        """
        file = self.file_of(name)
        if file is None:
            raise NotFollowedError(f"the module {name} is not in {self.root}")
        stat = file.stat()
        stamp = (file, stat.st_mtime_ns, stat.st_size)
        if name not in self._parsed or self._parsed[name][0] != stamp:
            try:
                text = file.read_bytes()[: _MOST_BYTES + 1]
                self._parsed[name] = (stamp, None if len(text) > _MOST_BYTES else ast.parse(text))
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._parsed[name] = (stamp, None)
        found = self._parsed[name][1]
        if found is None:
            raise NotFollowedError(f"the module {name} cannot be read as Python")
        return found

    def statements(self, module: str) -> Iterator[ast.stmt]:
        """Yields what a module executes when it is imported, also below ``if`` and ``try``; the last first."""
        waiting = list(self.module(module).body)
        while waiting:
            one = waiting.pop()
            if isinstance(one, (ast.If, ast.Try, ast.With)):
                waiting += one.body
            yield one

    def imported_from(self, module: str, one: ast.ImportFrom) -> str:
        """Returns the module from which a statement imports, also where it is relative."""
        if not one.level:
            return one.module or ""
        file = self.file_of(module)
        parts = module.split(".")
        is_package = file is not None and file.name == "__init__.py"
        base = parts[: len(parts) - one.level + is_package]
        return ".".join([*base, one.module] if one.module else base)

    def exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` takes a name, as far as the module lists them."""
        for one in self.statements(module):
            targets = one.targets if isinstance(one, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                listed = one.value if isinstance(one, ast.Assign) else None
                if isinstance(listed, (ast.List, ast.Tuple)):
                    return any(isinstance(part, ast.Constant) and part.value == name for part in listed.elts)
        return not name.startswith("_")

    def names_in(self, module: str) -> Iterator[str]:
        """Yields the names that a module defines or imports; those of ``from x import *`` too."""
        for one in self.statements(module):
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                yield one.name
            elif isinstance(one, ast.ImportFrom):
                origin = self.imported_from(module, one)
                for alias in one.names:
                    if alias.name != "*":
                        yield alias.asname or alias.name
                    elif self.has(origin):
                        yield from (name for name in self.names_in(origin) if self.exports(origin, name))
