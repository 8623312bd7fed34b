"""Device memory that NCCL takes, per communicator and kind of collective, on the GPUs of this machine.

    torchrun --nproc-per-node 4 -m benchmarks.nccl_memory --out nccl.json

A communicator takes its memory when a collective of a kind is first used. Each line is a new communicator of all or
some of the ranks that is used once, twice, and then in a second way. What the whole device has in use is read before
and after: nothing else may run there. NVLink multicast (NVLS) is off where ``NCCL_NVLS_ENABLE`` is 0, and takes memory
of its own otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from memlab.units import MIB

ELEMENTS = 32 * MIB
"""Of each tensor, in bf16: 64 MiB."""
COMMUNICATORS = 3

Collective = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]


def send_and_receive(source: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Exchanges a tensor with the next and the former rank, as pipeline stages do."""
    ranks = dist.get_process_group_ranks(group)
    own = ranks.index(dist.get_rank())
    both = [
        dist.P2POp(dist.isend, source, ranks[(own + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, into, ranks[own - 1], group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


KINDS: dict[str, Collective] = {
    "all-reduce": lambda source, into, group: dist.all_reduce(into, group=group),
    "all-gather": lambda source, into, group: dist.all_gather_into_tensor(into, part(source, group), group=group),
    "reduce-scatter": lambda source, into, group: dist.reduce_scatter_tensor(part(into, group), source, group=group),
    "all-to-all": lambda source, into, group: dist.all_to_all_single(into, source, group=group),
    "send and receive": send_and_receive,
}
SECOND = {"all-reduce": "all-to-all", "all-gather": "reduce-scatter", "all-to-all": "all-reduce"}
"""What a communicator of a kind is used for afterwards."""


def part(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns one rank's share of a tensor."""
    return tensor[: tensor.numel() // group.size()]


def used_bytes() -> int:
    """Returns what the device has in use outside torch's allocator, once all ranks have come here."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measure() -> list[dict[str, object]]:
    """Uses communicators of each kind; returns what each use took on this rank."""
    source, into = (torch.ones(ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    world_size = dist.get_world_size()
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    rows = []
    for size, kind, number in product(sizes, KINDS, range(COMMUNICATORS)):
        group, _ = dist.new_subgroups(size)
        for use in (kind, kind, SECOND.get(kind)):
            if use is not None:
                before = used_bytes()
                KINDS[use](source, into, group)
                taken = used_bytes() - before
                rows.append({"size": size, "kind": kind, "number": number, "use": use, "bytes": taken})
    return rows


def main() -> None:
    """Measures, prints a table, and writes what every rank saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = measure()
    everyone: list[list[dict[str, object]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, rows)
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        gpu = torch.cuda.get_device_name()
        out.write_text(json.dumps({"gpu": gpu, "versions": versions, "environment": settings, "ranks": everyone}))
        for one, *others in zip(*everyone, strict=True):
            taken = " ".join(f"{int(str(row['bytes'])) / MIB:8.0f}" for row in (one, *others))
            print(f"{one['size']} ranks  {one['kind']:20}{one['number']}  {one['use']:20}{taken} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
