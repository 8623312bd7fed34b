"""Every exercise of the labs: the line that a reader starts from misses the goal, and a solution reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from memlab.exercises import CheckFailed

LABS = Path(__file__).parents[2] / "labs"
MARK = "  # change me"
SELECTIVE = 'mine = lab.step(MemorySettings(recompute_granularity="selective", recompute_modules={}))'
SOLUTIONS = {
    "01_recompute": [SELECTIVE.format('["moe"]'), SELECTIVE.format('["moe_act"]')],
    "02_activation_offload": [
        "mine = lab.step(everything.settings)",
        'mine = lab.step(MemorySettings(offload_modules=["core_attn", "qkv_linear"], min_offloaded_tensor_size=0))',
    ],
    "03_parameters_gradients_optimizer": [
        'lab.offload("gradients", "optimizer state")',
        'with lab.residency_fault("gradients_held_by_main_parameters"):',
    ],
    "04_moe_checkpoint_retention": [
        SELECTIVE.format('["moe_act"]'),
        'mine = lab.step(remedies["detach"].settings)',
    ],
    "05_phi4_activation_peak": [SELECTIVE.format('["mlp"]')],
    "06_weight_sync": ["mine = lab.step(MemorySettings(offload_optimizer=True))"],
    "07_full_size": [
        "mine = Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)",
        'mine = lab.step(MemorySettings(offload_modules=["expert_fc1", "moe_act"]))',
    ],
}
SMALLER = {"07_full_size": {"num_layers": 8, "gpu_memory": "18GiB"}}
"""Parameters with which a lab is quick and its exercises are what they are."""

pytestmark = pytest.mark.notebook


def exercises_of(lab: str) -> tuple[list[str], list[str]]:
    """Returns a lab's code cells up to its record, and its exercises."""
    cells = nbformat.read(LABS / f"{lab}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    exercises = [cell.source for cell in code if "exercise" in cell.metadata.get("tags", [])]
    work = [cell.source for cell in code if not {"exercise", "record"} & set(cell.metadata.get("tags", []))]
    return work, exercises


def test_every_lab_with_exercises_has_its_solutions_here() -> None:
    labs = [path.stem for path in sorted(LABS.glob("*.ipynb")) if exercises_of(path.stem)[1]]
    assert labs == sorted(SOLUTIONS)


@pytest.mark.parametrize("lab", SOLUTIONS)
def test_each_exercise_is_missed_at_first_and_reached_by_its_solution(lab: str) -> None:
    work, exercises = exercises_of(lab)
    names: dict[str, Any] = {}
    for source in work:
        exec(source, names)  # noqa: S102  # the lab's own cells
        if source is work[0]:
            names |= SMALLER.get(lab, {})
    assert len(exercises) == len(SOLUTIONS[lab])
    try:
        for exercise, solution in zip(exercises, SOLUTIONS[lab], strict=True):
            with pytest.raises(CheckFailed):
                exec(exercise, names)  # noqa: S102
            lines = [f"    {solution}" if line.endswith(MARK) else line for line in exercise.splitlines()]
            assert lines != exercise.splitlines(), "the line to change is marked"
            exec("\n".join(lines), names)  # noqa: S102
    finally:
        names["lab"].close()
