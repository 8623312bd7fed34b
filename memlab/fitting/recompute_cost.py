"""The floating-point operations that recompute adds, counted by hand from the shapes of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.transformers_linears import linears

_PASSES = 3
"""Operations of a step divided by those of its forward: backward has two products for each product of forward."""


def recomputed_operations(settings: MemorySettings, scenario: Scenario) -> float:
    """Counts the FLOPs that backward recomputes for one token, over the layers of the rank's stage.

    A product of [1, n] and [n, m] is 2 n m. Example: phi-4 (hidden 5120, feed-forward 17920, SwiGLU) has three
    matrices in its MLP, so recomputing ``mlp`` in one layer costs 3 x 2 x 5120 x 17920 = 550 MFLOP per token. A module
    whose recompute has no effect on this model costs nothing.
    """
    if settings.recompute_granularity == "full":
        # Of uneven stages, one may have fewer layers than the settings name.
        first = settings.recompute_num_layers if settings.recompute_method == "block" else None
        every = settings.checkpoint_every or 1
        chunks = [chunk[:first][every - 1 :: every] for chunk in scenario.chunks_of_rank]
        if settings.selective_ac:
            one_layer = [*linears(scenario.architecture, 1)][:-1]
            of_layer = 2.0 * sum(one.outputs * one.inputs for one in one_layer[1::2])
            if scenario.state.attn_implementation == "flash_attention_2":  # no operation of torch, so it is not kept
                attention = scenario.architecture.attention
                of_layer += attention.operations_of_modules(_attended(scenario))["core_attn"]
            return sum(map(len, chunks)) * of_layer
        return sum(_operations_of_layers(scenario, chunk) for chunk in chunks)
    model, attended = scenario.architecture, _attended(scenario)
    modules = settings.recompute_modules or ()
    counts = model.kinds_of(scenario.layers_of_rank).items()
    return sum(count * part.operations_of_modules(attended).get(name, 0) for part, count in counts for name in modules)


def recomputed_share(settings: MemorySettings, scenario: Scenario) -> float:
    """Returns what settings recompute, as a share of the FLOPs of forward and backward without recompute.

    Full recompute of every layer is one more forward pass, so a third, and less on the last stage, whose output layer
    is not recomputed.
    """
    model, layout = scenario.architecture, scenario.layout
    forward = _operations_of_layers(scenario, scenario.layers_of_rank)
    if layout.pipeline_stage == layout.pipeline_model_parallel_size - 1:
        forward += 2.0 * model.hidden_size * (scenario.state.num_labels or model.vocab_size)
    return recomputed_operations(settings, scenario) / (_PASSES * forward)


def share_text(share: float) -> str:
    """Writes a share of a step in percent; ``<0.1%`` is not nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _operations_of_layers(scenario: Scenario, layers: Sequence[int]) -> float:
    model, attended = scenario.architecture, _attended(scenario)
    return sum(count * part.operations(attended) for part, count in model.kinds_of(layers).items())


def _attended(scenario: Scenario) -> float:
    """Returns the tokens of a sequence."""
    return scenario.seq_length / (scenario.packed_sequences or 1)
