"""The estimate of what a GPU holds outside torch: its range holds each rank that was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import Fp8Recipe, TrainingState
from memlab.fitting.outside_torch import (
    OutsideTorch,
    estimate_outside_torch,
    outside_torch_of,
    outside_torch_of_every_stage,
)
from memlab.units import GIB, MIB, format_bytes
from tests.unit.measured import measured_rows

FOUR, TWO = measured_rows("h200x4_plain_megatron"), measured_rows("h200x2_plain_megatron")


def of(text: str, model: str | None = None, rank: int = 0, state: TrainingState | None = None) -> OutsideTorch:
    layout = replace(Layout.from_text(text), rank=rank) if text else Layout()
    return estimate_outside_torch(layout, None if model is None else find_architecture(model), state)


@pytest.mark.parametrize("file", [f"h200{number}_plain_fsdp2" for number in ("", "x2", "x4")])
def test_every_rank_of_fsdp2_is_within_its_range(file: str) -> None:
    jobs = measured_rows(file)
    assert len(jobs) >= 37
    for job in jobs:
        for number, rank in enumerate(job["ranks"]):
            tensor, replicas = (job["job"].get(name, 1) for name in ("tensor_model_parallel_size", "dp_replicate_size"))
            sizes = {"tensor_model_parallel_size": tensor, "data_parallel_size": len(job["ranks"]) // tensor}
            layout = Layout(**sizes, sequence_parallel=False, rank=number)
            state = TrainingState(dp_replicate_size=replicas)
            stated = outside_torch_of(Scenario.of(job["job"]["model"], layout=layout, engine="fsdp2", state=state))
            assert stated.total_bytes <= rank["outside_torch"] <= stated.most_bytes, job["name"]


@pytest.mark.parametrize(
    ("layout", "options", "more_groups"),
    [
        ({"data_parallel_size": 4}, {}, 0),
        ({"data_parallel_size": 4}, {"dp_replicate_size": 2}, 1),
        ({"data_parallel_size": 4}, {"dp_replicate_size": 4}, 0),
        ({"data_parallel_size": 4}, {"reshard_after_forward_ranks": 2}, 1),
        ({"data_parallel_size": 4}, {"reshard_after_forward_ranks": 4}, 0),
        ({"data_parallel_size": 4}, {"reshard_after_forward_ranks": 2, "reshard_after_forward": "none"}, 0),
        ({"data_parallel_size": 2, "tensor_model_parallel_size": 2}, {}, 1),
        ({"data_parallel_size": 4, "tensor_model_parallel_size": 2}, {"dp_replicate_size": 2}, 2),
    ],
)
def test_fsdp2_has_a_group_along_each_dimension_of_its_mesh(
    layout: dict[str, int], options: dict[str, Any], more_groups: int
) -> None:
    scenario = Scenario.of(
        "llama-3.1-8b",
        layout=Layout(**layout, sequence_parallel=False),
        engine="fsdp2",
        state=TrainingState(**options),
    )
    stated = outside_torch_of(scenario)
    assert stated.nccl_bytes == (770 + 484 * more_groups) * MIB
    assert (stated.uncertain_bytes > 160 * MIB) == (more_groups > 0), "only one group was measured"


def test_one_rank_is_what_an_h200_held() -> None:
    one = estimate_outside_torch(Layout())
    assert one.total_bytes <= 2489 * MIB <= 2508 * MIB <= one.most_bytes, "steps of one rank held 2,489 to 2,508 MiB"
    assert f"at most {format_bytes(one.most_bytes)} in all" in str(one)
    assert "NVLink multicast, a network and an inference engine are not in it" in str(one), (
        "at most of what was measured"
    )


def test_every_measured_rank_is_within_a_range_of_less_than_a_gibibyte() -> None:
    jobs = [row for row in (*FOUR, *TWO) if "outside_torch_bytes" in row["ranks"][0]["steps"][-1]]
    assert len(jobs) >= 56 + 9
    assert any(job["state"].get("attention_backend") == "flash" for job in jobs)
    for job in jobs:
        state = TrainingState(
            attention_backend=job["state"].get("attention_backend", "auto"),
            calculate_per_token_loss=job["config"].get("calculate_per_token_loss", False),
        )
        for rank in job["ranks"]:
            held = rank["steps"][-1]["outside_torch_bytes"]
            stated = of(job["layout"], job["model"], rank["rank"], state)
            assert stated.total_bytes <= held <= stated.most_bytes, (job["name"], rank["rank"], held / MIB)
            assert stated.most_bytes - stated.total_bytes < 0.25 * GIB


@pytest.mark.parametrize(
    ("text", "model", "groups"),
    [
        # all ranks, gradients' norm, gradients, tensor; then the auxiliary loss, counts, divided experts
        ("TP2", "phi-4", 770 + 484 + 388 + 484),
        ("TP2", "qwen3-30b-a3b", 770 + 484 + 388 + 484 + 3 * 484),
        ("EP2 DP2", "qwen3-30b-a3b", 770 + 2 * 484 + 388 + 484 + 388 + 196 + 384 + 62),
        ("CP2", "phi-4", 770 + 2 * 484 + 388 + 196 + 384 + 62),
        ("CP4", "phi-4", 770 + 2 * 484 + 388 + 2 * (196 + 384) + 62),
    ],
)
def test_nccl_takes_the_sum_of_the_groups_that_a_step_uses(text: str, model: str, groups: int) -> None:
    assert of(text, model).nccl_bytes == groups * MIB


def test_only_the_last_stage_has_the_group_of_the_loss_and_the_kernels_of_the_output_layer() -> None:
    first, middle, last = (of("PP4", "phi-4", rank) for rank in (0, 1, 3))
    assert middle.nccl_bytes - first.nccl_bytes == 384 * MIB, "it has two neighbours"
    assert last.nccl_bytes - first.nccl_bytes == 388 * MIB
    assert last.context_and_libraries_bytes - first.context_and_libraries_bytes == 130 * MIB
    job = Scenario.of("phi-4", layout=Layout(pipeline_model_parallel_size=4))
    assert outside_torch_of_every_stage(job) == last
    tied, apart = (of("PP2", model) for model in ("qwen3-4b", "qwen3-8b"))
    assert tied.nccl_bytes - apart.nccl_bytes == 484 * MIB


def test_sinks_and_no_loss_of_the_router_are_what_two_h200s_held() -> None:
    """The first job of its process: gpt-oss-20b with an exchange of heads had no group of its router's loss."""
    measured = measured_rows("h200x2_plain_megatron_heads")
    (row,) = (row for row in measured if row["model"] == "gpt-oss-20b" and row["ranks"][0]["first_uses"])
    model, state = find_architecture("gpt-oss-20b"), TrainingState.of_options(row["state"])

    def stated(
        loss: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss", coefficient: float = 0.0
    ) -> OutsideTorch:
        balanced = replace(model, moe_aux_loss_coeff=coefficient)
        of_loss = replace(state, moe_router_load_balancing_type=loss)
        return estimate_outside_torch(Layout(context_parallel_size=2), balanced, of_loss)

    assert model.moe_aux_loss_coeff == 0
    for rank in row["ranks"]:
        held = rank["steps"][-1]["outside_torch_bytes"]
        assert stated().total_bytes <= held <= stated().most_bytes
    assert stated("none", 0.01) == stated()
    for loss in ("aux_loss", "seq_aux_loss"):
        assert stated(loss, 0.01).nccl_bytes - stated().nccl_bytes == 484 * MIB


def test_ranks_that_gather_all_tokens_may_have_no_peers() -> None:
    layout, model = Layout.from_text("EP4 DP4"), find_architecture("qwen3-30b-a3b")
    state = TrainingState(moe_token_dispatcher_type="allgather")
    exchanged, gathered = (estimate_outside_torch(layout, model, each) for each in (TrainingState(), state))
    assert exchanged.total_bytes - gathered.total_bytes == (196 + 3 * (64 + 320) + 62) * MIB
    assert 0 <= exchanged.most_bytes - gathered.most_bytes <= 8 * MIB, "no job that gathers was measured"


@pytest.mark.parametrize(("layout", "mebibytes"), [("", 388), ("TP2 EP2 DP2", 484), ("PP2", 388)])
def test_a_bias_of_experts_follows_the_tokens_of_all_ranks_of_a_stage(layout: str, mebibytes: int) -> None:
    """Measured: 2,892 MiB of one rank of Moonlight, in a process whose ranks of Qwen3-30B-A3B held 2,498 MiB."""
    moonlight = find_architecture("moonlight-16b-a3b")
    without = replace(moonlight, moe_router_enable_expert_bias=False)
    both = Layout.from_text(layout) if layout else Layout()
    more = estimate_outside_torch(both, moonlight).nccl_bytes - estimate_outside_torch(both, without).nccl_bytes
    assert more == mebibytes * MIB
    if not layout:
        stated = estimate_outside_torch(both, moonlight)
        assert stated.total_bytes <= 2892 * MIB <= stated.most_bytes


def test_frozen_experts_without_adapters_have_no_group_of_gradients() -> None:
    jobs = [job for job in measured_rows("h200x2_plain_megatron_lora") if job["model"] == "moonlight-16b-a3b"]
    assert len(jobs) == 2
    for job in jobs:
        state = TrainingState.of_options(job["state"])
        scenario = Scenario.of(job["model"], num_layers=2, layout=Layout.from_text(job["layout"]), state=state)
        stated = outside_torch_of(scenario)
        for rank in job["ranks"]:
            assert stated.total_bytes <= rank["steps"][-1]["outside_torch_bytes"] <= stated.most_bytes
    trained = outside_torch_of(Scenario.of("moonlight-16b-a3b", num_layers=2, layout=scenario.layout))
    assert trained.nccl_bytes - stated.nccl_bytes == 388 * MIB


FP8 = measured_rows("h200x2_plain_megatron_fp8")


def test_ranks_in_fp8_are_within_their_range_and_keep_the_group_of_a_job_before_them() -> None:
    """Three jobs followed two with delayed scaling in the same processes, whose group stayed."""
    after_delayed = 0
    for job in FP8:
        state = TrainingState.of_options(job["state"])
        for rank in job["ranks"]:
            layout = replace(Layout.from_text(job["layout"]), rank=rank["rank"])
            stated = estimate_outside_torch(layout, find_architecture(job["model"]), state)
            held = rank["steps"][-1]["outside_torch_bytes"]
            if not stated.total_bytes <= held <= stated.most_bytes:
                assert not rank["first_uses"], (job["name"], "was the first of its process")
                assert held == FP8[0]["ranks"][0]["steps"][-1]["outside_torch_bytes"], job["name"]
                after_delayed += 1
    assert after_delayed == 3 * 2


def test_delayed_scaling_was_measured_to_reduce_over_all_ranks_of_a_stage() -> None:
    used = {(use["group"], use["collective"]) for rank in FP8[0]["ranks"] for use in rank["first_uses"]}
    assert ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "allreduce") in used
    for job in FP8[1:]:  # blockwise, tensorwise and tensorwise: the first jobs of later processes
        groups = {use["group"] for rank in job["ranks"] for use in rank["first_uses"] or ()}
        assert "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP" not in groups, job["name"]


@pytest.mark.parametrize(
    ("layout", "recipe", "model", "mebibytes"),
    [
        ("TP2", "delayed", "llama-3.1-8b", 484),
        ("TP2", "tensorwise", "llama-3.1-8b", 0),
        ("TP2", "blockwise", "llama-3.1-8b", 0),
        ("DP2", "delayed", "llama-3.1-8b", 484),
        ("CP2", "delayed", "llama-3.1-8b", 484),
        ("PP2", "delayed", "llama-3.1-8b", 0),  # each stage reduces by itself, and has one rank
        ("EP2 DP2", "delayed", "qwen3-30b-a3b", 484),
        ("TP2 EP2 DP2", "delayed", "moonlight-16b-a3b", 0),  # the group of its experts' bias is the same
        ("", "delayed", "llama-3.1-8b", 0),
    ],
)
def test_fp8_adds_a_group_if_delayed_scaling_has_several_ranks(
    layout: str, recipe: Fp8Recipe, model: str, mebibytes: int
) -> None:
    parts = Layout.from_text(layout) if layout else Layout()
    states = TrainingState(), TrainingState(fp8_format="hybrid", fp8_recipe=recipe)
    bf16, fp8 = (estimate_outside_torch(parts, find_architecture(model), state) for state in states)
    assert fp8.nccl_bytes - bf16.nccl_bytes == mebibytes * MIB


@pytest.mark.parametrize(("model", "more"), [("qwen3-8b", (484, 0, 484)), ("qwen3-4b", (0, 0, 0))])
def test_the_last_stage_has_a_copy_of_the_embedding_for_multi_token_prediction(
    model: str, more: tuple[int, ...]
) -> None:
    for rank, mebibytes in enumerate(more):
        layout = Layout(pipeline_model_parallel_size=3, rank=rank)
        without, with_them = (
            estimate_outside_torch(layout, find_architecture(model), TrainingState(mtp_num_layers=number))
            for number in (None, 1)
        )
        assert with_them.nccl_bytes - without.nccl_bytes == mebibytes * MIB


def test_an_all_to_all_of_eight_ranks_is_what_h100s_took_for_it() -> None:
    """4.34 - 1.06 GB outside torch, before and after the first one of a process (NVIDIA/nccl#1685)."""
    counts, gradients, once = 484, 388, 770 - 484
    difference = of("EP8 DP8", "qwen3-30b-a3b").nccl_bytes - of("DP8", "qwen3-30b-a3b").nccl_bytes
    assert difference + (once - counts - gradients) * MIB == pytest.approx(3.28e9, rel=0.05)


def test_a_larger_group_beyond_a_node_takes_no_more_and_has_a_wider_range() -> None:
    eight, many = (
        estimate_outside_torch(Layout(data_parallel_size=64, expert_model_parallel_size=size)) for size in (8, 32)
    )
    assert eight == many
    assert eight.uncertain_bytes - of("DP4").uncertain_bytes > 0.5 * GIB and eight.uncertain_bytes < GIB
