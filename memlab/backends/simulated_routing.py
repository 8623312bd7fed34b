"""MoE dispatchers that count the tokens of a chosen routing, since fake tensors have no values to route by.

Everything after the counts is Megatron's own arithmetic on small real tensors
(``megatron/core/transformer/moe/token_dispatcher.py``, 0.16.1 and 0.19.2: ``MoEAlltoAllTokenDispatcher.preprocess``,
and ``MoEAllGatherTokenDispatcher.dispatch_postprocess``).

Example: 4 tokens, 3 experts, 2 experts per token. ``preprocess`` reads only the map's size and the sum over its tokens,
which is how many of the 8 routed rows each expert gets: in a balanced routing [3, 2, 3].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.config.routing import Routing
from memlab.engines.megatron.layers.unfused_permutation import selecting_own_rows
from memlab.upstream.patching import patched

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_MOST_COUNTS = 2**14
"""How many results of `_counts` are kept, each for one rank, layer and micro-batch. Recompute and later steps read a
step's results again: with 94 layers, 16 ranks and 8 micro-batches there are 12,032. For 128 experts, one takes 3 ms to
compute and at most 5 KB to keep, so all take 80 MB."""


def chosen_routing() -> dict[str, Any]:
    """Returns the replacements of what reads a routing's values."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

    gathering = MoEAllGatherTokenDispatcher.dispatch_postprocess
    return {
        f"{_MODULE}.MoEAlltoAllTokenDispatcher.preprocess": _with_chosen_map(MoEAlltoAllTokenDispatcher.preprocess),
        f"{_MODULE}.MoEAllGatherTokenDispatcher.dispatch_postprocess": selecting_own_rows(gathering, _chosen_counts),
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
        rows_of = chosen_rows(dispatcher, len(routing_map))

        def counts_of(ranks: Sequence[int]) -> torch.Tensor:
            """Returns the rows that each rank sends to each expert, int64 [ranks * experts]."""
            return _made_on_device(_on_host(rows_of(ranks)).flatten())

        def gather(counts: torch.Tensor, group: Any) -> torch.Tensor:
            return counts_of(torch.distributed.get_process_group_ranks(group))

        with patched({f"{_MODULE}.gather_from_sequence_parallel_region": gather}):
            return preprocess(dispatcher, _ChosenMap(len(routing_map), counts_of([torch.distributed.get_rank()])))

    return preprocess_chosen


def _chosen_counts(dispatcher: Any, own_map: torch.Tensor) -> torch.Tensor:
    """Returns how many tokens of all ranks each expert of this rank gets, on the host."""
    ranks = torch.distributed.get_process_group_ranks(dispatcher.tp_ep_group)
    own = dispatcher.local_expert_indices
    rows = chosen_rows(dispatcher, len(own_map) // len(ranks))(ranks)
    counts = _on_host([[each[expert] for expert in own] for each in rows]).sum(dim=0)
    _made_on_device(counts)
    return counts


def chosen_rows(dispatcher: Any, num_tokens: int) -> Callable[[Sequence[int]], list[list[int]]]:
    """Returns what says how many of a pass's tokens each expert gets, of each of some ranks; one pass begins."""
    config = dispatcher.config
    routing, num_experts, topk = config.memlab_routing.routing, config.num_moe_experts, config.moe_router_topk
    differs = routing.kind in ("random", "counts")
    layer, microbatch = config.memlab_routing.of_pass(dispatcher) if differs else (0, 0)
    factor = config.moe_expert_capacity_factor
    # ``apply_router_token_dropping`` (megatron/core/transformer/moe/moe_utils.py, 0.16.1).
    capacity = num_tokens if factor is None else min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))

    def rows_of(ranks: Sequence[int]) -> list[list[int]]:
        if config.moe_pad_expert_input_to_capacity:
            return [[capacity] * num_experts for _ in ranks]
        chosen = [_counts(routing, num_tokens, num_experts, topk, rank, layer, microbatch) for rank in ranks]
        # Seldom is one too long, and there are as many as experts of all ranks in each pass.
        return [each if max(each) <= capacity else [min(rows, capacity) for rows in each] for each in chosen]

    return rows_of


def _on_host(rows: list[list[int]]) -> torch.Tensor:
    with _disable_current_modes():
        return torch.tensor(rows)


def _made_on_device(counts: torch.Tensor) -> torch.Tensor:
    """Returns a copy, whose bytes the meter counts: it sees only results of operations, as of one on a GPU."""
    return counts * 1


@lru_cache(maxsize=_MOST_COUNTS)
def _counts(
    routing: Routing, num_tokens: int, num_experts: int, topk: int, rank: int, layer: int, microbatch: int
) -> list[int]:
    return routing.tokens_per_expert(num_tokens, num_experts, topk, rank, layer=layer, microbatch=microbatch)
