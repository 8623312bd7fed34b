"""Estimates what a rank's GPU holds outside torch's allocator: no tensor shows it, and no CPU can measure it.

It is reported apart from predicted bytes, which come from code that ran. Two-rank jobs on H200s held 2.4 to 3.9 GiB per
rank; the estimate gives 3.0 to 3.7 GiB for them (`tests/unit/test_outside_torch.py`).
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
MOST_PEERS = 7
"""With buffers of their own: the other GPUs of a node. Over a network they are shared (``NCCL_NET_SHARED_BUFFERS``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideTorch:
    """An estimate for one rank of a job."""

    context_and_libraries_bytes: int
    nccl_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that torch cannot use."""
        return self.context_and_libraries_bytes + self.nccl_bytes

    def __str__(self) -> str:
        parts = f"{format_bytes(self.context_and_libraries_bytes)} for CUDA's context and libraries"
        nccl = f" and {format_bytes(self.nccl_bytes)} for NCCL" if self.nccl_bytes else ""
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
    return OutsideTorch(context_and_libraries_bytes=CONTEXT_AND_LIBRARIES_BYTES, nccl_bytes=rings * ring + peers * peer)
