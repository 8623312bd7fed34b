"""The options of torch's caching allocator that change what it reserves, as ``PYTORCH_CUDA_ALLOC_CONF`` has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memlab.config.option import check_options, option
from memlab.config.validation import RuleError, is_number, shortened

SMALLEST_MAX_SPLIT_SIZE_MB = 20
"""torch refuses smaller ones (``parseMaxSplitSize`` in c10/core/AllocatorConfig.cpp, 2.13): large requests below 10 MiB
share segments of 20 MiB, ``kLargeBuffer``. Older releases refuse 20 as well."""
_ALLOCATOR: dict[str, Any] = {"group": "torch's allocator", "engines": ("megatron", "fsdp2")}


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """How torch's allocator reserves and splits memory.

    These options change how many bytes are reserved. They change allocated bytes only through unsplit remainders, which
    count as allocated.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    expandable_segments: bool = option(
        False,
        "enlarge the segments that are reserved already, instead of reserving more segments",
        **_ALLOCATOR,
    )
    garbage_collection_threshold: float | None = option(
        None,
        "when torch has reserved more than this share of the memory that it may reserve, it frees cached blocks before "
        "it reserves more (default: never)",
        **_ALLOCATOR,
        shown_for_none=0,
    )
    max_split_size_mb: int | None = option(
        None,
        "split only blocks of at most N MiB (default: no limit)",
        **_ALLOCATOR,
        shown_for_none=0,
        at_least=SMALLEST_MAX_SPLIT_SIZE_MB,
        at_most=2**20,
    )
    graph_capture_record_stream_reuse: bool = option(
        False,
        "while a CUDA graph is captured, use memory again that another stream has used too",
        **_ALLOCATOR | {"group": ""},
    )

    def __post_init__(self) -> None:
        check_options(self)
        threshold = self.garbage_collection_threshold
        if threshold is not None and not (is_number(threshold) and 0 < threshold < 1):
            raise RuleError(
                f"garbage_collection_threshold is {shortened(threshold)}, must be a number above 0 and below 1: give a "
                "share such as 0.8",
                "garbage_collection_threshold",
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
