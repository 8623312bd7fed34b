"""The nodes of a job that PBS starts: how many its options ask for, where a script counts them in PBS's file."""

from __future__ import annotations

import re

_NUMBER = r"[1-9]\d{0,5}"
_CHUNK = rf"{_NUMBER}(?::\w+(?:=\w+)?)*"
_OPTION = re.compile(rf"#PBS\s+(?:[^#]*\s)?-l\s*(?:\S+,)?(?:select|nodes)=({_CHUNK}(?:\+{_CHUNK})*)(?=[\s,]|$)")
_OF_NODE = re.compile(rf":(?:mpiprocs|ppn)=({_NUMBER})(?!\w)")
_FILE = r'"?\$(?:PBS_NODEFILE|\{PBS_NODEFILE\})"?'
_LINES = re.compile(rf"\$\(\s*(?:wc\s+-l\s*<\s*{_FILE}|cat\s+{_FILE}\s*\|\s*wc\s+-l)\s*\)")
_HOSTS = re.compile(
    rf"\$\(\s*(?:cat\s+{_FILE}\s*\|\s*sort|sort(?:\s+-u)?\s+{_FILE}|sort\s+-u\s*<\s*{_FILE})"
    r"(?:\s+-u)?(?:\s*\|\s*uniq)?\s*\|\s*wc\s+-l\s*\)"
)


def with_nodes(text: str) -> tuple[str, str]:
    """Puts the number of nodes, or of lines, in place of the commands that count them in PBS's file.

    The file has a line for each process that PBS would start: one a node, unless ``mpiprocs`` or ``ppn`` says another
    number.

    Args:
        text: A script.

    Returns:
        The script, with as many lines as before, and a warning that says what memlab takes; no warning where the
        script asks PBS for no such number, or counts nothing.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        found = _OPTION.match(line)
        if found is None:
            continue
        nodes = lines = 0
        for chunk in found[1].split("+"):
            processes = _OF_NODE.search(chunk)
            count = int(chunk.partition(":")[0])
            nodes, lines = nodes + count, lines + count * (int(processes[1]) if processes else 1)
        counted, times = _HOSTS.subn(str(nodes), text)
        counted, more = _LINES.subn(str(lines), counted)
        said = (
            f"line {number}: memlab takes the {nodes} nodes that the script asks PBS for, each of them another machine"
        )
        return counted, f"{said}: if qsub has another number, give --world-size" if times + more else ""
    return text, ""
