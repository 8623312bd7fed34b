// A table of settings that a search has found: a click on a row, or a press of its button, chooses the row's settings.

import { hearing } from "./hearing.js";

function render({ model, el }) {
  const frame = document.createElement("div");
  // It scrolls where the panel is narrow, and a keyboard scrolls only what it can reach.
  frame.tabIndex = 0;
  el.append(frame);

  const rowsOf = () => [...frame.querySelectorAll("tbody tr")];

  function draw() {
    frame.innerHTML = model.get("content").html;
    for (const row of rowsOf()) {
      const [name] = row.cells;
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Puts these settings into the controls";
      button.append(...name.childNodes);
      name.append(button);
    }
  }

  // A click on a button is one on its row.
  frame.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    const { choices, shown } = model.get("content");
    if (row) model.send({ choice: choices[rowsOf().indexOf(row)], shown });
  });
  model.on("change:content", draw);
  draw();
  return () => model.off("change:content", draw);
}

export default { render: hearing(render) };
