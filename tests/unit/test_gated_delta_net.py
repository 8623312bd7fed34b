"""Gated delta net: the stand-ins for its kernels, its layers beside attention, and what Megatron-Core refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.engines.megatron.layers import gated_delta_rule
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.of_old_core import skip_if_newer_core_changed

NEXT = ARCHITECTURES["qwen3-next-tiny"]


def random_inputs(batch: int, tokens: int) -> list[torch.Tensor]:
    """Returns queries, keys, values, decays and beta of three heads."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(batch, tokens, 3, channels, generator=generator) for channels in (16, 16, 32)]
    narrow = [torch.rand(batch, tokens, 3, generator=generator) for _ in range(2)]
    rows = [torch.nn.functional.normalize(each, dim=-1) for each in wide[:2]]
    return [each.requires_grad_() for each in (*rows, wide[2], -narrow[0], narrow[1])]


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The rule, token by token (https://arxiv.org/abs/2412.06464, equation 10)."""
    state, outputs = query.new_zeros(query.shape[0], 3, 16, 32), []
    for token in range(query.shape[1]):
        state = state * decay[:, token, :, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", key[:, token], state)
        change = beta[:, token, :, None] * (value[:, token] - known)
        state = state + key[:, token].unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, token] / 4, state))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("tokens", [64, 150])
def test_the_rule_and_its_gradients_are_those_of_the_recurrence(tokens: int) -> None:
    inputs = random_inputs(2, tokens)
    output, _ = gated_delta_rule.chunk_gated_delta_rule(*inputs[:3], g=inputs[3], beta=inputs[4])
    expected = recurrence(*inputs)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    own, others = (torch.autograd.grad(each, inputs, grad) for each in (output, expected))
    for ours, theirs in zip(own, others, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_rows_get_the_length_of_1_and_gates_multiply() -> None:
    rows = random_inputs(1, 5)[2]
    gate = random_inputs(2, 5)[2][1:]
    grad = torch.ones_like(rows)
    pairs = [
        (gated_delta_rule.l2norm(rows), rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
        (gated_delta_rule.gated(rows, gate, torch.sigmoid), rows * torch.sigmoid(gate)),
    ]
    for own, expected in pairs:
        torch.testing.assert_close(own, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each, rows, grad)[0] for each in (own, expected)))


def test_one_of_four_layers_has_attention() -> None:
    skip_if_newer_core_changed(NEXT)
    with Lab(NEXT, seq_length=64, backend="simulated") as lab:
        layers = inside(lab).model.engine.live.layers
        assert ["linear_qkv" in dict(layer.self_attention.named_children()) for layer in layers] == [False] * 3 + [True]
    assert [kind.has_linear_attention for kind in map(NEXT.kind_of_layer, range(8))] == ([True] * 3 + [False]) * 2
    assert NEXT.with_layers(2).num_parameters < ARCHITECTURES["qwen3-next-tiny"].num_parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, must be a multiple of linear_num_key_heads, 2"),
        ({"linear_attention_freq": None}, "linear_attention_freq is None, must be a whole number"),
        ({"linear_attention_freq": (1, 0)}, "must have 1 or 0 for each of its 4 layers"),
        ({"experimental_attention_variant": None}, "must be left out without experimental_attention_variant"),
        ({"experimental_attention_variant": "dsa"}, "must be gated_delta_net, or left out"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim is 512, must be"),
    ],
)
def test_what_no_such_model_has_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(NEXT, **change)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"packed_sequences": 2}, "packed_sequences is 2, must be left out for qwen3-next-tiny, by a rule of Megatron"),
        ({"layout": Layout(context_parallel_size=2)}, "context_parallel_size is 2, must be 1 for qwen3-next-tiny"),
        ({"layout": Layout(tensor_model_parallel_size=4)}, "must divide the 2 heads of linear keys"),
        ({"state": TrainingState(transformer_impl="local")}, "transformer_impl is 'local'"),
        ({"engine": "fsdp2"}, "family qwen3_next, which this engine does not build yet"),
    ],
)
def test_what_megatron_core_refuses_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario.of("qwen3-next-tiny", seq_length=64, **given)


@pytest.mark.slow
def test_logits_are_those_of_transformers_with_the_same_weights() -> None:
    skip_if_newer_core_changed(NEXT)
    pytest.importorskip("transformers.models.qwen3_next")
    from benchmarks.against_transformers import largest_difference

    difference, largest = largest_difference(NEXT)
    assert difference < 1e-5 * largest
