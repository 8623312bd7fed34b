"""The buffers of torch's own data parallelism: DDP's buckets, and FSDP's unsharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.live_objects import instances_of, with_subclasses

_DDP, _MESH = "torch.nn.parallel.distributed", "torch.distributed.device_mesh"
_FLAT_PARAM, _FSDP_PARAM = "torch.distributed.fsdp._flat_param", "torch.distributed.fsdp._fully_shard._fsdp_param"


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Some of the buffers that exist now, of every model of the process."""

    owner: str
    """What they are; in the place of a module's name."""
    category: str
    tensors: list[torch.Tensor]


def framework_buffers() -> Iterator[Buffers]:
    """Yields the buffers; DDP's buckets are gradients where the gradients are views of them."""
    for parallel in _instances(_DDP, "DistributedDataParallel"):
        category = "gradients" if parallel.gradient_as_bucket_view else "workspace"
        yield Buffers(owner="DistributedDataParallel's buckets", category=category, tensors=_buckets(parallel))
    flat = [handle.flat_param for handle in _instances(_FLAT_PARAM, "FlatParamHandle")]
    unsharded = [buffer for each in (*flat, *_instances(_FSDP_PARAM, "FSDPParam")) for buffer in _unsharded(each)]
    yield Buffers(owner="FSDP's unsharded parameters", category="workspace", tensors=unsharded)


def rank_maps() -> Iterator[torch.Tensor]:
    """Yields the tensors in which each ``DeviceMesh`` has its ranks' numbers, on the CPU whatever the device is."""
    for mesh in _instances(_MESH, "DeviceMesh"):
        yield from (value for value in vars(mesh).values() if isinstance(value, torch.Tensor))


def _instances(module: str, name: str) -> list[Any]:
    """Returns the instances of a class and its subclasses; none if the program has not imported its module."""
    found = sys.modules.get(module)
    return [] if found is None else list(instances_of(with_subclasses(getattr(found, name))))


def _buckets(parallel: Any) -> list[torch.Tensor]:
    reducer = getattr(parallel, "reducer", None)
    if reducer is None:
        return []
    seen = _Arguments()
    with seen:
        reducer._get_zeros_like_grad_buckets()
    return seen.tensors


class _Arguments(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first argument of each operation, and answers with it: nothing is computed or allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors.append(args[0])
        return args[0]


def _unsharded(parameter: Any) -> Iterator[torch.Tensor]:
    """Yields what a parameter of FSDP1 (``FlatParameter``) or of FSDP2 (``FSDPParam``) is gathered into."""
    for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
        buffer = getattr(parameter, name, None)
        if buffer is not None:
            yield buffer
    yield from getattr(parameter, "all_gather_outputs", ())
