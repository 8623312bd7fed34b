"""The options of torch's caching allocator that change what it reserves, as ``PYTORCH_CUDA_ALLOC_CONF`` has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memlab.config.validation import check_whole_number, is_number, shortened

SMALLEST_MAX_SPLIT_SIZE_MB = 20
"""torch refuses smaller ones (``parseMaxSplitSize`` in c10/core/AllocatorConfig.cpp, 2.13): large requests below 10 MiB
share segments of 20 MiB, ``kLargeBuffer``. Older releases refuse 20 as well."""
_LARGEST_MAX_SPLIT_SIZE_MB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """How torch's allocator reserves and splits memory.

    These options change how many bytes are reserved. They change allocated bytes only through unsplit remainders, which
    count as allocated.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    expandable_segments: bool = False
    """Grow one segment per stream as needed, in place of many segments of fixed size."""
    garbage_collection_threshold: float | None = None
    """When torch has reserved more than this share of its limit, it frees cached blocks before it reserves more; None
    turns this off."""
    max_split_size_mb: int | None = None
    """Blocks larger than this, in MiB, are never split; with None, every block may be split."""

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise ValueError(
                f"expandable_segments is {shortened(self.expandable_segments)}, must be True or False: choose one"
            )
        threshold = self.garbage_collection_threshold
        if threshold is not None and not (is_number(threshold) and 0 < threshold < 1):
            raise ValueError(
                f"garbage_collection_threshold is {shortened(threshold)}, must be a number above 0 and below 1: give a "
                "share such as 0.8"
            )
        if self.max_split_size_mb is not None:
            check_whole_number(
                "max_split_size_mb", self.max_split_size_mb, SMALLEST_MAX_SPLIT_SIZE_MB, _LARGEST_MAX_SPLIT_SIZE_MB
            )

    def without_effect(self, *, has_allocator: bool, has_limit: bool) -> dict[str, str]:
        """Names the options that do nothing, each with the reason.

        Args:
            has_allocator: Whether torch's caching allocator, real or simulated, serves the device.
            has_limit: Whether torch's memory is limited, as ``torch.cuda.set_per_process_memory_fraction`` limits it.
        """
        given = list(self.changed())
        if not has_allocator:
            return dict.fromkeys(given, "a CPU has no caching allocator: measure on a GPU, or predict")
        if has_limit or self.garbage_collection_threshold is None:
            return {}
        reason = "torch reads it only where its memory is limited: give a limit (device_memory_bytes)"
        return {"garbage_collection_threshold": reason}

    def changed(self) -> dict[str, Any]:
        """Returns the options that are not torch's defaults."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        """As ``PYTORCH_CUDA_ALLOC_CONF`` has them, such as ``expandable_segments:True``."""
        return ",".join(f"{name}:{value}" for name, value in self.changed().items()) or "default allocator"
