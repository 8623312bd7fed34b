"""Ulysses: ranks share each row, and exchange tokens for heads around flash-attn, as verl and SkyRL do.

``_ulysses_flash_attention_forward`` in ``verl/models/transformers/monkey_patch.py``, and ``verl/utils/ulysses.py``
(0.9.1); SkyRL has copies (a9564572). What the ranks gather of the loss, 4 bytes for each token of a row, is not here.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.meter.labels import one_kernel

_TOKENS, _HEADS = 1, 2


def part_of_row(inputs: dict[str, Any], lengths: tuple[int, ...] | None, mesh: Any) -> dict[str, Any]:
    """Returns the rank's part of a row [1, tokens] and of its positions, and the group of the ranks.

    Args:
        inputs: Of the whole row.
        lengths: Of its sequences; None is one.
    """
    tokens = inputs["input_ids"].shape[1]
    places = [torch.arange(length, device="cpu") for length in lengths or (tokens,)]
    whole = inputs | {"position_ids": torch.cat(places).unsqueeze(0).cuda()}
    own = {name: each.chunk(mesh.size(), _TOKENS)[mesh.get_local_rank()].clone() for name, each in whole.items()}
    return own | {"context_parallel_group": mesh.get_group()}


def whole_rows(tensors: tuple[torch.Tensor, ...], group: Any) -> tuple[torch.Tensor, ...]:
    """Returns query, key and value of all tokens for the rank's share of the heads.

    Args:
        tensors: Shape [batch, own tokens, heads, channels]; heads of keys are copied where there are fewer than ranks.
    """
    copies = max(group.size() // tensors[1].shape[_HEADS], 1)
    keys = (each.repeat_interleave(copies, _HEADS) if copies > 1 else each for each in tensors[1:])
    return tuple(_Exchange.apply(each, _HEADS, _TOKENS, group) for each in (tensors[0], *keys))


def own_tokens(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the output of all heads for the rank's tokens, from [batch, tokens, own heads, channels]."""
    return _Exchange.apply(output, _TOKENS, _HEADS, group)


def gathered_positions(positions: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the positions of the whole row, which each layer gathers."""
    parts = [torch.empty_like(positions) for _ in range(group.size())]
    torch.distributed.all_gather(parts, positions.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


class _Exchange(torch.autograd.Function):
    """Sends each rank its part along one dimension, and joins what arrives along another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scatter: int, gather: int, group: Any) -> torch.Tensor:
        ctx.back = gather, scatter, group
        return _exchanged(tensor, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchanged(grads[0], *ctx.back), None, None, None


def _exchanged(tensor: torch.Tensor, scatter: int, gather: int, group: Any) -> torch.Tensor:
    parts = [each.contiguous() for each in tensor.tensor_split(group.size(), scatter)]
    arrived = [torch.empty_like(parts[0]) for _ in parts]
    _send(parts, arrived, group)
    return torch.cat(arrived, gather)


@one_kernel()
def _send(parts: list[torch.Tensor], arrived: list[torch.Tensor], group: Any) -> None:
    sent = torch.stack(parts)  # gloo exchanges one tensor only
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    for own, other in zip(arrived, received, strict=True):
        own.copy_(other)
