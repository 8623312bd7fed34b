"""Transformer Engine's user buffers, which ``tp_comm_overlap`` allocates outside torch's allocator.

Megatron makes them when it starts, whether layers use them or not, from the sizes of the job
(``_initialize_tp_communicators``, ``megatron/training/initialize.py``, 0.16.1; Megatron-Bridge has the same in
``training/initialize.py``). Read in Transformer Engine 2.12.0 and 2.16.1: ``initialize_ub`` in
``pytorch/module/base.py``, and ``common/comm_gemm_overlap``, where ``userbuffers-host.cpp`` allocates them with
``cudaMalloc``, or, with NVLink multicast, with ``cuMemCreate``.
"""

from __future__ import annotations

from memlab.config.scenario import Scenario

GATHERS = (
    *("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
    *("qkv_dgrad", "fc1_dgrad", "proj_wgrad", "fc2_wgrad"),
)
"""User buffers that are gathered into: a byte for each element under FP8."""
SUMS = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
"""User buffers whose parts are summed: always bf16."""
METHODS = (
    dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange")
    | dict.fromkeys(("proj_fprop", "fc2_fprop"), "pipeline")
    | dict.fromkeys(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), "bulk")
    | dict.fromkeys(("proj_wgrad", "fc2_wgrad"), "external")
)
"""How each is used unless a job says another method."""
REGION_BYTES = 4 * (14_400 + 5 * 1024 + 3 * 32 * 8192)
"""Flags and pointers of all ranks (``LOCALSIZE`` in ``userbuffers-host.cpp``)."""
PAGE_BYTES = 2 * 2**20
"""The driver takes memory in pages of this size; smaller allocations of the communicator share one."""
STREAM_BYTES = 566_231
"""Of a CUDA stream; each buffer has several. A hundred took 54 MiB on an H200 with driver 580."""
_MOST_STREAMS = 3
"""On which a buffer's products are computed (``_NUM_MAX_UB_STREAMS``, ``cpp_extensions/gemm.py``)."""
_RINGS = tuple(name for name, method in METHODS.items() if method == "ring_exchange")
"""User buffers that always go from rank to rank."""


def buffer_sizes(job: Scenario) -> dict[str, int]:
    """Returns the bytes of each user buffer of a rank, by Transformer Engine's name; none without the option."""
    state, ranks = job.state, job.layout.tensor_model_parallel_size
    if not has_user_buffers(job):
        return {}
    elements = job.seq_length * job.micro_batch_size // job.layout.context_parallel_size * job.architecture.hidden_size
    sizes = dict.fromkeys(GATHERS, elements * (2 if state.fp8_format is None else 1))
    sizes |= dict.fromkeys(SUMS, elements * 2)
    for name in state.tp_comm_overlap_ring_exchange:
        sizes[name] = sizes[name] // ranks * (2 * ranks - 1)  # the parts of the other ranks arrive beside its own
    return sizes


def user_buffer_bytes(job: Scenario) -> int:
    """Returns what a rank's user buffers take of its GPU in all, with their streams.

    Two H200s had as much to 2 MiB, for 32 and 128 MiB of each buffer, in bf16 and FP8.
    """
    sizes = buffer_sizes(job)
    if not sizes:
        return 0
    pages = sum(-(-size // PAGE_BYTES) for size in (REGION_BYTES, *sizes.values())) + 1
    rings = len(_RINGS) + len(job.state.tp_comm_overlap_ring_exchange)
    # As many send as compute, and one receives; the other buffers have one that communicates.
    of_ring = 2 * min(_MOST_STREAMS, job.layout.tensor_model_parallel_size) + 1
    streams = rings * of_ring + (len(sizes) - rings) * (_MOST_STREAMS + 1)
    return pages * PAGE_BYTES + streams * STREAM_BYTES // PAGE_BYTES * PAGE_BYTES


def has_user_buffers(job: Scenario) -> bool:
    """Whether a job has user buffers."""
    return job.state.tp_comm_overlap and job.layout.tensor_model_parallel_size > 1


def uses_user_buffers(job: Scenario) -> bool:
    """Whether a matrix product of a job uses them."""
    names = ("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")
    return has_user_buffers(job) and any(getattr(job.state, f"tp_comm_{name}") for name in names)
