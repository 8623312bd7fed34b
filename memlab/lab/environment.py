"""What a measurement depends on in addition to its scenario: versions and hardware."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from memlab._version import __version__
from memlab.backends.host_system import host_memory_bytes
from memlab.config.option import EngineName
from memlab.config.versions import Versions
from memlab.cpu_info import num_cores, processor_name
from memlab.units import format_bytes

_DRIVER_VERSION = Path("/sys/module/nvidia/version")


def versions(engine: EngineName, predicted: Versions | None) -> dict[str, str]:
    """Returns the versions of memlab, Python and the packages that compute; a missing one is ``not installed``.

    Args:
        predicted: Those that a prediction is made for, whose Transformer Engine stands for the installed one; None for
            a step that computes.
    """
    import torch

    found = {"memlab": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine") if engine == "megatron" else ("transformers",):
        found[package] = _installed(package)
    if predicted is not None and engine == "megatron":
        found["transformer-engine"] = f"{predicted.transformer_engine} (predicted)"
    return found


@cache
def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def hardware(gpu: int | None) -> dict[str, str]:
    """Returns the hardware that a lab runs on, in words, under the names that ``memlab doctor`` prints.

    Args:
        gpu: The device's number; None for a lab that uses none, which then reads nothing of CUDA.
    """
    # A lab's own thread may be pinned to some cores: what counts is what the process has when it opens a lab.
    found = {} if gpu is None else _gpu_facts(gpu)
    found["CPU"] = f"{processor_name()}, {num_cores()} cores"
    found["host memory"] = format_bytes(host_memory_bytes())
    return found


def _gpu_facts(gpu: int) -> dict[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(gpu)
    facts = {"GPU": f"{properties.name}, {format_bytes(properties.total_memory)}"}
    if _DRIVER_VERSION.is_file():
        facts["driver"] = _DRIVER_VERSION.read_text().strip()
    facts["CUDA"] = str(torch.version.cuda)
    nccl: Any = torch.cuda.nccl  # untyped
    facts["NCCL"] = ".".join(str(part) for part in nccl.version())
    return facts
