"""Buffers of DeepEP and HybridEP, by which the ``flex`` dispatcher exchanges tokens: outside torch's allocator.

A rank makes them when its first layer with experts runs; their sizes follow from the job. Read, not measured, in
DeepEP's branch hybrid-ep at 34152ae, which Megatron-Bridge 067f987d builds (``csrc/config.hpp``, ``csrc/deep_ep.cpp``,
``deep_ep/buffer.py`` and ``csrc/hybrid_ep/buffer``; DeepEP 1.2.1 has the same sizes), and in ``fused_a2a.py`` of
megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.config.communication_restrictions import OF_DEEP_EP, RANKS_OF_A_NODE
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError

_IN_FLIGHT_BY_NETWORK = 128
"""Tokens of a channel, rounded up to a multiple of those that are sent at once."""
_BESIDE_A_TOKEN = 8 + 128 * (8 + 4) + 128 * 4
"""Bytes of its origin, 128 experts with their probabilities, and 128 scales."""
_WORKSPACE_BYTES = 32 * 2**20
_NVSHMEM_PAGE_BYTES = 2**29
"""NVSHMEM takes GPU memory in pages of this size (``NVSHMEM_CUMEM_GRANULARITY``, which DeepEP sets)."""
_LEAST_TOKENS, _TOKEN_BLOCK = 512, 16
_PAGE_BYTES = 2 * 2**20


class ExchangeBuffers(NamedTuple):
    """What a rank's buffers take of its GPU."""

    least_bytes: int
    most_bytes: int
    """More where NVSHMEM needs another page, or where all ranks reach one another by NVLink, not eight of them alone.
    Nodes of fewer than eight GPUs are not in it."""


def exchange_buffers(job: Scenario) -> ExchangeBuffers:
    """Returns the buffers of a job's rank; none without the ``flex`` dispatcher or without experts on its stage."""
    if job.state.moe_token_dispatcher_type != "flex" or not any(one.num_experts for one in job.weights_of_rank):
        return ExchangeBuffers(0, 0)
    if job.state.moe_flex_dispatcher_backend == "deepep":
        return _deep_ep(job)
    ranks = job.layout.ranks_of_exchange
    sizes = [_hybrid_ep(job, ranks_of_a_node) for ranks_of_a_node in {min(RANKS_OF_A_NODE, ranks), ranks}]
    return ExchangeBuffers(min(sizes), max(sizes))


def _deep_ep(job: Scenario) -> ExchangeBuffers:
    ranks, hidden_bytes = job.layout.ranks_of_exchange, 2 * job.architecture.sent_size
    channels, near = job.state.moe_deepep_num_sms // 2, min(RANKS_OF_A_NODE, ranks)
    nodes = max(ranks // RANKS_OF_A_NODE, 1)
    in_flight, at_once = OF_DEEP_EP[ranks]
    by_nvlink = channels * near * ((2 * nodes + 3) * 4 + in_flight * (hidden_bytes + _BESIDE_A_TOKEN))
    least = _pages(by_nvlink) + _WORKSPACE_BYTES
    if nodes == 1:
        return ExchangeBuffers(least, least)
    tokens = max(-(-_IN_FLIGHT_BY_NETWORK // each) * each for each in at_once)
    of_token = 2 * (hidden_bytes + _BESIDE_A_TOKEN + 16)
    by_network = channels * nodes * ((2 * RANKS_OF_A_NODE + 2) * 2 * 4 + tokens * of_token)
    least += -(-by_network // _NVSHMEM_PAGE_BYTES) * _NVSHMEM_PAGE_BYTES
    return ExchangeBuffers(least, least + _NVSHMEM_PAGE_BYTES)


def _hybrid_ep(job: Scenario, ranks_of_a_node: int) -> int:
    """Returns the buffers for the case that all tokens of all ranks go to this one."""
    ranks, hidden = job.layout.ranks_of_exchange, job.architecture.sent_size
    experts = (job.architecture.num_moe_experts or 0) * job.layout.expert_tensor_size
    tokens, scales = hybrid_ep_tokens(job.tokens_of_rank), hidden // 128
    nodes, of_node = ranks // ranks_of_a_node, experts // ranks * ranks_of_a_node
    # Received tokens and their probabilities, which dispatch and combine share, scales, and the map of all tokens.
    sizes = [ranks * tokens * each for each in (2 * hidden, 4 * of_node, 4 * scales, experts)]
    if nodes > 1:
        # The rank's own tokens; what dispatch receives, what combine sends and what it receives.
        sizes += [tokens * each for each in (2 * hidden, 4 * experts, 4 * scales)]
        sizes += [(nodes - 1) * tokens * each for each in (2 * hidden, 4 * of_node) * 3]
        sizes.append((nodes - 1) * tokens * 4 * scales)
    return sum(map(_pages, sizes))


def hybrid_ep_tokens(num_tokens: int) -> int:
    """Returns for how many tokens of a rank HybridEP makes its buffers."""
    return max(_LEAST_TOKENS, -(-num_tokens // _TOKEN_BLOCK) * _TOKEN_BLOCK)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def require_no_library_for_exchange(job: Scenario) -> None:
    """Checks that a live job does not need DeepEP or HybridEP, or what memlab only predicts under FSDP2.

    Raises:
        RuleError: If it does.
    """
    state, ranks = job.state, job.layout.expert_model_parallel_size
    values: dict[str, object] = {"expert_model_parallel_size": ranks}
    values |= {name: getattr(state, name) for name in ("attn_implementation", "linear_implementation")}
    for name, value in values.items() if job.engine == "fsdp2" else ():
        if value != "te" and (name != "expert_model_parallel_size" or value == 1):
            continue
        raise RuleError(
            f"{name} is {value!r} with engine 'fsdp2', which memlab only predicts: predict the step (memlab predict, "
            "backend 'simulated')",
            name,
        )
    if state.moe_token_dispatcher_type == "flex" and job.architecture.routes:
        raise RuleError(
            f"moe_token_dispatcher_type is 'flex', whose backend {state.moe_flex_dispatcher_backend!r} memlab only "
            "predicts: choose alltoall, or predict the step (memlab predict, backend 'simulated')",
            "moe_token_dispatcher_type",
        )
