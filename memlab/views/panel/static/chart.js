// The chart on the page. Its model holds one picture: what plotly draws. The kernel gets the point that a user clicks on.

import { hearing } from "./hearing.js";

// A press that moves further is a drag, which zooms; plotly has the same limit.
const CLICK_PIXELS = 8;
// plotly labels the nearest point within this distance.
const LABEL_PIXELS = 20;
// What JupyterLab writes in the place of a widget, and when it has written it after the models have arrived.
const NOT_FOUND = "Error displaying widget: model not found";
const RESTORED_MS = 3000;

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

// The kernel sends plotly.js once for all charts of a page.
async function loadPlotly(model) {
  if (globalThis.memlabPlotly) return globalThis.memlabPlotly;
  const [code] = await ask(model, "plotly");
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  try {
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      const onerror = () => reject(new Error("the browser could not load plotly.js"));
      Object.assign(script, { src: url, onload: resolve, onerror });
      document.head.append(script);
    });
  } finally {
    URL.revokeObjectURL(url);
  }
  globalThis.memlabPlotly ??= globalThis.Plotly;
  return globalThis.memlabPlotly;
}

function unpack(value, arrays) {
  if (Array.isArray(value)) return value.map((item) => unpack(item, arrays));
  if (value === null || typeof value !== "object") return value;
  if ("array" in value) return arrays[value.array];
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, unpack(item, arrays)]));
}

// What is drawn in the picture's ink is drawn in the theme's: one grey is faint on a light page or on a dark one.
function inInk(value, from, to) {
  if (value === from) return to;
  if (Array.isArray(value)) return value.map((item) => inInk(item, from, to));
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, inInk(item, from, to)]));
}

function pictureOf(model, el) {
  const { traces, layout, arrays } = model.get("picture");
  const numbers = arrays.map(
    ({ buffer, byteOffset, byteLength }) => new Float64Array(buffer.slice(byteOffset, byteOffset + byteLength)),
  );
  // Axes that plotly fits to the data would not start where the picture's title says.
  const config = { displaylogo: false, doubleClick: "reset", modeBarButtons: [["toImage", "resetScale2d"]] };
  const ink = getComputedStyle(el).getPropertyValue("--jp-ui-font-color2").trim();
  const picture = { data: unpack(traces, numbers), layout };
  return { ...(ink ? inInk(picture, model.get("ink"), ink) : picture), config };
}

// Returns a function that draws the newest picture: one drawing at a time, and none that is already outdated.
// A drawing that fails goes to `report`, and does not stop the next.
function drawLoop(draw, report) {
  let isOutdated = false;
  let isDrawing = false;
  return async () => {
    isOutdated = true;
    if (isDrawing) return;
    isDrawing = true;
    try {
      while (isOutdated) {
        isOutdated = false;
        try {
          await draw(); // oxlint-disable-line no-await-in-loop -- one drawing at a time is the rule
        } catch (error) {
          report(error);
        }
      }
    } finally {
      isDrawing = false;
    }
  };
}

// Which of some distances is the smallest, and how small it is.
function smallest(distances) {
  let [place, least] = [-1, Infinity];
  distances.forEach((distance, number) => {
    if (distance < least) [place, least] = [number, distance];
  });
  return [place, least];
}

// The point that a click in a plot area chooses, or null: its customdata, or else its number in its trace.
// Of a line whose uid begins with "area": the line's only customdata, wherever the click is.
// Of the line "total": the point that plotly labels, or, where it labels none, the last point before the click, since
// that is what was allocated then. Of markers, whose uid begins with "choice": the one that plotly labels, or else the
// nearest, within reach. Where marks overlap, the labelled one need not be the nearest, and the user has read its label.
function pointAt(plot, area, clientX, clientY) {
  const [, xId, yId] = area.dataset.subplot.match(/^(x\d*)(y\d*)$/u);
  const box = area.getBoundingClientRect();
  // What plotly shows now: the picture does not know what the user has zoomed to, or hidden by the legend.
  const { _fullLayout: layout, _fullData: traces, _hoverdata: hovered } = plot;
  const [left, right] = layout[xId.replace("x", "xaxis")].range;
  const [bottom, top] = layout[yId.replace("y", "yaxis")].range;
  const across = (x) => box.left + ((x - left) / (right - left)) * box.width - clientX;
  const down = (y) => box.bottom - ((y - bottom) / (top - bottom)) * box.height - clientY;
  const shown = traces.filter(({ visible, xaxis, yaxis }) => visible === true && xaxis === xId && yaxis === yId);
  const isNear = ({ x, y }) => Math.hypot(across(x), down(y)) <= LABEL_PIXELS;
  const labelled = hovered?.find(
    (each) => each.fullData.uid.startsWith("choice") && each.fullData.yaxis === yId && isNear(each),
  );
  if (labelled) return labelled.customdata;
  let [point, distance] = [null, LABEL_PIXELS];
  for (const { uid, x, y, customdata } of shown) {
    const offsets = Array.from(x, across);
    if (uid.startsWith("area")) return customdata[0];
    if (uid === "total") {
      const [number, pixels] = smallest(offsets.map((offset) => Math.abs(offset)));
      return pixels <= LABEL_PIXELS ? number : Math.max(offsets.findLastIndex((offset) => offset <= 0), 0);
    }
    if (uid.startsWith("choice")) {
      const [number, pixels] = smallest(offsets.map((offset, at) => Math.hypot(offset, down(y[at]))));
      if (pixels < distance) [point, distance] = [customdata[number], pixels];
    }
  }
  return point;
}

// Calls `choose` with the point that each click chooses, and with the view of the picture that was pressed.
// plotly's own clicks are not used: it reports a click only where it labels a point, so never within a stretch of a step
// that computes for long without an allocation, and not before it has drawn the label.
function listenForClicks(plot, choose, signal) {
  let press = null;
  const onPress = (event) => {
    const area = event.target.closest?.(".nsewdrag");
    press = null;
    if (!area || event.button !== 0 || !event.isPrimary) return;
    const point = pointAt(plot, area, event.clientX, event.clientY);
    press = { x: event.clientX, y: event.clientY, view: plot.layout.uirevision, point };
  };
  const onRelease = (event) => {
    if (!press || !event.isPrimary) return;
    const { x, y, view, point } = press;
    press = null;
    if (point !== null && Math.hypot(event.clientX - x, event.clientY - y) <= CLICK_PIXELS) choose(point, view);
  };
  // Before plotly, which covers the page while a button is pressed.
  plot.addEventListener("pointerdown", onPress, { capture: true, signal });
  globalThis.addEventListener("pointerup", onRelease, { capture: true, signal });
  globalThis.addEventListener("pointercancel", () => { press = null; }, { capture: true, signal });
}

// In a list of choices and on a slider the arrow keys choose. JupyterLab would go to another cell or fold a heading instead.
function keepArrowKeys(event) {
  const { target, key } = event;
  if ((target.tagName === "SELECT" || target.type === "range") && key.startsWith("Arrow")) event.stopPropagation();
}

function sizeOf(element) {
  return `${element.clientWidth} ${element.clientHeight}`;
}

function render({ model, el }) {
  const note = document.createElement("div");
  const plot = document.createElement("div");
  el.append(note, plot);
  const closing = new AbortController();
  let Plotly = null;
  let drawnView = null;
  let drawnSize = "";

  function say(text, role = "status") {
    note.setAttribute("role", role);
    note.textContent = text;
  }

  async function draw() {
    Plotly = await loadPlotly(model);
    if (closing.signal.aborted) return;
    const { data, layout, config } = pictureOf(model, el);
    // A picture without a height of its own fills the place that the page gives to the chart.
    el.style.height = layout.height ? `${layout.height}px` : "";
    drawnSize = sizeOf(el);
    const { clientWidth: width, clientHeight: height } = el;
    const sized = width ? { ...layout, height: layout.height ?? height, width } : layout;
    if (layout.uirevision === drawnView) {
      await Plotly.react(plot, data, sized, config);
    } else {
      // A double click goes back to the axes of the picture that newPlot drew, whatever react has drawn since.
      await Plotly.newPlot(plot, data, sized, config);
      drawnView = layout.uirevision;
    }
    say("");
    el.closest(".memlab-panel")?.addEventListener("keydown", keepArrowKeys, { signal: closing.signal });
    plot.dispatchEvent(new CustomEvent("memlab-drawn", { bubbles: true }));
  }

  function report(error) {
    drawnView = null;
    Plotly?.purge(plot);
    say(`The chart could not be drawn (${error}): the text table has its numbers; run a step or reload the page.`, "alert");
    console.error("memlab: the chart could not be drawn", error);
  }

  const redraw = drawLoop(draw, report);
  say("The chart appears when the kernel answers.");
  // Before the first drawing: a picture that arrives meanwhile is drawn after it.
  model.on("change:picture", redraw);
  listenForClicks(plot, (point, view) => model.send({ point, view }), closing.signal);
  // plotly's own resizing would also forget the height, which the picture sets.
  const resized = new ResizeObserver(() => {
    if (el.clientWidth && sizeOf(el) !== drawnSize) redraw();
  });
  const themed = new MutationObserver(redraw);
  redraw();
  resized.observe(el);
  themed.observe(document.body, { attributeFilter: ["data-jp-theme-name"] });
  return () => {
    closing.abort();
    resized.disconnect();
    themed.disconnect();
    model.off("change:picture", redraw);
    Plotly?.purge(plot);
  };
}

// After a reload JupyterLab waits two seconds for a widget's model. If the models arrive in the moment in which that
// time ends, it reports "model not found" and does not look again, although it has the model by then (ipywidgets 8.1.9,
// `get_model` of its manager). This code runs when the chart's model has arrived, and adds what helps.
function initialize() {
  setTimeout(() => {
    for (const output of document.querySelectorAll(".jp-OutputArea-output")) {
      if (output.textContent !== NOT_FOUND) continue;
      const advice = document.createElement("div");
      advice.textContent = "The kernel still has the panel: load the page again, or run this cell again.";
      output.append(advice);
    }
  }, RESTORED_MS);
}

export default { initialize, render: hearing(render) };
