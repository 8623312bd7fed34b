"""Rows of several sequences: the places at which its sequences end, and which of its tokens a rank has.

Attention and rotation get tensors [tokens, heads, channels], and see each sequence by itself.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.meter.labels import one_kernel


def ends_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Returns the places at which sequences end, int32 [sequences + 1] with a 0 in front, on the device."""
    ends = [0, *accumulate(lengths)]
    device = torch.tensor(ends, dtype=torch.int32).cuda()
    if not device.is_meta:
        return device
    # Megatron reads these numbers (``rope_utils.py``), and a fake tensor has none. The meter sees what an operation
    # makes of real ones.
    with _disable_current_modes():
        values = torch.tensor(ends, dtype=torch.int32)
    return values * 1


@one_kernel()
def lengths_of(ends: torch.Tensor) -> list[int]:
    """Returns the lengths of the sequences that end at these places."""
    return (ends[1:] - ends[:-1]).tolist()


def chunks_of_rank(sequence: torch.Tensor, ranks: int, rank: int, dim: int = 0) -> torch.Tensor:
    """Returns a rank's part of a sequence under context parallelism, all of it on one rank.

    A sequence is cut into two chunks per rank. A rank has one from the front and its counterpart from the back, so that
    causal attention takes equal FLOPs on each (``get_batch_on_this_cp_rank`` in megatron/core/utils.py, and for packed
    sequences ``thd_get_partitioned_indices`` of Transformer Engine).
    """
    if ranks == 1:
        return sequence
    chunks = sequence.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)
