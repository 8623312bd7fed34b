"""Buffers of DeepEP and HybridEP, by which the ``flex`` dispatcher exchanges tokens: outside torch's allocator.

A rank makes them when its first layer with experts runs; their sizes follow from the job. Read, not measured, in
DeepEP's branch hybrid-ep at 34152ae, which Megatron-Bridge 067f987d builds (``csrc/config.hpp``, ``csrc/deep_ep.cpp``,
``deep_ep/buffer.py`` and ``csrc/hybrid_ep/buffer``; DeepEP 1.2.1 has the same sizes), and in ``fused_a2a.py`` of
megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memlab.config.validation import RuleError

if TYPE_CHECKING:
    from memlab.config.scenario import Scenario

RANKS_OF_A_NODE = 8
"""That reach one another by NVLink (``NUM_MAX_NVL_PEERS`` of DeepEP). HybridEP asks the driver; more of them reach one
another in a GB200 NVL72, for example."""
_OF_DEEP_EP = {
    2: (256, (6, 6)),
    4: (256, (6, 6)),
    8: (256, (6, 6)),
    16: (288, (20, 12)),
    24: (288, (32, 8)),
    32: (288, (32, 8)),
    64: (288, (28, 20)),
    128: (560, (32, 12)),
    144: (720, (12, 8)),
    160: (720, (12, 8)),
}
"""By the number of ranks: tokens in flight of a channel by NVLink, and those that dispatch and combine send at once by
network (``get_dispatch_config`` and ``get_combine_config``)."""
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
    ranks = ranks_of_exchange(job)
    sizes = [_hybrid_ep(job, ranks_of_a_node) for ranks_of_a_node in {min(RANKS_OF_A_NODE, ranks), ranks}]
    return ExchangeBuffers(min(sizes), max(sizes))


def ranks_of_exchange(job: Scenario) -> int:
    """Returns how many ranks exchange tokens: those that share the experts and the matrices of each."""
    return job.layout.expert_model_parallel_size * job.layout.expert_tensor_size


def _sent_size(job: Scenario) -> int:
    return job.architecture.moe_latent_size or job.architecture.hidden_size


def _deep_ep(job: Scenario) -> ExchangeBuffers:
    ranks, hidden_bytes = ranks_of_exchange(job), 2 * _sent_size(job)
    channels, near = job.state.moe_deepep_num_sms // 2, min(RANKS_OF_A_NODE, ranks)
    nodes = max(ranks // RANKS_OF_A_NODE, 1)
    in_flight, at_once = _OF_DEEP_EP[ranks]
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
    ranks, hidden = ranks_of_exchange(job), _sent_size(job)
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


def check_exchange(job: Scenario) -> None:
    """Checks that Megatron-Core and the two libraries take a job with the ``flex`` dispatcher.

    Raises:
        RuleError: If not.
    """
    state, ranks = job.state, ranks_of_exchange(job)
    if state.moe_token_dispatcher_type != "flex" or not job.architecture.routes:
        return
    option, backend = "moe_token_dispatcher_type", state.moe_flex_dispatcher_backend
    if ranks == 1:
        raise RuleError(
            f"{option} is 'flex' with expert_model_parallel_size 1 and expert_tensor_parallel_size 1, must have more "
            "ranks by a rule of Megatron-Core: spread the experts, or choose alltoall",
            *(option, "expert_model_parallel_size"),
        )
    if job.dtype != "bf16":
        raise RuleError(
            f"{option} is 'flex' with dtype {job.dtype!r}, must be bf16, which DeepEP and HybridEP combine: choose "
            "bf16, or alltoall",
            *(option, "dtype"),
        )
    if backend == "hybridep":
        is_whole = ranks <= RANKS_OF_A_NODE or ranks % RANKS_OF_A_NODE == 0
        if not is_whole or _sent_size(job) % 16:
            raise RuleError(
                f"moe_flex_dispatcher_backend is 'hybridep' with {ranks} ranks that share the experts and tokens of "
                f"{_sent_size(job)} columns, must be at most {RANKS_OF_A_NODE} or a multiple of it, and a "
                "multiple of 16: choose another expert_model_parallel_size, or alltoall",
                *("moe_flex_dispatcher_backend", "expert_model_parallel_size"),
            )
        return
    if ranks not in _OF_DEEP_EP:
        raise RuleError(
            f"moe_flex_dispatcher_backend is 'deepep' with {ranks} ranks that share the experts, must be one of "
            f"{', '.join(map(str, _OF_DEEP_EP))} by a rule of DeepEP: choose another expert_model_parallel_size, "
            "hybridep, or alltoall",
            *("moe_flex_dispatcher_backend", "expert_model_parallel_size"),
        )
    if state.moe_deepep_num_sms % 2:
        raise RuleError(
            f"moe_deepep_num_sms is {state.moe_deepep_num_sms}, must be even by a rule of DeepEP: choose "
            f"{state.moe_deepep_num_sms - 1}",
            "moe_deepep_num_sms",
        )
    if state.moe_pad_expert_input_to_capacity:
        raise RuleError(
            "moe_flex_dispatcher_backend is 'deepep' with moe_pad_expert_input_to_capacity, which Megatron-Core "
            "refuses: choose hybridep, or leave it out",
            *("moe_flex_dispatcher_backend", "moe_pad_expert_input_to_capacity"),
        )


def require_no_library_for_exchange(job: Scenario) -> None:
    """Checks that a live job does not need DeepEP or HybridEP, or what memlab only predicts under FSDP2.

    Raises:
        RuleError: If it does.
    """
    state, ranks = job.state, job.layout.expert_model_parallel_size
    if job.engine == "fsdp2" and (ranks > 1 or state.attn_implementation == "te"):
        name, value = ("expert_model_parallel_size", ranks) if ranks > 1 else ("attn_implementation", "te")
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
