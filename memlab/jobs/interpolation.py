"""Resolves the interpolations of a configuration, such as ``${trainer.nnodes}`` and ``${oc.env:NNODES,4}``.

The rules are those of OmegaConf 2.3 ("Variable interpolation" and "Resolvers" in its documentation); the resolvers
``add``, ``mul``, ``div`` and ``max`` are those that NeMo-RL registers (`nemo_rl/utils/config.py`). What memlab does not
know, such as a variable of the job's machine and another program's resolver, becomes unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from memlab.jobs.entries import UNKNOWN, Entries, parents_of, parse_scalar, parse_value

_RESOLVER = re.compile(r"\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*:(?!:)(.*)", re.DOTALL)
_LONGEST = 10_000
_DEEPEST = 20
_MOST_KEYS = 20_000
_LARGEST = 2**60
_OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda one, other: one + other,
    "mul": lambda one, other: one * other,
    "div": lambda one, other: one / other if other else UNKNOWN,
    "int_div": lambda one, other: one // other if other else UNKNOWN,
    "max": max,
}


def resolve(entries: Entries, variables: dict[str, str] | None = None) -> None:
    """Replaces the interpolations in all values.

    Args:
        entries: They are changed; a warning names each default that stands for a variable of the job's machine.
        variables: Of the job's machine, by name.

    Raises:
        ValueError: If mappings that stand for each other make more keys than any real file has.
    """
    resolver = _Resolver(entries, variables or {})
    for key in list(entries.by_key):
        resolver.resolve(key)
    for key, entry in list(entries.by_key.items()):
        if isinstance(entry.value, _Text):
            entries.add(key, parse_scalar(entry.value), entry.line)


class _Text(str):
    """What OmegaConf makes a text, such as a default of ``oc.env``: no number to calculate with."""

    __slots__ = ()


class _Mapping:
    """A mapping that an interpolation stands for."""

    def __init__(self, keys: dict[str, str]) -> None:
        self.keys = keys
        """The keys of its values in the file, by their names in the mapping."""


class _Resolver:
    def __init__(self, entries: Entries, variables: dict[str, str]) -> None:
        self.entries, self.variables = entries, variables
        self.done: set[str] = set()
        self.inside: dict[str, list[str]] = {}
        """The keys of each mapping, those of the mappings in it too."""
        for key in entries.by_key:
            self._place(key)
        self.depth = 0

    def _place(self, key: str) -> None:
        for parent in parents_of(key):
            self.inside.setdefault(parent, []).append(key)

    def resolve(self, key: str) -> None:
        """Resolves the value of a key, once; what refers to itself is unknown."""
        if key in self.done:
            return
        self.done.add(key)
        entry = self.entries.by_key[key]
        if isinstance(entry.value, list):
            values = [self._text(key, part) if _has_any(part) else part for part in entry.value]
            self.entries.add(key, [UNKNOWN if isinstance(one, (_Mapping, list)) else one for one in values], entry.line)
        elif entry.value == "???":
            self.entries.add(key, UNKNOWN, entry.line)
        elif _has_any(entry.value):
            self.entries.add(key, UNKNOWN, entry.line)
            value = self._text(key, entry.value)
            if isinstance(value, _Mapping):
                self._copy(key, value)
            elif key in self.inside:  # a mapping that was merged over the interpolation
                del self.entries.by_key[key]
            else:
                self.entries.add(key, value, entry.line)

    def _copy(self, key: str, mapping: _Mapping) -> None:
        """Puts a mapping in the place of the interpolation; keys that the file gives there stay."""
        if not mapping.keys and key not in self.inside:
            self.entries.add(key, {}, self.entries.by_key[key].line)
            return
        line = self.entries.by_key.pop(key).line
        if len(self.entries.by_key) + len(mapping.keys) > _MOST_KEYS:
            raise ValueError(f"{key} makes more than {_MOST_KEYS:,} keys with those before it: give another file")
        for name, source in mapping.keys.items():
            self.resolve(source)
            inner = [source] if source in self.entries.by_key else self.inside.get(source, [])
            for one in list(inner):
                new, entry = f"{key}.{name}{one[len(source) :]}", self.entries.by_key.get(one)
                if entry is not None and new not in self.entries.by_key:
                    self.entries.add(new, entry.value, entry.line)
                    self._place(new)
                self.done.add(new)
        if key not in self.inside:
            self.entries.add(key, UNKNOWN, line)  # mappings that stand for each other

    def _text(self, key: str, text: str) -> Any:
        """Returns what a text with interpolations stands for: any value if it is a single one, else a text."""
        self.depth += 1
        try:
            return self._joined(key, text) if self.depth <= _DEEPEST else UNKNOWN
        finally:
            self.depth -= 1

    def _joined(self, key: str, text: str) -> Any:
        parts, position = list[str](), 0
        while (start := text.find("${", position)) >= 0:
            num_backslashes = len(text[:start]) - len(text[:start].rstrip("\\"))
            if num_backslashes % 2:
                parts.append(text[position : start - 1] + "${")
                position = start + 2
                continue
            end = _end_of(text, start)
            if end < 0:
                break  # which OmegaConf refuses: the text stands for itself
            value = self._one(key, text[start + 2 : end])
            if start == 0 and end == len(text) - 1:
                return value
            if isinstance(value, (list, _Mapping)):
                return UNKNOWN
            parts += [text[position:start], str(value)]
            position = end + 1
            if sum(map(len, parts)) > _LONGEST:
                return UNKNOWN
        return _Text("".join([*parts, text[position:]]))

    def _one(self, key: str, body: str) -> Any:
        """Returns what stands between ``${`` and ``}``."""
        match = _RESOLVER.fullmatch(body)
        if match is None:
            name = self._text(key, body) if "${" in body else body
            return self._node(key, str(name).strip(), UNKNOWN)
        arguments = [self._argument(key, part) for part in _split(match[2])]
        if any(isinstance(one, str) and UNKNOWN in one for one in arguments[:1]):
            return UNKNOWN
        return self._resolved(key, match[1], arguments)

    def _argument(self, key: str, text: str) -> Any:
        text = text.strip()
        return self._text(key, text) if "${" in text else parse_value(text)

    def _resolved(self, key: str, name: str, arguments: list[Any]) -> Any:
        first = arguments[0] if arguments else None
        match name, len(arguments):
            case "oc.env", 1 | 2:
                return self._of_machine(key, str(first), arguments[1:])
            case "oc.select", 1 | 2:
                return self._node(key, str(first), arguments[1] if len(arguments) > 1 else None)
            case "oc.decode", 1:
                return parse_value(first) if isinstance(first, str) else first
            case "oc.deprecated", 1 | 2:
                return self._node(key, str(first), UNKNOWN)
        if name in _OF_NUMBERS and len(arguments) == 2 and all(_is_number(one) for one in arguments):
            return _OF_NUMBERS[name](*arguments)
        return UNKNOWN

    def _of_machine(self, key: str, name: str, default: list[Any]) -> Any:
        """Returns a variable of the job's machine, or the default that the file gives for it."""
        if name in self.variables:
            self.entries.environment[name] = self.variables[name]
            return _Text(self.variables[name])
        if not default:
            return UNKNOWN
        self.entries.environment.setdefault(name, "" if default[0] is None else str(default[0]))
        self.entries.warnings.append(
            f"{self.entries.by_key[key].place}: {key} is {default[0]} unless the job's machine sets {name}: if it "
            f"does, give --set {name}=VALUE"
        )
        return None if default[0] is None else _Text(str(default[0]))

    def _node(self, key: str, name: str, default: Any) -> Any:
        """Returns the value of another key, or a mapping; the default if the file has neither."""
        name = re.sub(r"\[([\w-]+)\]", r".\1", name)
        if name.startswith("."):
            dots = len(name) - len(name.lstrip("."))
            if dots > key.count(".") + 1:
                return UNKNOWN  # above the top
            name = ".".join([*key.split(".")[:-dots], name.lstrip(".")])
        parts = name.split(".")
        for end in range(1, len(parts)):  # a mapping on the way may be an interpolation itself
            above = ".".join(parts[:end])
            if above in self.entries.by_key:
                self.resolve(above)
        if name in self.entries.by_key:
            self.resolve(name)
        if name in self.entries.by_key:
            value = self.entries.by_key[name].value
            return _Mapping({}) if value == {} else value
        parent = self.entries.by_key.get(name.rpartition(".")[0])
        if parent is not None and isinstance(parent.value, list) and re.fullmatch(r"\d{1,4}", parts[-1]):
            return parent.value[int(parts[-1])] if int(parts[-1]) < len(parent.value) else default
        if name in self.inside and key.startswith(f"{name}."):
            return UNKNOWN  # the mapping that holds the interpolation
        return _Mapping({one[len(name) + 1 :]: one for one in self.inside[name]}) if name in self.inside else default


def _has_any(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _end_of(text: str, start: int) -> int:
    """Returns where the brace of an interpolation closes, or -1."""
    depth = 0
    for match in re.finditer(r"\{|\}", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return start + match.start()
    return -1


def _split(text: str) -> list[str]:
    """Splits the arguments of a resolver at the commas outside of quotes and brackets."""
    found, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "{[(":
            depth += 1
        elif sign in "}])":
            depth -= 1
        if sign == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += sign
    return found if text.strip() else []
