"""Bytes as people read them. In data a byte count is an `int`; a unit appears only at the edge."""

from __future__ import annotations

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
    """Picks the one unit in which a whole figure or table is written.

    Args:
        largest_bytes: The largest byte count that will be shown.

    Returns:
        The unit's size in bytes and its name.
    """
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest_bytes >= size:
            return size, name
    return 1, "B"
