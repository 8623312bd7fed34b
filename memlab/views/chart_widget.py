"""One plotly widget that is reused for every picture, and that leaves megabytes out of the notebook.

plotly's own FigureWidget carries plotly.js, 5 MB, as a piece of its state: in every message that creates it and
in every notebook that saves it. This one's page code asks the kernel for it, once a page. It then asks for the
figure as it is by now, because what changed while the page was loading was told to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from threading import RLock
from typing import Any

import plotly
import plotly.graph_objects as go

_PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "widgetbundle.js"

_PAGE_CODE = """
function answer(model, question) {
  return new Promise((resolve) => {
    const listen = (message, buffers) => {
      if (message.answer !== question) return;
      model.off("msg:custom", listen);
      resolve(buffers);
    };
    model.on("msg:custom", listen);
    model.send({ question });
  });
}

async function loadPlotly(model) {
  const [code] = await answer(model, "plotly");
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  try {
    return await import(url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

async function start(model) {
  globalThis.memlabPlotly ??= loadPlotly(model);
  const figure = (await globalThis.memlabPlotly).default();
  await answer(model, "figure");
  await figure.initialize({ model });
  return figure;
}

export default () => {
  let figure;
  return {
    async render({ model, el, ...rest }) {
      el.textContent = "The chart is drawn as soon as the kernel answers.";
      figure ??= start(model);
      const { render } = await figure;
      el.textContent = "";
      return render({ model, el, ...rest });
    },
  };
};
"""


class ChartWidget(go.FigureWidget):  # type: ignore[misc]  # plotly ships no types
    """A `FigureWidget` without its own copy of plotly.js.

    Args:
        figure: The first picture; `replace` takes over pictures with the same traces.
        lock: Held while the page is told what the figure is.
    """

    _esm = _PAGE_CODE

    def __init__(self, figure: go.Figure, lock: RLock) -> None:
        super().__init__(data=figure.data, layout=figure.layout)
        self._tell_lock = lock
        self.on_msg(self._tell)

    def replace(self, figure: go.Figure) -> None:
        """Takes over another picture, in one message."""
        axes = {name: _AXIS | figure.layout[name].to_plotly_json() for name in ("xaxis", "yaxis")}
        with self.batch_update():
            for trace, new in zip(self.data, figure.data, strict=True):
                trace.update(new.to_plotly_json())
            for name in ("title", "height", "margin", "shapes", "annotations"):
                self.layout[name] = figure.layout[name]
            self.layout.update(axes)

    def on_total_click(self, look_at: Callable[[int], None]) -> None:
        """Calls with the number of the drawn point that is clicked."""

        def clicked(_trace: Any, points: Any, _state: Any) -> None:
            if points.point_inds:
                look_at(points.point_inds[0])

        next(trace for trace in self.data if trace.name == "total").on_click(clicked)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 - ipywidgets' signature
        """Returns the state with the figure as it is now; plotly's own is that of the widget's birth."""
        for name, now in (("_widget_data", self._data), ("_widget_layout", self._layout)):
            self._trait_values[name] = deepcopy(now)
        state: dict[str, Any] = super().get_state(key=key, drop_defaults=drop_defaults)
        return state

    def _tell(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        question = content.get("question")
        if question == "plotly":
            self.send({"answer": question}, buffers=[_PLOTLY_JS.read_bytes()])
        if question == "figure":
            with self._tell_lock:
                self.send_state(["_widget_data", "_widget_layout"])
                self.send({"answer": question})


_AXIS = {"showticklabels": True, "ticks": "outside", "showgrid": True, "showline": False, "title": {"text": ""}}
"""What one picture sets and the next may leave out."""
