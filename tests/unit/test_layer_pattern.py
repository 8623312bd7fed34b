"""Which layers have experts: read as Megatron reads it, in job files of every kind and in a config.json."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.config.architectures import ARCHITECTURES, find_architecture
from memlab.config.scenario import Scenario
from memlab.jobs.job import Job
from memlab.jobs.layer_pattern import layer_pattern
from memlab.jobs.writing import written
from tests.unit.test_architectures import qwen_config
from tests.unit.test_job_round_trip import LAUNCHERS, OF_MEGATRON, read_lines

_SIZES = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 151936 --seq-length 4096 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 "
)
_EXPERTS = "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "


def job_of(pattern: str, folder: Path, experts: str = _EXPERTS) -> Job:
    path = folder / "run.sh"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {_SIZES}{experts}--moe-layer-freq {pattern}\n")
    return Job.read(path)


def test_random_expressions_are_what_python_makes_of_them() -> None:
    """Megatron hands the text to Python's ``eval``; here only the test does."""
    dice = random.Random(7)

    def expression(depth: int) -> str:
        if depth == 0:
            return f"[{','.join(dice.choices('01', k=dice.randint(1, 3)))}]"
        left, right = expression(depth - 1), expression(depth - 1)
        kind = dice.choice(("sum", "left", "right", "brackets"))
        return {
            "sum": f"{left}+{right}",
            "left": f"{dice.randint(1, 3)}*{left}" if "+" not in left else f"({left})*2",
            "right": f"({right})*{dice.randint(1, 2)}*1",
            "brackets": f"(({left}))",
        }[kind]

    texts = [expression(dice.randint(0, 4)) for _ in range(300)]
    assert len(set(texts)) > 200
    for text in texts:
        assert layer_pattern(text) == tuple(eval(text)), text  # noqa: S307  # texts of this test


@pytest.mark.parametrize(
    "value",
    ["'([1]*48)'", '"[1]*48"', "[1]*24+[1]*24", "48*[1]", f"'[{','.join('1' * 48)}]'", "'(([1,1])*2+[1]*4)*6'", "1"],
)
def test_experts_in_every_layer_are_the_plain_model(value: str, tmp_path: Path) -> None:
    job = job_of(value, tmp_path)
    assert job.required()[0].architecture.name == "qwen3-30b-a3b"
    assert "moe_layer_freq" not in {one.key for one in job.not_modelled}


DENSE_FIRST, EVERY_SECOND = (0, *[1] * 47), (1, 0) * 24


@pytest.mark.parametrize(
    ("value", "pattern"),
    [("'[0]*1+[1]*47'", DENSE_FIRST), ("'([0]+[1]*47)'", DENSE_FIRST), ("'[1,0]*24'", EVERY_SECOND), ("2", EVERY_SECOND),
     ("'[0]*48'", (0,) * 48)],
)  # fmt: skip
def test_dense_layers_among_them_are_taken(value: str, pattern: tuple[int, ...], tmp_path: Path) -> None:
    scenario, _ = job_of(value, tmp_path).required()
    assert (scenario.architecture.name, scenario.architecture.moe_layer_freq) == ("qwen3-30b-a3b", pattern)
    assert [scenario.architecture.parts_of(layer)[-1].routes for layer in range(48)] == [bool(one) for one in pattern]
    plain = Job.read(tmp_path / "run.sh", overrides=["moe_layer_freq=1"])
    assert plain.required()[0].architecture == replace(scenario.architecture, moe_layer_freq=None)


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_every_framework_reads_back_the_pattern_that_is_written(name: str, tmp_path: Path) -> None:
    scenario, settings = job_of("'[0]+[1]*47'", tmp_path).required()
    lines = written(name, scenario, settings).lines
    again = read_lines(name, list(lines), 8, tmp_path / f"again.{'sh' if name in LAUNCHERS else 'yaml'}")
    assert again.required()[0].architecture.moe_layer_freq == DENSE_FIRST, lines


def test_a_model_that_is_named_gets_them_too(tmp_path: Path) -> None:
    path, actor = tmp_path / "run.sh", "actor_rollout_ref.actor"
    path.write_text(
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer trainer.n_gpus_per_node=8 "
        f"actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B data.train_batch_size=8 {actor}.ppo_mini_batch_size=8 "
        f"{actor}.megatron.override_transformer_config.moe_layer_freq='[0]+[1]*47'\n"
    )
    assert Job.read(path, version="0.9.1").required()[0].architecture.moe_layer_freq == DENSE_FIRST


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"decoder_sparse_step": 2}, (0, 1, 0, 1)),
        ({"mlp_only_layers": [0, 3]}, (0, 1, 1, 0)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 0, 0, 1)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, None),
    ],
)
def test_a_config_json_says_it_as_transformers_reads_it(
    fields: dict[str, Any], pattern: tuple[int, ...] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen_config() | {"num_hidden_layers": 4} | fields))
    assert find_architecture(tmp_path).moe_layer_freq == pattern


def test_a_pattern_is_refused_where_it_fits_no_model() -> None:
    tiny = ARCHITECTURES["qwen3-moe-tiny"]
    for pattern in ((0, 1), (0, 1, 1, 2)):
        with pytest.raises(ValueError, match=r"moe_layer_freq is .*, must have 1 or 0 for each of its 4 layers"):
            replace(tiny, moe_layer_freq=pattern)
    with pytest.raises(ValueError, match="must be left out, since no layer has experts"):
        replace(ARCHITECTURES["phi-4-tiny"], moe_layer_freq=(0, 1, 1, 1))
    with pytest.raises(ValueError, match="num_layers is 5, must be at most 4, since moe_layer_freq of qwen3-moe-tiny"):
        Scenario.of(replace(tiny, moe_layer_freq=(0, 1, 1, 1)), num_layers=5)


def test_a_pattern_of_another_length_cannot_start(tmp_path: Path) -> None:
    refusal = "a list for 47 layers, must be as long as the model, 48 layers, by a rule of Megatron-Core"
    assert refusal in str(job_of("'[1]*47'", tmp_path).cannot_start)


def test_a_dense_model_has_no_use_for_a_pattern(tmp_path: Path) -> None:
    for value in ("2", "'[0]*48'", "'[1]*3'"):
        job = job_of(value, tmp_path, experts="")
        assert job.required()[0].architecture.family == "phi3"
        assert not {"moe_layer_freq"} & {one.key for one in job.not_modelled}


@pytest.mark.parametrize(
    "value",
    [
        "'[1]*48;x'", "'[1] * 48'", "'[1]**2'", "'[[1]]*48'", "'[1]*[1]'", "'[1]+1'", "'[1,2]*24'", "'[1]*'", "'[]('",
        "'(1,)*48+[1]'", "x", "0", "-1", "1.5", "'[1]*99999999999'", "'[1]*9999*9999'", "'[-1]*48'", "'[0x1]*48'",
        f"'{'(' * 300}[1]{')' * 300}'", f"'[1]{'+[1]*9999' * 2}'", f"'{'1+' * 15000}[1]'",
    ],
)  # fmt: skip
def test_what_megatron_would_not_read_is_refused_in_one_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"moe_layer_freq is .*must be .*: correct it$") as refusal:
        job_of(value, tmp_path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("value", "pattern"), [(None, 1), (1, 1), ("3", 3), ([1, 0], (1, 0)), ("[0]*1+[1]*2", (0, 1, 1)), ([], ())]
)
def test_every_spelling_has_one_meaning(value: Any, pattern: Any) -> None:
    assert layer_pattern(value) == pattern
