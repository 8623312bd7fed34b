"""Writes keys and values in the notation of Hydra and of YAML."""

from __future__ import annotations

import json
from typing import Any


def hydra_lines(values: dict[str, Any]) -> list[str]:
    """Writes Hydra's overrides; ``++`` adds a key or replaces it."""
    return [f"++{name}={_word(value)}" for name, value in values.items()]


def plain_lines(values: dict[str, Any]) -> list[str]:
    """Writes ``key=value``, as OmegaConf reads it from a command line."""
    return [f"{name}={_word(value)}" for name, value in values.items()]


def yaml_lines(values: dict[str, Any]) -> list[str]:
    """Writes nested YAML."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return _nested(tree, "")


def _nested(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_nested(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {_word(value, quoted=True)}")
    return lines


def _word(value: Any, *, quoted: bool = False) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return (
            "[" + ", ".join(_word(part) for part in value) + "]" if quoted else "[" + ",".join(map(_word, value)) + "]"
        )
    needs_quotes = quoted and isinstance(value, str) and ":" in value
    return json.dumps(value) if needs_quotes else str(value)
