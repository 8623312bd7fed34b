"""The layers without Transformer Engine: right numbers, and in memory what TE keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memlab.engines.attention.fused_attention import CausalAttention, PackedAttention
from memlab.engines.megatron.layers.compiled_activations import quick_gelu
from memlab.engines.megatron.layers.torch_functions import (
    GroupedLinear,
    Linear,
    Norm,
    NormLinear,
)
from memlab.engines.megatron.layers.torch_moe import permute_with_probs, sort_chunks_by_index_with_probs, unpermute
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

pytestmark = pytest.mark.versions


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).float().requires_grad_()
    made.fuse_wgrad_accumulation = False  # type: ignore[attr-defined]  # as a linear notes it on its weight
    return made


def assert_same_function(
    mine: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """Compares outputs and the gradients of every input under one upstream gradient."""
    mine_out, reference_out = mine(*inputs), reference(*inputs)
    torch.testing.assert_close(mine_out, reference_out, rtol=1e-4, atol=1e-5)
    upstream = values(*mine_out.shape, seed=9).detach()
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    for mine_grad, reference_grad in zip(
        torch.autograd.grad(mine_out, wanted, upstream),
        torch.autograd.grad(reference_out, wanted, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine_grad, reference_grad, rtol=1e-4, atol=1e-4)


def test_the_norm_is_torch_s_rms_norm() -> None:
    assert_same_function(
        lambda inputs, weight: Norm.apply(inputs, weight, None, 1e-5),
        lambda inputs, weight: F.rms_norm(inputs, (8,), weight, 1e-5),
        values(5, 3, 8),
        values(8, seed=1),
    )


def test_a_norm_with_a_bias_is_torch_s_layer_norm() -> None:
    inputs, norm, bias, weight = values(5, 3, 8), values(8, seed=1), values(8, seed=2), values(6, 8, seed=3)
    assert_same_function(
        lambda inputs, norm, bias: Norm.apply(inputs, norm, bias, 1e-5),
        lambda inputs, norm, bias: F.layer_norm(inputs, (8,), norm, bias, 1e-5),
        *(inputs, norm, bias),
    )
    assert_same_function(
        lambda inputs, norm, bias, weight: NormLinear.apply(inputs, norm, bias, weight, None, 1e-6),
        lambda inputs, norm, bias, weight: F.linear(F.layer_norm(inputs, (8,), norm, bias, 1e-6), weight),
        *(inputs, norm, bias, weight),
    )


def test_the_linears_are_torch_s_linear() -> None:
    inputs, norm, weight = values(5, 3, 8), values(8, seed=1), values(6, 8, seed=2)
    assert_same_function(Linear.apply, F.linear, inputs, weight)
    assert_same_function(
        lambda inputs, norm, weight: NormLinear.apply(inputs, norm, None, weight, None, 1e-6),
        lambda inputs, norm, weight: F.linear(F.rms_norm(inputs, (8,), norm, 1e-6), weight),
        inputs,
        norm,
        weight,
    )
    assert_same_function(
        lambda inputs, norm, weight, bias: NormLinear.apply(inputs, norm, None, weight, bias, 1e-6),
        lambda inputs, norm, weight, bias: F.linear(F.rms_norm(inputs, (8,), norm, 1e-6), weight, bias),
        *(inputs, norm, weight, values(6, seed=3)),
    )


@pytest.mark.parametrize("save_original_input", [False, True])
def test_the_grouped_linear_is_one_linear_for_each_expert(save_original_input: bool) -> None:
    splits = [3, 0, 4]
    assert_same_function(
        lambda inputs, *weights: GroupedLinear.apply(inputs, splits, save_original_input, *weights),
        lambda inputs, *weights: torch.cat(
            [F.linear(part, weight) for part, weight in zip(inputs.split(splits), weights, strict=True)]
        ),
        values(7, 8),
        *(values(6, 8, seed=seed) for seed in (1, 2, 3)),
    )


def test_experts_have_a_bias_each() -> None:
    splits = [3, 0, 4]

    def reference(inputs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(*each) for each in zip(inputs.split(splits), others[:3], others[3:], strict=True)])

    assert_same_function(
        lambda inputs, *others: GroupedLinear.apply(inputs, splits, False, *others),
        reference,
        values(7, 8),
        *(values(6, 8, seed=seed) for seed in (1, 2, 3)),
        *(values(6, seed=seed) for seed in (4, 5, 6)),
    )


def test_a_sink_takes_a_share_and_a_window_hides_what_is_further_back() -> None:
    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        scores = query @ key.repeat_interleave(2, 1).mT * 0.3
        distance = torch.arange(6).view(6, 1) - torch.arange(6)
        scores = scores.masked_fill((distance < 0) | (distance > 2), -torch.inf)
        with_sinks = torch.cat((scores, sinks.expand(2, 4, 6, 1)), dim=-1).softmax(-1)[..., :-1]
        return (with_sinks @ value.repeat_interleave(2, 1)).permute(2, 0, 1, 3).flatten(2)

    inputs = values(6, 2, 4, 8), values(6, 2, 2, 8, seed=1), values(6, 2, 2, 8, seed=2), values(1, 4, 1, 1, seed=3)
    assert_same_function(lambda q, k, v, sinks: CausalAttention.apply(q, k, v, 0.3, 0.0, 2, sinks), reference, *inputs)

    def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        rows = [tensor[:, 0] for tensor in (query, key, value)]
        ends = torch.tensor([0, 6, 12], dtype=torch.int32)
        attended = PackedAttention.apply(*(row.repeat(2, 1, 1) for row in rows), 0.3, ends, 2, sinks)
        return attended.unflatten(0, (2, 6)).transpose(0, 1)

    assert_same_function(
        packed,
        lambda q, k, v, sinks: reference(*(each[:, :1].repeat(1, 2, 1, 1) for each in (q, k, v)), sinks),
        *inputs,
    )


@pytest.mark.parametrize("groups", [4, 2])
def test_the_attention_is_causal_and_shares_keys_between_queries(groups: int) -> None:
    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)

    assert_same_function(
        lambda query, key, value: CausalAttention.apply(query, key, value, 0.3),
        reference,
        values(6, 2, 4, 8),
        values(6, 2, groups, 8, seed=1),
        values(6, 2, groups, 8, seed=2),
    )


def test_the_activation_of_experts_is_megatron_s() -> None:
    from megatron.core.fusions import fused_bias_geglu

    original = fused_bias_geglu.quick_gelu._torchdynamo_orig_callable  # type: ignore[attr-defined]
    assert_same_function(quick_gelu, original, values(4, 6))


def test_permuting_and_unpermuting_is_megatron_s_own_without_fusion() -> None:
    from megatron.core.transformer.moe import moe_utils

    routing_map = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)

    def fused(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        permuted, permuted_probs, row_id_map = permute_with_probs(tokens, probs, routing_map, 8)
        return unpermute(permuted * permuted_probs.unsqueeze(1), row_id_map, restore_shape=tokens.shape)

    def unfused(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        permuted, permuted_probs, order, *_ = moe_utils.permute(tokens, routing_map, probs, num_out_tokens=8)
        return moe_utils.unpermute(permuted * permuted_probs.unsqueeze(1), order, tokens.shape, routing_map=routing_map)

    assert_same_function(fused, unfused, values(4, 5), values(4, 3, seed=1))


def test_sorting_chunks_is_megatron_s_own_without_fusion() -> None:
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    sizes, order = torch.tensor([2, 3, 1]), torch.tensor([2, 0, 1])
    for part in (0, 1):
        assert_same_function(
            lambda tokens, probs, part=part: sort_chunks_by_index_with_probs(tokens, probs, sizes, order)[part],
            lambda tokens, probs, part=part: sort_chunks_by_idxs(tokens, sizes, order, probs)[part],
            *((values(6, 4), values(6).detach()) if part == 0 else (values(6, 4).detach(), values(6))),
        )


def retained_by_layer(timeline: Timeline, layer: int) -> int:
    """Device bytes born in a layer's forward that are alive when backward begins."""
    first_backward = int((timeline.phase == PHASES.index("backward")).argmax())
    head = slice(timeline.num_opening_events, first_backward)
    names = [
        name.startswith(f"decoder.layers.{layer}.") or name == f"decoder.layers.{layer}" for name in timeline.modules
    ]
    in_layer = [names[code] for code in timeline.module[head]]
    device = timeline.pool[head] == POOLS.index("device")
    return int(timeline.delta_bytes[head][device & in_layer].sum())


# Seen on an H200 (Transformer Engine 2.12.0, megatron-core 0.16.1, bf16) at 4096 tokens, by allocation address: phi-4 keeps
# 684.656 MiB a layer and Qwen3-30B-A3B 458.361 MiB, made up of these tensors. s tokens, h hidden, H heads, G groups, d channels.
def te_attention_bytes(s: int, h: int, H: int, G: int, d: int) -> int:
    stream_and_normed = 2 * s * h * 2 + 4 * s
    rope = 4 * s * d * 2
    query_key_value = 2 * s * (H + 2 * G) * d
    output_and_log_sum_exp = 2 * s * H * d + 4 * H * s
    return stream_and_normed + rope + query_key_value + output_and_log_sum_exp


def test_the_formula_gives_the_h200_s_own_figures() -> None:
    mib = 1024**2
    assert phi_layer_bytes(4096, 5120, 40, 10, 128, 17920) / mib == pytest.approx(684.656, abs=0.001)
    assert qwen_layer_bytes(4096, 2048, 32, 4, 128, 128, 8, 768) / mib == pytest.approx(458.361, abs=0.002)


def phi_layer_bytes(s: int, h: int, H: int, G: int, d: int, f: int) -> int:
    return te_attention_bytes(s, h, H, G, d) + 2 * s * h * 2 + 4 * s + 2 * s * 2 * f + 2 * s * f


def qwen_layer_bytes(s: int, h: int, H: int, G: int, d: int, E: int, k: int, f: int) -> int:
    query_and_key_norms = 2 * s * (H + G) * d + 4 * s * (H + G)
    residual_norm = 2 * s * h * 2 + 4 * s
    router = 4 * s * E + 8 * s * k + 4 * s * k + 8 * E
    dispatcher = 4 * s * E + s * E + 4 * s * (2 * E + 1) + 8 * E
    sorted_rows = 3 * 4 * s * k
    experts = 2 * s * k * h + 2 * s * k * 2 * f + 2 * s * k * f
    return (
        te_attention_bytes(s, h, H, G, d)
        + query_and_key_norms
        + residual_norm
        + router
        + dispatcher
        + sorted_rows
        + experts
    )


@pytest.mark.parametrize("family", ["phi-4-tiny", "qwen3-moe-tiny"])
def test_a_layer_retains_what_transformer_engine_retains(family: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab(family, num_layers=4)
    s, a = 128, lab.scenario.architecture
    attention = (s, a.hidden_size, a.num_attention_heads, a.num_query_groups, a.kv_channels)
    expected = (
        qwen_layer_bytes(*attention, a.num_moe_experts, a.moe_router_topk, a.moe_ffn_hidden_size)
        if a.routes
        else phi_layer_bytes(*attention, a.ffn_hidden_size)
    )
    first_step = lab.step(warm_up=False)  # nothing of an earlier step is replaced in it
    retained = retained_by_layer(first_step.timeline, 2)
    assert abs(retained - expected) <= 1024, (retained, expected)
    assert first_step.timeline.breakdown(len(first_step.timeline) - 1).keys() <= set(CATEGORIES)
