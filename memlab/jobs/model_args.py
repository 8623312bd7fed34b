"""YAML whose key ``MODEL_ARGS`` has Megatron-LM's flags: its own tests' ``model_config.yaml``, and MoE Model Zoo's.

Their launchers put variables of the environment in (``envsubst``), leave out a flag whose value is false, and pass the
others on (tests/functional_tests/shell_test_utils/_run_training.sh of Megatron-LM, core 0.16.1, and
sbatch_benchmarking.sh of yanring/Megatron-MoE-ModelZoo at e865051).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memlab.jobs.entries import UNKNOWN, Entries, Entry, parse_scalar
from memlab.jobs.yaml_tree import Node, ReadFile, children_of, texts_of

LAUNCHERS = ("sbatch_benchmarking.sh", "interactive_benchmarking.sh")
"""MoE Model Zoo's, which a job starts with the variables in its environment and more flags as arguments."""
_BRACKETS = re.compile(r"\[[\w ]*\]")
"""Several values of one argument, as Megatron-LM's tests write them; their launcher takes the brackets away."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)


def model_args(root: Node, variables: dict[str, str], file: str) -> Entries:
    """Returns the flags of ``MODEL_ARGS`` and the variables of ``ENV_VARS``.

    Args:
        variables: Of the environment in which the launcher runs. A value with another variable is unknown.

    Raises:
        ValueError: If a flag has more than a value or a list of values.
    """
    entries = Entries()
    for key, node in children_of(root.value["MODEL_ARGS"]).items():
        name = key.lstrip("-").replace("-", "_")
        parts = [child.value for child in node.value[:1000]] if isinstance(node.value, list) else [node.value]
        if any(isinstance(part, (dict, list)) for part in parts):
            raise ValueError(f"{file}, line {node.line}: {key} has keys or lists below it, must be a value: correct it")
        value = parts if isinstance(node.value, list) else node.value
        if isinstance(value, str):
            names = [one or other for one, other in _VARIABLE.findall(value)]
            entries.environment |= {one: variables.get(one, UNKNOWN) for one in names}
            value = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], UNKNOWN), value)
            value = parse_scalar(value) if names else value
        if value is False:
            continue
        entries.add(name, _words(value), node.line)
    entries.environment |= texts_of(root.value.get("ENV_VARS"))
    mode = root.value.get("MODE")
    if mode is not None and mode.value == "inference":  # Megatron-LM's own tests
        entries.program = Entry("MODE", "inference", mode.line)
    return entries


def _words(value: Any) -> Any:
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]  # quotes for the shell of the launcher
    if not isinstance(value, str) or UNKNOWN in value or not (" " in value or _BRACKETS.fullmatch(value)):
        return value
    words = value[1:-1] if _BRACKETS.fullmatch(value) else value
    return [parse_scalar(part) for part in words.split()]


def is_started_by_a_launcher(words: Iterable[str]) -> bool:
    """Whether a command starts one of the launchers that read such a file."""
    return any(word.rpartition("/")[2] in LAUNCHERS for word in words)


def take_file_of_a_launcher(
    words: list[tuple[str, int]], variables: dict[str, str], entries: Entries, read: ReadFile
) -> None:
    """Takes the flags of the file that a launcher reads, below those of its command.

    Args:
        words: Of the command, which may start another program.
        variables: The command's. The file is named from the Model Zoo's folder; it is unknown without ``MODEL``.
    """
    if not is_started_by_a_launcher(word for word, _ in words):
        return
    model, line = variables.get("MODEL") or UNKNOWN, words[0][1]
    name = variables.get("TRAINING_PARAMS_PATH", f"model_configs/benchmarking/{model}.yaml")
    root = read(name, line)
    if root is None or "MODEL_ARGS" not in root.value:
        return
    own = model_args(root, variables, name).of_file(Path(name).name)
    if (nodes := variables.get("NNODES", "")).isdigit():
        own.add("nnodes", int(nodes), line)
        own.add("nproc_per_node", 4 if variables.get("GB200_CLUSTER") == "1" else 8, line)
    entries.by_key = own.by_key | entries.by_key
    entries.environment = own.environment
    entries.warnings.append(
        f"line {line}: the launcher adds flags of its own for DISPATCHER, PR, VPP, OPTIMIZER_OFFLOAD and "
        "A2A_OVERLAP, which memlab does not read: give those that matter with --set KEY=VALUE"
    )
