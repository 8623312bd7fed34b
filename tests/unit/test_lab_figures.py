"""The tables in which labs quote an H200: each number is the one in the files of what was measured."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from memlab import ARCHITECTURES, Scenario
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.record.step_record import StepRecord
from memlab.units import GIB
from tests.unit.live import FULL, recompute
from tests.unit.measured import measured_rows

ROOT = Path(__file__).parents[2]
MODELS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "phi-4": "phi-4"}


def text_of(lab: str) -> str:
    return "\n".join(cell.source for cell in nbformat.read(ROOT / "labs" / f"{lab}.ipynb", as_version=4).cells)


def table_after(head: str, text: str) -> dict[str, list[str]]:
    """Returns the cells of a Markdown table's rows by their first cell; the head is that of the first column."""
    (body,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[ :|-]+\n((?:\|.*\n?)+)", text, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]
    return {first: rest for first, *rest in rows}


def lab_metrics(case: str) -> dict[str, int]:
    """Returns what a lab itself measured on an H200 in the case of a suite, apart from its records."""
    path = ROOT / "papermill_runs" / "baselines" / "h200" / f"{case}-seq_length=4096.json"
    metrics: dict[str, int] = json.loads(path.read_text())["measured"]["records"]["(lab)"]["metrics"]
    return metrics


@pytest.mark.parametrize(
    ("lab", "case", "names"),
    [
        (
            "04_parameters_gradients_optimizer",
            "residency",
            {
                "bytes of parameters": "parameters_bytes",
                "bytes of gradients": "gradients_bytes",
                "bytes of optimizer state": "optimizer_state_bytes",
            },
        ),
        (
            "10_weight_sync",
            "weight-sync",
            {
                "on the device before a sync, bytes": "idle_device_bytes",
                "on the device during a sync, bytes": "sync_device_bytes",
                "more if the gradients are loaded too, bytes": "wasted_device_bytes",
            },
        ),
    ],
)
def test_labs_quote_what_they_measured_on_an_h200(lab: str, case: str, names: dict[str, str]) -> None:
    table = table_after("H200, 4 layers", text_of(lab))
    for column, model in enumerate(MODELS.values()):
        measured = lab_metrics(f"{case}-architecture={model}")
        quoted = {name: int(cells[column].replace(",", "")) for name, cells in table.items()}
        num_parameters = quoted.pop("parameters of the model", None)
        assert quoted == {name: measured[key] for name, key in names.items()}
        if num_parameters is not None:
            assert num_parameters == replace(ARCHITECTURES[model], num_layers=4).num_parameters
            assert [size / num_parameters for size in quoted.values()] == [2, 4, 12]


def settings_on_h200(model: str) -> dict[str, list[str]]:
    """Returns a table of RESULTS.md, 4 layers and 4096 tokens, by setting: its cells as they are."""
    text = (ROOT / "labs" / "RESULTS.md").read_text()
    section = text.partition(f"## {model}, 4 layers, 1 x 4096 tokens, bf16\n")[2].partition("\n## ")[0]
    return table_after("setting", section)


PEAK, SAVED, TRANSFERRED, R, SPREAD, RATIO, TOKENS = 0, 1, 2, 4, 8, 9, 10  # columns of RESULTS.md, after the setting


@pytest.mark.parametrize("model", MODELS)
def test_lab_03_quotes_what_offload_saves_and_costs(model: str) -> None:
    measured = settings_on_h200(MODELS[model])
    for name, cells in table_after(f"offload, {model}", text_of("03_activation_offload")).items():
        setting = name.strip("`")
        row = measured[setting if setting == "none" else f"offload {setting}"]
        quoted = [row[column] for column in (SAVED, TRANSFERRED, R, TOKENS, SPREAD)]
        assert cells == ["0.000" if cell == "-0.000" else cell for cell in quoted]  # a reader needs no sign of zero


def test_lab_02_quotes_flops_and_what_recompute_saves_and_costs() -> None:
    text = text_of("02_recompute")
    for name, (_, *cells) in table_after("recompute", text).items():
        module = name.strip("`")
        settings = FULL if module == "whole layers" else recompute(module)
        for column, (model, saved) in enumerate([("qwen3-30b-a3b", cells[2]), ("phi-4", cells[3])]):
            setting = "full uniform 1" if module == "whole layers" else f"recompute {module}"
            row = settings_on_h200(model).get(setting, [""] * 11)
            assert saved in ("", row[SAVED])
            if cells[column] not in ("", "no effect"):
                flops = recomputed_operations(settings, Scenario.of(model, num_layers=1, seq_length=4096))
                assert cells[column] == (f"{flops:,.0f}" if flops < 1e6 else f"{flops / 1e6:.1f} million")
            if model == "phi-4":
                assert cells[4] in ("", row[RATIO])


def test_lab_03_quotes_the_flops_of_full_recompute() -> None:
    text = text_of("03_activation_offload")
    quoted = re.search(
        r"([\d.]+) million FLOPs per token and layer with the ([\d,]+) tokens.*?([\d.]+) million with (\d+)", text
    )
    assert quoted is not None
    for flops, tokens in (quoted.group(1, 2), quoted.group(3, 4)):
        one_layer = Scenario.of("qwen3-30b-a3b", num_layers=1, seq_length=int(tokens.replace(",", "")))
        assert flops == f"{recomputed_operations(FULL, one_layer) / 1e6:.1f}"


@pytest.mark.parametrize("lab", ["02_recompute", "03_activation_offload"])
def test_the_job_of_the_story_is_the_predicted_one(lab: str) -> None:
    path = ROOT / "papermill_runs" / "baselines" / "simulated" / "full-size-seq_length=4096.json"
    records = json.loads(path.read_text())["measured"]["records"]
    cases = {
        "none": "experts-none",
        "recompute moe": "experts-recompute-moe",
        "full uniform 1": "experts-full",
        "offload expert_fc1+moe_act": "experts-offload-experts",
    }
    for setting, (peak,) in table_after("your job with", text_of(lab)).items():
        assert f"{records[cases[setting]]['metrics']['peak_allocated_bytes'] / 2**30:.2f}" == peak


@pytest.mark.parametrize("name", MODELS)
def test_the_rounds_of_lab_03_are_those_that_were_measured(name: str) -> None:
    lines = measured_rows("h200_throughput")
    rounds = [(StepRecord.from_dict(line["record"]), line["seconds"]) for line in lines]
    plain, *others = [each for each in rounds if each[0].scenario.architecture.name == MODELS[name]]
    rows = table_after(name, text_of("03_activation_offload"))
    assert len(rows) == 1 + len(others)
    for record, seconds in (plain, *others):
        settings = "full recompute" if record.settings.recompute_granularity == "full" else str(record.settings)
        saved, transferred, speed, ratio = rows[re.sub(r"^(offload|recompute|none)( \S+)?$", quoted, settings)]
        assert speed == f"{record.scenario.seq_length / statistics.median(seconds):,.0f}"
        if record is not plain[0]:
            ratios = [one / other for one, other in zip(seconds, plain[1], strict=True)]
            lower, middle, upper = statistics.quantiles(ratios, n=4)
            assert ratio == f"{middle:.3f} ({lower:.3f} to {upper:.3f})"
            assert saved == f"{(plain[0].peak_allocated_bytes - record.peak_allocated_bytes) / GIB:.3f}"
            num_bytes = sum(record.offloaded_bytes_by_module.values())
            assert transferred == (f"{num_bytes / GIB:.3f}" if num_bytes else "")


def quoted(settings: re.Match[str]) -> str:
    """Writes settings as the lab's first column has them."""
    verb, modules = settings.groups()
    return f"{verb} `{modules.strip()}`" if modules else f"`{verb}`"


def upstream_errors(part: str, **where: object) -> list[dict[str, Any]]:
    """Returns the rows of a part of `benchmarks/upstream_errors.py` on an H200."""
    rows = json.loads((ROOT / "labs/results/h200_upstream_errors.json").read_text())["rows"]
    return [row for row in rows if row["part"] == part and where.items() <= row.items()]


def test_lab_05_quotes_what_the_copies_of_gradients_took_on_an_h200() -> None:
    rows = {row["remedy"]: row for row in upstream_errors("clone")}
    assert len({row["peak_allocated_bytes"] for row in rows.values()}) == 1, "equal to the byte"
    assert len({row["loss"] for row in rows.values()}) == 1
    more = {name: rows[name]["allocated_in_backward_bytes"] for name in ("release_storage", "detach")}
    text = text_of("05_moe_checkpoint_retention")
    assert f"allocated {(more['release_storage'] - more['detach']) / 2**20:.0f} MiB more" in text
    assert f"By hand it is {4 * 2 * 4096 * 2048 / 2**20:.0f} MiB" in text


def test_lab_06_quotes_the_bytes_after_each_line_of_a_release_on_an_h200() -> None:
    table = table_after("H200, GiB", text_of("06_phi4_activation_peak"))
    lines = {name.removeprefix("after ").strip("`"): cells for name, cells in table.items()}
    for column, model in ((0, "phi-4"), (2, "qwen3-30b-a3b")):
        rows = [row for row in upstream_errors("release") if row["model"].startswith(f"{model},")][:7]
        assert all(row["active_bytes"] == row["allocated_bytes"] for row in rows)
        found = {row["after"]: (row["allocated_bytes"], row["reserved_bytes"]) for row in rows}
        for line, cells in lines.items():
            assert cells[column : column + 2] == [f"{size / GIB:.2f}" for size in found[line]]


def test_lab_06_explains_what_the_validation_pass_of_2634_left() -> None:
    """FSDP2 leaves the last layer, the embedding and the output layer gathered, in bf16 (`tests/unit/test_engines.py`
    shows it live)."""
    quoted = re.search(
        r"([\d.]+) GiB, exactly the ([\d.]+) - ([\d.]+) of the thread", text_of("06_phi4_activation_peak")
    )
    assert quoted is not None
    gathered, after, before = map(float, quoted.groups())
    assert gathered == pytest.approx(after - before)
    assert gathered == round(2 * ARCHITECTURES["phi-4"].with_layers(1).num_parameters / GIB, 2)


def test_lab_10_says_what_its_timers_show() -> None:
    rows = {row["timed"].partition(":")[0]: row for row in upstream_errors("timers")}
    shown = {name: 1e3 * statistics.median(row["without_waiting_seconds"]) for name, row in rows.items()}
    taken = {name: 1e3 * statistics.median(row["with_waiting_seconds"]) for name, row in rows.items()}
    text = text_of("10_weight_sync")
    load, num_bytes = "load, weights only", rows["load, weights only"]["copied_bytes"]
    assert f"the timer shows {shown[load]:.1f} ms" in text
    assert f"takes {taken[load]:.0f} ms, at {num_bytes / taken[load] / 1e6:.0f} GB/s" in text
    assert f"{round(num_bytes / shown[load] / 1e6, -2):,.0f} GB/s" in text
    assert f"That takes {taken['gc.collect and empty_cache alone']:.0f} ms" in text
    assert taken["load as merged"] - shown["load as merged"] == pytest.approx(0.1, abs=0.05)
    assert f"{num_bytes / 1e9:.1f} GB of weights" in text


def test_lab_04_says_where_an_error_appears_on_a_gpu() -> None:
    text = text_of("04_parameters_gradients_optimizer")
    first = "inverted condition, first line of the step"
    (late,) = upstream_errors("crashes", error=first, launch_blocking=False)
    (there,) = upstream_errors("crashes", error=first, launch_blocking=True)
    assert "next(batches).cuda()" in late["reported_at"]
    assert "self.grad_data.zero_()" in there["reported_at"]
    assert "self.grad_data.zero_()" in text
    assert all("illegal memory access" in row["ended"] for row in (late, there))
    (other,) = upstream_errors("crashes", error="inverted condition, in backward", launch_blocking=False)
    assert other["ended"].startswith("RuntimeError: setStorage")
