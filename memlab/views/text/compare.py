"""Records beside each other as plain text: the twins of the figures that compare steps, and how records are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memlab.record.step_record import StepRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.text.layout import SETTING_WIDTH, aligned, in_unit, wrapped
from memlab.views.text.record import module_name
from memlab.vocabulary import CATEGORIES, PHASES

_SHORT_NAME_WIDTH = 20


def record_names(records: Sequence[StepRecord]) -> list[str]:
    """Names records by their settings, and by as much else as tells them apart.

    Returns:
        A name a record, such as ``"full uniform 1"``, or ``"none (2048 tokens, cpu)"`` beside records of other lengths
        and backends.
    """
    words = [[*str(record.scenario).split(", "), record.backend] for record in records]
    telling = [len(set(column)) > 1 for column in zip(*words, strict=False)]
    names = []
    for record, mine in zip(records, words, strict=True):
        tells = [word for word, differs in zip(mine, telling, strict=False) if differs]
        tells += ["forward only"] if record.forward_only else []
        tells += [] if _ended(record) else [record.status.replace("_", " ")]
        names.append(f"{record.settings}" + (f" ({', '.join(tells)})" if tells else ""))
    pairs = zip(names, records, strict=True)
    return [f"{name}, step {record.step_index}" if names.count(name) > 1 else name for name, record in pairs]


def common_scenario(records: Sequence[StepRecord]) -> str:
    """Returns what the scenarios of records have in common; their names (`record_names`) tell the rest."""
    columns = zip(*(str(record.scenario).split(", ") for record in records), strict=False)
    architecture, *others = [words[0] if len(set(words)) == 1 else "" for words in columns]
    return ", ".join(filter(None, [architecture, *others])) if architecture else "different scenarios"


def compare_table(*records: StepRecord) -> str:
    """Writes one row a step, each held against the first.

    Args:
        *records: At least one record, of any scenario; none needs a timeline.

    Returns:
        Lines of at most `LINE_WIDTH` characters.

    Raises:
        ValueError: If there is no record.
    """
    if not records:
        raise ValueError("compare_table got 0 records, must be at least 1: give it what lab.step() returned")
    names = record_names(records)
    first = records[0]
    saved = [first.peak_allocated_bytes - record.peak_allocated_bytes for record in records]
    timed = [_ended(record) and record.tokens_per_second > 0 for record in records]  # a prediction has no rate
    times = [(f"{record.step_seconds * 1e3:.1f}", f"{record.tokens_per_second:,.0f}") for record in records]
    columns = [
        ["", "setting", "", *names],
        _byte_column("", "peak", [record.peak_allocated_bytes for record in records]),
        _byte_column("", "saved", saved, known=[_ended(first) and _ended(record) for record in records]),
        _byte_column("step's", "start", [record.static_bytes for record in records]),
        _byte_column("activation", "peak", [record.activation_peak_bytes for record in records]),
        _byte_column("", "residual", [record.residual_bytes for record in records]),
        _byte_column("", "host", [record.host_bytes for record in records]),
        _byte_column("", "recomputed", [record.recomputed_bytes for record in records]),
        ["step", "time", "ms", *(time if known else "-" for (time, _), known in zip(times, timed, strict=True))],
        ["", "tokens/s", "", *(rate if known else "-" for (_, rate), known in zip(times, timed, strict=True))],
        ["", "loss", "", *("-" if record.loss is None else f"{record.loss:.6f}" for record in records)],
    ]
    meaning = "allocated bytes, on the device unless it says host; saved: against the first row"
    return "\n".join(
        [
            *wrapped(f"{common_scenario(records)}; {meaning}"),
            "",
            *aligned([list(row) for row in zip(*columns, strict=True)], first_width=SETTING_WIDTH),
            *_message_lines(records, names),
        ]
    )


def peak_phase(record: StepRecord) -> str:
    """Returns the phase in which a step was fullest; a dash without a timeline."""
    timeline = record.timeline
    return PHASES[timeline.phase[timeline.peak_index()]] if timeline is not None and len(timeline) else "-"


def peak_table(records: Mapping[str, StepRecord], rooms: Mapping[str, int]) -> str:
    """Writes what makes up each step's peak, a row each, the moments of the peaks, and which fit.

    Args:
        records: At least one, by the name of its row; a moment needs a timeline.
        rooms: Bytes that a GPU leaves torch, by the GPU's size.

    Returns:
        Lines of at most `LINE_WIDTH` characters.
    """
    every = list(records.values())
    categories = [name for name in CATEGORIES if any(name in record.peak_by_category for record in every)]
    columns = [["", "", "", *records], _byte_column("", "peak", [record.peak_allocated_bytes for record in every])]
    for name in categories:
        above, _, below = name.rpartition(" ")
        columns.append(_byte_column(above, below, [record.peak_by_category.get(name, 0) for record in every]))
    highest = max(record.peak_allocated_bytes for record in every)
    columns.append(["", "", "", *("<-" if record.peak_allocated_bytes == highest else "" for record in every)])
    moments: dict[str, list[str]] = {}
    for name, record in records.items():
        moments.setdefault(f"{peak_phase(record)}, {_born_at_peak(record)}", []).append(name)
    return "\n".join(
        [
            "what makes up each step's peak of allocated bytes (<- the highest)",
            "",
            *aligned([list(row) for row in zip(*columns, strict=True)], first_width=_SHORT_NAME_WIDTH),
            "",
            "the moment of each peak, and where the last bytes were made:",
            *(line for moment, names in moments.items() for line in wrapped(f"  {moment}: {', '.join(names)}")),
            *(line for size, room in rooms.items() for line in wrapped(_fitting(size, room, records))),
            *_message_lines(every, records),
        ]
    )


def _born_at_peak(record: StepRecord) -> str:
    timeline = record.timeline
    if timeline is None or not len(timeline):
        return "without a timeline"
    return module_name(timeline.modules[timeline.module[timeline.peak_index()]])


def _fitting(size: str, room: int, records: Mapping[str, StepRecord]) -> str:
    """Says which peaks a room is enough for; a step that did not end has none."""
    fit = [name for name, record in records.items() if _ended(record) and record.peak_allocated_bytes <= room]
    which = "all" if len(fit) == len(records) else ", ".join(fit) or "none"
    return f"{size} leave torch {format_bytes(room)}, enough for: {which}"


def _byte_column(above: str, name: str, values: Sequence[int], known: Sequence[bool] | None = None) -> list[str]:
    known = known or [True] * len(values)
    unit_bytes, unit = binary_unit(max(abs(value) for value in values))
    cells = [in_unit(value, unit_bytes) if is_known else "-" for value, is_known in zip(values, known, strict=True)]
    return [above, name, unit, *cells]


def _message_lines(records: Iterable[StepRecord], names: Iterable[str]) -> list[str]:
    pairs = zip(records, names, strict=True)
    lines = [line for record, name in pairs if not _ended(record) for line in wrapped(f"{name}: {record.message}")]
    return ["", *lines] if lines else []


def _ended(record: StepRecord) -> bool:
    """Whether the step ran to its end; of one that did not, peak and times are only those up to where it stopped."""
    return record.status == "ok"
