"""DeepEP and HybridEP on fake tensors: the tensors that they make where the ``flex`` dispatcher exchanges tokens.

Megatron's dispatcher and its autograd functions run themselves (``token_dispatcher.py`` and ``fused_a2a.py`` in
megatron/core/transformer/moe, 0.16.1 and 0.19.2); the buffers of the two libraries, which need CUDA and NVSHMEM, are
replaced. What they allocate was read, not measured: in DeepEP's branch hybrid-ep at 34152ae, which Megatron-Bridge
067f987d builds (csrc/deep_ep.cpp; hybrid_ep.cu, executor/executor.cu and extension/permute.cu in csrc/hybrid_ep). Their
memory outside torch is in `memlab.config.exchange_buffers`.

DeepEP makes its tensors on a stream of its own, from which torch's allocator takes them, and HybridEP on the current
one. Example: 8 ranks, 4,096 tokens each, 128 experts of which a token chooses 8. A rank gets 32,768 rows for its 16
experts, which DeepEP sends as 21,800 tokens, about one and a half rows in each; HybridEP delivers the rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from memlab.backends.simulated_routing import chosen_rows
from memlab.config.communication_restrictions import RANKS_OF_A_NODE
from memlab.config.exchange_buffers import hybrid_ep_tokens
from memlab.config.routing import reached_tokens
from memlab.meter.labels import on_stream

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_EXCHANGE = "megatron.core.transformer.moe.fused_a2a"
_STREAM = 33
"""DeepEP's: torch has its streams of high priority in another pool than those that a program asks for."""
_PLACE = torch.int32
_BLOCK = 256
"""Tokens that a block of HybridEP's preprocessing has."""


@dataclass(frozen=True, slots=True)
class _Received:
    """What a rank gets in a pass through a layer."""

    rows: tuple[int, ...]
    """For each of its experts."""
    num_tokens: int
    """That go to any of them."""
    num_tokens_by_network: int
    """That the ranks with this rank's place in their nodes send to any expert of this rank's node."""


_received: ContextVar[_Received] = ContextVar("_received")
_num_sms: ContextVar[int] = ContextVar("_num_sms", default=20)


def exchange_by_deep_ep() -> dict[str, Any]:
    """Returns the replacements of what Megatron takes from DeepEP's package, and of what reads a routing's values."""
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    return {
        f"{_DISPATCHER}.MoEFlexTokenDispatcher.token_dispatch": _with_received(MoEFlexTokenDispatcher.token_dispatch),
        f"{_DISPATCHER}._DeepepManager._indices_to_multihot": _indices_to_multihot,
        # Megatron waits for an event of DeepEP's package, unless the exchange is not asynchronous.
        f"{_DISPATCHER}.fused_dispatch": _applied(fused_a2a.FusedDispatch, async_finish=False),
        f"{_DISPATCHER}.fused_combine": _applied(fused_a2a.FusedCombine, async_finish=False),
        f"{_DISPATCHER}.set_deepep_num_sms": _num_sms.set,
        f"{_DISPATCHER}.hybrid_ep_dispatch": _applied(fused_a2a.HybridEPDispatch),
        f"{_DISPATCHER}.hybrid_ep_combine": _applied(fused_a2a.HybridEPCombine),
        f"{_EXCHANGE}.get_buffer": lambda group, hidden_bytes: _DeepEp(group.size(), _num_sms.get() // 2),
        f"{_EXCHANGE}._hybrid_ep_buffer": _HybridEp(),
    }


def _applied(function: Any, **fixed: Any) -> Callable[..., Any]:
    """Returns a function that applies one of Megatron's autograd functions, whose arguments may be given by name."""
    signature = inspect.signature(function.forward)

    def apply(*args: Any, **named: Any) -> Any:
        given = signature.bind(None, *args, **named)
        given.apply_defaults()
        _ctx, *values = (given.arguments | fixed).values()
        return function.apply(*values)

    return apply


def _with_received(token_dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_chosen(dispatcher: Any, hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
        before = _received.set(_received_of(dispatcher, len(hidden_states)))
        try:
            result = token_dispatch(dispatcher, hidden_states, *args, **named)
        finally:
            _received.reset(before)
        # The graph of the probabilities, to which the manager refers until the layer's next pass, has the handle.
        manager = dispatcher._comm_manager
        vars(manager).update({f"memlab_kept_{place}": each for place, each in enumerate(manager.handle.kept)})
        return result

    return dispatch_chosen


def _received_of(dispatcher: Any, num_tokens: int) -> _Received:
    ranks = torch.distributed.get_process_group_ranks(dispatcher.tp_ep_group)
    own, place = dispatcher.local_expert_indices, dispatcher.tp_ep_group.rank()
    rows = chosen_rows(dispatcher, num_tokens)(ranks)
    config, num_own = dispatcher.config, len(own)
    first = place // RANKS_OF_A_NODE * RANKS_OF_A_NODE // dispatcher.tp_size * num_own
    of_node = range(first, min(first + RANKS_OF_A_NODE // dispatcher.tp_size * num_own, config.num_moe_experts))

    def tokens(senders: Sequence[Sequence[int]], experts: Sequence[int]) -> int:
        groups = config.moe_router_num_groups, config.moe_router_group_topk
        return sum(reached_tokens(num_tokens, each, experts, config.moe_router_topk, groups) for each in senders)

    return _Received(
        rows=tuple(sum(each[expert] for each in rows) for expert in own),
        num_tokens=tokens(rows, own),
        num_tokens_by_network=tokens(rows[place % RANKS_OF_A_NODE :: RANKS_OF_A_NODE], of_node),
    )


@dataclass(slots=True, eq=False)
class _Sent:
    """What the two libraries call the handle of a dispatch: by it, combine and both backward passes exchange again."""

    num_tokens: int
    """Of this rank."""
    num_rows: int
    """That it received: tokens by DeepEP, rows of experts by HybridEP."""
    num_choices: int
    """Columns of the probabilities: of a token's experts by DeepEP, of all experts by HybridEP."""
    kept: tuple[torch.Tensor, ...]

    def combined(self, rows: torch.Tensor, probabilities: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """Returns a row for each token, and, in the backward pass of dispatch, the gradients of its probabilities."""
        assert len(rows) == self.num_rows
        of_tokens = None
        if probabilities is not None:
            of_tokens = probabilities.new_empty((self.num_tokens, self.num_choices))
            self.kept = ()  # nothing exchanges by it again
        return rows.new_empty((self.num_tokens, rows.shape[1])), of_tokens


class _Done:
    """Of an exchange that is waited for."""

    def current_stream_wait(self) -> None:
        """Does nothing: whatever is called here has ended."""


@dataclass(frozen=True, slots=True)
class _DeepEp:
    """``deep_ep.Buffer`` of a group, within one node or between several."""

    num_ranks: int
    num_channels: int

    @property
    def _num_nodes(self) -> int:
        return -(-self.num_ranks // RANKS_OF_A_NODE)

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Returns how many of the rank's tokens go to each rank, node and expert, and to which ranks each goes."""
        with on_stream(_STREAM):
            of_ranks = indices.new_empty(self.num_ranks, dtype=_PLACE)
            of_experts = indices.new_empty(num_experts, dtype=_PLACE)
            goes_to = indices.new_empty((len(indices), self.num_ranks), dtype=torch.bool)
            of_nodes = indices.new_empty(self._num_nodes, dtype=_PLACE) if self._num_nodes > 1 else None
        return of_ranks, of_nodes, of_experts, goes_to, None

    def dispatch(
        self,
        tokens: torch.Tensor,
        *,
        handle: _Sent | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Sends each token once to every rank that has one of its experts; with a handle, in the same way again."""
        if handle is not None:
            with on_stream(_STREAM):
                again = tokens.new_empty((handle.num_rows, tokens.shape[1]))
                if self._num_nodes == 1:
                    self._places(tokens, handle.num_rows)
            return again, None, None, None, None, _Done()
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        received = _received.get()
        num_rows, num_choices = received.num_tokens, topk_idx.shape[1]
        channels = self.num_ranks, self.num_channels
        of_nodes = self._num_nodes, self.num_channels
        starts: tuple[Any, ...] = (self.num_ranks, self.num_ranks), channels
        if self._num_nodes > 1:
            starts = of_nodes, self._num_nodes, channels, self.num_ranks
        with on_stream(_STREAM):
            kept = [is_token_in_rank, *(tokens.new_empty(size, dtype=_PLACE) for size in starts)]
            rows = tokens.new_empty((num_rows, tokens.shape[1]))
            if self._num_nodes == 1:
                kept += self._places(tokens, num_rows)
            else:
                by_network = (received.num_tokens_by_network, RANKS_OF_A_NODE)
                sizes = (num_rows, 2), of_nodes, channels, (len(tokens), self._num_nodes), by_network
                kept += [tokens.new_empty(size, dtype=_PLACE) for size in sizes]
            indices = topk_idx.new_empty((num_rows, num_choices))
            probabilities = topk_weights.new_empty((num_rows, num_choices))
        sent = _Sent(len(tokens), num_rows, num_choices, tuple(kept))
        return rows, indices, probabilities, [*received.rows], sent, _Done()

    def _places(self, tokens: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """Returns a row's place at its sender, the channels' parts, and which of a rank's rows each token is."""
        sizes = (num_rows,), (self.num_ranks, self.num_channels), (len(tokens), self.num_ranks)
        return [tokens.new_empty(size, dtype=_PLACE) for size in sizes]

    def combine(
        self, rows: torch.Tensor, handle: _Sent, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, _Done]:
        """Sends every row back and sums those of a token, or the gradients of rows and of their probabilities."""
        with on_stream(_STREAM):
            return *handle.combined(rows, topk_weights), _Done()


class _HybridEp:
    """``deep_ep.HybridEPBuffer``, of any group: exchange and permutation are one, in buffers outside torch."""

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: _Sent | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Returns the rows of this rank's experts in their order, their probabilities, and how many each expert has."""
        if handle is not None:
            return hidden.new_empty((handle.num_rows, hidden.shape[1])), None, None, None, handle
        assert routing_map is not None
        assert probs is not None
        align = pad_multiple or 1
        rows = [-(-each // align) * align for each in _received.get().rows]
        kept = self._maps(routing_map, len(rows), pad_multiple or 0)
        handle = _Sent(len(hidden), sum(rows), routing_map.shape[1], kept)
        permuted = hidden.new_empty((handle.num_rows, hidden.shape[1]))
        return permuted, probs.new_empty(handle.num_rows), None, torch.tensor(rows, pin_memory=True), handle

    def _maps(self, routing_map: torch.Tensor, num_own: int, padding: int) -> tuple[torch.Tensor, ...]:
        num_tokens, num_experts = routing_map.shape
        ranks = num_experts // num_own
        nodes = -(-ranks // RANKS_OF_A_NODE)
        # Within a node it is gathered in a buffer outside torch.
        _of_all = routing_map.new_empty((ranks * num_tokens, num_experts)) if nodes > 1 else None
        new = routing_map.new_empty
        places = new((nodes * num_tokens, ranks // nodes), dtype=_PLACE)
        between_nodes = [new((-(-num_tokens // 16) * 16, nodes))]
        if nodes > 1:
            between_nodes.append(new((num_tokens, nodes - 1)))
        of_own = new((ranks * num_tokens, num_own))
        most = ranks * hybrid_ep_tokens(num_tokens)
        row_id_map = new((most + padding, num_own), dtype=_PLACE)
        blocks = -(-most // _BLOCK)
        _sums = new((blocks, num_own), dtype=_PLACE), new((-(-blocks // _BLOCK), num_own), dtype=_PLACE)
        return places, *between_nodes, of_own, row_id_map

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, handle: _Sent, probs: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums the rows of each token, or the gradients of rows and of their probabilities."""
        return handle.combined(hidden, probs)


def _indices_to_multihot(
    manager: Any, indices: torch.Tensor, probabilities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the method of Megatron's ``_DeepepManager``, of whose masks fake tensors do not know the rows."""
    num_rows = int(manager.tokens_per_expert.sum())
    return _Multihot.apply(probabilities, indices, manager.num_local_experts, num_rows)


class _Multihot(torch.autograd.Function):
    """Saves what autograd saves of Megatron's assignments, and has the larger ones of their temporary tensors.

    Read in torch 2.11: an index that is a mask becomes the places of its elements first, two in int64 for each.
    """

    @staticmethod
    def forward(
        ctx: Any, probabilities: torch.Tensor, indices: torch.Tensor, num_own: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = (len(indices), num_own)
        routing_map = indices.new_empty(size)
        own = probabilities.new_empty(size)
        mask = indices != -1
        _places = indices.new_empty((num_rows, 2))
        experts = indices.new_empty(num_rows)
        del _places
        _counts, _numbers = indices.new_empty(len(indices)), indices.new_empty(len(indices))
        tokens = indices.new_empty(num_rows)
        del _counts, _numbers
        _places, _values = indices.new_empty((num_rows, 2)), probabilities.new_empty(num_rows)
        ctx.save_for_backward(mask, tokens, experts)
        ctx.mark_non_differentiable(result := routing_map.bool())
        return result, own

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        mask, tokens, _experts = ctx.saved_tensors
        grad = grads[1]
        _of_rows = grad.new_empty(len(tokens))
        result = grad.new_empty(mask.shape)
        _places = tokens.new_empty((len(tokens), 2))
        _sorted = [tokens.new_empty(len(tokens)) for _ in range(4)]
        return result, None, None, None
