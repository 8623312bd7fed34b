"""The runs of a lab: the table, the actions on the shown run, and its exports."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets

from memlab.atomic_files import written_aside
from memlab.config.backend_kind import KINDS
from memlab.views.panel.chart_data import chart_drawing, mark_moment
from memlab.views.panel.copy_as import CopyAs
from memlab.views.panel.exports import (
    free_path,
    measure_command,
    save_page,
    save_picture,
    save_run,
    save_snapshot,
    settings_line,
    table_csv,
)
from memlab.views.panel.run import TRIED, Run, columns, rows
from memlab.views.panel.runs_table import RunsTable
from memlab.views.panel.state import LabState
from memlab.views.text.columns import as_text
from memlab.views.text.compare import compare_blocks
from memlab.views.text.ranks import rank_by_rank_blocks, ranks_table
from memlab.views.text.record import record_table

_logger = logging.getLogger(__name__)
_COST_NOTE = "Times on a CPU say nothing about a GPU."
_SHOWN_IN_TABLE = ["runs", "shown", "pinned", "rank", "pinned_rank", "export_folder", "export_open"]


class RunsView:
    """The table and its buttons. `box` is the widget; each button calls a method that works without widgets."""

    def __init__(self, state: LabState, *others: Any) -> None:
        self._state = state
        self.table = RunsTable()
        self.table.add_class("memlab-runs")
        self.table.observe(self._choose_row, names=["shown"])
        self.pin = _button(
            "Pin",
            "pin",
            "Compares the other runs with this one, in the chart and in the table",
            state.pin,
        )
        reuse = _button("Use its settings", "reuse", "Puts this run's settings into the controls", state.reuse)
        delete = _button(
            "Delete",
            "delete",
            "Deletes this run and its record; until the next run, Undo delete brings them back",
            state.delete,
        )
        self.folder = ipywidgets.Text(description="Export to folder", continuous_update=False)
        self.folder.tooltip = "Folder on the kernel's machine; it is made if it is missing"
        self.folder.style.description_width = "initial"
        self.folder.add_class("memlab-export-folder")
        self.folder.observe(lambda change: state.set_trait("export_folder", change["new"]), names=["value"])
        exports = [
            _button("Record", "export-run", "The run as record.json and timeline.npz", lambda: self.export("run")),
            _button("PNG", "export-png", "The chart as a picture", lambda: self.export("png")),
            _button("SVG", "export-svg", "The chart as a picture that scales", lambda: self.export("svg")),
            _button("HTML", "export-html", "The chart and its table as one page", lambda: self.export("html")),
            _button(
                "Snapshot", "export-snapshot", "The run for pytorch.org/memory_viz", lambda: self.export("snapshot")
            ),
            _button("CSV", "export-csv", "The table of all runs", lambda: self.export("csv")),
        ]
        self.repeat = ipywidgets.HTML()
        self.repeat.add_class("memlab-repeat")
        self.export_toggle = ipywidgets.ToggleButton(description="Export, repeat")
        self.export_toggle.tooltip = "Files and command of the shown run, and settings for other frameworks"
        self.export_toggle.add_class("memlab-export-toggle")
        self.export_toggle.observe(lambda change: state.set_trait("export_open", change["new"]), names=["value"])
        # From the start: the buttons beside it would move if it came with the first run.
        self.cost_note = ipywidgets.HTML("" if KINDS[state.lab.backend.name].has_allocator else _COST_NOTE)
        self.cost_note.add_class("memlab-cost-note")
        actions = ipywidgets.Box([self.pin, reuse, delete, *others, self.export_toggle, self.cost_note])
        export_bar = ipywidgets.Box([self.folder, *exports])
        self.copy_as = CopyAs(state)
        self._exports = ipywidgets.VBox([export_bar, self.repeat, self.copy_as.box])
        for bar in (actions, export_bar):
            bar.add_class("memlab-actions")
        # What the toggle opens is above the table, where it does not fall below the panel's lower edge.
        self.box = ipywidgets.VBox([actions, self._exports, self.table])
        self.box.add_class("memlab-runs-part")
        self._show()
        state.observe(lambda _: self._show(), names=_SHOWN_IN_TABLE)

    def _choose_row(self, change: Any) -> None:
        if change["new"]:  # 0 is no row: none is shown, or a step that has none
            self._state.show(change["new"])

    def export(self, kind: str) -> Path | None:
        """Writes a file of the shown run, and says in the state's notice where the file is, or what went wrong.

        Args:
            kind: ``run``, ``snapshot``, ``png``, ``svg``, ``html`` or ``csv``.

        Returns:
            The new file or folder; None if there is none.
        """
        state = self._state
        with state.lock:
            run, pinned, runs = state.shown, state.pinned, state.runs
            rank, pinned_rank, one = state.one_rank, state.pinned_rank, state.one_run
            pool, axis, moment, shows_all = state.pool, state.axis, state.moment, state.shows_all_ranks
        if run is None:
            state.say("No run is shown: choose one in the table first.")
            return None
        folder = Path(state.export_folder).expanduser()
        try:
            if kind == "run":
                path = save_run(run, folder)
            elif kind == "snapshot":
                path = save_snapshot(run.of_rank(run.job.worst_rank if shows_all and run.job else rank), folder)
            elif kind == "csv":
                path = free_path(folder / "runs.csv")
                folder.mkdir(parents=True, exist_ok=True)
                with written_aside(path) as aside:
                    aside.write_text(table_csv(runs, pinned), encoding="utf-8")
            else:
                above_start = state.floor == "held"
                drawing = chart_drawing(run, pinned, pool, axis, rank, pinned_rank, above_start=above_start)
                drawing = drawing if shows_all else mark_moment(drawing, one, moment, pool, axis)
                if kind == "html":
                    twin = text_twin(run, pinned, rank, pinned_rank)
                    path = save_page(drawing.figure(), twin, one or run, folder)
                else:
                    path = save_picture(drawing.figure(), one or run, folder, kind)
        except (ValueError, OSError) as error:
            state.say(f"Not exported: {error}")
            return None
        except Exception as error:  # the browser that kaleido starts may fail in any way: the panel stays usable
            _logger.exception("export of %s as %s", run, kind)
            state.say(f"Not exported: {type(error).__name__}: {error}: export HTML instead, which needs no browser")
            return None
        state.say(f"Exported {path.resolve()}")
        return path

    def _show(self) -> None:
        state = self._state
        shown, pinned = state.shown, state.pinned
        cells = rows(state.runs, state.base)
        titles = columns(state.runs, state.base)
        filled = {name for row in cells for name, text in row.items() if text}
        self.table.columns = [[name, title] for name, title in titles.items() if name in filled or not cells]
        self.table.rows = cells
        self.table.pinned = pinned.number if pinned else 0
        self.table.base = state.base.number if state.base else 0
        self.table.shown = shown.number if shown else 0
        self.pin.description = "Unpin" if state.is_pinned else "Pin"
        self.folder.value = state.export_folder
        self.export_toggle.value = state.export_open
        self._exports.layout.display = "flex" if state.export_open else "none"
        if shown is None:
            self.repeat.value = ""
        else:
            of_scenario = (shown.scenario.state, shown.scenario.allocator)
            in_python = [
                settings_line(shown.settings),
                *(settings_line(each) for each in of_scenario if each.changed()),
            ]
            lines = html.escape("\n".join([*in_python, measure_command(shown)]), quote=False)
            which = "this step" if shown.number == TRIED else f"run {shown.number}"
            self.repeat.value = f'To repeat {which}:<pre tabindex="0">{lines}</pre>'


def text_twin(shown: Run | None, pinned: Run | None, rank: int | None = None, pinned_rank: int | None = None) -> str:
    """Returns what the chart and the table of runs show, as text.

    Args:
        rank: The rank that is shown of a run on several; None shows all.
        pinned_rank: The rank of the pinned run; None is the same as `rank`.
    """
    if shown is None:
        return "No run is shown."
    if shown.record is None:
        return f"{shown}: {shown.message}"
    one = shown.of_rank(rank)
    assert one.record is not None
    text = ranks_table(one.job.ranks) if one.job is not None else record_table(one.record)
    if pinned is None or pinned.record is None:
        return text
    wanted = pinned_rank if pinned_rank is not None else rank
    if pinned.lacks(wanted):
        return f"{text}\n\nnot compared: the pinned run {pinned.number} has no record of rank {wanted}"
    other = pinned.of_rank(wanted)
    assert other.record is not None
    if other.record is one.record:
        return text
    blocks = compare_blocks(other.record, one.record)
    blocks += rank_by_rank_blocks([other.job, one.job]) if other.job is not None and one.job is not None else []
    who = f"run {pinned.number}" if other.rank is None else f"run {pinned.number}, rank {other.rank}"
    return f"{text}\n\ncompared with the pinned {who}\n\n{as_text(blocks)}"


def _button(label: str, name: str, tooltip: str, press: Callable[[], Any]) -> Any:
    button = ipywidgets.Button(description=label, tooltip=tooltip)
    button.add_class(f"memlab-{name}")
    button.on_click(lambda _: press())
    return button
