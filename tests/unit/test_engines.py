"""The second engine: torch's `fully_shard` over transformers' own models steps under the same lab, meter and transfers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.backends import cpu, find_backend
from memlab.backends.simulated import of_labs_before_0_4, predicting
from memlab.config import without_effect
from memlab.config.architectures import find_architecture
from memlab.config.lora import LoRA
from memlab.config.model_restrictions import check_on_model
from memlab.config.parameters import kept_bytes, parameters_of_rank
from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.hugging_face import check_installed
from memlab.lab.one_process import OneProcess
from memlab.lab.predictions import predict_measured
from memlab.lab.request import PassRequest, StepRequest
from memlab.views.text.record import version_lines
from tests.unit.measured import assert_fsdp2_predicted, measured_by_name
from tests.unit.of_old_torch import MEASURED_WITH_OLD_TORCH

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
rarely = partial(pytest.param, marks=pytest.mark.slow)
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SIZES: dict[str, Any] = {"num_layers": 3, "seq_length": 64, "dtype": "fp32", "engine": "fsdp2"}


@pytest.fixture(scope="class")
def session() -> Iterator[OneProcess]:
    one = OneProcess(Scenario.of("phi-4-tiny", **SIZES), find_backend("cpu"))
    one.build()
    yield one
    one.close()


class TestLive:
    """Steps of one model on the CPU, which is closed before the other tests open theirs."""

    def test_a_step_keeps_the_shards_and_has_the_loss_of_the_unsharded_model(self, session: OneProcess) -> None:
        from memlab.engines.fsdp2.hugging_face import build_model

        record = session.take(StepRequest())
        scenario = session.scenario
        kept = {name: record.peak_by_category[name] for name in ("parameters", "optimizer state")}
        num_parameters = scenario.architecture.with_layers(3).num_parameters
        assert record.status == "ok" and record.is_steady and record.residual_bytes == 0
        assert kept == {"parameters": 4 * num_parameters, "optimizer state": 8 * num_parameters}
        torch.manual_seed(scenario.seed)
        whole = build_model(scenario, torch.float32, attention="sdpa")
        generator = torch.Generator().manual_seed(scenario.seed)
        tokens = torch.randint(scenario.architecture.vocab_size, (1, 64), generator=generator)
        assert record.loss == pytest.approx(whole(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)

    def test_settings_and_options_change_between_two_steps(self, session: OneProcess) -> None:
        plain = session.take(StepRequest())
        recomputed = session.take(StepRequest(settings=FULL))
        assert recomputed.loss == plain.loss and recomputed.recomputed_bytes > 0 == plain.recomputed_bytes
        for state, rebuilt in (
            (TrainingState(reshard_after_forward="none", fsdp2_forward_prefetch_depth=1), "nothing"),
            (TrainingState(fsdp2_backward_prefetch_depth=2), "nothing"),
            (TrainingState(adam_implementation="for_loop"), "optimizer"),
            (TrainingState(adam_implementation="te_fused", master_weights=True), "optimizer"),
            (TrainingState(), "optimizer"),
        ):
            session.set_state(state, MemorySettings())
            assert session.state_changes[-1].rebuilt == rebuilt
            assert session.take(StepRequest()).loss == plain.loss
        assert session.take(StepRequest()).peak_allocated_bytes == plain.peak_allocated_bytes

    def test_a_fused_update_that_fails_leaves_no_main_parameter_that_was_not_written(self, session: OneProcess) -> None:
        session.set_state(TrainingState(adam_implementation="te_fused", master_weights=True), MemorySettings())
        optimizer = session.model.engine.live.optimizer

        def fails() -> None:
            for shard in optimizer._shards:
                optimizer.state[shard]["exp_avg_sq"] = optimizer.state[shard]["master_param"] = torch.zeros(1)
            raise MemoryError

        with patch.object(optimizer._inner, "step", fails), pytest.raises(MemoryError):
            session.run_exclusive(optimizer.step)
        assert not optimizer.state
        session.set_state(TrainingState(), MemorySettings())

    def test_a_forward_only_pass_leaves_what_is_not_resharded_gathered(self, session: OneProcess) -> None:
        before = session.take(StepRequest())
        session.take(PassRequest(scenario=session.scenario))
        architecture = session.scenario.architecture
        outside = architecture.with_layers(1).num_parameters  # and the last layer
        assert session.model.meter.live_bytes() - before.static_bytes == 4 * outside
        assert session.take(StepRequest()).loss == before.loss

    def test_shards_are_transferred_and_audited(self, session: OneProcess) -> None:
        before = session.take(StepRequest())
        parameters = sum(each.numel() for each in session.model.engine.groups().parameters())
        moved = session.transfer("offload", ("parameters", "optimizer state"))
        assert moved.transferred_bytes == {"parameters": 4 * parameters, "optimizer state": 8 * parameters}
        assert not session.run_exclusive(session.model.transfers.audit).complaints
        after = session.take(StepRequest())
        assert (after.loss, after.peak_allocated_bytes) == (before.loss, before.peak_allocated_bytes)
        assert not session.run_exclusive(session.model.transfers.audit).complaints


@pytest.mark.parametrize(
    ("architecture", "options", "state"),
    [
        ("qwen3-dense-tiny", {"dtype": "bf16"}, {"grad_reduce_in_bf16": True, "reshard_after_forward": "none"}),
        # Each with another rule: those with the mark repeat one of the others beside an option that changes no tensor.
        rarely("qwen2.5-tiny", {"dtype": "bf16", "num_microbatches": 2}, {"defer_fsdp_grad_sync": True}),
        ("llama-3-tiny", {"num_layers": 2, "num_microbatches": 2}, {"fsdp_cpu_offload": True}),
        ("llama-3-tiny", {"dtype": "bf16", "num_layers": 2}, {"lora": LoRA(rank=8, dropout=0.1)}),
        (
            "llama-3-tiny",
            {"dtype": "bf16", "num_layers": 1},
            {"adam_implementation": "te_fused", "master_weights": True, "store_param_remainders": True},
        ),
        rarely(
            "qwen3-dense-tiny", {"dtype": "bf16", "num_layers": 2}, {"lora": LoRA(rank=8, fsdp2_library="automodel")}
        ),
        rarely(
            "phi-4-tiny",
            {"dtype": "bf16", "micro_batch_size": 2},
            {"adam_implementation": "fused", "fsdp2_backward_prefetch_depth": 2},
        ),
        ("qwen3-moe-tiny", {"dtype": "bf16"}, {"fp32_sharded_params": True}),
    ],
)
def test_a_prediction_is_the_step_of_the_cpu(architecture: str, options: dict[str, Any], state: dict[str, Any]) -> None:
    scenario = Scenario.of(architecture, **(SIZES | options), state=TrainingState(**state))
    peaks = []
    for backend in (find_backend("cpu"), predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            records = [lab.step(), lab.step(FULL)]
        peaks.append([(each.static_bytes, each.peak_allocated_bytes, each.peak_by_category) for each in records])
    assert peaks[0] == peaks[1]


def test_each_of_eight_ranks_keeps_an_eighth() -> None:
    scenario = Scenario.of("phi-4", num_layers=2, seq_length=64, engine="fsdp2", layout=Layout(data_parallel_size=8))
    with Lab(scenario, backend="simulated") as lab:
        record = lab.step()
    share, workspaces = scenario.architecture.with_layers(2).num_parameters / 8, 2 * 32 * 2**20
    assert record.static_bytes == pytest.approx(6 * share + workspaces, rel=0.01)
    assert version_lines(record)[0] == "versions: torch 2.11" and "transformer-engine" not in record.versions
    assert sum(parameters_of_rank(scenario)) == pytest.approx(share, abs=2)
    assert kept_bytes(scenario) == pytest.approx((2 * share, 2 * share, 4 * share), abs=8)
    in_fp32 = replace(scenario, state=TrainingState(fp32_sharded_params=True))
    assert kept_bytes(in_fp32) == pytest.approx((4 * share, 4 * share, 8 * share), abs=16)
    gathered = 2 * 2 * scenario.architecture.vocab_size * scenario.architecture.hidden_size
    assert record.peak_allocated_bytes > record.static_bytes + gathered, "the root's parameters are not sharded again"


TENSOR_PARALLEL = Layout(tensor_model_parallel_size=2, data_parallel_size=2, sequence_parallel=False)


def test_tensor_parallel_ranks_keep_their_part_and_gather_the_logits_in_fp32() -> None:
    sizes = SIZES | {"num_layers": 1, "dtype": "bf16"}
    found = []
    for layout in (Layout(data_parallel_size=2), TENSOR_PARALLEL):
        scenario = Scenario.of("llama-3-tiny", **sizes, layout=layout)
        with Lab(scenario, backend=predicting("cpu")) as lab:
            lab.step()
            found.append(lab.step(FULL))
        # parameters and two moments, in bf16; between the steps there are no gradients
        kept = kept_bytes(scenario)
        assert found[-1].static_bytes == pytest.approx(kept.parameters + kept.optimizer, abs=200)
    model = scenario.architecture
    norms = model.hidden_size * (2 * 1 + 1)
    divided = model.with_layers(1).num_parameters - norms
    assert found[0].static_bytes - found[1].static_bytes == pytest.approx(3 * 2 * divided / 2 / 2, abs=200)
    whole = 4 * 64 * model.vocab_size
    assert found[1].peak_allocated_bytes > found[1].static_bytes + whole, "of the whole vocabulary"


@MEASURED_WITH_OLD_TORCH
@pytest.mark.parametrize(
    ("layout", "measured"),
    [
        (Layout(tensor_model_parallel_size=2), (1_527_680, 2_990_236)),
        (Layout(context_parallel_size=2), (1_525_760, 3_959_324)),
        (Layout(context_parallel_size=2, rank=1), (1_525_760, 3_951_132)),
    ],
)
def test_ranks_share_a_sequence(layout: Layout, measured: tuple[int, int]) -> None:
    """Bytes of two live ranks over gloo (torch 2.13), at the start of a step and at its peak."""
    sizes = SIZES | {"num_layers": 2, "dtype": "bf16"}
    with Lab("llama-3-tiny", **sizes, layout=layout, backend=predicting("cpu")) as lab:
        record = lab.step()
    assert (record.static_bytes, record.peak_allocated_bytes) == measured


@pytest.mark.parametrize(
    ("architecture", "given", "words"),
    [
        (
            replace(find_architecture("phi-4-tiny"), num_query_groups=2, num_attention_heads=4),
            {"layout": replace(TENSOR_PARALLEL, sequence_parallel=True)},
            "and sequence_parallel, which",
        ),
        ("llama-3-tiny", {"state": TrainingState(lora=LoRA(rank=8))}, "with engine 'fsdp2' and lora_rank, which"),
        ("llama-3-tiny", {"state": TrainingState(fsdp_cpu_offload=True)}, "and fsdp_cpu_offload, which memlab"),
        ("qwen3-0.6b", {}, "of the family qwen3 with tied embeddings"),
        (
            "llama-3-tiny",
            {"layout": replace(TENSOR_PARALLEL, tensor_model_parallel_size=4)},
            "divide the 2 query groups",
        ),
    ],
)
def test_what_is_not_divided_yet_is_refused_by_name(architecture: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        Scenario.of(architecture, **(SIZES | {"dtype": "bf16", "num_layers": 1, "layout": TENSOR_PARALLEL} | given))
    assert "\n" not in str(refused.value)


def test_replicas_have_all_shards_and_a_smaller_group_keeps_its_part_after_forward() -> None:
    found = {}
    for ranks, options in ((2, {}), (4, {"dp_replicate_size": 2}), (4, {}), (4, {"reshard_after_forward_ranks": 2})):
        scenario = Scenario.of(
            "phi-4-tiny",
            **(SIZES | {"dtype": "bf16"}),
            layout=Layout(data_parallel_size=ranks),
            state=TrainingState(**options),  # type: ignore[arg-type]
        )
        with Lab(scenario, backend=predicting("cpu")) as lab:
            found[ranks, *options] = lab.step()
    of_two, replicated = found[2,], found[4, "dp_replicate_size"]
    assert replicated.static_bytes == of_two.static_bytes
    assert replicated.peak_allocated_bytes > of_two.peak_allocated_bytes, "what the replicas reduce is held longer"
    model = find_architecture("phi-4-tiny")
    of_layer = model.with_layers(2).num_parameters - model.with_layers(1).num_parameters
    more = found[4, "reshard_after_forward_ranks"].peak_allocated_bytes - found[4,].peak_allocated_bytes
    assert more == 2 * of_layer / 2, "half of the first layer is kept in bf16; the second is gathered again already"


def test_steps_of_older_labs_have_no_workspace_of_transformer_engine_either() -> None:
    scenario = Scenario.of("llama-3-tiny", **SIZES)
    found = []
    for backend in ("simulated", of_labs_before_0_4()):
        with Lab(scenario, backend=backend) as lab:
            found.append(lab.step().static_bytes)
    assert found[0] == found[1]


@pytest.mark.parametrize(("version", "gave_workspaces"), [("0.3.0", True), ("0.4.0", False), ("0.10.0", False)])
def test_a_lab_of_megatron_is_predicted_as_its_version_of_memlab_measured(version: str, gave_workspaces: bool) -> None:
    first = Layout(pipeline_model_parallel_size=2)
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, layout=first, backend="simulated") as lab:
        record = lab.step()
    (predicted,) = predict_measured([replace(record, versions=record.versions | {"memlab": version})])
    assert predicted.static_bytes - record.static_bytes == 2 * 32 * 2**20 * gave_workspaces


def test_a_changed_lab_differs_from_a_new_one_at_most_in_the_blocks_of_adam_s_moments() -> None:
    """FSDP2's first update puts the moments into blocks that forward and backward have freed, and they stay there."""
    job: dict[str, Any] = {"num_layers": 2, "seq_length": 512, "layout": Layout(data_parallel_size=2)}
    requested, allocated = [], []
    for settings in ((MemorySettings(), FULL), (FULL,)):
        with Lab("qwen3-8b", engine="fsdp2", backend="simulated", **job) as lab:
            timeline = [lab.step(each) for each in settings][-1].timeline
        assert timeline is not None
        end = len(timeline) - 1
        requested.append(timeline.breakdown(end, with_rounding=False))
        allocated.append(timeline.breakdown(end))
    assert requested[0] == requested[1]
    moments = [each.pop("optimizer state") for each in allocated]
    assert allocated[0] == allocated[1] and min(moments) >= requested[0]["optimizer state"]


def test_options_of_fsdp2_that_do_nothing_are_named() -> None:
    state = TrainingState(fp32_sharded_params=True, defer_fsdp_grad_sync=True, grad_reduce_in_bf16=True)
    scenario = Scenario.of("phi-4-tiny", **SIZES, state=state)
    assert set(without_effect.of_scenario(scenario)) == {"fp32_sharded_params", "defer_fsdp_grad_sync"}, (
        "it reduces in bf16"
    )
    assert not without_effect.of_scenario(replace(scenario, dtype="bf16", num_microbatches=2))
    state = TrainingState(reshard_after_forward="none", reshard_after_forward_ranks=2)
    of_two = replace(scenario, layout=Layout(data_parallel_size=2), state=state)
    assert set(without_effect.of_scenario(of_two)) == {"reshard_after_forward_ranks"}
    of_all = replace(of_two, state=TrainingState(reshard_after_forward_ranks=2))
    assert set(without_effect.of_scenario(of_all)) == {"reshard_after_forward_ranks"}
    assert not without_effect.of_scenario(replace(of_all, layout=Layout(data_parallel_size=4)))


def test_host_memory_is_asked_for_what_is_there_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.of("phi-4-tiny", **(SIZES | {"dtype": "bf16"}))
    num_parameters = scenario.architecture.with_layers(scenario.num_layers).num_parameters
    monkeypatch.setattr(cpu, "host_memory_bytes", lambda: 6 * num_parameters)  # parameters and two moments in bf16
    cpu.require_host_memory(scenario)
    with pytest.raises(ValueError, match="of host memory"):
        cpu.require_host_memory(replace(scenario, state=TrainingState(fp32_sharded_params=True)))


MEASURED = measured_by_name("h200_plain_fsdp2", "h200x2_plain_fsdp2")


@pytest.mark.parametrize(
    "name",
    [
        "model=phi-4 num_layers=8 num_ranks=2 lora_rank=16",
        pytest.param(
            "model=qwen3-30b-a3b num_layers=4 num_microbatches=2 num_ranks=2 defer_fsdp_grad_sync "
            "adam_implementation=fused",
            marks=MEASURED_WITH_OLD_TORCH,
        ),
        "model=llama-3.1-8b num_layers=8 adam_implementation=for_loop",
        "model=llama-3.1-8b num_layers=4 num_ranks=2 fp32",
        pytest.param(
            "model=qwen3-8b num_layers=8 seq_length=4096 num_ranks=2 checkpointing tensor_model_parallel_size=2",
            marks=pytest.mark.slow,
        ),
        pytest.param("model=llama-3.1-8b num_layers=8 seq_length=4096 num_ranks=2 lora_rank=8", marks=pytest.mark.slow),
    ],
)
def test_predictions_are_what_an_h200_needed_without_memlab(name: str) -> None:
    assert_fsdp2_predicted(MEASURED[name], start=1e-4, peak=1e-4, reserved=0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"layout": Layout(pipeline_model_parallel_size=2)},
            "num_microbatches is 1 in 1 runs of the schedule, must be",
        ),
        ({"layout": Layout(context_parallel_size=2), "dtype": "fp32"}, "with engine 'fsdp2' and dtype, which memlab"),
        ({"layout": Layout(tensor_model_parallel_size=2)}, "must divide the 5 query groups of phi-4-tiny"),
        ({"packed_sequences": 2, "micro_batch_size": 2}, "so micro_batch_size must be 1, not 2"),
        (
            {"dtype": "fp32", "state": TrainingState(attn_implementation="flash_attention_2")},
            "since flash-attn takes 16 bits",
        ),
        ({"state": TrainingState(overlap_grad_reduce=True)}, "overlap_grad_reduce is True, but engine 'fsdp2'"),
        ({"state": TrainingState(lora=LoRA(library="mcore_bridge"))}, "lora_library is 'mcore_bridge', but engine"),
        ({"state": TrainingState(lora=LoRA(target_modules=("*.q_proj",)))}, "names no linear of phi-4-tiny"),
        (
            {"state": TrainingState(lora=LoRA(target_modules=("linear_q",)))},
            "names of Megatron-Bridge's canonical form",
        ),
        ({"state": TrainingState(lora=LoRA(dropout_position="post"))}, "since PEFT drops inputs"),
        (
            {"engine": "megatron", "state": TrainingState(lora=LoRA(target_modules=("o_proj",)))},
            "lora_target_modules has o_proj, which engine 'megatron' does not have",
        ),
        ({"state": TrainingState(dp_replicate_size=2)}, "dp_replicate_size is 2, must divide the 1 ranks"),
        ({"state": TrainingState(reshard_after_forward_ranks=2)}, "must divide the 1 ranks that have shards"),
        ({"engine": "megatron", "state": TrainingState(fp32_sharded_params=True)}, "choose engine 'fsdp2'"),
        ({"engine": "deepspeed"}, "engine is 'deepspeed', must be one of megatron, fsdp2"),
    ],
)
def test_an_option_that_an_engine_lacks_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        Scenario.of("phi-4-tiny", **(SIZES | {"dtype": "bf16"} | given))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload_modules": ("core_attn",)}, "offload_modules is .* engine 'fsdp2' does not have this option"),
        ({"recompute_granularity": "selective"}, "checkpoints whole layers"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}, "must be 1"),
    ],
)
def test_settings_that_an_engine_lacks_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    scenario = Scenario.of("phi-4-tiny", **SIZES)
    with pytest.raises(ValueError, match=words):
        check_on_model(MemorySettings(**settings), scenario)
    with pytest.raises(ValueError, match="selective_ac is True, and qwen3-moe-tiny has experts"):
        check_on_model(replace(FULL, selective_ac=True), Scenario.of("qwen3-moe-tiny", **(SIZES | {"dtype": "bf16"})))
    check_on_model(replace(FULL, recompute_method="block", recompute_num_layers=2), scenario)


def test_a_model_that_transformers_would_build_otherwise_is_refused() -> None:
    from memlab.engines.fsdp2.hugging_face import build_model

    biased = replace(find_architecture("llama-3-tiny"), add_qkv_bias=True)
    with pytest.raises(ValueError, match="so it is another model"), torch.device("meta"):
        build_model(Scenario.of(biased, **SIZES), torch.bfloat16, attention="sdpa")

    with pytest.raises(ValueError, match="moonlight-16b-a3b is of the family deepseek_v3, which this engine does not"):
        Scenario.of(find_architecture("moonlight-16b-a3b"), **SIZES)
    with pytest.raises(ValueError, match="dtype is 'fp32' with engine 'fsdp2' and experts, must be 'bf16'"):
        Scenario.of(find_architecture("qwen3-moe-tiny"), **SIZES)


def test_a_torchvision_of_another_torch_is_named_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 imports torchvision for its text models too: so it is on Colab after pip has replaced torch."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError(f"Could not import module {name!r}.") from RuntimeError("no torchvision::nms")

    broken = Broken("transformers")
    broken.__spec__ = ModuleSpec("transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", broken)
    with pytest.raises(ValueError, match=r"do not import here \(no torchvision::nms\): take the torchvision of torch"):
        check_installed()
