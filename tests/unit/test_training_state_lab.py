"""Lab 08: its four surprises hold in its baselines, for both families, and the figures of its text are in them.

The nightly run of ``papermill_runs/suites/simulated.yaml`` compares the baselines with the lab.
"""

from __future__ import annotations

import json
import re
from itertools import permutations
from pathlib import Path

import nbformat
import pytest

from memlab.units import GIB

ROOT = Path(__file__).parents[2]
both_families = pytest.mark.parametrize("architecture", ["qwen3-30b-a3b", "phi-4"])


def measured(architecture: str) -> dict[str, dict[str, int]]:
    """The metrics of the lab's records, by the records' names."""
    name = f"training-state-architecture={architecture}.json"
    baseline = json.loads((ROOT / "papermill_runs/baselines/simulated" / name).read_text(encoding="utf-8"))
    return {name: record["metrics"] for name, record in baseline["measured"]["records"].items()}


def freed(records: dict[str, dict[str, int]], name: str, *, than: str = "plain") -> tuple[float, float]:
    """What a state frees compared with another one, in GiB, when the step starts and at the peak."""
    start, peak = ((records[than][key] - records[name][key]) / GIB for key in ("static_bytes", "peak_allocated_bytes"))
    return start, peak


def peaks_in_the_optimizer(record: dict[str, int]) -> bool:
    return record["peak_allocated_bytes"] > record["static_bytes"] + record["activation_peak_bytes"]


@both_families
def test_bf16_moments_free_memory_between_two_steps_and_raise_the_peak_in_the_optimizer(architecture: str) -> None:
    records = measured(architecture)
    name = "precision-aware-with-bf16-moments"
    start, peak = freed(records, name, than="precision-aware-with-bf16-gradients")
    assert start > 6 and peak < -3
    assert peaks_in_the_optimizer(records[name])
    assert not peaks_in_the_optimizer(records["precision-aware-with-bf16-gradients"])


@both_families
def test_bf16_gradients_alone_free_little_at_the_peak_and_with_the_precision_aware_optimizer_all(
    architecture: str,
) -> None:
    records = measured(architecture)
    start, peak = freed(records, "bf16-gradients-alone")
    assert start < -3 and 0 < peak < 1
    half_of_the_buffers = records["plain"]["peak_by_category/gradients"] / 2 / GIB
    both = freed(records, "precision-aware-with-bf16-gradients", than="precision-aware-with-fp32-gradients")
    assert both == pytest.approx((half_of_the_buffers, half_of_the_buffers), abs=0.01)


@both_families
def test_the_native_fused_loss_needs_more_than_the_unfused_one_and_transformer_engine_s_less(
    architecture: str,
) -> None:
    records = measured(architecture)
    assert freed(records, "native-fused-loss")[1] < -1.5
    assert freed(records, "te-fused-loss")[1] > 0.5


@both_families
def test_fp8_needs_more_memory_and_with_fp8_parameters_about_as_much_as_without_fp8(architecture: str) -> None:
    records = measured(architecture)
    assert max(freed(records, "FP8")) < -1
    assert freed(records, "FP8-with-FP8-parameters") == pytest.approx((0.0, 0.0), abs=0.25)


@both_families
def test_where_forward_decides_bf16_moments_free_as_much_at_the_peak_as_between_two_steps(architecture: str) -> None:
    records = measured(architecture)
    for where in ("longer", "eight"):
        start, peak = freed(records, f"{where}-bf16-moments", than=f"{where}-fp32-moments")
        assert peak == pytest.approx(start, abs=0.01)
        assert start > 0.5


AWARE = "precision-aware-with-bf16-"
COMPARED = {
    "Two high points in one step": "plain",
    "Moments in bf16": rf"{AWARE}\w+",
    "Gradients in bf16": r"plain|bf16-gradients-alone|precision-aware-with-\w+-gradients",
    "The loss": r"plain|.*loss|log-.*|forward-.*",
    "FP8": r"plain|FP8.*",
    "The optimizer on the CPU": r"plain|.*CPU.*",
    "Which moment decides?": r"longer-.*",
    "The same options in a job of eight GPUs": r"eight-.*",
}
"""The records that each section compares, by its heading."""


ARITHMETIC = {"2.32", "0.11", "0.18"}
"""Figures of the section FP8 that are no difference of two records: copies of weights, remainders, and both together."""


def test_every_figure_of_the_text_is_that_of_the_records_beside_it() -> None:
    """A difference of any two records would not do: those of the same states with more tokens are nearly as large.

    Two digits may be off by the unsplit remainders, which move by a few MiB with the order of a process's allocations.
    """
    cells = nbformat.read(ROOT / "labs" / "08_training_state.ipynb", as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    records = measured("qwen3-30b-a3b")
    count = 0
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        if heading not in COMPARED:
            continue
        known = set()
        for key in ("static_bytes", "peak_allocated_bytes", "host_bytes"):
            compared = [each[key] / GIB for name, each in records.items() if re.fullmatch(COMPARED[heading], name)]
            known |= {*compared, *(one - other for one, other in permutations(compared, 2))}
        for figure in set(re.findall(r"(\d+\.\d{2,3}) GiB", section)) - ARITHMETIC:
            within = 0.0006 if len(figure.partition(".")[2]) == 3 else 0.007
            assert any(abs(size - float(figure)) < within for size in known), (heading, figure)
            count += 1
    assert count > 18
