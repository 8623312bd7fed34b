"""What a Megatron model keeps from step to step: a walk of Megatron's own objects, for the audits.

It shares no code with `memlab.engines.megatron.groups`, so that it finds what that misses. In fp32 the main parameters
are views of the parameters (megatron-core 0.16.1, 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.protocol import HeldTensor


def holdings(live: LiveModel) -> Iterator[HeldTensor]:
    """Yields parameters, gradients and optimizer state, each with what refers to it."""
    yield from _parameters(live)
    yield from _gradients(live)
    yield from _optimizer_state(live)


def written_by_a_step(live: LiveModel) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields DDP's buffers and the parameters outside them, as group, name and tensor."""
    for name, buffer in live.buffers():
        if buffer.param_data is None:
            yield from (("parameters", f"{name}.params", parameter.data) for parameter in buffer.params)
        else:
            yield "parameters", f"{name}.param_data", buffer.param_data
        yield "gradients", f"{name}.grad_data", buffer.grad_data


def _parameters(live: LiveModel) -> Iterator[HeldTensor]:
    for name, buffer in live.buffers():
        # Without the distributed optimizer DDP leaves parameters where they are; MXFP8 ones pass through the gradients.
        reuses = buffer.ddp_config.reuse_grad_buf_for_mxfp8_param_ag and buffer.param_dtype == torch.uint8
        if buffer.param_data is not None and not reuses:
            yield HeldTensor("parameters", f"{name}.param_data", buffer.param_data)
    for parameter in live.parameters():
        yield HeldTensor("parameters", "parameters outside DDP's buffers", parameter.data)


def _gradients(live: LiveModel) -> Iterator[HeldTensor]:
    for name, buffer in live.buffers():
        yield HeldTensor("gradients", f"{name}.grad_data", buffer.grad_data)
    for parameter in live.parameters():
        for attribute in ("main_grad", "grad"):
            gradient = getattr(parameter, attribute, None)
            if gradient is not None:
                yield HeldTensor("gradients", f"the parameters' .{attribute}", gradient, is_needed=False)
    reduced = {buffer.grad_data.dtype for _, buffer in live.buffers()}
    for main_parameter in _main_parameters(live):
        for attribute in ("grad", "decoupled_grad"):
            gradient = getattr(main_parameter, attribute, None)
            if gradient is not None:
                # Megatron copies gradients of another type than the main parameters' (distrib_optimizer.py).
                is_copy = gradient.dtype not in reduced
                yield HeldTensor("gradients", f"the main parameters' .{attribute}", gradient, is_needed=is_copy)
    for _, updated, _ in _updated_by_cpu_optimizers(live):
        if updated.grad is not None and updated.is_cuda:
            yield HeldTensor("gradients", "the CPU optimizer's gradients on the device", updated.grad)


def _optimizer_state(live: LiveModel) -> Iterator[HeldTensor]:
    for main_parameter in _main_parameters(live):
        yield HeldTensor("optimizer state", "main parameters", main_parameter.data)
    for part in live.optimizers:
        for state in part.optimizer.state.values():
            for name, value in state.items():
                yield from (HeldTensor("optimizer state", name, tensor) for tensor in _parts_of(value))
        for scales in getattr(part.optimizer, "_scales", {}).values():
            yield from (HeldTensor("optimizer state", f"scale of {name}", scale) for name, scale in scales.items())
    for holder, updated, state in _updated_by_cpu_optimizers(live):
        yield HeldTensor("optimizer state", f"{holder} parameters", updated.data)
        if updated.grad is not None:
            yield HeldTensor("optimizer state", f"{holder} gradients", updated.grad)
        for name, value in state.items():
            yield from (HeldTensor("optimizer state", f"{holder} {name}", tensor) for tensor in _parts_of(value))


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
