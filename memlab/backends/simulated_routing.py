"""A MoE dispatcher that counts the tokens of a chosen routing, since fake tensors have no values to route by.

Everything after the counts is Megatron's own arithmetic on small real tensors
(``megatron/core/transformer/moe/token_dispatcher.py``, 0.16.1 and 0.19.2: ``MoEAlltoAllTokenDispatcher.preprocess``).

Example: 4 tokens, 3 experts, 2 experts per token. ``preprocess`` reads only the map's size and the sum over its tokens,
which is how many of the 8 routed rows each expert gets: in a balanced routing [3, 2, 3].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.config.routing import Routing
from memlab.upstream.patching import patched

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_MOST_COUNTS = 2**14
"""How many results of `_counts` are kept, each for one rank, layer and micro-batch. Recompute and later steps read a
step's results again: with 94 layers, 16 ranks and 8 micro-batches there are 12,032. For 128 experts, one takes 3 ms to
compute and at most 5 KB to keep, so all take 80 MB."""


def chosen_routing() -> dict[str, Any]:
    """Returns the replacements of what reads a routing's values."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    return {
        f"{_MODULE}.MoEAlltoAllTokenDispatcher.preprocess": _with_chosen_map(MoEAlltoAllTokenDispatcher.preprocess),
    }


class _ChosenMap:
    """What `preprocess` reads of a routing map [tokens, experts]."""

    def __init__(self, num_tokens: int, counts: torch.Tensor) -> None:
        self._num_tokens = num_tokens
        self._counts = counts

    def size(self, dim: int) -> int:
        assert dim == 0, "the number of tokens"
        return self._num_tokens

    def sum(self, dim: int) -> torch.Tensor:
        assert dim == 0, "over the tokens"
        return self._counts


def _with_chosen_map(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_chosen(dispatcher: Any, routing_map: torch.Tensor) -> Any:
        num_tokens, num_experts = routing_map.shape
        config = dispatcher.config
        routing = config.memlab_routing.routing
        differs = routing.kind in ("random", "counts")
        layer, microbatch = config.memlab_routing.of_pass(dispatcher) if differs else (0, 0)

        def counts_of(ranks: Sequence[int]) -> torch.Tensor:
            """Returns the rows that each rank sends to each expert, int64 [ranks * experts]."""
            shape = num_tokens, num_experts, config.moe_router_topk
            rows = [_counts(routing, *shape, rank, layer, microbatch) for rank in ranks]
            with _disable_current_modes():
                values = torch.tensor(rows).flatten()
            # On a GPU an operation makes the counts on the device. The product is a new tensor too, and the meter,
            # which sees only results of operations, counts its bytes.
            return values * 1

        def gather(counts: torch.Tensor, group: Any) -> torch.Tensor:
            return counts_of(torch.distributed.get_process_group_ranks(group))

        with patched({f"{_MODULE}.gather_from_sequence_parallel_region": gather}):
            return preprocess(dispatcher, _ChosenMap(num_tokens, counts_of([torch.distributed.get_rank()])))

    return preprocess_chosen


@lru_cache(maxsize=_MOST_COUNTS)
def _counts(
    routing: Routing, num_tokens: int, num_experts: int, topk: int, rank: int, layer: int, microbatch: int
) -> list[int]:
    return routing.tokens_per_expert(num_tokens, num_experts, topk, rank, layer=layer, microbatch=microbatch)
