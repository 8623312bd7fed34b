"""SkyPilot's YAML of a task: the script that starts the job on each node, with what SkyPilot sets for it.

Sources: SkyPilot's pages "Task YAML" and "Environment Variables" (0.10).
"""

from __future__ import annotations

import shlex

from memlab.jobs.yaml_tree import Node, texts_of

_BESIDE_A_SCRIPT = ("resources", "num_nodes", "workdir", "setup")


def is_task(root: Node) -> bool:
    """Whether a file is a task of SkyPilot."""
    script = root.value.get("run")
    return script is not None and isinstance(script.value, str) and any(key in root.value for key in _BESIDE_A_SCRIPT)


def script_of(root: Node) -> str:
    """Returns the script of a task's first node, with the file's own line numbers."""
    run = root.value["run"]
    variables = texts_of(root.value.get("envs")) | _variables(root)
    first = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{first}{chr(10) * run.line}{run.value}"


def _variables(root: Node) -> dict[str, str]:
    nodes = root.value.get("num_nodes")
    found = {"SKYPILOT_NUM_NODES": "1" if nodes is None else str(nodes.value), "SKYPILOT_NODE_RANK": "0"}
    resources = root.value.get("resources")
    parts = resources.value if resources is not None and isinstance(resources.value, dict) else {}
    count = _gpus(parts.get("accelerators"))
    return found | ({} if count is None else {"SKYPILOT_NUM_GPUS_PER_NODE": count})


def _gpus(node: Node | None) -> str | None:
    """Returns how many GPUs a node has; None where the file offers several, or leaves it to ``sky launch --gpus``."""
    if node is None or node.value is None:
        return None
    value = node.value
    if isinstance(value, dict):  # a set of kinds in YAML, or each with its number
        counts = {str(one.value or 1) for one in value.values()}
    else:
        kinds = [one.value for one in value] if isinstance(value, list) else [value]
        counts = {str(kind).partition(":")[2] or "1" for kind in kinds}
    return counts.pop() if len(counts) == 1 else None
