// The chart's drawing, without a browser: plotly, the page and the widget's model are stubs.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { setImmediate as otherWork } from "node:timers/promises";
import chart from "../../../memlab/views/panel/static/chart.js";

// Titles of the pictures that plotly began to draw, and what ends the drawing that has not ended.
let began = [];
let end = null;
let drawnHeight = null;
let resize = null;

class Element extends EventTarget {
  attributes = {};
  clientWidth = 600;
  clientHeight = 300;
  style = {};
  append(...children) {
    this.children = children;
  }
  closest() {
    return null;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
}

class Model {
  #listeners = new Set();
  constructor(title) {
    this.picture = { traces: [], layout: { title, uirevision: title }, arrays: [] };
  }
  async show(title) {
    this.picture = new Model(title).picture;
    for (const listener of this.#listeners) listener();
    await otherWork();
  }
  get(name) {
    return this[name];
  }
  set() {}
  on(name, listener) {
    if (name === "change:picture") this.#listeners.add(listener);
  }
  off(name, listener) {
    this.#listeners.delete(listener);
  }
}

function beginDrawing(plot, data, { title, width, height }) {
  began.push(`${title} ${width}`);
  drawnHeight = height;
  const { promise, resolve, reject } = Promise.withResolvers();
  end = (error) => (error ? reject(error) : resolve());
  return promise;
}

async function endDrawing(error) {
  end(error);
  await otherWork();
}

async function open(model) {
  const el = new Element();
  const close = chart.render({ model, el });
  await otherWork();
  return { close, el, note: el.children[0] };
}

function Observer(listener) {
  resize = listener;
  return { observe() {}, disconnect() {} };
}

let changeTheme = null;
let themeInk = "";

function ThemeObserver(listener) {
  changeTheme = listener;
  return { observe() {}, disconnect() {} };
}

test("what is drawn in the picture's ink follows the theme", async () => {
  const model = new Model("grey");
  model.ink = "grey";
  await open(model);
  await endDrawing();
  themeInk = "black";
  changeTheme();
  await otherWork();
  await endDrawing();
  themeInk = "";
  assert.deepEqual(began, ["grey 600", "black 600"]);
});

beforeEach(() => {
  began = [];
  Object.assign(globalThis, {
    addEventListener() {},
    document: { createElement: () => new Element() },
    memlabPlotly: { newPlot: beginDrawing, react: beginDrawing, purge() {} },
    ResizeObserver: Observer,
    MutationObserver: ThemeObserver,
    getComputedStyle: () => ({ getPropertyValue: () => themeInk }),
  });
  console.error = () => {};
});

test("a picture without a height of its own has that of its place", async () => {
  const model = new Model("bare");
  model.picture.layout.height = null;
  await open(model);
  assert.equal(drawnHeight, 300);
  await endDrawing();
});

test("a picture that arrives during the first drawing is drawn after it", async () => {
  const model = new Model("first");
  await open(model);
  await model.show("second");
  assert.deepEqual(began, ["first 600"]);
  await endDrawing();
  assert.deepEqual(began, ["first 600", "second 600"]);
});

test("of the pictures that arrive during a drawing only the newest is drawn", async () => {
  const model = new Model("first");
  await open(model);
  await Promise.all(["second", "third", "fourth"].map((title) => model.show(title)));
  await endDrawing();
  await endDrawing();
  assert.deepEqual(began, ["first 600", "fourth 600"]);
});

test("a drawing that fails says so, and the next picture is drawn", async () => {
  const model = new Model("first");
  const { note } = await open(model);
  await endDrawing();
  assert.equal(note.textContent, "");
  await model.show("second");
  await endDrawing(new Error("no colour"));
  assert.match(note.textContent, /could not be drawn \(Error: no colour\)/u);
  assert.equal(note.attributes.role, "alert");

  await model.show("third");
  await endDrawing();

  assert.deepEqual(began, ["first 600", "second 600", "third 600"]);
  assert.equal(note.textContent, "");
});

test("a picture that arrives during a drawing that fails is drawn", async () => {
  const model = new Model("first");
  await open(model);
  await model.show("second");
  await endDrawing(new Error("no colour"));
  assert.deepEqual(began, ["first 600", "second 600"]);
});

test("a chart is drawn again when its size changes, and only then", async () => {
  const { el } = await open(new Model("only"));
  await endDrawing();
  resize();
  await otherWork();
  assert.deepEqual(began, ["only 600"]);
  el.clientWidth = 500;
  resize();
  await otherWork();
  assert.deepEqual(began, ["only 600", "only 500"]);
  await endDrawing();
  el.clientHeight = 200;
  resize();
  await otherWork();
  assert.equal(began.length, 3, "a picture without a height fills its place");
});

test("a chart that is closed draws nothing more", async () => {
  const model = new Model("first");
  const { close } = await open(model);
  await endDrawing();
  close();
  await model.show("second");
  assert.deepEqual(began, ["first 600"]);
});
