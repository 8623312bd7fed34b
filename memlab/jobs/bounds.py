"""How much what memlab does not model can change on one rank."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from memlab.config.parameters import bytes_of_gradient, bytes_of_optimizer, copied, kept_bytes, parameters_of_rank
from memlab.config.parts.gdn import GatedDeltaNet
from memlab.config.parts.part import FeedForward
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number
from memlab.jobs.bounds_of_fsdp2 import BOUNDS_OF_FSDP2
from memlab.jobs.environment import is_outside_torch
from memlab.jobs.frameworks.framework import NotModelled, Reading
from memlab.jobs.frameworks.keys import LANGUAGE_MODEL, PARTS_OF_MULTIMODAL_MODELS
from memlab.vocabulary import RESIDUAL_CATEGORIES

_Value = TypeVar("_Value")


def _logits(scenario: Scenario) -> int:
    """Returns the elements of a micro-batch's logits on a rank of the last stage; FSDP2's loss gathers them."""
    tokens = scenario.seq_length * scenario.micro_batch_size // scenario.layout.context_parallel_size
    return tokens * scenario.outputs_of_a_token


def _whole_loss_bytes(scenario: Scenario) -> int:
    """Returns what the log-probabilities take at most: the logits, four tensors like them in fp32, and one in bf16.

    A loss that computes them in another order takes at least the logits and two tensors in fp32, so that it differs by
    no more from one that takes a tensor in fp32 more.
    """
    return _logits(scenario) * (2 + 4 * 4) + _logits(scenario) * 2


def _whole_softmax_bytes(scenario: Scenario) -> int:
    """Returns what log-probabilities and an entropy over the whole vocabulary take beside the chosen logits.

    That is a second gradient of the logits in fp32, unless ``kl_type`` is ``forward``, three tensors of a chunk of
    1,024 tokens, and two of the chosen logits (``ChunkedDistributedGatherLogprob`` and ``ChunkedDistributedEntropy`` in
    nemo_rl/distributed/model_utils.py, NeMo-RL 7ea279ab).
    """
    chosen = _logits(scenario) // scenario.outputs_of_a_token * scenario.state.topk_logits_k
    return 4 * _logits(scenario) + 3 * 4 * 1024 * scenario.outputs_of_a_token + 2 * 4 * chosen


def _entropy_bytes(scenario: Scenario) -> int:
    """Returns what the entropy of the logits takes at most: four tensors like them, in fp32.

    These are a copy of the logits, their probabilities, and in backward the gradients of both and their sum
    (``_VocabParallelEntropy`` in verl/utils/megatron/tensor_parallel.py, main of August 2026).
    """
    return 4 * 4 * _logits(scenario)


def _entropy_of_chunk_bytes(scenario: Scenario, chunk: int = 1024) -> int:
    """Returns what SkyRL's entropy without a gradient takes, a chunk of tokens at a time.

    Log-probabilities, probabilities and their product, in fp32 (``chunked_entropy_from_logits`` in
    skyrl/backends/skyrl_train/utils/torch_utils.py, a9564572).
    """
    tokens = chunk * scenario.micro_batch_size  # of each row
    return 3 * 4 * min(tokens * scenario.outputs_of_a_token, _logits(scenario))


def _entropy_of_skyrl_bytes(scenario: Scenario) -> int:
    """Returns what SkyRL's entropy in the loss takes at most beside the log-probabilities.

    Its chunks keep their probabilities, and each of their gradients is spread over all logits before it
    is added to the others': two tensors like the logits in fp32 at the peak of backward. Where log-probabilities are
    computed whole, they need no logits in backward, but the entropy keeps them: a third one
    (``_VocabParallelEntropy`` and ``vocab_parallel_entropy_weighted_sum`` in
    skyrl/backends/skyrl_train/distributed/megatron/model_utils.py, a9564572).
    """
    return (2 + (scenario.state.logprobs_chunk_size is None)) * 4 * _logits(scenario)


def _padded_logits_bytes(scenario: Scenario) -> int:
    """Returns what four tensors like the logits take in fp32.

    Where SkyRL copies them sequence by sequence, forward has two more at most, the copy and a sequence on its way. In
    backward these are the gradients of both, a copy of one and that sequence's (``recover_left_padding``, 0.3.0): no
    more were alive at once for 1, 2 and 4 sequences.
    """
    return 4 * 4 * _logits(scenario)


def _replayed_routing_bytes(scenario: Scenario) -> int:
    """Returns what the numbers of a step's experts take, as chosen and as taken, beside those of one whole row, twice.

    verl keeps those of a rank's layers in 8 bytes each, of all micro-batches, since only backward under recompute drops
    them; before, it packs and scatters the row's of all layers (``set_router_replay_data`` in
    verl/utils/megatron/router_replay_utils.py, main of August 2026).
    """
    layers = scenario.architecture.num_routing(scenario.layers_of_rank)
    kept = scenario.tokens_of_rank * scenario.architecture.moe_router_topk * layers * scenario.num_microbatches
    return 2 * 8 * kept + 2 * _bytes_of_a_row_s_experts(scenario)


def _bytes_of_a_row_s_experts(scenario: Scenario) -> int:
    """Returns the numbers of the experts in all layers of the model, of whole rows, in 8 bytes each."""
    model = scenario.architecture
    layers = model.num_routing(range(model.num_layers))
    return 8 * scenario.micro_batch_size * scenario.seq_length * model.moe_router_topk * layers


def _taken_routing_bytes(scenario: Scenario) -> int:
    """Returns the numbers of the experts in the layers in flight, in 4 bytes each (``pop_forward`` of slime)."""
    return 4 * scenario.architecture.moe_router_topk * _routing_rows(scenario)


def _entropy_of_slime_bytes(scenario: Scenario) -> int:
    """Returns what slime's entropy takes at most beside the log-probabilities: three tensors like the logits, in fp32.

    These are the logits, kept for backward, and there the entropy's gradient; where a mask leaves out what was not
    sampled, also the probabilities of all (``_VocabParallelLogProbEntropy`` in slime/utils/ppo_utils.py, 624b824a).
    """
    return 3 * 4 * _logits(scenario)


def _whole_rows_bytes(scenario: Scenario, settings: MemorySettings) -> int | None:
    """Returns what dense layers keep of whole rows, where sequence parallelism does not share them among tensor ranks.

    These are input and output of both norms of a layer, and of a recomputed layer its input; a few more tensors of
    whole rows are in flight at a peak. Simulated steps with the same collectives, 4,096 tokens, have 4.0 to 4.1 such
    tensors more for each layer of Llama 3.1 8B with 2 to 8 layers on 2 and 4 ranks, 35 of the bound's 40 with 4 stages
    of 2 layers, and 11 of 20 where these recompute.
    """
    if scenario.architecture.routes:
        return None
    tensor, passes = scenario.layout.tensor_model_parallel_size, scenario.most_passes_in_flight
    elements = scenario.tokens_of_rank * (tensor - 1) * scenario.architecture.hidden_size
    kept = 4 * _layers_that_keep(scenario, settings) + passes + 4
    if settings.recompute_granularity == "full":
        kept += scenario.num_layers_of_chunk * passes
    return (2 if scenario.dtype == "bf16" else 4) * elements * kept


def _deterministic_bytes(scenario: Scenario) -> int | None:
    """Returns what the embedding's backward sorts and copies: nothing else of a model without experts differs.

    Peaks of four jobs with it that others measured are 0.0 MiB from a prediction without it (`memlab published`).
    """
    if scenario.architecture.routes:
        return None
    tokens = scenario.seq_length * scenario.micro_batch_size
    return tokens * (6 * 8 + 2 * 4 * scenario.architecture.hidden_size)


def _mask_bytes(scenario: Scenario) -> int:
    """Returns the attention masks of all micro-batches in flight, whole sequences on every rank."""
    return scenario.micro_batch_size * scenario.seq_length**2 * scenario.most_passes_in_flight


def _causal_mask_bytes(scenario: Scenario) -> int:
    """Returns one mask of whole sequences for each micro-batch in flight, and its two tensors in fp32 while it is made.

    See ``get_ltor_masks_and_position_ids`` in megatron/training/utils.py, 0.16.1.
    """
    return scenario.seq_length**2 * (scenario.most_passes_in_flight + 2 * 4)


def _router_bytes(scenario: Scenario) -> int:
    """Returns the routers' gradients (4 bytes) and optimizer state (12 bytes), unsharded."""
    weights = scenario.weights_of_rank.items()
    return 16 * sum(count * weight.num_elements for weight, count in weights if weight.name == "mlp.router.weight")


def _trained_bytes(scenario: Scenario) -> int:
    """Returns what gradients and optimizer state of all parameters take on the device of a rank."""
    kept = kept_bytes(scenario)
    return kept.gradients + kept.optimizer


def _sharded_bytes(scenario: Scenario) -> int:
    """Returns what FSDP can spread over the ranks that hold the same parameters, apart from each rank's own share.

    These are parameters and gradients, and the optimizer state where the distributed optimizer does not spread it.
    """
    weight, optimizer = (2, 4 + 8) if scenario.dtype == "bf16" else (4, 8)
    if scenario.state.use_distributed_optimizer:
        optimizer = 0
    of_trained = weight + bytes_of_gradient(scenario) + optimizer
    trained = copied(scenario)
    spread = sum(of_trained * (count - count // copies) for count, copies in trained)
    if scenario.state.lora is not None:  # the frozen model is beside the adapters
        model, (_, copies_outside), (_, copies_of_experts) = parameters_of_rank(scenario), *trained
        all_parameters = (model.outside_experts, copies_outside), (model.experts, copies_of_experts)
        spread += sum(weight * (count - count // copies) for count, copies in all_parameters)
    return spread


def _most_layers_of_a_chunk(scenario: Scenario) -> dict[FeedForward, int]:
    """Returns how many layers of a model chunk of the rank have each kind of second part."""
    model = scenario.architecture
    chunks = [model.kinds_of(chunk) for chunk in scenario.chunks_of_rank]
    return {part: max(chunk[part] for chunk in chunks) for part in model.feed_forwards}


def _layers_that_keep(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns in how many layers at once a tensor is kept that no module recomputes, once for each pass in flight."""
    layers, passes = scenario.num_layers_of_chunk, scenario.most_passes_in_flight
    if settings.recompute_granularity != "full":
        return layers * passes
    count = min(settings.recompute_num_layers or 1, layers)
    return count if settings.recompute_method == "uniform" else (layers - count) * passes + 1


def _routing_rows(scenario: Scenario) -> int:
    """Returns the tokens of a rank in all layers in flight that route them."""
    layers = sum(count for part, count in _most_layers_of_a_chunk(scenario).items() if part.routes)
    return scenario.tokens_of_rank * layers * scenario.most_passes_in_flight


def _router_tensors_bytes(kept: float, at_once: float) -> Callable[[Scenario], int]:
    """Returns a bound: so many fp32 numbers per token and expert in each layer in flight, and more in one layer.

    The numbers of a router's other score, loss or choice are those of ``z_loss_func``, ``group_limited_topk`` and
    ``topk_routing_with_score_function`` (megatron/core/transformer/moe/moe_utils.py, 0.16.1), with 20 bytes for each
    chosen expert. Simulated steps with Megatron's own code stay below, 2 layers of Qwen3-30B-A3B and 4,096 tokens: a
    loss of the logits 4,228,608 bytes more, sigmoid 4,259,840, with a bias of the experts 4,261,888, groups 1,048,576.
    """

    def bound(scenario: Scenario) -> int:
        model, rows = scenario.architecture, _routing_rows(scenario)
        of_experts = 4 * (model.num_moe_experts or 0) * (kept * rows + at_once * scenario.tokens_of_rank)
        return round(of_experts) + 20 * model.moe_router_topk * rows

    return bound


def _jitter_bytes(scenario: Scenario) -> int:
    """Returns the noise and the noisy input of each layer's router in flight, and three of these in one layer.

    See ``apply_input_jitter`` in megatron/core/transformer/moe/router.py, 0.16.1. Simulated steps with it have
    33,556,480 bytes more, 2 layers of Qwen3-30B-A3B and 4,096 tokens.
    """
    rows = 2 * _routing_rows(scenario) + 3 * scenario.tokens_of_rank
    return (2 if scenario.dtype == "bf16" else 4) * rows * scenario.architecture.hidden_size


def _exchanged_gradient_bytes(scenario: Scenario) -> int:
    """Returns a copy of all gradients, and a rank's own part in fp32 (``reduce_scatter_with_fp32_accumulation``)."""
    gradient = bytes_of_gradient(scenario)
    return sum(gradient * count + 4 * -(-count // copies) for count, copies in copied(scenario))


def _remainder_bytes(scenario: Scenario) -> int:
    """Returns 2 bytes for each parameter whose state a rank has: the half of a main parameter that is in the weight."""
    is_spread = scenario.state.use_distributed_optimizer
    return sum(2 * -(-count // (copies if is_spread else 1)) for count, copies in copied(scenario))


def _unspread_optimizer_bytes(scenario: Scenario) -> int:
    """Returns what the distributed optimizer spreads over ranks, apart from each rank's own share."""
    spread = scenario.state.use_distributed_optimizer
    main, moments = bytes_of_optimizer(scenario.state, scenario.dtype)
    counts = copied(scenario) if spread else ()
    return sum(round((main + moments) * (count - count // copies)) for count, copies in counts)


def _received_ahead_bytes(scenario: Scenario) -> int:
    """Returns the inputs and their gradients that a stage receives ahead, of each of its chunks."""
    elements = scenario.tokens_of_rank * scenario.architecture.hidden_size
    chunks = scenario.layout.virtual_pipeline_model_parallel_size
    return 2 * chunks * elements * (2 if scenario.dtype == "bf16" else 4)


def _layer_graphs_bytes(scenario: Scenario) -> int:
    """Returns what Transformer Engine's CUDA graphs of layers reserve at most beside what the eager steps reserved.

    Eager steps come first (``cuda_graph_warmup_steps``), so a job needs no less than without graphs. Then the cache is
    emptied, and one pool of its own gets what the graphs of all passes in flight keep for backward, the temporaries of
    one layer and the last layer's gradients. Each pass in flight has its input and its mask outside the pool
    (``TECudaGraphHelper`` in megatron-core 0.16.1, ``make_graphed_callables`` in Transformer Engine 2.16.1), and cuBLAS
    has a workspace for each of two threads on two streams. Nothing of that was in use by an eager step at its peak.
    Experts are in no graph unless their rows are padded (``cuda_graph_scope`` in transformer_config.py, 0.16.1): with
    ``moe_preprocess`` it ends with the rows that a rank sends, and what experts keep of each row is not in it.
    """
    model, tokens, passes = scenario.architecture, scenario.tokens_of_rank, scenario.most_passes_in_flight
    kinds = {part: part.kept_bytes(tokens, "none") for part in model.parts}
    if not scenario.state.moe_pad_expert_input_to_capacity:
        in_experts = 6 * (model.moe_ffn_hidden_size or 0) * (model.moe_router_topk or 0) * tokens
        kinds = {part: kept - in_experts * part.routes for part, kept in kinds.items()}
    layers = scenario.layers_of_rank
    kept = sum(count * kinds[part] for part, count in model.kinds_of(layers).items())
    mask = scenario.micro_batch_size * scenario.seq_length**2 // scenario.layout.context_parallel_size
    inputs = len(layers) * (2 * tokens * model.hidden_size + mask)
    temporaries = 3 * max(sum(kinds[part] for part in parts) for parts in model.parts_of_kinds.values())
    gradients = 2 * sum(
        math.prod(scenario.layout.shape_of(weight)) for weight in scenario.weights_of_rank if not weight.num_experts
    )
    return passes * (kept + inputs) + temporaries + gradients + 4 * 32 * 2**20


def _newer_delta_net_bytes(scenario: Scenario) -> int | None:
    """Returns what Megatron-Core 0.16's gated delta net keeps at most beside 0.18's (``ssm/gated_delta_net.py``).

    It keeps the convolution's output before its activation, and time steps and decays in fp32, in each layer in flight.
    One layer at a time has three more tensors of the convolution in backward.
    """
    model, ranks = scenario.architecture, scenario.layout.tensor_model_parallel_size
    part = next((part for part in model.parts if isinstance(part, GatedDeltaNet)), None)
    if part is None:
        return None
    tokens = scenario.micro_batch_size * scenario.seq_length // ranks
    layers = model.kinds_of(scenario.layers_of_rank)[part] * scenario.most_passes_in_flight
    convolved = (2 if scenario.dtype == "bf16" else 4) * part.convolved_width
    return tokens * (layers * (convolved + 8 * part.linear_num_value_heads) + 3 * convolved)


def _whole_embedding_bytes(scenario: Scenario) -> int:
    """Returns what a view of whole rows keeps beyond the rank's part of them, for each pass in flight.

    ``scatter_to_sequence_parallel_region`` returns a view (megatron/core/models/common/embeddings, 0.16.1).
    """
    others = scenario.layout.tensor_model_parallel_size - 1
    elements = scenario.tokens_of_rank * others * scenario.architecture.hidden_size
    return (2 if scenario.dtype == "bf16" else 4) * elements * scenario.most_passes_in_flight


_OTHER_PARTS = tuple(part for part in PARTS_OF_MULTIMODAL_MODELS if part not in LANGUAGE_MODEL)
"""What freezes them changes nothing of the language model, which memlab predicts alone."""

BOUNDS: dict[str, Callable[[Scenario], int | None]] = {
    "deterministic_mode": _deterministic_bytes,
    "experimental_attention_variant": _newer_delta_net_bytes,
    "moe_router_topk_limited_devices": _router_tensors_bytes(0.25, 2.5),
    "moe_input_jitter_eps": _jitter_bytes,
    "reduce_scatter_with_fp32_accumulation": _exchanged_gradient_bytes,
    "param_name_patterns_for_fp32_local_accumulation": lambda one: 4 * sum(parameters_of_rank(one)),
    "store_param_remainders": _remainder_bytes,
    "num_distributed_optimizer_instances": _unspread_optimizer_bytes,
    "overlap_p2p_comm": _received_ahead_bytes,
    "entropy_from_logits_with_chunking": lambda scenario: 4 * (1 + scenario.state.entropy_loss) * _logits(scenario),
    "zero_outside_topk": _whole_softmax_bytes,
    "use_fused_kernels": _whole_loss_bytes,
    "use_fused_linear_logprobs": _whole_loss_bytes,
    "use_linear_ce_fusion_loss": _whole_loss_bytes,
    "fp16_lm_cross_entropy": _whole_loss_bytes,
    "clone_scatter_output_in_embedding": _whole_embedding_bytes,
    "fused_lm_head_logprob": _whole_loss_bytes,
    **dict.fromkeys(
        ("loss_fn._target_", "loss_fn.fp32_upcast", "loss_fn", "actor.policy_loss", "policy_loss_type"),
        _whole_loss_bytes,
    ),
    **dict.fromkeys(
        (
            "skip_getting_attention_mask_from_dataset",
            "get_attention_mask_from_fusion",
            "padding_free",
        ),
        _mask_bytes,
    ),
    **dict.fromkeys(("entropy_coeff", "calculate_entropy", "calculate_sum_pi_squared"), _entropy_bytes),
    "use_entropy_loss": _entropy_bytes,
    **dict.fromkeys(("vocab_entropy_chunk_size", "vocab_entropy_chunk_memory_mb"), _entropy_of_skyrl_bytes),
    **dict.fromkeys(
        ("router_replay.mode", "router_replay.enabled", "moe_enable_routing_replay"), _replayed_routing_bytes
    ),
    "enable_rollout_routing_replay": _bytes_of_a_row_s_experts,
    **dict.fromkeys(("use_routing_replay", "use_rollout_routing_replay"), _taken_routing_bytes),
    "entropy_coef": _entropy_of_slime_bytes,
    "logprobs_chunk_size": _entropy_of_chunk_bytes,
    **dict.fromkeys(("remove_microbatch_padding", "use_sample_packing"), _padded_logits_bytes),
    "sequence_packing.enabled": _causal_mask_bytes,
    "freeze_moe_router": _router_bytes,
    **dict.fromkeys(LANGUAGE_MODEL, _trained_bytes),
    **dict.fromkeys(_OTHER_PARTS, lambda scenario: 0),
    **dict.fromkeys(("ref_model", "ref.megatron.param_offload"), lambda one: 2 * sum(parameters_of_rank(one))),
    "empty_unused_memory_level": lambda scenario: 0,  # of what is reserved, nothing that is allocated
    **dict.fromkeys(("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"), _sharded_bytes),
    **dict.fromkeys(
        ("lora_rank", "lora.rank", "lora_cfg", "peft", "peft.enabled", "tuner_type", "train_type"),
        _trained_bytes,
    ),
    "offload_optimizer_states": lambda scenario: kept_bytes(scenario).optimizer,
    **dict.fromkeys(("cuda_graph_impl", "external_cuda_graph"), _layer_graphs_bytes),
}
"""By the last part of a key, or the last two or three: at most so many bytes more or less, as the key's effect says.
What freezes parameters (`FREEZES`) may also keep fewer activations, which are not in its bound."""

BOUNDS_BY_SETTINGS: dict[str, Callable[[Scenario, MemorySettings], int | None]] = {
    "sequence_parallel": _whole_rows_bytes,
}
"""The same, of what the memory settings decide too; `BOUNDS_OF_FSDP2` has those of the engine fsdp2."""

FREEZES = (
    "lora_rank",
    "lora.rank",
    "lora_cfg",
    "peft",
    "peft.enabled",
    "tuner_type",
    "train_type",
    "freeze_*",
    "only_train_params_name_list",
)
"""Keys with which only a part of the parameters is trained."""

_STATE = ("gradients", "optimizer state")
_OF_TRAINING = (*_STATE, *RESIDUAL_CATEGORIES)
_CAN_TAKE: dict[str, tuple[str, ...]] = {
    "freeze_moe_router": _STATE,
    **dict.fromkeys(_OTHER_PARTS, ()),
    **dict.fromkeys(("offload_optimizer_states", "use_stateless_adam"), ("optimizer state",)),
    **dict.fromkeys(FREEZES, _OF_TRAINING),
    **dict.fromkeys(
        (
            "use_megatron_fsdp",
            "use_torch_fsdp2",
            "use_custom_fsdp",
            "*tensor_parallel_num_weight_shards",
            "*gtp_weight_remat_size",
        ),
        ("parameters", *_STATE),
    ),
    **dict.fromkeys(
        (
            "cpu_offloading",
            "cpu_offloading_num_layers",
            "distribute_saved_activations",
            "mlp_chunks_for_training",
            "recompute_loss_function",
            "recompute_modules",
            "offload_modules",
            "activation_func_fp8_input_store",
            "fuse_loss",
            "moe_layer_recompute",
            "fp16_lm_cross_entropy",
            "mlp_padding_free",
            "no_overlap_p2p_communication",
            "no_rope_freq",
            "backend.rms_norm",
            "use_liger_kernel",
            "distributed.activation_checkpointing",
            "loss_fn._target_",
            "loss_fn.fp32_upcast",
            "actor.policy_loss",
            "policy_loss_type",
        ),
        RESIDUAL_CATEGORIES,
    ),
    "disable_parameter_transpose_cache": ("parameters",),
}
"""By the end of a key whose effect is less: in which categories it can take bytes away. ``cpu_offloading`` also moves
weights with ``cpu_offloading_weights``, off by default (megatron/core/model_parallel_config.py, 0.16.1)."""


def bound(reading: Reading, scenario: Scenario, settings: MemorySettings) -> None:
    """Says how much what is not modelled can change, where that is known, on the rank that it changes most."""
    ranks = scenario.on_ranks(None)
    for index, row in enumerate(reading.not_modelled):
        one = replace(row, most_micro_batches=reading.most_micro_batches)
        bounds = [bound_bytes(one, rank, settings) for rank in ranks]
        if None not in bounds and one.effect != "unknown":
            one = replace(one, bound_bytes=max(filter(None, bounds), default=0))
        reading.not_modelled[index] = one


def bounded_by(rows: Iterable[NotModelled], keys: Collection[str], other: Scenario | None) -> tuple[NotModelled, ...]:
    """Returns rows in which keys that stand for a second model are bounded by what that keeps between its steps.

    With a fused accumulation of gradients, Transformer Engine keeps one unused gradient of each shape too.

    Args:
        keys: Of the second model.
        other: What it trains; None if memlab refuses it, which leaves the rows as they are.
    """
    if other is None:
        return tuple(rows)
    most = 0
    for rank in other.on_ranks(None):
        shapes = {rank.layout.shape_of(weight) for weight in rank.weights_of_rank}
        unused = 2 * sum(map(math.prod, shapes)) * rank.state.gradient_accumulation_fusion
        most = max(most, sum(kept_bytes(rank)) + unused)
    return tuple(replace(one, bound_bytes=most) if one.key in keys else one for one in rows)


def bound_bytes(one: NotModelled, scenario: Scenario, settings: MemorySettings) -> int | None:
    """Returns how much something that memlab does not model changes at most on a rank; None if that is not known."""
    by_settings = _of_end(BOUNDS_OF_FSDP2 if scenario.engine == "fsdp2" else BOUNDS_BY_SETTINGS, one.key)
    if by_settings is not None:
        return by_settings(scenario, settings)
    bound = _of_end(BOUNDS, one.key)
    if bound is _layer_graphs_bytes and one.value in ("local", "full_iteration"):
        return None  # Megatron's own graphs of layers, and graphs of experts
    if bound is _entropy_of_chunk_bytes:
        return _entropy_of_chunk_bytes(scenario, one.value if is_whole_number(one.value) else 1024)
    if bound is _replayed_routing_bytes:
        if one.most_micro_batches is None:
            return None
        scenario = replace(scenario, num_microbatches=max(scenario.num_microbatches, one.most_micro_batches))
    return None if bound is None else bound(scenario)


def categories_it_can_take(key: str) -> tuple[str, ...] | None:
    """Returns of which categories a key with the effect *less* can take bytes away; None if that is not known."""
    return _of_end(_CAN_TAKE, key)


def changes_the_step(key: str) -> bool:
    """Whether a key concerns the training step's tensors: no inference engine's, and nothing outside torch's memory."""
    return not is_of_inference_engine(key) and not is_outside_torch(key)


def is_of_inference_engine(key: str) -> bool:
    """Whether a key concerns the engine that generates, and not the training step."""
    if key.endswith(_OF_TRAINING_TOO) or "checkpoint_engine" in key.split("."):
        return False
    return (
        key.startswith(_OF_ENGINE)
        or key.endswith("mtp.enable_rollout")
        or not {"rollout", "generation", "inference_engine"}.isdisjoint(key.split("."))
    )


_OF_TRAINING_TOO = ("routing_replay", "generation.top_k", "generation.top_p", "generation.refit_transport")
"""How the keys of engines end that change the training too: it keeps the experts that the engine chose, leaves out of
the logits what the engine could not sample, and has buffers from which it sends weights."""
_OF_ENGINE = ("sglang_", "vllm_", "generator.")
"""How the keys of engines begin where no section of the configuration has that name."""


def freezes_parameters(key: str) -> bool:
    """Whether with a key only a part of the parameters is trained, so that a layer may also keep less for backward."""
    return categories_it_can_take(key) == _OF_TRAINING


def _of_end(table: Mapping[str, _Value], key: str) -> _Value | None:
    """Returns what a table has for the last parts of a key, the longest end first."""
    parts = key.split(".")
    ends = [".".join(parts[-number:]) for number in (3, 2, 1)]
    return next((table[name] for end in ends for name in table if fnmatch.fnmatchcase(end, name)), None)
