"""Makes the pictures of the README: a timeline, many ranks, a search, the panel, two runs in one chart, out of memory.

python -m tests.browser.screenshots
"""

from __future__ import annotations

import base64
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from playwright.sync_api import FloatRect, Page, expect, sync_playwright

from memlab import Lab, Layout, MemorySettings, Ranks, show
from memlab.cli import main as memlab
from tests.browser.chromium import ARGS, find_chromium
from tests.browser.notebook_page import NotebookPage, write_notebook
from tests.browser.panel_page import PanelPage
from tests.browser.server import JupyterServer

PICTURES = Path(__file__).parents[2] / "labs" / "pictures"
CELLS = (
    "from memlab import Lab, panel",
    'lab = Lab("qwen3-moe-tiny", num_layers=4, seq_length=1024)',
    "panel(lab, predict=False)",
)
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MARGIN = 4
"""Pixels around what a picture shows."""
FIGURE = ".plotly-graph-div .main-svg >> nth=0"
# A page decodes its own picture: no image library is needed for that.
_PIXELS = """async png => {
    const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height).getContext('2d');
    canvas.drawImage(bitmap, 0, 0);
    const { width, height, data } = canvas.getImageData(0, 0, bitmap.width, bitmap.height);
    let text = '';
    for (let at = 0; at < data.length; at += 32768) text += String.fromCharCode(...data.subarray(at, at + 32768));
    return [width, height, btoa(text)];
}"""


def draw(panel: PanelPage) -> None:
    """Works the panel, and takes a picture at three places."""
    panel.run()
    panel.press("pin")
    panel.choose("recompute-granularity", "full")
    peak = panel.run()
    take(panel.notebook.page, "panel", ".memlab-panel")
    take(panel.notebook.page, "overlay", ".memlab-switches", ".memlab-breakdown", ".memlab-runs")
    panel.notebook.ask(f"setattr(lab, 'device_memory_bytes', {peak})")
    panel.choose("recompute-granularity", "none")
    panel.press("run")
    expect(panel.root.locator("tr.memlab-message")).to_be_visible()
    take(panel.notebook.page, "error", ".memlab-switches", ".memlab-breakdown", ".memlab-runs")


def draw_pages(page: Page, folder: Path) -> None:
    """Takes a picture of the figure in each page that `View.save` and ``memlab search --out`` write."""
    with Lab("qwen3-moe-tiny", num_layers=4, seq_length=1024, backend="cpu") as lab:
        show(lab.step(FULL), axis="event").save(folder / "timeline.html")  # no axis depends on the machine
    stages = Layout(pipeline_model_parallel_size=4)
    with (
        Ranks.start(4) as ranks,
        Lab("qwen3-moe-tiny", layout=stages, num_microbatches=4, backend="cpu", ranks=ranks) as lab,
    ):
        show(lab.step(), axis="event").save(folder / "ranks.html")
    words = "phi-4 --tensor-model-parallel-size 2 --world-size 8 --gpu-memory 79GiB --out"
    assert memlab(["search", *words.split(), str(folder / "front.html")]) == 0
    for name in ("timeline", "ranks", "front"):
        page.goto((folder / f"{name}.html").as_uri())
        page.locator(FIGURE).wait_for()
        take(page, name, FIGURE)


def take(page: Page, name: str, *parts: str) -> None:
    """Writes the part of the page from one element to another as a PNG with a palette."""
    page.mouse.move(0, 0)  # plotly shows its buttons under the mouse
    page.evaluate("() => document.activeElement.blur()")
    page.locator(parts[0]).evaluate(f"part => {{part.style.scrollMarginTop = '{MARGIN}px'; part.scrollIntoView()}}")
    boxes = [page.locator(part).bounding_box() for part in parts]
    found = [box for box in boxes if box]
    left, top = (max(0.0, min(box[at] for box in found) - MARGIN) for at in ("x", "y"))
    right = max(box["x"] + box["width"] for box in found) + MARGIN
    bottom = max(box["y"] + box["height"] for box in found)  # the next row of the panel is near
    clip: FloatRect = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    path = PICTURES / f"{name}.png"
    path.write_bytes(with_palette(page, page.screenshot(clip=clip, animations="disabled", caret="hide")))
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")  # noqa: T201  # a script


def with_palette(page: Page, png: bytes) -> bytes:
    """Writes a picture in its 256 commonest colours, the others as the nearest of them: a third of the bytes."""
    width, height, pixels = page.evaluate(_PIXELS, base64.b64encode(png).decode())
    rgb = np.frombuffer(base64.b64decode(pixels), dtype=np.uint8).reshape(-1, 4)[:, :3]
    colours, index, counts = np.unique(rgb, axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(counts)[::-1][:256]]
    nearest = np.array([_nearest(palette, colour) for colour in colours], dtype=np.uint8)
    rows = nearest[index.reshape(height, width)]
    # Each row begins with the number of its filter: 0 is none.
    data = zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes(), level=9)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _nearest(palette: npt.NDArray[np.uint8], colour: npt.NDArray[np.uint8]) -> int:
    return int(np.abs(palette.astype(np.int16) - colour).sum(axis=1).argmin())


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def main() -> None:
    """Opens two pages, and a notebook with a panel in JupyterLab, and draws."""
    PICTURES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        JupyterServer(Path(folder) / "jupyter") as server,
        sync_playwright() as playwright,
    ):
        write_notebook(server.work / "panel.ipynb", *CELLS)
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGS)
        notebook = NotebookPage(browser.new_page(viewport={"width": 1280, "height": 800}), server)
        notebook.open("panel.ipynb")
        notebook.run_all()
        draw(PanelPage(notebook))
        draw_pages(browser.new_page(viewport={"width": 1120, "height": 900}), Path(folder))


if __name__ == "__main__":
    main()
