"""torchtitan's TOML files: what memlab reads of them, and what a rank keeps at least of a model that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.jobs.job import Job

CONFIG = """
# a job
[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"

[training]
local_batch_size = 1
seq_len = 8192
{training}

[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "selective"
"""
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
LLAMA = 32 * LAYER + 2 * 128256 * 4096 + 4096


def read(folder: Path, training: str = "", *, options: dict[str, Any] | None = None, **changes: str) -> Job:
    text = CONFIG.format(training=training)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "job.toml").write_text(text)
    return Job.read(folder / "job.toml", **(options or {}))


@pytest.mark.parametrize(
    ("training", "at_least"),
    [
        ("", (4, 4, 8)),
        ('dtype = "bfloat16"', (2, 2, 4)),
        ("enable_cpu_offload = true", ()),
    ],
)
def test_a_rank_keeps_its_share_of_the_model(training: str, at_least: tuple[int, ...], tmp_path: Path) -> None:
    job = read(tmp_path, training)
    assert tuple(job.at_least.values()) == tuple(size * LLAMA // 8 for size in at_least)
    assert job.framework == "torchtitan" and job.scenario is None
    assert job.lacks == ("torchtitan's own llama3, whose layers keep other tensors than transformers'",)
    assert all(one.effect != "unknown" for one in job.not_modelled)


def test_keys_have_their_lines_and_defaults(tmp_path: Path) -> None:
    taken = {one.key: (one.memlab_value, one.place) for one in read(tmp_path).taken}
    assert taken["training.seq_len"] == (8192, "line 12")
    assert taken["parallelism.tensor_parallel_degree"] == (2, "line 17")
    assert taken["model.flavor"] == ("meta-llama/Llama-3.1-8B", "line 5")
    assert taken["training.mixed_precision_param"] == ("bf16", "default")


def test_the_number_of_ranks_is_the_launcher_s_unless_the_file_has_it(tmp_path: Path) -> None:
    job = read(tmp_path, data_parallel_shard_degree="unused_degree")
    assert job.guesses == ("the number of ranks",) and sum(job.at_least.values()) == 16 * LLAMA // 8
    assert [one.key for one in job.not_modelled if one.effect == "unknown"] == ["parallelism.unused_degree"]


def test_gradients_of_one_parameter_at_a_time_are_not_kept(tmp_path: Path) -> None:
    job = read(tmp_path, AdamW='AdamW"\nearly_step_in_backward = true\n#"')
    assert job.at_least == {"parameters": 4 * LLAMA // 8, "optimizer state": 8 * LLAMA // 8}
    again = read(tmp_path, options={"overrides": ["optimizer.early_step_in_backward=true"]})
    assert again.at_least == job.at_least


def test_another_model_in_its_place_is_not_predicted_either(tmp_path: Path) -> None:
    job = read(tmp_path, "global_batch_size = 8", options={"architecture": "llama-3.1-8b"})
    assert job.scenario is None and job.cannot_start is None
    assert "torchtitan's own llama-3.1-8b" in str(job.not_supported) and sum(job.at_least.values()) == 16 * LLAMA // 8


def test_a_toml_file_is_of_no_other_framework(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a job of torchtitan only: leave --format nemo-rl out"):
        read(tmp_path, options={"format_name": "nemo-rl"})


def test_another_model_is_read_without_a_bound(tmp_path: Path) -> None:
    assert read(tmp_path, llama3="flux").at_least == {}


def test_a_file_that_is_no_toml_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model\n")
    with pytest.raises(ValueError, match=r"^job.toml is not valid TOML \(.*\): correct it$"):
        Job.read(tmp_path / "job.toml")
