"""Estimates what a rank's GPU holds outside torch's allocator: no tensor shows it, and no CPU can measure it.

It is reported apart from predicted bytes, which come from code that ran. Two-rank jobs on H200s held 2.4 to 3.9 GiB per
rank; the estimate gives 3.0 to 3.7 GiB for them (`tests/unit/test_outside_torch.py`).

The most that NCCL is likely to take is counted by communicators: each of Megatron's groups that a step uses has one,
and ``benchmarks/nccl_memory.py`` measured what one takes. NCCL 2.28.9 on two H200s, NVLink multicast (NVLS) off, in MiB
(``labs/results/h200_nccl.json``): 484 to 486 for an all-reduce, all-gather or reduce-scatter, 580 to 582 for an
all-to-all or a send to one other rank, 870 for both in one communicator, and 352 once, in the first of a process. More
is possible: verl #6408 freed 7 to 9.5 GB per rank on eight H100s (TP2 PP2 DP2), with NVLS and the communicators of the
inference engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlab.config.layout import Layout
from memlab.units import MIB, format_bytes

CONTEXT_AND_LIBRARIES_BYTES = 2508 * MIB
"""CUDA's context and the kernels of torch, Transformer Engine, cuBLAS and cuDNN, loaded when first used. Measured
on an H200 after two steps of Qwen3-30B-A3B on one rank: 2,498 MiB at 4 layers, 2,508 at 10 (torch 2.11, TE 2.12)."""
RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES = 10 * MIB, 2 * MIB
"""What NCCL allocates for one channel of one connection: ``NCCL_BUFFSIZE``, 4 MiB by default, for the simple protocol,
0.5 and 4.7 MiB for the two that trade space for latency, rounded to 2 MiB; seen in the log of NVIDIA/nccl#1685."""
RING_CHANNELS = 24
"""Of a collective inside a node of H100s or H200s; NCCL takes up to 32 (``MAXCHANNELS``)."""
PEER_CHANNELS = 32
"""For each rank that is sent to and received from: what NVIDIA/nccl#1685 shows for an all-to-all on 8 H100s."""
FIRST_COMMUNICATOR_BYTES = 352 * MIB
COMMUNICATOR_BYTES = 197 * MIB
"""Of each communicator, without the buffers of its channels: 485 - 288 and 581 - 384 MiB (see above)."""
MOST_PEERS = 7
"""With buffers of their own: the other GPUs of a node. Over a network they are shared (``NCCL_NET_SHARED_BUFFERS``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideTorch:
    """An estimate for one rank of a job."""

    context_and_libraries_bytes: int
    nccl_bytes: int
    most_nccl_bytes: int
    """If each group of ranks that a step uses has a communicator of its own, as large as those that were measured."""

    @property
    def total_bytes(self) -> int:
        """All that torch cannot use."""
        return self.context_and_libraries_bytes + self.nccl_bytes

    @property
    def most_bytes(self) -> int:
        """As `total_bytes`, with the most that NCCL is likely to take."""
        return self.context_and_libraries_bytes + self.most_nccl_bytes

    def __str__(self) -> str:
        parts = f"{format_bytes(self.context_and_libraries_bytes)} for CUDA's context and libraries"
        nccl = f" and {format_bytes(self.nccl_bytes)} for NCCL" if self.nccl_bytes else ""
        nccl += f" (at most {format_bytes(self.most_nccl_bytes)})" if nccl else ""
        return f"outside torch, estimated and not counted above: {parts}{nccl}"


def estimate_outside_torch(layout: Layout) -> OutsideTorch:
    """Estimates what a rank's GPU holds outside torch's allocator.

    Args:
        layout: Of the job; every size above 1 makes communicators, which NCCL fills when they are first used.
    """
    ring = RING_CHANNELS * (RECEIVE_BUFFER_BYTES + SEND_BUFFER_BYTES)
    # The receiver's buffer, and the sender's two: nccl#1685 counts 2 MiB twice as often as 10 MiB.
    peer = PEER_CHANNELS * (RECEIVE_BUFFER_BYTES + 2 * SEND_BUFFER_BYTES)
    rings = sum(
        (
            layout.tensor_model_parallel_size > 1,
            layout.data_parallel_size * layout.context_parallel_size > 1,  # gradients, and parameters after the step
            layout.expert_model_parallel_size * layout.expert_tensor_size > 1,  # how many tokens each expert gets
            layout.world_size > 1,  # the norm of all gradients
        )
    )
    peers = sum(
        min(size - 1, most, MOST_PEERS)
        for size, most in (
            (layout.pipeline_model_parallel_size, 2),
            (layout.context_parallel_size, 2),
            (layout.expert_model_parallel_size, MOST_PEERS),
        )
    )
    return OutsideTorch(
        context_and_libraries_bytes=CONTEXT_AND_LIBRARIES_BYTES,
        nccl_bytes=rings * ring + peers * peer,
        most_nccl_bytes=_most_nccl_bytes(layout, ring, peer),
    )


def _most_nccl_bytes(layout: Layout, ring: int, peer: int) -> int:
    """Returns what NCCL takes if every group that a step uses has a communicator.

    The groups are those that Megatron's own code used in simulated steps (``megatron/core/parallel_state.py``, 0.16.1).
    """
    if layout.world_size == 1:
        return 0
    tensor, context, pipeline = (
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.pipeline_model_parallel_size,
    )
    expert, expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_size
    has_spread_experts = expert > 1
    rings = sum(
        (
            tensor > 1,
            layout.data_parallel_size * context > 1,
            pipeline > 1,  # tied embeddings
            True,  # the norm of all gradients
            has_spread_experts,  # how many tokens each expert gets
            has_spread_experts and expert_tensor > 1,
            has_spread_experts and tensor * context > 1,  # the router's auxiliary loss
            has_spread_experts and layout.world_size > expert * expert_tensor * pipeline,  # gradients of experts
        )
    )
    sizes = [(size, most) for size, most in ((pipeline, 2), (context, 2), (expert, MOST_PEERS)) if size > 1]
    peers = sum(min(size - 1, most, MOST_PEERS) for size, most in sizes)
    communicators = rings + len(sizes)
    return FIRST_COMMUNICATOR_BYTES + communicators * COMMUNICATOR_BYTES + rings * ring + peers * peer
