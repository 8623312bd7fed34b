"""The workspace of cuDNN's attention in backward, as Transformer Engine calls it.

It has the queries' gradient in fp32, four bytes for each head of a token, and where several heads share a key and a
value, the gradients of these for all heads. An H200 allocated it to the byte for nine shapes (TE 2.16.1, cuDNN of torch
2.11.0+cu130, bf16, causal, without dropout); no source says what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

_BYTES_BESIDE = 256


def bytes_of_workspace(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Returns the bytes of the workspace.

    Args:
        query: Shape [sequence, batch, heads, channels].
        key: As `query`, maybe with fewer heads.
        value: As `key`, maybe with fewer channels.
    """
    of_a_channel = prod(query[:-1])  # of all tokens and heads
    of_groups = 2 * of_a_channel * (key[-1] + value[-1]) if key[2] < query[2] else 0
    return 4 * of_a_channel * (query[-1] + 1) + of_groups + _BYTES_BESIDE


def with_workspace(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Returns the backward of `fused_attention.CausalAttention` with the workspace of a GPU's kernel."""

    def beside_workspace(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        gradients = backward(ctx, *grads)
        num_bytes = bytes_of_workspace(*(gradient.shape for gradient in gradients[:3]))
        torch.empty(num_bytes, dtype=torch.uint8, device=gradients[0].device)
        return gradients

    return beside_workspace
