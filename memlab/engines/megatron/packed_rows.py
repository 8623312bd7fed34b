"""Rows of several sequences, as Megatron takes them: one row of tokens, and the places at which its sequences end.

Attention and rotation then get tensors [tokens, heads, channels], the format ``thd``, and see each sequence by itself
(``packed_seq_params`` of ``megatron/core/transformer/attention.py``, 0.16.1 and 0.19.2). Everything else sees a row.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from memlab.config.scenario import Scenario
from memlab.engines.attention.packed_sequences import ends_of


def packed_sequence_params(scenario: Scenario) -> PackedSeqParams | None:
    """Returns what Megatron's model takes beside a row; None if rows are not packed."""
    lengths = scenario.sequence_lengths
    if lengths is None:
        return None
    ends, longest = ends_of(lengths), max(lengths)
    # Transformer Engine requires the places with padding where ranks share sequences. Padding counts as tokens here.
    padded = ends if scenario.layout.context_parallel_size > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


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
