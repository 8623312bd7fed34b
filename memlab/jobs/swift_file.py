"""ms-swift's file of arguments: YAML or JSON that stands in front of the flags, or that ``--config`` names.

Sources: ``parse_yaml_args`` in swift/cli/main.py, and ``parse_ray_yaml`` in swift/ray/megatron/driver_utils.py (4.6.0).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from memlab.jobs.entries import Entries
from memlab.jobs.yaml_tree import Node, ReadFile, flat, texts_of

COMMANDS = ("sft", "pt", "rlhf")
_ENDINGS = (".yaml", ".yml", ".json")
_NAMES_A_MODEL = ("model", "mcore_model", "load")
_OF_MEGATRON = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
    "global_batch_size",
}
"""Of which any file for ``megatron sft`` has one; those of ``swift sft`` have ``per_device_train_batch_size``."""
_GROUPS = ("train", "rollout", "teacher")
"""Parts of a job under Ray, each with its own ``gpus`` and arguments."""


def is_argument_file(values: dict[str, Any]) -> bool:
    """Whether a file, read as plain values, has ms-swift's arguments for Megatron at its top level."""
    train = values.get("train")
    names = {*values, *(train if isinstance(train, dict) else ())}
    return any(isinstance(values.get(key), str) for key in _NAMES_A_MODEL) and bool(names & _OF_MEGATRON)


def is_command(words: list[str]) -> bool:
    """Whether a command is one of ms-swift's for Megatron, started by its name, its module or its file."""
    is_named = any(one.endswith("megatron") and other in COMMANDS for one, other in pairwise(words))
    return is_named or any("swift/cli/_megatron" in word or "swift.cli._megatron" in word for word in words)


def take_argument_file(words: list[tuple[str, int]], entries: Entries, read: ReadFile) -> None:
    """Takes the arguments of the file that a command of ``megatron`` names, below those of its flags.

    ``megatron rlhf`` has the ``rlhf_type`` ``dpo`` unless one of them says otherwise. As `Framework.take_files`.
    """
    named = _named_file(words)
    root = None if named is None else read(*named)
    if named is not None and root is not None:
        own, flags = arguments_of(root, named[0]).of_file(Path(named[0]).name), entries.by_key
        for key in ("config", "use_ray"):
            flags.pop(key, None)
        if any(key.endswith(".gpus") for key in own.by_key) and flags:  # ms-swift under Ray reads the file alone
            names = ", ".join(f"--{key}" for key in flags)
            entries.warnings.append(
                f"line {named[1]}: under Ray, ms-swift reads the arguments of {named[0]} only, so these flags change "
                f"nothing: {names}"
            )
            flags = {}
        entries.by_key = own.by_key | flags
        entries.environment = own.environment
    rlhf = [line for word, line in words if word == "rlhf" or word.endswith("/rlhf.py")]
    if rlhf and "rlhf_type" not in entries.by_key:
        entries.add("rlhf_type", "dpo", rlhf[0])


def _named_file(words: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Returns the file of arguments that a command names, with its line; None if it names none.

    Only the first argument is a file, as for ms-swift; later ones belong to the flag before them.
    """
    for (word, _), (following, line) in pairwise(words):
        is_first = word in COMMANDS or word.endswith(tuple(f"/{command}.py" for command in COMMANDS))
        if (is_first and following.endswith(_ENDINGS) and following[0] != "-") or word == "--config":
            return following, line
    return next(((word.partition("=")[2], line) for word, line in words if word.startswith("--config=")), None)


def arguments_of(root: Node, name: str) -> Entries:
    """Returns a file's arguments, with the variables of the environment that its key ``ENV`` sets.

    Under Ray, a group's arguments stand above those that all groups share. ``train`` has the training's, and of the
    other groups' only those of the inference engine matter.

    Raises:
        ValueError: If aliases make more keys of it than any real file has.
    """
    groups = {group: root.value[group] for group in _GROUPS if group in root.value}
    shared = {key: node for key, node in root.value.items() if key not in (*groups, "ENV", "colocate_groups")}
    entries = flat(Node(shared, root.line), name)
    entries.environment = texts_of(root.value.get("ENV"))
    if not groups:
        return entries
    for group, node in groups.items():
        for key, entry in flat(node, name).by_key.items() if isinstance(node.value, dict) else ():
            if key == "gpus":
                entries.add(f"{group}.{key}", entry.value, entry.line)
            elif group == "train" or (group == "rollout" and key.startswith("vllm_")):
                entries.add(key, entry.value, entry.line)
    if "rollout" in groups:
        entries.add("vllm_mode", "colocate" if _trains_beside(root, "rollout") else "server", groups["rollout"].line)
    if _trains_beside(root, "teacher"):
        entries.add("colocate_groups", "train, teacher", root.value["colocate_groups"].line)
    if "sleep_level" not in entries.by_key:
        entries.add("sleep_level", 1, root.line)
    return entries


def _trains_beside(root: Node, other: str) -> bool:
    """Whether the training has the same GPUs as another group."""
    together = root.value.get("colocate_groups")
    for group in together.value if together is not None and isinstance(together.value, list) else ():
        members = [member.value for member in group.value] if isinstance(group.value, list) else []
        if "train" in members and other in members:
            return True
    return False
