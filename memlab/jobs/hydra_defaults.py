"""Reads the entries of a configuration's key ``defaults``: files whose keys lie below those of the file itself.

The rules are those of Hydra 1.3 ("The Defaults List"), and for names that end in ``.yaml`` those of NeMo-RL
(`nemo_rl/utils/config.py`), which takes the files as they are.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from typing import Any

from memlab.jobs.entries import Entries
from memlab.jobs.yaml_tree import Node

SELF = "_self_"
"""Stands for the keys of the file itself; without it, they lie over all others."""
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Default:
    """One entry of the list."""

    name: str
    """As the file writes it, with the package behind ``@`` if it names one."""
    line: int
    file: str | None = None
    """Relative to the folder of the file, or with a slash in front to that of the first file; None if it is unknown."""
    package: str = ""
    """The mapping that gets the keys, below that of the file with the list, or behind ``_global_`` below the top."""
    is_optional: bool = False
    overrides: str = ""
    """The key of the group of which the entry only chooses the option (`key_of`)."""


@dataclass(slots=True)
class Choices:
    """Which options are chosen for groups, such as ``model_engine`` and ``actor@actor_rollout_ref.actor``."""

    options: dict[str, Any] = field(default_factory=dict)
    """Those of the command, and of the files from the first one on, by `key_of`: what is chosen first counts."""
    taken: set[str] = field(default_factory=set)
    """The keys of groups that a list has, for which ``override`` chooses."""

    def of(self, key: str, option: Any) -> Any:
        """Returns the option of a group in a list; ``${model_engine}_actor`` has the option of another one in it."""
        self.taken.add(key)
        option = self.options.get(key, option)
        if isinstance(option, str):
            option = _OPTION.sub(lambda found: str(self.options.get(key_of(found[1]), found[0])), option)
        return self.options.setdefault(key, option)


def key_of(name: str, folder: str = "", package: str = "") -> str:
    """Returns what tells a group from all others: its folder, and the mapping that gets its keys.

    Args:
        name: As a list or a command has it, such as ``actor@actor_rollout_ref.actor``.
        folder: Of the file with the list, from that of the first file; nothing for the command.
        package: The mapping that gets that file's keys.
    """
    group, _, own = name.partition("@")
    group = posixpath.normpath(posixpath.join(folder, group)).lstrip("/")
    return f"{group}@{_below(package, _named(own, group))}"


_OPTION = re.compile(r"\$\{([\w/@.]{1,200})\}")


def defaults_of(node: Node, choices: Choices | None = None, folder: str = "", package: str = "") -> list[Default]:
    """Returns the entries of a list of defaults, or of a single one.

    Args:
        choices: Of the command and of the files that name this one; they get those of this list.
        folder: Of the file, from that of the first file.
        package: The mapping that gets the file's keys.
    """
    choices = Choices() if choices is None else choices
    listed = node.value if isinstance(node.value, list) else [node]
    for one in listed:
        for key, option in one.value.items() if isinstance(one.value, dict) else ():
            if key.startswith("override "):
                choices.options.setdefault(key_of(key.split()[-1], folder, package), option.value)
    return [each for one in listed for each in _entries(one, choices, folder, package)]


def _entries(node: Node, choices: Choices, folder: str, of_file: str) -> list[Default]:
    if isinstance(node.value, str):
        name, _, package = node.value.partition("@")
        is_file = name.endswith((".yaml", ".yml"))
        group = "" if is_file else name.rpartition("/")[0]
        return [Default(node.value, node.line, name if is_file else f"{name}.yaml", _named(package, group))]
    if not isinstance(node.value, dict) or len(node.value) != 1:
        return [Default("of a group", node.line)]
    ((key, option),) = node.value.items()
    *words, name = key.split()
    group, at, package = name.partition("@")
    group_key = key_of(name, folder, of_file)
    if "override" in words:
        return [] if option.value is None else [Default(f"of the group {group}", node.line, overrides=group_key)]
    value = [one.value for one in option.value] if isinstance(option.value, list) else option.value
    chosen = choices.of(group_key, value)
    if chosen is None:
        return []
    options: list[Any] = chosen if isinstance(chosen, list) else [chosen]
    if not all(isinstance(one, str) and "${" not in one for one in options):
        return [Default(f"of the group {group}", node.line)]
    return [
        Default(
            f"{group}/{one}{at}{package}", node.line, f"{group}/{one}.yaml", _named(package, group), "optional" in words
        )
        for one in options
    ]


def _named(package: str, group: str) -> str:
    return "" if package == "_here_" else package or group.strip("/").replace("/", ".")


def package_in(text: str, default: Default, parent: str) -> str:
    """Returns the mapping that gets the keys of a file.

    The list of another file may name it, below that file's own mapping (`parent`); else the first lines of the file
    do, always below the top (``set_package_header`` in hydra/core/default_element.py, 1.3).
    """
    match, package = _PACKAGE.search(text[:1000]), default.package
    if match is not None and match[1] != "_group_" and "@" not in default.name:
        package = f"_global_.{match[1]}"
    return _below(parent, package)


def _below(parent: str, package: str) -> str:
    return ".".join(filter(None, (parent, package))).rpartition("_global_")[2].lstrip(".")


def folder_in(default: Default, folder: str) -> str:
    """Returns the folder of an entry's file, from that of the first file, for a list in such a folder."""
    return posixpath.normpath(posixpath.join(folder, posixpath.dirname(default.file or "")))


def placed(entries: Entries, package: str) -> Entries:
    """Returns the keys of a file as those of a mapping."""
    if not package:
        return entries
    moved = Entries(warnings=entries.warnings, environment=entries.environment)
    for key, entry in entries.by_key.items():
        moved.add(f"{package}.{key}" if key else package, entry.value, entry.line)
    return moved


def merge_over(below: Entries, own: Entries) -> None:
    """Merges the keys of a file over others, as NeMo-RL does.

    A mapping of the top with ``_override_: true`` takes the place of the one below, without a merge.
    """
    for key in [key for key in own.by_key if key.count(".") == 1 and key.endswith("._override_")]:
        if own.by_key.pop(key).value:
            below.remove(key.partition(".")[0])
    below.merge(own)
    below.warnings += own.warnings
