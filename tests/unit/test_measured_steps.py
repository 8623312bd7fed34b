"""Measured steps in a file: found by their scenario, and refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab.config.training_state import TrainingState
from memlab.record.measured_steps import measured_steps

RESULTS = Path(__file__).parents[2] / "labs" / "results"
SAME = {"num_layers": 4, "seq_length": 4096}


def test_both_files_of_the_h200_agree_about_what_full_recompute_leaves() -> None:
    settings = measured_steps(RESULTS / "h200_settings.jsonl", "qwen3-30b-a3b", **SAME)
    steps = measured_steps(RESULTS / "h200_steps.jsonl", "qwen3-30b-a3b", **SAME)
    assert (
        settings["full uniform 1"].residual_bytes == steps["full uniform 1"].residual_bytes == 2 * 4096 * 2048 * 2 * 4
    )
    assert {record.scenario.state for record in settings.values()} == {TrainingState()}
    assert {record.scenario.num_microbatches for record in steps.values()} == {1}


def test_a_file_a_line_and_a_scenario_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file: give a file such as"):
        measured_steps(tmp_path / "none.jsonl", "phi-4")
    (tmp_path / "one.jsonl").write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: "):
        measured_steps(tmp_path / "one.jsonl", "phi-4")
    (tmp_path / "one.jsonl").write_bytes(b"\x80\xff\x00")
    with pytest.raises(ValueError, match=r"line 1: the line is not valid JSON .*: give a file of measured steps"):
        measured_steps(tmp_path / "one.jsonl", "phi-4")
    with pytest.raises(ValueError, match=r"has no step of phi-4, 3 layers.*choose a scenario that was measured"):
        measured_steps(RESULTS / "h200_settings.jsonl", "phi-4", num_layers=3)
