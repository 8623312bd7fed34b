"""Reads YAML of any origin as flat keys with line numbers, in bounded time and memory.

The parser's events are followed without recursion, and without any constructor: a tag such as ``!!python/object`` is
not obeyed. Aliases are followed by reference, and what they expand to is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from memlab.config.pipeline_layout import FIELD as PIPELINE_LAYOUT
from memlab.config.pipeline_layout import text_of_layout
from memlab.jobs.entries import Entries, NoJobError, parse_scalar

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_NODES = 200_000
_MOST_KEYS = 20_000
_LONGEST_KEY = 500
"""With the keys that hold it; the keys of a mapping repeat it."""
_DEEPEST = 64


@dataclass(slots=True)
class Node:
    """A mapping, a list or a scalar of a file."""

    value: Any
    """Of a mapping, a dict by key; of a list, the nodes; else the scalar."""
    line: int


ReadFile = Callable[[str, int], Node | None]
"""Reads a file that a line of a job names; None, after a warning, where it is not there."""


def read_yaml(text: str, name: str) -> Node:
    """Reads the first document of a file.

    Raises:
        ValueError: If it is not YAML, has no mapping at its root, or is larger or deeper than any real job's.
    """
    try:
        root = _compose(text, name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{name}{line}: it is not valid YAML ({problem}): correct it") from error
    if root is None or not isinstance(root.value, dict):
        raise NoJobError(f"{name} has no keys at its top level, so it is not a job's configuration: give another file")
    return root


def flat(root: Node, name: str) -> Entries:
    """Returns the leaves of a mapping under dotted keys; lists of scalars are leaves too.

    Raises:
        ValueError: If aliases make more keys of it than any real file has.
    """
    entries = Entries()
    stack: list[tuple[str, Node, int]] = [("", root, 0)]
    steps = 0
    while stack:
        prefix, node, depth = stack.pop()
        steps += 1
        if len(prefix) > _LONGEST_KEY:
            raise ValueError(
                f"{name}, line {node.line}: a key has more than {_LONGEST_KEY} characters: give another file"
            )
        if steps > 2 * _MOST_KEYS or len(entries.by_key) > _MOST_KEYS or depth > _DEEPEST:
            raise ValueError(f"{name}, line {node.line}: it has more than {_MOST_KEYS:,} keys: give another file")
        if isinstance(node.value, dict) and node.value:
            keys, num_looked_at = _merged(node)
            children = list(keys.items())
            steps += num_looked_at
            stack += [(f"{prefix}.{key}" if prefix else key, child, depth + 1) for key, child in reversed(children)]
        elif isinstance(node.value, list):
            leaves = [child.value for child in node.value[:1000]]
            if prefix.endswith(PIPELINE_LAYOUT):  # the only key with lists of lists, which have a text
                leaves = [[one.value for one in leaf[:1000]] if isinstance(leaf, list) else leaf for leaf in leaves]
                try:
                    text = text_of_layout(leaves)
                except ValueError as error:
                    raise ValueError(
                        f"{name}, line {node.line}: {prefix} is a list of {len(leaves)} entries, {error}: correct it"
                    ) from error
                entries.add(prefix, text, node.line)
                continue
            is_plain = all(not isinstance(leaf, (dict, list)) for leaf in leaves)
            entries.add(prefix, leaves if is_plain else f"a list of {len(node.value)} entries", node.line)
        else:
            entries.add(prefix, {} if isinstance(node.value, dict) else node.value, node.line)
    return entries


def children_of(node: Node) -> dict[str, Node]:
    """Returns a mapping's keys, with those that ``<<`` brings."""
    return _merged(node)[0]


def texts_of(node: Node | None) -> dict[str, str]:
    """Returns a mapping's scalars as texts, such as variables of the environment; what is none is left out."""
    children = node.value.items() if node is not None and isinstance(node.value, dict) else ()
    return {key: str(child.value) for key, child in children if not isinstance(child.value, (dict, list))}


def _merged(node: Node) -> tuple[dict[str, Node], int]:
    """Returns a mapping's keys, with those of the mappings that ``<<`` names where it has none of its own.

    Of several mappings the first counts (https://yaml.org/type/merge.html). The number is what it looked at for that.
    """
    if "<<" not in node.value:
        values: dict[str, Node] = node.value
        return values, 0
    merged: dict[str, Node] = {}
    pending, seen, num_looked_at = [node], set[int](), 0
    while pending:
        mapping = pending.pop()
        num_looked_at += 1
        if id(mapping) in seen or not isinstance(mapping.value, dict):
            continue
        seen.add(id(mapping))
        for key, child in mapping.value.items():
            if key != "<<":
                merged.setdefault(key, child)
        others = mapping.value.get("<<")
        if others is not None:
            pending += reversed(others.value) if isinstance(others.value, list) else [others]
    return merged, num_looked_at + len(merged)


def _compose(text: str, name: str) -> Node | None:
    composer = _Composer()
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        line = event.start_mark.line + 1
        if count > _MOST_NODES or len(composer.open_nodes) > _DEEPEST:
            raise ValueError(
                f"{name}, line {line}: it has more than {_MOST_NODES:,} nodes or is nested deeper than {_DEEPEST} "
                "levels: give a job's configuration"
            )
        if isinstance(event, yaml.DocumentEndEvent):
            break
        if isinstance(event, yaml.AliasEvent) and event.anchor not in composer.anchors:
            raise ValueError(f"{name}, line {line}: the alias *{event.anchor} has no anchor before it: correct it")
        composer.add(event, line)
    return composer.root


class _Composer:
    """Makes a tree of a parser's events."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.open_nodes: list[tuple[Node, list[str]]] = []
        self.anchors: dict[str, Node] = {}

    def add(self, event: Any, line: int) -> None:
        """Adds what an event begins, is, or ends."""
        if isinstance(event, yaml.AliasEvent):
            self._place(self.anchors[event.anchor])
            return
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            node, _ = self.open_nodes.pop()
            self._place(node)
            return
        if isinstance(event, yaml.ScalarEvent):
            is_plain = event.implicit[0] or event.tag in _TAGS_OF_VALUES  # a tag counts more than quotes
            node = Node(_scalar(event.value) if is_plain else event.value, line)
            self._place(node)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)
            self.open_nodes.append((node, []))
        else:
            return
        if event.anchor is not None:
            self.anchors[event.anchor] = node

    def _place(self, node: Node) -> None:
        if not self.open_nodes:
            self.root = self.root or node
            return
        parent, keys = self.open_nodes[-1]
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif keys:
            parent.value[keys.pop()] = node
        else:
            keys.append(str(node.value) if not isinstance(node.value, (dict, list)) else "?")


_TAGS_OF_VALUES = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))
_INTEGER = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|(?:0|[1-9][0-9_]*))")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?)"
)
_TRUTH = {"yes": True, "on": True, "no": False, "off": False}
_LONGEST_NUMBER = 30


def _scalar(text: str) -> Any:
    """Returns what a scalar without quotes stands for in YAML 1.1, with the floats of OmegaConf 2.3's loader."""
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        digits = text.replace("_", "").lstrip("+-").lower()
        base = {"0b": 2, "0x": 16}.get(digits[:2], 8 if digits[:1] == "0" else 10)
        number = int(digits or "0", base) if digits not in ("0b", "0x") else 0
        return -number if text[0] == "-" else number
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return parse_scalar(text) if not text[:1].isdigit() else text
