"""What a rank keeps between steps, without torch: how many parameters, and how many bytes of each kind of state.

This is for what never builds a model: searches, bounds, and the check of the host's memory. In Megatron's DDP,
parameters and gradients are whole on each rank, and the distributed optimizer shards its state; FSDP2 shards all three.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.transformers_linears import adapted_linears, adapted_parameters


class Parameters(NamedTuple):
    """Numbers of parameters; those of experts are spread over other ranks than the others."""

    layers: int
    """In layers, without experts."""
    vocabulary: int
    """Of the embeddings of tokens and positions, of the output layer, and of the norm before it; of a vision tower."""
    experts: int

    @property
    def outside_experts(self) -> int:
        """All but those of experts."""
        return self.layers + self.vocabulary


def parameters_of_rank(scenario: Scenario) -> Parameters:
    """Counts the parameters that the scenario's rank keeps: under FSDP2 its share, up to the padding of single ones."""
    model, layout = scenario.architecture, scenario.layout
    weights = scenario.weights_of_rank.items()
    inside, outside = (
        sum(count * layout.elements_of(weight) for weight, count in weights if bool(weight.num_experts) is is_expert)
        for is_expert in (True, False)
    )
    has_embedding = layout.pipeline_stage == 0 or scenario.extra_layers_of_rank > 0
    has_output = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
    # With multi-token prediction, the norm is where the model's last layer is (``has_final_layernorm_in_this_stage`` in
    # megatron/core/transformer/transformer_block.py, 0.16.1).
    has_norm = scenario.num_layers - 1 in scenario.layers_of_rank if scenario.state.mtp_num_layers else has_output
    # With multi-token prediction, a last stage that is not the first has an output weight beside its copy of a tied
    # embedding, which nothing reads (``GPTModel.__init__``, 0.16.1).
    num_labels = scenario.state.num_labels
    is_tied = scenario.shares_embeddings and layout.pipeline_stage == 0 and has_output
    matrices = has_embedding + (has_output and num_labels is None) - is_tied
    vocabulary = matrices * model.vocab_size * model.hidden_size // layout.tensor_model_parallel_size
    vocabulary += has_output * (num_labels or 0) * model.hidden_size
    vocabulary += has_embedding * model.num_parameters_of_positions + has_norm * model.num_parameters_of_final_norm
    vocabulary += has_output * model.num_parameters_of_output_bias
    if (tower := scenario.vision_tower) is not None:
        vocabulary += tower.num_parameters + tower.num_parameters_of_projector
    layers, words = (-(-count // scenario.ranks_of_shards) for count in (outside, vocabulary))
    return Parameters(layers, words, -(-inside // scenario.ranks_of_expert_shards))


def trained_of_rank(scenario: Scenario) -> Parameters:
    """Counts the rank's parameters that are trained: those of adapters and a head, where there are adapters."""
    layout = scenario.layout
    if scenario.state.lora is None:
        counts, tower = parameters_of_rank(scenario), scenario.vision_tower
        if tower is not None and scenario.state.freeze_vision_tower:
            shared = tower.num_parameters // scenario.ranks_of_shards
            counts = counts._replace(vocabulary=counts.vocabulary - shared)
        routers = sum(
            count * layout.elements_of(weight)
            for weight, count in scenario.architecture.weights_of(scenario.layers_of_rank).items()
            if weight.name == "mlp.router.weight" and scenario.state.freeze_moe_router
        )
        return counts._replace(layers=counts.layers - routers)
    if scenario.engine == "fsdp2":
        lora, model, num_layers = scenario.state.lora, scenario.architecture, len(scenario.layers_of_rank)
        of_adapters = sum(lora.rank * (one.outputs + one.inputs) for one in adapted_linears(model, num_layers, lora))
        of_adapters += sum(one.elements for one in adapted_parameters(model, num_layers, lora))
        of_adapters //= scenario.layout.tensor_model_parallel_size
        return Parameters(-(-of_adapters // scenario.ranks_of_shards), 0, 0)
    weights = [*scenario.weights_of_adapters()]
    inside, outside = (
        sum(layout.elements_of(weight) for weight in weights if bool(weight.num_experts) is is_expert)
        for is_expert in (True, False)
    )
    has_output = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
    head = has_output * (scenario.state.num_labels or 0) * scenario.architecture.hidden_size
    return Parameters(outside, head, inside)


class KeptBytes(NamedTuple):
    """Bytes on the device, without padding."""

    parameters: int
    gradients: int
    optimizer: int


def kept_bytes(scenario: Scenario) -> KeptBytes:
    """Returns what the scenario's rank keeps on the device.

    A CPU optimizer keeps the moments of its share on the host, and with the precision-aware optimizer also the main
    parameters. Of FSDP2 these are the shards that each rank has, the gradients only until the update.
    """
    if scenario.engine == "fsdp2":
        if scenario.state.fsdp_cpu_offload:
            return KeptBytes(0, 0, 0)
        num_trained = sum(trained_of_rank(scenario))
        shards = bytes_of_trained_shard(scenario) * num_trained
        others = sum(parameters_of_rank(scenario)) - (num_trained if scenario.state.lora is None else 0)
        frozen = bytes_of_shard(scenario) * others
        return KeptBytes(frozen + shards, shards, bytes_of_state(scenario) * sum(trained_of_rank(scenario)))
    counts, trained, state = parameters_of_rank(scenario), trained_of_rank(scenario), scenario.state
    of_parameter = 2 if scenario.dtype == "bf16" else 4
    # MXFP8 by row and by column; what megatron-core 0.16 keeps twice beside it, newer ones keep once.
    in_layers = 1 + state.reuse_grad_buf_for_mxfp8_param_ag if state.fp8_param_gather else of_parameter
    on_device = 1 - state.optimizer_offload_fraction if state.optimizer_cpu_offload else 1.0
    main, moments = bytes_of_optimizer(state, scenario.dtype)
    of_optimizer = moments * on_device + main * (on_device if state.use_precision_aware_optimizer else 1)
    sharded = (-(-count // (copies if state.use_distributed_optimizer else 1)) for count, copies in copied(scenario))
    of_adapters = 0 if state.lora is None else (sum(trained) - trained.vocabulary) * of_parameter
    of_model = (counts.layers + counts.experts) * in_layers + counts.vocabulary * of_parameter
    of_frozen = 0
    if state.reference_model == "copy":
        of_frozen = of_model if state.teacher_model is None else kept_bytes(scenario.teacher).parameters
    return KeptBytes(
        parameters=of_model + of_frozen + of_adapters,
        gradients=sum(trained) * bytes_of_gradient(scenario),
        optimizer=sum(round(of_optimizer * count) for count in sharded),
    )


def copied(scenario: Scenario) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns trained parameters and how many ranks hold each of them, outside experts and in them."""
    counts, layout = trained_of_rank(scenario), scenario.layout
    if scenario.engine == "fsdp2":  # each has its own share
        return (counts.outside_experts, 1), (counts.experts, 1)
    return (counts.outside_experts, layout.copies_of_parameters), (counts.experts, layout.copies_of_experts)


def bytes_of_shard(scenario: Scenario) -> int:
    """Returns the bytes of a parameter of the model in a shard of FSDP2."""
    return 2 if scenario.dtype == "bf16" and not scenario.state.fp32_sharded_params else 4


def bytes_of_trained_shard(scenario: Scenario) -> int:
    """Returns the bytes of a trained parameter in a shard of FSDP2, of its gradient, and of each of its moments."""
    lora = scenario.state.lora
    return 4 if lora is not None and lora.fsdp2_library == "peft" else bytes_of_shard(scenario)


def bytes_of_state(scenario: Scenario) -> int:
    """Returns the bytes of a trained parameter's moments and main parameter under FSDP2."""
    state, shard = scenario.state, bytes_of_trained_shard(scenario)
    if state.adam_implementation != "te_fused":
        return 2 * shard
    has_remainder = state.store_param_remainders and shard == 2
    return 2 * 4 + state.master_weights * (2 if has_remainder else 4)


def bytes_of_gradient(scenario: Scenario) -> int:
    """Returns the bytes of a parameter's gradient in DDP's buffer."""
    return 2 if scenario.dtype == "bf16" and scenario.state.grad_reduce_in_bf16 else 4


def bytes_of_optimizer(state: TrainingState, dtype: str) -> tuple[int, int]:
    """Returns the bytes of a parameter's main parameter and of its moments together, wherever they are.

    See `TrainingState` for the types.
    """
    if not state.use_precision_aware_optimizer or state.optimizer_cpu_offload:
        return 4 if dtype == "bf16" else 0, 4 + 4
    moments = sum(4 if moment == "fp32" else 2 for moment in (state.exp_avg_dtype, state.exp_avg_sq_dtype))
    if state.fp8_format is not None and state.fp8_recipe != "delayed":
        return 4, moments
    return 2 if dtype == "bf16" or state.main_params_dtype == "fp16" else 4, moments
