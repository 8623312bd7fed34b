"""Layouts of ranks: what they refuse, and what a job's ranks make of them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from memlab.analysis.diagnosis import worst
from memlab.cli import build_parser
from memlab.commands.shared.asked_step import asked_step
from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError
from memlab.lab.lab import Lab
from memlab.views.text.ranks import ranks_table
from tests.unit.builders import record_of

QWEN, PHI = find_architecture("qwen3-30b-a3b"), find_architecture("phi-4")


def test_a_rank_alone_is_the_default() -> None:
    assert (Layout().world_size, Layout().sequence_parallel, str(Layout())) == (1, True, "one rank")
    assert Scenario.of(architecture=QWEN).layout == Layout()


def test_the_world_is_tensor_times_pipeline_times_data() -> None:
    layout = Layout(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=2,
        data_parallel_size=6,
    )
    assert (layout.world_size, layout.sequence_parallel, str(layout)) == (48, True, "TP2 PP4 EP2 DP6")
    layout = replace(layout, context_parallel_size=2)
    assert (layout.world_size, str(layout)) == (96, "TP2 CP2 PP4 EP2 DP6")


def test_ranks_of_a_kind_are_looked_at_once() -> None:
    layout = Layout(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
    assert layout.distinct_ranks(by_expert=False) == (0, 2, 4, 6)
    experts = Layout(tensor_model_parallel_size=2, expert_model_parallel_size=4, data_parallel_size=8)
    assert experts.distinct_ranks(by_expert=False) == (0,)
    assert experts.distinct_ranks(by_expert=True) == (0, 2, 4, 6)
    fewer = replace(experts, expert_tensor_parallel_size=1)
    assert fewer.distinct_ranks(by_expert=True) == (0, 1, 2, 3)
    assert str(fewer) == "TP2 EP4 ETP1 DP8"
    assert str(replace(experts, expert_tensor_parallel_size=2)) == str(experts) == "TP2 EP4 DP8"
    both = replace(experts, context_parallel_size=2, data_parallel_size=2)
    assert both.distinct_ranks(by_expert=True) == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0, must be a whole number of at least 1"),
        (
            {"expert_model_parallel_size": 4, "data_parallel_size": 6},
            "must divide the 6 ranks of a stage: choose expert_model_parallel_size from 1, 2, 3, 6",
        ),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            "must divide the 2 ranks of a stage: choose expert_model_parallel_size 1, or use more ranks",
        ),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            "without expert_tensor_parallel_size, Megatron-Core takes as many as tensor parallel ranks",
        ),
        (
            {"expert_tensor_parallel_size": 4, "tensor_model_parallel_size": 2, "data_parallel_size": 3},
            "1 x expert_tensor_parallel_size 4 is 4, must divide the 6 ranks .* change expert_tensor_parallel_size",
        ),
    ],
)
def test_sizes_that_make_no_job_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tensor_model_parallel_size": 3}, "must divide the 32 attention heads .* choose from 1, 2, 4, 8, 16, 32"),
        (
            {"context_parallel_size": 3},
            r"4096 tokens of a sequence into 6 chunks, two per rank: choose from 1, 2, 4, 8,",
        ),
        ({"pipeline_model_parallel_size": 5}, r"must divide the 48 layers of qwen3-30b-a3b: choose from 1, 2, 3, 4, 6"),
        ({"expert_tensor_parallel_size": 5, "data_parallel_size": 5}, r"must divide the 768 columns of an expert"),
        ({"expert_model_parallel_size": 3, "data_parallel_size": 3}, r"must divide the 128 experts"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_choices(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Scenario.of(architecture=QWEN, layout=Layout(**sizes))


@pytest.mark.parametrize(("size", "seq_length"), [(5, 64), (4, 64), (3, 64), (2, 65)])
def test_every_size_of_tensor_parallelism_that_a_refusal_names_is_allowed(size: int, seq_length: int) -> None:
    """Its 10 key-value heads allow 5, and its vocabulary does not; its vocabulary allows 4, and its heads do not."""
    with pytest.raises(ValueError, match=r"choose from 1") as refused:
        Layout(tensor_model_parallel_size=size).check(PHI, 40, seq_length, 1)
    for choice in str(refused.value).partition("choose from ")[2].split(", "):
        Layout(tensor_model_parallel_size=int(choice)).check(PHI, 40, seq_length, 1)


@pytest.mark.parametrize(
    ("heads", "groups", "channels"),
    [(32, 4, 128), (40, 10, 128), (24, 8, 128), (5, 5, 32), (4, 2, 32), (12, 1, 64), (48, 6, 80), (64, 4, 128)],
)
def test_the_tensor_parallel_sizes_are_those_that_megatron_builds(heads: int, groups: int, channels: int) -> None:
    """Megatron's own config and its rule for the rows of a column-parallel linear are asked for each size."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import divide

    attention = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": channels}
    model = replace(QWEN, **attention)
    for size in range(1, heads + 2):
        try:
            TransformerConfig(num_layers=1, hidden_size=2048, tensor_model_parallel_size=size, **attention)
            divide((heads + 2 * groups) * channels, size)
            builds = True
        except (ValueError, AssertionError):
            builds = False
        layout, split = (
            Layout(tensor_model_parallel_size=size),
            replace(model, vocab_size=size, moe_ffn_hidden_size=size),
        )
        refusal = pytest.raises(ValueError, match="by a rule of Megatron-Core: choose from 1")
        with nullcontext() if builds else refusal:
            layout.check(split, 1, size, 1)


def test_a_rank_has_its_part_of_the_weights_where_more_ranks_share_them_than_there_are_query_groups() -> None:
    """Qwen3-30B-A3B with 2 layers on 8 tensor parallel ranks: counted by hand from the matrices that each rank has."""
    vocabulary, qkv, projection = 2 * 151936 * 2048 // 8, (32 + 2 * 4) * 128 * 2048 // 8, 32 * 128 * 2048 // 8
    norms, router, experts = 2 * 2048 + 2 * 128, 128 * 2048, 128 // 8 * 3 * 2048 * 768
    layout = Layout(tensor_model_parallel_size=8, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=64, layout=layout, backend="simulated") as lab:
        record = lab.step()
    count = vocabulary + 2048 + 2 * (qkv + projection + norms + router + experts)
    assert record.peak_by_category["parameters"] == 2 * count == 468_079_616


def test_a_dense_model_has_an_mlp_to_split_and_no_experts_to_spread() -> None:
    with pytest.raises(ValueError, match="must be 1, since phi-4 is dense: choose 1"):
        Scenario.of(architecture=PHI, layout=Layout(expert_model_parallel_size=2, data_parallel_size=2))
    uneven = replace(PHI, ffn_hidden_size=17921)
    with pytest.raises(ValueError, match="must divide the 17921 columns of the MLP of phi-4: choose from 1"):
        Scenario.of(architecture=uneven, layout=Layout(tensor_model_parallel_size=2))
    with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2, and phi-4 is dense: leave it out"):
        Scenario.of(architecture=PHI, layout=Layout(expert_tensor_parallel_size=2, data_parallel_size=2))


def test_a_scenario_keeps_its_layout_in_json() -> None:
    scenario = Scenario.of(architecture=QWEN, layout=Layout(tensor_model_parallel_size=2))
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert str(scenario).endswith("bf16, TP2")


def test_ranks_beyond_one_copy_are_data_parallel() -> None:
    def layout(*flags: str) -> Layout:
        arguments = build_parser().parse_args(["measure", "qwen3-30b-a3b", *flags])
        return asked_step(arguments, rank=5, measured_ranks=8).scenario.layout

    found = layout("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "4")
    assert (found.data_parallel_size, found.world_size, found.rank) == (4, 8, 5)
    with pytest.raises(ValueError, match=r"the number of ranks is 8, must be a multiple of 3"):
        layout("--tensor-model-parallel-size", "3")


def test_the_first_and_the_last_stage_may_have_other_numbers_of_layers() -> None:
    def layers(num_layers: int, **sizes: int) -> list[int]:
        layout = Layout(**sizes)
        layout.check(QWEN, num_layers, 4096, 1)
        return [layout.layers_of_stage(stage, num_layers) for stage in range(layout.pipeline_model_parallel_size)]

    assert layers(12, pipeline_model_parallel_size=4) == [3, 3, 3, 3]
    assert layers(12, pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=3) == [3, 3, 3, 3]
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4}
    assert layers(12, pipeline_model_parallel_size=4, **ends) == [2, 3, 3, 4]
    assert layers(6, pipeline_model_parallel_size=2, **ends) == [2, 4]
    with pytest.raises(ValueError, match=r"leave 1 of 7 layers to 0 stages"):
        layers(7, pipeline_model_parallel_size=2, **ends)
    both = r"stage \+ num_layers_in_last_pipeline_stage is 6, which leaves 5 of 11 layers to the other 2 stages, must "
    rule = f"{both}leave the same number to each of them: choose a sum of, for example, 5 or 7$"
    with pytest.raises(ValueError, match=rule):
        layers(11, pipeline_model_parallel_size=4, **ends)
    for sums in (5, 7):
        layers(11, pipeline_model_parallel_size=4, **ends | {"num_layers_in_first_pipeline_stage": sums - 4})
    with pytest.raises(
        ValueError,
        match=r"^num_layers_in_first_pipeline_stage is 1, .* choose, for example, 2, or give the last stage .*",
    ):
        layers(8, pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=1)
    assert layers(8, pipeline_model_parallel_size=4, **dict(zip(ends, (1, 5), strict=True))) == [1, 1, 1, 5]
    with pytest.raises(ValueError, match=r"leave 0 of 6 layers to 1 stages"):
        layers(6, pipeline_model_parallel_size=3, **ends)


def test_the_table_marks_the_rank_with_the_highest_peak() -> None:
    scenarios = [Scenario.of(architecture=QWEN, layout=Layout(data_parallel_size=3, rank=rank)) for rank in range(3)]
    records = [
        replace(record_of(None, peak_allocated_bytes=size), scenario=scenario)
        for size, scenario in zip((3 * 2**30, 5 * 2**30, 4 * 2**30), scenarios, strict=True)
    ]
    assert worst(records) is records[1]
    marked = [line for line in ranks_table(records).splitlines() if "<- worst" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == "1"


def test_a_layout_of_more_ranks_than_were_started_is_refused() -> None:
    command = "measure qwen3-moe-tiny --num-layers 2 --seq-length 64 --tensor-model-parallel-size 2 --backend cpu"
    done = subprocess.run(
        [sys.executable, "-m", "memlab", *command.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("the number of ranks is 1, must be a multiple of 2")


def test_a_rank_that_fails_leaves_at_once_with_its_text() -> None:
    """Its lab's farewell would wait for the other ranks: here it sleeps for longer than the test does.

    The backend is replaced as well, because a real one imports torch and Megatron.
    """
    program = """
import sys, time, types
class Lab:
    def __init__(self, *_, **__): pass
    def __enter__(self): return self
    def __exit__(self, *_): time.sleep(600)
    def step(self, _): raise RuntimeError("planted on this rank")
sys.modules["memlab.lab.lab"] = types.SimpleNamespace(Lab=Lab)
import memlab.backends
memlab.backends.find_backend = lambda _: types.SimpleNamespace(check=lambda _: None)
from memlab.cli import main
sys.exit(main("measure qwen3-moe-tiny --seq-length 64 --tensor-model-parallel-size 2 --backend simulated".split()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "rank 1 failed:" in done.stderr
    assert "planted on this rank" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        *("one rank", "TP2 DP4", "CP2 PP4 VP2", "TP2 EP4 ETP1 DP4"),
        "PP2 VP2 pipeline_model_parallel_layout=Et|t|t|tL",
        *("PP2 num_layers_in_first_pipeline_stage=1", "TP2 SP0"),
    ],
)
def test_a_layout_is_read_as_it_is_written(text: str) -> None:
    assert str(Layout.from_text(text)) == text


def test_sizes_of_a_layout_are_read_in_small_letters_too() -> None:
    assert Layout.from_text("tp2 sp0 dp4") == Layout.from_text("TP2 SP0 DP4")


def test_whether_sequences_are_split_tells_layouts_apart_only_where_ranks_could_split_them() -> None:
    whole, split = (Layout(data_parallel_size=2, sequence_parallel=value) for value in (False, True))
    assert str(whole) == str(split) and whole == split and hash(whole) == hash(split)
    assert replace(whole, tensor_model_parallel_size=2) != replace(split, tensor_model_parallel_size=2)
    assert whole != replace(whole, data_parallel_size=4) and whole != replace(whole, rank=1) and whole != str(whole)


@pytest.mark.parametrize("text", ["TP", "2", "XP2", "TP2 TP4", "TP-2", "tp2 TP4", "TP2,DP2", "TP٢"])
def test_words_that_are_no_sizes_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"may have only TP, CP, PP, VP, EP, ETP, DP, each with a number") as refusal:
        Layout.from_text(text)
    for other in ("SP0", "num_layers_in_last_pipeline_stage=VALUE", "pipeline_model_parallel_layout=VALUE"):
        assert other in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("architecture", "sizes", "words"),
    [
        ("gpt-oss-tiny", {"tensor_model_parallel_size": 2}, "expert_tensor_parallel_size is 2, must be 1 for gpt-oss"),
        ("gpt-oss-tiny", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, None),
        (
            "minimax-tiny",
            {"tensor_model_parallel_size": 4},
            "at most 2, the query groups of minimax-tiny, since memlab",
        ),
        ("minimax-tiny", {"tensor_model_parallel_size": 3}, "at most 2"),
        ("minimax-tiny", {"tensor_model_parallel_size": 2}, None),
    ],
)
def test_biases_of_experts_and_a_norm_of_all_heads_limit_tensor_parallelism(
    architecture: str, sizes: dict[str, int], words: str | None
) -> None:
    with nullcontext() if words is None else pytest.raises(RuleError, match=words):
        Scenario.of(architecture, layout=Layout(**sizes))


@pytest.mark.parametrize("ends", [np.array([1, 3]), torch.tensor([1, 3])], ids=["numpy", "torch"])
def test_whole_numbers_of_an_array_make_the_same_layout(ends: np.ndarray | torch.Tensor) -> None:
    """Its fractions stay refused, whole ones too."""
    first, last = ends
    sizes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    found = Layout(pipeline_model_parallel_size=first + last, **sizes)
    assert found == Layout(
        pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3
    )
    assert type(found.num_layers_in_first_pipeline_stage) is type(found.pipeline_model_parallel_size) is int
    for refused in (np.float64(2.0), np.bool_(True), np.int64(0), torch.tensor(2.0), ends):
        with pytest.raises(RuleError, match="must be a whole number of at least 1"):
            Layout(pipeline_model_parallel_size=refused)
