"""Packed sequences: the numbers of the same sequences in rows of their own, and the same bytes on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.attention.flash_attention import packed_flash_attention
from memlab.engines.attention.fused_attention import PackedAttention
from memlab.engines.megatron.layers.fused_rope import fused_apply_rotary_pos_emb_thd
from memlab.lab.lab import Lab
from tests.unit.live import FULL, gradients_of_step, offload

LENGTHS = (7, 1, 16)
ENDS = torch.tensor([0, 7, 8, 24], dtype=torch.int32)
HEADS, GROUPS, CHANNELS = 4, 2, 8


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def with_gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    output = function(*inputs)
    return [output, *torch.autograd.grad(output, inputs, drawn(*output.shape, seed=9).detach())]


def torchs_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    sees = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()
    heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(*heads_first, attn_mask=sees, scale=0.3, enable_gqa=True)
    return output.squeeze(0).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("attention", [PackedAttention.apply, packed_flash_attention])
def test_attention_is_torch_s_under_a_mask_that_hides_other_sequences(attention: Any) -> None:
    inputs = [drawn(24, heads, CHANNELS, seed=seed) for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    mine = with_gradients(lambda *tensors: attention(*tensors, 0.3, ENDS), *inputs)
    for one, torchs in zip(mine, with_gradients(torchs_attention, *inputs), strict=True):
        torch.testing.assert_close(one, torchs, rtol=1e-4, atol=1e-5)


def test_the_fused_rotation_begins_anew_with_each_sequence_as_megatron_s_does() -> None:
    angles = drawn(max(LENGTHS), 1, 1, 3, seed=2).detach()
    freqs, alone = torch.cat((angles, angles), dim=-1), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    inputs = drawn(24, HEADS, CHANNELS, seed=1)
    mine = with_gradients(lambda tensor: fused_apply_rotary_pos_emb_thd(tensor, ENDS, freqs), inputs)
    megatrons = with_gradients(lambda tensor: _apply_rotary_pos_emb_thd(tensor, ENDS, freqs, cp_group=alone), inputs)
    for one, other in zip(mine, megatrons, strict=True):
        torch.testing.assert_close(one, other)


FLASH = TrainingState(attention_backend="flash", apply_rope_fusion=True)


@pytest.mark.parametrize(
    ("architecture", "state"), [("qwen3-moe-tiny", TrainingState()), ("phi-4-tiny", FLASH)], ids=["moe", "dense"]
)
def test_a_packed_row_trains_as_its_sequences_do_in_rows_of_their_own(architecture: str, state: TrainingState) -> None:
    small: dict[str, Any] = {"num_layers": 2, "state": state}
    with Lab(architecture, seq_length=64, micro_batch_size=2, backend="cpu", **small) as lab:
        loss, gradients = gradients_of_step(lab, MemorySettings())
    row: dict[str, Any] = {"seq_length": 128, "packed_sequences": 2, **small}
    with Lab(architecture, backend="cpu", **row) as lab:
        on_cpu = [lab.step(), lab.step(FULL), lab.forward_only(seq_length=320)]
        packed_loss, packed_gradients = gradients_of_step(lab, MemorySettings())
        of_row = lab.scenario
        for seq_length in (100, of_row.seq_length):
            lab.set_workload(seq_length=seq_length)
        assert lab.scenario == of_row, "there and back"
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
    assert on_cpu[2].scenario.packed_sequences == 5
    with Lab(architecture, backend=of_the_cpu_backend(), **row) as lab:
        simulated = [lab.step(), lab.step(FULL), lab.forward_only(seq_length=320)]
        assert lab.step(offload("core_attn")).offloaded_bytes_by_module["core_attn"] > 0
    for real, fake in zip(on_cpu, simulated, strict=True):
        assert (real.activation_peak_bytes, real.residual_bytes) == (fake.activation_peak_bytes, fake.residual_bytes)


def test_rows_are_cut_into_about_equal_sequences_which_keep_their_length_in_other_rows() -> None:
    job = Scenario.of("phi-4-tiny", seq_length=100, packed_sequences=3)
    assert job.sequence_lengths == (34, 33, 33)
    assert job.with_tokens_of_a_row(200).packed_sequences == 6
    assert job.with_tokens_of_a_row(10).packed_sequences == 1
    assert Scenario.from_dict(job.to_dict()) == job
    for seq_length in ("200", 0, -5):
        with pytest.raises(ValueError, match=f"seq_length is {seq_length!r}, must be a whole number of at least 1"):
            job.with_tokens_of_a_row(seq_length)  # type: ignore[arg-type]


def test_each_sequence_that_ranks_share_is_padded_to_two_chunks_per_rank() -> None:
    job = Scenario.of("phi-4-tiny", seq_length=96, packed_sequences=5, layout=Layout(context_parallel_size=4))
    assert job.sequence_lengths == (24, 24, 16, 16, 16)
    assert job.with_tokens_of_a_row(192).packed_sequences == 10
    assert replace(job, packed_sequences=12).with_tokens_of_a_row(8).packed_sequences == 1


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"packed_sequences": 0}, "of at least 1"),
        ({"packed_sequences": 65}, "64"),
        ({"micro_batch_size": 2}, "share one row"),
        (
            {"packed_sequences": 17, "layout": Layout(context_parallel_size=2)},
            "17 with context_parallel_size 2, must be at most 16, so that each sequence has 4 chunks",
        ),
        ({"state": TrainingState(attention_backend="unfused")}, "choose auto, fused or flash"),
    ],
)
def test_what_cannot_be_packed_is_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Scenario.of("phi-4-tiny", **{"seq_length": 64, "packed_sequences": 2, **values})
