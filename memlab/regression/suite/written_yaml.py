"""A YAML file as it is written: every value is the text that stands there.

YAML 1.1 makes of ``on`` a truth value, of ``1:30`` the number 90, of ``010`` the number 8 and of ``1e-4`` a text. Here
none of that happens: what a value means is for its reader to say, who knows of which type it must be.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import yaml

Written: TypeAlias = "str | list[Written] | dict[str, Written]"

_DEEPEST = 8


def read_written_yaml(path: Path) -> Written:
    """Reads a file.

    Raises:
        ValueError: If it is no YAML, holds nothing, names a key twice in one mapping, or is nested without an end.
    """
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: no valid YAML ({error.problem}): correct that line") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no valid YAML ({str(error).splitlines()[0]}): save it as UTF-8 text") from error
    if node is None:
        raise ValueError(f"{path} is empty, must be a mapping: see papermill_runs/suites/cpu.yaml")
    return _written(node, path, depth=0)


def _written(node: yaml.Node, path: Path, depth: int) -> Written:
    where = f"{path}, line {node.start_mark.line + 1}"
    if depth > _DEEPEST:  # an alias may stand inside of what it names
        raise ValueError(f"{where}: nested more than {_DEEPEST} deep, must be flatter: take anchors and aliases out")
    if isinstance(node, yaml.SequenceNode):
        return [_written(item, path, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Written] = {}
        for key, value in node.value:
            line = f"{path}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{line}: a key must be a plain word: write `name: value`")
            if key.value in values:
                raise ValueError(f"{line}: {key.value!r} stands twice in one mapping: keep one of them")
            values[key.value] = _written(value, path, depth + 1)
        return values
    text: str = node.value
    return text
