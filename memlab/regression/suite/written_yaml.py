"""A YAML file as it is written: every value is the text in the file.

YAML 1.1 turns ``on`` into a truth value, ``1:30`` into the number 90, ``010`` into the number 8, and leaves ``1e-4`` a
text. Here every value stays text: the code that knows its type converts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import yaml

Written: TypeAlias = "str | list[Written] | dict[str, Written]"

_MERGE = "tag:yaml.org,2002:merge"
_MAX_DEPTH = 8
_MAX_VALUES = 20_000
"""After aliases are replaced by what they name: nine lines can stand for 10**9 values."""
_MAX_BYTES = 2**18
"""PyYAML reads about 10**5 bytes per second."""


def read_written_yaml(path: Path) -> Written:
    """Reads a file.

    Raises:
        ValueError: If it cannot be read, is not YAML, is empty or too large, or has a key twice in one mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"{path} has more than {_MAX_BYTES:,} letters: split it into several files")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not valid YAML ({error.problem}): correct that line") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({str(error).splitlines()[0]}): save it as UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested without an end, must be at most {_MAX_DEPTH} deep: flatten it") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a file that you may read") from error
    if node is None:
        raise ValueError(f"{path} is empty, must be a mapping: see papermill_runs/suites/cpu.yaml")
    return _written(node, path, itertools.count(), depth=0)


def _written(node: yaml.Node, path: Path, counter: Iterator[int], depth: int) -> Written:
    where = f"{path}, line {node.start_mark.line + 1}"
    if depth > _MAX_DEPTH:  # an alias may be inside of what it names
        raise ValueError(f"{where}: nested more than {_MAX_DEPTH} deep, must be flatter: take anchors and aliases out")
    if next(counter) >= _MAX_VALUES:
        raise ValueError(f"{where}: more than {_MAX_VALUES:,} values, must be fewer: take anchors and aliases out")
    if isinstance(node, yaml.SequenceNode):
        return [_written(item, path, counter, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Written] = {}
        merged: list[dict[str, Written]] = []
        for key, value in node.value:
            line = f"{path}, line {key.start_mark.line + 1}"
            if key.tag == _MERGE:
                merged += _mappings(_written(value, path, counter, depth + 1), line)
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{line}: a key must be a plain word: write `name: value`")
            if key.value in values:
                raise ValueError(f"{line}: {key.value!r} is twice in one mapping: keep one of them")
            values[key.value] = _written(value, path, counter, depth + 1)
        for one in merged:  # the mapping's own keys count, then the first that << names (yaml.org/type/merge.html)
            values = {**one, **values}
        return values
    scalar: str = node.value
    return scalar


def _mappings(found: Written, line: str) -> list[dict[str, Written]]:
    """Returns the mappings that ``<<`` names."""
    mappings = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict):
            raise ValueError(f"{line}: << stands for no mapping: write `<<: *name` of an anchored mapping")
        mappings.append(one)
    return mappings
