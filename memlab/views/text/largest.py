"""The largest workload that fits, as text: the answer, and a row per value that was predicted."""

from __future__ import annotations

from memlab.fitting.largest import Largest
from memlab.units import binary_unit
from memlab.views.text.columns import aligned, in_unit, wrapped


def largest_table(found: Largest) -> str:
    """Writes the answer in one sentence, and then what was tried.

    Returns:
        Lines of at most `LINE_WIDTH` characters.
    """
    unit_bytes, unit = binary_unit(max(one.peak_allocated_bytes for one in found.tried))
    rows = [[found.what, "peak", "to spare", "", ""], ["", unit, unit, "worst", "verdict"]]
    for one in found.tried:
        sizes = [in_unit(size, unit_bytes) for size in (one.peak_allocated_bytes, one.margin_bytes)]
        rows.append([f"{one.value:,}", *sizes, f"rank {one.rank}", one.verdict])
    multiple = f"multiples of {found.unit}" if found.unit > 1 else "each whole number"
    return "\n".join(
        [*wrapped(found.verdict), "", *wrapped(f"{found.scenario}; values: {multiple}."), "", *aligned(rows)]
    )
