"""Records as plain text: the twin of every figure, for terminals, logs, diffs and screen readers.

A column is written in one unit, the largest that its largest value fills, so that digits stand under digits.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from memlab.movement import GROUPS
from memlab.offload_account import OffloadAccount
from memlab.record import StepRecord
from memlab.residency_audit import ResidencyAudit
from memlab.units import GIB, KIB, MIB, binary_unit, format_bytes

LINE_WIDTH = 118
"""Characters; no line of a table is longer."""

_DECIMALS = {GIB: 3, MIB: 2, KIB: 1, 1: 0}
_NUM_MODULES = 10
_NAME_WIDTH = 64
_SETTING_WIDTH = 27


def in_unit(num_bytes: int, unit_bytes: int) -> str:
    """Writes bytes as a number of a unit, without the unit's name.

    Args:
        num_bytes: A number of bytes, of either sign.
        unit_bytes: As `binary_unit` gives it.

    Returns:
        Such as ``"3.447"``; ``"<0.001"`` for what is there and too little for the unit's decimals.
    """
    decimals = _DECIMALS[unit_bytes]
    text = f"{num_bytes / unit_bytes:.{decimals}f}"
    if num_bytes and not float(text):
        return f"{'-' if num_bytes < 0 else ''}<{10**-decimals:.{decimals}f}"
    return text


def module_name(name: str) -> str:
    """Returns a module's name, and words for the empty one: what no module of the model made."""
    return name or "(outside the model's modules)"


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


def record_table(record: StepRecord) -> str:
    """Writes one step: its peak and what made it up, what stayed, what moved, how long it took.

    Args:
        record: Any record; it needs no timeline.

    Returns:
        Lines of at most `LINE_WIDTH` characters.
    """
    peak = record.peak_allocated_bytes
    modules = list(record.peak_by_module.items())
    others = sum(num_bytes for _, num_bytes in modules[_NUM_MODULES:])
    entries: list[tuple[str, int | None]] = [
        ("device, the step's peak", peak),
        *((f"  {category}", num_bytes) for category, num_bytes in record.peak_by_category.items()),
        ("device, the same peak by the module that made it", None),
        *((f"  {module_name(name)}", num_bytes) for name, num_bytes in modules[:_NUM_MODULES]),
        *([(f"  {len(modules) - _NUM_MODULES} other modules", others)] if others else []),
        ("device, at the step's start", record.static_bytes),
        ("device, activation peak above the start", record.activation_peak_bytes),
        ("device, residual at the step's end", record.residual_bytes),
        ("device, recomputed by backward", record.recomputed_bytes),
        *_allocator_entries(record),
        ("host, the step's peak", record.host_bytes),
        *((f"  offloaded in the step: {name}", size) for name, size in record.offloaded_bytes_by_module.items()),
        *((f"  off the device after it: {name}", size) for name, size in record.offloaded_bytes_by_group.items()),
    ]
    unit_bytes, unit = binary_unit(max(size or 0 for _, size in entries))
    rows = [["allocated bytes", unit, "bytes", "of peak"]]
    for name, size in entries:
        numbers = ["", "", ""]
        if size is not None:
            share = f"{size / peak:.1%}" if peak and not name.startswith(("host", "  off")) else ""
            numbers = [in_unit(size, unit_bytes), f"{size:,}", share]
        rows.append([_ending(name, _NAME_WIDTH), *numbers])
    return "\n".join(
        [
            *_wrapped(f"{record.scenario}, on {record.backend}, step {record.step_index}"),
            *_wrapped(f"settings: {record.settings}"),
            *([] if _ended(record) else _wrapped(f"{record.status}: {record.message}")),
            "",
            *_aligned(rows),
            "",
            *_wrapped(_time_line(record)),
            *_without_effect_lines(record),
            *_out_of_memory_lines(record),
        ]
    )


def _allocator_entries(record: StepRecord) -> list[tuple[str, int | None]]:
    """What only a real allocator has."""
    entries = (
        ("device, the most that torch reserved", record.peak_reserved_bytes),
        ("device, reserved and unused at the peak", record.unused_reserved_bytes),
        ("host, pinned memory really held", record.host_reserved_bytes),
    )
    return [entry for entry in entries if entry[1] is not None]


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
    columns = [
        ["", "setting", "", *names],
        _byte_column("", "peak", [record.peak_allocated_bytes for record in records]),
        _byte_column("", "saved", saved, known=[_ended(first) and _ended(record) for record in records]),
        _byte_column("step's", "start", [record.static_bytes for record in records]),
        _byte_column("activation", "peak", [record.activation_peak_bytes for record in records]),
        _byte_column("", "residual", [record.residual_bytes for record in records]),
        _byte_column("", "host", [record.host_bytes for record in records]),
        _byte_column("", "recomputed", [record.recomputed_bytes for record in records]),
        ["step", "time", "ms", *(f"{record.step_seconds * 1e3:.1f}" if _ended(record) else "-" for record in records)],
        ["", "tokens/s", "", *(f"{record.tokens_per_second:,.0f}" if _ended(record) else "-" for record in records)],
        ["", "loss", "", *("-" if record.loss is None else f"{record.loss:.6f}" for record in records)],
    ]
    scenario = str(first.scenario) if len({str(record.scenario) for record in records}) == 1 else "different scenarios"
    return "\n".join(
        [
            *_wrapped(f"{scenario}; allocated bytes, on the device unless it says host; saved: against the first row"),
            "",
            *_aligned([list(row) for row in zip(*columns, strict=True)], first_width=_SETTING_WIDTH),
            *_message_lines(records, names),
        ]
    )


def residency_table(audit: ResidencyAudit) -> str:
    """Writes where parameters, gradients and optimizer state are between two steps, and what is wrong with that.

    Args:
        audit: What `Lab.audit_residency` returned.

    Returns:
        Lines of at most `LINE_WIDTH` characters: a row a holder on the device, a row a group on the host, complaints.
    """
    entries = [(f"device, {one.group}: {one.holder}", one.expected_bytes, one.device_bytes) for one in audit.holdings]
    entries += [("device, what no group names", 0, audit.unnamed_device_bytes)]
    entries += [(f"host, {one.group}", one.expected_bytes, one.host_bytes) for one in audit.host_copies]
    entries += [("host, at the peak of the last move", audit.move_host_bytes, audit.move_peak_host_bytes)]
    unit_bytes, unit = binary_unit(max(max(expected, there) for _, expected, there in entries))
    rows = [["allocated bytes", f"should be {unit}", f"is {unit}", "bytes"]]
    rows += [
        [_ending(name, _NAME_WIDTH), in_unit(expected, unit_bytes), in_unit(there, unit_bytes), f"{there:,}"]
        for name, expected, there in entries
    ]
    complaints = audit.complaints or (str(audit),)
    return "\n".join([*_aligned(rows), "", *(line for complaint in complaints for line in _wrapped(complaint))])


def groups_used_table(used: Mapping[str, Sequence[str]]) -> str:
    """Writes which of parameters, gradients and optimizer state each phase touches.

    Args:
        used: What `Lab.groups_used` returned: phase to groups.
    """
    rows = [["phase", *GROUPS]]
    rows += [[phase, *("yes" if group in groups else "-" for group in GROUPS)] for phase, groups in used.items()]
    return "\n".join(_aligned(rows))


def audit_table(*accounts: OffloadAccount) -> str:
    """Writes where the bytes are that activation offload was expected to free, one row an account.

    Args:
        *accounts: What `Lab.audit_offload` returned, at least one.

    Returns:
        Lines of at most `LINE_WIDTH` characters: the terms that add up to what was expected (those that are 0 in every
        row are left out), and who holds what is still on the device.

    Raises:
        ValueError: If there is no account.
    """
    if not accounts:
        raise ValueError("audit_table got 0 accounts, must be at least 1: give it what lab.audit_offload() returned")
    terms = [account.terms() for account in accounts]
    names = [name for name in terms[0] if name == "saved" or any(row[name] for row in terms)]
    sizes = {
        ("", "moved"): [account.moved_bytes for account in accounts],
        ("", "expected"): [account.expected_bytes for account in accounts],
        **{_TERM_HEADS[name]: [row[name] for row in terms] for name in names},
    }
    unit_bytes, unit = binary_unit(max(max(column) for column in sizes.values()))
    columns = [
        ["", "setting", "", *(f"{account.offloaded.settings}" for account in accounts)],
        *([*head, unit, *(in_unit(size, unit_bytes) for size in column)] for head, column in sizes.items()),
        ["", "R", "", *(f"{account.saved_of_expected:.2f}" for account in accounts)],
    ]
    return "\n".join(
        [
            *_wrapped(
                "expected to move, by Megatron's rules = the columns to its right, up to saved: where each byte is "
                "when the step without offload is fullest; R = saved / expected"
            ),
            "",
            *_aligned([list(row) for row in zip(*columns, strict=True)], first_width=_SETTING_WIDTH),
            *_holder_lines(accounts),
        ]
    )


_TERM_HEADS = {
    "never moved": ("never", "moved"),
    "copied a second time": ("copied", "twice"),
    "still on the device": ("still", "there"),
    "back on the device": ("back", "already"),
    "not due at that moment": ("not", "due"),
    "added by offload itself": ("added by", "offload"),
    "lost to a peak elsewhere": ("peak", "elsewhere"),
    "saved": ("", "saved"),
}


def _holder_lines(accounts: Iterable[OffloadAccount]) -> list[str]:
    lines = []
    for account in accounts:
        if account.plain_peak != account.offloaded_peak:
            moments = f"fullest in {account.offloaded_peak}, without offload in {account.plain_peak}"
            lines += _wrapped(f"{account.offloaded.settings}: {moments}")
        sizes: dict[tuple[str, str], list[int]] = {}
        for held in account.held:
            holders = ", ".join(held.holders) or "nobody that was found"
            sizes.setdefault((held.name, re.sub(r"layers\.\d+", "layers.*", holders)), []).append(held.num_bytes)
        for (name, holders), held_bytes in sizes.items():
            size = f"{len(held_bytes)} of {name}, {format_bytes(sum(held_bytes))}"
            lines += _wrapped(f"{account.offloaded.settings}: {size}, held by {holders}")
    return ["", *lines] if lines else []


def _ended(record: StepRecord) -> bool:
    """Whether the step ran to its end; of one that did not, peak and times are only those up to where it stopped."""
    return record.status == "ok"


def _byte_column(above: str, name: str, values: Sequence[int], known: Sequence[bool] | None = None) -> list[str]:
    known = known or [True] * len(values)
    unit_bytes, unit = binary_unit(max(abs(value) for value in values))
    cells = [in_unit(value, unit_bytes) if is_known else "-" for value, is_known in zip(values, known, strict=True)]
    return [above, name, unit, *cells]


def _aligned(rows: Sequence[Sequence[str]], first_width: int = _NAME_WIDTH) -> list[str]:
    """Sets rows in columns, the first to the left and wrapped, the others to the right."""
    folded = [_folded(row[0], first_width) for row in rows]
    name_width = max(len(line) for lines in folded for line in lines)
    widths = [max(len(cell) for cell in column) for column in list(zip(*rows, strict=True))[1:]]
    lines = []
    for (name, *rest), row in zip(folded, rows, strict=True):
        numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True))
        lines.append("  ".join([f"{name:<{name_width}}", *numbers]).rstrip())
        lines += rest
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Breaks a setting's name between its words and after its plus signs; continued lines are indented."""
    lines = [""]
    for word in re.findall(r"\s*[^\s+]*\+?", text):
        if len(lines[-1] + word) > width and lines[-1].strip():
            lines.append("  " + word.strip())
        else:
            lines[-1] += word
    return lines


def _ending(name: str, width: int) -> str:
    """Keeps a long name's end, which tells more than its beginning."""
    return name if len(name) <= width else "  ..." + name[len(name) - width + 5 :]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _message_lines(records: Iterable[StepRecord], names: Iterable[str]) -> list[str]:
    pairs = zip(records, names, strict=True)
    lines = [line for record, name in pairs if not _ended(record) for line in _wrapped(f"{name}: {record.message}")]
    return ["", *lines] if lines else []


def _time_line(record: StepRecord) -> str:
    if record.backend == "simulated":
        return f"simulated in {record.step_seconds * 1e3:.1f} ms, which tells nothing of the time on a GPU; no loss"
    loss = "no loss" if record.loss is None else f"loss {record.loss:.6f}"
    return (
        f"step {record.step_seconds * 1e3:.1f} ms (loading {record.load_seconds * 1e3:.1f} ms, offloading "
        f"{record.offload_seconds * 1e3:.1f} ms), {record.tokens_per_second:,.0f} tokens/s, {loss}"
    )


def _without_effect_lines(record: StepRecord) -> list[str]:
    if not record.without_effect:
        return []
    reasons = (line for name, reason in record.without_effect.items() for line in _wrapped(f"  {name}: {reason}"))
    return ["", "without effect here:", *reasons]


def _out_of_memory_lines(record: StepRecord) -> list[str]:
    """Writes what was seen when a request was refused; the verdict on it is the record's message."""
    refused = record.out_of_memory
    if refused is None:
        return []
    refusal = refused.refusal
    asked = {"asked for": refusal.requested_bytes, "allocated": refusal.allocated_bytes, "limit": refusal.limit_bytes}
    device = {
        "reserved": refusal.reserved_bytes,
        "of it unused": None if refusal.reserved_bytes is None else refusal.unused_reserved_bytes,
        "largest free block": refusal.largest_free_bytes,
        "left on the device": refusal.device_free_bytes,
        "held outside torch": refusal.outside_bytes,
    }
    modules = {module_name(name): size for name, size in list(refused.activations_by_module.items())[:3]}
    return [
        "",
        "when the request was refused:",
        *_wrapped(f"  {_figures(asked | device)}"),
        *_wrapped(f"  alive: {_figures(refused.alive_by_category)}"),
        *(_wrapped(f"  most of the step's own: {_figures(modules)}") if modules else []),
    ]


def _figures(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
