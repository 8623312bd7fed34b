"""Variables of the environment by which a training process takes more or less of its GPU's memory.

Those of torch's allocator are read where the scenario is built; the rest is named here. Names and meanings are those of
torch 2.14 (``c10/cuda``, ``aten/src/ATen/cuda/CublasHandlePool.cpp``), Transformer Engine 2.16 and NCCL 2.28
(``NCCL_PARAM`` in its sources).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from memlab.jobs.entries import UNKNOWN
from memlab.jobs.frameworks.framework import NotModelled, Reading
from memlab.jobs.frameworks.keys import Effect

_NCCL = "NCCL's buffers, outside torch's memory: memlab's estimate of them is for NCCL's own choice"


class _Variable(NamedTuple):
    pattern: str
    effect: Effect
    reason: str
    usual: tuple[str, ...] = ()
    """Values with which memlab's figures hold."""


_VARIABLES = (
    _Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "either", "torch's allocator gives each freed block back to CUDA"),
    _Variable("CUBLAS*_WORKSPACE_*", "either", "torch's workspace of cuBLAS has another size", (":4096:8",)),
    _Variable("TORCHDYNAMO_DISABLE", "either", "functions that frameworks compile run eagerly", ("0",)),
    _Variable("TORCH_COMPILE_DISABLE", "either", "functions that frameworks compile run eagerly", ("0",)),
    _Variable(
        *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "either", "deterministic kernels of attention have other workspaces"),
        ("1",),
    ),
    _Variable("NVTE_*_WORKSPACE_*", "either", "attention's workspace has another size"),
    _Variable("CUDA_MODULE_LOADING", "more", "CUDA loads all kernels at the start, outside torch's memory", ("LAZY",)),
    _Variable("NVSHMEM_SYMMETRIC_SIZE", "more", "NVSHMEM's heap is outside torch's memory"),
    _Variable("NCCL_NVLS_ENABLE", "more", "NVLink multicast's buffers, which memlab's estimate does not have", ("0",)),
    *(
        _Variable(f"NCCL_{name}", "either", _NCCL)
        for name in (
            *("ALGO", "PROTO", "*BUFFSIZE", "*CHUNKSIZE", "*NCHANNELS*", "*_CTAS", "CUMEM_ENABLE", "P2P_DISABLE"),
            *("SHM_DISABLE", "P2P_LEVEL", "MNNVL_ENABLE", "NET_SHARED_*", "RUNTIME_CONNECT", "NVLS_*"),
        )
    ),
)
_OUTSIDE_TORCH = ("NCCL_", "NVSHMEM_", "CUDA_MODULE_LOADING")
_SECTION = re.compile(
    r"(env_vars|policy\.(megatron|dtensor)_cfg\.env_vars|ray_kwargs\.ray_init\.runtime_env\.env_vars)"
)
"""Where configurations give the training's ranks variables, in lower case. Those of an inference engine are below its
own keys."""
_TEXTS = ("runtime_env_json", "train_env_vars")
"""Arguments of slime that hold them as a JSON text."""
_OF_TEXT = re.compile(r'"([A-Z][A-Z0-9_]+)"\s*:\s*"?([^",}]*)')


def note_environment(reading: Reading) -> None:
    """Names the variables of a job's environment that change a training GPU's memory and that memlab does not model."""
    for key, name, value, place in _given(reading):
        variable = next((one for one in _VARIABLES if fnmatchcase(name, one.pattern)), None)
        is_known = UNKNOWN not in value
        if variable is None or value in ("", *variable.usual) or (not is_known and is_outside_torch(name)):
            continue
        reason = variable.reason if is_known else f"{variable.reason}; its value is known only when the job runs"
        reading.not_modelled.append(NotModelled(key, value if is_known else None, variable.effect, reason, place))


def changes_memory(name: str) -> bool:
    """Whether torch, Transformer Engine or NCCL reads a variable that can change what a rank keeps on its GPU."""
    return name.startswith(("PYTORCH_", "NVTE_")) or any(fnmatchcase(name, one.pattern) for one in _VARIABLES)


def is_outside_torch(key: str) -> bool:
    """Whether a key is a variable that changes no tensor, but what others take of the GPU beside torch."""
    return key.rpartition(".")[2].startswith(_OUTSIDE_TORCH)


def _given(reading: Reading) -> Iterator[tuple[str, str, str, str]]:
    """Gives each variable's key, its name, its text and its place."""
    for name, text in reading.entries.environment.items():
        yield name, name, str(text), "environment"
    for key, entry in reading.entries.by_key.items():
        section, _, name = key.rpartition(".")
        if _SECTION.fullmatch(section.lower()) and entry.value is not None:
            yield key, name, str(entry.value), entry.place
        elif key in _TEXTS:
            for found, text in _OF_TEXT.findall(str(entry.value)):
                if found not in reading.entries.environment:
                    yield found, found, text, entry.place
