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
from memlab.meter.labels import one_kernel


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


def ends_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Returns the places at which sequences end, int32 [sequences + 1] with a 0 in front, on the device."""
    ends = [0, *accumulate(lengths)]
    device = torch.tensor(ends, dtype=torch.int32).cuda()
    if not device.is_meta:
        return device
    # Megatron reads these numbers (``rope_utils.py``), and a fake tensor has none. The meter sees what an operation
    # makes of real ones.
    with _disable_current_modes():
        values = torch.tensor(ends, dtype=torch.int32)
    return values * 1


@one_kernel()
def lengths_of(ends: torch.Tensor) -> list[int]:
    """Returns the lengths of the sequences that end at these places."""
    lengths: list[int] = (ends[1:] - ends[:-1]).tolist()
    return lengths


def chunks_of_rank(sequence: torch.Tensor, ranks: int, rank: int, dim: int = 0) -> torch.Tensor:
    """Returns a rank's part of a sequence under context parallelism, all of it on one rank.

    A sequence is cut into two chunks per rank. A rank has one from the front and its counterpart from the back, so that
    causal attention takes equal FLOPs on each (``get_batch_on_this_cp_rank`` in megatron/core/utils.py, and for packed
    sequences ``thd_get_partitioned_indices`` of Transformer Engine).
    """
    if ranks == 1:
        return sequence
    chunks = sequence.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


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
