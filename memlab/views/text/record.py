"""One step as plain text: what its figure shows, for terminals, logs, diffs and screen readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memlab.config.backend_kind import KINDS
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.record.transfer import GROUPS
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import NAME_WIDTH, Block, Table, as_text, ending, in_unit

_NUM_MODULES = 10


def module_name(name: str) -> str:
    """Returns a module's name, and words for the empty one: what no module of the model made."""
    return name or "(outside the model's modules)"


def without_layer_numbers(name: str) -> str:
    """Returns a module's name with ``layers.*`` in place of ``layers.0``, ``layers.1`` and so on."""
    return re.sub(r"\blayers\.\d+", "layers.*", name)


def grouped_modules(sizes: Mapping[str, int], by_category: Mapping[str, int]) -> dict[str, int]:
    """Names what allocated the bytes of one moment, the largest first; one module of all layers is one entry.

    Four layers whose ``mlp.linear_fc1`` made 10 MiB together are ``mlp.linear_fc1 x 4``. What no module made is mostly
    the training state, so it is named by that, with *and others* where there is more, such as the tokens of the batch.
    Where no module made anything, as on the host, all of its categories name it.

    Args:
        sizes: Bytes by module.
        by_category: Bytes of the same moment by category.

    Returns:
        Entries that add up to `sizes`.
    """
    kinds: dict[str, list[str]] = {}
    for name in sizes:
        kinds.setdefault(without_layer_numbers(name), []).append(name)
    named = {}
    for kind, names in kinds.items():
        num_bytes = sum(sizes[name] for name in names)
        if kind == "":
            label = _outside_modules(num_bytes, by_category)
        else:
            label = f"{_of_layers(kind)} x\N{NO-BREAK SPACE}{len(names)}" if len(names) > 1 else names[0]
        named[label] = num_bytes
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def _of_layers(kind: str) -> str:
    """Returns a kind of module without what all modules of the decoder's layers begin with."""
    return kind.removeprefix("decoder.layers.*.") if kind != "decoder.layers.*" else "decoder.layers"


def _outside_modules(num_bytes: int, by_category: Mapping[str, int]) -> str:
    if num_bytes == sum(by_category.values()) > 0:  # no module made any of them
        return ", ".join(name for name, size in by_category.items() if size)
    state = {name: by_category[name] for name in GROUPS if by_category.get(name)}
    if not state or sum(state.values()) > num_bytes:
        return module_name("")
    more = " and others" if sum(state.values()) < num_bytes else ""
    return ", ".join(state) + more


def without_state(scenario: Scenario) -> str:
    """Returns the words of a scenario without those of its training state."""
    plain = scenario.in_default_state
    needed = f", {plain.state}" if plain.state != TrainingState() else ""
    return str(plain).replace(needed, "", 1)


def rank_words(layout: Layout) -> str:
    """Returns ``, rank 0`` for that rank of a job: the words of a scenario name every other rank."""
    return ", rank 0" if layout.world_size > 1 and layout.rank == 0 else ""


def state_lines(scenario: Scenario) -> list[str]:
    """Returns a line with the training state, or none where it is the default."""
    return [] if scenario.state == TrainingState() else [f"training state: {scenario.state}"]


def version_lines(record: StepRecord) -> list[str]:
    """Returns the versions that a prediction is for, and a line for each way in which they decide or are not exact."""
    if not KINDS[record.backend].is_prediction:
        return []
    scenario, core = record.scenario, record.versions.get("megatron-core", "")
    ring = scenario.layout.context_parallel_size
    if scenario.engine == "megatron":
        remarks = scenario.versions.remarks(scenario.state, ring, core)
    else:
        remarks = scenario.versions.remarks_of_fsdp2(record.versions.get("torch", ""))
    return [f"versions: {scenario.versions.words(scenario.engine, core)}", *remarks]


def record_table(record: StepRecord, pool: str = "device") -> str:
    """Writes one step: its peak and what made it up, what stayed, what was transferred, how long it took.

    Args:
        record: Any record; it needs no timeline for the device.
        pool: What the table is about, such as ``"host"``. A record without a timeline has the device's table only.
    """
    timeline = record.timeline if pool != "device" else None
    pool = pool if timeline is not None else "device"
    entries = _device_entries(record) if timeline is None else pool_entries(timeline, pool)
    peak_bytes = record.peak_allocated_bytes if timeline is None else timeline.peak_bytes(pool)
    place = f"on {record.backend}{rank_words(record.scenario.layout)}, step {record.step_index}"
    head = [f"{without_state(record.scenario)}, {place}"]
    head += [*state_lines(record.scenario), f"settings: {record.settings}", *version_lines(record)]
    if timeline is not None:
        head.append(_place_of_peak(timeline, pool))
    elif record.peak_phase:
        head.append(f"peak phase: {record.peak_phase}")
    head += [] if record.status == "ok" else [f"{record.status.replace('_', ' ')}: {record.message}"]
    blocks: list[Block] = [head, entries_table(entries, peak_bytes, pool), [_time_line(record)]]
    if record.without_effect:
        reasons = (f"  {name.replace(':', ' ')}: {reason}" for name, reason in record.without_effect.items())
        blocks.append(["settings that had no effect here:", *reasons])
    if record.out_of_memory is not None:
        blocks += _evidence_blocks(record.out_of_memory)
    return as_text(blocks)


def _device_entries(record: StepRecord) -> list[tuple[str, int | None]]:
    return [
        *peak_entries(record.peak_allocated_bytes, record.peak_by_category, record.peak_by_module),
        ("device, at the step's start", record.static_bytes),
        activation_peak_entry(record.activation_peak_bytes),
        ("device, residual at the step's end", record.residual_bytes),
        ("device, recomputed by backward", record.recomputed_bytes),
        *_bound_entries(record),
        *_allocator_entries(record),
        ("host, the step's peak", record.host_bytes),
        *((f"  offloaded in the step: {name}", size) for name, size in record.offloaded_bytes_by_module.items()),
        *((f"device, removed after the step: {name}", size) for name, size in record.offloaded_bytes_by_group.items()),
    ]


def _bound_entries(record: StepRecord) -> list[tuple[str, int]]:
    """What makes the peak a range: in the real step it may be so much higher, or lower."""
    entries = (
        ("device, what kept FP8 gathers may add to the peak", record.kept_gather_bytes),
        ("device, of the peak, copies that wait for Python's gc", record.uncollected_bytes),
    )
    return [entry for entry in entries if entry[1]]


def activation_peak_entry(num_bytes: int) -> tuple[str, int]:
    """Returns the row for the peak over forward and backward; what is freed before them may put it below the start."""
    return f"device, activation peak {'below' if num_bytes < 0 else 'above'} the start", abs(num_bytes)


def timeline_table(timeline: Timeline, pool: str = "device") -> str:
    """Writes a pool's peak of a timeline that belongs to no record, such as one read from a snapshot."""
    if not len(timeline):
        return "a timeline without events"
    if pool != "device":
        head = [f"a timeline of {len(timeline):,} events", _place_of_peak(timeline, pool)]
        return as_text([head, entries_table(pool_entries(timeline, pool), timeline.peak_bytes(pool), pool)])
    peak = timeline.peak_index()
    peak_bytes = timeline.bytes_at(peak)
    entries = [
        *peak_entries(peak_bytes, timeline.breakdown(peak), timeline.breakdown(peak, by="module")),
        ("device, at the start", timeline.opening_bytes),
        ("host, the peak", timeline.peak_bytes("host")),
    ]
    return as_text([[f"a timeline of {len(timeline):,} events"], entries_table(entries, peak_bytes)])


def pool_entries(timeline: Timeline, pool: str) -> list[tuple[str, int | None]]:
    """Names what a pool other than the device held: at its peak, at the step's start and end, and what grew between."""
    start, peak, words = timeline.num_opening_events - 1, timeline.peak_index(pool), _pool_words(pool)
    by_category = timeline.breakdown(peak, pool=pool)
    before, at_peak = (timeline.breakdown(index, by="module", pool=pool) for index in (start, peak))
    grew = _grown(before, at_peak)
    return [
        *peak_entries(timeline.bytes_at(peak, pool), by_category, at_peak, words),
        (f"{words}, at the step's start", timeline.bytes_at(start, pool)),
        (f"{words}, what grew from the start to the peak", sum(grew.values())),
        *_module_entries(grew, _grown(timeline.breakdown(start, pool=pool), by_category)),
        (f"{words}, at the step's end", timeline.bytes_at(len(timeline) - 1, pool)),
    ]


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: size - before.get(name, 0) for name, size in after.items() if size > before.get(name, 0)}


def _place_of_peak(timeline: Timeline, pool: str) -> str:
    peak = timeline.peak_index(pool)
    place = timeline.place(peak) if peak >= timeline.num_opening_events else "no phase: it is what the step starts with"
    return f"the peak of the {_pool_words(pool)} is in {place}"


def _pool_words(pool: str) -> str:
    return pool.replace("_", " ")


def peak_entries(
    peak_bytes: int, by_category: Mapping[str, int], by_module: Mapping[str, int], pool: str = "device"
) -> list[tuple[str, int | None]]:
    """Names what a peak consists of, with its bytes, by category and then by module; a row without bytes is a title."""
    return [
        (f"{pool}, the step's peak", peak_bytes),
        *((f"  {category}", num_bytes) for category, num_bytes in by_category.items()),
        (f"{pool}, the same peak by the module that allocated it", None),
        *_module_entries(by_module, by_category),
    ]


def _module_entries(by_module: Mapping[str, int], by_category: Mapping[str, int]) -> list[tuple[str, int]]:
    modules = list(grouped_modules(by_module, by_category).items())
    others = sum(num_bytes for _, num_bytes in modules[_NUM_MODULES:])
    return [
        *((f"  {name}", num_bytes) for name, num_bytes in modules[:_NUM_MODULES]),
        *([(f"  others ({len(modules) - _NUM_MODULES})", others)] if others else []),
    ]


def entries_table(entries: Sequence[tuple[str, int | None]], peak_bytes: int, pool: str = "device") -> Table:
    """Writes entries in one unit, in bytes, and those of the pool as shares of its peak."""
    unit_bytes, unit = binary_unit(max(size or 0 for _, size in entries))
    rows = [["allocated bytes", unit, "bytes", "of peak"]]
    for name, size in entries:
        numbers = ["", "", ""]
        if size is not None:
            is_of_pool = name.startswith((_pool_words(pool), "  ")) and not name.startswith("  off")
            share = f"{size / peak_bytes:.1%}" if peak_bytes and is_of_pool else ""
            numbers = [in_unit(size, unit_bytes), f"{size:,}", share]
        rows.append([ending(name, NAME_WIDTH), *numbers])
    return Table(rows)


def _allocator_entries(record: StepRecord) -> list[tuple[str, int | None]]:
    """What only a real allocator has."""
    entries = (
        ("device, the most that torch reserved", record.peak_reserved_bytes),
        ("device, what blocks that wait for other streams may add", record.late_free_bytes or None),
        ("device, reserved and unused at the peak", record.unused_reserved_bytes),
        ("host, pinned memory that torch reserved", record.host_reserved_bytes),
    )
    return [entry for entry in entries if entry[1] is not None]


def _time_line(record: StepRecord) -> str:
    if KINDS[record.backend].is_prediction:
        state = record.scenario.state
        is_unmeasured = state.fp8_format is not None and state.fp8_recipe == "mxfp8"
        return (
            f"simulated in {record.step_seconds * 1e3:.1f} ms, which says nothing about the time on a GPU; no loss"
            + (
                "; the recipe mxfp8 needs a Blackwell GPU, on which memlab has measured nothing"
                if is_unmeasured
                else ""
            )
        )
    loss = "no loss" if record.loss is None else f"loss {record.loss:.6f}"
    return (
        f"step {record.step_seconds * 1e3:.1f} ms (loading {record.load_seconds * 1e3:.1f} ms, offloading "
        f"{record.offload_seconds * 1e3:.1f} ms), {record.tokens_per_second:,.0f} tokens/s, {loss}"
    )


def out_of_memory_blocks(failed: OutOfMemory) -> list[Block]:
    """Describes why a step ran out of memory, and what was allocated then."""
    verdict = [f"{failed.verdict}: {failed.evidence}. {failed.advice}"] if failed.verdict else []
    return [*([verdict] if verdict else []), *_evidence_blocks(failed)]


def _evidence_blocks(failed: OutOfMemory) -> list[Block]:
    """Describes the failed request; a record's message already has the verdict."""
    request = failed.failed_allocation
    sizes = {
        "requested": request.requested_bytes,
        "allocated": request.allocated_bytes,
        "limit": request.limit_bytes,
        "reserved": request.reserved_bytes,
        "of which unused": None if request.reserved_bytes is None else request.unused_reserved_bytes,
        "largest free block": request.largest_free_bytes,
        "free on the device": request.device_free_bytes,
        "held outside torch": request.outside_bytes,
    }
    modules = {module_name(name): size for name, size in list(failed.activations_by_module.items())[:3]}
    return [
        [
            "when the allocation failed:",
            f"  {_figures(sizes)}",
            f"  allocated, by category: {_figures(failed.alive_by_category)}",
            *([f"  allocated in this step, the largest modules: {_figures(modules)}"] if modules else []),
        ]
    ]


def _figures(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
