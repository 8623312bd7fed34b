"""The hardware that a record names."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memlab import import_path
from memlab.cpu_info import processor_features, processor_name
from memlab.lab import environment
from memlab.record.step_record import StepRecord


def test_a_record_names_the_processor_and_the_memory_that_the_process_may_use(
    open_lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.hardware.cache_clear()
    monkeypatch.setattr(environment, "host_memory_bytes", lambda: 6 * 1024**3)
    record = open_lab("phi-4-tiny", num_layers=1, seq_length=16).step()
    environment.hardware.cache_clear()
    assert set(record.hardware) == {"CPU", "host memory"}, "a lab on the CPU reads nothing of CUDA"
    assert record.hardware["host memory"] == "6.000 GiB"
    assert record.hardware["CPU"].endswith(" cores")
    assert StepRecord.load(record.save(tmp_path / "record")).hardware == record.hardware


def test_a_gpu_is_named_with_driver_cuda_and_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("580.65.06\n")
    gpus = [
        SimpleNamespace(name="another", total_memory=1),
        SimpleNamespace(name="NVIDIA H200", total_memory=150 * 1024**3),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpus[number])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(environment, "_DRIVER_VERSION", tmp_path / "version")
    found = environment.hardware.__wrapped__(1)
    assert list(found) == ["GPU", "driver", "CUDA", "NCCL", "CPU", "host memory"]
    assert found["GPU"] == "NVIDIA H200, 150.000 GiB"
    assert (found["driver"], found["CUDA"], found["NCCL"]) == ("580.65.06", "12.8", "2.27.3")


def test_the_processor_is_the_kernel_s_name_for_it_or_else_the_system_s(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    assert processor_name(facts) == (platform.processor() or platform.machine())
    assert processor_features(facts) == frozenset()
    facts.write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\nflags\t\t: avx2 amx\n\nmodel name\t: other\n")
    assert processor_name(facts) == "A Fast One @ 3 GHz"
    assert processor_features(facts) == {"avx2", "amx"}


def test_a_child_process_imports_this_memlab_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variables = import_path.variables_that_import_memlab()
    code = "import sys, memlab; print(memlab.__file__, sys.path)"
    child = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without site-packages, where memlab may be installed
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.startswith(str(Path(import_path.__file__).parent / "__init__.py"))
    assert str(tmp_path) in child.stdout, "what was on the path stays there"
