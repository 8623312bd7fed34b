"""Context parallelism: what the ranks compute together, what each keeps, and how the loss adds up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

import memlab.lab.lab
from memlab.backends import find_backend
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.engines.attention import context_parallel, packed_context_parallel
from memlab.engines.attention.context_parallel import RingAttention
from memlab.engines.attention.flash_attention import flash_attention, packed_flash_attention
from memlab.engines.attention.fused_attention import CausalAttention, PackedAttention
from memlab.engines.attention.packed_context_parallel import PackedRingAttention
from memlab.engines.megatron import training_step
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import PHASES, POOLS
from tests.unit.ranks import on_ranks
from tests.unit.saved import saved_tensors

Tensors = dict[int, tuple[torch.Tensor, ...]]


def by_gathering(send: torch.Tensor, receive: torch.Tensor, group: Any, *, step: int) -> list[Any]:
    """Stands for `exchange`, which needs a process group that sends from rank to rank."""
    everyone = [torch.empty_like(send) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, send.contiguous(), group=group)
    receive.copy_(everyone[(group.rank() - step) % group.size()])
    return []


def chunks(ranks: int, rank: int, num_tokens: int) -> list[int]:
    """Returns the tokens of a rank."""
    size = num_tokens // (2 * ranks)
    return [*range(rank * size, (rank + 1) * size), *range((2 * ranks - 1 - rank) * size, (2 * ranks - rank) * size)]


RANDOM_STATE = 2
"""Numbers that flash-attn saves of each call, whether dropout is on or not."""


def of_flash_attn(*inputs: Any) -> torch.Tensor:
    return flash_attention(*inputs[:4], 0.0, *inputs[4:])


@pytest.mark.parametrize(
    ("attention", "ranks", "of_a_turn"),
    [(RingAttention.apply, 2, 0), (RingAttention.apply, 3, 0), (of_flash_attn, 3, RANDOM_STATE)],
)
def test_a_ring_computes_and_keeps_what_one_rank_does(
    attention: Any, ranks: int, of_a_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_parallel, "exchange", by_gathering)
    generator = torch.Generator().manual_seed(0)
    num_tokens = 12
    query, key, value = (torch.randn(num_tokens, 2, heads, 8, generator=generator) for heads in (4, 2, 2))
    grad = torch.randn(num_tokens, 2, 4 * 8, generator=generator)

    def gradients(rows: list[int], attention: Any, *group: Any) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[rows].clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*leaves, 0.3, *group)
        return output.detach(), *torch.autograd.grad(output, leaves, grad[rows])

    whole = gradients(list(range(num_tokens)), CausalAttention.apply)
    parts: Tensors = {}
    kept: dict[int, list[int]] = {}

    def job(rank: int, group: Any) -> None:
        with saved_tensors() as saved:
            parts[rank] = gradients(chunks(ranks, rank, num_tokens), attention, group)
        kept[rank] = [tensor.numel() for tensor in saved]

    on_ranks(ranks, job)
    for rank in range(ranks):
        for part, all_of_it in zip(parts[rank], whole, strict=True):
            torch.testing.assert_close(part, all_of_it[chunks(ranks, rank, num_tokens)], rtol=1e-4, atol=1e-5)
        # Query, key and value together, output, and a row's log-sum-exp: a part of what one rank alone keeps.
        rows = num_tokens // ranks * 2
        assert kept[rank] == [rows * 4 * 8, rows * 2 * 8 * 2, rows * 4 * 8, rows * 4] + [of_a_turn] * ranks * bool(
            of_a_turn
        )


LENGTHS = (24, 12, 36)


def rows_of(ranks: int, rank: int) -> list[int]:
    """Returns the places of a rank's tokens in a row of packed sequences."""
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    return [
        start + place for start, length in zip(starts, LENGTHS, strict=True) for place in chunks(ranks, rank, length)
    ]


@pytest.mark.parametrize(
    ("attention", "ranks", "of_a_turn"),
    [(PackedRingAttention.apply, 2, 0), (PackedRingAttention.apply, 3, 0), (packed_flash_attention, 3, RANDOM_STATE)],
)
def test_a_ring_of_packed_sequences_computes_and_keeps_what_one_rank_does(
    attention: Any, ranks: int, of_a_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_context_parallel, "exchange", by_gathering)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2))
    grad = torch.randn(sum(LENGTHS), 4 * 8, generator=generator)
    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)

    def gradients(rows: list[int], attention: Any, *group: Any) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[rows].clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*leaves, 0.3, ends, *group).flatten(1)
        return output.detach(), *torch.autograd.grad(output, leaves, grad[rows])

    whole = gradients(list(range(sum(LENGTHS))), PackedAttention.apply)
    parts: Tensors = {}
    kept: dict[int, list[int]] = {}

    def job(rank: int, group: Any) -> None:
        with saved_tensors() as saved:
            parts[rank] = gradients(rows_of(ranks, rank), attention, group)
        kept[rank] = [tensor.numel() for tensor in saved]

    on_ranks(ranks, job)
    for rank in range(ranks):
        for part, all_of_it in zip(parts[rank], whole, strict=True):
            torch.testing.assert_close(part, all_of_it[rows_of(ranks, rank)], rtol=1e-4, atol=1e-5)
        # Query, key and value together, output, and a row's log-sum-exp: a part of what one rank alone keeps. Besides,
        # where sequences end: on the rank, and in each turn those of queries and of keys.
        rows, places = sum(LENGTHS) // ranks, len(LENGTHS) + 1
        tensors = [rows * 4 * 8, rows * 2 * 8 * 2, rows * 4 * 8, rows * 4]
        assert kept[rank] == tensors + [places] * (1 + 2 * ranks) + [of_a_turn] * ranks * bool(of_a_turn)


def test_a_rank_takes_the_chunks_of_packed_sequences_that_megatron_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's documentation has this example: lengths 8 and 4 on two ranks (`context_parallel.py`)."""
    places = torch.tensor([[*range(8), *range(4)]])
    documented = [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    for rank, expected in enumerate(documented):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        mine = training_step.chunks_of_this_rank(places, (8, 4))
        assert mine.tolist() == [expected]
        of_megatron = [
            rope_utils._get_thd_freqs_on_this_cp_rank(rank, 2, torch.empty(length // 2), torch.arange(8))
            for length in (8, 4)
        ]
        assert mine.equal(torch.cat(of_megatron).unsqueeze(0))


def test_a_rank_takes_the_chunks_that_megatron_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.arange(48).view(2, 24)
    # 0.19 has it under a name of its own, beside other ways of cutting.
    name = "_get_batch_on_this_cp_rank_per_sequence_balancing"
    of_megatron = getattr(utils, name, None) or utils.get_batch_on_this_cp_rank
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 3)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", torch.distributed.get_rank)

    def job(rank: int, group: Any) -> None:
        mine = training_step.chunks_of_this_rank(batch)
        assert mine.equal(of_megatron({"tokens": batch}, cp_group=group)["tokens"])
        assert mine.equal(batch[:, chunks(3, rank, 24)])

    on_ranks(3, job)


def test_the_ranks_losses_are_the_whole_sequence_s() -> None:
    """Through Megatron's scaling of a micro-batch's loss and DDP's of the gradients."""
    ranks, num_microbatches = 2, 3
    values = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    whole = values.clone().requires_grad_()
    (whole.mean() / num_microbatches).backward()
    summed = torch.zeros_like(values)
    reported = []
    for rank in range(ranks):
        part = values[:, chunks(ranks, rank, 8)].clone().requires_grad_()
        with patch.object(parallel_state, "get_context_parallel_world_size", lambda: ranks):
            config = SimpleNamespace(timers=None, num_moe_experts=None, calculate_per_token_loss=False)
            loss, _ = (
                forward_step_calc_loss(
                    None,
                    part,
                    partial(training_step._reduced, TrainingState()),
                    config,
                    None,
                    False,
                    num_microbatches,
                    reported,
                    ranks,
                    True,
                ),
                None,
            )
        loss[0].backward()
        assert part.grad is not None
        summed[:, chunks(ranks, rank, 8)] = part.grad / ranks  # DDP's gradient_scaling_factor: 1 / (data x context)
    torch.testing.assert_close(summed, whole.grad)
    assert sum(reported) / ranks == pytest.approx(float(values.mean()))


def step(
    seq_length: int, packed_sequences: int | None = None, state: TrainingState | None = None, **sizes: int
) -> StepRecord:
    row: dict[str, Any] = {"seq_length": seq_length, "packed_sequences": packed_sequences, "state": state}
    with Lab("phi-4-mini", num_layers=4, layout=Layout(**sizes), backend="simulated", **row) as lab:
        return lab.step()


def test_twice_the_sequence_on_two_ranks_is_the_sequence_on_one() -> None:
    """All but the optimizer's state, which the two also share, and the angles of all positions, before they are cut."""
    alone = step(1024)
    for rank in range(2):
        record = step(2048, context_parallel_size=2, rank=rank)
        assert record.activation_peak_bytes == pytest.approx(alone.activation_peak_bytes, rel=0.002)
        for category in ("parameters", "gradients", "activations"):
            expected = pytest.approx(alone.peak_by_category[category], rel=0.002, abs=1024)  # two tensors, rounded
            assert record.peak_by_category[category] == expected
        state = record.peak_by_category["optimizer state"]
        assert state == pytest.approx(alone.peak_by_category["optimizer state"] / 2, rel=0.001)


def made_by_attention(record: StepRecord, phase: str = "forward") -> int:
    """Returns the bytes that the second layer's attention allocates in a phase."""
    timeline = record.timeline
    assert timeline is not None
    attention = timeline.modules.index("decoder.layers.1.self_attention.core_attention")
    made = (timeline.module == attention) & (timeline.phase == PHASES.index(phase)) & (timeline.delta_bytes > 0)
    return int(timeline.delta_bytes[made & (timeline.pool == POOLS.index("device"))].sum())


@pytest.fixture
def exact_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates without an allocator's rounding."""
    exact = replace(find_backend("simulated"), meter=of_the_cpu_backend().meter)
    monkeypatch.setattr(memlab.lab.lab, "find_backend", lambda name: exact)


TOKENS, FLASH = 1024, TrainingState(attention_backend="flash")
KEY, OUTPUT, LOG_SUM = 2 * TOKENS * 8 * 128, 2 * TOKENS * 24 * 128, 4 * TOKENS * 24
"""Bytes of a rank's keys, or values, of its output, or queries, and of its log-sum-exp in phi-4-mini."""


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 1)])
def test_the_ring_makes_transformer_engine_s_buffers(ranks: int, rank: int) -> None:
    """In forward, counted in context_parallel.py of 2.12.0; outputs and log-sums of a late chunk alone are halves."""
    turns = [1.0] * (rank + 1) + [0.5] * (ranks - rank - 1)
    expected = KEY + sum(turns) * (OUTPUT + LOG_SUM)
    if ranks > 1:
        expected += ranks * 2 * KEY + LOG_SUM + OUTPUT
    assert made_by_attention(step(TOKENS * ranks, context_parallel_size=ranks, rank=rank)) == expected


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 1)])
def test_the_ring_of_packed_sequences_makes_transformer_engine_s_buffers(ranks: int, rank: int) -> None:
    """In forward, counted in the format ``thd`` of the same file: halves are copies, and log-sums are copied."""
    earlier, later, sequences = rank, ranks - rank - 1, 8
    expected = KEY + ranks * 2 * KEY + OUTPUT + LOG_SUM  # the value's copy, what is passed on, and the sums
    expected += (1 + earlier) * (OUTPUT + 2 * LOG_SUM) + earlier * KEY  # all queries, and early keys and values
    expected += later * (OUTPUT + 2 * LOG_SUM + OUTPUT) // 2  # the output of late queries, and these
    expected += 4 * (sequences + 1) * (1 + 2 * ranks)  # where sequences end: on the rank, and in each turn
    assert made_by_attention(step(TOKENS * ranks, sequences, context_parallel_size=ranks, rank=rank)) == expected


@pytest.mark.usefixtures("exact_bytes")
def test_a_ring_on_flash_attn_makes_transformer_engine_s_buffers() -> None:
    """Counted in context_parallel.py of 2.12.0 and 2.16.1, which kept these bytes and had this backward peak on gloo.

    Random states are flash-attn's. In backward, each turn has ``mha_bwd``'s buffers of flash-attn 2.8.3 beside what
    cuDNN's has: the query's gradient in fp32, sums of rows, and the gradients of keys and values for each head.
    """
    ranks, rank, sequences = 4, 1, 8
    earlier, later = rank, ranks - rank - 1
    sizes: dict[str, Any] = {"state": FLASH, "context_parallel_size": ranks, "rank": rank}
    all_queries, late_queries = OUTPUT + LOG_SUM, (OUTPUT + LOG_SUM) // 2
    common = KEY + ranks * (2 * KEY + 8 * RANDOM_STATE) + LOG_SUM + OUTPUT
    common += (1 + earlier) * all_queries + later * late_queries
    record = step(TOKENS * ranks, **sizes)
    assert made_by_attention(record) == common
    copies = earlier * KEY + later * OUTPUT // 2 + 4 * (sequences + 1) * (1 + 2 * ranks)
    assert made_by_attention(step(TOKENS * ranks, sequences, **sizes)) == common + copies
    queries, keys = 1 + earlier + later / 2, 1 + earlier / 2 + later
    more = queries * (2 * OUTPUT + LOG_SUM) + keys * 2 * OUTPUT
    fused = step(TOKENS * ranks, context_parallel_size=ranks, rank=rank)
    assert made_by_attention(record, "backward") - made_by_attention(fused, "backward") == more


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("backend", ["fused", "flash"])
def test_an_exchange_of_heads_makes_transformer_engine_s_buffers(backend: Any) -> None:
    """Counted in ``flash_attn_a2a_communicate`` of 2.16.1: each tensor is sent, has arrived, and is put in order.

    In backward, flash-attn 2.8.3 has beside what cuDNN's kernel has: the query's gradient in fp32, sums of rows, and
    the gradients of keys and values for each head.
    """
    heads = TrainingState(cp_comm_type="a2a", attention_backend=backend)
    record = step(TOKENS * 2, context_parallel_size=2, state=heads)
    random_state = 8 * RANDOM_STATE if backend == "flash" else 0
    forward = KEY + 3 * (OUTPUT + 2 * KEY) + OUTPUT + LOG_SUM + 3 * OUTPUT + random_state
    assert made_by_attention(record) == forward
    kernel = OUTPUT + 2 * KEY + (2 * OUTPUT + LOG_SUM + 2 * OUTPUT if backend == "flash" else 0)
    assert made_by_attention(record, "backward") == 3 * OUTPUT + kernel + 3 * (OUTPUT + 2 * KEY)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_attention_has_no_kernel_of_flash_attn_2(ranks: int) -> None:
    """``get_attention_backend`` of Transformer Engine 2.16.1: "Disabling FlashAttention 2 as it does not support MLA".

    That is where keys and values have other sizes. In GLM-4.7-Flash both have 256 channels, which it takes.
    """
    layout = Layout(context_parallel_size=ranks)
    with pytest.raises(ValueError, match="refuses flash-attn 2 there"):
        Scenario.of("deepseek-tiny", seq_length=64, state=FLASH, layout=layout)
    for kind in ("p2p", "a2a"):
        state = replace(FLASH, cp_comm_type=kind)
        Scenario.of("glm-4.7-flash", num_layers=2, seq_length=64, state=state, layout=layout)


def test_a_packed_row_on_two_ranks_keeps_what_half_of_it_keeps_on_one() -> None:
    alone = step(1024, 8)
    for rank in range(2):
        record = step(2048, 8, context_parallel_size=2, rank=rank)
        assert record.peak_by_category["activations"] == pytest.approx(alone.peak_by_category["activations"], rel=0.002)
