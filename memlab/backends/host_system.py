"""The host under a lab: how much of its memory this process may use, and which processors are close to a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory_bytes() -> int:
    """Returns the host memory that this process may use: the machine's, or the container's limit if that is lower."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *cgroup_limits_bytes(_OWN_CGROUPS, _CGROUPS)])


def cgroup_limits_bytes(own_cgroups: Path, root: Path) -> list[int]:
    """Returns the memory limits of this process's control groups; empty without limits, and on other systems.

    A group is also bound by the limits of the groups around it. Version 2 has one tree with ``memory.max``, in which
    "max" is no limit; version 1 has a tree for memory, with ``memory.limit_in_bytes`` (kernel documentation,
    ``admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``). Inside a container the tree often begins at the
    container's own group, and the path that the kernel reports does not exist: the root is then the container's group.

    Args:
        own_cgroups: ``/proc/self/cgroup``, with lines such as ``0::/user.slice`` or ``4:memory:/docker/1f``.
        root: ``/sys/fs/cgroup``.
    """
    return [limit_bytes for limit_bytes, _ in _limited_groups(own_cgroups, root)]


def free_host_memory_bytes() -> int:
    """Returns the host memory that processes may still take: the machine's, or what the container's limit leaves."""
    return min([psutil.virtual_memory().available, *cgroup_free_bytes(_OWN_CGROUPS, _CGROUPS)])


def cgroup_free_bytes(own_cgroups: Path, root: Path) -> list[int]:
    """Returns what the limits of this process's control groups leave; the arguments are those of `cgroup_limits_bytes`.

    The group's use counts its file cache. The kernel drops the inactive part of that before it refuses memory, so that
    part is free, as in Kubernetes' working set.
    """
    free: list[int] = []
    for limit_bytes, group in _limited_groups(own_cgroups, root):
        use, cache = (
            ("current", "inactive_file") if group.name == "memory.max" else ("usage_in_bytes", "total_inactive_file")
        )
        try:
            used_bytes = int(group.with_name(f"memory.{use}").read_text())
            facts = dict(line.split() for line in group.with_name("memory.stat").read_text().splitlines())
            free.append(max(0, limit_bytes - used_bytes + int(facts.get(cache, 0))))
        except (OSError, ValueError):
            free.append(limit_bytes)
    return free


def _limited_groups(own_cgroups: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the limit of each group that has one, and the file that says so."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            try:
                text = (tree / group / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                yield int(text), tree / group / name


def pin_to_numa_node(device: int) -> None:
    """Keeps the current thread on the processors of the GPU's own NUMA node, on a machine with several nodes.

    Copies between host and device are slower from another node. Megatron-LM does the same through NVML
    (``set_ideal_affinity_for_current_gpu`` in ``megatron/core/pipeline_parallel/utils.py``), which needs cuda-python
    and pynvml; the kernel has the same facts.
    """
    near = _processors_near(device)
    allowed = near & os.sched_getaffinity(0) if near else set()
    if allowed:
        os.sched_setaffinity(0, allowed)


@functools.cache
def _processors_near(device: int) -> frozenset[int]:
    if len(list(_NODES.glob("node[0-9]*"))) < 2:
        return frozenset()
    import torch

    properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack the address
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return processors_of(_PCI_DEVICES / address / "numa_node", _NODES)


def processors_of(numa_node_file: Path, nodes: Path) -> frozenset[int]:
    """Returns the processors of the node that a device's file names; empty if the kernel does not know the node.

    Args:
        numa_node_file: The device's ``numa_node``, which contains a number, -1 if unknown.
        nodes: ``/sys/devices/system/node``; ``node1/cpulist`` contains ranges such as ``8-10,24``.
    """
    try:
        node = int(numa_node_file.read_text())
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
    except FileNotFoundError:
        return frozenset()
    found: set[int] = set()
    for span in filter(None, ranges):
        first, _, last = span.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
