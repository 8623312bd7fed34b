"""Global batches that change while a job runs, or that are made smaller so that micro-batches divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

from memlab.jobs.job import Job

MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --vocab-size 32000 --bf16 "
    "--max-position-embeddings 4096 --seq-length 4096 --micro-batch-size 2 "
)


def read_megatron(tmp_path: Path, flags: str) -> Job:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON + flags)
    return Job.read(path)


def microbatches_of_megatron(global_batch: int, *, decreases: bool) -> int | None:
    try:
        return ConstantNumMicroBatchesCalculator(global_batch, 2, 8, decreases, 1).get()
    except AssertionError:
        return None


@pytest.mark.parametrize("decreases", [False, True])
@pytest.mark.parametrize("global_batch", [8, 16, 20, 40, 47, 48])
def test_a_batch_is_divided_as_megatron_divides_it(global_batch: int, decreases: bool, tmp_path: Path) -> None:
    flag = " --decrease-batch-size-if-needed" if decreases else ""
    job = read_megatron(tmp_path, f"--global-batch-size {global_batch}{flag}")
    expected = microbatches_of_megatron(global_batch, decreases=decreases)
    assert (job.cannot_start is None) is (expected is not None)
    assert expected is None or job.required()[0].num_microbatches == expected


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    [("0:16 1B:64 2B:128", 8), ("0:128,1B:32", 8), ("0:32", 2), ("4.1K:64 0:0.016K", 4), ("5:16 4096:64", 4)],
)
def test_the_largest_batch_of_a_schedule_is_predicted(schedule: str, num_microbatches: int, tmp_path: Path) -> None:
    job = read_megatron(tmp_path, f"--step-batch-size-schedule '{schedule}'")
    assert job.required()[0].num_microbatches == num_microbatches
    is_told = any("the steps with the largest batch" in warning for warning in job.warnings)
    assert is_told is (schedule != "0:32")


def test_a_later_batch_that_passes_do_not_divide_stops_no_start(tmp_path: Path) -> None:
    """``update`` of ``StepBatchsizeNumMicroBatchesCalculator`` (d98e8a64) looks at the batch of the next step alone."""
    job = read_megatron(tmp_path, "--step-batch-size-schedule '0:32 1B:100'")
    assert job.required()[0].num_microbatches == 2
    assert [one for one in job.warnings if "a batch has 100 sequences, must be a multiple of 16" in one]
    none = read_megatron(tmp_path, "--step-batch-size-schedule '0:100'").cannot_start
    assert none is not None and "must be a multiple of 16" in none


@pytest.mark.parametrize(
    "flags",
    ["'4096:16'", "'0:16 4095:64'", "'16'", "'0:x'", "'0:inf'", "'0:0'", "'0:16' --decrease-batch-size-if-needed"],
)
def test_a_schedule_that_megatron_refuses_cannot_start(flags: str, tmp_path: Path) -> None:
    refused = read_megatron(tmp_path, f"--step-batch-size-schedule {flags}").cannot_start
    assert refused is not None and refused.startswith("step_batch_size_schedule ") and "Megatron-Core" in refused


def test_a_batch_that_ramps_up_is_predicted_at_its_end_with_a_word(tmp_path: Path) -> None:
    job = read_megatron(tmp_path, "--global-batch-size 64 --rampup-batch-size 16 16 1000")
    assert job.required()[0].num_microbatches == 4
    assert any(warning.startswith("rampup_batch_size: the first steps have fewer") for warning in job.warnings)
