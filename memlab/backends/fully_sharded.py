"""FSDP1 and FSDP2 without CUDA: what of `torch.distributed.fsdp` and of DTensor asks for a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partialmethod
from threading import Event, Thread
from typing import Any

import torch

from memlab.backends.cuda_on_cpu import is_on_host, made_on_host
from memlab.backends.fake_cuda import FAKE
from memlab.meter.labels import current_stream, on_stream, record_stream
from memlab.meter.observers import unobserved
from memlab.upstream.patching import patched

_PROPAGATION = "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
_FSDP = "torch.distributed.fsdp._fully_shard"
_VERSION_1 = "torch.distributed.fsdp._runtime_utils"
_FLAT = "torch.distributed.fsdp._flat_param"
_HANDLE = f"{_FLAT}.FlatParamHandle"
_PARAMETER = f"{_FSDP}._fsdp_param.FSDPParam"


def _reshard_gathered(unit: Any) -> None:
    """Does what FSDP1 does for a unit whose backward has not, such as a frozen one: frees its gathered parameters.

    FSDP1 compares addresses, of which fake tensors have none.
    """
    from torch.distributed.fsdp import _runtime_utils

    handle = unit._handle
    if handle is None:
        return
    own, gathered = (each.untyped_storage()._cdata for each in (handle.flat_param._local_shard, handle.flat_param))
    if own != gathered or handle._skipped_use_sharded_views:
        _runtime_utils._reshard(unit, handle, _runtime_utils._should_free_in_backward(unit, handle))


def _views_of_stream(handle: Any, make: Any, *args: Any) -> list[torch.Tensor]:
    """Returns FSDP1's views of a flat parameter, whose backward runs on the stream that makes them, as on a GPU.

    There it joins the gradients of a unit's parameters to a flat one, which has its memory from that stream (torch
    2.11, seen in the history of an H200's allocator).
    """
    views, own = list(make(handle, *args)), current_stream()
    node = views[0].grad_fn
    if own == 0 or node is None:
        return views
    joined, entered = node.next_functions[0][0], ExitStack()
    joined.register_prehook(lambda gradients: entered.enter_context(on_stream(own)))
    joined.register_hook(lambda *_: entered.close())
    return views


class _FakeHandle:
    """The module ``torch.cuda`` for FSDP1, which asks it whether there is a GPU."""

    def is_available(self) -> bool:
        """Returns True."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@cache
def _keep_device_guard() -> None:
    """Has torch 2.11 make its fake CUDA device guard on a thread that never ends.

    DTensor finds the shapes of its results in a fake mode. A CUDA build without a GPU makes that guard when a process
    first enters one, and all later ones use it. torch 2.11 frees it with the thread that made it, so that the next
    lab's thread would end in a segmentation fault (pytorch/pytorch#178950, repaired in 2.12).
    """
    if not torch.__version__.startswith("2.11.") or torch.cuda.is_available():
        return
    is_made = Event()

    def make() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_made.set()
        Event().wait()

    Thread(target=make, name="memlab-device-guard", daemon=True).start()
    is_made.wait()


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Lets FSDP2 shard tensors of the CPU, for the block."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    _keep_device_guard()
    to_sharded_dtensor = FSDPParam.to_sharded_dtensor
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unobserved(*args: Any, **kwargs: Any) -> Any:
        with unobserved(), torch._C.DisableTorchFunction():
            return propagate(*args, **kwargs)

    def copied_to_host(parameter: FSDPParam, tensor: torch.Tensor) -> Any:
        # What FSDP2 copies to "the CPU" is on the CPU already here, so that it makes no copy.
        if parameter.offload_to_cpu and not is_on_host(tensor):
            tensor = made_on_host(torch.clone, tensor, pinned=parameter.pin_memory)
        return to_sharded_dtensor(parameter, tensor)

    with patched({_PROPAGATION: propagate_unobserved, f"{_PARAMETER}.to_sharded_dtensor": copied_to_host}):
        yield


@contextmanager
def sharding_on_fake_tensors() -> Iterator[None]:
    """Lets FSDP2 shard fake tensors, with the streams of a CUDA device, for the block."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    replacements = {
        f"{_FSDP}._fully_shard._get_device_from_mesh": lambda mesh: FAKE,
        **{
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup.{name}": lambda group: None
            for name in ("_validate_no_meta_params", "_validate_cpu_offload_params")
        },
        # torch registers a new tensor as its result for fake tensors (2.11 and 2.13): all logits once more, if the
        # vocabulary is divided. On a device, the result has the collective's own storage (`AsyncCollectiveTensor`).
        "torch.distributed._functional_collectives._maybe_wrap_tensor": lambda output: output,
        "torch.distributed.fsdp._common_utils._FSDPDeviceHandle.from_device": lambda device: _FakeHandle(),
        **{
            f"{module}._no_dispatch_record_stream": lambda tensor, stream: record_stream(tensor, stream.number)
            for module in (_FLAT, _VERSION_1)
        },
        f"{_VERSION_1}._catch_all_reshard": _reshard_gathered,
        **{
            f"{_HANDLE}.{name}": partialmethod(_views_of_stream, getattr(FlatParamHandle, name))
            for name in ("_get_unflat_views_aligned", "_get_unflat_views_unaligned")
        },
        "torch.optim.adam._device_dtype_check_for_fused": lambda parameter: None,
        "torch.nn.utils.clip_grad._device_has_foreach_support": lambda device: True,
        **{
            f"{_FSDP}.{module}._get_device_handle": lambda kind: torch.cuda
            for module in ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state")
        },
    }
    with sharding_on_cpu(), patched(replacements):
        yield
