"""Lists packages, hardware and backends, and says how to install what is missing.

It is the command for broken installations: whatever is missing or fails to load is a line of its answer. So it imports
nothing but the standard library before it looks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module, metadata
from pathlib import Path

from memlab._version import __version__
from memlab.backends.host_system import host_memory_bytes
from memlab.commands.shared.process import stdout_reserved_for_result
from memlab.config.versions import MEASURED_TOGETHER, TITLES, Versions, release
from memlab.cpu_info import processor_name
from memlab.units import format_bytes

_CPU_EXTRA, _GPU_EXTRA = "pip install -e '.[cpu]'", "pip install --no-build-isolation -e '.[gpu]'"
_TESTED_MEGATRON_CORE = ("0.16", "0.18", "0.19")
"""The tests that depend on versions were run with one release of each; the versions between are allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The state of one package or backend."""

    name: str
    version: str = ""
    problem: str = ""
    """Why it cannot be used; empty where it can."""
    remedy: str = ""
    """What to do about the problem."""
    note: str = ""
    """What to know about one that can be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Requirement:
    name: str
    specifier: str
    """Allowed versions, such as ``>=2.11,<2.16``."""
    only_cuda: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Returns the job; there is nothing to check."""
    return lambda: _report(as_json=arguments.json)


def _report(*, as_json: bool) -> int:
    with stdout_reserved_for_result():
        packages = [_memlab(), *(_package(requirement) for requirement in _requirements())]
        cpu = _cpu({package.name: package for package in packages})
        backends = [cpu, _cuda(), _simulated(cpu)]
        hardware = _hardware()
    if as_json:
        groups = {"packages": packages, "backends": backends}
        found = {name: {f.name: _facts(f) for f in findings} for name, findings in groups.items()}
        about = {"memlab": __version__, "python": platform.python_version(), "hardware": hardware}
        about |= {"versions": {"measured_together": _is_measured(), "note": _versions_line()}}
        print(json.dumps(about | found, indent=2))
    else:
        print(f"memlab {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
        for title, findings in (("backends", backends), ("packages", packages)):
            print(f"\n{title}")
            for finding in findings:
                print(f"  {finding.name:<20} {finding.version or '-':<14} {_state(finding)}")
        print(f"\nversions\n  {_versions_line()}")
        print("\nhardware")
        for name, value in hardware.items():
            print(f"  {name:<20} {value}")
    usable = any(not backend.problem for backend in backends)
    return 0 if usable else 1


def _facts(finding: Finding) -> dict[str, object]:
    facts = asdict(finding)
    return {"ok": not finding.problem} | {name: text or None for name, text in facts.items() if name != "name"}


def _state(finding: Finding) -> str:
    if finding.problem:
        return f"{finding.problem}: {finding.remedy}"
    return f"ok, but {finding.note}" if finding.note else "ok"


def _memlab() -> Finding:
    if _installed("memlab") is None:
        why = f"not installed, only importable from {Path(__file__).parents[2]}"
        return Finding(name="memlab", version=__version__, problem=why, remedy=_CPU_EXTRA)
    return Finding(name="memlab", version=__version__)


def _is_measured() -> bool:
    """Whether steps on a GPU were measured with the installed versions together."""
    installed = (_installed(name.replace("_", "-")) for name in TITLES)
    return tuple(version and release(version) for version in installed) in MEASURED_TOGETHER


def _versions_line() -> str:
    """Says for which versions predictions are made, and whether steps were measured with the installed ones."""
    usual = Versions().words("megatron", _installed("megatron-core") or "")
    named = {title: _installed(name.replace("_", "-")) or "not installed" for name, title in TITLES.items()}
    here = ", ".join(f"{title} {version}" for title, version in named.items())
    steps = "steps were" if _is_measured() else "no step was"
    measured = f"{steps} measured with what is installed here ({here})"
    return f"predictions are for {usual}, unless flags or a job say otherwise; {measured}"


def _requirements() -> Iterator[_Requirement]:
    """Yields what memlab needs, and what its GPU extra adds: as installed, or else as a clone declares it."""
    try:
        texts = metadata.requires("memlab") or []
    except metadata.PackageNotFoundError:
        clone = Path(__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(clone.read_text(encoding="utf-8"))["project"] if clone.is_file() else {}
        extras = project.get("optional-dependencies", {}).get("gpu", ())
        texts = [*project.get("dependencies", ()), *(f"{text}; extra == 'gpu'" for text in extras)]
    for text in texts:
        found = re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*);?(.*)", text)
        if found is None:
            continue
        name, specifier, marker = (part.strip() for part in found.groups())
        if "extra" not in marker or name == "transformer-engine":
            yield _Requirement(name=name, specifier=specifier.strip("()"), only_cuda="extra" in marker)


def _package(requirement: _Requirement) -> Finding:
    name, remedy = requirement.name, _GPU_EXTRA if requirement.only_cuda else _CPU_EXTRA
    version = _installed(name)
    if version is None:
        why = "not installed, and only the cuda backend needs it" if requirement.only_cuda else "not installed"
        return Finding(name=name, problem=why, remedy=remedy)
    if not _is_allowed(version, requirement.specifier):
        why = f"not one of the versions that memlab allows ({requirement.specifier})"
        return Finding(name=name, version=version, problem=why, remedy=remedy)
    if name == "megatron-core" and not version.startswith(tuple(f"{tested}." for tested in _TESTED_MEGATRON_CORE)):
        note = f"memlab was never run with it, only with {', '.join(_TESTED_MEGATRON_CORE)}"
        return Finding(name=name, version=version, note=note)
    return Finding(name=name, version=version)


def _installed(name: str) -> str | None:
    """Returns the version of an installed package; one without readable metadata counts as missing."""
    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, OSError, KeyError, ValueError):
        return None


def _is_allowed(version: str, specifier: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True  # packaging itself is then listed as missing, with what to do
    # A local version (2.13.0+cpu) counts as the version that it is a build of.
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _cpu(packages: dict[str, Finding]) -> Finding:
    for name, module in (("numpy", "numpy"), ("torch", "torch"), ("megatron-core", "megatron.core")):
        package = packages.get(name)
        if package is not None and package.problem:
            return Finding(name="cpu", problem=f"{name} is {package.problem}", remedy=package.remedy)
        problem = _loading_problem(module)
        if problem:
            return Finding(name="cpu", problem=f"{name} does not load ({problem})", remedy=f"reinstall: {_CPU_EXTRA}")
    problem = _loading_problem("memlab.backends.cpu")
    return Finding(name="cpu", problem=problem, remedy=_CPU_EXTRA if problem else "")


def _simulated(cpu: Finding) -> Finding:
    """Returns the state of the backend that runs what the CPU does, on fake tensors."""
    if cpu.problem:
        return replace(cpu, name="simulated")
    problem = import_module("memlab.allocator.choice").why_not_compiled()
    note = f"steps of many micro-batches take longer: {problem}" if problem else ""
    return Finding(name="simulated", note=note)


def _cuda() -> Finding:
    for module in ("torch", "memlab.backends.cuda"):
        problem = _loading_problem(module)
        if problem:
            return Finding(name="cuda", problem=f"{module} does not load ({problem})", remedy=_GPU_EXTRA)
    torch, cuda = import_module("torch"), import_module("memlab.backends.cuda")
    cuda.prepare_environment()
    problem, remedy = cuda.check_available() or ("", "")
    return Finding(name="cuda", version=torch.version.cuda or "", problem=problem, remedy=remedy)


def _loading_problem(module: str) -> str:
    """Returns the first line of the error with which a module fails to load; empty if it loads."""
    # A CUDA build of torch logs where there is a compiler for CUDA and no GPU, which the line "cuda" says.
    logging.getLogger("torch.utils.cpp_extension").disabled = True
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001  # whatever a broken package raises is what the user has to know
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _hardware() -> dict[str, str]:
    """Returns what this machine is made of, as far as the system says it, by names such as ``GPU 0`` and ``CPU``."""
    found = {}
    for number, line in enumerate(_nvidia_smi()):
        name, memory, driver = (part.strip() for part in line.split(","))
        found[f"GPU {number}"] = f"{name}, {memory}"
        found["driver"] = driver
    found = found or {"GPU": "none found by nvidia-smi"}
    if not _loading_problem("torch"):
        torch = import_module("torch")
        found["CUDA"] = torch.version.cuda or "torch is built without CUDA"
        if torch.version.cuda and not _loading_problem("torch.cuda.nccl"):
            found["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    found["CPU"] = f"{processor_name()}, {os.cpu_count()} cores"
    found["host memory"] = format_bytes(host_memory_bytes())
    return found


def _nvidia_smi() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.count(",") == 2] if done.returncode == 0 else []
