"""How quick and how heavy the panel is on a page of JupyterLab, by the browser's own clock.

Goals: a control's change is on the page within 100 ms; the chart of a step of 100,000 events within 500 ms of its
end, of 1,000,000 within 1.5 s; the charts of eight ranks of 100,000 events each within 1 s; 100 runs grow the page by
less than 100 MB and the kernel by the records that it keeps; the notebook on disk stays under 1 MB; on a simulated
lab of the whole phi-4, a tick that was not tried before is on the chart within 500 ms.

    python -m benchmarks.browser
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession, Page, expect, sync_playwright

from tests.browser.chromium import ARGS, find_chromium
from tests.browser.notebook_page import NotebookPage, write_notebook
from tests.browser.panel_page import PanelPage
from tests.browser.server import JupyterServer

NUM_REPEATS = 20
NUM_RUNS = 100
CHARTS = {(100_000, 1): "500 ms", (1_000_000, 1): "1500 ms", (100_000, 8): "1000 ms"}
"""Events of a rank, and ranks of a step: the goal from Run to its chart."""
MB = 1e6
# JupyterLab leaves the widgets' state out of a notebook unless it is told otherwise: the heavier way is weighed.
SAVING = {"@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True}}
ROOT = Path(__file__).parents[1]
# The lab of the chart's benchmark takes steps that end as they begin, so that what is timed is the way to the page.
SETUP = f"""\
import itertools, sys
sys.path.insert(0, {str(ROOT)!r})
from concurrent.futures import Future
from dataclasses import replace
from benchmarks.figures import synthetic_record
from memlab import JobRecord, Lab, Layout, Scenario, panel

lab = Lab("qwen3-moe-tiny", num_layers=2, seq_length=256)

def kept_bytes():
    columns = ("nanoseconds", "delta_bytes", "pool", "category", "phase", "module")
    return sum(getattr(record.timeline, name).nbytes for record in lab.records for name in columns)

def job_record(record, num_ranks):
    layouts = [Layout(pipeline_model_parallel_size=num_ranks, rank=rank) for rank in range(num_ranks)]
    scenarios = [Scenario.of("qwen3-30b-a3b", layout=layout) for layout in layouts]
    return JobRecord.of([replace(record, scenario=scenario) for scenario in scenarios])

def end_at_once(num_events, num_ranks=1):
    records = [synthetic_record(num_events - less, 500) for less in (0, 2)]
    records = itertools.cycle(records if num_ranks == 1 else [job_record(one, num_ranks) for one in records])
    def submit(request=None, on_progress=None):
        future = Future()
        lab.records.append(replace(next(records), step_index=len(lab.records)))
        future.set_result(lab.records[-1])
        return future
    lab.submit = submit"""
WHAT_IF_SETUP = f"""\
import sys
sys.path.insert(0, {str(ROOT)!r})
from memlab import Lab, panel

lab = Lab("phi-4", backend="simulated")"""
# It does not look at the page in every frame: a browser that draws each frame leaves less of two cores to the kernel.
_CONTROL_MS = """async ([pressed, parts, attribute]) => {
    const seen = () => [...document.querySelectorAll(parts)].map(part => part[attribute]).join();
    const before = seen(), started = performance.now();
    await new Promise((resolve, reject) => {
        const watch = new MutationObserver(() => {
            if (seen() === before) return;
            watch.disconnect();
            requestAnimationFrame(resolve);  // the next frame is what a person sees
        });
        const panel = document.querySelector('.memlab-panel');
        watch.observe(panel, { subtree: true, childList: true, characterData: true, attributes: true });
        setTimeout(() => reject(new Error(`${parts} never changed`)), 10000);
        document.querySelector(pressed).click();
    });
    return performance.now() - started;
}"""
# The chart says when it has drawn; the last of its drawings, and the table's new row, count.
_CHART_MS = """async () => {
    const pause = () => new Promise(resolve => setTimeout(resolve, 50));
    const panel = document.querySelector('.memlab-panel');
    const rows = () => document.querySelectorAll('.memlab-runs tbody tr[data-run]').length;
    const before = rows();
    let drawn = 0;
    const note = () => { drawn = performance.now(); };
    panel.addEventListener('memlab-drawn', note);
    const started = performance.now();
    document.querySelector('button.memlab-run, .memlab-run button').click();
    while (rows() === before || drawn === 0) {
        if (performance.now() - started > 30000) throw new Error('no new chart');
        await pause();
    }
    while (performance.now() - drawn < 1000) await pause();
    panel.removeEventListener('memlab-drawn', note);
    return drawn - started;
}"""

# A prediction of settings that were not tried before; the last drawing within a second of the one before it counts.
_WHAT_IF_MS = """async hook => {
    const panel = document.querySelector('.memlab-panel');
    let drawn = 0;
    const note = () => { drawn = performance.now(); };
    panel.addEventListener('memlab-drawn', note);
    const started = performance.now();
    panel.querySelector(`.memlab-${hook} input`).click();
    while (drawn === 0 || performance.now() - drawn < 1000) {
        if (performance.now() - started > 60000) throw new Error(`${hook}: no new chart`);
        await new Promise(resolve => setTimeout(resolve, 50));
    }
    panel.removeEventListener('memlab-drawn', note);
    return drawn - started;
}"""
WHAT_IF = {
    "recompute of modules": ("selective", "recompute-modules", ("mlp", "core-attn")),
    "offload of activations": ("none", "offload-modules", ("core-attn", "attn-proj", "qkv-linear")),
}
"""For each row of the table: the granularity of recompute, and the boxes of a group, clicked in this order."""


def medians(label: str, goal: str, milliseconds: list[float]) -> None:
    """Prints a row of the table of times."""
    print(
        f"{label:<52} {statistics.median(milliseconds):8.0f} ms {min(milliseconds):8.0f} {max(milliseconds):8.0f}  "
        f"goal {goal}"
    )


def heap_bytes(session: CDPSession) -> float:
    """Returns what the page's scripts hold after a collection."""
    session.send("HeapProfiler.collectGarbage")
    metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize")


def time_controls(page: Page) -> None:
    """Times ways from a click to what the kernel's answer changes."""
    cases = {
        "a tick, the rule's text": (".memlab-offload-modules-attn-proj input", ".memlab-validation-error", "innerText"),
        "host or device, the drawn chart": (
            ".memlab-pool button:not(.mod-active)",
            ".memlab-panel .ytick",
            "textContent",
        ),
        "time or event, the drawn chart": (
            ".memlab-axis button:not(.mod-active)",
            ".memlab-panel .xtitle",
            "textContent",
        ),
    }
    for label, case in cases.items():
        medians(label, "100 ms", [page.evaluate(_CONTROL_MS, case) for _ in range(NUM_REPEATS)])


def time_charts(panel: PanelPage) -> None:
    """Times the way from Run, of a step that takes no time, to the drawn chart."""
    for (num_events, num_ranks), goal in CHARTS.items():
        panel.notebook.ask(f"end_at_once({num_events}, {num_ranks})")
        panel.notebook.page.evaluate(_CHART_MS)  # the first has the axes to change as well
        times = [panel.notebook.page.evaluate(_CHART_MS) for _ in range(NUM_REPEATS // 2)]
        ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
        medians(f"Run to chart, {num_events:,} events{ranks}, step of 0 ms", goal, times)
    panel.notebook.ask("delattr(lab, 'submit')")


def time_what_if(panel: PanelPage) -> None:
    """Times the way from a tick to the drawn chart of a step that is predicted."""
    panel.press("run")
    expect(panel.rows).to_have_count(1)
    panel.notebook.wait_until_ready()
    panel.write("min-offloaded-tensor-size", 0)
    for label, (granularity, group, boxes) in WHAT_IF.items():
        panel.choose("recompute-granularity", granularity)
        panel.notebook.page.wait_for_timeout(5000)
        times = [panel.notebook.page.evaluate(_WHAT_IF_MS, f"{group}-{box}") for box in boxes]
        medians(f"simulated phi-4: {label}, the drawn chart", "500 ms", times)


def weigh(panel: PanelPage, session: CDPSession) -> list[str]:
    """Takes real steps under settings in turn, weighs kernel and page before and after, and returns rows of a table."""
    notebook = panel.notebook
    panel.run()  # what is loaded at the first step is not growth
    kernel, page = notebook.server.kernel_rss(), heap_bytes(session)
    records = notebook.ask("kept_bytes()")
    for number in range(NUM_RUNS):
        panel.choose("recompute-granularity", ("full", "none")[number % 2])
        before = panel.rows.count()
        panel.press("run")
        expect(panel.rows).to_have_count(before + 1)
    notebook.wait_until_ready()
    grown = {
        "kernel, resident": notebook.server.kernel_rss() - kernel,
        "of it, timelines that the lab keeps": notebook.ask("kept_bytes()") - records,
        "page, JavaScript heap": heap_bytes(session) - page,
    }
    return [f"{label:<52} {num_bytes / MB:+8.1f} MB" for label, num_bytes in grown.items()]


def main() -> None:
    """Prints one table."""
    with (
        tempfile.TemporaryDirectory() as folder,
        JupyterServer(Path(folder) / "jupyter", SAVING) as server,
        sync_playwright() as playwright,
    ):
        write_notebook(server.work / "panel.ipynb", SETUP, "panel(lab)")
        write_notebook(server.work / "what_if.ipynb", WHAT_IF_SETUP, "panel(lab)")
        page = playwright.chromium.launch(executable_path=find_chromium(), args=ARGS).new_page()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        notebook = NotebookPage(page, server)
        notebook.open("panel.ipynb")
        notebook.run_all()
        panel = PanelPage(notebook)
        panel.run()
        notebook.save()
        small = (server.work / "panel.ipynb").stat().st_size
        print(f"{'':<52} {'median':>11} {'least':>8} {'most':>8}")
        time_controls(page)
        rows = weigh(panel, session)
        notebook.save()
        large = (server.work / "panel.ipynb").stat().st_size
        time_charts(panel)
        print(f"\n{NUM_RUNS} runs in one panel grow", *rows, sep="\n")
        print(f"{'the notebook on disk, with the state of all widgets':<52} {(large - small) / MB:+8.1f} MB", end="")
        print(f" to {large / MB:.2f} MB, goal 1 MB")
        what_if = NotebookPage(page, server)  # another one, so that JupyterLab is loaded again
        what_if.open("what_if.ipynb")
        what_if.run_all()
        time_what_if(PanelPage(what_if))


if __name__ == "__main__":
    main()
