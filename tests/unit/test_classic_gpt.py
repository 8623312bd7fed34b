"""GPT as Megatron-LM's own tests train it: LayerNorm, GELU, biases, learned positions, dropout, whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.analysis.kept import kept_by_module
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import ARCHITECTURES
from memlab.config.scenario import Scenario
from memlab.engines.megatron.layers.own_layers import OwnAttention
from memlab.engines.megatron.megatron_config import transformer_config
from tests.unit.inside import inside
from tests.unit.live import FULL, gradients_of_step, offload, recompute

pytestmark = pytest.mark.versions

GPT = ARCHITECTURES["gpt-tiny"]
TOKENS, HIDDEN, HEADS, LAYERS = 64, GPT.hidden_size, GPT.num_attention_heads, 2
DROPS = TrainingState(hidden_dropout=0.1, attention_dropout=0.1)
OWN_LAYERS = replace(DROPS, transformer_impl="local")
FUSED = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm"}


@pytest.mark.parametrize("model", [GPT, replace(GPT, gated_linear_unit=True, qk_layernorm=True)], ids=["GELU", "gated"])
def test_loss_and_gradients_are_those_of_megatron_s_own_layers(model: Any, open_lab: Callable[..., Any]) -> None:
    lab = open_lab(model, seq_length=TOKENS, dtype="fp32", micro_batch_size=2)
    expected, found = inside(lab).worker.submit(lambda: _both(lab)).result()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-6, msg=name)


def _both(lab: Lab) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    scenario, ours = lab.scenario, inside(lab).model.engine.live.chunk.module
    config = transformer_config(scenario, MemorySettings())
    local = GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=scenario.architecture.qk_layernorm
        ),
        vocab_size=scenario.architecture.vocab_size,
        max_sequence_length=scenario.architecture.max_position_embeddings,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    local.load_state_dict({_name(name): value for name, value in ours.named_parameters()}, strict=False)
    tokens = torch.randint(scenario.architecture.vocab_size, (2, TOKENS), device="cuda")
    positions = torch.arange(TOKENS, device="cuda").expand_as(tokens)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)
    losses, gradients = [], []
    for each in (local, ours):
        loss = each(tokens, positions, mask, labels=tokens).mean()
        found = torch.autograd.grad(loss, list(each.parameters()))
        losses.append(loss.item())
        gradients.append({_name(name): grad for (name, _), grad in zip(each.named_parameters(), found, strict=True)})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    return gradients[0], gradients[1]


def _name(name: str) -> str:
    """A fused norm's name, as that of the norm by itself."""
    path = name.split(".")
    if path[-1].startswith("layer_norm_"):
        return ".".join([*path[:3], FUSED[path[-2]], path[-1].removeprefix("layer_norm_")])
    return name


@pytest.mark.parametrize("backend", ["auto", pytest.param("flash", marks=pytest.mark.slow), "unfused"])
def test_settings_change_neither_loss_nor_gradients_under_dropout(backend: str, open_lab: Callable[..., Any]) -> None:
    state = replace(DROPS, attention_backend=backend)
    lab = open_lab("gpt-tiny", seq_length=TOKENS, state=state)
    loss, gradients = gradients_of_step(lab, MemorySettings())
    without = open_lab("gpt-tiny", seq_length=TOKENS)
    assert gradients_of_step(without, MemorySettings())[0] != loss
    lab = open_lab("gpt-tiny", seq_length=TOKENS, state=state)
    for settings in (FULL, recompute("core_attn"), offload("core_attn", "qkv_linear", "attn_proj")):
        other_loss, others = gradients_of_step(lab, settings)
        assert other_loss == loss, settings
        assert all(map(torch.equal, gradients, others)), settings


@pytest.mark.parametrize(
    "state", [*(replace(DROPS, attention_backend=kind) for kind in ("auto", "flash")), OWN_LAYERS], ids=str
)
def test_a_predicted_step_with_dropout_is_the_cpu_s_to_the_byte(state: TrainingState) -> None:
    steps: list[Any] = []
    for kind in ("cpu", of_the_cpu_backend()):
        with Lab("gpt-tiny", num_layers=LAYERS, seq_length=TOKENS, state=state, backend=kind) as lab:
            steps.append([lab.step(each) for each in (MemorySettings(), FULL, recompute("core_attn"))])
    for real, fake in zip(*steps, strict=True):
        assert real.activation_peak_bytes == fake.activation_peak_bytes
        assert real.recomputed_bytes == fake.recomputed_bytes


def test_megatron_s_own_attention_computes_what_it_does_without_apex_and_keeps_its_buffer() -> None:
    """Its softmax is Apex' kernel there; megatron-core's own in torch has the same mask and values."""
    scenario = Scenario.of("gpt-tiny", seq_length=TOKENS, state=OWN_LAYERS)
    with Lab(scenario, backend="cpu") as lab:
        lab.step()

        def both() -> tuple[torch.Tensor, torch.Tensor, int]:
            config = transformer_config(scenario, MemorySettings())
            generator = torch.Generator().manual_seed(0)
            shape = (TOKENS, 2, HEADS, HIDDEN // HEADS)
            inputs = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
            named = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
            kinds = (OwnAttention, DotProductAttention)
            ours, theirs = (kind(config, **named).eval()(*inputs, None) for kind in kinds)
            buffers = parallel_state.get_global_memory_buffer().buffer.values()
            return ours, theirs, sum(buffer.nbytes for buffer in buffers)

        ours, theirs, kept = inside(lab).worker.submit(both).result()
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert kept == 2 * 2 * HEADS * TOKENS**2, "the scores of two sequences, bf16"


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("gpt-tiny", {"layout": Layout(context_parallel_size=2)}, "local' with context_parallel_size 2"),
        ("gpt-tiny", {"dtype": "fp32"}, "local' with dtype 'fp32'"),
        ("gpt-tiny", {"state": replace(OWN_LAYERS, attention_backend="flash")}, "with attention_backend 'flash'"),
        ("gpt-tiny", {"seq_length": 8192}, "max_position_embeddings|must be a multiple of 4 from 20 to 4096"),
        ("gpt-tiny", {"seq_length": 62}, "must be a multiple of 4"),
        ("phi-4-tiny", {}, "with normalization 'RMSNorm'"),
        ("qwen3-moe-tiny", {}, "with num_moe_experts"),
        ("deepseek-tiny", {}, "with num_moe_experts"),
    ],
)
def test_own_layers_that_memlab_does_not_predict_are_refused(model: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario.of(model, **{"seq_length": TOKENS, "state": OWN_LAYERS, **change})


def _kept(**state: Any) -> int:
    with Lab(
        "gpt-tiny", num_layers=LAYERS, seq_length=TOKENS, state=TrainingState(**state), backend=of_the_cpu_backend()
    ) as lab:
        return sum(sum(kept_by_module(lab.step(), layer).values()) for layer in range(LAYERS))


def test_dropout_keeps_a_mask_of_one_byte_per_element() -> None:
    none = _kept()
    assert _kept(hidden_dropout=0.1) - none == 2 * LAYERS * TOKENS * HIDDEN
    assert _kept(attention_dropout=0.1) - none == LAYERS * 16, "the state of the kernel's random numbers"
    scores = TOKENS * TOKENS * HEADS * LAYERS
    unfused = {"attention_backend": "unfused"}
    assert _kept(attention_dropout=0.1, **unfused) - _kept(**unfused) == 3 * scores, "a mask, and bf16 a second time"


def test_without_sequence_parallelism_a_rank_keeps_what_is_between_matrices_whole() -> None:
    kept = {}
    for splits in (True, False):
        layout = Layout(tensor_model_parallel_size=2, sequence_parallel=splits)
        with Lab(GPT, num_layers=LAYERS, seq_length=TOKENS, layout=layout, backend=of_the_cpu_backend()) as lab:
            kept[splits] = kept_by_module(lab.step())
    # Two residuals and the outputs of the norms before both matrices, bf16, and of each row mean and reciprocal.
    whole = (4 * 2 * HIDDEN + 2 * 2 * 4) * TOKENS
    assert sum(kept[False].values()) - sum(kept[True].values()) == whole // 2


def test_whole_sequences_cost_what_an_all_reduce_in_place_of_the_collectives_does() -> None:
    peaks = []
    for splits in (True, False):
        layout = Layout(tensor_model_parallel_size=2, sequence_parallel=splits)
        with Lab("llama-3.1-8b", num_layers=2, seq_length=4096, layout=layout, backend="simulated") as lab:
            peaks.append(lab.step().peak_allocated_bytes)
    assert peaks[1] - peaks[0] == 134_258_688


def test_a_word_of_a_layout_says_that_sequences_are_whole() -> None:
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=False, data_parallel_size=2)
    assert str(layout) == "TP2 SP0 DP2" and Layout.from_text(str(layout)) == layout


def test_a_choice_about_sequences_outlives_a_single_tensor_parallel_rank() -> None:
    one = Layout(sequence_parallel=False)
    assert (one.sequence_parallel, one.has_whole_sequences, str(one)) == (False, False, "one rank")
    assert str(replace(one, tensor_model_parallel_size=2)) == "TP2 SP0"
    Scenario.of("qwen3-moe-tiny", num_layers=1, seq_length=64, layout=one)  # experts need it on several ranks alone


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("gpt-tiny", {"seq_length": 2048}, "at most max_position_embeddings of gpt-tiny, 1024"),
        ("gpt-tiny", {"state": TrainingState(fp8_format="hybrid")}, "does not predict in FP8"),
        ("gpt-tiny", {"state": DROPS, "packed_sequences": 2, "backend": "cpu"}, "with packed_sequences 2"),
        (replace(GPT, add_bias_linear=False), {}, "bias_activation_fusion is True, must be False"),
        (
            "qwen3-moe-tiny",
            {"layout": Layout(tensor_model_parallel_size=2, sequence_parallel=False)},
            "does not train without it",
        ),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lab(model, **{"num_layers": LAYERS, "seq_length": TOKENS, "backend": "simulated", **options})


def test_megatron_never_ends_the_backward_pass_of_a_recomputed_mlp_with_biases(open_lab: Callable[..., Any]) -> None:
    lab = open_lab(GPT, seq_length=TOKENS)
    with pytest.raises(ValueError, match="never ends there: leave 'mlp' out"):
        lab.step(recompute("mlp"))
    mlp = inside(lab).model.engine.live.layers[0].mlp

    def is_leaf_after_checkpoint() -> bool:
        inputs = torch.ones(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        checkpoint(mlp, False, inputs)
        return bool(mlp.linear_fc2.bias.is_leaf)

    assert not inside(lab).worker.submit(is_leaf_after_checkpoint).result(), "backward would enter the checkpoint again"


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        ("qwen3-moe-tiny", {"gated_linear_unit": False}, "gated_linear_unit is False, must be True"),
        ("qwen3-moe-tiny", {"activation_func_clamp_value": 7.0}, "without quick_geglu, must be left out"),
        ("qwen3-moe-tiny", {"glu_linear_offset": 1.0}, "without quick_geglu, must be 0"),
        (
            "qwen3-moe-tiny",
            {"quick_geglu": True, "moe_layer_freq": (0, 1, 1, 1)},
            "must be left out for a model with dense",
        ),
        ("qwen2-moe-tiny", {"add_bias_linear": True}, "add_bias_linear is True with moe_shared_expert"),
        ("deepseek-tiny", {"softmax_type": "learnable"}, "memlab has in grouped-query attention only"),
        ("phi-4-tiny", {"softmax_type": "off-by-one"}, "must be one of vanilla, learnable"),
        ("phi-4-tiny", {"window_size": (15, 3)}, "must be a number of tokens and 0"),
        ("phi-4-tiny", {"window_attn_skip_freq": (1, 0)}, "must have 1 or 0 for each of its 4 layers"),
    ],
)
def test_what_memlab_s_layers_do_not_have_is_refused(model: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(ARCHITECTURES[model], **values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": Layout(context_parallel_size=2)}, "choose cp_comm_type a2a, or context_parallel_size 1"),
        ({"state": TrainingState(attention_backend="flash")}, "Transformer Engine has no such kernel of flash-attn"),
        ({"state": TrainingState(attention_backend="unfused")}, "memlab does not predict it with this backend"),
    ],
)
def test_sinks_need_the_fused_kernel(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario.of("gpt-oss-tiny", **change)


def test_gelu_without_biases_keeps_its_input_and_its_output() -> None:
    model = replace(GPT, add_bias_linear=False)
    with Lab(
        model, num_layers=1, seq_length=TOKENS, state=TrainingState(bias_activation_fusion=False), backend="simulated"
    ) as lab:
        assert lab.step().status == "ok"
