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
        self.whole = _allocate(num_bytes, pinned=pinned, on_gpu=any(tensor.is_cuda for tensor in tensors))
        self.parts = [
            self.whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(offsets, tensors, strict=True)
        ]
        if self.whole.data_ptr() in _registered:
            weakref.finalize(self, _unlock, self.whole.data_ptr())


def _allocate(num_bytes: int, *, pinned: bool, on_gpu: bool) -> torch.Tensor:
    if not on_gpu or not pinned or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned and not on_gpu)
    # Written by all cores first: locking alone would fault the pages in one by one, on one core.
    whole = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").fill_(0)
    error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), num_bytes, 0)
    if error != torch.cuda.cudart().cudaError.success:
        raise RuntimeError(
            f"{num_bytes} bytes of host memory could not be page-locked ({error}): free host memory, or use pageable"
        )
    _registered[whole.data_ptr()] = num_bytes
    return whole


def _unlock(address: int) -> None:
    del _registered[address]
    torch.cuda.cudart().cudaHostUnregister(address)
