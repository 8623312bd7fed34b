"""From a predicted to a measured peak as text, and the rows that its figure draws as well."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.analysis.difference import TERM_NAMES, PeakDifference, Term, difference_of, obstacles
from memlab.record.step_record import StepRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import NAME_WIDTH, Block, Table, as_text, ending, in_unit
from memlab.views.text.compare import compare_blocks
from memlab.views.text.record import module_name, without_layer_numbers

_NUM_GROUPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Terms of one name that are one row."""

    name: str
    """The name of its terms."""
    label: str
    """Which modules; empty if the terms have none."""
    terms: tuple[Term, ...]

    @property
    def predicted_bytes(self) -> int:
        """Of all its terms."""
        return sum(term.predicted_bytes for term in self.terms)

    @property
    def measured_bytes(self) -> int:
        """Of all its terms."""
        return sum(term.measured_bytes for term in self.terms)

    @property
    def difference_bytes(self) -> int:
        """Measured less predicted."""
        return self.measured_bytes - self.predicted_bytes


def difference_rows(difference: PeakDifference) -> list[Row]:
    """Folds the terms that differ into few rows.

    The same module of several layers is one row if all differ in one direction. Beyond the largest rows, all other
    modules of a name are one row.

    Returns:
        Rows without a term in common, name by name, the largest first. Their differences add up to the whole.
    """
    groups: dict[tuple[str, str | None, bool], list[Term]] = {}
    for term in difference.terms:
        if term.difference_bytes:
            place = None if term.module is None else without_layer_numbers(term.module)
            groups.setdefault((term.name, place, term.difference_bytes > 0), []).append(term)
    by_size = sorted(groups.items(), key=lambda item: -abs(sum(term.difference_bytes for term in item[1])))
    shown: dict[str, list[Row]] = {}
    others: dict[str, list[Term]] = {}
    for number, ((name, place, _), terms) in enumerate(by_size):
        rows = shown.setdefault(name, [])
        if number < _NUM_GROUPS or place is None:
            rows.append(Row(name=name, label=_label(place, terms), terms=tuple(terms)))
        else:
            others.setdefault(name, []).extend(terms)
    for name, terms in others.items():
        num_modules = len({term.module for term in terms})
        which = "the other" if shown[name] else "in"
        words = f"{which} {num_modules} module{'s' if num_modules > 1 else ''}"
        shown[name].append(Row(name=name, label=words, terms=tuple(terms)))
    return [row for rows in shown.values() for row in rows]


def _label(place: str | None, terms: list[Term]) -> str:
    if place is None:
        return ""
    if len(terms) == 1:
        return module_name(terms[0].module or "")
    return f"{module_name(place)} ({len(terms)} layers)"


def difference_lines(difference: PeakDifference) -> list[str]:
    """Says in sentences how far off the prediction is, and when the two steps peak."""
    off, measured_bytes = difference.difference_bytes, difference.measured.peak_allocated_bytes
    lines = ["the predicted peak is the measured one to the byte"]
    if off:
        share = f", {abs(off) / measured_bytes:.3%} of it" if measured_bytes else ""
        which = "below" if off > 0 else "above"
        lines = [f"the predicted peak is {format_bytes(abs(off))} {which} the measured one{share}"]
    if difference.predicted_peak is None:
        lines.append("modules, rounding and the moments of the peaks are unknown without both timelines")
    elif difference.predicted_peak == difference.measured_peak:
        lines.append(f"both peak in {difference.predicted_peak}")
    else:
        there = difference.predicted_there_bytes
        most = "where nothing is predicted" if there is None else f"where at most {format_bytes(there)} is predicted"
        lines.append(
            "the two steps peak at different moments, and the terms compare these two moments: the predicted peak is "
            f"in {difference.predicted_peak}, the measured one in {difference.measured_peak}, {most}"
        )
    if difference.predicted_peak is not None and not difference.rounding_is_known:
        lines.append(
            "at least one timeline does not count the allocator's rounding separately: it is part of the categories"
        )
    return lines


def difference_blocks(difference: PeakDifference) -> list[Block]:
    """Describes the terms from the predicted to the measured allocated peak, the largest first.

    Returns:
        Sentences, and a table with one row per category and its modules below it.
    """
    rows = difference_rows(difference)
    by_name: dict[str, list[Term]] = {name: [] for name in dict.fromkeys([*(row.name for row in rows), *TERM_NAMES])}
    for term in difference.terms:
        by_name[term.name].append(term)
    entries = [Row(name="", label="the step's peak", terms=difference.terms)]
    for name, terms in by_name.items():
        if terms:
            entries.append(Row(name=name, label=name, terms=tuple(terms)))
            entries += [
                Row(name=name, label=f"  {row.label}", terms=row.terms)
                for row in rows
                if row.name == name and row.label
            ]
    unit_bytes, unit = binary_unit(max(max(entry.predicted_bytes, entry.measured_bytes) for entry in entries))
    small_bytes, small = binary_unit(max(abs(entry.difference_bytes) for entry in entries))
    table = [["allocated bytes", f"predicted {unit}", f"measured {unit}", f"difference {small}", "bytes"]]
    for entry in entries:
        off = entry.difference_bytes
        sizes = [in_unit(entry.predicted_bytes, unit_bytes), in_unit(entry.measured_bytes, unit_bytes)]
        sign = "+" if off > 0 else ""
        table.append(
            [ending(entry.label, NAME_WIDTH), *sizes, f"{sign}{in_unit(off, small_bytes)}", f"{off:+,}" if off else "0"]
        )
    return [["from predicted to measured", *difference_lines(difference)], Table(table)]


def comparison_text(*records: StepRecord) -> str:
    """Writes `comparison_blocks` as text, in lines of at most `LINE_WIDTH` characters."""
    return as_text(comparison_blocks(*records))


def comparison_blocks(*records: StepRecord) -> list[Block]:
    """Describes one row per step; for a prediction and its measurement also the terms, or why there are none.

    Raises:
        ValueError: If there is no record.
    """
    difference = difference_of(records)
    blocks = [*compare_blocks(*records), *([words] for words in obstacles(records))]
    return blocks if difference is None else [*blocks, *difference_blocks(difference)]
