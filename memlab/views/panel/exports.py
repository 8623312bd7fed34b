"""What a run leaves outside the panel: files, and the lines that repeat it without a browser."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from memlab.atomic_files import written_aside
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import ARCHITECTURES
from memlab.config.backend_kind import KINDS
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.does_it_fit import transferred_bytes
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.views.display import View
from memlab.views.panel.run import Run, rows


def settings_line(settings: MemorySettings | TrainingState | AllocatorSettings) -> str:
    """Returns the Python that makes equal settings, for example ``MemorySettings(offload_optimizer=True)``."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.changed().items()}
    of_adapters = {name: values.pop(name) for name in list(values) if name.startswith("lora_")}
    texts = [f"{name}={value!r}" for name, value in values.items()]
    if of_adapters:
        inner = (f"{name.removeprefix('lora_')}={value!r}" for name, value in of_adapters.items())
        texts.append(f"lora=LoRA({', '.join(inner)})")
    return f"{type(settings).__name__}({', '.join(texts)})"


def measure_command(run: Run) -> str:
    """Returns the command line that repeats a run in a process of its own, or in as many as its job has ranks."""
    scenario, layout = run.scenario, run.scenario.layout
    architecture = scenario.architecture
    is_known = ARCHITECTURES.get(architecture.name) == architecture
    # A scenario does not say which file a model that memlab does not know was read from.
    words = [architecture.name if is_known else f"path/to/{architecture.name}/config.json"]
    of_layout = [field.name for field in fields(Layout) if field.name not in ("data_parallel_size", "rank")]
    plain = Scenario.of(architecture=architecture)
    parts = ("layout", "state", "allocator", "versions")
    of_scenario = [field.name for field in fields(Scenario) if field.name not in parts]
    for values, usual, names in ((scenario, plain, of_scenario), (layout, Layout(), of_layout)):
        for name in names:
            value = getattr(values, name)
            if value != getattr(usual, name):
                text = _routing_text(value) if isinstance(value, Routing) else str(value)
                words += _flags({name: value if isinstance(value, bool) else text})
    words += _flags(scenario.state.changed() | scenario.allocator.changed() | run.settings.changed())
    if run.record is not None and run.record.forward_only:
        words.append("--forward-only")
    if run.record is not None and run.record.out_of_memory is not None:
        words += ["--device-memory", f"{run.record.out_of_memory.failed_allocation.limit_bytes}B"]
    if KINDS[run.backend].is_prediction:  # a rank of a job that is not there, with a routing that is chosen
        words += _flags(scenario.versions.changed())
        job = [] if layout == Layout() else ["--world-size", str(layout.world_size), "--rank", str(layout.rank)]
        return shlex.join(["memlab", "predict", *words, *job])
    if layout.world_size > 1:
        words += ["--ranks", str(layout.world_size)]
    return shlex.join(["memlab", "measure", *words, "--backend", run.backend])


def table_csv(runs: Sequence[Run], pinned: Run | None) -> str:
    """Returns the table of runs as CSV: its words as shown, its numbers in bytes, FLOPs and seconds."""
    text = io.StringIO()
    words = ["number", "settings", "workload", "worst_rank", "status", "message"]
    writer = csv.DictWriter(text, [*words, *_numbers(None, None), "repeat"], lineterminator="\n")
    writer.writeheader()
    for run, row in zip(runs, rows(runs, pinned), strict=True):
        shown = {name: row[name] for name in words}
        writer.writerow(shown | _numbers(run, pinned) | {"repeat": measure_command(run)})
    return text.getvalue()


def save_run(run: Run, folder: Path) -> Path:
    """Saves a run's record and timeline into a folder of its own.

    Raises:
        ValueError: If the run has no record.
        OSError: If the folder cannot be written.
    """
    if run.record is None:
        raise ValueError(f"{run} ended in an error and has no record to save: choose a run without an error")
    return run.record.save(free_path(folder / _stem(run)))


def save_snapshot(run: Run, folder: Path) -> Path:
    """Saves a run as a memory snapshot that https://pytorch.org/memory_viz opens.

    Raises:
        ValueError: If the run has no record.
        OSError: If the folder cannot be written.
    """
    if run.record is None:
        raise ValueError(f"{run} ended in an error and has no record to save: choose a run without an error")
    folder.mkdir(parents=True, exist_ok=True)
    return run.record.export_snapshot(free_path(folder / f"{_stem(run)}.pickle"))


def save_picture(figure: go.Figure, run: Run, folder: Path, kind: str) -> Path:
    """Saves the chart as an image.

    Args:
        figure: The chart; its background is changed.
        run: Names the file.
        folder: Where it goes; made if it is missing.
        kind: ``png`` or ``svg``.

    Raises:
        ValueError: If kaleido, which draws without a browser page, is not installed.
    """
    if find_spec("kaleido") is None:
        raise ValueError(
            f"{kind.upper()} needs kaleido, which is not installed: run pip install kaleido, or export HTML: its page "
            "has a camera button"
        )
    path = free_path(folder / f"{_stem(run)}.{kind}")
    # On the page the chart is transparent and takes the theme's ground; a file has none.
    picture = figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        picture.write_image(aside, format=kind, width=1000, height=figure.layout.height or 500, scale=2)
    return path


def save_page(figure: go.Figure, table: str, run: Run, folder: Path) -> Path:
    """Saves the chart and its text twin as one HTML file that needs no network."""
    path = free_path(folder / f"{_stem(run)}.html")
    folder.mkdir(parents=True, exist_ok=True)
    return View(figure, table).save(path)


def free_path(path: Path) -> Path:
    """Returns the path, or the first of ``name-2``, ``name-3`` and so on that is free: no export is overwritten."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return candidate


def _routing_text(routing: Routing) -> str:
    """Writes a routing so that it is read back to the last digit."""
    if routing.kind == "shares":
        return json.dumps(routing.shares)
    if routing.kind == "counts":
        return json.dumps(routing.counts)
    return f"skewed:{routing.factor!r}".removesuffix(".0") if routing.kind == "skewed" else str(routing)


def _flags(values: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(_flag(name) if value else _flag(f"no_{name}"))
        else:
            words += [_flag(name), ",".join(value) if isinstance(value, tuple) else str(value)]
    return words


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _stem(run: Run) -> str:
    rank = "" if run.rank is None else f"-rank-{run.rank}"
    return f"{run.scenario.architecture.name.replace('.', '_')}-run-{run.number}{rank}"


def _numbers(run: Run | None, pinned: Run | None) -> dict[str, Any]:
    """A row's numbers; None has their names only."""
    names = ("peak_allocated_bytes", "peak_less_pinned_bytes", "recomputed_flops_per_token", "copied_bytes_each_way")
    numbers: dict[str, Any] = dict.fromkeys((*names, "step_seconds", "loss"), "")
    record = run.record if run is not None else None
    if record is None:
        return numbers
    numbers |= {"peak_allocated_bytes": record.peak_allocated_bytes, "step_seconds": record.step_seconds}
    if record.status == "ok":
        base = pinned.record if pinned is not None and pinned.is_ok else None
        costs = recomputed_operations(record.settings, record.scenario), transferred_bytes(record)
        numbers |= dict(zip(names[2:], costs, strict=True)) | {"loss": record.loss}
        if base is not None:
            numbers["peak_less_pinned_bytes"] = record.peak_allocated_bytes - base.peak_allocated_bytes
    return numbers
