"""Which layers have experts: read as Megatron reads it, and refused where memlab has no such model."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from memlab.jobs.job import Job
from memlab.jobs.layer_pattern import has_dense_layers, layer_pattern

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


@pytest.mark.parametrize("value", ["'[0]*1+[1]*47'", "'([0]+[1]*47)'", "'[0,1]*24'", "2", "'[0]*48'"])
def test_dense_layers_among_them_are_refused_by_name(value: str, tmp_path: Path) -> None:
    job = job_of(value, tmp_path)
    assert job.cannot_start is None
    assert re.search(
        r"^moe_layer_freq is .*\(line 1\), so some layers are dense, .*--set moe_layer_freq=1", str(job.not_supported)
    )
    plain = Job.read(tmp_path / "run.sh", overrides=["moe_layer_freq=1"])
    assert plain.required()[0].architecture.name == "qwen3-30b-a3b"


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
    assert has_dense_layers(value) == (0 in pattern if isinstance(pattern, tuple) else pattern != 1)
