"""What FP8 layers keep on the device between steps: their weights in FP8, and the state of their quantizers.

The names are those of Transformer Engine's modules (``transformer_engine/pytorch/module/base.py``, 2.12.0), which
the layers for fake tensors have too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_BESIDE_THE_BUFFER = (
    *("_transpose", "_scale_inv"),
    *("_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
)
"""Attributes of parameters in FP8 with tensors outside DDP's buffer of parameters (``tensor/*_tensor.py``)."""


def fp8_caches(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors that a module keeps for FP8."""
    attributes = vars(module)
    for workspace in attributes.get("_fp8_workspaces", {}).values():
        yield from _tensors_of(workspace)
    for quantizers in attributes.get("quantizers", {}).values():
        for quantizer in quantizers:
            yield from _tensors_of(quantizer)
    for state in attributes.get("fp8_meta", {}).values():
        yield from _tensors_of(state)
    for parameter in module.parameters(recurse=False):
        own = vars(parameter)
        yield from (own[name] for name in _BESIDE_THE_BUFFER if type(own.get(name)) is torch.Tensor)
        if "quantized" in own:
            yield from own["quantized"].outside_the_buffer()


def tensors_of_parameter(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Returns the tensors of a parameter outside DDP's buffer, which in MXFP8 are its values and scales."""
    own = vars(parameter)
    of_engine = [own[name] for name in ("_rowwise_data", *_BESIDE_THE_BUFFER) if type(own.get(name)) is torch.Tensor]
    return own["quantized"].tensors() if "quantized" in own else of_engine or [parameter.data]


def _tensors_of(owner: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors among the attributes of an object, and in lists there."""
    for value in getattr(owner, "__dict__", {}).values():
        for tensor in value if isinstance(value, list) else (value,):
            if type(tensor) is torch.Tensor:
                yield tensor
