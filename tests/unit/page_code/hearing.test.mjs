// What a widget's start does to its model: none of the traits that the kernel has changes.

import assert from "node:assert/strict";
import { test } from "node:test";
import { hearing } from "../../../memlab/views/panel/static/hearing.js";

test("the start of a widget leaves its traits as they are", () => {
  // Of the table of runs, the table of what a search found, the chart and the slider.
  const traits = { rows: [], columns: [], shown: 2, pinned: 1, base: 0, content: {}, picture: {}, value: 4 };
  const attributes = { ...traits };
  const listeners = new Map();
  const model = {
    get: (name) => attributes[name],
    set: (name, value) => {
      attributes[name] = value;
      listeners.get(`change:${name}`)?.({});
    },
    on: (name, listener) => listeners.set(name, listener),
    off: (name) => listeners.delete(name),
  };
  const rendered = hearing(({ model: given }) => given.get("shown"))({ model });
  assert.equal(rendered, 2);
  assert.deepEqual(
    Object.fromEntries(Object.keys(traits).map((name) => [name, attributes[name]])),
    traits,
  );
  assert.equal(listeners.size, 0);
});
