"""What the labs, the story and the lecture say of Friday's job is what `Lab.fit` says of it today.

Near the limit, one more rule of the allocator changes a verdict, and no peak by which one would notice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest

from memlab import AllocatorSettings, Lab, Layout, MemorySettings, TrainingState, Versions
from memlab.fitting.does_it_fit import Fit
from memlab.units import GIB

LABS = Path(__file__).parents[2] / "labs"
EIGHT = Layout(expert_model_parallel_size=8, data_parallel_size=8)
AWARE = TrainingState(use_precision_aware_optimizer=True, grad_reduce_in_bf16=True, main_grads_dtype="bf16")
EXPERTS = MemorySettings(offload_modules=("expert_fc1", "moe_act"))

WORDS = r"(fits|may fit|does not fit)"
SENTENCES: dict[str, dict[str, tuple[int, ...]]] = {
    "08_training_state.ipynb": {
        rf"This step \*{WORDS}\* in 72\.4 GiB": (0,),
        rf"71\.6 GiB are left, and it {WORDS}:": (1,),
        rf"--expandable-segments` says that the job {WORDS} in both cases": (2, 3),
    },
    "09_ranks.ipynb": {
        rf"the prediction of one rank says that the job {WORDS}\.": (0,),
        rf"with balanced routing your job {WORDS};": (0,),
    },
    "README.md": {
        rf"it peaks at 69\.8 GiB, and {WORDS};": (0,),
        rf"most that is likely, it {WORDS} only with expandable segments": (3,),
    },
    "teaching/lecture_90_minutes.md": {rf"\(c\) {WORDS} without expandable segments if CUDA and NCCL take more": (1,)},
}
"""Sentences about the job with balanced routing, with the columns of lab 09's table whose verdict they state."""


def text_of(name: str) -> str:
    if not name.endswith(".ipynb"):
        return (LABS / name).read_text(encoding="utf-8")
    cells = nbformat.read(LABS / name, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def table() -> dict[str, list[str]]:
    """The peak and the verdicts of lab 09's table, by routing: default allocator, then expandable segments, each with
    what CUDA and NCCL are expected to take and with the most that is likely."""
    rows = re.findall(r"^\| (balanced|`\w+:[\d.]+`)[^|]*\| ([\d.]+ \| .*) \|$", text_of("09_ranks.ipynb"), re.MULTILINE)
    return {routing.strip("`"): cells.split(" | ") for routing, cells in rows}


@cache
def fit_of(routing: str, expandable: bool, transformer_engine: str | None = None) -> Fit:
    """Judges rank 0 of the job, without a search for settings that would fit."""
    allocator = AllocatorSettings(expandable_segments=expandable)
    versions = Versions(transformer_engine=transformer_engine) if transformer_engine else Versions()
    job: dict[str, Any] = {
        "seq_length": 4096,
        "layout": EIGHT,
        "routing": routing,
        "state": AWARE,
        "allocator": allocator,
    }
    own_settings = patch("memlab.fitting.does_it_fit.candidates", lambda settings, *_, **__: [settings])
    with own_settings, Lab("qwen3-30b-a3b", versions=versions, backend="simulated", **job) as lab:
        return lab.fit(lab.step(EXPERTS), "79GiB")


def assert_agrees(stated: Sequence[str], fit: Fit) -> None:
    """Compares two cells of the table, such as ``does not fit: fragmented`` and ``does not fit``, with a verdict."""
    expected = str(fit.verdict)
    if fit.verdict == "does not fit":
        expected += ": fragmented" if fit.is_fragmented else f": {-fit.margin_bytes / GIB:.1f} GiB short"
    assert list(stated) == [expected, fit.verdict_with_most_outside]


def test_lab_09_s_table_has_what_fit_says_of_balanced_routing() -> None:
    """One of its ten verdicts: the others take a minute."""
    peak, *verdicts = table()["balanced"]
    fit = fit_of("balanced", False, "2.12")  # as lab 08 prints it
    assert_agrees(verdicts[:2], fit)
    assert f"{fit.peak_allocated_bytes / GIB:.1f}" == peak
    assert "does not fit if they take 7.412 GiB, the most that is likely: the peak fits, but fragmentation" in str(fit)


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("routing", ["balanced", "random:7", "skewed:1.5", "skewed:2", "skewed:3"])
def test_lab_09_s_table_has_what_fit_says(routing: str, expandable: bool) -> None:
    peak, *verdicts = table()[routing]
    fit = fit_of(routing, expandable)
    assert_agrees(verdicts[2:] if expandable else verdicts[:2], fit)
    if not expandable:
        assert f"{fit.peak_allocated_bytes / GIB:.1f}" == peak


@pytest.mark.parametrize("name", SENTENCES)
def test_the_story_the_labs_and_the_lecture_state_the_verdicts_of_lab_09_s_table(name: str) -> None:
    _, *verdicts = table()["balanced"]
    for sentence, columns in SENTENCES[name].items():
        (stated,) = re.findall(sentence, text_of(name))
        assert {stated} == {verdicts[column] for column in columns}


def test_no_lab_says_that_friday_s_job_may_fit_with_balanced_routing() -> None:
    """Other sentences would not be found by the patterns above."""
    story = text_of("README.md")
    assert table()["balanced"][1] == "fits" and "may fit" not in story
    assert table()["skewed:1.5"][1:4:2] == ["does not fit: fragmented", "fits"]
    assert "rank 0 peaks at 70.9 GiB, and the step completes only with expandable segments" in story
