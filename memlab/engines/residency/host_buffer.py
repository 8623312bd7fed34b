"""Host memory for offloaded tensors: one buffer, allocated once, pinned, and exactly as large as requested.

torch's own pinned memory is rounded to the next power of two and kept for reuse (``torch.cuda.host_memory_stats``): 6.2
GB of parameters took 8.6 GB of host memory. Here ordinary memory is page-locked in place by ``cudaHostRegister``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_registered: dict[int, int] = {}


def registered_bytes() -> int:
    """Returns the host bytes that are page-locked by this module now."""
    return sum(_registered.values())


class HostBuffer:
    """Host memory for some tensors.

    Args:
        tensors: Contiguous; the buffer has a part of the same shape and dtype for each.
        pinned: If False, use pageable memory; copies are slower.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, pinned: bool = True) -> None:
        offsets: list[int] = []
        num_bytes = 0
        for tensor in tensors:
            start = -(-num_bytes // tensor.element_size()) * tensor.element_size()
            offsets.append(start)
            num_bytes = start + tensor.nbytes
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)  # `is_cuda` is true on every backend
        self.whole = _allocate(num_bytes, locked=pinned and on_gpu)
        if pinned:
            key = self.whole.untyped_storage()._cdata
            _registered[key] = num_bytes
            weakref.finalize(self, _forget, key, self.whole.data_ptr() if on_gpu else 0)
        self.parts = [
            self.whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(offsets, tensors, strict=True)
        ]


def _allocate(num_bytes: int, *, locked: bool) -> torch.Tensor:
    if not locked or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    # Written by all cores first: locking alone would fault the pages in one by one, on one core.
    whole = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").fill_(0)
    error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), num_bytes, 0)
    if error != torch.cuda.cudart().cudaError.success:
        raise RuntimeError(
            f"{num_bytes} bytes of host memory could not be page-locked ({error}): free host memory, or use pageable "
            "memory (lab.pinned_host_memory = False)"
        )
    return whole


def _forget(key: int, locked_address: int) -> None:
    del _registered[key]
    if locked_address:  # an empty tensor's is 0
        torch.cuda.cudart().cudaHostUnregister(locked_address)
