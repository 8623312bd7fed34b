"""slime's files of arguments: YAML whose values stand above the flags.

Sources: ``slime_validate_args`` and ``parse_megatron_role_args`` in slime/utils/arguments.py (624b824a).
"""

from __future__ import annotations

from memlab.jobs.entries import Entries
from memlab.jobs.yaml_tree import Node, flat

FILES = ("custom_config_path", "megatron_config_path")
"""Arguments that name such a file; what the later one says counts."""
_NEVER_TAKEN = ("num_nodes", "num_gpus_per_node")


def values_of(root: Node, argument: str, name: str) -> Entries:
    """Returns the values that a file gives to arguments of the training.

    Args:
        argument: One of `FILES`.

    Raises:
        ValueError: If aliases make more keys of it than any real file has.
    """
    if argument == "megatron_config_path":
        root = Node(_overrides_of_the_actor(root), root.line)
    entries = flat(root, name)
    for key in _NEVER_TAKEN:
        entries.by_key.pop(key, None)
    return entries


def _overrides_of_the_actor(root: Node) -> dict[str, Node]:
    roles = root.value.get("megatron")
    for role in roles.value if roles is not None and isinstance(roles.value, list) else ():
        parts = role.value if isinstance(role.value, dict) else {}
        if "role" in parts and parts["role"].value == "actor":
            given = (parts[key].value for key in ("overrides", "args") if key in parts)
            return next((mapping for mapping in given if isinstance(mapping, dict) and mapping), {})
    return {}
