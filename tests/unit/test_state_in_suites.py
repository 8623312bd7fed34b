"""A training state as text and JSON: in a notebook's parameter, in a suite, in a baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.regression.case_measurements import _unusual
from memlab.regression.compare import compare_with_baseline
from memlab.regression.suite.parameters import read_parameters, resolve
from memlab.views.text.ranks import ranks_table
from memlab.views.text.record import record_table
from tests.notebooks.small_suites import measured

from .builders import record_of, training_step

LABS = Path(__file__).parents[2] / "labs"
AWARE = TrainingState(use_precision_aware_optimizer=True, main_grads_dtype="bf16", optimizer_offload_fraction=0.5)


def test_options_as_text_are_those_of_python_and_of_the_command_line() -> None:
    options = ["use_precision_aware_optimizer", "main_grads_dtype=bf16", "optimizer_offload_fraction=0.5"]
    assert TrainingState.from_options(options) == AWARE
    assert TrainingState.from_options(["use_distributed_optimizer=false", "ddp_bucket_size=7"]).changed() == {
        "use_distributed_optimizer": False,
        "ddp_bucket_size": 7,
    }
    parameters = read_parameters(nbformat.read(LABS / "02_recompute.ipynb", as_version=4))
    assert resolve(parameters, {"state": ",".join(options)})["state"] == options
    assert TrainingState.from_dict(AWARE.to_dict()) == TrainingState.from_dict(AWARE.changed()) == AWARE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["bf16"],
            r"option 'bf16' of the training state is unknown, must be one of use_distributed_optimizer, .*: give",
        ),
        (["loss=logprobs", "loss=logprobs"], "option 'loss' of the training state is given twice"),
        (["main_grads_dtype"], "main_grads_dtype is True, must be one of fp32, bf16"),
        (["grad_reduce_in_bf16=2"], "grad_reduce_in_bf16 is 2, must be True or False"),
        (["main_grads_dtype=bf16"], "must be fp32 without the precision-aware optimizer"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingState.from_options(options)


def test_a_baseline_shows_a_state_only_where_it_is_not_the_default() -> None:
    plain = Scenario.of("phi-4-tiny")
    assert not {"state", "allocator"} & _unusual(plain.to_dict()).keys()
    unusual = _unusual(replace(plain, state=AWARE, allocator=AllocatorSettings(expandable_segments=True)).to_dict())
    assert (unusual["state"], unusual["allocator"]) == (AWARE.changed(), {"expandable_segments": True})


def test_a_changed_state_is_named_option_by_option_and_an_older_baseline_has_the_default() -> None:
    before, after = measured(), measured(peak_allocated_bytes=1)
    after.records["plain"].scenario["state"] = {}
    assert compare_with_baseline(before, after, "cpu")[0].changed == ""
    after.records["plain"].scenario["state"] = {"grad_reduce_in_bf16": True, "loss": "logprobs"}
    (difference,) = compare_with_baseline(before, after, "cpu")
    assert difference.changed == "scenario grad_reduce_in_bf16: False -> True; scenario loss: cross_entropy -> logprobs"
    after = replace(after, parameters=before.parameters | {"state": ["grad_reduce_in_bf16", "loss=logprobs"]})
    (difference,) = compare_with_baseline(before, after, "cpu")
    assert difference.changed.startswith("parameter state: none -> grad_reduce_in_bf16+loss=logprobs")
    assert "scenario" not in difference.changed
    after.records["plain"].scenario["layout"] = {"context_parallel_size": 2}
    after = replace(after, parameters=after.parameters | {"context_parallel_size": 2})
    (difference,) = compare_with_baseline(before, after, "cpu")
    assert "scenario" not in difference.changed, "the line of the parameter names it already"


def test_the_table_of_a_step_names_the_state_and_the_phase_of_the_peak() -> None:
    record = replace(record_of(training_step()), peak_phase="backward")
    changed = replace(record, scenario=replace(record.scenario, state=AWARE))
    assert "training state:" not in record_table(record)
    assert f"training state: {AWARE}" in record_table(changed)
    assert "\npeak phase: backward\n" in record_table(record)
    table = ranks_table([changed])
    assert f"\ntraining state: {AWARE}\n" in table and "peak phase" in table and " backward " in table
