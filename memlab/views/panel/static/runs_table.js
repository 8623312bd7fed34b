// The table of runs: a click or an arrow key chooses the run that the panel shows.

import { hearing } from "./hearing.js";

function cell(tag, text, row) {
  const element = document.createElement(tag);
  element.textContent = text;
  row.append(element);
  return element;
}

const heightOf = (element) => element?.getBoundingClientRect().height ?? 0;

// Scrolls the table only: scrollIntoView would also move the page under the reader's mouse. The head and the base's row
// stay in sight, so a row is covered where they are; none is covered in part.
function bringIntoSight(row) {
  const frame = row.closest(".memlab-runs");
  const table = row.closest("table");
  if (!frame || !table) return;
  const base = table.querySelector(".memlab-base");
  const message = row.nextElementSibling?.matches(".memlab-message") ? row.nextElementSibling : null;
  const isAbove = base !== row && base?.rowIndex < row.rowIndex;
  const isBelow = base !== row && base?.rowIndex > row.rowIndex;
  const covered = heightOf(table.tHead) + (isAbove ? heightOf(base) : 0);
  const bottom = row.offsetTop + heightOf(row) + heightOf(message) + (isBelow ? heightOf(base) : 0);
  let top = frame.scrollTop;
  if (bottom > top + frame.clientHeight) {
    const edge = bottom - frame.clientHeight + covered;
    const first = [...table.tBodies[0].rows].find((other) => other.offsetTop >= edge - 1) ?? row;
    top = first.offsetTop - covered;
  }
  top = Math.min(top, row.offsetTop - covered);
  table.style.marginBottom = `${Math.max(top + frame.clientHeight - table.offsetHeight, 0)}px`;
  frame.scrollTop = top;
}

function render({ model, el }) {
  const table = document.createElement("table");
  el.append(table);
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", "Runs of this lab");

  const choose = (row) => {
    if (!row?.dataset.run) return;
    model.set("shown", Number(row.dataset.run));
    model.save_changes();
  };
  const runRows = () => [...table.querySelectorAll("tr[data-run]")];

  function mark() {
    table.style.setProperty("--memlab-head", `${heightOf(table.tHead)}px`);
    for (const row of runRows()) {
      row.classList.toggle("memlab-base", Number(row.dataset.run) === model.get("base"));
      row.classList.toggle("memlab-pinned", Number(row.dataset.run) === model.get("pinned"));
    }
    for (const row of runRows()) {
      const isShown = Number(row.dataset.run) === model.get("shown");
      row.setAttribute("aria-selected", isShown);
      row.tabIndex = isShown ? 0 : -1;
      if (isShown && table.contains(document.activeElement)) row.focus();
      if (isShown) bringIntoSight(row);
    }
    const rows = runRows();
    if (rows.length > 0 && !rows.some((row) => row.tabIndex === 0)) rows[0].tabIndex = 0;
  }

  function draw() {
    const columns = model.get("columns");
    const hadFocus = table.contains(document.activeElement);
    table.replaceChildren();
    const head = table.createTHead().insertRow();
    for (const [, title] of columns) cell("th", title, head).scope = "col";
    const body = table.createTBody();
    for (const run of model.get("rows")) {
      const row = body.insertRow();
      row.dataset.run = run.number;
      // A name of settings may break after each plus sign.
      const texts = { ...run, settings: run.settings.replaceAll("+", "+\u200B") };
      for (const [key] of columns) cell("td", texts[key], row).dataset.column = key;
      if (!run.message) continue;
      const message = body.insertRow();
      message.className = "memlab-message";
      message.dataset.about = run.number;
      cell("td", run.message, message).colSpan = columns.length;
    }
    if (model.get("rows").length === 0) {
      cell("td", "No runs yet.", body.insertRow()).colSpan = columns.length;
    }
    mark();
    if (hadFocus) table.querySelector('tr[tabindex="0"]')?.focus();
  }

  table.addEventListener("click", (event) => choose(event.target.closest("tr[data-run]")));
  table.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const rows = runRows();
    const next = rows[rows.indexOf(event.target.closest("tr")) + step];
    if (!next) return;
    next.focus();
    choose(next);
  });
  model.on("change:rows change:columns", draw);
  model.on("change:shown change:pinned change:base", mark);
  draw();
  // Before the table is on the page it has no height, and in another width it has another.
  const resized = new ResizeObserver(mark);
  resized.observe(table);
  return () => resized.disconnect();
}

export default { render: hearing(render) };
