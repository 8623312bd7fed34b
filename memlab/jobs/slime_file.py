"""slime's files of arguments: YAML whose values stand above the flags.

Sources: ``slime_validate_args`` and ``parse_megatron_role_args`` in slime/utils/arguments.py (624b824a).
"""

from __future__ import annotations

from pathlib import Path

from memlab.jobs.entries import UNKNOWN, Entries
from memlab.jobs.yaml_tree import Node, ReadFile, flat

_FILES = ("custom_config_path", "megatron_config_path")
"""Arguments that name such a file; what the later one says counts."""
_NEVER_TAKEN = ("num_nodes", "num_gpus_per_node")


def take_values_above_flags(_: object, entries: Entries, read: ReadFile) -> None:
    """Takes the values that the files give to arguments of the training; as `Framework.take_files`.

    Raises:
        ValueError: If aliases make more keys of a file than any real one has.
    """
    for argument in _FILES:
        entry = entries.by_key.get(argument)
        name = UNKNOWN if entry is not None and entry.is_unknown else str(entries.get(argument) or "")
        root = read(name, entry.line or 1) if entry is not None and name else None
        if root is None:
            continue
        if argument == "megatron_config_path":
            root = Node(_overrides_of_the_actor(root), root.line)
        own = flat(root, name).of_file(Path(name).name).by_key
        entries.by_key |= {key: value for key, value in own.items() if key not in _NEVER_TAKEN}


def _overrides_of_the_actor(root: Node) -> dict[str, Node]:
    roles = root.value.get("megatron")
    for role in roles.value if roles is not None and isinstance(roles.value, list) else ():
        parts = role.value if isinstance(role.value, dict) else {}
        if "role" in parts and parts["role"].value == "actor":
            given = (parts[key].value for key in ("overrides", "args") if key in parts)
            return next((mapping for mapping in given if isinstance(mapping, dict) and mapping), {})
    return {}
