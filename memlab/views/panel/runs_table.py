"""The table of runs, one widget for any number of runs: a click or an arrow key chooses the run that is shown."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from memlab.views.panel.static_files import widget_code


class RunsTable(anywidget.AnyWidget):
    """Rows of text, of which one is shown and one may be pinned."""

    _esm = widget_code("runs_table.js")

    columns: Any = traitlets.List().tag(sync=True)
    """Pairs of a row's key and the column's heading."""
    rows: Any = traitlets.List().tag(sync=True)
    """As `memlab.views.panel.run.rows` writes them."""
    shown = traitlets.Int(0).tag(sync=True)
    """Number of a run; 0 for no run."""
    base = traitlets.Int(0).tag(sync=True)
    """Number of the run that the others are compared with, which stays in sight; 0 for none."""
    pinned = traitlets.Int(0).tag(sync=True)
    """Number of a run; 0 for no run."""
