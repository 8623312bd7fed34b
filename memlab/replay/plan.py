"""Which parts of a step may be replayed, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.config.model_restrictions import checkpoints_moe_layers, keeps_gradients_in_graph
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a stepper knows of a step before it begins."""

    scenario: Scenario
    settings: MemorySettings
    forward_only: bool
    is_tapped: bool
    """Whether a tap looks at the real tensors of passes."""
    has_fault: bool
    """Whether a residency fault looks at the real tensors of any part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What of one step may be replayed; without arguments, nothing."""

    passes: bool = False
    """Passes through layers."""
    microbatches: bool = False
    update: bool = False
    gradients: bool = False
    """What finalizes them after the last backward pass."""
    whole_step: bool = False
    """Whether it depends only on the settings, the workload and what is allocated when it begins."""
    offloads: bool = False
    """Whether replayed passes have to tell Megatron's offload manager."""
    recomputes_moe: bool = False
    """Whether MoE layers are recomputed as a whole."""
    opens: bool = False
    """Whether each layer of a large checkpoint may be replayed by itself."""
    forward_only_passes: bool = False
    """Passes through layers in a step without backward, after the first one of each layer."""


def plan_step(step: Circumstances, *, has_limit: bool, is_looked_at: bool, follows_full_recompute: bool) -> Plan:
    """Plans one step of a simulated model.

    Args:
        has_limit: Whether it may run out of memory.
        is_looked_at: Whether `Meter.at_event` looks at the real tensors of any part.
        follows_full_recompute: Whether MoE layers may still keep the graphs of a step with full recompute.
    """
    scenario, settings = step.scenario, step.settings
    if scenario.state.cuda_graph_impl == "transformer_engine":
        return Plan()  # its graphs replay layers
    layout, is_moe = scenario.layout, scenario.architecture.keeps_graph
    offloads = bool(settings.offload_modules)
    # FP8 keeps state between passes, and between updates. A CUDA graph may keep the memory of gradients.
    is_graphed = scenario.state.cuda_graph_impl != "none"
    must_be_stepped = scenario.state.fp8_format is not None or is_looked_at or step.has_fault
    must_be_stepped |= keeps_gradients_in_graph(scenario)
    overlaps = scenario.state.overlap_grad_reduce or scenario.state.overlap_param_gather
    recomputes_moe = checkpoints_moe_layers(settings, scenario.architecture)
    # On a stage, something else may refer to an input, which a remedy then leaves alone: the record counts those.
    spares_inputs = (
        recomputes_moe
        and settings.checkpoint_input_remedy is not None
        and (layout.pipeline_model_parallel_size > 1 or scenario.state.lora is not None)
    )
    repeats = not (spares_inputs or scenario.rows_vary or step.is_tapped or must_be_stepped)
    are_equal = repeats and not step.forward_only
    # Then each layer has a pass without gradients before the one that is trained.
    has_two_passes = scenario.state.reference_model == "without_adapters"
    has_stages = layout.pipeline_model_parallel_size > 1
    # What a stage receives for two models is one tensor, which the input of its first layer is a part of.
    shares_input = layout.pipeline_stage > 0 and scenario.state.reference_model != "none"
    passes = are_equal and not has_two_passes and not shares_input
    if is_moe:
        # The first step after full recompute frees its graphs: each may cover layers that are in different units now,
        # or keep what other layers have made. After an out-of-memory, what the graph that an MoE layer's dispatcher
        # retains keeps depends on where that happened. With several model chunks, an MoE layer that is recomputed in
        # the backward pass of one micro-batch frees what its dispatcher retains of any other's pass. After
        # replayed passes through a pipeline stage with layers of both kinds, torch reserved 2 MiB less in a later step.
        has_chunks = layout.virtual_pipeline_model_parallel_size > 1
        is_mixed_stage = has_stages and scenario.architecture.moe_layer_freq is not None
        passes &= not (follows_full_recompute or has_limit or is_mixed_stage or (recomputes_moe and has_chunks))
    if offloads:
        passes &= not (has_stages or overlaps or settings.activation_offload_fraction != 1 or has_limit)
    # What a dispatcher's graph keeps of its checkpoint is known to belong to layers with experts of one model.
    is_followed = not (has_stages or scenario.state.lora is not None or settings.checkpoint_input_remedy is not None)
    opens = not is_moe or (is_followed and scenario.architecture.moe_layer_freq is None)
    return Plan(
        passes=passes,
        microbatches=repeats and not offloads and layout.virtual_pipeline_model_parallel_size == 1,
        update=not (must_be_stepped or overlaps),
        # Stages send each other gradients then, and a graph keeps what its capture has allocated.
        gradients=not (must_be_stepped or overlaps or has_stages or is_graphed or step.forward_only),
        whole_step=are_equal and not overlaps and not offloads and not is_graphed,
        offloads=passes and offloads,
        recomputes_moe=passes and recomputes_moe,
        opens=passes and opens and not offloads,
        forward_only_passes=repeats and step.forward_only and not offloads and not has_limit,
    )
