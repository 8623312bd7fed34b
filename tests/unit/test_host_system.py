"""Which processors are close to a GPU, and how much memory a container leaves a process, as the kernel reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.backends import host_system
from memlab.backends.cpu import bytes_per_parameter, require_host_memory
from memlab.backends.host_system import (
    cgroup_free_bytes,
    cgroup_limits_bytes,
    free_host_memory_bytes,
    host_memory_bytes,
    processors_of,
)
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from memlab.record.transfer import GROUPS
from tests.unit.inside import inside


def test_the_processors_are_those_of_the_device_s_node(tmp_path: Path) -> None:
    (tmp_path / "numa_node").write_text("1\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("8-10,24\n")
    assert processors_of(tmp_path / "numa_node", tmp_path) == {8, 9, 10, 24}


def test_a_device_whose_node_the_kernel_does_not_know_has_none(tmp_path: Path) -> None:
    assert processors_of(tmp_path / "numa_node", tmp_path) == frozenset()
    (tmp_path / "numa_node").write_text("-1\n")
    assert processors_of(tmp_path / "numa_node", tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/jobs/a\n", {"jobs/a/memory.max": "max", "jobs/memory.max": "4096"}, [4096]),
        ("0::/jobs/a\n", {"jobs/a/memory.max": "1024", "jobs/memory.max": "4096"}, [1024, 4096]),
        ("0::/not/in/this/namespace\n", {"memory.max": "2048"}, [2048]),
        ("4:memory:/a\n3:cpu:/b\n", {"memory/a/memory.limit_in_bytes": "512", "memory.max": "1"}, [512]),
        ("0::/\n", {}, []),
        ("", {"memory.max": "1"}, []),
    ],
)
def test_a_group_is_bound_by_its_own_limit_and_those_around_it(
    tmp_path: Path, own: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cgroup_limits_bytes(tmp_path / "own", tmp_path) == limits
    assert cgroup_free_bytes(tmp_path / "own", tmp_path) == limits, "nothing is known to be used"
    for name in files:
        group, is_first_version = tmp_path / name, name.endswith("in_bytes")
        group.with_name("memory.usage_in_bytes" if is_first_version else "memory.current").write_text("600\n")
        cache = "total_inactive_file" if is_first_version else "inactive_file"
        group.with_name("memory.stat").write_text(f"anon 500\n{cache} 100\n")
    assert cgroup_free_bytes(tmp_path / "own", tmp_path) == [max(0, limit - 500) for limit in limits]


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits_bytes(tmp_path / "missing", tmp_path) == []


def test_a_model_larger_than_the_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.of("phi-4-tiny")
    require_host_memory(scenario)
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{1024**2}\n")
    monkeypatch.setattr(host_system, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_system, "_CGROUPS", tmp_path)
    assert host_memory_bytes() == 1024**2 == free_host_memory_bytes()
    with pytest.raises(ValueError, match=r"this process may use 1\.00 MiB"):
        require_host_memory(scenario)


@pytest.mark.parametrize(
    ("state", "dtype", "copies"),
    [
        ({}, "bf16", 0),
        ({}, "fp32", 0),
        ({"grad_reduce_in_bf16": True}, "bf16", 4),  # fp32 copies of the gradients, until the next step
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, "bf16", 0),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, "fp32", 0),
        ({"optimizer_cpu_offload": True}, "bf16", 4 + 4),  # fp32 copies of main parameters and gradients on the host
    ],
)
def test_a_training_state_takes_the_bytes_that_are_compared_with_the_host(
    state: dict[str, Any], dtype: Any, copies: int
) -> None:
    with Lab(
        "phi-4-tiny", num_layers=1, seq_length=16, dtype=dtype, state=TrainingState(**state), backend="cpu"
    ) as lab:
        lab.step()
        groups = inside(lab).worker.submit(inside(lab).model.transfers.residency.tensors).result()
        storages = [tensor.untyped_storage() for group in GROUPS for tensor in groups[group]]
        taken = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        num_parameters = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
        assert taken / num_parameters == pytest.approx(bytes_per_parameter(lab.scenario) + copies, rel=0.01)
