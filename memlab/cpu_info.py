"""The processor of this machine, as Linux describes it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")


def processor_name(facts: Path = _CPU_FACTS) -> str:
    """Returns the ``model name`` that a file gives for each core; the architecture's where the kernel gives none."""
    return _first(facts, "model name") or platform.processor() or platform.machine()


def processor_features(facts: Path = _CPU_FACTS) -> frozenset[str]:
    """Returns what an x86 processor can do, such as ``avx2``; empty for another one."""
    return frozenset(_first(facts, "flags").split())


def _first(facts: Path, field: str) -> str:
    text = facts.read_text(errors="replace") if facts.is_file() else ""
    found = re.search(rf"^{field}[ \t]*:[ \t]*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def num_cores() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
