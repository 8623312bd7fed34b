"""Bytes as people read them. In data a byte count is an `int`; a unit appears only at the edge."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: int) -> str:
    """Formats a byte count with a binary unit, keeping the sign.

    Args:
        num_bytes: A number of bytes; negative for bytes saved.

    Returns:
        For example ``"3.447 GiB"``, ``"16.00 MiB"``, ``"-1.5 KiB"`` or ``"12 B"``.
    """
    size = abs(num_bytes)
    sign = "-" if num_bytes < 0 else ""
    if size >= GIB:
        return f"{sign}{size / GIB:.3f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.2f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size} B"


def binary_unit(largest_bytes: int) -> tuple[int, str]:
    """Returns the unit in which a whole figure or table is written.

    Args:
        largest_bytes: The largest byte count that the figure or table shows.

    Returns:
        The unit's size in bytes and its name.
    """
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest_bytes >= size:
            return size, name
    return 1, "B"


def parse_bytes(text: str) -> int:
    """Reads a size such as ``80GiB``, ``1.5 TiB`` or ``80 GB``; a number without a unit is bytes.

    Raises:
        ValueError: If the text is not a size, or the size is 0.
    """
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]i?B|B)?\s*", text, re.ASCII)
    num_bytes = int(float(found[1]) * _UNIT_BYTES[found[2] or "B"]) if found else 0
    if not 1 <= num_bytes < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{shown!r} is not a size of memory: write a number and a unit, such as 80GiB or 80GB")
    return num_bytes


_UNIT_BYTES = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def remaining(seconds: float, num_done: int, num_left: int) -> str:
    """Says how much longer so many more take if each takes as long as those before; nothing while that is unknown."""
    if num_left == 0 or num_done < 2:  # the first includes the start
        return ""
    left = seconds / num_done * num_left
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"
