"""Lists versions and backends, and for each that is missing why, and what to do."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module, metadata

from packaging.requirements import Requirement

from memlab._version import __version__
from memlab.commands.process import stdout_reserved_for_result

_CPU_EXTRA, _GPU_EXTRA = "pip install -e '.[cpu]'", "pip install --no-build-isolation -e '.[gpu]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found of one package or backend."""

    name: str
    version: str = ""
    problem: str = ""
    """Why it cannot be used; empty where it can."""
    remedy: str = ""
    """What to do about the problem."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Returns the job; there is nothing to check."""
    return lambda: _report(as_json=arguments.json)


def _report(*, as_json: bool) -> int:
    with stdout_reserved_for_result():
        packages = [_package(requirement) for requirement in _requirements()]
        cpu = _cpu({package.name: package for package in packages})
        backends = [cpu, _cuda(), replace(cpu, name="simulated")]  # which runs what the CPU does, on fake tensors
    if as_json:
        groups = {"packages": packages, "backends": backends}
        found = {name: {f.name: _facts(f) for f in findings} for name, findings in groups.items()}
        print(json.dumps({"memlab": __version__, "python": platform.python_version()} | found, indent=2))
    else:
        print(f"memlab {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
        for title, findings in (("packages", packages), ("backends", backends)):
            print(f"\n{title}")
            for finding in findings:
                print(f"  {finding.name:<20} {finding.version or '-':<14} {_state(finding)}")
    usable = any(not backend.problem for backend in backends)
    return 0 if usable else 1


def _facts(finding: Finding) -> dict[str, object]:
    facts = asdict(finding)
    return {"ok": not finding.problem} | {name: facts[name] or None for name in ("version", "problem", "remedy")}


def _state(finding: Finding) -> str:
    return f"{finding.problem}: {finding.remedy}" if finding.problem else "ok"


def _requirements() -> list[Requirement]:
    """Returns what memlab needs, as it was installed, and what its GPU extra adds."""
    wanted = []
    for text in metadata.requires("memlab") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.name == "transformer-engine":
            wanted.append(requirement)
    return wanted


def _package(requirement: Requirement) -> Finding:
    remedy = _GPU_EXTRA if requirement.marker else _CPU_EXTRA
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        why = "not installed, and only the cuda backend needs it" if requirement.marker else "not installed"
        return Finding(name=requirement.name, problem=why, remedy=remedy)
    # A local version (2.13.0+cpu) counts as the version that it is a build of.
    if not requirement.specifier.contains(version, prereleases=True):
        why = f"not {requirement.specifier}, the versions that memlab was written for"
        return Finding(name=requirement.name, version=version, problem=why, remedy=remedy)
    return Finding(name=requirement.name, version=version)


def _cpu(packages: dict[str, Finding]) -> Finding:
    for name, module in (("torch", "torch"), ("megatron-core", "megatron.core")):
        if packages[name].problem:
            return Finding(name="cpu", problem=f"{name} is {packages[name].problem}", remedy=packages[name].remedy)
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            reason = str(error).partition("\n")[0]
            return Finding(
                name="cpu", problem=f"{name} does not load ({reason})", remedy=f"install it anew: {_CPU_EXTRA}"
            )
    return Finding(name="cpu")


def _cuda() -> Finding:
    try:
        torch = import_module("torch")
        cuda = import_module("memlab.backends.cuda")
    except (ImportError, OSError):
        return Finding(name="cuda", problem="torch or megatron-core does not load", remedy=_GPU_EXTRA)
    cuda.prepare_environment()
    problem, remedy = cuda.check_available() or ("", "")
    return Finding(name="cuda", version=torch.version.cuda or "", problem=problem, remedy=remedy)
