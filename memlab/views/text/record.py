"""A record as plain text: the twin of a step's figure, for terminals, logs, diffs and screen readers."""

from __future__ import annotations

from collections.abc import Mapping

from memlab.record.step_record import StepRecord
from memlab.units import binary_unit, format_bytes
from memlab.views.text.layout import NAME_WIDTH, aligned, ending, in_unit, wrapped

_NUM_MODULES = 10


def module_name(name: str) -> str:
    """Returns a module's name, and words for the empty one: what no module of the model made."""
    return name or "(outside the model's modules)"


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
        rows.append([ending(name, NAME_WIDTH), *numbers])
    return "\n".join(
        [
            *wrapped(f"{record.scenario}, on {record.backend}, step {record.step_index}"),
            *wrapped(f"settings: {record.settings}"),
            *([] if record.status == "ok" else wrapped(f"{record.status}: {record.message}")),
            "",
            *aligned(rows),
            "",
            *wrapped(_time_line(record)),
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
    reasons = (line for name, reason in record.without_effect.items() for line in wrapped(f"  {name}: {reason}"))
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
        *wrapped(f"  {_figures(asked | device)}"),
        *wrapped(f"  alive: {_figures(refused.alive_by_category)}"),
        *(wrapped(f"  most of the step's own: {_figures(modules)}") if modules else []),
    ]


def _figures(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
