"""Which processors are close to a GPU, and how much memory a container leaves a process, as the kernel reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.backends import host_system
from memlab.backends.cpu import require_host_memory
from memlab.backends.host_system import cgroup_limits_bytes, host_memory_bytes, processors_of
from memlab.config.scenario import Scenario


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


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits_bytes(tmp_path / "missing", tmp_path) == []


def test_a_model_larger_than_the_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.of("phi-4-tiny")
    require_host_memory(scenario)
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{1024**2}\n")
    monkeypatch.setattr(host_system, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_system, "_CGROUPS", tmp_path)
    assert host_memory_bytes() == 1024**2
    with pytest.raises(ValueError, match=r"this process may use 1\.00 MiB"):
        require_host_memory(scenario)
