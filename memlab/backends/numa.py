"""Copies between host and device are slower from the far side of a machine: the lab's thread stays near its GPU."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def stay_near(device: int) -> None:
    """Lets the current thread run only on processors of the GPU's own NUMA node, where a machine has several.

    Megatron-LM does the same through NVML (``set_ideal_affinity_for_current_gpu`` in
    ``megatron/core/pipeline_parallel/utils.py``), which needs cuda-python and pynvml; the kernel says it too.
    """
    near = _processors_near(device)
    allowed = near & os.sched_getaffinity(0) if near else set()
    if allowed:
        os.sched_setaffinity(0, allowed)


@functools.cache
def _processors_near(device: int) -> frozenset[int]:
    if len(list(_NODES.glob("node[0-9]*"))) < 2:
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack the address
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return processors_of(_PCI_DEVICES / address / "numa_node", _NODES)


def processors_of(numa_node_file: Path, nodes: Path) -> frozenset[int]:
    """Returns the processors of the node that a device's file names; none where the kernel does not know."""
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
