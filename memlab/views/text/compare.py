"""Tables that compare steps with each other, and the names that distinguish them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from memlab.config.training_state import TrainingState, option_words
from memlab.record.job_record import JobRecord
from memlab.record.step_record import StepRecord
from memlab.record.watch_record import WatchRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import SETTING_WIDTH, Block, Table, in_unit
from memlab.views.text.record import module_name, without_state
from memlab.vocabulary import CATEGORIES

_SHORT_NAME_WIDTH = 20


def record_names(records: Sequence[StepRecord]) -> list[str]:
    """Names records by their settings, and by whatever else is needed to distinguish them.

    Returns:
        One name per record, such as ``"full uniform 1"``, or ``"none (2048 tokens, cpu)"`` next to records of other
        lengths and backends.
    """
    words = [[*_words(record), record.backend] for record in records]
    differing = [len(set(column)) > 1 for column in zip(*words, strict=False)]
    names = []
    for record, mine, state in zip(records, words, _differing_states(records), strict=True):
        details = [word for word, differs in zip(mine, differing, strict=False) if differs] + state
        details += ["forward only"] if record.forward_only else []
        details += [] if finished(record) else [record.status.replace("_", " ")]
        names.append(f"{record.settings}" + (f" ({', '.join(details)})" if details else ""))
    pairs = zip(names, records, strict=True)
    return [f"{name}, step {record.step_index}" if names.count(name) > 1 else name for name, record in pairs]


def common_scenario(records: Sequence[StepRecord]) -> str:
    """Returns what the scenarios of records have in common; `record_names` gives what differs."""
    columns = zip(*(_words(record) for record in records), strict=False)
    architecture, *others = [words[0] if len(set(words)) == 1 else "" for words in columns]
    states = [record.scenario.state.changed() for record in records]
    others += [
        option_words(name, value)
        for name, value in states[0].items()
        if all(state.get(name) == value for state in states)
    ]
    return ", ".join(filter(None, [architecture, *others])) if architecture else "different scenarios"


def _words(record: StepRecord) -> list[str]:
    """Returns the words of a record's scenario, without those of its training state, and which rank it is of."""
    layout = record.scenario.layout
    words = without_state(record.scenario.on_rank(0)).split(", ")
    if layout.world_size == 1:
        return words
    return [*words, f"worst rank {layout.rank}" if isinstance(record, JobRecord) else f"rank {layout.rank}"]


def _differing_states(records: Sequence[StepRecord]) -> list[list[str]]:
    """Returns for each record the options of its training state that not all records have."""
    states = [record.scenario.state.options() for record in records]
    differing = [name for name, value in states[0].items() if any(state[name] != value for state in states)]
    default = TrainingState().options()
    words = []
    for state in states:
        unusual = [option_words(name, state[name]) for name in differing if state[name] != default[name]]
        named = [f"{name} {state[name]}" for name in differing]
        words.append((unusual or (["default state"] if state == default else named)) if differing else [])
    return words


def compare_blocks(*records: StepRecord) -> list[Block]:
    """Describes steps by one row per step; what a step saves is counted from the first row.

    Args:
        *records: At least one record, of any scenario; none needs a timeline.

    Raises:
        ValueError: If there is no record.
    """
    if not records:
        raise ValueError("compare got 0 records, must be at least 1: give it what lab.step() returned")
    names = record_names(records)
    first = records[0]
    saved = [first.peak_allocated_bytes - record.peak_allocated_bytes for record in records]
    timed = [finished(record) and record.tokens_per_second > 0 for record in records]  # a prediction has no rate
    times = [(f"{record.step_seconds * 1e3:.1f}", f"{record.tokens_per_second:,.0f}") for record in records]
    # One unit for the whole table: in KiB, 256.0 beside a peak of 21.50 MiB would be read as the larger number.
    unit_of = max(record.peak_allocated_bytes for record in records)
    columns = [
        ["", "setting", "", *names],
        byte_column("", "peak", [record.peak_allocated_bytes for record in records]),
        byte_column("", "saved", saved, [finished(first) and finished(record) for record in records], largest=unit_of),
        byte_column("step's", "start", [record.static_bytes for record in records], largest=unit_of),
        byte_column("activation", "peak", [record.activation_peak_bytes for record in records], largest=unit_of),
        byte_column("", "residual", [record.residual_bytes for record in records], largest=unit_of),
        byte_column("host", "peak", [record.host_bytes for record in records], largest=unit_of),
        byte_column("", "recomputed", [record.recomputed_bytes for record in records], largest=unit_of),
    ]
    of_real_steps = [
        ["step", "time", "ms", *(time if known else "-" for (time, _), known in zip(times, timed, strict=True))],
        ["", "tokens/s", "", *(rate if known else "-" for (_, rate), known in zip(times, timed, strict=True))],
        ["", "loss", "", *("-" if record.loss is None else f"{record.loss:.6f}" for record in records)],
    ]
    columns += [column for column in of_real_steps if set(column[3:]) != {"-"}]
    meaning = "device memory, allocated; saved = first row minus this row"
    table = Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=SETTING_WIDTH)
    notes = [*message_lines(records, names), *without_effect_lines(records, names)]
    return [[f"{common_scenario(records)}; {meaning}"], table, *([notes] if notes else [])]


def peak_phase(record: StepRecord) -> str:
    """Returns the phase in which a step peaks; a dash where it is unknown."""
    return (record.peak_phase if record.timeline is None else record.timeline.peak_phase()) or "-"


def peak_blocks(records: Mapping[str, StepRecord], limits: Mapping[str, int]) -> list[Block]:
    """Describes what makes up each step's peak, one row per step, when it peaks, and which peaks are within a limit.

    Args:
        records: At least one, by the name of its row; when it peaks needs a timeline.
        limits: Bytes that a GPU leaves for torch, by the GPU's size.
    """
    every = list(records.values())
    categories = [name for name in CATEGORIES if any(name in record.peak_by_category for record in every)]
    columns = [["", "", "", *records], byte_column("", "peak", [record.peak_allocated_bytes for record in every])]
    for name in categories:
        above, _, below = name.rpartition(" ")
        columns.append(byte_column(above, below, [record.peak_by_category.get(name, 0) for record in every]))
    highest = max(record.peak_allocated_bytes for record in every)
    columns.append(["", "", "", *("<-" if record.peak_allocated_bytes == highest else "" for record in every)])
    moments: dict[str, list[str]] = {}
    for name, record in records.items():
        moments.setdefault(f"{peak_phase(record)}, {_allocated_at_peak(record)}", []).append(name)
    messages = message_lines(every, records)
    return [
        ["what makes up each step's peak of allocated bytes (<- the highest)"],
        Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=_SHORT_NAME_WIDTH),
        [
            "when each step peaks, and the module that made the last allocation:",
            *(f"  {moment}: {'; '.join(names)}" for moment, names in moments.items()),
            *(_which_are_within(size, limit, records) for size, limit in limits.items()),
        ],
        *([messages] if messages else []),
    ]


def _allocated_at_peak(record: StepRecord) -> str:
    timeline = record.timeline
    if timeline is None or not len(timeline):
        return "without a timeline"
    return module_name(timeline.modules[timeline.module[timeline.peak_index()]])


def _which_are_within(size: str, limit: int, records: Mapping[str, StepRecord]) -> str:
    """Names the steps whose peaks are within a limit, which need not fit; a step that did not finish has no peak."""
    within = [name for name, record in records.items() if finished(record) and record.peak_allocated_bytes <= limit]
    which = f"these peaks are within it: {'; '.join(within)}" if within else "none of these peaks is within it"
    which = "all of these peaks are within it" if len(within) == len(records) else which
    return f"{left_for_torch(size, limit)}: {which}."


def left_for_torch(size: str, limit: int) -> str:
    """Says what a GPU of a size such as ``80GiB`` leaves for torch's allocator."""
    name = gpu_name(size)
    article = "An" if re.match(r"8|1[18](?!\d)", name) else "A"  # an eight, an eleven, an eighteen
    return f"{article} {name} leaves {format_bytes(limit)} for torch"


def gpu_name(size: str) -> str:
    """Names a GPU by its size: ``80 GiB GPU``."""
    return f"{size} B GPU" if size.isdigit() else re.sub(r"(?<=\d)(?=[A-Za-z])", " ", size) + " GPU"


def byte_column(
    above: str, name: str, values: Sequence[int], known: Sequence[bool] | None = None, *, largest: int = 0
) -> list[str]:
    """Returns a column of bytes in one unit, below two lines of its name; a dash where a value is not known.

    Args:
        above: First line of its name.
        name: Second line of its name.
        known: Which of the values are known; None if all are.
        largest: A byte count that the unit has to suit as well, for columns with one unit.
    """
    known = known or [True] * len(values)
    unit_bytes, unit = binary_unit(max(largest, *(abs(value) for value in values)))
    cells = [in_unit(value, unit_bytes) if is_known else "-" for value, is_known in zip(values, known, strict=True)]
    return [above, name, unit, *cells]


def message_lines(records: Iterable[StepRecord | WatchRecord], names: Iterable[str]) -> list[str]:
    """Says how each step that did not finish ended."""
    pairs = zip(records, names, strict=True)
    return [f"{name}: {record.message}" for record, name in pairs if not finished(record)]


def without_effect_lines(records: Iterable[StepRecord], names: Iterable[str]) -> list[str]:
    """Says once which settings did nothing, and in which rows. A setting's modules with one reason share a line."""
    rows: dict[str, list[str]] = {}
    for record, name in zip(records, names, strict=True):
        alike: dict[tuple[str, str], list[str]] = {}
        for setting, reason in record.without_effect.items():
            field, _, module = setting.partition(":")
            alike.setdefault((field, reason), []).append(module)
        for (field, reason), modules in alike.items():
            which = f"{field} {', '.join(modules)}".rstrip()
            rows.setdefault(f"{which} had no effect ({reason})", []).append(name)
    return [f"{', '.join(which)}: {words}" for words, which in rows.items()]


def finished(record: StepRecord | WatchRecord) -> bool:
    """Whether the step finished. The peak and times of one that did not are those up to where it stopped."""
    return record.status == "ok"
