"""Context parallel ranks that exchange heads: what they compute together, what each keeps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlab import Lab, Layout, MemorySettings, Scenario, TrainingState
from memlab.config import without_effect
from memlab.engines.attention.all_to_all_attention import AllToAllAttention
from memlab.engines.attention.flash_attention import flash_attention
from memlab.engines.attention.fused_attention import CausalAttention
from tests.unit.ranks import on_ranks
from tests.unit.saved import saved_tensors
from tests.unit.test_context_parallel import chunks

TOKENS, HEADS, GROUPS, CHANNELS = 12, 8, 4, 8
HEADS_EXCHANGED = TrainingState(cp_comm_type="a2a")
MASKS = TrainingState(create_attention_mask_in_dataloader=True)


@pytest.mark.parametrize(
    ("ranks", "window", "has_sinks", "is_flash", "of_value"),
    [
        (2, None, False, False, CHANNELS),
        (4, None, True, False, CHANNELS),
        (2, 3, True, False, CHANNELS),
        (2, None, False, True, CHANNELS),
        (4, None, False, True, CHANNELS),
        (2, None, False, False, CHANNELS // 2),
    ],
)
def test_ranks_that_exchange_heads_compute_what_one_rank_does(
    ranks: int, window: int | None, has_sinks: bool, is_flash: bool, of_value: int
) -> None:
    """With 12 tokens or, on 4 ranks, 24; sinks are a parameter of all heads on each rank.

    flash-attn's kernel takes sequences first, and saves the state of random numbers too. In latent attention a head's
    values have fewer channels than its keys.
    """
    generator = torch.Generator().manual_seed(0)
    num_tokens = TOKENS * ranks // 2
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, of_value))
    inputs = [torch.randn(num_tokens, 2, *shape, generator=generator) for shape in shapes]
    grad = torch.randn(num_tokens, 2, HEADS * of_value, generator=generator)
    sinks = torch.randn(1, HEADS, 1, 1, generator=generator) if has_sinks else None

    def gradients(rows: list[int], attention: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[rows].clone().requires_grad_() for tensor in inputs]
        own_sinks = [] if sinks is None else [sinks.clone().requires_grad_()]
        if is_flash and attention is AllToAllAttention:
            output = flash_attention(*leaves, 0.3, 0.0, *arguments, exchanges_heads=True)
        else:
            output = attention.apply(*leaves, 0.3, *arguments, window, *(own_sinks or (None,)))
        return output.detach(), *torch.autograd.grad(output, [*leaves, *own_sinks], grad[rows])

    whole = gradients(list(range(num_tokens)), CausalAttention, 0.0)
    parts: dict[int, tuple[torch.Tensor, ...]] = {}
    kept: dict[int, list[int]] = {}

    def job(rank: int, group: Any) -> None:
        with saved_tensors() as saved:
            parts[rank] = gradients(chunks(ranks, rank, num_tokens), AllToAllAttention, group)
        kept[rank] = [tensor.numel() for tensor in saved]

    on_ranks(ranks, job)
    for rank in range(ranks):
        for part, all_of_it in zip(parts[rank][:4], whole[:4], strict=True):
            torch.testing.assert_close(part, all_of_it[chunks(ranks, rank, num_tokens)], rtol=1e-4, atol=1e-5)
        # Query, key, value, output and log-sum-exp of whole sequences, of a share of the heads.
        rows, heads, groups = 2 * num_tokens, HEADS // ranks, GROUPS // ranks
        keys = [rows * groups * CHANNELS, rows * groups * of_value]
        sizes = [rows * heads * CHANNELS, *keys, rows * heads * of_value, rows * heads]
        assert kept[rank] == sizes + [heads] * has_sinks + [2] * is_flash
    if has_sinks:  # each rank has the gradient of its heads over all tokens, and gathers those of the others
        for rank in range(ranks):
            torch.testing.assert_close(parts[rank][4], whole[4], rtol=1e-4, atol=1e-5)


def test_a_layer_keeps_its_output_once_more_than_a_ring() -> None:
    """Of four layers, the output of each [tokens of the rank, heads x channels] in bf16.

    The peak of SimuMax's 70B job of 12 layers on eight ranks was higher by 12 such tensors, 768 MiB, than with a ring
    (`memlab published`).
    """
    peaks = {}
    for kind in ("p2p", "a2a"):
        layout, state = Layout(context_parallel_size=2), TrainingState(cp_comm_type=kind)
        values: dict[str, Any] = {"num_layers": 4, "seq_length": 4096, "layout": layout, "state": state}
        with Lab("qwen3-dense-tiny", backend="simulated", **values) as lab:
            peaks[kind] = lab.step(MemorySettings()).activation_peak_bytes
            model = lab.scenario.architecture
    output = 2048 * model.num_attention_heads * model.kv_channels * 2
    assert peaks["a2a"] - peaks["p2p"] == 4 * output


def test_models_with_sinks_and_windows_share_sequences_only_by_exchanging_heads() -> None:
    """``get_attention_backend`` in attention/dot_product_attention/utils.py, TE 2.16.1."""
    layout = Layout(context_parallel_size=2)
    with Lab(
        "gpt-oss-tiny", num_layers=2, seq_length=256, layout=layout, state=HEADS_EXCHANGED, backend="simulated"
    ) as lab:
        assert lab.step(MemorySettings()).status == "ok"
    with pytest.raises(ValueError, match="choose cp_comm_type a2a"):
        Scenario.of("gpt-oss-tiny", seq_length=256, layout=layout)


@pytest.mark.parametrize(
    ("model", "ranks", "state", "values", "rule"),
    [
        ("qwen3-dense-tiny", 2, {}, {"packed_sequences": 2}, "with packed_sequences 2, which memlab does not predict"),
        ("qwen3-dense-tiny", 2, {}, {"dtype": "fp32"}, "with dtype 'fp32', which memlab does not predict"),
        ("qwen3-dense-tiny", 16, {}, {}, "must divide the . heads of keys"),
        (
            "deepseek-tiny",
            2,
            {"attention_backend": "flash"},
            {},
            "heads of keys have 48 channels and those of values 32",
        ),
    ],
)
def test_what_cannot_exchange_heads_is_refused(
    model: str, ranks: int, state: dict[str, Any], values: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        Scenario.of(
            model,
            seq_length=256,
            layout=Layout(context_parallel_size=ranks),
            state=TrainingState(cp_comm_type="a2a", **state),
            **values,
        )


def test_ranks_that_share_a_head_of_keys_have_none_to_exchange() -> None:
    layout = Layout(tensor_model_parallel_size=4, context_parallel_size=2)
    with pytest.raises(ValueError, match="must divide the 1 heads of keys"):
        Scenario.of("llama-3-tiny", seq_length=256, layout=layout, state=HEADS_EXCHANGED)


@pytest.mark.parametrize(
    ("state", "layout", "unread"),
    [
        (HEADS_EXCHANGED, Layout(), {"cp_comm_type"}),
        (HEADS_EXCHANGED, Layout(context_parallel_size=2), set()),
        (MASKS, Layout(pipeline_model_parallel_size=3, rank=1), {"create_attention_mask_in_dataloader"}),
        (MASKS, Layout(pipeline_model_parallel_size=3, rank=2), set()),
        (MASKS, Layout(), set()),
    ],
)
def test_what_a_rank_does_not_read_is_named(state: TrainingState, layout: Layout, unread: set[str]) -> None:
    scenario = Scenario.of("qwen3-dense-tiny", num_layers=3, seq_length=256, layout=layout, state=state)
    assert set(without_effect.of_scenario(scenario)) == unread
