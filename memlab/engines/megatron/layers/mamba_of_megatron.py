"""Megatron's layer of Mamba 2, imported where Triton is not installed too."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_KERNELS_OF_INFERENCE = {
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
        *("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"),
    ),
}
"""What ``mamba_mixer.py`` imports of modules in Triton (0.16.1); training calls nothing of it."""


def _imported(module: str) -> Any:
    stand_ins = {}
    for name, kernels in _KERNELS_OF_INFERENCE.items():
        if find_spec("triton") is None and name not in sys.modules:
            stand_ins[name] = ModuleType(name)
            vars(stand_ins[name]).update(dict.fromkeys(kernels))
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(f"megatron.core.{module}")
    finally:
        for name in stand_ins:
            del sys.modules[name]


mamba_mixer, mamba_layer = _imported("ssm.mamba_mixer"), _imported("ssm.mamba_layer")
mamba_block, mamba_model = _imported("ssm.mamba_block"), _imported("models.mamba.mamba_model")
