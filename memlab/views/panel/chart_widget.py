"""The chart on the page: one widget whose state is the picture, and no more than the picture.

plotly's FigureWidget has two defects here. It carries plotly.js, 5 MB, as a part of its state: in the message that
creates it and in every notebook that saves it. And its page loses the updates that it received, so that a second
view, or a page that is loaded again, draws an old picture without its colours. In this widget the whole picture is
one trait, at most some hundred kilobytes, and the page requests plotly.js from the kernel once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import plotly
import traitlets

from memlab.views.figures.frame import Drawing
from memlab.views.figures.palette import INK
from memlab.views.panel.static_files import widget_code

_PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


class ChartWidget(anywidget.AnyWidget):
    """Shows one drawing at a time.

    Args:
        drawing: The first picture; `show` replaces it. Two pictures with the same ``layout.uirevision`` have the same
            clickable points; the user's zoom stays from one to the other.
        on_point: Called when the user clicks in the plot: with the customdata, a number, of the nearest marker of the
            traces whose uid begins with ``choice``, or with the number of the nearest point of the trace ``total``.
            Called with None if the click was on points that a later picture has replaced.
        lock: Held while a click is compared with the picture and answered, so that no other picture comes in between.
    """

    _esm = widget_code("chart.js")

    ink = traitlets.Unicode(INK).tag(sync=True)
    """The colour of text and lines that the page replaces by its theme's."""
    picture: Any = traitlets.Dict().tag(sync=True)
    """The drawing as JSON, with ``{"array": n}`` in place of its arrays of numbers, and those arrays' bytes."""

    def __init__(
        self, drawing: Drawing, on_point: Callable[[int | None], None], lock: AbstractContextManager[Any]
    ) -> None:
        super().__init__(picture=_packed(drawing))
        self._on_point, self._lock = on_point, lock
        self.on_msg(self._answer)

    def show(self, drawing: Drawing) -> None:
        """Replaces the picture, in one message."""
        self.picture = _packed(drawing)

    def _answer(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("question") == "plotly":
            self.send({"answer": "plotly"}, buffers=[_PLOTLY_JS.read_bytes()])
        elif "point" in content:
            with self._lock:
                is_current = content["view"] == self.picture["layout"].get("uirevision")
                self._on_point(int(content["point"]) if is_current else None)


def _packed(drawing: Drawing) -> dict[str, Any]:
    # Nearly all traces share their x: each array is sent once.
    arrays: dict[bytes, int] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": arrays.setdefault(value.astype(np.float64).tobytes(), len(arrays))}
        if isinstance(value, dict):
            return {name: pack(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
            return [pack(item) for item in value]
        return value

    picture = drawing.to_dict()
    traces = [pack(trace) for trace in picture["data"]]
    return {"traces": traces, "layout": picture["layout"], "arrays": list(arrays)}
