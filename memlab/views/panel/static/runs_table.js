// The table of runs: a click or an arrow key chooses the run that the panel shows.

function cell(tag, text, row) {
  const element = document.createElement(tag);
  element.textContent = text;
  row.append(element);
  return element;
}

// Scrolls the table only: scrollIntoView would also move the page under the reader's mouse.
function bringIntoSight(row) {
  const frame = row.closest(".memlab-runs");
  const head = row.closest("table")?.tHead;
  if (!frame || !head) return;
  const [box, place] = [frame.getBoundingClientRect(), row.getBoundingClientRect()];
  const top = box.top + head.getBoundingClientRect().height;
  if (place.bottom > box.bottom) frame.scrollTop += place.bottom - box.bottom;
  else if (place.top < top) frame.scrollTop -= top - place.top;
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
    for (const row of runRows()) {
      const isShown = Number(row.dataset.run) === model.get("shown");
      row.setAttribute("aria-selected", isShown);
      row.tabIndex = isShown ? 0 : -1;
      if (isShown && table.contains(document.activeElement)) row.focus();
      if (isShown) bringIntoSight(row);
      row.classList.toggle("memlab-pinned", Number(row.dataset.run) === model.get("pinned"));
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
      for (const [key] of columns) cell("td", run[key], row).dataset.column = key;
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
  model.on("change:shown change:pinned", mark);
  draw();
}

export default { render };
