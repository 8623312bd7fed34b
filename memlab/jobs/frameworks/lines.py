"""Writes keys and values in the notation of a shell, of Hydra and of YAML."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any


def shell_words(value: Any) -> str:
    """Writes the value of a flag so that a shell changes nothing in it; of a list, a word for each part."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return " ".join(shlex.quote(str(part)) for part in parts)


def removal(flags: list[str]) -> list[str]:
    """Writes which flags of a job are to be removed, where leaving a flag out expresses the value."""
    return [f"# remove {' '.join(flags)}"] if flags else []


def hydra_lines(values: dict[str, Any]) -> list[str]:
    """Writes Hydra's overrides; ``++`` adds a key or replaces it, and Hydra 1.3.2 refuses it for a group of files."""
    return [_argument(f"{'' if name in _GROUPS else '++'}{name}=", value) for name, value in values.items()]


def plain_lines(values: dict[str, Any]) -> list[str]:
    """Writes ``key=value``, as OmegaConf reads it from a command line."""
    return [_argument(f"{name}=", value) for name, value in values.items()]


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
            lines.append(f"{indent}{name}: {_word(value, in_yaml=True)}")
    return lines


_GROUPS = ("model_engine",)
"""Of ``ppo_trainer.yaml`` (verl 0.9.1)."""
_SIMPLE = re.compile(r"[\w./@%+-]+", re.ASCII)
"""Texts that a shell, Hydra's grammar and YAML take as they are."""


def _argument(name: str, value: Any) -> str:
    """Writes one word for a shell. Simple words in brackets need no quotes there, as frameworks' own examples show."""
    word = _word(value)
    return name + (word if '"' not in word else shlex.quote(word))


def _word(value: Any, *, in_yaml: bool = False) -> str:
    """Writes a value; a text that is not simple in double quotes, which Hydra and YAML understand."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + (", " if in_yaml else ",").join(_word(part) for part in value) + "]"
    text = str(value)
    needs_quotes = isinstance(value, str) and not _SIMPLE.fullmatch(text)
    return json.dumps(text, ensure_ascii=False) if needs_quotes else text
