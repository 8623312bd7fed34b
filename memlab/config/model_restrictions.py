"""Which memory settings a model refuses, and what they keep alive.

Rules that hold on any model are in `MemorySettings`; these need the architecture, and how its layers are split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from memlab.config.architectures import Architecture
from memlab.config.fp8_restrictions import check_fp8_settings
from memlab.config.lora import OF_LATENT_ATTENTION, LoRA
from memlab.config.option import Option, check_engine, options_of
from memlab.config.parts.part import FeedForward, Part
from memlab.config.scenario import Scenario
from memlab.config.settings import (
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    MemorySettings,
)
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError, refuse_beside


def checkpoints_moe_layers(settings: MemorySettings, architecture: Architecture) -> bool:
    """Whether MoE layers are recomputed as a whole; their checkpoints then keep input and gradient alive."""
    whole = settings.recompute_granularity == "full" or "moe" in (settings.recompute_modules or ())
    return architecture.keeps_graph and whole


def keeps_gradients_in_graph(scenario: Scenario) -> bool:
    """Whether a CUDA graph keeps the memory of each gradient that autograd adds to its parameter.

    That happens on the stream on which DDP was built, so that torch notes it as another user of the memory, and asks
    only after the capture whether that stream is done. megatron-core 0.19 lets it happen on the captured stream, where
    torch can (``set_override_stale_capture_stream``, which 2.11 does not have and 2.13 has).
    """
    if scenario.state.cuda_graph_impl == "none" or scenario.allocator.graph_capture_record_stream_reuse:
        return False
    torch_version = tuple(map(int, scenario.versions.torch.split(".")[:2]))
    return _megatron_version() < (0, 19) or torch_version < (2, 13)


def check_on_model(settings: MemorySettings, scenario: Scenario) -> None:
    """Checks the settings against the model that a scenario builds.

    Args:
        scenario: Its architecture, and how its layers are split into model chunks, decide.

    Raises:
        ValueError: If no layer of the model has a module, if more layers shall be recomputed
            than the model has, if the FP8 recipe refuses a module, if full recompute is combined with offload modules
            on pipeline stages, if the installed megatron-core does not have a setting, or if its steps end in an error
            with the offload modules.
    """
    _check_checkpointing(settings, scenario)
    _check_extra_layers(settings, scenario)
    _check_beside_offload(settings, scenario)
    _check_beside_graphs(settings, scenario.state)
    check_engine(settings, scenario.engine)
    check_fp8_settings(settings, scenario.state)
    _check_megatron(settings, scenario.state)
    architecture, layers = scenario.architecture, scenario.layers_of_chunks
    num_layers = max(layers)
    if settings.recompute_num_layers is not None and settings.recompute_num_layers > num_layers:
        raise RuleError(
            f"recompute_num_layers is {settings.recompute_num_layers}, but {_whole(layers)} has {num_layers} layers: "
            f"give a number from 1 to {num_layers}",
            "recompute_num_layers",
        )
    # transformer_block.py walks uniform groups of this size and reads past the last layer (0.16.1). From 0.17.0 on, the
    # last group is smaller.
    num_layers, counts = math.gcd(*layers), " or ".join(str(count) for count in sorted(set(layers)))
    if settings.recompute_method == "uniform" and num_layers % (settings.recompute_num_layers or 1):
        divisors = [str(count) for count in range(1, num_layers + 1) if num_layers % count == 0]
        raise RuleError(
            f"recompute_num_layers is {settings.recompute_num_layers}, but {_whole(layers)}'s {counts} layers do not "
            f"divide into groups of {settings.recompute_num_layers}, on which megatron-core 0.16 fails (0.17 makes a "
            f"smaller last group, which memlab does not predict): choose from {', '.join(divisors)}",
            "recompute_num_layers",
        )
    if len(layers) > 1 and settings.recompute_granularity == "full" and settings.offload_modules:
        # Its forward opens no chunks of the offload manager for the micro-batches, and their backward needs them:
        # "Chunk mismatch" (fine_grained_activation_offload.py, 0.16.1).
        raise RuleError(
            f"recompute_granularity 'full' cannot be combined with offload_modules {list(settings.offload_modules)} "
            "on pipeline stages, because the offload manager of megatron-core 0.16.1 fails there: leave one of the two "
            "out",
            *("recompute_granularity", "offload_modules"),
        )
    if architecture.add_bias_linear and "mlp" in (settings.recompute_modules or ()):
        # The checkpoint returns the MLP's last bias, on whose gradient backward then runs the checkpoint again, without
        # end (``CheckpointFunction`` of megatron/core/tensor_parallel/random.py; seen with 0.16.1 and its own layers).
        raise RuleError(
            f"recompute_modules has 'mlp', and the MLPs of {architecture.name} have biases: the backward pass of "
            "Megatron-Core never ends there: leave 'mlp' out, or choose recompute_granularity 'full'",
            "recompute_modules",
        )
    if scenario.state.moe_shared_expert_overlap and "shared_experts" in (settings.recompute_modules or ()):
        raise RuleError(
            "recompute_modules has 'shared_experts' with moe_shared_expert_overlap, which Megatron-Core refuses: leave "
            "one of the two out",
            *("recompute_modules", "moe_shared_expert_overlap"),
        )
    if settings.checkpoint_input_remedy == "detach" and scenario.state.moe_token_dispatcher_type == "flex":
        raise RuleError(
            "checkpoint_input_remedy is 'detach' with moe_token_dispatcher_type 'flex', whose dispatcher reads the "
            "probabilities that it keeps: choose clear_gradient or release_storage, or leave one of the two out",
            *("checkpoint_input_remedy", "moe_token_dispatcher_type"),
        )
    _check_offload_groups(settings, scenario)
    _check_frozen_layers(settings, scenario)
    for field, choices in (("recompute_modules", RECOMPUTE_MODULES), ("offload_modules", OFFLOAD_MODULES)):
        absent = architecture.absent_modules(field)
        wrong = [name for name in getattr(settings, field) or () if name in absent]
        if wrong:
            lacks = "which only MoE layers have, and {} is dense"
            if "mla_up_proj" in wrong:
                wrong, lacks = ["mla_up_proj"], "which only multi-latent attention has, and {} has another"
            raise RuleError(
                f"{field} has {wrong}, {lacks.format(architecture.name)}: "
                f"choose from {', '.join(name for name in choices if name not in absent)}",
                field,
            )


def _check_beside_offload(settings: MemorySettings, scenario: Scenario) -> None:
    if settings.offload_modules:
        given = f"offload_modules has {list(settings.offload_modules)} with"
        others = scenario.changed_among("reference_model", "transformer_impl", "cuda_graph_impl")
        refuse_beside(given, "offload_modules", others, "leave one of the two out")


def _check_beside_graphs(settings: MemorySettings, state: TrainingState) -> None:
    if state.cuda_graph_impl == "transformer_engine" and settings.recompute_granularity == "full":
        raise RuleError(
            "recompute_granularity is 'full' with cuda_graph_impl 'transformer_engine', which Megatron refuses "
            "(transformer_config.py): choose selective recompute, or 'full_iteration'",
            *("recompute_granularity", "cuda_graph_impl"),
        )
    if "moe_router" in (state.cuda_graph_modules or ()) and "moe" in (settings.recompute_modules or ()):
        raise RuleError(
            "recompute_modules has 'moe' with 'moe_router' among cuda_graph_modules, which Megatron refuses "
            "(transformer_config.py): leave one of the two out",
            *("recompute_modules", "cuda_graph_modules"),
        )
    for name in ("offload_parameters", "offload_gradients", "offload_optimizer"):
        if getattr(settings, name):
            check_beside_addresses(f"{name} is True", state, name)


def check_beside_addresses(what: str, state: TrainingState, *fields: str) -> None:
    """Checks that nothing leaves the device between steps of a job with a CUDA graph, which has its addresses.

    Raises:
        RuleError: If the job has one; `what` leaves the device.
    """
    if state.cuda_graph_impl != "none":
        raise RuleError(
            f"{what} with cuda_graph_impl {state.cuda_graph_impl!r}, which memlab does not predict together: leave one "
            "of the two out",
            *(*fields, "cuda_graph_impl"),
        )


def _check_checkpointing(settings: MemorySettings, scenario: Scenario) -> None:
    if scenario.engine == "megatron":
        return
    if settings.recompute_granularity == "selective":
        raise RuleError(
            f"recompute_granularity is 'selective', must be 'full' with engine {scenario.engine!r}, which checkpoints "
            "whole layers: choose 'full', or engine 'megatron'",
            *("recompute_granularity", "engine"),
        )
    of_block = settings.recompute_num_layers if settings.recompute_method == "block" else None
    most = of_block or scenario.num_layers
    if (settings.checkpoint_every or 1) > most:
        raise RuleError(
            f"checkpoint_every is {settings.checkpoint_every}, must be at most {most}, the layers that full recompute "
            "covers, since it would recompute none of them otherwise: choose fewer, or leave recompute_granularity out",
            "checkpoint_every",
        )
    if settings.selective_ac and scenario.architecture.routes:
        raise RuleError(
            f"selective_ac is True, and {scenario.architecture.name} has experts, whose router in transformers 5.24 "
            'changes in place what such a checkpoint keeps, on which torch\'s backward fails ("has been mutated"): '
            "leave it out",
            "selective_ac",
        )
    if settings.selective_ac and scenario.layout.context_parallel_size > 1:
        raise RuleError(
            f"selective_ac is True with context_parallel_size {scenario.layout.context_parallel_size}, which memlab "
            "does not predict together: leave one of the two out",
            *("selective_ac", "context_parallel_size"),
        )
    if settings.recompute_method == "uniform" and settings.recompute_num_layers != 1:
        raise RuleError(
            f"recompute_num_layers is {settings.recompute_num_layers} with recompute_method 'uniform', must be 1 with "
            f"engine {scenario.engine!r}, which checkpoints each layer by itself: choose 1, or engine 'megatron'",
            *("recompute_num_layers", "engine"),
        )


def _check_extra_layers(settings: MemorySettings, scenario: Scenario) -> None:
    """Refuses what layers of multi-token prediction fail with under full recompute (``_checkpointed_forward``, 0.16.1).

    Its module is ``megatron/core/transformer/multi_token_prediction.py``. Under ``block``, it recomputes none of them.
    """
    if scenario.state.mtp_num_layers is None or settings.recompute_method != "uniform":
        return
    if settings.recompute_num_layers != 1:
        raise RuleError(
            f"recompute_num_layers is {settings.recompute_num_layers} with mtp_num_layers "
            f"{scenario.state.mtp_num_layers} and recompute_method 'uniform', must be 1 there by a rule of "
            "Megatron-Core: choose 1, or leave mtp_num_layers out",
            *("recompute_num_layers", "mtp_num_layers"),
        )
    if scenario.state.fp8_format is not None and scenario.state.fp8_recipe == "delayed":
        raise RuleError(
            f"recompute_method is 'uniform' with mtp_num_layers {scenario.state.mtp_num_layers} and fp8_recipe "
            "'delayed', which memlab does not predict together: choose recompute_granularity 'selective', another "
            "fp8_recipe, or leave mtp_num_layers out",
            *("recompute_method", "mtp_num_layers", "fp8_recipe"),
        )
    if scenario.packed_sequences is not None:
        raise RuleError(
            f"recompute_method is 'uniform' with mtp_num_layers {scenario.state.mtp_num_layers} and packed_sequences "
            f"{scenario.packed_sequences}, where the step of megatron-core 0.16 fails, because its checkpoint takes "
            "tensors only: choose recompute_granularity 'selective', or leave one of the others out",
            *("recompute_method", "packed_sequences", "mtp_num_layers"),
        )


def _check_frozen_layers(settings: MemorySettings, scenario: Scenario) -> None:
    """Refuses to recompute the output of a module whose input requires no gradient, because no adapter precedes it.

    Megatron's ``CheckpointWithoutOutput`` then has saved no input, and its step fails in backward
    (``tensor_parallel/random.py``, 0.16.1).
    """
    lora, modules = scenario.state.lora, settings.recompute_modules or ()
    if lora is None or lora.enable_input_require_grads or scenario.layout.pipeline_stage > 0:
        return
    for number, layer in enumerate(scenario.chunks_of_rank[0]):
        precedes = is_adapted = False  # in this layer; the first one with an adapter is the last to look at
        for part in scenario.architecture.parts_of(layer):
            precedes |= is_adapted
            is_adapted = any(lora.adapted(number, part.weights()))
            if isinstance(part, FeedForward):
                _check_frozen_feed_forward(part, number, modules, lora, precedes=precedes, is_adapted=is_adapted)
            else:
                _check_frozen_latent_attention(scenario, part, number, modules)
        if precedes or is_adapted:
            return


def _check_frozen_latent_attention(scenario: Scenario, part: Part, number: int, modules: Sequence[str]) -> None:
    lora = scenario.state.lora
    assert lora is not None, "the caller has adapters"
    adapted = [name for _, name in lora.adapted(number, part.weights())]
    if adapted and "layernorm" in modules and scenario.architecture.multi_latent_attention:
        raise RuleError(
            "recompute_modules has 'layernorm', but the input of the norm before the first adapted attention "
            "requires no gradient, on which Megatron-Core's step fails: leave it out, or set "
            "lora_enable_input_require_grads",
            *("recompute_modules", "lora_enable_input_require_grads"),
        )
    latent = [name for name in adapted if name.endswith(OF_LATENT_ATTENTION)]
    if "mla_up_proj" in modules and latent and not any(name.endswith("_down_proj") for name in latent):
        raise RuleError(
            "recompute_modules has 'mla_up_proj', but no linear before it in the first layers has an adapter: its "
            "input requires no gradient, and Megatron-Core's checkpoint then gives none to the adapters inside it: "
            "leave it out, or add linear_kv_down_proj to lora_target_modules",
            *("recompute_modules", "lora_target_modules"),
        )


def _check_frozen_feed_forward(
    part: FeedForward, number: int, modules: Sequence[str], lora: LoRA, *, precedes: bool, is_adapted: bool
) -> None:
    before_activation = precedes or lora.adapts(f"decoder.layers.{number}.mlp.experts.linear_fc1")
    for module, is_preceded in (("layernorm", precedes), ("moe_act", before_activation)):
        if part.routes and module in modules and not is_preceded:
            raise RuleError(
                f"recompute_modules has {module!r}, but no linear before it in the first layers has an "
                "adapter, so its input requires no gradient, on which Megatron-Core's step fails: leave it "
                "out, or add linear_qkv to lora_target_modules",
                *("recompute_modules", "lora_target_modules"),
            )
    module = "moe" if part.routes else "mlp"
    if module in modules and is_adapted and not precedes:
        raise RuleError(
            f"recompute_modules has {module!r}, but no linear before it in the first layers has an adapter: its "
            "input requires no gradient, and Megatron-Core's checkpoint then gives none to the adapters inside it: "
            "leave it out, add linear_qkv to lora_target_modules, or set lora_enable_input_require_grads",
            *("recompute_modules", "lora_target_modules", "lora_enable_input_require_grads"),
        )


def _check_megatron(*of_job: MemorySettings | TrainingState) -> None:
    for own in of_job:
        for one in _newer_options(type(own), _megatron_version()):  # type: ignore[arg-type]  # a class is hashable
            value = getattr(own, one.name)
            if value != one.default:
                raise RuleError(
                    f"{one.name} is {value}, but {not_in_megatron(one)}: leave it out, or install megatron-core "
                    f"{one.since_words}",
                    one.name,
                )


@cache
def _newer_options(cls: type, installed: tuple[int, ...]) -> list[Option]:
    return [one for one in options_of(cls).values() if one.since is not None and installed < one.since]


def not_in_megatron(option: Option) -> str:
    """Says that the installed megatron-core does not have an option; empty if it does."""
    if option.since is None or _megatron_version() >= option.since:
        return ""
    installed = ".".join(str(part) for part in _megatron_version())
    return f"the installed megatron-core {installed} does not have this setting ({option.since_words} has it)"


def _check_offload_groups(settings: MemorySettings, scenario: Scenario) -> None:
    """Refuses offload modules with which the second step ends in Megatron 0.19's own "Chunk mismatch".

    Its offload manager goes on to the groups of the next pass when a group ends while none of the pass is on the host.
    So it leaves a pass too early whose first group stays on the device
    (``megatron/core/pipeline_parallel/fine_grained_activation_offload.py``, 0.19.2, and not 0.18.2; Megatron-LM #6783
    repairs it). Under full recompute it does not.
    """
    num_passes = scenario.num_microbatches * scenario.layout.virtual_pipeline_model_parallel_size
    is_full = settings.recompute_granularity == "full"
    if _megatron_version() < (0, 19) or is_full or num_passes == 1 or not settings.offload_modules:
        return
    groups = [group for chunk in scenario.chunks if len(group := _groups_in_turn(settings, scenario, chunk)) > 1]
    alone = [names for names in groups if names.count(names[0]) == 1]
    chunk, delta_bytes = _whole(scenario.layers_of_chunks), settings.delta_offload_bytes_across_pp_ranks
    if not groups:
        return
    if alone:
        field, cause = "offload_modules", f"offload_modules has {alone[0]}, and {chunk} has one layer with them"
        remedy = f"name one of them, or give {chunk} two such layers"
    elif settings.activation_offload_fraction == 0:
        field, cause = "activation_offload_fraction", "activation_offload_fraction is 0"
        remedy = "leave offload_modules out, which is the same"
    elif delta_bytes and scenario.layout.pipeline_model_parallel_size > 1:
        field, remedy = "delta_offload_bytes_across_pp_ranks", "leave it out"
        cause = f"{field} is {delta_bytes}"
    else:
        return
    raise RuleError(
        f"{cause}: with {num_passes} passes, megatron-core 0.19's offload manager mixes them up, and the second step "
        f"fails ('Chunk mismatch'; Megatron-LM #6783 repairs it): {remedy}",
        *(field, "offload_modules"),
    )


def _groups_in_turn(settings: MemorySettings, scenario: Scenario, chunk: Sequence[int]) -> list[str]:
    """Returns the groups of a pass through a model chunk that begin after another one has ended, in their order."""
    offloaded = set(settings.offload_modules or ())
    if "core_attn" in (settings.recompute_modules or ()):
        offloaded.discard("core_attn")
    parts = (part for layer in chunk for part in scenario.architecture.parts_of(layer))
    return [name for part in parts for name in part.groups_in_turn(offloaded)]


@cache
def _megatron_version() -> tuple[int, ...]:
    """Returns major and minor version, without an import of Megatron and torch; that of the newest if none is found."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        found = None
    return tuple(int(part) for part in found.groups()) if found else (0, 19)


def is_without_checkpoints(settings: MemorySettings, scenario: Scenario) -> bool:
    """Whether Megatron-Core ignores full recompute, which it does in older models with layers of Mamba."""
    is_hybrid = scenario.architecture.hybrid_override_pattern is not None
    is_old = is_hybrid and not scenario.versions.checkpoints_hybrid_models(_megatron_version())
    return is_old and settings.recompute_granularity == "full"


def _whole(layers: tuple[int, ...]) -> str:
    return "the model" if len(layers) == 1 else "a model chunk"
