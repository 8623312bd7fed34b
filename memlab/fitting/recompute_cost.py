"""The floating-point operations that recompute adds, counted by hand from the shapes of a layer."""

from __future__ import annotations

from memlab.config.model_restrictions import without_effect
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings

_PASSES = 3
"""Operations of a step divided by those of its forward: backward has two products for each product of forward."""


def recomputed_operations(settings: MemorySettings, scenario: Scenario) -> float:
    """Counts the FLOPs that backward recomputes for one token, over the layers of the rank's stage.

    A product of [1, n] and [n, m] is 2 n m. Example: phi-4 (hidden 5120, feed-forward 17920, SwiGLU) has three
    matrices in its MLP, so recomputing ``mlp`` in one layer costs 3 x 2 x 5120 x 17920 = 550 MFLOP per token. A module
    whose recompute has no effect on this model costs nothing.
    """
    of = _operations_of_modules(scenario)
    if settings.recompute_granularity == "full":
        block = settings.recompute_method == "block"
        chunks = scenario.layout.virtual_pipeline_model_parallel_size
        most = scenario.num_layers_of_stage  # of uneven stages, one may have fewer layers than the settings name
        layers = min((settings.recompute_num_layers or 0) * chunks, most) if block else most
        return layers * _operations_of_layer(scenario)
    idle = without_effect(settings, scenario.architecture)
    modules = (name for name in settings.recompute_modules or () if f"recompute_modules:{name}" not in idle)
    return scenario.num_layers_of_stage * sum(of[name] for name in modules)


def recomputed_share(settings: MemorySettings, scenario: Scenario) -> float:
    """Returns what settings recompute, as a share of the FLOPs of forward and backward without recompute.

    Full recompute of every layer is one more forward pass, so a third, and less on the last stage, whose output layer
    is not recomputed.
    """
    model, layout = scenario.architecture, scenario.layout
    forward = scenario.num_layers_of_stage * _operations_of_layer(scenario)
    if layout.pipeline_stage == layout.pipeline_model_parallel_size - 1:
        forward += 2.0 * model.hidden_size * model.vocab_size
    return recomputed_operations(settings, scenario) / (_PASSES * forward)


def share_text(share: float) -> str:
    """Writes a share of a step in percent; ``<0.1%`` is not nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _operations_of_layer(scenario: Scenario) -> float:
    of = _operations_of_modules(scenario)
    return sum(of[part] for part in ("attention", "core_attn", "moe" if scenario.architecture.is_moe else "mlp"))


def _operations_of_modules(scenario: Scenario) -> dict[str, float]:
    """Counts the FLOPs of each module's forward pass for one token, in one layer."""
    model = scenario.architecture
    hidden, query = model.hidden_size, model.num_attention_heads * model.kv_channels
    attended = scenario.seq_length / (scenario.packed_sequences or 1)
    expert_width = model.moe_router_topk * model.moe_ffn_hidden_size
    return {
        "attention": 4.0 * hidden * (query + model.num_query_groups * model.kv_channels),
        "core_attn": 2.0 * attended * query,  # causal: half of all pairs, scores and values
        "layernorm": 4.0 * hidden,
        "moe_act": 6.0 * expert_width,
        "mlp": 6.0 * hidden * model.ffn_hidden_size,
        "moe": 6.0 * hidden * expert_width + 2.0 * hidden * (model.num_moe_experts or 0),
    }
