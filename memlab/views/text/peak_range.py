"""The two ends of a peak as text: what makes it a range, and what would decide."""

from __future__ import annotations

from memlab.fitting.peak_range import KEPT_GATHERS, MEASURED_MARGIN, UNCOLLECTED, Cause, PeakRange
from memlab.units import format_bytes

_NAMES = {
    KEPT_GATHERS: "FP8 gathers that torch before 2.14 may keep",
    UNCOLLECTED: "fp32 copies of the CPU optimizer that wait for Python's garbage collector",
    MEASURED_MARGIN: "what measured steps needed more than predicted",
}
_EFFECTS = {"more": "higher", "less": "lower", "either": "higher or lower", "unknown": "higher or lower"}
_COLLECTED = "whether Python's collector has run (--manual-gc frees the copies before the first step)"
_MEASURED = "the peak of a measured step of the job"


def range_lines(peak: PeakRange) -> list[str]:
    """Returns both ends, a line for each cause, and what would decide; nothing for a peak that is known."""
    if peak.is_exact:
        return []
    names = [cause.name for cause in peak.named_causes]
    decides = [_COLLECTED] if UNCOLLECTED in names else []
    if len(names) > len(decides):
        decides.append(_MEASURED)
    return [
        f"the real peak is {peak}, because memlab does not predict:",
        *(f"  {_cause_line(cause)}" for cause in peak.causes),
        f"what decides: {'; '.join(decides)}",
    ]


def _cause_line(cause: Cause) -> str:
    known = cause.num_bytes
    size = "by bytes that memlab does not know" if known is None else f"by at most {format_bytes(known)}"
    return f"{_NAMES.get(cause.name, cause.name)}: {_EFFECTS[cause.effect]} {size}"
