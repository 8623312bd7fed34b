"""The buffer with which Triton times the variants of a kernel when a process calls it first.

Before each run of a variant Triton overwrites a buffer, so that nothing of the inputs is in the L2 cache. The buffer is
freed once the kernel has been timed, but its segment stays in the allocator's cache: what is allocated later is cut
from it, and takes no segment with a remainder of its own.

No event of a step shows the buffer, so that a pass in which a kernel was timed is equal to those that follow.

Inductor does the same with 60 MiB for kernels that torch compiles, unless it finds what it chose before on the disk.
That is a property of the machine, and is left out: with it, predictions of dense models were further from an H200's.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from memlab.meter.labels import timed_at_first_call

_BYTES = 2**28
"""``get_empty_cache_for_benchmark`` in ``triton/backends/nvidia/driver.py``, 3.6; seen on an H200 with torch 2.11."""


def time_kernel(name: str, rows: torch.Tensor, probabilities: torch.Tensor | None) -> None:
    """Takes and frees the buffer if a kernel is called first: by the width and the types of what it moves.

    Args:
        name: Of one of Transformer Engine's permutations (``common/triton/permutation.py``, 2.16.1).
        rows: What it moves, shape [rows, width].
        probabilities: What it moves beside them, if it does.
    """
    time_variants((name, rows.shape[-1], rows.dtype, probabilities is not None), rows)


def time_variants(kernel: Hashable, tensor: torch.Tensor) -> None:
    """Takes and frees the buffer if a kernel is called first.

    Args:
        kernel: With all by which its variants are chosen.
        tensor: One that it reads; with values, nothing is timed.
    """
    if tensor.is_meta:
        timed_at_first_call(kernel, _BYTES)
