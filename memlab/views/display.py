"""What a notebook cell shows: a figure where there is a front end for it, and its text twin everywhere.

plotly is imported when the first figure is made, so that `import memlab` and the commands stay quick.
"""

from __future__ import annotations

import html
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.record.step_record import StepRecord
from memlab.units import parse_bytes
from memlab.views.text.compare import peak_table
from memlab.views.text.difference import comparison_text
from memlab.views.text.record import record_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from memlab.views.figures.resample import Axis


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class View:
    """A figure and the table that says the same. As the last expression of a cell it shows itself."""

    figure: go.Figure
    """Of plotly: change it, write it to a file, or put it into a widget."""
    table: str
    """Plain text; what ``print`` gives."""

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return self.table

    def save(self, path: Path | str) -> Path:
        """Saves figure and table as one HTML file that needs no network."""
        path = Path(path)
        page = self.figure.to_html(include_plotlyjs=True, full_html=True)
        head, body, tail = page.rpartition("</body>")
        path.write_text(f"{head}<pre>{html.escape(self.table, quote=False)}</pre>{body}{tail}", encoding="utf-8")
        return path

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        """Returns plotly's own mime type, whatever else plotly's default renderer makes, and the table as text."""
        from plotly.io.base_renderers import PlotlyRenderer

        return {
            **self.figure._repr_mimebundle_(),
            **PlotlyRenderer().to_mimebundle(self.figure.to_dict()),
            "text/plain": self.table,
        }


def show(record: StepRecord, pool: str = "device", axis: Axis = "time", *, above_start: bool = True) -> View:
    """Shows one step: its timeline by category, and its table.

    Args:
        record: A step with its timeline.
        pool: The figure's: one of ``"device"``, ``"host"``, ``"on_chip"``. The table names all.
        axis: ``"time"`` in milliseconds, or ``"event"``.
        above_start: As in `memlab.views.figures.timeline.timeline_figure`.

    Raises:
        ValueError: If the record has no timeline, or pool or axis is none of the choices.
    """
    from memlab.views.figures.timeline import timeline_figure

    return View(timeline_figure(record, pool, axis, above_start=above_start), record_table(record))


def compare(*records: StepRecord, axis: Axis | None = None) -> View:
    """Shows several steps: their device totals on one axis, and a table with a row a step.

    A step on the simulated backend beside the same step on another is a prediction held against a measurement: then the
    difference of the allocated peaks is split into terms that add up to it, as `memlab.analysis.difference` tells.

    Args:
        *records: Two steps or more, each with its timeline.
        axis: ``"time"`` in milliseconds, ``"event"``, or None for the one that fits: events where a prediction is held
            against a measurement, for a simulated step has no time.

    Raises:
        ValueError: If there are fewer than two records, one has no timeline, or axis is none of the choices.
    """
    from memlab.views.figures.compare import compare_figure

    return View(compare_figure(*records, axis=axis), comparison_text(*records))


def peaks(records: Mapping[str, StepRecord], gpu_memory: Sequence[str] = ("80GiB", "141GiB")) -> View:
    """Shows what makes up the peaks of several steps, a bar each: the ranks of a job, layouts, or settings.

    Args:
        records: By the name that each gets, as `memlab.predict_ranks` returns them; no scenario has to be another's.
        gpu_memory: Of GPUs to hold them against, less what the largest of the jobs holds beside torch
            (`memlab.fitting.outside_torch`).

    Raises:
        ValueError: If there is no record, or a size is none.
    """
    from memlab.views.figures.peaks import peak_figure

    if not records:
        raise ValueError("peaks got 0 records, must be at least 1: pass {'a name': lab.step()}")
    outside = max(estimate_outside_torch(record.scenario.layout).total_bytes for record in records.values())
    rooms = {size: max(0, parse_bytes(size) - outside) for size in gpu_memory}
    return View(peak_figure(records, rooms), peak_table(records, rooms))
