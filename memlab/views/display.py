"""What a notebook cell shows: figures and tables where there is a front end for them, and the same as text everywhere.

plotly is imported when the first figure is made, so that `import memlab` and the commands stay quick.
"""

from __future__ import annotations

import html
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.analysis.diagnosis import Finding
from memlab.atomic_files import written_aside
from memlab.config.backend_kind import KINDS
from memlab.fitting.does_it_fit import Fit
from memlab.fitting.outside_torch import outside_torch_of
from memlab.record.device_bytes import DeviceBytes
from memlab.record.job_record import JobRecord
from memlab.record.offload_audit import OffloadAudit
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from memlab.record.transfer import GROUPS, Transfer
from memlab.record.watch_record import WatchRecord
from memlab.units import format_bytes, parse_bytes
from memlab.views.text.audits import (
    RetainedLeaf,
    device_bytes_blocks,
    groups_used_blocks,
    offload_blocks,
    residency_blocks,
    residency_lines_blocks,
    residency_moments_blocks,
    retained_blocks,
)
from memlab.views.text.columns import Block, Table, as_html, as_text
from memlab.views.text.compare import peak_blocks
from memlab.views.text.difference import comparison_blocks
from memlab.views.text.formula import formula_blocks
from memlab.views.text.over_steps import over_steps_blocks
from memlab.views.text.ranks import rank_by_rank_blocks, ranks_blocks
from memlab.views.text.record import out_of_memory_blocks, record_table, timeline_table
from memlab.views.text.savings import savings_blocks
from memlab.views.text.watch import watch_table, watched_blocks

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from memlab.views.figures.resample import Axis, CompareAxis

_SHOWN = (
    "a step record, a timeline, a watched block, an audit or several (lab.audit_offload(), lab.audit_residency()), "
    "record.out_of_memory, what lab.groups_used(), lab.retained(), lab.release_recipe(), lab.fit() or diagnose() "
    "returned, or a dict"
)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class View:
    """A figure, a table, or both. As the last expression of a cell it shows itself."""

    figure: go.Figure | None
    """Of plotly: change it, write it to a file, or put it into a widget. None where there is only a table."""
    table: str
    """Plain text; what ``print`` gives."""
    html: str = ""
    """The table for a page. Empty where a page shows the figure alone, with the text folded away."""

    @classmethod
    def of(cls, blocks: Sequence[Block], figure: go.Figure | None = None) -> View:
        """Makes the table of blocks."""
        return cls(figure, as_text(blocks), as_html(blocks))

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return self.table

    def only_table(self) -> View:
        """Returns the table without the figure, for ``display(compare(...).only_table())`` in a cell."""
        return View(None, self.table, self.html)

    def save(self, path: Path | str) -> Path:
        """Saves figure and table as one HTML file that needs no network, light or dark as its reader's system is."""
        path = Path(path)
        table = self.html or f"<pre>{html.escape(self.table, quote=False)}</pre>"
        page = "<html><head><meta charset='utf-8'></head><body></body></html>"
        if self.figure is not None:
            page = self.figure.to_html(include_plotlyjs=True, full_html=True)
        page = page.replace("<head>", "<head><meta name='color-scheme' content='light dark'>", 1)
        head, body, tail = page.rpartition("</body>")
        with written_aside(path) as aside:
            aside.write_text(f"{head}{table}{body}{tail}", encoding="utf-8")
        return path

    def _ipython_display_(self) -> None:
        """Shows the table above the figure. Of one output a front end shows only the figure, so these are two."""
        if self.figure is None or not self.html:
            raise NotImplementedError  # one output is enough: IPython then takes _repr_mimebundle_
        from IPython.display import publish_display_data

        publish_display_data({"text/html": self.html, "text/plain": self.table})  # type: ignore[no-untyped-call]
        publish_display_data(self._repr_mimebundle_())  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        """Returns plotly's own mime type, whatever else plotly's default renderer makes, and the table as text."""
        if self.figure is None:
            return {"text/html": self.html, "text/plain": self.table}
        from plotly.io.base_renderers import PlotlyRenderer

        return {
            **self.figure._repr_mimebundle_(),
            **PlotlyRenderer().to_mimebundle(self.figure.to_dict()),
            "text/plain": self.table,
        }


def show(*things: Any, pool: str = "device", axis: Axis | None = None, above_start: bool = False) -> View:
    """Shows a step as a figure, and anything else that a lab returns as a table.

    Args:
        *things: One of: a `StepRecord`, a `Timeline` or what `memlab.watch` yields; a `JobRecord`, of which the figure
            shows a small timeline per rank, and the table has a row per rank; one audit or several, of activation
            offload or of residency; a dict of moments to audits of residency, of which the figure shows a bar per
            moment; a dict of names to such dicts of the same moments, of which the figure shows a line each; an
            `OutOfMemory`; what `Lab.groups_used`, `Lab.retained`, `Lab.release_recipe`, `Lab.fit` or `diagnose`
            returned; a dict of names to bytes (int) or words.
        pool: The pool that a step's figure and table show: ``"device"``, ``"host"`` or ``"on_chip"``. The device's
            table also has the host's peak. The table of a job's ranks is always the device's.
        axis: The axis of a step's figure: ``"time"`` in milliseconds, or ``"event"``. None is ``"event"`` for a
            predicted step, whose times are those of the prediction, and ``"time"`` for all else.
        above_start: Starts the figure's bytes axis at what the pool held throughout the step, as in
            `memlab.views.figures.timeline.timeline_figure`: a closer look at the activations. False starts it at 0.

    Raises:
        ValueError: If there is nothing to show or no way to show it, the record has no timeline, or pool or axis is
            none of the choices.
    """
    is_predicted = any(isinstance(each, StepRecord) and KINDS[each.backend].is_prediction for each in things)
    axis = axis or ("event" if is_predicted else "time")
    only = things[0] if len(things) == 1 else None
    if isinstance(only, JobRecord):
        from memlab.views.figures.ranks import ranks_figure

        return View.of(ranks_blocks(only.ranks), ranks_figure(only, pool, axis, above_start=above_start))
    if isinstance(only, (StepRecord, Timeline, WatchRecord)):
        from memlab.views.figures.timeline import timeline_figure

        if isinstance(only, WatchRecord):
            text = watch_table(only, pool)
        else:
            text = record_table(only, pool) if isinstance(only, StepRecord) else timeline_table(only, pool)
        return View(timeline_figure(only, pool, axis, above_start=above_start), text)
    if isinstance(only, Mapping) and _are_audits(only):
        from memlab.views.figures.residency import residency_figure

        return View.of(residency_moments_blocks(only), residency_figure(only))
    if isinstance(only, Mapping) and _are_runs(only):
        from memlab.views.figures.residency import residency_lines_figure

        return View.of(residency_lines_blocks(only), residency_lines_figure(only))
    return View.of(_blocks_of(things))


def _are_runs(values: Mapping[Any, Any]) -> bool:
    """Whether these are audits of the same moments in each of several versions."""
    every = [[*audits] if isinstance(audits, Mapping) and _are_audits(audits) else [] for audits in values.values()]
    return bool(every) and bool(every[0]) and all(moments == every[0] for moments in every)


def _are_audits(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(isinstance(value, ResidencyAudit) for value in values.values())


def _blocks_of(things: Sequence[Any]) -> list[Block]:
    """Describes one thing, or several of one kind."""
    first = things[0] if things else None
    if isinstance(first, OffloadAudit) and all(isinstance(thing, OffloadAudit) for thing in things):
        return offload_blocks(*things)
    if isinstance(first, ResidencyAudit) and all(isinstance(thing, ResidencyAudit) for thing in things):
        return [block for audit in things for block in residency_blocks(audit)]
    if len(things) == 1:
        if isinstance(first, Mapping):
            return _mapping_blocks(first)
        if isinstance(first, OutOfMemory):
            return out_of_memory_blocks(first)
        if isinstance(first, Fit):
            left = [f"not tried, because the time was over: {'; '.join(first.not_tried)}"] if first.not_tried else []
            return [[f"{first}", *(f"  {choice}" for choice in first.alternatives), *left]]
        if isinstance(first, (list, tuple)):
            return _sequence_blocks(first)
    if things and all(isinstance(thing, (Finding, Transfer)) for thing in things):
        return [[f"{thing}" for thing in things]]
    if things and all(isinstance(thing, StepRecord) for thing in things):
        raise ValueError(f"show got {len(things)} steps, must be 1: compare(...) shows several next to each other")
    kinds = ", ".join(type(thing).__name__ for thing in things) or "nothing"
    raise ValueError(f"show got {kinds}, must be {_SHOWN}: give it one of these, or print it")


def _sequence_blocks(things: Sequence[Any]) -> list[Block]:
    if not things:
        return [["Nothing was found."]]
    if all(isinstance(thing, RetainedLeaf) for thing in things):
        return retained_blocks(things)
    return _blocks_of(things)


def _mapping_blocks(values: Mapping[Any, Any]) -> list[Block]:
    """Writes names and what belongs to them, an int as bytes."""
    if not values:
        return [["Nothing: the dict is empty."]]
    if all(isinstance(groups, (list, tuple)) and set(groups) <= set(GROUPS) for groups in values.values()):
        return groups_used_blocks(values)
    if all(isinstance(value, DeviceBytes) for value in values.values()):
        return device_bytes_blocks(values)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values.values()):
        return [Table([["", "size", "bytes"], *([f"{name}", format_bytes(n), f"{n:,}"] for name, n in values.items())])]
    return [[f"{name}: {value}" for name, value in values.items()]]


def compare(*records: StepRecord | WatchRecord, axis: CompareAxis | None = None) -> View:
    """Shows several steps: a table with one row per step, and their device memory on one axis.

    The steps are those of labs, or blocks that `memlab.watch` metered.

    A simulated step next to the same step on another backend is a prediction compared with a measurement: then the
    difference of the allocated peaks is split into terms that add up to it (`memlab.analysis.difference`).

    Args:
        *records: Two steps or more, each with its timeline. For a `JobRecord`, the figure shows the worst rank; several
            records of one job also get a table of all ranks. ``job.rank(n)`` is the step of one rank.
        axis: The axis of the figure. ``"phase"`` lays the phases of all steps over each other, ``"time"`` is in
            milliseconds, ``"event"`` gives every event the same width. None chooses ``"phase"``; for ranks of different
            pipeline stages, whose phases alternate differently, it chooses ``"time"``, or ``"event"`` in a prediction.

    Raises:
        ValueError: If there are fewer than two records, one has no timeline, or axis is none of the choices; if steps
            of labs and watched blocks are mixed.
    """
    from memlab.views.figures.compare import compare_figure

    watched = [record for record in records if isinstance(record, WatchRecord)]
    steps = [record for record in records if isinstance(record, StepRecord)]
    if watched and steps:
        raise ValueError(
            f"compare got {len(watched)} watched blocks and {len(steps)} steps of labs, must be of one kind: compare "
            "each kind by itself, or show(...) them one after the other"
        )
    if watched:
        return View.of(watched_blocks(watched), compare_figure(*watched, axis=axis))
    blocks = comparison_blocks(*steps)
    jobs = [record for record in records if isinstance(record, JobRecord)]
    blocks += rank_by_rank_blocks(jobs) if len(jobs) == len(records) else []
    return View.of(blocks, compare_figure(*records, axis=axis))


def peaks(records: Mapping[str, StepRecord], gpu_memory: Sequence[str] = ("79GiB", "139GiB")) -> View:
    """Shows what makes up the peaks of several steps, one bar each: the ranks of a job, layouts, or settings.

    Args:
        records: The records by name, as `memlab.predict_ranks` returns them; their scenarios may differ.
        gpu_memory: Sizes of GPUs to compare them with, less what the largest of the jobs uses outside torch
            (`memlab.fitting.outside_torch`).

    Raises:
        ValueError: If there is no record, or a text is not a size of memory.
    """
    from memlab.views.figures.peaks import peak_figure

    if not records:
        raise ValueError("peaks got 0 records, must be at least 1: pass {'a name': lab.step()}")
    scenarios = [record.scenario for record in records.values()]
    outside = max(outside_torch_of(one).total_bytes for one in scenarios)
    limits = {size: max(0, parse_bytes(size) - outside) for size in gpu_memory}
    return View.of(peak_blocks(records, limits), peak_figure(records, limits))


def savings(records: Mapping[str, StepRecord]) -> View:
    """Shows what each of several steps frees compared with the first: when it starts, and at its peak.

    The two differ if the peak moves to another phase, so the table also names the phase in which each step peaks. It
    also says what each step holds on the host.

    Args:
        records: The records by name; the first one is compared with all others. Their scenarios may differ.

    Raises:
        ValueError: If there is no record.
    """
    from memlab.views.figures.savings import savings_figure

    if not records:
        raise ValueError("savings got 0 records, must be at least 1: pass {'a name': lab.step()}")
    return View.of(savings_blocks(records), savings_figure(records))


def line_by_line(
    formula: Mapping[str, int],
    metered: Mapping[str, int],
    *,
    tokens: int = 1,
    titles: tuple[str, str] = ("formula", "metered"),
    with_sum: bool = True,
) -> View:
    """Shows the bytes that a formula gives next to those that memlab metered, line by line, with the difference.

    Args:
        formula: Bytes by name, as derived by hand.
        metered: Bytes by name, for example what `memlab.kept_by_module` returned.
        tokens: A number by which the first column of numbers divides the metered bytes; with 1 there is no such column.
        titles: The titles of the two columns that are compared.
        with_sum: Whether the last line is the sum.

    Raises:
        ValueError: If there is nothing to compare.
    """
    return View.of(formula_blocks(formula, metered, tokens=tokens, titles=titles, with_sum=with_sum))


def over_steps(runs: Mapping[str, Sequence[StepRecord | WatchRecord]]) -> View:
    """Shows how start and peak change from step to step, in a small chart for each of several runs.

    Args:
        runs: The steps of each run in their order, by the name of the run.

    Raises:
        ValueError: If there is no run, or one has no step.
    """
    from memlab.views.figures.over_steps import over_steps_figure

    if not runs or not all(runs.values()):
        raise ValueError("over_steps got no steps, must be at least one for each run: pass {'a name': [lab.step()]}")
    return View(over_steps_figure(runs), as_text(over_steps_blocks(runs)))
