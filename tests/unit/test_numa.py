"""Which processors are near a GPU, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

from memlab.backends.numa import processors_of


def test_the_processors_are_those_of_the_device_s_node(tmp_path: Path) -> None:
    (tmp_path / "numa_node").write_text("1\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("8-10,24\n")
    assert processors_of(tmp_path / "numa_node", tmp_path) == {8, 9, 10, 24}


def test_a_device_whose_node_the_kernel_does_not_know_has_none(tmp_path: Path) -> None:
    assert processors_of(tmp_path / "numa_node", tmp_path) == frozenset()
    (tmp_path / "numa_node").write_text("-1\n")
    assert processors_of(tmp_path / "numa_node", tmp_path) == frozenset()
