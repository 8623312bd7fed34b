"""The rules of torch's caching allocator: how a request is rounded, which segment it gets, when a block is split.

They are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11: ``round_size``, ``get_pool``,
``get_allocation_size``, ``should_split``) with the default settings. Replay, simulation and the snapshot reader
share them.
"""

from __future__ import annotations

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (``kMinBlockSize``)."""
SMALL_REQUEST_BYTES = 1024**2
"""Requests up to this size share small segments (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * 1024**2
"""The size of a small segment (``kSmallBuffer``). Large segments are rounded to the same unit (``kRoundLarge``)."""
LARGE_SEGMENT_BYTES = 20 * 1024**2
"""The size of a segment that requests below `_OWN_SEGMENT_FROM_BYTES` share, and of an expandable segment's pages
(``kLargeBuffer``)."""
_OWN_SEGMENT_FROM_BYTES = 10 * 1024**2
"""Requests of this size and larger get a segment of their own (``kMinLargeAlloc``)."""
PRIVATE_POOLS = 128
"""From this number on, pools are set aside: more than two for each of the 32 streams that torch has, and a power of
two."""


def rounded_bytes(requested_bytes: int) -> int:
    """Returns the smallest block that can hold a request."""
    return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Returns the size of the segment that the allocator reserves when no free block can hold `block_bytes`."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < _OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def splits_remainder(remainder_bytes: int, *, in_small_segment: bool) -> bool:
    """Whether the free end of a block becomes a block of its own; otherwise it stays with the block, unsplit."""
    return remainder_bytes >= smallest_split_bytes(in_small_segment=in_small_segment)


def smallest_split_bytes(*, in_small_segment: bool) -> int:
    """Returns from which size on the free end of a block becomes a block of its own."""
    return MIN_BLOCK_BYTES if in_small_segment else SMALL_REQUEST_BYTES + 1
