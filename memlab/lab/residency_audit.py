"""Finds parameters, gradients and optimizer state by walking the engine's own objects, storage by storage.

It shares no code with `memlab.engines.residency.residency`, so that it finds what that misses. A storage belongs to the
first holder that refers to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from memlab.engines.protocol import Engine, HeldTensor
from memlab.meter.protocol import Meter
from memlab.record.residency_audit import Holding, HostCopy, RequestedPlacement, ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import format_bytes


def audit_residency(
    engine: Engine,
    meter: Meter,
    requested: RequestedPlacement,
    kept: Mapping[str, list[torch.Tensor]],
    move_host_bytes: tuple[int, int],
) -> ResidencyAudit:
    """Compares what is on device and host with where it was requested to be.

    Args:
        engine: With a model that is between two steps.
        meter: Knows the pool of a storage, and the bytes of storages that are not listed here.
        requested: Where each group should be.
        kept: The tensors of each group, with its host copies; only those on the host are read.
        move_host_bytes: Host bytes around the last transfer, and at its peak.
    """
    found = list(_storages(engine))
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in found:
        expected, there = sums.get((entry.group, entry.holder), (0, 0))
        sums[entry.group, entry.holder] = (
            expected + (0 if entry.group in requested.away or entry.is_always_on_host else entry.needed_bytes),
            there + (0 if meter.pool_of(entry.tensor) == "host" else entry.tensor.untyped_storage().nbytes()),
        )
    named = [*(entry.tensor for entry in found), *engine.workspace()]
    return ResidencyAudit(
        holdings=tuple(
            Holding(group=group, holder=holder, expected_bytes=expected, device_bytes=there)
            for (group, holder), (expected, there) in sums.items()
        ),
        host_copies=tuple(_host_copy(group, found, kept[group], meter, requested) for group in GROUPS),
        unnamed_device_bytes=meter.untracked_bytes(named),
        move_host_bytes=move_host_bytes[0],
        move_peak_host_bytes=move_host_bytes[1],
    )


def require_resident(engine: Engine, groups: Collection[str] = GROUPS) -> None:
    """Checks that no tensor that a step writes to has lost its storage; cheap enough for every step.

    Raises:
        ValueError: With the first tensor that has, and what a step would have done.
    """
    for group, name, tensor in engine.written_by_a_step():
        allocated, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
        if group in groups and allocated < needed:
            raise ValueError(
                f"{name} has {format_bytes(allocated)} of the {format_bytes(needed)} that it needs: a step would write "
                "to memory that is not its own, so it did not run: first end the with block in which other "
                "code than memlab's moves them, such as residency_fault"
            )


def _host_copy(
    group: str, found: list[HeldTensor], kept: list[torch.Tensor], meter: Meter, requested: RequestedPlacement
) -> HostCopy:
    expected = sum(
        entry.needed_bytes
        for entry in found
        if entry.group == group and (entry.is_always_on_host or group in requested.copied)
    )
    return HostCopy(
        group=group,
        expected_bytes=expected,
        host_bytes=_host_bytes([*kept, *(e.tensor for e in found if e.group == group)], meter),
    )


def _host_bytes(tensors: list[torch.Tensor], meter: Meter) -> int:
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if meter.pool_of(tensor) == "host"
    }
    return sum(storages.values())


def _storages(engine: Engine) -> Iterator[HeldTensor]:
    seen: set[int] = set()
    for entry in engine.holdings():
        key = entry.tensor.untyped_storage()._cdata
        if key not in seen:
            seen.add(key)
            yield entry
