"""How much what memlab does not model can change on a rank of FSDP2.

Bytes are those of transformers 5.24: its RMSNorm keeps its input in fp32 and the
normalized input in the layers' type, and its MLP keeps the activation of the gate (``modeling_llama.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from memlab.config.architectures import Architecture
from memlab.config.parameters import bytes_of_trained_shard, kept_bytes
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.transformers_linears import adapted_linears


def _width(scenario: Scenario) -> int:
    return 2 if scenario.dtype == "bf16" else 4


def _layers(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns of how many layers the tensors inside are kept."""
    return 1 if settings.recompute_granularity == "full" else scenario.num_layers


def _width_of_mlp(model: Architecture) -> int:
    """Returns the elements of a token's gate in a layer: of all experts that get the token, where there are experts."""
    return model.moe_router_topk * model.moe_ffn_hidden_size if model.routes else model.ffn_hidden_size


def _norms(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns what all norms keep beside their inputs, and five tensors of one norm in fp32 while backward is in it."""
    hidden = scenario.tokens_of_rank * scenario.architecture.hidden_size
    return hidden * ((2 * _layers(scenario, settings) + 1) * (4 + _width(scenario)) + 5 * 4)


def _liger(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns `_norms`, and what MLPs keep of the gate's activation, with four such tensors in backward.

    Liger's loss is not in use: Automodel calls the model without labels (``recipes/llm/train_ft.py``).
    """
    gate = _width(scenario) * scenario.tokens_of_rank * _width_of_mlp(scenario.architecture)
    return _norms(scenario, settings) + gate * (_layers(scenario, settings) + 4)


def _parts_of_layers(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns at most what three more inputs of each layer take, or twice all that one layer keeps.

    A checkpoint of each norm, of attention and of the MLP keeps its own input, where one of a layer keeps only the
    layer's; but backward then recomputes a part at a time (``apply_submodule_checkpointing``). Of selective
    checkpoints, for which memlab predicts none, it is all that layers keep.
    """
    model, tokens, width = scenario.architecture, scenario.tokens_of_rank, _width(scenario)
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    inputs = 3 * width * tokens * model.hidden_size * scenario.num_layers
    of_attention = width * (3 * queries + 4 * keys) + 12 * queries
    of_hidden = (12 + 4 * width) * model.hidden_size * (1 + (model.moe_router_topk if model.routes else 0))
    of_mlp = 4 * width * _width_of_mlp(model) + 12 * (model.num_moe_experts or 0)
    of_layer = tokens * (of_attention + of_mlp + of_hidden)
    is_full = settings.recompute_granularity == "full"
    return max(inputs, 2 * of_layer) if is_full else of_layer * scenario.num_layers


def _rotating(scenario: Scenario, _: MemorySettings) -> int:
    """Returns queries and keys six times, and in fp32 cosines and sines of all positions and of the rows.

    The six are their products, halves and sums while one layer rotates them.
    """
    model = scenario.architecture
    heads = model.num_attention_heads + model.num_query_groups
    angles = 2 * (1 + scenario.micro_batch_size) * scenario.seq_length
    return 4 * model.kv_channels * (6 * scenario.tokens_of_rank * heads + angles)


def _scores(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns the probabilities in fp32 and in the layers' type of each layer, and four such tensors in fp32 in one."""
    heads, width = scenario.architecture.num_attention_heads, _width(scenario)
    of_layer = scenario.micro_batch_size * heads * scenario.seq_length**2
    return of_layer * ((4 + width) * _layers(scenario, settings) + 4 * 4)


def _mask(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns a mask of whole sequences in each layer in the layers' type, and one in 8 bytes while it is made."""
    elements = scenario.micro_batch_size * scenario.seq_length**2
    return elements * (_width(scenario) * _layers(scenario, settings) + 8)


def _packing(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns copies of a layer's queries, keys and values in forward and backward, and 8 bytes a token a few times."""
    model = scenario.architecture
    row = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    return scenario.tokens_of_rank * (2 * _width(scenario) * row + 4 * 8)


def _low_rank(scenario: Scenario, _: MemorySettings) -> int:
    """Returns two tensors in fp32 of each adapter's rank, for each token."""
    lora = scenario.state.lora
    if lora is None:
        return 0
    count = sum(1 for _ in adapted_linears(scenario.architecture, scenario.num_layers, lora))
    return 2 * 4 * scenario.tokens_of_rank * lora.rank * count


def _padded(scenario: Scenario, settings: MemorySettings) -> int:
    """Returns what attention needs for rows with padding: a mask, or copies of what it has without the padding."""
    return _mask(scenario, settings) + _packing(scenario, settings)


def _whole_model(scenario: Scenario, _: MemorySettings) -> int:
    """Returns what sharding adds on one rank: gathered parameters, and gradients in fp32 on their way to the shards.

    Gathered at most are those outside the layers, which stay, and of three layers, or of all that are not resharded; in
    fp32 are two of each. Gradients that are reduced in the last micro-batch only are there of the whole model in fp32.
    """
    model = scenario.architecture
    two, one = (model.with_layers(count).num_parameters for count in (2, 1))
    layer, outside = two - one, 2 * one - two
    deferred = 4 * (outside + layer * scenario.num_layers) * (scenario.num_microbatches > 1)
    gathered = scenario.num_layers if scenario.state.reshard_after_forward == "none" else 3
    return _width(scenario) * (outside + gathered * layer) + 2 * 4 * (outside + layer) + deferred


def _deferred_gradients(scenario: Scenario, _: MemorySettings) -> int:
    """Returns the gradients of the whole model in fp32, where more than one rank shards it."""
    ranks = scenario.ranks_of_shards
    elements = kept_bytes(scenario).gradients // bytes_of_trained_shard(scenario)
    return 4 * ranks * elements if ranks > 1 else 0


def _hidden_states(scenario: Scenario, _: MemorySettings) -> int:
    """Returns the input of each layer, and the output of the last one and of the norm after it."""
    hidden = scenario.tokens_of_rank * scenario.architecture.hidden_size
    return _width(scenario) * hidden * (scenario.num_layers + 2)


def _fp32_outputs(scenario: Scenario, _: MemorySettings) -> int:
    """Returns the output of each layer in fp32 twice, and the logits."""
    model = scenario.architecture
    return 4 * scenario.tokens_of_rank * (2 * model.hidden_size * (scenario.num_layers + 1) + model.vocab_size)


def _whole_logits(scenario: Scenario, _: MemorySettings) -> int:
    """Returns the whole vocabulary's logits in fp32, with what their loss keeps and computes from them."""
    tokens = scenario.seq_length * scenario.micro_batch_size // scenario.layout.context_parallel_size
    return 4 * 4 * tokens * scenario.architecture.vocab_size


BOUNDS_OF_FSDP2: dict[str, Callable[[Scenario, MemorySettings], int]] = {
    "backend.rms_norm": _norms,
    "use_liger_kernel": _liger,
    **dict.fromkeys(("distributed.activation_checkpointing", "dtensor_cfg.activation_checkpointing"), _parts_of_layers),
    "model.attn_implementation": _scores,
    "packed_sequence.packed_sequence_size": _packing,
    "model.use_liger": _liger,
    **dict.fromkeys(("peft.use_triton", "lora_cfg.use_triton"), _low_rank),
    **dict.fromkeys(
        (
            "step_scheduler.local_batch_size",
            "dataloader.collate_fn.pad_seq_len_divisible",
            "model.use_remove_padding",
            "remove_microbatch_padding",
            "use_sample_packing",
            "sequence_packing.enabled",
        ),
        _padded,
    ),
    "distributed.dp_size": _whole_model,
    "dtensor_cfg.tensor_parallel_size": _whole_logits,
    "output_hidden_states": _hidden_states,
    "use_no_sync_for_gradient_accumulation": _deferred_gradients,
    **dict.fromkeys(("mp_policy.output_dtype", "policy.precision"), _fp32_outputs),
    # Half of parameters, gradients and moments, and of as much while the optimizer updates them.
    "mp_policy.param_dtype": lambda scenario, _: 4 * kept_bytes(scenario).gradients,
    "backend.rope": _rotating,
    "optimizer.weight_decay": lambda scenario, _: kept_bytes(scenario).gradients,
    "neftune.noise_alpha": lambda scenario, _: 2 * 4 * scenario.tokens_of_rank * scenario.architecture.hidden_size,
    "optimizer.amsgrad": lambda scenario, _: 2 * kept_bytes(scenario).gradients,
    # Transformer Engine's has a main parameter and two moments in fp32, and no temporary tensors of the shards' size.
    "optimizer._target_": lambda scenario, _: 16 * kept_bytes(scenario).gradients // bytes_of_trained_shard(scenario),
}
"""By the end of a key, as in `memlab.jobs.bounds`."""
