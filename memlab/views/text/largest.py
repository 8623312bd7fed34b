"""The largest workload that fits, as text: the answer, and a row per value or per setting that was tried."""

from __future__ import annotations

from memlab.fitting.along_front import AlongFront
from memlab.fitting.largest import Largest
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import aligned, in_unit, wrapped


def largest_table(found: Largest) -> str:
    """Writes the answer in one sentence, and then what was tried."""
    unit_bytes, unit = binary_unit(max(one.peak_allocated_bytes for one in found.tried))
    rows = [[found.what, "peak", "to spare", "", ""], ["", unit, unit, "worst", "verdict"]]
    for one in found.tried:
        sizes = [in_unit(size, unit_bytes) for size in (one.peak_allocated_bytes, one.margin_bytes)]
        rows.append([f"{one.value:,}", *sizes, f"rank {one.rank}", one.verdict])
    multiple = f"multiples of {found.unit}" if found.unit > 1 else "each whole number"
    job = f"{found.scenario}, for {found.scenario.versions.words(found.scenario.engine)}"
    return "\n".join([*wrapped(found.verdict), "", *wrapped(f"{job}; values: {multiple}."), "", *aligned(rows)])


def along_front_table(found: AlongFront) -> str:
    """Writes the answer in one sentence, and then the largest value of each setting, the least extra work first.

    Returns:
        Lines of at most `LINE_WIDTH` characters, apart from the names of long settings.
    """
    front = found.front
    rows = [
        ["settings", "recomputed", "transferred", found.what, found.what],
        ["", "GFLOP/token", "", "fit", "may fit"],
    ]
    for point, largest in zip(found.points, found.found, strict=False):
        values = (largest.largest_that_fits, largest.largest_that_may_fit)
        numbers = ["none" if value is None else f"{value:,}" for value in values]
        work = [f"{point.recomputed_operations / 1e9:.2f}", format_bytes(point.transferred_bytes)]
        rows.append([f"{point.settings}", *work, *numbers])
    job = f"{front.scenario}, for {front.scenario.versions.words(front.scenario.engine)}"
    about = f"{job}; the front and its extra work are those of this workload."
    return "\n".join([*wrapped(found.verdict), "", *wrapped(about), "", *aligned(rows)])
