"""What is wrong with a job's file itself is the first line of every answer, not a warning below it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memlab.cli import main, one_line
from memlab.jobs.frameworks.registry import LOOKED_FOR
from memlab.jobs.job import Job
from memlab.views.text.job import job_table
from tests.unit.job_files import read_job

SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B"
CAUSES = {
    "cut by an empty line": (
        (
            "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \\\n\n"
            "  actor_rollout_ref.actor.megatron.param_offload=True trainer.n_gpus_per_node=8\n"
        ),
        "line 3: 'actor_rollout_ref.actor.megatron.param_offload=True' is an argument without a command, since line 2 is empty",
    ),
    "cut by a comment": (
        f"{SWIFT} \\\n  # --packing true \\\n  --max_length 8192\n",
        "line 3: '--max_length' is an argument without a command, since line 2 is a comment, which ends the command",
    ),
    "no command at the start": (
        f"--max_length 8192\n{SWIFT}\n",
        "line 1: '--max_length' is an argument without a command, so the job runs without the 2 words from here on: write",
    ),
    "a missing sourced file": (
        (
            "source /root/models/m.sh\nray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 "
            "${MODEL_ARGS[@]} --hf-checkpoint /root/My-Model --tensor-model-parallel-size 2 --max-tokens-per-gpu 8192\n"
        ),
        "line 1: the sourced file m.sh does not exist",
    ),
    "a placeholder": (
        f"export PYTHONPATH=$PYTHONPATH:<path_of_megatron>\n{SWIFT} --max_length 8192\n",
        "line 1: bash ends the script here with a syntax error, since '>' has no file behind it, as in a placeholder",
    ),
    "values that are not given": (
        f"TP=$1; LEN=$2\n{SWIFT} --sequence_parallel true --tensor_model_parallel_size $TP --max_length $LEN\n",
        (
            "line 1: the script is started with values that memlab does not know ($1 $2): give them in order behind the "
            "file, as in run.sh -- VALUE1 VALUE2"
        ),
    ),
}


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ("tensor_model_parallel_size=16", ("tensor_model", "context", "pipeline_model")),
        ("num_layers=5 pipeline_model_parallel_size=2", ("pipeline_model", "num_layers_in_first_pipeline_stage")),
        ("context_parallel_size=2 seq_length=1022", ("context_parallel_size",)),
        ("global_batch_size=3", ("global_batch_size", "micro_batch_size")),
        ("recompute_num_layers=1 recompute_granularity=selective", ("recompute_num_layers", "recompute_granularity")),
        ("overlap_param_gather=true", ("use_distributed_optimizer", "overlap_param_gather")),
    ],
)
def test_a_refusal_has_the_fields_that_decide_as_values(override: str, fields: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever its text says, and the report names the framework's keys for them."""
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --micro-batch-size 1 --bf16 --global-batch-size 16"
    )
    job = Job.read(path, overrides=override.split(), architecture="phi-4")
    assert job.cannot_start is not None
    assert all(any(found.startswith(field) for found in job.refused_fields) for field in fields)
    (hint,) = [line for line in job_table(job).splitlines() if line.startswith("to try another value")]
    assert fields[0] in hint


@pytest.mark.parametrize(("text", "cause"), CAUSES.values(), ids=CAUSES)
def test_a_cause_is_the_first_line(text: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    main(["job", str(path)])
    assert capsys.readouterr().out.startswith(f"run.sh, {cause}")
    main(["job", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["causes"][0].startswith(cause)
    job = Job.read(path)
    if job.scenario is None:
        with pytest.raises(ValueError) as error:
            job.required()
        assert str(error.value).startswith(f"run.sh: {cause}")


def test_a_cause_stands_before_a_value_that_it_spoils(tmp_path: Path) -> None:
    (path := tmp_path / "run.sh").write_text(
        "megatron sft --model Qwen/Qwen3-8B \\ \n  --tensor_model_parallel_size 4\n"
    )
    with pytest.raises(ValueError, match=r"^line 2: .* correct line 1; line 1: model is "):
        Job.read(path)


def test_values_behind_two_dashes_are_the_script_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(CAUSES["values that are not given"][0])
    assert main(["job", str(path), "--json", "--", "2", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["causes"]
    assert (found["scenario"]["layout"]["tensor_model_parallel_size"], found["scenario"]["seq_length"]) == (2, 8192)
    assert Job.read(path, arguments=["4", "1024"]).required()[0].layout.tensor_model_parallel_size == 4
    assert main(["predict", "--job", str(path), "--num-layers", "1", "--json", "--", "2", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["seq_length"] == 64


def test_an_unused_value_is_no_cause(tmp_path: Path) -> None:
    assert not read_job(f"LOG=$1\n{SWIFT} --max_length ${{2:-4096}}\n", tmp_path).causes


def test_a_file_of_no_known_format_is_told_all_formats(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    for text in ("echo hello\n", "source /root/a_long_name_of_a_file_that_is_not_there.sh\nrun $1 --x\n"):
        path.write_text(text)
        with pytest.raises(ValueError) as error:
            Job.read(path)
        assert LOOKED_FOR in one_line(str(error.value))
    long = " ".join(["word"] * 400)
    first, last = one_line(long).split(" ... ")
    assert set(f"{first} {last}".split()) == {"word"}, "no word is cut"


@pytest.mark.parametrize("nnodes", ["$NNODES", "'${oc.env:NNODES}'", "$(nproc)"])
def test_a_guessed_size_refuses_no_job(nnodes: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=16 "
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 data.max_prompt_length=1024 "
        f"data.max_response_length=7168 trainer.n_gpus_per_node=8 trainer.nnodes={nnodes}\n"
    )
    job = Job.read(tmp_path / "run.sh", version="0.9.1")
    assert job.cannot_start is None
    assert (job.not_supported or "").startswith("trainer.nnodes is known only when the job runs, and with the default")
    assert (
        Job.read(tmp_path / "run.sh", version="0.9.1", overrides=["trainer.nnodes=4"]).required()[0].layout.world_size
        == 32
    )


def test_the_sizes_of_a_model_are_no_job(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has the sizes of a model \('qwen3'\).*memlab predict .*config.json"):
        read_job('{"model_type": "qwen3", "hidden_size": 4096}', tmp_path, "config.json")
