"""Estimates what a rank's GPU holds outside torch's allocator: no tensor shows it, and no CPU can measure it.

It is reported apart from predicted bytes, which come from code that ran. CUDA's context and the loaded kernels are
there in every process; the rest is NCCL's. Each of Megatron's groups of ranks has a communicator, NCCL allocates its
buffers when the group is first used, and groups of a single rank have one too. What each first use took was measured
in 56 jobs of plain Megatron-Core on four H200s of one host (``labs/results/h200x4_plain_megatron.jsonl``: torch 2.11,
NCCL 2.28.9, Transformer Engine 2.16.1, NVLink multicast off); a sum of these numbers lies within the stated range on
each of their 224 ranks. The groups are those of ``megatron/core/parallel_state.py``, 0.16.1.

Not measured, and not counted: NVLink multicast (NVLS), which NCCL may use by itself within a host, the buffers of a
network, and an inference engine in the same process. verl #6408 freed 7 to 9.5 GB per rank on eight H100s (TP2 PP2
DP2), with all of these but a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memlab.config.architectures import Architecture
from memlab.config.exchange_buffers import exchange_buffers
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.training_state import COMPARE_WITH_TEACHER, TrainingState
from memlab.config.user_buffers import user_buffer_bytes
from memlab.units import MIB, format_bytes

CONTEXT_BYTES = 700 * MIB
"""CUDA's context, and the kernels of torch, Transformer Engine and cuDNN, loaded when first used."""
CUBLAS_KERNELS_BYTES = 130 * MIB
"""More, where torch itself multiplies matrices: in an output layer or a router."""
CUDNN_KERNELS_BYTES = 20 * MIB
"""Less at most, where attention has flash-attn's kernels: 18 MiB in dense jobs of two H200s, in which torch's copy of
these kernels stood in for them (``labs/results/h200x2_plain_megatron.jsonl``)."""
OTHER_KERNELS_BYTES = 160 * MIB
"""More at most: versions of Transformer Engine and layers load other kernels."""
WORLD_BYTES = 770 * MIB
"""The group of all ranks, which is the first that a process uses."""
WORLD_OF_ONE_BYTES = 488 * MIB
RING_BYTES = 484 * MIB
"""A group that all-reduces, gathers or reduces and scatters: the same for two and for four ranks."""
RING_OF_ONE_BYTES = 388 * MIB
PAIR_BYTES = 196 * MIB
"""A communicator that sends and receives, without the buffers of its peers."""
SEND_BYTES, RECEIVE_BYTES = 64 * MIB, 320 * MIB
"""To and from one peer: 2 and 10 MiB for each of 32 channels (the log of NVIDIA/nccl#1685 shows them)."""
FIRST_SEND_BYTES = 62 * MIB
"""Once in a process that sends to or receives from single ranks."""
ROUNDING_BYTES = 2 * MIB
"""By which the same communicator was larger on some ranks."""
MOST_PEERS = 7
"""With buffers of their own: the other GPUs of a node. Over a network they are shared (``NCCL_NET_SHARED_BUFFERS``)."""
CONTEXT_OF_FSDP2_BYTES = 815 * MIB
"""CUDA's context and all kernels of a job of FSDP2, which has no Transformer Engine: 820 to 840 MiB in 76 jobs of plain
torch on one and two H200s (``labs/results/h200_plain_fsdp2.jsonl``, ``h200x2_plain_fsdp2.jsonl``). A single rank has no
group. More than one group was not measured."""
MEASURED_RANKS = 4
BEYOND_MEASURED_BYTES = 640 * MIB
"""More at most in a job of more ranks, or of FSDP2 of more groups, than were measured. It is an assumption, not a
measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideTorch:
    """An estimate for one rank of a job."""

    context_and_libraries_bytes: int
    nccl_bytes: int
    uncertain_bytes: int
    """How much more it may be."""
    user_buffer_bytes: int = 0
    """Transformer Engine's, with ``tp_comm_overlap``."""
    exchange_buffer_bytes: int = 0
    """DeepEP's or HybridEP's, with the ``flex`` dispatcher: at least."""

    @property
    def total_bytes(self) -> int:
        """The lower end of what torch cannot use."""
        buffers = self.user_buffer_bytes + self.exchange_buffer_bytes
        return self.context_and_libraries_bytes + self.nccl_bytes + buffers

    @property
    def most_bytes(self) -> int:
        """The upper end."""
        return self.total_bytes + self.uncertain_bytes

    def __str__(self) -> str:
        context, nccl, most = map(format_bytes, (self.context_and_libraries_bytes, self.nccl_bytes, self.most_bytes))
        buffers = f", {format_bytes(self.user_buffer_bytes)} for user buffers" if self.user_buffer_bytes else ""
        if self.exchange_buffer_bytes:
            of_experts = format_bytes(self.exchange_buffer_bytes)
            buffers += f", {of_experts} for buffers of experts on nodes of eight GPUs or more, read and not measured,"
        return (
            f"outside torch, estimated and not counted above: {context} for CUDA's context and libraries{buffers} and "
            f"{nccl} for NCCL, at most {most} in all; NVLink multicast, a network and an inference engine are not in it"
        )


def estimate_outside_torch(
    layout: Layout,
    model: Architecture | None = None,
    state: TrainingState | None = None,
    *,
    trains: bool = True,
    trains_experts: bool = True,
) -> OutsideTorch:
    """Estimates what the GPU of a rank of Megatron-Core holds outside torch's allocator.

    Args:
        model: Says whether there are experts, a bias of experts and tied embeddings, which have groups of their own.
            None: a dense model without tied embeddings, unless the layout spreads experts.
        state: Says whether there are layers of multi-token prediction, beside which the last stage has a copy of the
            embedding too, how tokens get to their experts, whether a head takes the place of the output layer, whose
            kernels attention has, and whether an FP8 recipe reduces over ranks. None: no such layers, alltoall, an
            output layer, cuDNN's kernels and bf16.
        trains: False for the process of a teacher, which reduces no gradients, and gathers the logits that it sends
            over tensor and context parallel ranks and sends them to all stages (`memlab.config.rollout.TeacherPass`).
        trains_experts: Whether experts, if there are any, have gradients: frozen ones without adapters have none.
    """
    has_experts = layout.expert_model_parallel_size > 1 or (model is not None and model.routes)
    is_last_stage = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
    has_head = state is not None and state.num_labels is not None
    # Losses that compare with a teacher reduce over tensor parallel ranks only where there are several (gkd_loss.py of
    # ms-swift 3602360, and ``LogitsKLLoss`` in modelopt/torch/distill/plugins/megatron.py, a2fbac7b).
    compares = state is not None and state.loss in COMPARE_WITH_TEACHER and not state.lm_loss_beside
    is_alone = compares and layout.tensor_model_parallel_size == 1
    has_logits = is_last_stage and not has_head and not is_alone
    balancing = _loss_of_router(model, state) if has_experts else None
    rings = _groups_that_reduce(
        layout,
        has_experts=has_experts,
        trains_experts=trains and trains_experts,
        has_logits=has_logits,
        balances_sequences=balancing in ("aux_loss", "seq_aux_loss"),
    )
    if not trains:
        rings = rings[2:]  # without those of gradients, parameters and their norm
        shares = (layout.context_parallel_size, layout.pipeline_model_parallel_size)
        rings += [size for size in shares if size > 1]
    is_tied = trains and bool(model and model.share_embeddings_and_output_weights) and not has_head
    has_copies = is_tied or (trains and bool(state and state.mtp_num_layers))
    is_at_an_end = is_last_stage or layout.pipeline_stage == 0
    if layout.pipeline_model_parallel_size > 1 and is_at_an_end and has_copies:
        rings.append(2)  # the gradients of the embedding's two copies (distributed/finalize_model_grads.py)
    has_bias = model is not None and model.moe_router_enable_expert_bias
    is_global = balancing == "global_aux_loss" and layout.ranks_of_a_stage > 1
    if has_bias or is_global or (_reduces_amaxes(state) and layout.ranks_of_a_stage > 1):
        # The bias of the experts follows the tokens of all ranks of a stage (`get_updated_expert_bias`, moe_utils.py).
        # One rank of Moonlight held 388 MiB more than one of Qwen3-30B-A3B (``h200_plain_megatron_latent.jsonl``).
        rings.append(layout.ranks_of_a_stage)
    if state is not None and state.tp_comm_overlap and layout.tensor_model_parallel_size > 1:
        # User buffers are set up over groups of their own, by Megatron's default through NCCL (`initialize_ub` in
        # ``transformer_engine/pytorch/module/base.py``, 2.16.1): one if all ranks share the matrices. Not measured.
        rings += {layout.tensor_model_parallel_size, layout.world_size}
    dispatcher = "alltoall" if state is None else state.moe_token_dispatcher_type
    sends_heads = state is not None and state.cp_comm_type == "a2a"
    pairs, sends = _pairs(layout, exchanges=dispatcher == "alltoall", sends_heads=sends_heads)
    # A job that gathers tokens was not measured. DeepEP and HybridEP exchange none by NCCL.
    most_pairs, most_sends = _pairs(layout, exchanges=dispatcher != "flex", sends_heads=sends_heads)
    nccl = WORLD_BYTES if layout.world_size > 1 else WORLD_OF_ONE_BYTES
    nccl += sum(RING_BYTES if size > 1 else RING_OF_ONE_BYTES for size in rings)
    nccl += _bytes_of_pairs(pairs, sends)
    if trains and state is not None and state.calculate_per_token_loss:
        nccl += _bytes_of_number_of_tokens(layout)
    if sends_heads and layout.context_parallel_size > 1 and model is not None and model.softmax_type == "learnable":
        # The ranks that exchange heads also gather over the same communicator where a model has sinks (gpt-oss on two
        # H200s, ``h200x2_plain_megatron_heads.jsonl``).
        nccl += RING_BYTES - PAIR_BYTES
    is_measured = layout.world_size <= MEASURED_RANKS
    absent = CUDNN_KERNELS_BYTES * (state is not None and state.attention_backend == "flash")
    return OutsideTorch(
        context_and_libraries_bytes=CONTEXT_BYTES - absent + CUBLAS_KERNELS_BYTES * (is_last_stage or has_experts),
        nccl_bytes=nccl,
        uncertain_bytes=OTHER_KERNELS_BYTES
        + absent
        + (len(rings) + 2 * pairs + 1) * ROUNDING_BYTES
        + _bytes_of_pairs(most_pairs, most_sends)
        - _bytes_of_pairs(pairs, sends)
        + BEYOND_MEASURED_BYTES * (not is_measured),
    )


def outside_torch_of(job: Scenario, *, trains: bool = True) -> OutsideTorch:
    """Estimates what the GPU of a job's rank holds outside torch's allocator, whatever the engine is.

    Args:
        job: With the rank.
        trains: As for `estimate_outside_torch`, with Megatron-Core.
    """
    exchanged = exchange_buffers(job)
    if job.engine == "megatron":
        trains_experts = job.state.lora is None or any(weight.num_experts for weight in job.weights_of_adapters())
        estimated = estimate_outside_torch(
            job.layout, job.architecture, job.state, trains=trains, trains_experts=trains_experts
        )
        return replace(
            estimated,
            user_buffer_bytes=user_buffer_bytes(job),
            exchange_buffer_bytes=exchanged.least_bytes,
            uncertain_bytes=estimated.uncertain_bytes + exchanged.most_bytes - exchanged.least_bytes,
        )
    num_groups = _num_groups_of_fsdp2(job)
    is_measured = job.layout.world_size <= MEASURED_RANKS and num_groups <= 1
    return OutsideTorch(
        context_and_libraries_bytes=CONTEXT_OF_FSDP2_BYTES,
        nccl_bytes=WORLD_BYTES + RING_BYTES * (num_groups - 1) if num_groups else 0,
        exchange_buffer_bytes=exchanged.least_bytes,
        uncertain_bytes=OTHER_KERNELS_BYTES
        + exchanged.most_bytes
        - exchanged.least_bytes
        + BEYOND_MEASURED_BYTES * (not is_measured),
    )


def _num_groups_of_fsdp2(job: Scenario) -> int:
    """Returns how many groups of more than one rank a step uses.

    There is one along each dimension of the mesh, and maybe a smaller one that gathers for backward
    (``_get_post_forward_mesh_info`` in torch's ``distributed/fsdp/_fully_shard/_fsdp_init.py``, 2.13). Ranks that share
    experts exchange tokens over one of their own, and have another one for the shards of the same experts.
    """
    state, shards, sharing = job.state, job.ranks_of_shards, job.layout.expert_model_parallel_size
    sizes = [shards, state.dp_replicate_size, job.layout.tensor_model_parallel_size]
    of_layers = state.reshard_after_forward_ranks
    if of_layers is not None and of_layers < shards and state.reshard_after_forward != "none":
        sizes.append(of_layers)
    if sharing > 1:
        sizes += [sharing, job.ranks_of_expert_shards]
    return sum(size > 1 for size in sizes)


def outside_torch_of_every_stage(job: Scenario) -> OutsideTorch:
    """Returns the estimate of the pipeline stage whose GPU holds the most outside torch."""
    firsts = range(0, job.layout.world_size, job.layout.ranks_of_a_stage)
    stages = (replace(job, layout=replace(job.layout, rank=rank)) for rank in firsts)
    return max(map(outside_torch_of, stages), key=lambda one: one.total_bytes)


def _loss_of_router(model: Architecture | None, state: TrainingState | None) -> str:
    """Returns which loss balances the experts, which decides over which ranks the router reduces.

    ``router.py`` in megatron/core/transformer/moe, 0.16.1. Without a model: its default.
    """
    if model is not None and not model.moe_aux_loss_coeff:
        return "none"
    return "aux_loss" if state is None else state.moe_router_load_balancing_type


def _groups_that_reduce(
    layout: Layout, *, has_experts: bool, trains_experts: bool, has_logits: bool, balances_sequences: bool
) -> list[int]:
    """Returns how many ranks each group has that a step of this rank reduces or gathers over."""
    tensor, context, stages = (
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.pipeline_model_parallel_size,
    )
    expert, expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_size
    groups = [layout.data_parallel_size * context, layout.world_size]  # gradients and parameters; the gradients' norm
    if tensor > 1 or has_logits:
        groups.append(tensor)  # the loss of a divided vocabulary reduces over it, even if it is one rank
    if has_experts:
        # The auxiliary loss, the numbers of tokens, and the experts' inputs where their matrices are divided.
        of_loss = tensor * context if balances_sequences else 1
        groups += [size for size in (of_loss, expert * expert_tensor, expert_tensor) if size > 1]
    if expert > 1 and trains_experts:
        groups.append(layout.world_size // (expert * expert_tensor * stages))  # gradients of experts
    return groups


def _reduces_amaxes(state: TrainingState | None) -> bool:
    """Whether a step reduces the largest values of its FP8 tensors over all ranks of a stage, if there are several.

    The recipe ``delayed`` does (`reduce_and_update_fp8_tensors` in ``transformer_engine/pytorch/quantization.py``,
    2.16.1), over the group of ``get_fp8_context`` in ``megatron/core/fp8_utils.py``, 0.16.1. The other recipes do not:
    ``tensorwise`` reduces over the tensor parallel ranks, which have a group in any case. The group was measured with
    tensor parallelism of two (``h200x2_plain_megatron_fp8.jsonl``), not with other layouts. With ``tp_only_amax_red``,
    which memlab does not read, it has only the ranks that share a sequence or matrices, so that data parallel ranks
    without these have none.
    """
    return state is not None and state.fp8_format is not None and state.fp8_recipe == "delayed"


def _bytes_of_pairs(pairs: int, sends: int) -> int:
    return pairs * PAIR_BYTES + sends * (SEND_BYTES + RECEIVE_BYTES) + bool(pairs) * FIRST_SEND_BYTES


def _bytes_of_number_of_tokens(layout: Layout) -> int:
    """Returns what the group of pipeline stages takes for the broadcast of a loss per token's number of tokens.

    See ``finalize_model_grads.py`` in megatron/core/distributed, 0.16.1. Measured with one stage, also of ranks that
    share sequences or experts, with two and four stages and with two that are interleaved
    (``h200_per_token_loss.jsonl``, ``h200x2_per_token_loss.jsonl``, ``h200x4_per_token_loss.jsonl``).
    """
    stages = layout.pipeline_model_parallel_size
    if stages == 1:
        return RING_OF_ONE_BYTES
    # Stages that send in batches do so over the group's own communicator.
    return RING_BYTES - PAIR_BYTES * (layout.virtual_pipeline_model_parallel_size == 1)


def _pairs(layout: Layout, *, exchanges: bool = True, sends_heads: bool = False) -> tuple[int, int]:
    """Returns how many communicators send to single ranks, and to how many peers they send and receive in all.

    If `exchanges`, each rank sends rows to the ranks of their experts; otherwise all gather all tokens. If
    `sends_heads`, each of the ranks that share a sequence sends to all others (measured with two ranks).

    A pipeline without virtual stages and a ring of two ranks send in batches, over the group's communicator. Otherwise
    torch makes a communicator for each direction (``ProcessGroupNCCL::send``, torch 2.11).
    """
    stages, context, expert = (
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
        layout.expert_model_parallel_size,
    )
    pairs = sends = 0
    if stages > 1 and layout.virtual_pipeline_model_parallel_size > 1:
        pairs, sends = 2, 1 + (stages > 2)
    elif stages > 1:
        pairs, sends = 1, 1 + (0 < layout.pipeline_stage < stages - 1)
    if context > 1 and sends_heads:
        pairs, sends = pairs + 1, sends + min(context - 1, MOST_PEERS)
    elif context > 1:
        pairs, sends = pairs + 1 + (context > 2), sends + 1 + (context > 2)
    if expert > 1 and exchanges:
        pairs, sends = pairs + 1, sends + min(expert - 1, MOST_PEERS)
    return pairs, sends
