"""The result of a search as text: the least extra work that fits, the front, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.config.settings import MemorySettings
from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.recompute_cost import share_text
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import Block, Table, as_text, in_unit

_SETTING_WIDTH = 48
_NO_SECONDS = (
    "host copies: bytes per step; memlab does not know how fast the link to the host is, nor how much of the copying "
    "is done while the model computes, so it gives no time for them"
)


def search_table(found: SearchResult) -> str:
    """Writes a search, one row per setting.

    Returns:
        Lines of at most `LINE_WIDTH` characters: first the answer, then what was searched, then the front.
    """
    return as_text(search_blocks(found))


def alone_table(found: SearchResult) -> str:
    """Writes a search that predicts each setting alone: the answer, what was searched, a row for each setting."""
    nothing_fits = "no setting alone fits: search combinations, without --alone"
    if found.num_left:
        nothing_fits = "nothing that was tried fits: predict more settings, or search combinations, without --alone"
    return as_text([[found.verdict if found.cheapest else nothing_fits], _searched(found), *alone_blocks(found)])


def search_blocks(found: SearchResult) -> list[Block]:
    """Returns what `search_table` writes, for a page as well."""
    return [*answer_blocks(found), *searched_blocks(found)]


def answer_blocks(found: SearchResult, *, is_narrow: bool = False) -> list[Block]:
    """Returns the answer: the best setting in one line, and the table of those that fit with the least extra work.

    Args:
        is_narrow: Leaves out the columns that a narrow page has no room for.
    """
    if not found.cheapest:
        return [[nothing_fits_line(found)]]
    table = _table(found, found.cheapest, is_narrow=is_narrow)
    return [[found.verdict], ["these settings fit with the least extra work:"], table]


def alone_blocks(found: SearchResult, *, is_narrow: bool = False) -> list[Block]:
    """Returns which setting saves most, and each setting alone, the lowest peak first, with what it saves.

    Args:
        found: A search that predicted each setting alone.
        is_narrow: As in `answer_blocks`.
    """
    base, points = found.points[0], ranked(found)
    saved = [base.peak_allocated_bytes - point.peak_allocated_bytes for point in points]
    phase = f" in {base.peak_phase}" if base.peak_phase else ""
    peak = f"{format_bytes(base.peak_allocated_bytes)}{phase}"
    title = f"each setting alone, compared with '{base.settings}', which peaks at {peak}:"
    is_copying = any(point.transferred_bytes for point in points)
    table = _table(found, points, saved, is_narrow=is_narrow)
    return [most_saved_lines(found), [title], table, *([[_NO_SECONDS]] if is_copying else [])]


def most_saved_lines(found: SearchResult) -> list[str]:
    """Says which setting saves most, and which one saves most without extra copies.

    If the first one makes no extra copies, the second is the one that saves most without extra recompute.
    """
    base = found.points[0]
    better = [point for point in ranked(found) if point.peak_allocated_bytes < base.peak_allocated_bytes]
    if not better:
        return [f"no setting alone lowers the peak of '{base.settings}'"]

    def saves(point: Point) -> str:
        saved = base.peak_allocated_bytes - point.peak_allocated_bytes
        recomputed = share_text(found.recomputed_share(point))
        work = (
            [f"recomputes {recomputed} of a step"] if point.recomputed_operations > base.recomputed_operations else []
        )
        if point.transferred_bytes > base.transferred_bytes:
            work.append(f"copies {format_bytes(point.transferred_bytes)} to the host and back")
        share = saved / base.peak_allocated_bytes
        needs = " and ".join(work) or "needs no extra recompute and no extra copies"
        return f"{format_bytes(saved)} ({share:.0%}); it {needs}"

    best = better[0]
    lines = [f"'{best.settings}' saves most: {saves(best)}"]
    if best.transferred_bytes > base.transferred_bytes:
        without = "extra copies"
        others = [point for point in better if point.transferred_bytes <= base.transferred_bytes]
    else:
        without = "extra recompute"
        others = [point for point in better if point.recomputed_operations <= base.recomputed_operations]
    if others and others[0] is not best:
        lines.append(f"without {without}, '{others[0].settings}' saves most: {saves(others[0])}")
    return lines


def ranked(found: SearchResult) -> list[Point]:
    """Returns all points, the lowest peak first, and of equal peaks the least extra work first."""
    return sorted(found.points, key=lambda point: (point.peak_allocated_bytes, point.work))


def searched_blocks(found: SearchResult, *, is_narrow: bool = False) -> list[Block]:
    """Returns what was searched, and the front; `is_narrow` as in `answer_blocks`."""
    table = _table(found, found.front, is_narrow=is_narrow)
    return [_searched(found), [f"the front ({front_line(found)}):"], table]


def _searched(found: SearchResult) -> Block:
    base = "" if found.base == MemorySettings() else f", each with '{found.base}'"
    job = f"{found.scenario}{base}, for {found.scenario.versions.words(found.scenario.engine)}"
    return [f"{job}; {limit_line(found)}", f"{counts_line(found)}."]


def limit_line(found: SearchResult) -> str:
    """Says how much memory there is."""
    if not found.outside_torch_bytes:
        return f"limit {format_bytes(found.limit_bytes)}"
    whole = format_bytes(found.limit_bytes + found.outside_torch_bytes)
    outside = format_bytes(found.outside_torch_bytes)
    return f"limit {format_bytes(found.limit_bytes)} ({whole} minus about {outside} outside torch)"


def counts_line(found: SearchResult) -> str:
    """Says how many settings were predicted, how many were not, and why."""
    text = f"{len(found.points)} of {found.num_candidates} settings predicted, each by a step of its own"
    if found.num_pruned:
        text += (
            f"; {found.num_pruned} not predicted: an estimate from what each offload module saves says that "
            "another setting is at least as good in peak, recompute and transfer"
        )
    if found.num_left:
        text += f"; CUT SHORT: {found.num_left} that may be on the front were not tried: predict more settings"
    return text


def front_line(found: SearchResult) -> str:
    """Says what makes a setting part of the front."""
    text = "no other is at least as good on all three: allocated peak, recomputed FLOPs per token, bytes transferred"
    if found.resolution_bytes > 1:
        size = format_bytes(found.resolution_bytes)
        text += f"; two peaks are equal if they are in the same interval of {size}, counted from the limit"
    return text


def nothing_fits_line(found: SearchResult) -> str:
    """Says what the setting with the lowest peak is short by."""
    least = min(found.front, key=lambda point: point.peak_allocated_bytes)
    short_by = least.peak_allocated_bytes - found.limit_bytes
    fragmented = "the peak fits, but fragmentation leaves no block large enough"
    why = f"is short by {format_bytes(short_by)}" if short_by > 0 else fragmented
    what = "nothing that was tried fits" if found.num_left else "nothing fits"
    more = "predict more settings; " if found.num_left else ""
    if found.may_offload_optimizer and not found.base.offload_optimizer_except_update:
        more += "search again with 'optimizer on host except update'; "
    return (
        f"{what}: of the front, '{least.settings}' has the lowest peak, "
        f"{format_bytes(least.peak_allocated_bytes)}, and {why}: "
        f"{more}or take more devices, another layout, another training state, or a smaller batch"
    )


def short_verdict(found: SearchResult) -> str:
    """Says in one line for a figure that nothing fits or that settings are left to try; empty if neither is so."""
    words = []
    if not found.cheapest:
        short_by = min(point.peak_allocated_bytes for point in found.front) - found.limit_bytes
        why = f"the lowest peak is {format_bytes(short_by)} above the limit" if short_by > 0 else "fragmentation"
        words.append(f"nothing fits: {why}")
    if found.num_left:
        words.append(f"CUT SHORT: {found.num_left} not tried")
    return "; ".join(words)


def _table(
    found: SearchResult, points: Sequence[Point], saved: Sequence[int] = (), *, is_narrow: bool = False
) -> Table:
    phases = ["peak in", "", *(point.peak_phase for point in points)]
    operations = ["recomputed", "MFLOP/token", *(f"{point.recomputed_operations / 1e6:,.3f}" for point in points)]
    shares = [share_text(found.recomputed_share(point)) for point in points]
    columns = [
        ["setting", "", *(f"{point.settings}" for point in points)],
        _bytes("peak", [point.peak_allocated_bytes for point in points]),
        *([phases] if any(phases[2:]) and not is_narrow else []),
        *([_bytes("saved", saved)] if saved else []),
        *([["recomputed", "of a step", *shares]] if is_narrow else [operations, ["share of", "a step", *shares]]),
        _bytes("host copies", [point.transferred_bytes for point in points], " each way"),
        *([] if is_narrow else [_bytes("on host", [point.host_bytes for point in points])]),
        ["", "", *(point.verdict if point.fits else "" for point in points)],
    ]
    return Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=2, first_width=_SETTING_WIDTH)


def _bytes(name: str, sizes: Sequence[int], which: str = "") -> list[str]:
    unit_bytes, unit = binary_unit(max(map(abs, sizes)))
    return [name, unit + which, *(in_unit(size, unit_bytes) for size in sizes)]
