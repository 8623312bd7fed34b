"""Rows of several sequences, as Megatron takes them: one row of tokens, and the places at which its sequences end.

Attention and rotation then get tensors [tokens, heads, channels], the format ``thd``, and see each sequence by itself
(``packed_seq_params`` of ``megatron/core/transformer/attention.py``, 0.16.1 and 0.19.2). Everything else sees a row.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils._python_dispatch import _disable_current_modes

from memlab.config.scenario import Scenario


def packed_sequence_params(scenario: Scenario) -> PackedSeqParams | None:
    """Returns what Megatron's model takes beside a row; None if rows are not packed."""
    lengths = scenario.sequence_lengths
    if lengths is None:
        return None
    ends, longest = _on_device([0, *accumulate(lengths)]), max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _on_device(ends: list[int]) -> torch.Tensor:
    """Returns the places at which sequences end, int32 [sequences + 1] with a 0 in front, on the device."""
    device = torch.tensor(ends, dtype=torch.int32).cuda()
    if not device.is_meta:
        return device
    # Megatron reads these numbers (``rope_utils.py``), and a fake tensor has none. The meter sees what an operation
    # makes of real ones.
    with _disable_current_modes():
        values = torch.tensor(ends, dtype=torch.int32)
    return values * 1


def lengths_of(ends: torch.Tensor) -> list[int]:
    """Returns the lengths of the sequences that end at these places."""
    lengths: list[int] = (ends[1:] - ends[:-1]).tolist()
    return lengths


def shifted(tokens: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs, positions and labels of a row [1, tokens], each sequence by itself.

    Args:
        tokens: Of all sequences, each with one token more than its length, shape [1, tokens + sequences].
        lengths: Of the sequences.
    """
    parts = tokens[0].split([length + 1 for length in lengths])
    inputs, labels = torch.cat([part[:-1] for part in parts]), torch.cat([part[1:] for part in parts])
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
    return inputs.unsqueeze(0), positions.unsqueeze(0), labels.unsqueeze(0)
