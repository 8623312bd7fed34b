"""Adapters of low rank beside a frozen model: their rules, their bytes, their gradients, and a lab that has them in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.package_info import MINOR

from memlab.backends import cpu
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config import model_restrictions, without_effect
from memlab.config.layout import Layout
from memlab.config.lora import CANONICAL, LINEARS, LoRA
from memlab.config.parameters import kept_bytes, trained_of_rank
from memlab.config.parts.part import Weight
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState, what_rebuilds
from memlab.config.validation import RuleError
from memlab.engines.megatron.adapters import GroupedAdapter
from memlab.jobs.bounds import bound_bytes
from memlab.jobs.frameworks.framework import NotModelled
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute
from tests.unit.replayed import Case, require_identical, take

pytestmark = pytest.mark.versions

TINY: dict[str, Any] = {"num_layers": 2, "seq_length": 64}
LORA = TrainingState(lora=LoRA(rank=8))
OF_EACH_EXPERT = TrainingState(lora=LoRA(rank=4, library="mcore_bridge", target_modules=("*experts*",)))
OF_PARTS = TrainingState(lora=LoRA(rank=8, target_modules=CANONICAL, normalize_moe_lora=True))
OF_MS_SWIFT = LoRA(
    rank=4, library="mcore_bridge", enable_input_require_grads=True, target_modules=(*LINEARS, "eh_proj")
)
GROUPED = TrainingState(
    lora=LoRA(rank=8, target_modules=("*experts*",), share_expert_adapters=False), optimizer_cpu_offload=True
)
DROPPED = TrainingState(lora=LoRA(rank=4, dropout=0.2, target_modules=("linear_proj", "*.layers.1.*.linear_fc1")))


def test_an_option_of_the_adapters_is_one_of_the_state() -> None:
    state = TrainingState.of_options({"lora_rank": 16, "lora_target_modules": ["linear_qkv", "linear_proj"]})
    assert state.lora == LoRA(rank=16, target_modules=("linear_qkv", "linear_proj"))
    assert state == TrainingState.from_options(["lora_rank=16", "lora_target_modules=linear_qkv,linear_proj"])
    assert str(state) == "lora_rank 16, lora_target_modules linear_qkv,linear_proj"
    assert TrainingState.from_dict(state.to_dict()) == TrainingState.of_options(state.options()) == state
    assert what_rebuilds(TrainingState(), state) == what_rebuilds(state, LORA) == "model"
    assert TrainingState.of_options({"lora_alpha": 32}) == TrainingState(), "a default is not given"
    every = TrainingState(lora=LoRA(rank=16, target_modules=()))
    assert TrainingState.from_options(["lora_rank=16", "lora_target_modules="]) == every


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"lora_rank": 0}, "lora_rank", "lora_rank is 0, must be a whole number of at least 1"),
        ({"lora_alpha": 16}, "lora_alpha", "lora_alpha is 16 without lora_rank, which alone adds adapters"),
        ({"lora_rank": 8, "lora_dropout": 1.0}, "lora_dropout", "must be below 1"),
        ({"lora_rank": 8, "lora_dropout": -0.1}, "lora_dropout", "must be a number of at least 0"),
        ({"lora_rank": 8, "lora_dropout_position": "mid"}, "lora_dropout_position", "must be one of pre, post"),
        (
            {"lora_rank": 8, "lora_exclude_modules": ["linear_fc1"]},
            "lora_exclude_modules",
            "must be empty there by a rule of Megatron-Bridge",
        ),
        ({"lora_rank": 8, "lora_target_modules": ["c_attn"]}, "lora_target_modules", "has 'c_attn', must have linear_"),
        ({"lora_rank": 8, "lora_target_modules": [1]}, "lora_target_modules", "must be a list of names"),
        (
            {"lora_rank": 8, "lora_target_modules": [], "lora_library": "mcore_bridge"},
            "lora_target_modules",
            "must name linears there, since only Megatron-Bridge takes an empty list",
        ),
        (
            {"lora_rank": 8, "lora_target_modules": ["linear_proj", "linear_qkv", "*.layers.1.*.linear_q"]},
            "lora_target_modules",
            "has 'linear_qkv' and '*.layers.1.*.linear_q', must have parts of linears or whole linears",
        ),
        (
            {"lora_rank": 8, "lora_share_expert_adapters": False, "lora_library": "mcore_bridge"},
            "lora_share_expert_adapters",
            "which only Megatron-Bridge has",
        ),
        (
            {"lora_rank": 8, "lora_target_modules": [], "lora_exclude_modules": [1]},
            "lora_exclude_modules",
            "must be a list of names",
        ),
        (
            {
                "lora_rank": 8,
                "fp8_format": "e4m3",
                "fp8_recipe": "mxfp8",
                "fp8_param_gather": True,
                "reuse_grad_buf_for_mxfp8_param_ag": True,
            },
            "lora_rank",
            "with fp8_param_gather and fp8_recipe 'mxfp8'",
        ),
    ],
)
def test_a_broken_rule_is_named(options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        TrainingState.of_options(options)
    assert message in str(error.value) and error.value.fields[0] == field and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (LoRA(rank=8, library="mcore_bridge"), "lora_rank is 8, must be a multiple of 16 under fp8_recipe"),
        (LoRA(rank=16, share_expert_adapters=False), "with lora_share_expert_adapters False"),
    ],
)
def test_what_adapters_cannot_be_in_fp8_is_refused(lora: LoRA, words: str) -> None:
    """Beside FP8 parameters ms-swift's compute in bf16, and have any rank."""
    with pytest.raises(RuleError, match=words):
        Scenario.of("qwen3-30b-a3b", state=TrainingState(fp8_format="e4m3", lora=lora))
    assert Scenario.of("phi-4", state=TrainingState(fp8_format="e4m3", fp8_param_gather=True, lora=LoRA(rank=8)))


@pytest.mark.parametrize(
    ("lora", "layout", "message"),
    [
        (LoRA(target_modules=("*.layers.99.*",)), Layout(), "names no linear of qwen3-30b-a3b on rank 0"),
        (LoRA(rank=6), Layout(tensor_model_parallel_size=4), "must be a multiple of tensor_model_parallel_size, 4"),
        (LoRA(library="mcore_bridge"), Layout(tensor_model_parallel_size=2), "mcore-bridge adds no adapters"),
        (
            LoRA(rank=1),
            Layout(expert_tensor_parallel_size=2, data_parallel_size=2),
            "must be a multiple of expert_tensor_parallel_size, 2",
        ),
        (LoRA(target_modules=("linear_q", "linear_v")), Layout(), "linear_q, linear_v alone of linear_qkv, must have"),
        (LoRA(rank=12, normalize_moe_lora=True), Layout(), "must be a multiple of 8, the experts of a token"),
        (
            LoRA(share_expert_adapters=False),
            Layout(expert_tensor_parallel_size=2, data_parallel_size=2),
            "must be 1 with lora_share_expert_adapters False",
        ),
    ],
)
def test_adapters_that_a_layout_or_a_model_cannot_have_are_refused(lora: LoRA, layout: Layout, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Scenario.of("qwen3-30b-a3b", layout=layout, state=TrainingState(lora=lora))


def test_ranks_share_the_rows_of_an_adapter_even_if_each_has_the_whole_linear() -> None:
    def splits(rank: int, ranks: int, **given: Any) -> list[int | None]:
        lora = LoRA(rank=rank, target_modules=("linear_kv_down_proj",), **given)
        layout = Layout(tensor_model_parallel_size=ranks, expert_tensor_parallel_size=1)
        scenario = Scenario.of("deepseek-v3", num_layers=1, layout=layout, state=TrainingState(lora=lora))
        return [weight.split for weight in scenario.weights_of_adapters()]

    assert splits(8, 2) == [0, 0]
    assert splits(7, 2, library="mcore_bridge") == [None, None]
    with pytest.raises(RuleError, match="lora_rank is 7, must be a multiple of tensor_model_parallel_size, 2"):
        splits(7, 2)
    with pytest.raises(RuleError, match="tensor_model_parallel_size is 128, must divide 576, the outputs of linear_kv"):
        splits(128, 128)


LATENT = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


def test_adapters_of_latent_attention_are_those_of_megatron_bridge_s_recipe() -> None:
    """216 entries has its checkpoint of adapters (examples/model_verification_cards/moonlight-16b-a3b, 067f987d)."""
    scenario = Scenario.of("moonlight-16b-a3b", state=TrainingState(lora=LoRA(rank=8, target_modules=LATENT)))
    assert len([*scenario.weights_of_adapters()]) == 216
    assert sum(trained_of_rank(scenario)) == 27 * 8 * (2048 + 3072 + 2048 + 576 + 512 + 4096 + 2048 + 2048)


def test_an_empty_list_leaves_out_experts_and_what_leads_to_latent_vectors() -> None:
    state = TrainingState(lora=LoRA(rank=8, target_modules=()))
    weights = [*Scenario.of("moonlight-16b-a3b", state=state).weights_of_adapters()]
    # Three linears of attention in 27 layers, the MLP of the first layer, shared experts in 26, and the output layer.
    assert len(weights) == 2 * (27 * 3 + 2 + 26 * 2 + 1)
    assert not any("down_proj" in weight.name or weight.num_experts for weight in weights)


@pytest.mark.parametrize(("architecture", "module"), [("phi-4-tiny", "mlp"), ("qwen3-moe-tiny", "moe")])
def test_a_checkpoint_whose_input_requires_no_gradient_is_refused(architecture: str, module: str) -> None:
    """Megatron's step then ends without an error, and no adapter has a gradient."""
    for lora, is_refused in (
        (LoRA(target_modules=("linear_fc1",)), True),
        (LoRA(target_modules=("linear_fc1",), enable_input_require_grads=True), False),
        (LoRA(target_modules=("linear_proj", "linear_fc2")), False),
    ):
        scenario = Scenario.of(architecture, state=TrainingState(lora=lora))
        with pytest.raises(RuleError, match="gives none to the adapters") if is_refused else nullcontext():
            model_restrictions.check_on_model(recompute(module), scenario)


def test_a_position_of_dropout_is_named_without_dropout() -> None:
    for dropout, reasons in ((0.0, {"lora_dropout_position": "lora_dropout is 0"}), (0.1, {})):
        state = TrainingState(lora=LoRA(dropout=dropout, dropout_position="post"))
        assert without_effect.of_scenario(Scenario.of("llama-3-tiny", state=state)) == reasons


@pytest.mark.parametrize(
    ("excluded", "is_idle"),
    [("linear_kqv", True), ("*.layers.9.*", True), ("linear_fc1", False), ("*.layers.0.*", False), ("output*", False)],
)
def test_excluded_names_that_no_linear_has_are_named(excluded: str, is_idle: bool) -> None:
    state = TrainingState(lora=LoRA(target_modules=(), exclude_modules=(excluded,)))
    reasons = without_effect.of_scenario(Scenario.of("llama-3-tiny", num_layers=2, state=state))
    assert ("lora_exclude_modules" in reasons) == is_idle


@pytest.mark.parametrize(("targets", "is_idle"), [(CANONICAL[:4], True), (("*experts*",), False)])
def test_what_concerns_experts_alone_is_named_without_adapters_of_experts(
    targets: tuple[str, ...], is_idle: bool
) -> None:
    lora = LoRA(rank=8, target_modules=targets, normalize_moe_lora=True, share_expert_adapters=False)
    reasons = without_effect.of_scenario(Scenario.of("qwen3-30b-a3b", state=TrainingState(lora=lora)))
    assert ({"lora_share_expert_adapters", "lora_normalize_moe_lora"} <= reasons.keys()) == is_idle


def test_a_frozen_router_is_named_where_it_changes_nothing() -> None:
    def reason(architecture: str, **options: Any) -> str | None:
        state = TrainingState(freeze_moe_router=True, **options)
        return without_effect.of_scenario(Scenario.of(architecture, state=state)).get("freeze_moe_router")

    assert reason("qwen3-moe-tiny") is None
    assert reason("llama-3-tiny") == "the model has no experts"
    assert reason("qwen3-moe-tiny", lora=LoRA()) == "beside adapters the whole model is frozen"


def test_the_adapters_of_llama_3_1_8b_are_counted_by_hand() -> None:
    # linear_qkv 4096 -> 6144, linear_proj 4096 -> 4096, linear_fc1 4096 -> 28672, linear_fc2 14336 -> 4096.
    of_layer = 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    alone = Scenario.of("llama-3.1-8b", state=TrainingState(lora=LoRA(rank=16)))
    assert sum(trained_of_rank(alone)) == 32 * of_layer == 35_651_584
    kept = kept_bytes(alone)
    frozen = alone.architecture.num_parameters
    assert kept == (2 * (frozen + 32 * of_layer), 4 * 32 * of_layer, 12 * 32 * of_layer)
    shared = replace(alone, layout=Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, rank=2))
    assert sum(trained_of_rank(shared)) == 16 * of_layer / 2


def test_a_frozen_model_needs_less_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "host_memory_bytes", lambda: 4 * 2**30)
    frozen = Scenario.of("llama-3.2-1b", state=LORA)
    cpu.require_host_memory(frozen)
    with pytest.raises(ValueError, match="of host memory"):
        cpu.require_host_memory(replace(frozen, state=TrainingState()))


def test_fsdp_spreads_the_frozen_model_too() -> None:
    layout = Layout(data_parallel_size=4)
    scenario = Scenario.of("llama-3.1-8b", layout=layout, state=TrainingState(lora=LoRA(rank=16)))
    frozen, adapters = scenario.architecture.num_parameters, 35_651_584
    row = NotModelled("use_megatron_fsdp", value=True, effect="less", reason="")
    assert bound_bytes(row, scenario, MemorySettings()) == 2 * frozen * 3 // 4 + (2 + 4) * adapters * 3 // 4


OF_EXPERTS = 2048 + 1536 + 768 + 2048
OF_ATTENTION_IN_PARTS = 3 * 2048 + 4096 + 512 + 512


@pytest.mark.parametrize(
    ("lora", "of_layers"),
    [
        ({"target_modules": ("linear_qkv",)}, 48 * 16 * (2048 + 5120)),
        (
            {"target_modules": ("*.layers.0.*.linear_qkv", "*.layers.47.self_attention.linear_proj")},
            16 * (2048 + 5120 + 4096 + 2048),
        ),
        ({"target_modules": ("*experts*",)}, 48 * 16 * OF_EXPERTS),
        ({"target_modules": ()}, 48 * 16 * (2048 + 5120 + 4096 + 2048) + 16 * (2048 + 151936)),
        ({"target_modules": ("*experts*",), "share_expert_adapters": False}, 48 * 128 * 16 * OF_EXPERTS),
        ({"target_modules": ("*experts*",), "normalize_moe_lora": True}, 48 * 2 * OF_EXPERTS),
        ({"target_modules": CANONICAL[:3]}, 48 * 16 * OF_ATTENTION_IN_PARTS),
        ({"target_modules": CANONICAL}, 48 * 16 * (OF_ATTENTION_IN_PARTS + 4096 + 2048 + OF_EXPERTS)),
        (
            {"target_modules": tuple(f"*.layers.0.*.{part}" for part in CANONICAL[:3])},
            16 * OF_ATTENTION_IN_PARTS,
        ),
    ],
)
def test_adapters_are_counted_by_their_names_and_kinds(lora: dict[str, Any], of_layers: int) -> None:
    state = TrainingState(lora=LoRA(rank=16, **lora))
    assert sum(trained_of_rank(Scenario.of("qwen3-30b-a3b", state=state))) == of_layers


def test_a_layer_that_predicts_tokens_further_on_has_adapters_like_the_model_s() -> None:
    """Those that Megatron-Bridge 0.6.2 adds: of each linear with the name; of all linears, of ``eh_proj`` too."""
    state = TrainingState(mtp_num_layers=1, lora=LoRA(rank=16, target_modules=("linear_qkv",)))
    assert sum(trained_of_rank(Scenario.of("qwen3-30b-a3b", state=state))) == 49 * 16 * (2048 + 5120)
    of_attention, joining, output = 2048 + 5120 + 4096 + 2048, 2 * 2048 + 2048, 2048 + 151936
    every = replace(state, lora=LoRA(rank=16, target_modules=()))
    assert sum(trained_of_rank(Scenario.of("qwen3-30b-a3b", state=every))) == 16 * (
        49 * of_attention + joining + output
    )


def test_a_rank_that_is_normalized_is_rounded_up_where_ranks_share_its_rows() -> None:
    """Megatron-Bridge rounds up that of ``linear_fc1`` alone, whose first matrix is split by rows."""
    layout = Layout(tensor_model_parallel_size=4, expert_tensor_parallel_size=4)
    lora = LoRA(rank=8, target_modules=("*experts*",), normalize_moe_lora=True)
    scenario = Scenario.of("qwen3-30b-a3b", layout=layout, state=TrainingState(lora=lora))
    assert {weight.shape for weight in scenario.weights_of_adapters()} == {(4, 2048), (1536, 4), (1, 768), (2048, 1)}


@pytest.mark.parametrize(("module", "targets"), [("layernorm", "linear_fc1"), ("moe_act", "linear_fc2")])
def test_megatron_cannot_recompute_what_has_no_adapter_before_it(
    module: str, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainingState(lora=LoRA(rank=4, target_modules=(targets,)))
    with Lab("qwen3-moe-tiny", **TINY, backend="cpu", state=state) as lab:
        with pytest.raises(RuleError, match="its input requires no gradient") as error:
            lab.step(recompute(module))
        assert error.value.fields == ("recompute_modules", "lora_target_modules")
        monkeypatch.setattr(model_restrictions, "_check_frozen_layers", lambda *_: None)
        with pytest.raises((TypeError, RuntimeError), match=r"missing|a second time"):  # torch 2.13, torch 2.11
            lab.step(recompute(module))


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3-moe-tiny", OF_PARTS),
        pytest.param(("qwen3-moe-tiny", OF_EACH_EXPERT), marks=pytest.mark.slow),
        ("gpt-oss-tiny", GROUPED),
        ("phi-4-tiny", replace(DROPPED, mtp_num_layers=1)),
        ("phi-4-tiny", TrainingState(lora=OF_MS_SWIFT, mtp_num_layers=1)),
    ],
    ids=[
        *("shared", "of each expert", "grouped, with biases", "dense, with a layer that predicts tokens further on"),
        "ms-swift's, with such a layer",
    ],
)
def both(request: pytest.FixtureRequest) -> list[tuple[StepRecord, StepRecord, int]]:
    """The same steps on the CPU and predicted, and how many weights the device's optimizer updates."""
    name, state = request.param
    given = {**TINY, "num_microbatches": 2, "state": state}
    drawn = [MemorySettings(), FULL, offload("qkv_linear", "core_attn", "attn_proj")]
    with Lab(name, backend="cpu", **given) as lab:
        real = [lab.step(each) for each in drawn]
        of_device = () if state.optimizer_cpu_offload else inside(lab).model.engine.live.parameters()
        trained = sum(parameter.requires_grad for parameter in of_device)
    with Lab(name, backend=of_the_cpu_backend(), **given) as lab:
        return list(zip(real, [lab.step(each) for each in drawn], [trained] * len(drawn), strict=True))


def test_a_predicted_step_is_the_cpu_s_to_the_byte(both: list[tuple[StepRecord, StepRecord, int]]) -> None:
    for real, fake, trained in both:
        # torch's AdamW counts its steps in a tensor of 4 bytes a weight.
        counts = {"optimizer state": real.peak_by_category["optimizer state"] - 4 * trained}
        assert real.peak_by_category | counts == fake.peak_by_category, real.settings
        assert real.residual_bytes == fake.residual_bytes
        assert real.offloaded_bytes_by_module == fake.offloaded_bytes_by_module


def test_settings_leave_the_loss_as_it_is(both: list[tuple[StepRecord, StepRecord, int]]) -> None:
    assert len({real.loss for real, _, _ in both}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "settings"),
    [
        # Layers before the first adapter, and its own, save less than the others, and offload less.
        (
            "qwen3-moe-tiny",
            LoRA(rank=4, target_modules=("linear_fc1", "linear_fc2")),
            offload("core_attn", "attn_proj"),
        ),
        ("phi-4-tiny", LoRA(rank=4, target_modules=("*.layers.2.*.linear_proj", "*.layers.4.*")), offload("core_attn")),
        # The embedding's output is kept by what the layers' dispatchers retain, until the last of them lets it go.
        ("qwen3-moe-tiny", LoRA(rank=4, enable_input_require_grads=True), MemorySettings()),
        ("qwen3-moe-tiny", LoRA(rank=4, enable_input_require_grads=True), offload("expert_fc1", "moe_act")),
    ],
)
def test_replayed_passes_are_those_that_would_be_stepped(name: str, lora: LoRA, settings: MemorySettings) -> None:
    workload = {"num_layers": 6, "seq_length": 64, "num_microbatches": 3, "state": TrainingState(lora=lora)}
    case = Case(architecture=name, arguments=workload, settings=[settings])
    (stepped,), _ = take(case, replay=False)
    (replayed,), count = take(case, replay=True)
    assert count
    require_identical(stepped, replayed)


def test_only_adapters_of_megatron_bridge_have_torch_s_matrix_products() -> None:
    """ms-swift's are linears of Transformer Engine, which has a workspace of its own."""
    first = Layout(pipeline_model_parallel_size=2)
    found = {}
    for lora in (None, LoRA(), LoRA(library="mcore_bridge")):
        state = TrainingState(lora=lora)
        with Lab("phi-4-tiny", num_layers=2, seq_length=64, layout=first, state=state, backend="simulated") as lab:
            found[lora and lora.library] = lab.step(warm_up=False).peak_by_category["workspace"]
    assert found["mcore_bridge"] == found[None] == found["megatron_bridge"] - 2 * 32 * 2**20


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    with Lab("qwen3-moe-tiny", **TINY, backend="cpu", state=LORA) as lab:
        kept, record = kept_bytes(lab.scenario), lab.step()
        live = inside(lab).model.engine.live
        trained = {name for name, value in live.chunk.named_parameters() if value.requires_grad}
        assert all(".adapter." in name for name in trained) and len(trained) == 2 * 4 * 2
        sizes = record.peak_by_category
        padding = 2 * 4096 * 8  # Megatron's DDP pads its two buffers
        assert kept.parameters <= sizes["parameters"] <= kept.parameters + padding
        assert kept.gradients <= sizes["gradients"] <= kept.gradients + padding
        assert kept.optimizer <= sizes["optimizer state"] <= kept.optimizer + 3 * padding


def test_a_lab_gets_adapters_and_loses_them_and_the_bytes_return() -> None:
    with Lab("qwen3-moe-tiny", **TINY, backend="cpu", state=LORA) as lab:
        fresh = lab.step(FULL)
    with Lab("qwen3-moe-tiny", **TINY, backend="cpu") as lab:
        plain = lab.step(FULL)
        for state, expected in ((DROPPED, None), (LORA, fresh), (TrainingState(), plain)):
            lab.set_state(state)
            record = lab.step()
            if expected is not None:
                assert record.peak_by_category == expected.peak_by_category
                assert record.loss == expected.loss


@pytest.fixture
def adapted() -> Iterator[tuple[Lab, Any]]:
    """A lab in fp32 whose adapters have random weights in both linears, and its model."""
    state = TrainingState(lora=LoRA(rank=4, alpha=10))
    with Lab("phi-4-tiny", num_layers=1, seq_length=16, backend="cpu", dtype="fp32", state=state) as lab:
        live = inside(lab).model.engine.live
        for parameter in live.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter.data, std=0.1, generator=torch.Generator().manual_seed(7))
        yield lab, live


def test_adapters_and_their_gradients_are_those_of_the_definition(adapted: tuple[Lab, Any]) -> None:
    lab, live = adapted
    linear = live.chunk.module.decoder.layers[0].mlp.linear_fc2
    parts = linear.adapter.linear_in, linear.adapter.linear_out
    seen: dict[str, torch.Tensor] = {}

    def note(module: Any, given: Any, output: Any) -> None:
        seen.update(inputs=given[0].detach(), base=module.to_wrap(given[0])[0].detach(), output=output[0].detach())
        output[0].register_hook(lambda grad: seen.update(grad=grad))

    linear.register_forward_hook(note)
    for number, part in enumerate(parts):  # as autograd gives them: Megatron clips those in its buffer
        part.weight.register_hook(lambda grad, number=number: seen.update({str(number): grad}))
    lab.step(warm_up=False)
    first, second = (part.weight.detach().clone().requires_grad_() for part in parts)
    expected = seen["base"] + 10 / 4 * (seen["inputs"] @ first.T) @ second.T
    torch.testing.assert_close(seen["output"], expected.detach())
    expected.backward(seen["grad"])
    for number, reference in enumerate((first, second)):
        torch.testing.assert_close(seen[str(number)], reference.grad)


def test_adapters_of_parts_are_an_adapter_of_the_whole_with_the_rows_of_each_head_in_their_place() -> None:
    """Megatron's ``linear_qkv`` has the queries, the key and the value of each query group beside each other."""
    draw = torch.Generator().manual_seed(3)
    state = TrainingState(lora=LoRA(rank=4, alpha=4, target_modules=CANONICAL))
    with Lab("phi-4-tiny", num_layers=1, seq_length=16, dtype="fp32", backend="cpu", state=state) as lab:
        layer, model = inside(lab).model.engine.live.chunk.module.decoder.layers[0], lab.scenario.architecture
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            for weight in linear.adapter.parameters():
                torch.nn.init.normal_(weight.data, std=0.1, generator=draw)
        inputs = torch.randn(5, 1, model.hidden_size, generator=draw)
        of_attention = layer.self_attention.linear_qkv.adapter
        deltas = {name: each.linear_out.weight @ each.linear_in.weight for name, each in of_attention.items()}
        heads = {name: delta.reshape(model.num_query_groups, -1, model.hidden_size) for name, delta in deltas.items()}
        whole = torch.cat([heads[f"adapter_{part}"] for part in "qkv"], dim=1).reshape(-1, model.hidden_size)
        torch.testing.assert_close(of_attention(inputs), inputs @ whole.T)
        of_mlp = layer.mlp.linear_fc1.adapter
        whole = torch.cat(
            [
                of_mlp[f"adapter_{part}"].linear_out.weight @ of_mlp[f"adapter_{part}"].linear_in.weight
                for part in ("gate", "up")
            ]
        )
        torch.testing.assert_close(of_mlp(inputs), inputs @ whole.T)


def test_an_adapter_of_each_expert_is_that_of_the_definition_and_has_its_gradients() -> None:
    to_wrap, weight = torch.nn.Linear(16, 24, dtype=torch.bfloat16), Weight("linear_fc1.weight", (24, 16), 0, 4)
    to_wrap.num_gemms = 4  # type: ignore[assignment]
    config: Any = SimpleNamespace(expert_model_parallel_size=1, tensor_model_parallel_size=1)
    adapter = GroupedAdapter(to_wrap, weight, LoRA(rank=8, alpha=16, share_expert_adapters=False), config)
    assert adapter.is_grouped
    torch.nn.init.normal_(adapter.linear_out.weight)
    inputs, counts = torch.randn(11, 16, dtype=torch.bfloat16, requires_grad=True), [5, 0, 4, 2]
    weights = (adapter.linear_in.weight, adapter.linear_out.weight)
    expected = torch.cat(
        [2 * (rows @ first.T @ second.T) for rows, first, second in zip(inputs.split(counts), *weights, strict=True)]
    )
    grad = torch.randn(11, 24, dtype=torch.bfloat16)
    wanted = torch.autograd.grad(expected, (inputs, *weights), grad)
    for adapter.is_grouped in (True, False):
        output = adapter(inputs, counts)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output, (inputs, *weights), grad), wanted)
    assert [*adapter(inputs[:0], [0, 0, 0, 0]).shape] == [0, 24]


def test_a_predicted_step_with_adapters_of_latent_attention_is_the_cpu_s_to_the_byte() -> None:
    lora = LoRA(rank=4, dropout=0.1, target_modules=("*_proj",))
    given: dict[str, Any] = {"num_layers": 1, "seq_length": 32, "state": TrainingState(lora=lora)}
    records = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab("deepseek-tiny", **given, backend=backend) as lab:
            records.append(lab.step(recompute("mla_up_proj"), warm_up=False))
    real, fake = (record.peak_by_category["activations"] for record in records)
    assert real == fake


def test_adapters_inside_the_checkpoint_of_latent_attention_are_refused_where_they_get_no_gradient() -> None:
    state = TrainingState(lora=LoRA(rank=48, target_modules=("linear_kv_up_proj",)))
    with pytest.raises(RuleError, match="gives none to the adapters inside it"):
        model_restrictions.check_on_model(recompute("mla_up_proj"), Scenario.of("moonlight-16b-a3b", state=state))


def test_the_norm_of_latent_attention_is_recomputed_only_where_its_input_requires_a_gradient() -> None:
    settings = recompute("layernorm")
    sizes = {"num_layers": 2, "seq_length": 32}
    with pytest.raises(RuleError, match="the norm before the first adapted attention requires no gradient"):
        model_restrictions.check_on_model(settings, Scenario.of("deepseek-tiny", **sizes, state=LORA))
    lora = LoRA(rank=4, target_modules=("linear_fc2",), enable_input_require_grads=True)
    with Lab("qwen3-moe-tiny", **sizes, state=TrainingState(lora=lora), backend="simulated") as lab:
        assert lab.step(settings).status == "ok"


def test_a_target_that_names_no_linear_is_said_even_if_another_one_does() -> None:
    def said(*targets: str) -> str | None:
        state = TrainingState(lora=LoRA(target_modules=targets))
        return without_effect.of_scenario(Scenario.of("qwen3-moe-tiny", state=state)).get("lora_target_modules")

    assert (
        said("linear_qkv", "*.layers.9.*.linear_proj") == "no linear of this rank has the name *.layers.9.*.linear_proj"
    )
    assert said("linear_qkv", "linear_q_proj") == "no linear of this rank has the name linear_q_proj"
    assert said("linear_qkv", "output_layer") is said("*.layers.1.*.linear_proj") is said("linear_qkv") is None


def test_before_the_first_gather_of_a_step_torch_may_keep_those_of_the_step_before() -> None:
    """Adapters read what the norm returns, so that all gathers in FP8 are in backward, and the peak is before them.

    Two H200s peaked 77 MB above the rest in one of three steps of Llama 3.1 8B with 4 layers.
    """
    with Lab(
        "llama-3-tiny",
        num_layers=2,
        seq_length=256,
        layout=Layout(tensor_model_parallel_size=2),
        state=TrainingState(fp8_format="e4m3", fp8_recipe="blockwise", lora=LoRA(rank=8)),
        backend="simulated",
    ) as lab:
        record = lab.step()
    assert record.peak_phase in ("forward", "backward")
    assert record.kept_gather_bytes > 0


@pytest.mark.skipif(MINOR >= 17, reason="memlab has no newer gated delta net and layers of Mamba")
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("nemotron-3-tiny", (*LINEARS, "in_proj", "out_proj")),
        ("qwen3-next-tiny", ()),
        # Each model and each list again, with the other one.
        pytest.param("nemotron-3-tiny", (), marks=pytest.mark.slow),
        pytest.param("qwen3-next-tiny", (*LINEARS, "in_proj", "out_proj"), marks=pytest.mark.slow),
    ],
)
def test_adapters_of_mamba_and_gated_delta_net_take_what_the_cpu_meters(model: str, targets: tuple[str, ...]) -> None:
    state = TrainingState(lora=LoRA(rank=8, target_modules=targets))
    of_backends = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab(model, seq_length=64, micro_batch_size=2, state=state, backend=backend) as lab:
            of_backends.append([lab.step(settings) for settings in (MemorySettings(), FULL)])
            adapted = [name for name, _ in inside(lab).model.engine.live.chunk.named_parameters() if "adapter" in name]
            counts = Counter(name.split(".")[-4] for name in adapted)
    assert counts["in_proj"] == counts["out_proj"] == 2 * 3, "a pair of each in three layers"
    for real, fake in zip(*of_backends, strict=True):
        # torch's AdamW counts its steps in 4 bytes of each weight, Transformer Engine's in a number.
        state_bytes = real.peak_by_category["optimizer state"] - 4 * len(adapted)
        assert real.peak_by_category | {"optimizer state": state_bytes} == fake.peak_by_category
