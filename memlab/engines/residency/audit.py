"""Finds parameters, gradients and optimizer state by walking Megatron's own objects, storage by storage.

It shares no code with `memlab.engines.residency.residency`, so that it finds what that misses. A storage belongs to the
first holder that refers to it: in fp32 the main parameters are views of the parameters (megatron-core 0.16.1, 0.19.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.retention import megatron_globals
from memlab.meter.protocol import Meter
from memlab.record.residency_audit import Holding, HostCopy, RequestedPlacement, ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import format_bytes


@dataclass(frozen=True, slots=True)
class _Found:
    group: str
    holder: str
    tensor: torch.Tensor
    is_needed: bool = True
    """False for a tensor that exists only if something was copied twice."""

    @property
    def is_always_on_host(self) -> bool:
        """Whether Megatron's CPU optimizer keeps it on the host."""
        return not self.tensor.is_cuda

    @property
    def needed_bytes(self) -> int:
        # By its shape, which an emptied tensor keeps.
        return self.tensor.numel() * self.tensor.element_size() if self.is_needed else 0


def audit_residency(
    live: LiveModel,
    meter: Meter,
    requested: RequestedPlacement,
    kept: Mapping[str, list[torch.Tensor]],
    move_host_bytes: tuple[int, int],
) -> ResidencyAudit:
    """Compares what is on device and host with where it was requested to be.

    Args:
        live: A model between two steps.
        meter: Knows the pool of a storage, and the bytes of storages that are not listed here.
        requested: Where each group should be.
        kept: The tensors of each group, with its host copies; only those on the host are read.
        move_host_bytes: Host bytes around the last transfer, and at its peak.
    """
    found = list(_storages(live))
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in found:
        expected, there = sums.get((entry.group, entry.holder), (0, 0))
        sums[entry.group, entry.holder] = (
            expected + (0 if entry.group in requested.away or entry.is_always_on_host else entry.needed_bytes),
            there + (0 if meter.pool_of(entry.tensor) == "host" else entry.tensor.untyped_storage().nbytes()),
        )
    named = [*(entry.tensor for entry in found), *megatron_globals.workspace(live)]
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


def require_resident(live: LiveModel, groups: Collection[str] = GROUPS) -> None:
    """Checks that neither DDP's buffers nor parameters outside them have lost storage; cheap enough for every step.

    Raises:
        ValueError: With the first buffer that has, and what a step would have done.
    """
    for name, buffer in live.buffers():
        tensors = [("parameters", "param_data", buffer.param_data), ("gradients", "grad_data", buffer.grad_data)]
        if buffer.param_data is None:
            tensors[:1] = [("parameters", "params", parameter.data) for parameter in buffer.params]
        for group, attribute, tensor in tensors:
            if group not in groups:
                continue
            allocated, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
            if allocated < needed:
                raise ValueError(
                    f"{name}.{attribute} has {format_bytes(allocated)} of the {format_bytes(needed)} that it needs: a "
                    "step would write to memory that is not its own, so it did not run: end the with block of "
                    "residency_fault first"
                )


def _host_copy(
    group: str, found: list[_Found], kept: list[torch.Tensor], meter: Meter, requested: RequestedPlacement
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


def _storages(live: LiveModel) -> Iterator[_Found]:
    seen: set[int] = set()
    for source in (_parameters(live), _gradients(live), _optimizer_state(live)):
        for entry in source:
            key = entry.tensor.untyped_storage()._cdata
            if key not in seen:
                seen.add(key)
                yield entry


def _parameters(live: LiveModel) -> Iterator[_Found]:
    for name, buffer in live.buffers():
        if buffer.param_data is not None:  # without the distributed optimizer DDP leaves parameters where they are
            yield _Found("parameters", f"{name}.param_data", buffer.param_data)
    for parameter in live.parameters():
        yield _Found("parameters", "parameters outside DDP's buffers", parameter.data)


def _gradients(live: LiveModel) -> Iterator[_Found]:
    for name, buffer in live.buffers():
        yield _Found("gradients", f"{name}.grad_data", buffer.grad_data)
    for parameter in live.parameters():
        for attribute in ("main_grad", "grad"):
            gradient = getattr(parameter, attribute, None)
            if gradient is not None:
                yield _Found("gradients", f"the parameters' .{attribute}", gradient, is_needed=False)
    reduced = {buffer.grad_data.dtype for _, buffer in live.buffers()}
    for main_parameter in _main_parameters(live):
        for attribute in ("grad", "decoupled_grad"):
            gradient = getattr(main_parameter, attribute, None)
            if gradient is not None:
                # Megatron copies gradients of another type than the main parameters' (distrib_optimizer.py).
                is_copy = gradient.dtype not in reduced
                yield _Found("gradients", f"the main parameters' .{attribute}", gradient, is_needed=is_copy)
    for _, updated, _ in _updated_by_cpu_optimizers(live):
        if updated.grad is not None and updated.is_cuda:
            yield _Found("gradients", "the CPU optimizer's gradients on the device", updated.grad)


def _optimizer_state(live: LiveModel) -> Iterator[_Found]:
    for main_parameter in _main_parameters(live):
        yield _Found("optimizer state", "main parameters", main_parameter.data)
    for part in live.optimizers:
        for state in part.optimizer.state.values():
            for name, value in state.items():
                yield from (_Found("optimizer state", name, tensor) for tensor in _parts_of(value))
        for scales in getattr(part.optimizer, "_scales", {}).values():
            yield from (_Found("optimizer state", f"scale of {name}", scale) for name, scale in scales.items())
    for holder, updated, state in _updated_by_cpu_optimizers(live):
        yield _Found("optimizer state", f"{holder} parameters", updated.data)
        if updated.grad is not None:
            yield _Found("optimizer state", f"{holder} gradients", updated.grad)
        for name, value in state.items():
            yield from (_Found("optimizer state", f"{holder} {name}", tensor) for tensor in _parts_of(value))


def _updated_by_cpu_optimizers(live: LiveModel) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Yields what the optimizers inside Megatron's CPU optimizers update, with its state."""
    in_use = [("the CPU optimizer's", part.optimizer) for part in live.optimizers]
    discarded = [("the discarded CPU optimizer's", optimizer) for optimizer in live.discarded_optimizers]
    for holder, optimizer in in_use + discarded:
        for inner in getattr(optimizer, "sub_optimizers", ()):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield holder, parameter, inner.state.get(parameter, {})


def _parts_of(value: Any) -> list[torch.Tensor]:
    """Returns a state's tensors: those of an FP8 state are its attributes, and its quantizer's."""
    if type(value) is torch.Tensor:
        return [value]
    attributes = {**getattr(value, "__dict__", {}), **getattr(getattr(value, "_quantizer", None), "__dict__", {})}
    return [attribute for attribute in attributes.values() if type(attribute) is torch.Tensor]


def _main_parameters(live: LiveModel) -> Iterator[torch.Tensor]:
    for part in live.optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
