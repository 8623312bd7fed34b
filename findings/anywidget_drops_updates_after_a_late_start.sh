#!/usr/bin/env bash
# anywidget 0.11.0 in JupyterLab 4.6.6: where a page takes more than 2 s to start a widget, the page still shows it, but each
# later message of the kernel to it is dropped, for good. `Runtime` (packages/anywidget/src/runtime.ts) rejects its promise
# `ready` after 2 s, and the model's `_handle_comm_msg` (widget.ts) waits for that promise before each message. What the
# user sees is a widget that never changes again; the only trace is "[anywidget] Failed to initialize model." in the
# browser's console, once for each widget. Large modules, busy machines and slow laptops come to this.
# The widget below takes its time by a top-level await of 1 or 3 s, and shows a number that the kernel sets to 1 later.
# Seen on 2026-11-30, Python 3.11, ipywidgets 8.1.9, chromium of Debian:
#   starts in 1 s: shows 1 after the kernel has set 1
#   starts in 3 s: shows 0 after the kernel has set 1
#   console: [anywidget] Failed to initialize model.
# Needs a chromium or google-chrome on the PATH. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jupyterlab==4.6.6 ipywidgets==8.1.9 anywidget==0.11.0 ipykernel==7.4.0 playwright==1.65.2
mkdir "$folder/work"
cat > "$folder/look.py" <<'PY'
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

folder = Path(sys.argv[1])
cells = [
    """
import anywidget, traitlets

class Late(anywidget.AnyWidget):
    seconds = traitlets.Int().tag(sync=True)
    number = traitlets.Int(0).tag(sync=True)

def late(seconds):
    code = '''
await new Promise((resolve) => setTimeout(resolve, SECONDS * 1000));
function render({ model, el }) {
  const show = () => { el.textContent = `number ${model.get("number")}`; };
  el.className = `starts-in-${model.get("seconds")}`;
  model.on("change:number", show);
  show();
}
export default { render };
'''
    return Late(_esm=code.replace("SECONDS", str(seconds)), seconds=seconds)
""",
    "fast = late(1); fast",
    "slow = late(3); slow",
    "fast.number = slow.number = 1",
]
kernel = {"name": "python3", "display_name": "Python 3"}
notebook = {
    "cells": [
        {"cell_type": "code", "id": f"cell{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": cell}
        for n, cell in enumerate(cells)
    ],
    "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5,
}
(folder / "work" / "late.ipynb").write_text(json.dumps(notebook))
own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
server = subprocess.Popen(
    [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1",
     "--ServerApp.port=0", "--IdentityProvider.token=", f"--notebook-dir={folder / 'work'}"],
    env=os.environ | own, stderr=subprocess.PIPE, text=True,
)
try:
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
    browser_path = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        errors = set()
        page.on("pageerror", lambda error: errors.add(error.message))
        page.goto(f"{address}lab/tree/late.ipynb")
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=120_000
        )

        def run(first, last):
            for number in range(first, last):
                page.evaluate(
                    "number => { const { content } = window.jupyterapp.shell.currentWidget;"
                    " content.activeCellIndex = number; return window.jupyterapp.commands.execute('notebook:run-cell'); }",
                    number,
                )

        run(0, 3)
        shown = {seconds: page.locator(f".starts-in-{seconds}") for seconds in (1, 3)}
        for place in shown.values():
            place.wait_for(timeout=60_000)
        run(3, 4)
        page.wait_for_timeout(5_000)
        for seconds, place in shown.items():
            print(f"starts in {seconds} s: shows {place.inner_text().split()[-1]} after the kernel has set 1")
        print("console:", *errors)
        browser.close()
finally:
    server.terminate()
PY
"$folder/venv/bin/python" "$folder/look.py" "$folder" > "$folder/seen.txt" 2> "$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
cat "$folder/seen.txt"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen.txt"
