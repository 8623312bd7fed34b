// The browser's own slider, with an accessible name.

import { hearing } from "./hearing.js";

function render({ model, el }) {
  const range = document.createElement("input");
  range.type = "range";
  range.setAttribute("aria-label", model.get("name"));
  el.append(range);
  // The limits first: the browser clips a value to the limits that it has.
  const names = ["min", "max", "value", "disabled"];
  const follow = () => {
    for (const name of names) range[name] = model.get(name);
  };
  follow();
  for (const name of names) model.on(`change:${name}`, follow);
  range.addEventListener("change", () => {
    model.set("value", range.valueAsNumber);
    model.save_changes();
  });
  return () => {
    for (const name of names) model.off(`change:${name}`, follow);
  };
}

export default { render: hearing(render) };
