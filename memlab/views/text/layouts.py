"""The layouts that fit a number of GPUs, as text: the answer, a row per layout, and what was left out."""

from __future__ import annotations

from memlab.fitting.layouts import LayoutSearch
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import aligned, in_unit, wrapped


def layouts_table(found: LayoutSearch) -> str:
    """Writes the answer, then the layouts that fit, the cheapest first.

    Returns:
        Lines of at most `LINE_WIDTH` characters, apart from the names of long layouts.
    """
    job = found.scenario
    lines = [*wrapped(found.verdict), ""]
    if found.fitting:
        unit_bytes, unit = binary_unit(max(one.peak_allocated_bytes for one in found.fitting))
        rows = [
            ["layout", "micro-", "setting", "worst", "peak", "to spare", "recomputed", "transferred", "sent to", ""],
            ["", "batches", "", "rank", unit, unit, "of forward", "", "ranks", ""],
        ]
        for one in found.fitting:
            sizes = [in_unit(size, unit_bytes) for size in (one.peak_allocated_bytes, one.margin_bytes)]
            work = [f"{one.recomputed_share:.1%}", format_bytes(one.transferred_bytes)]
            work.append(format_bytes(sum(one.communicated_bytes.values())))
            name, settings = f"{one.layout}", f"{one.settings}"
            rows.append([name, f"{one.num_microbatches}", settings, f"{one.rank}", *sizes, *work, one.verdict])
        lines += [*aligned(rows), ""]
    sequences = job.tokens_per_step // job.seq_length
    num_sure = sum(one.verdict == "fits" for one in found.fitting)
    fitting = f"{num_sure} fit, {len(found.fitting) - num_sure} may fit"
    left = f"; CUT SHORT: {found.num_left} were not tried" if found.num_left else ""
    lines += wrapped(
        f"{job.architecture.name}, {job.num_layers} layers, micro-batches of {job.micro_batch_size} x {job.seq_length} "
        f"tokens, {sequences} sequences per step in every layout; for {job.versions.words(job.engine)}. "
        f"{found.num_layouts} layouts follow Megatron's rules: "
        f"{fitting}; {found.num_not_fitting} do not fit, whatever is recomputed; {found.num_too_large} "
        f"have parameters, gradients, optimizer state and logits that are too large; {found.num_no_better} have sizes "
        f"that are no smaller than those of a layout that fits without recompute{left}. The column 'sent to ranks' has "
        "the bytes that the worst rank sends to other ranks in a step: memlab counts them at each collective that the "
        "simulated step calls, and assumes that the ranks pass data on in a ring. If two layouts recompute equally "
        "much, the one with less tensor, context and pipeline parallelism comes first. To search all settings of a "
        "layout, give its sizes as flags."
    )
    return "\n".join(lines)
