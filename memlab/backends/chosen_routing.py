"""A MoE dispatcher that counts tokens in a routing that was chosen, since fake tensors have no values to route by.

Everything after the counts is Megatron's own arithmetic on small real tensors
(``megatron/core/transformer/moe/token_dispatcher.py``, 0.16.1 and 0.19.2: ``MoEAlltoAllTokenDispatcher.preprocess``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.config.routing import Routing


def chosen_routing() -> Iterator[tuple[Any, str, Any]]:
    """Yields (module, name, stand-in) for what reads a routing's values."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    yield dispatcher, "preprocess", _with_chosen_map(token_dispatcher, dispatcher.preprocess)
    yield token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu


class _ChosenMap:
    """What `preprocess` asks of a routing map [tokens, experts]."""

    def __init__(self, num_tokens: int, counts: torch.Tensor) -> None:
        self._num_tokens = num_tokens
        self._counts = counts

    def size(self, dim: int) -> int:
        assert dim == 0, "the number of tokens"
        return self._num_tokens

    def sum(self, dim: int) -> torch.Tensor:
        assert dim == 0, "over the tokens"
        return self._counts


def _with_chosen_map(token_dispatcher: Any, preprocess: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_chosen(dispatcher: Any, routing_map: torch.Tensor) -> Any:
        num_tokens, num_experts = routing_map.shape
        config = dispatcher.config

        def counts_of(ranks: Sequence[int]) -> torch.Tensor:
            rows = [
                _counts(config.memlab_routing, num_tokens, num_experts, config.moe_router_topk, rank) for rank in ranks
            ]
            with _disable_current_modes():
                values = torch.tensor(rows).flatten()
            return values * 1  # the meter sees what an operation makes

        def gather(counts: torch.Tensor, group: Any) -> torch.Tensor:
            return counts_of(torch.distributed.get_process_group_ranks(group))

        with patch.object(token_dispatcher, "gather_from_sequence_parallel_region", gather):
            return preprocess(dispatcher, _ChosenMap(num_tokens, counts_of([torch.distributed.get_rank()])))

    return preprocess_chosen


@cache
def _counts(routing: Routing, num_tokens: int, num_experts: int, topk: int, rank: int) -> list[int]:
    return routing.tokens_per_expert(num_tokens, num_experts, topk, rank)


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy().copy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
