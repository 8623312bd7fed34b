"""The ranks of a job that srun starts, one task each: Slurm's options of the script (``#SBATCH``)."""

from __future__ import annotations

import re

from memlab.jobs.entries import Entries

_OPTIONS = re.compile(r"#SBATCH(\s[^#]*)")
_OPTION = re.compile(r"\s(?:--(nodes|ntasks-per-node|ntasks)(?:=|\s+)|-([Nn])\s*)(\S+)")
_NAMES = {"N": "nodes", "n": "ntasks"}


def take_ranks(text: str, entries: Entries) -> None:
    """Takes the number of ranks from the options of the script, where no launcher of torch starts them.

    Slurm reads them before the script's first command, and options of ``sbatch`` itself replace them. With one task
    per node, this task starts the ranks.

    Args:
        entries: Its job, which gets torchrun's ``nnodes`` and ``nproc_per_node``.
    """
    if {"nnodes", "nproc_per_node"} & entries.by_key.keys():
        return
    given = _given(text)
    nodes, _ = given.get("nodes", (1, 0))
    per_node, line_number = given.get("ntasks-per-node", (0, 0))
    if not per_node and "ntasks" in given and given["ntasks"][0] % nodes == 0:
        per_node, line_number = given["ntasks"][0] // nodes, given["ntasks"][1]
    if per_node < 2:
        return
    entries.add("nnodes", nodes, given.get("nodes", (0, line_number))[1])
    entries.add("nproc_per_node", per_node, line_number)
    entries.warnings.append(
        f"line {line_number}: memlab takes one rank for each task of #SBATCH, {nodes} x {per_node}: if sbatch or srun "
        "starts another number, give --world-size"
    )


_OF_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def nodes_of(text: str) -> dict[str, str]:
    """Returns the variables by which Slurm tells a script how many nodes its job has, as its options ask for them."""
    nodes, _ = _given(text).get("nodes", (0, 0))
    return dict.fromkeys(_OF_NODES, str(nodes)) if nodes else {}


def note_nodes(of_slurm: dict[str, str], entries: Entries) -> None:
    """Says where the number of nodes is from that a job reads in Slurm's variables."""
    for name in entries.environment.keys() & of_slurm.keys():
        entries.warnings.append(
            f"{name}: memlab takes the {of_slurm[name]} of #SBATCH --nodes; if sbatch has another, give --set {name}="
            "NUMBER"
        )


def _given(text: str) -> dict[str, tuple[int, int]]:
    """Returns the options of a script, each with its line; none where one is a range, or a place to fill in."""
    given: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        options = _OPTIONS.match(line)
        for option in _OPTION.finditer(options[1]) if options else ():
            if not re.fullmatch(r"[1-9]\d{0,5}", option[3]):
                return {}
            given[option[1] or _NAMES[option[2]]] = int(option[3]), number
    return given
