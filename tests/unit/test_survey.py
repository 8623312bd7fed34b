"""What ``memlab recipes`` says of a folder of job files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.jobs.job import Job
from memlab.jobs.survey import Outcome, survey
from memlab.views.text.survey import survey_table

SFT = "NPROC_PER_NODE=8 megatron sft --max_length 2048 --gradient_accumulation_fusion false --model "
VERL = "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-8B"
GRADIENTS = "actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32"
SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
JOBS: dict[str, tuple[str, Outcome, tuple[str, ...]]] = {
    "exact.sh": (f"{SFT}Qwen/Qwen3-8B", "expressible", ()),
    "a/bounded.sh": (f"{SFT}Qwen/Qwen3-8B --padding_free false", "bounded", ("padding_free",)),
    "a/unbounded.sh": (
        f"{SFT}Qwen/Qwen2.5-7B --padding_free false --linear_decoupled_in_proj true",
        "unbounded",
        ("linear_decoupled_in_proj, without a bound", "padding_free"),
    ),
    "a/guessed.sh": (
        f"{SFT}Qwen/Qwen3-8B --micro_batch_size $(cat rows)",
        "unbounded",
        ("the file does not say micro_batch_size",),
    ),
    "b/asked.sh": ("NPROC_PER_NODE=8 megatron sft --max_length 2048", "asked", ("the file does not say the model",)),
    "b/version.sh": (
        VERL,
        "asked",
        (
            f"{GRADIENTS} is not in the file, and its default depends on the version",
            "the file does not say the size of a micro-batch",
        ),
    ),
    "b/sizes.sh": (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16 --seq-length 1024",
        "asked",
        ("the file does not say the model",),
    ),
    "b/read.slurm": (
        f"{SFT}zai-org/GLM-5",
        "read",
        ("sparse attention that an indexer chooses",),
    ),
    "b/refused.sh": (
        f"{SFT}zai-org/GLM-5 --some_flag 3",
        "refused",
        ("sparse attention that an indexer chooses",),
    ),
    "b/engine.sh": (
        "python -m verl.trainer.main_ppo model_engine=megatron2 actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "read",
        ("memlab predicts verl's jobs with Megatron and FSDP only",),
    ),
    "cannot.sh": (
        f"{SFT}Qwen/Qwen3-8B --tensor_model_parallel_size 3",
        "cannot start",
        (f"starts only with other values of {', '.join(SIZES)}",),
    ),
    "job.yaml": (
        "policy:\n  model_name: Qwen/Qwen3-8B\n  megatron_cfg: {enabled: true}\ngrpo: {num_prompts_per_step: 4}\n",
        "expressible",
        (),
    ),
    "ranks.sh": (
        f"{SFT}Qwen/Qwen3-8B".removeprefix("NPROC_PER_NODE=8 "),
        "unbounded",
        ("the file does not say the number of ranks",),
    ),
}
NO_JOBS = {
    "install.sh": "pip install torch",
    "values.yaml": "replicas: 2",
    "list.yaml": "- agent_type: x",
    "package.json": '{"name": "x"}',
    "empty.sh": "",
    ".hidden/job.sh": f"{SFT}Qwen/Qwen3-8B",
    "README.md": f"{SFT}Qwen/Qwen3-8B",
    "binary.sh": "\0",
}
UNREADABLE = {"circle.yaml": "defaults: circle.yaml\npolicy: {megatron_cfg: {enabled: true}}\n", "broken.yaml": "a: [1"}


def folder_with(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    jobs = {name: text for name, (text, _, _) in JOBS.items()}
    return folder_with(tmp_path, jobs | NO_JOBS | UNREADABLE)


def test_each_job_of_a_folder_has_an_outcome_and_what_it_misses(checkout: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = survey(checkout, on_file=lambda *place: seen.append(place))
    outcomes = {one.path: one.outcome for one in found.files}
    assert outcomes == {name: outcome for name, (_, outcome, _) in JOBS.items()}
    missing = {one.path: set(one.missing) for one in found.files}
    assert missing == {name: {*names} for name, (_, _, names) in JOBS.items()}
    assert found.unreadable.keys() == UNREADABLE.keys()
    assert "in a circle" in found.unreadable["circle.yaml"]
    assert seen == [(number, found.num_files) for number in range(1, found.num_files + 1)]
    assert found.num_files == len(JOBS) + len(UNREADABLE) + 6, "neither hidden files nor other endings"


def test_counts_are_by_framework_and_by_model_and_add_up(checkout: Path) -> None:
    found = survey(checkout)
    by_framework, by_model = found.counts("framework"), found.counts("model")
    assert {name: sum(counts.values()) for name, counts in by_framework.items()} == {
        "ms-swift": 9,
        "verl": 2,
        "nemo-rl": 1,
        "megatron-lm": 1,
    }
    assert by_framework["ms-swift"]["unbounded"] == 3
    assert {name: sum(counts.values()) for name, counts in by_model.items()} == {
        "qwen3": 8,
        "qwen2": 1,
        "glm_moe_dsa": 2,
        "not named": 2,
    }
    assert found.missing()["padding_free"] == 2
    table = survey_table(found)
    assert f"{checkout}: 13 of 21 scripts and configurations are jobs" in table
    assert "2 files cannot be read, as broken.yaml: " in table


def test_one_fault_of_memlab_is_told_and_does_not_end_the_walk(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Job.read

    def failing(path: Path, **given: str) -> Job:
        if path.name == "exact.sh":
            raise TypeError("no such thing")
        return read(path, **given)

    monkeypatch.setattr(Job, "read", failing)
    assert main(["recipes", str(checkout), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (failed,) = [one for one in found["files"] if one["outcome"] == "failed"]
    assert (failed["path"], failed["missing"]) == ("exact.sh", ["TypeError: no such thing"])
    assert len(found["files"]) == len(JOBS)


def test_a_version_of_a_framework_answers_what_depends_on_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"verl.sh": VERL, "swift.sh": f"{SFT}Qwen/Qwen3-8B"})
    outcomes = {
        version: {one.path: one.outcome for one in survey(folder, version=version).files}
        for version in (None, "before-2026-08-20")
    }
    assert outcomes[None] == {"verl.sh": "asked", "swift.sh": "expressible"}
    assert outcomes["before-2026-08-20"] == {"verl.sh": "unbounded", "swift.sh": "expressible"}


def test_a_folder_without_jobs_says_so_and_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_with(tmp_path, {"install.sh": "pip install torch"})
    assert main(["recipes", str(tmp_path)]) == 0
    assert "0 of 1 scripts and configurations are jobs" in capsys.readouterr().out
    assert main(["recipes", str(tmp_path / "install.sh")]) == 2
    assert "is not a folder: give a folder with job files" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refusing(folder: Any) -> Any:
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    (checkout / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    assert survey(checkout).unreadable["closed"] == "Permission denied: nothing in it was read"


def test_a_flavor_of_torchtitan_counts_as_the_model_that_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n')
    (surveyed,) = survey(tmp_path).files
    assert (surveyed.model, surveyed.outcome) == ("llama", "read")
    assert surveyed.least_bytes == 16 * 8_030_261_248 // 8  # as Meta publishes the model: 8.03 billion parameters
