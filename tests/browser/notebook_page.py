"""A notebook in JupyterLab, as a browser shows it."""

from __future__ import annotations

import ast
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from playwright.sync_api import TimeoutError as PageTimeoutError
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Error, Locator, Page

    from tests.browser.server import JupyterServer

SHARED = "shared.ipynb"
KERNEL_SECONDS = 60
RUN_SECONDS = 150
LOADS = 4
STARTED_LATE = "[anywidget] Failed to initialize model."
"""What anywidget 0.11 throws where a page takes more than 2 s to start a widget."""
ANSWER_SECONDS = 30
"""What a page may take to answer on a machine that has other things to do, a step included."""
_LOOK_MILLISECONDS = 50
_READY = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.status === 'idle'
        && session.session.kernel.connectionStatus === 'connected';
}"""
_CLOSE = """async () => {
    const { context, sessionContext } = window.jupyterapp.shell.currentWidget;
    await context.save();
    await sessionContext.shutdown();
    const isGone = new Promise(resolve => context.disposed.connect(resolve));
    window.jupyterapp.shell.currentWidget.close();
    await isGone;
}"""
_OPEN = """async path => {
    const { commands, shell } = window.jupyterapp;
    const { id } = await commands.execute('docmanager:open', { path });
    shell.activateById(id);
    return id;
}"""
# A notebook without a cell would get an empty one, so the new cells come before the old ones go.
_WRITE = """sources => {
    const { sharedModel } = window.jupyterapp.shell.currentWidget.content.model;
    sharedModel.insertCells(0, sources.map(source => ({ cell_type: 'code', source })));
    sharedModel.deleteCellRange(sources.length, sharedModel.cells.length);
}"""
# The command's promise is kept when the last cell has ended; waiting for it in steps leaves room for a time limit.
# JupyterLab handles the kernel's messages one after the other, and waits for what a widget does with its message.
_RUN = """command => {
    const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
    const named = ({header, parent_header, content}) => [
        header.msg_type, content.target_name, content.comm_id, content.execution_state,
        'of', parent_header.msg_type ?? 'no request',
    ].filter(Boolean).join(' ');
    const messages = window.messages = {arrived: 0, lastArrived: '', handled: 0, lastHandled: ''};
    const arrive = (_, {msg, direction}) => {
        if (direction === 'recv' && msg.channel === 'iopub') { messages.arrived += 1; messages.lastArrived = named(msg); }
    };
    const handle = (_, msg) => { messages.handled += 1; messages.lastHandled = named(msg); };
    kernel.anyMessage.connect(arrive);
    kernel.iopubMessage.connect(handle);
    window.hasRun = false;
    window.jupyterapp.commands.execute(command).finally(() => {
        kernel.anyMessage.disconnect(arrive);
        kernel.iopubMessage.disconnect(handle);
        window.hasRun = true;
    });
}"""
_WHAT_RUNS = """() => {
    const { content, sessionContext } = window.jupyterapp.shell.currentWidget;
    const cells = [...content.model.cells].map(cell => `${cell.executionCount} ${cell.executionState}`);
    const { status, connectionStatus } = sessionContext.session.kernel;
    const { arrived, lastArrived, handled, lastHandled } = window.messages;
    return `kernel ${status}, ${connectionStatus}; cells ${cells.join(', ')}; `
        + `${arrived} messages arrived, the last one "${lastArrived}"; `
        + `${handled} of them are handled, the last one "${lastHandled}"`;
}"""
STACKS_ON_SIGNAL = (
    "import faulthandler, os, pathlib, signal\n"
    "pathlib.Path('kernel.pid').write_text(str(os.getpid()))\n"
    "faulthandler.register(signal.SIGUSR1, file=open('stacks.txt', 'w'), all_threads=True)\n"
)
"""Lets a test that waits in vain see where the kernel's threads are."""
# What is long comes as one string: playwright would pass on each number of a list by itself.
_OUTPUTS = """() => JSON.stringify(
    [...window.jupyterapp.shell.currentWidget.content.model.cells].map(c => c.outputs?.toJSON() ?? [])
)"""
_ASK = """async expression => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const request = {code: '', store_history: false, user_expressions: {value: expression}};
    return (await kernel.requestExecute(request).done).content.user_expressions.value;
}"""
# Plotly keeps what it was given as `data`, and what it drew, with its defaults, as `_fullData`.
_DRAWN = "[...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot._fullData)"
_FIGURES = (
    f"() => JSON.stringify({_DRAWN}"
    """.map(plot => ({
    in_panel: Boolean(plot.closest('.memlab-panel')),
    title: plot._fullLayout.title.text ?? '',
    y_title: plot._fullLayout.yaxis.title.text ?? '',
    traces: plot._fullData.map(t => ({
        name: t.name ?? '', uid: t.uid, visible: t.visible, look: [t.fillcolor, t.line?.color, t.line?.width, t.line?.dash],
        x: Array.from(t.x ?? []), y: Array.from(t.y ?? []),
    })),
})))"""
)


def write_notebook(path: Path, *sources: str) -> None:
    """Writes a notebook with one code cell a source."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # without it, JupyterLab asks for one
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


class NotebookPage:
    """One browser page with one notebook at a time open in it."""

    def __init__(self, page: Page, server: JupyterServer) -> None:
        self.page = page
        self.server = server
        self.complaints: list[str] = []
        """What the page wrote on its console as errors, and what it threw."""
        self._notebook: str | None = None
        self._shared_cells: tuple[str, ...] = ()
        page.on("console", self._note)
        page.on("pageerror", self._note_error)

    def open(self, notebook: str) -> None:
        """Opens a notebook of the server's folder and waits for its kernel.

        Where the page has JupyterLab already, that opens it, as after a double click in its file browser: to load all
        of JupyterLab again would take seconds. The notebook that the page showed loses its outputs and keeps its kernel.
        """
        if self._notebook is None:
            self.page.goto(self.server.address(notebook))
        else:
            if self._notebook:
                self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
            opened = self.page.evaluate(_OPEN, notebook)
            self._wait_for("id => window.jupyterapp.shell.currentWidget?.id === id", ANSWER_SECONDS, opened)
        self._notebook = notebook
        self.wait_until_ready()

    def open_shared(self, *sources: str) -> None:
        """Opens the notebook that tests share, with one code cell a source: its kernel has imported torch already."""
        if self._notebook != SHARED:
            if not self._shared_cells:
                write_notebook(self.server.work / SHARED, *sources)
                self._shared_cells = sources
            self.open(SHARED)
        if self._shared_cells != sources:
            self.page.evaluate(_WRITE, sources)
            self._shared_cells = sources

    def reload(self, awaited: Locator) -> None:
        """Saves the notebook and loads the page again; the kernel keeps running.

        After a reload JupyterLab shows the kernel's widgets, or it reports "model not found", seldom and mostly on a busy
        machine, with any widget: ipywidgets' `get_model` stops waiting after 2 s without a last look, and if the models
        arrive in that moment no other look follows. Then the panel adds to the message that loading the page again
        helps, and it does.

        Args:
            awaited: What the page shows when it has the widgets.
        """
        self.save()
        for _ in range(LOADS):
            self.page.reload()
            self.wait_until_ready()
            awaited.or_(self.page.get_by_text("Error displaying widget")).first.wait_for()
            if awaited.count():
                return
            expect(self.page.get_by_text("load the page again")).to_be_visible()
            self.complaints[:] = [line for line in self.complaints if "widget model not found" not in line]
        raise AssertionError(f"{LOADS} times in a row JupyterLab did not find the kernel's widgets")

    def save(self) -> None:
        """Writes the notebook to the server's folder, with its outputs."""
        self._run("docmanager:save", ANSWER_SECONDS)

    def close_notebook(self) -> None:
        """Closes the notebook that is open, and ends its kernel; the page stays."""
        self.page.evaluate(_CLOSE)
        self._notebook = ""

    def close(self, picture: Path) -> None:
        """Ends the kernel and the page, and leaves a picture of what the page showed last."""
        self.page.screenshot(path=picture)
        if self._notebook:
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def wait_until_ready(self) -> None:
        """Waits until the kernel has started and has nothing to do."""
        self._wait_for(_READY, KERNEL_SECONDS)

    def run_all(self, seconds: float = RUN_SECONDS) -> None:
        """Runs all cells to their end."""
        self._run("notebook:run-all-cells", seconds)

    def run_cell(self, index: int, seconds: float = RUN_SECONDS) -> None:
        """Selects one cell and runs it to its end."""
        content = "window.jupyterapp.shell.currentWidget.content"
        self.page.evaluate(f"index => {{ {content}.deselectAll(); {content}.activeCellIndex = index; }}", index)
        self._run("notebook:run-cell", seconds)

    def outputs(self) -> list[list[dict[str, Any]]]:
        """Returns the outputs of each cell, as the notebook would be saved."""
        return json.loads(self.page.evaluate(_OUTPUTS))

    def ask(self, expression: str) -> Any:
        """Evaluates a Python expression in the kernel and returns its value, if that is a literal.

        Raises:
            RuntimeError: If the kernel raised instead, with what it said.
        """
        reply = self.page.evaluate(_ASK, expression)
        if reply["status"] != "ok":
            raise RuntimeError(f"the kernel answered {expression} by {reply['ename']}: {reply['evalue']}")
        return ast.literal_eval(reply["data"]["text/plain"])

    def errors(self) -> list[str]:
        """Returns every error and every line of stderr under any cell."""
        flat = [output for outputs in self.outputs() for output in outputs]
        raised = [f"{out['ename']}: {out['evalue']}" for out in flat if out["output_type"] == "error"]
        return raised + [str(out["text"]) for out in flat if out.get("name") == "stderr"]

    def figures(self) -> list[dict[str, Any]]:
        """Returns what plotly has drawn on the page: title, annotations and traces with their x and y."""
        return json.loads(self.page.evaluate(_FIGURES))

    def wait_for_figures(self, count: int) -> list[dict[str, Any]]:
        """Waits until as many figures are drawn."""
        self._wait_for(f"count => {_DRAWN}.length >= count", KERNEL_SECONDS, count)
        return self.figures()

    def cell_output(self, index: int) -> Locator:
        """Returns the place of a cell's outputs."""
        return self.page.locator(f".jp-Notebook-cell[data-windowed-list-index='{index}'] .jp-Cell-outputArea")

    def _run(self, command: str, seconds: float) -> None:
        self.page.evaluate(_RUN, command)
        try:
            self._wait_for("() => window.hasRun", seconds)
        except PageTimeoutError as error:
            page = self.page.evaluate(_WHAT_RUNS)
            raise AssertionError(f"{command} did not end in {seconds} s: {page}\n{self._kernel_stacks()}") from error

    def _wait_for(self, condition: str, seconds: float, argument: object = None) -> None:
        # By default playwright looks whenever the page draws, and lets it draw 60 times a second for that.
        self.page.wait_for_function(condition, arg=argument, timeout=seconds * 1000, polling=_LOOK_MILLISECONDS)

    def _kernel_stacks(self) -> str:
        """Returns where each thread of the kernel is, if the notebook's first cell was `STACKS_ON_SIGNAL`."""
        number, stacks = self.server.work / "kernel.pid", self.server.work / "stacks.txt"
        if not number.exists():
            return "the notebook writes no stacks"
        os.kill(int(number.read_text()), signal.SIGUSR1)
        time.sleep(1)
        return stacks.read_text()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def _note_error(self, error: Error) -> None:
        if error.message == STARTED_LATE:  # a busy machine; the panel works all the same, which a test shows
            return
        self.complaints.append(str(error))
