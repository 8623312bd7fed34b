"""Reads YAML of any origin as flat keys with line numbers, in bounded time and memory.

The parser's events are followed without recursion, and without any constructor: a tag such as ``!!python/object`` is
not obeyed. Aliases are followed by reference, and what they expand to is counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from memlab.jobs.entries import UNKNOWN, Entries, parse_scalar

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
        raise ValueError(f"{name} has no keys at its top level, so it is not a job's configuration: give another file")
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
            is_plain = all(not isinstance(leaf, (dict, list)) for leaf in leaves)
            entries.add(prefix, leaves if is_plain else f"a list of {len(node.value)} entries", node.line)
        else:
            entries.add(prefix, {} if isinstance(node.value, dict) else node.value, node.line)
    return entries


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
            node = Node(parse_scalar(event.value) if event.implicit[0] else event.value, line)
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


_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_MOST_STEPS = 200


def resolve(entries: Entries) -> None:
    """Replaces ``${key}``, ``${oc.select:key,default}`` and ``${mul:a,b}`` in all values, as OmegaConf does.

    What cannot be resolved, such as ``${oc.env:HOME}``, becomes unknown.
    """
    for key in list(entries.by_key):
        entry = entries.by_key[key]
        if isinstance(entry.value, str) and "${" in entry.value:
            entries.add(key, UNKNOWN, entry.line)
            entries.add(key, _resolved(entries, key, entry.value, 0), entry.line)
        elif isinstance(entry.value, list):
            values = [
                _resolved(entries, key, part, 0) if isinstance(part, str) and "${" in part else part
                for part in entry.value
            ]
            entries.add(key, values, entry.line)


def _resolved(entries: Entries, key: str, text: str, depth: int) -> Any:
    if depth > 20:
        return UNKNOWN
    for _ in range(_MOST_STEPS):
        match = _INTERPOLATION.search(text)
        if match is None:
            return parse_scalar(text)
        value = _looked_up(entries, key, match[1].strip(), depth)
        if match.span() == (0, len(text)):
            return value
        if isinstance(value, (list, dict)) or value is None:
            return UNKNOWN
        text = text[: match.start()] + str(value) + text[match.end() :]
        if len(text) > 10_000:
            return UNKNOWN
    return UNKNOWN


def _looked_up(entries: Entries, key: str, body: str, depth: int) -> Any:
    function, colon, arguments = body.partition(":")
    parts = [part.strip() for part in arguments.split(",")]
    if not colon:
        return _value_of(entries, key, body, depth, UNKNOWN)
    if function == "oc.select":
        default = parse_scalar(parts[1]) if len(parts) > 1 else None
        return _value_of(entries, key, parts[0], depth, default)
    if function in ("mul", "add", "div", "int_div", "eval"):
        numbers = [parse_scalar(part) for part in parts]
        if len(numbers) == 2 and all(isinstance(number, (int, float)) for number in numbers):
            one, other = numbers
            if abs(one) < 2**60 and abs(other) < 2**60:
                results = {"mul": one * other, "add": one + other}
                if function in ("div", "int_div") and other:
                    return one // other if function == "int_div" else one / other
                return results.get(function, UNKNOWN)
    return UNKNOWN


def _value_of(entries: Entries, key: str, name: str, depth: int, default: Any) -> Any:
    if name.startswith("."):
        dots = len(name) - len(name.lstrip("."))
        parent = key.split(".")[: -dots or None]
        name = ".".join([*parent, name.lstrip(".")])
    entry = entries.by_key.get(name)
    if entry is None:
        return default
    if isinstance(entry.value, str) and "${" in entry.value:
        entries.add(name, UNKNOWN, entry.line)  # what refers to itself is unknown
        entries.add(name, _resolved(entries, name, entry.value, depth + 1), entry.line)
    return entries.by_key[name].value
