"""The chart on the page: one widget whose state is the picture, and no more than the picture.

plotly's FigureWidget would do, but for two things. It carries plotly.js, 5 MB, as a piece of its state: in the
message that creates it and in every notebook that saves it. And its page forgets the updates it was sent, so that
a second view, or a page that is loaded again, draws an old picture without its colours. Here the whole picture is
one trait, at most some hundred kilobytes, and the page asks the kernel for plotly.js once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import plotly
import plotly.graph_objects as go
import traitlets

_PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"

_PAGE_CODE = """
function ask(model, question) {
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
  if (!globalThis.memlabPlotly) {
    const [code] = await ask(model, "plotly");
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { src: url, onload: resolve, onerror: reject });
      document.head.appendChild(script);
    });
    URL.revokeObjectURL(url);
    globalThis.memlabPlotly = globalThis.Plotly;
  }
  return globalThis.memlabPlotly;
}

function unpack(value, arrays) {
  if (Array.isArray(value)) return value.map((item) => unpack(item, arrays));
  if (value === null || typeof value !== "object") return value;
  if ("array" in value) return arrays[value.array];
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, unpack(item, arrays)]));
}

function picture(model) {
  const { traces, layout, arrays } = model.get("picture");
  const numbers = arrays.map(
    ({ buffer, byteOffset, byteLength }) => new Float64Array(buffer.slice(byteOffset, byteOffset + byteLength)),
  );
  // Axes fitted to the data would start elsewhere than the picture's title says.
  const config = { displaylogo: false, doubleClick: "reset", modeBarButtonsToRemove: ["autoScale2d"] };
  return { data: unpack(traces, numbers), layout, config };
}

async function render({ model, el }) {
  const plot = el.appendChild(document.createElement("div"));
  plot.textContent = "The chart is drawn as soon as the kernel answers.";
  const Plotly = await loadPlotly(model);
  plot.textContent = "";
  let isStale = false;
  let isDrawing = false;
  let drawnView;
  async function draw() {
    isStale = true;
    if (isDrawing) return;
    isDrawing = true;
    while (isStale) {
      isStale = false;
      const { data, layout, config } = picture(model);
      const view = layout.uirevision ?? JSON.stringify([layout.xaxis?.range, layout.yaxis?.range]);
      const sized = { ...layout, width: el.clientWidth };
      if (view === drawnView) {
        await Plotly.react(plot, data, sized, config);
      } else {
        // A double click goes back to the axes of the first picture since newPlot, whatever react has drawn since.
        await Plotly.newPlot(plot, data, sized, config);
        plot.removeAllListeners("plotly_click");
        plot.on("plotly_click", clicked);
        drawnView = view;
      }
      plot.dispatchEvent(new CustomEvent("memlab-drawn", { bubbles: true }));
    }
    isDrawing = false;
  }
  function clicked({ points }) {
    const point = points.find(({ data }) => /^(total|choice)/.test(data.uid));
    if (point) model.send({ point: point.customdata ?? point.pointNumber });
  }
  await draw();
  model.on("change:picture", draw);
  // Plotly's own resizing would also forget the height, which the picture sets.
  const resized = new ResizeObserver(() => {
    if (el.clientWidth && el.clientWidth !== plot.layout.width) Plotly.relayout(plot, { width: el.clientWidth });
  });
  resized.observe(el);
  return () => {
    resized.disconnect();
    model.off("change:picture", draw);
    Plotly.purge(plot);
  };
}

export default { render };
"""


class ChartWidget(anywidget.AnyWidget):
    """Shows one plotly figure at a time.

    Args:
        figure: The first picture; `show` replaces it.
        on_point: Called when a trace is clicked whose uid begins with ``total`` or ``choice``: with the point's
            customdata, a number, or else with its place in the trace.
    """

    _esm = _PAGE_CODE

    picture: Any = traitlets.Dict().tag(sync=True)
    """The figure as JSON, with ``{"array": n}`` in place of its arrays of numbers, and those arrays' bytes."""

    def __init__(self, figure: go.Figure, on_point: Callable[[int], None]) -> None:
        super().__init__(picture=_packed(figure))
        self._on_point = on_point
        self.on_msg(self._answer)

    def show(self, figure: go.Figure) -> None:
        """Replaces the picture, in one message."""
        self.picture = _packed(figure)

    def _answer(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("question") == "plotly":
            self.send({"answer": "plotly"}, buffers=[_PLOTLY_JS.read_bytes()])
        elif "point" in content:
            self._on_point(int(content["point"]))


def _packed(figure: go.Figure) -> dict[str, Any]:
    # Nearly all traces share their x: each array travels once.
    arrays: dict[bytes, int] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": arrays.setdefault(value.astype(np.float64).tobytes(), len(arrays))}
        if isinstance(value, dict):
            return {name: pack(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
            return [pack(item) for item in value]
        return value

    traces = [pack(trace.to_plotly_json()) for trace in figure.data]
    return {"traces": traces, "layout": figure.layout.to_plotly_json(), "arrays": list(arrays)}
