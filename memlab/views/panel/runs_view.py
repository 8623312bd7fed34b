"""The runs of a lab: the table, the actions on the shown run, and its exports."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets

from memlab.atomic_files import written_aside
from memlab.views.panel.chart_data import chart_figure, mark_moment
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
from memlab.views.panel.run import COLUMNS, Run, rows
from memlab.views.panel.runs_table import RunsTable
from memlab.views.panel.state import LabState
from memlab.views.text.compare import compare_table
from memlab.views.text.record import record_table

_logger = logging.getLogger(__name__)


class RunsView:
    """The table and its buttons. `box` is the widget; each button calls a method that works without widgets."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self.table = RunsTable(columns=[list(column) for column in COLUMNS.items()])
        self.table.add_class("memlab-runs")
        self.table.observe(lambda change: state.show(change["new"]), names=["shown"])
        self.pin = _button(
            "Pin",
            "pin",
            "Compares the other runs with this one, in the chart and in the table",
            state.pin,
        )
        reuse = _button("Use its settings", "reuse", "Puts this run's settings into the controls", state.reuse)
        delete = _button("Delete", "delete", "Deletes this run and its record", state.delete)
        self.folder = ipywidgets.Text(description="Export to folder", continuous_update=False)
        self.folder.style.description_width = "initial"
        self.folder.add_class("memlab-export-folder")
        self.folder.observe(lambda change: state.set_trait("export_folder", change["new"]), names=["value"])
        exports = [
            _button("Run folder", "export-run", "record.json and timeline.npz", lambda: self.export("run")),
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
        actions = ipywidgets.Box([self.pin, reuse, delete, self.folder, *exports])
        actions.add_class("memlab-actions")
        self.box = ipywidgets.VBox([self.table, actions, self.repeat])
        self._show()
        state.observe(lambda _: self._show(), names=["runs", "shown", "pinned", "export_folder"])

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
            pool, axis, moment = state.pool, state.axis, state.moment
        if run is None:
            state.notice = "No run is shown: choose one in the table first."
            return None
        folder = Path(state.export_folder).expanduser()
        try:
            if kind == "run":
                path = save_run(run, folder)
            elif kind == "snapshot":
                path = save_snapshot(run, folder)
            elif kind == "csv":
                path = free_path(folder / "runs.csv")
                folder.mkdir(parents=True, exist_ok=True)
                with written_aside(path) as aside:
                    aside.write_text(table_csv(runs, pinned), encoding="utf-8")
            elif kind == "html":
                figure = mark_moment(chart_figure(run, pinned, pool, axis), run, moment, pool, axis)
                path = save_page(figure, text_twin(run, pinned), run, folder)
            else:
                path = save_picture(
                    mark_moment(chart_figure(run, pinned, pool, axis), run, moment, pool, axis), run, folder, kind
                )
        except (ValueError, OSError) as error:
            state.notice = f"Not exported: {error}"
            return None
        except Exception as error:  # the browser that kaleido starts may fail in any way: the panel stays usable
            _logger.exception("export of %s as %s", run, kind)
            state.notice = f"Not exported: {type(error).__name__}: {error}: export HTML instead, which needs no browser"
            return None
        state.notice = f"Exported {path.resolve()}"
        return path

    def _show(self) -> None:
        state = self._state
        shown, pinned = state.shown, state.pinned
        self.table.rows = rows(state.runs, pinned)
        self.table.pinned = pinned.number if pinned else 0
        self.table.shown = shown.number if shown else 0
        self.pin.description = "Unpin" if shown is not None and shown is pinned else "Pin"
        self.folder.value = state.export_folder
        if shown is None:
            self.repeat.value = ""
        else:
            training_state = shown.scenario.state
            in_python = [
                settings_line(shown.settings),
                *([settings_line(training_state)] if training_state.changed() else []),
            ]
            lines = html.escape("\n".join([*in_python, measure_command(shown)]), quote=False)
            self.repeat.value = f'To repeat run {shown.number}:<pre tabindex="0">{lines}</pre>'


def text_twin(shown: Run | None, pinned: Run | None) -> str:
    """Returns what the chart and the table of runs show, as text."""
    if shown is None:
        return "No run is shown."
    if shown.record is None:
        return f"{shown}: {shown.message}"
    text = record_table(shown.record)
    if pinned is not None and pinned.record is not None and pinned is not shown:
        text += f"\n\ncompared with the pinned run {pinned.number}\n\n{compare_table(pinned.record, shown.record)}"
    return text


def _button(label: str, name: str, tooltip: str, press: Callable[[], Any]) -> Any:
    button = ipywidgets.Button(description=label, tooltip=tooltip)
    button.add_class(f"memlab-{name}")
    button.on_click(lambda _: press())
    return button
