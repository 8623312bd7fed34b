"""Multi-latent attention, shared experts and sigmoid routers: the CPU's steps, their predictions, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.package_info import MINOR

from memlab.backends.cuda_on_cpu import is_on_host
from memlab.backends.simulated import of_the_cpu_backend
from memlab.cli import build_parser
from memlab.commands.shared.asked_step import asked_step
from memlab.config import without_effect
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron.layers.latent_rope import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute

DEEPSEEK = ARCHITECTURES["deepseek-tiny"]
SETTINGS = {
    "none": MemorySettings(),
    "mla_up_proj": recompute("mla_up_proj"),
    "shared_experts": recompute("shared_experts"),
    "full": FULL,
    "offload": offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
}


def steps(model: object, backend: object, **state: Any) -> list[StepRecord]:
    """Takes a step of a dense layer and one with experts under each of the settings."""
    with Lab(model, num_layers=2, seq_length=32, backend=backend, state=TrainingState(**state)) as lab:
        return [lab.step(settings) for settings in SETTINGS.values()]


@pytest.fixture(
    scope="module",
    params=[
        (DEEPSEEK, {}),
        (
            replace(DEEPSEEK, q_lora_rank=None, moe_shared_expert_gate=True),
            {"apply_rope_fusion": True, "mtp_num_layers": 1},
        ),
    ],
    ids=["DeepSeek-V3's", "DeepSeek-V2-Lite's, fused"],
)
def both(request: pytest.FixtureRequest) -> dict[str, tuple[StepRecord, StepRecord]]:
    model, state = request.param
    pairs = zip(steps(model, "cpu", **state), steps(model, of_the_cpu_backend(), **state), strict=True)
    return dict(zip(SETTINGS, pairs, strict=True))


def test_a_prediction_is_the_step_to_the_byte(both: dict[str, tuple[StepRecord, StepRecord]]) -> None:
    for name, (real, simulated) in both.items():
        for category in ("parameters", "gradients", "activations", "temporary", "workspace"):
            assert simulated.peak_by_category[category] == real.peak_by_category[category], (name, category)
        assert simulated.residual_bytes == real.residual_bytes, name
        assert real.without_effect == simulated.without_effect, name
        assert name == "offload" or not real.without_effect, name  # one layer with experts offloads nothing of them


def test_recompute_lowers_the_peak_and_keeps_the_loss(both: dict[str, tuple[StepRecord, StepRecord]]) -> None:
    """The bias of the router's experts moves by nothing, as weights do: each step routes as the first one did."""
    plain = both["none"][0]
    for name in ("mla_up_proj", "shared_experts", "full"):
        assert both[name][0].peak_allocated_bytes < plain.peak_allocated_bytes, name
    assert {real.loss for real, _ in both.values()} == {plain.loss}


def rotated(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates as ``_apply_rotary_pos_emb_bshd`` of Megatron does for latent attention."""
    tensor = torch.cat((tensor[..., 0::2], tensor[..., 1::2]), dim=-1)
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cos + torch.cat((-second, first), dim=-1) * sin


def test_the_fused_rotation_is_the_one_of_torch_s_operations() -> None:
    """Values and gradients, in fp64 but for the kernels' own fp32."""
    torch.manual_seed(1)
    angles = torch.rand(5, 1, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    query, kv = torch.randn(5, 2, 3, 12, requires_grad=True), torch.randn(5, 2, 3, 10, requires_grad=True)
    position = torch.randn(5, 2, 1, 8, requires_grad=True)
    expected = (
        torch.cat((query[..., :4], rotated(query[..., 4:], cos, sin)), dim=-1),
        torch.cat((kv[..., :4], rotated(position, cos, sin).expand(-1, -1, 3, -1)), dim=-1),
        kv[..., 4:],
    )
    grads = [torch.randn_like(tensor) for tensor in expected]
    wanted = torch.autograd.grad(expected, (query, kv, position), grads)
    found = (
        fused_apply_mla_rope_for_q(query * 1, cos, sin, 4, 8),
        *fused_apply_mla_rope_for_kv(kv, position, cos, sin, 8, 4, 6),
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(torch.autograd.grad(found, (query, kv, position), grads), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("model", "others", "words"),
    [
        (
            replace(DEEPSEEK, kv_lora_rank=40, qk_pos_emb_head_dim=8),
            {"state": TrainingState(fp8_format="hybrid"), "seq_length": 512},
            "columns of self_attention.linear_kv_up_proj.weight on a rank is 40, must be a multiple of 16",
        ),
        (
            replace(DEEPSEEK, qk_pos_emb_head_dim=8),
            {"state": TrainingState(fp8_format="hybrid"), "seq_length": 512},
            "rows of self_attention.linear_kv_down_proj.weight on a rank is 40, must be a multiple of 16",
        ),
        (replace(DEEPSEEK, rope_type="rope"), {"state": TrainingState(apply_rope_fusion=True)}, "rope_type is 'rope'"),
        (DEEPSEEK, {"layout": Layout(tensor_model_parallel_size=8)}, "must divide the 4 attention heads"),
    ],
)
def test_what_is_not_predicted_is_refused(model: object, others: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        Scenario.of(model, **{"num_layers": 2, "seq_length": 64} | others)
    assert "\n" not in str(refused.value)


def test_modules_that_a_model_does_not_have_are_named() -> None:
    with Lab("qwen3-moe-tiny", num_layers=1, seq_length=32, backend="simulated") as lab:
        with pytest.raises(
            ValueError, match=r"\['mla_up_proj'\], which only multi-latent attention has, and qwen3-moe"
        ):
            lab.step(recompute("mla_up_proj"))
        record = lab.step(recompute("shared_experts"), warm_up=False)
    assert record.without_effect == {"recompute_modules:shared_experts": "the model has no shared experts"}
    dense = Scenario.of("phi-4-tiny")
    with pytest.raises(ValueError, match=r"\['mla_up_proj'\], which only multi-latent attention has, and phi-4-tiny"):
        check_on_model(recompute("mla_up_proj", "moe"), dense)


def test_stages_that_do_not_divide_a_model_of_61_layers_are_those_of_the_published_recipe() -> None:
    """Megatron-Bridge, ``recipes/deepseek/deepseek_v3.py``: 16, 8 and 4 stages."""
    for stages, last in ((16, 1), (8, 5), (4, 13)):
        layout = Layout(pipeline_model_parallel_size=stages).with_shorter_last_stage(61)
        assert layout == Layout(pipeline_model_parallel_size=stages, num_layers_in_last_pipeline_stage=last)
    for unchanged in (Layout(pipeline_model_parallel_size=60), Layout(), Layout(pipeline_model_parallel_size=61)):
        assert unchanged.with_shorter_last_stage(61) == unchanged


def test_a_rank_of_the_whole_model_is_asked_for_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict deepseek-ai/DeepSeek-V3 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64"
    asked = asked_step(build_parser().parse_args(f"{words} --world-size 1024".split()))
    assert asked.scenario.layers_of_rank == (0, 1, 2, 3)
    assert asked.scenario.on_rank(1023).layers_of_rank == (60,)
    assert "16 stages do not divide its 61 layers, so the last stage has 1" in capsys.readouterr().err


@pytest.mark.parametrize("model", [pytest.param("deepseek-tiny", marks=pytest.mark.slow), "qwen2-moe-tiny"])
def test_overlapped_shared_experts_are_predicted_to_the_byte_and_change_no_value(model: str) -> None:
    small: dict[str, Any] = {"num_layers": 2, "seq_length": 32}
    overlapped = TrainingState(moe_shared_expert_overlap=True)
    with Lab(model, backend="cpu", **small) as lab:
        plain = lab.step(warm_up=False)
        lab.set_state(overlapped)
        real = lab.step(warm_up=False)
        with pytest.raises(ValueError, match="'shared_experts' with moe_shared_expert_overlap, which Megatron-Core"):
            lab.step(recompute("shared_experts"))
    with Lab(model, backend=of_the_cpu_backend(), state=overlapped, **small) as lab:
        fake = lab.step(warm_up=False)
    assert real.loss == plain.loss
    assert real.activation_peak_bytes == fake.activation_peak_bytes
    assert real.residual_bytes == fake.residual_bytes


@pytest.mark.parametrize(
    "state",
    [
        TrainingState(use_distributed_optimizer=False),
        TrainingState(lora=LoRA(rank=8, target_modules=("linear_qkv",))),
        TrainingState(),
    ],
    ids=["without the distributed optimizer", "adapters", "distributed optimizer"],
)
def test_the_gate_of_shared_experts_is_on_the_device(state: TrainingState) -> None:
    """Megatron-Core makes it on the host."""
    with Lab("qwen2-moe-tiny", backend="simulated", num_layers=1, seq_length=32, state=state) as lab:
        lab.step(warm_up=False)
        parameters = inside(lab).model.engine.live.chunk.module.named_parameters()
        assert [name for name, parameter in parameters if is_on_host(parameter)] == []


@pytest.mark.parametrize(
    ("model", "state", "words"),
    [
        ("qwen3-moe-tiny", {}, "qwen3-moe-tiny has no shared experts: leave it out"),
        ("deepseek-tiny", {"moe_token_dispatcher_type": "allgather"}, "must have alltoall by a rule of Megatron-Core"),
        ("qwen2-moe-tiny", {"lora": LoRA(rank=8)}, "adapters of shared experts, which memlab does not predict"),
        ("qwen2-moe-tiny", {"lora": LoRA(rank=8, target_modules=("linear_qkv",))}, None),
    ],
)
def test_overlapped_shared_experts_have_rules(model: str, state: dict[str, Any], words: str | None) -> None:
    layout = Layout(tensor_model_parallel_size=2)
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        Scenario.of(model, layout=layout, state=TrainingState(moe_shared_expert_overlap=True, **state))


@pytest.mark.skipif(MINOR >= 18, reason="megatron-core pads the values itself since 0.18")
def test_padded_values_of_packed_rows_by_hand() -> None:
    """A layer keeps larger values, and attention's larger output beside its first part, as Megatron-Core 0.19.2 does.

    Three layers of moonlight-16b-a3b with four sequences in a row of 4,096 tokens, stepped by 0.19.2's own code, peak
    50,479,104 bytes above 0.16.1's with the option, and as much without packing: plain and with core_attn recomputed. Of
    full recompute and mla_up_proj both differences are 98,304 bytes.
    """
    tokens, model = 64, ARCHITECTURES["deepseek-tiny"]
    keys, values = model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    job: dict[str, Any] = {
        "seq_length": tokens,
        "packed_sequences": 4,
        "backend": of_the_cpu_backend(),
        "replay": False,
    }

    def kept(*, is_padded: bool) -> int:
        peaks = []
        for num_layers in (4, 3):
            state = TrainingState(pad_packed_values=is_padded)
            with Lab("deepseek-tiny", num_layers=num_layers, state=state, **job) as lab:
                peaks.append(lab.step().peak_allocated_bytes)
        return peaks[0] - peaks[1]

    more = 2 * tokens * model.num_attention_heads * (keys - values + keys)
    assert kept(is_padded=True) - kept(is_padded=False) == more


@pytest.mark.skipif(MINOR >= 18, reason="megatron-core pads the values itself since 0.18")
def test_padded_values_change_no_loss() -> None:
    losses = []
    for is_padded in (False, True):
        state = TrainingState(pad_packed_values=is_padded)
        with Lab("deepseek-tiny", num_layers=2, seq_length=64, packed_sequences=4, backend="cpu", state=state) as lab:
            losses.append((lab.step().loss, lab.step(recompute("core_attn")).loss))
    assert losses[0] == losses[1]
    assert "pad_packed_values" in without_effect.of_scenario(Scenario.of("phi-4-tiny", state=state, packed_sequences=2))
    assert "pad_packed_values" in without_effect.of_scenario(Scenario.of("deepseek-tiny", state=state))


def test_a_megatron_core_that_pads_them_is_never_taken_for_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.engines.megatron.megatron_versions.PADS_PACKED_VALUES", True)
    job: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "packed_sequences": 4, "backend": "cpu"}
    with pytest.raises(ValueError, match="pad_packed_values is False with packed_sequences, must be True, since the"):
        Lab("deepseek-tiny", **job)
    with Lab("deepseek-tiny", **job, state=TrainingState(pad_packed_values=True)) as lab:
        assert lab.step().status == "ok"


def test_flash_attn_takes_padded_rows_of_latent_attention() -> None:
    state = TrainingState(attention_backend="flash", pad_packed_values=True)
    with pytest.raises(ValueError, match="or pack rows with pad_packed_values"):
        Scenario.of("deepseek-tiny", state=state)
    assert Scenario.of("deepseek-tiny", state=state, packed_sequences=2).state.attention_backend == "flash"
