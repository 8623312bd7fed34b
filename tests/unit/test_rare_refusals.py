"""Refusals that users meet seldom: each says the value, its rule and what to do, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from memlab.config.lora import LoRA
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.regression.suite.suite import read_suite
from memlab.watching.magic import _names_in

MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --vocab-size 1000 --tokenizer-type NullTokenizer "
)
VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
    "actor_rollout_ref.actor.strategy=megatron"
)


def job(text: str, name: str = "job.sh", **options: list[str]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / name).write_text(text)
        read = Job.read(folder / name, **options)  # type: ignore[arg-type]
        raise ValueError(read.cannot_start)  # a job that cannot start is read, and says why

    return read


def suite(text: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "suite.yaml").write_text(text)
        return read_suite(folder / "suite.yaml")

    return read


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty job": (job("\n"), "job.sh is empty: give a script, a log"),
    "a key to set without a value": (
        job(VERL, overrides=["data.train_batch_size"]),
        "--set is 'data.train_batch_size', must be key=value: give a key",
    ),
    "arguments with keys below them": (
        job("MODEL_ARGS:\n  --num-layers: {a: 1}\n", "job.yaml"),
        "job.yaml, line 2: --num-layers has keys or lists below it, must be a value: correct it",
    ),
    "a window of three": (
        job(MEGATRON + "--window-size 1,2,3"),
        "line 1: window_size is '1,2,3', must be two whole numbers, such as 127,0: correct it",
    ),
    "a schedule that begins late": (
        job(MEGATRON + "--step-batch-size-schedule 400:4"),
        "step_batch_size_schedule is '400:4', must be pairs such as '0:768 250B:1536', the first at 0",
    ),
    "more prompts in a mini-batch than in a step": (
        job(VERL),
        "ppo_mini_batch_size is 128, more than the 64 prompts of data.train_batch_size, which verl refuses: change one",
    ),
    "an unknown key of a case": (
        suite("backend: cpu\nbaselines: b\ncases:\n  - lab: x\n    colour: red\n"),
        "block 1: unknown key 'colour': choose from lab, name",
    ),
    "a suite without cases": (suite("backend: cpu\n"), "key 'cases' is missing: add a line `cases: ...`"),
    "a cell magic without a model": (
        lambda _: _names_in("as run"),
        "%%memlab got 'as run', must name a model: write %%memlab model",
    ),
    "full recompute without a method": (
        lambda _: MemorySettings(recompute_granularity="full"),
        "recompute_granularity 'full' needs a recompute_method: choose 'uniform' (every layer, in groups) or 'block'",
    ),
    "an unknown setting": (
        lambda _: MemorySettings.from_dict({"colour": 1}),
        "unknown settings ['colour']: choose from recompute_granularity",
    ),
    "adapters as a number": (
        lambda _: TrainingState(lora=8),  # type: ignore[arg-type]
        "lora is 8, must be LoRA(...) or None: give LoRA(rank=...)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rare_refusal_says_value_rule_and_action(name: str, tmp_path: Path) -> None:
    asked, words = CASES[name]
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        asked(tmp_path)
    assert "\n" not in str(refusal.value)


def test_what_the_refusals_propose_is_accepted(tmp_path: Path) -> None:
    assert TrainingState(lora=LoRA(rank=8)).lora == LoRA(rank=8)
    assert _names_in("model optimizer as run") == (["model", "optimizer"], "run")
    MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    (tmp_path / "job.sh").write_text(MEGATRON + "--step-batch-size-schedule '0:4' --window-size 127,0")
    assert Job.read(tmp_path / "job.sh").scenario is not None
