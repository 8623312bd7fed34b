"""What a setting can save at most, from what was alive and where it was born, and what it costs.

Bytes are labelled with the module that made them; a setting acts on what a module keeps. The tables say which is
which, for the layers of Transformer Engine and of `memlab.model.layers.torch_layers`; tests compare them with measured
steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.out_of_memory import OutOfMemory

RECOMPUTED = {
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "moe_act": ("mlp.experts",),
    "mlp": ("mlp", "mlp.*"),
    "moe": ("mlp", "mlp.*"),
}
"""Where in a layer each module's recompute frees what was born. ``core_attn`` is left out: a fused attention keeps its
inputs and its output either way, and recomputing it raised the peak wherever it was measured."""
OFFLOADED = {
    "qkv_linear": ("", "self_attention.linear_qkv", "self_attention.q_layernorm", "self_attention.k_layernorm"),
    "core_attn": ("self_attention", "self_attention.core_attention"),
    "attn_proj": ("self_attention.core_attention",),
    "mlp_norm": ("", "pre_mlp_layernorm"),
    "expert_fc1": ("mlp",),
    "moe_act": ("mlp.experts.linear_fc1", "mlp.router"),
}
"""Where in a layer the tensors were born that each offload module moves. The last layer's stay on the device."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.(.*))?$")

Born = dict[tuple[int, str], int]
"""Layer of a chunk and module in it, to the bytes that it had made and that were alive."""


def born_in_layers(by_module: Mapping[str, int], scenario: Scenario) -> Born:
    """Keeps what the transformer's layers made, with those of several chunks as if they were one's."""
    born: Born = {}
    for name, num_bytes in by_module.items():
        found = _LAYER.match(name)
        if found is not None:
            place = int(found[1]) % scenario.num_layers_of_chunk, found[2] or ""
            born[place] = born.get(place, 0) + num_bytes
    return born


def born_in_whole_step(refused: OutOfMemory, scenario: Scenario) -> Born:
    """Returns what the layers would have held with the most passes in flight: what was not reached, like what was.

    Where no layer was finished, the first counts with as much as it had come to.
    """
    born = born_in_layers(refused.activations_by_module, scenario)
    at = _LAYER.match(refused.failed_allocation.module)
    if refused.failed_allocation.phase != "forward" or at is None:
        return born
    num_layers, most = scenario.num_layers_of_chunk, scenario.most_passes_in_flight
    here, earlier = int(at[1]) % num_layers, min(refused.passes_in_flight, most) - 1
    passes = {layer: earlier + (layer < here) for layer in range(num_layers) if layer != here}
    finished = {layer: count for layer, count in passes.items() if count} or {here: earlier + 1}
    names = {module for layer, module in born if layer in finished}
    bytes_of_all = {name: sum(born.get((layer, name), 0) for layer in finished) for name in names}
    mean = {name: num_bytes / sum(finished.values()) for name, num_bytes in bytes_of_all.items()}
    whole = {(layer, name): int(most * size) for layer in range(num_layers) for name, size in mean.items()}
    return whole | {place: size for place, size in born.items() if finished.get(place[0]) == most}


def recomputed_bytes(settings: MemorySettings, born: Born, scenario: Scenario) -> int:
    """Returns the most bytes, of those that were born, that backward would make a second time."""
    if settings.recompute_granularity == "full":
        block = settings.recompute_method == "block"
        layers = range((settings.recompute_num_layers or 0) if block else scenario.num_layers_of_chunk)
        return sum(size for (layer, _), size in born.items() if layer in layers)
    places = [place for name in settings.recompute_modules or () for place in RECOMPUTED.get(name, ())]
    return sum(size for (_, module), size in born.items() if _is_at(module, places))


def offloaded_bytes(settings: MemorySettings, born: Born, scenario: Scenario) -> int:
    """Returns the most bytes, of those that were born, that would wait on the host."""
    places = [place for name in settings.offload_modules or () for place in OFFLOADED.get(name, ())]
    # With several passes in flight it is the last layer of one of them alone.
    last = scenario.num_layers_of_chunk - 1 if scenario.most_passes_in_flight == 1 else None
    return sum(size for (layer, module), size in born.items() if layer != last and _is_at(module, places))


def checkpoint_bytes(settings: MemorySettings, born: Born, scenario: Scenario) -> int:
    """Returns the bytes of the inputs [sequence, batch, hidden] that one pass's checkpoints of whole layers keep."""
    if settings.recompute_granularity != "full":
        return 0
    item_bytes = 2 if scenario.dtype == "bf16" else 4
    reached = len({layer for layer, _ in born})
    return (
        min(num_checkpoints(settings, scenario), reached)
        * scenario.tokens_of_rank
        * (scenario.architecture.hidden_size * item_bytes)
    )


def num_checkpoints(settings: MemorySettings, scenario: Scenario) -> int:
    """Returns in how many parts the backward of one pass makes the recomputed bytes again, one at a time."""
    if settings.recompute_method == "uniform":
        return scenario.num_layers_of_chunk // (settings.recompute_num_layers or 1)
    return settings.recompute_num_layers or scenario.num_layers_of_chunk


def recomputed_operations(settings: MemorySettings, scenario: Scenario) -> float:
    """Counts the operations that backward makes a second time for one token, over the layers of the rank's stage."""
    model = scenario.architecture
    hidden, query = model.hidden_size, model.num_attention_heads * model.kv_channels
    expert_width = model.moe_router_topk * model.moe_ffn_hidden_size
    of = {
        "attention": 4.0 * hidden * (query + model.num_query_groups * model.kv_channels),
        "core_attn": 2.0 * scenario.seq_length * query,  # causal: half of all pairs, scores and values
        "layernorm": 4.0 * hidden,
        "moe_act": 6.0 * expert_width,
        "mlp": 6.0 * hidden * model.ffn_hidden_size,
        "moe": 6.0 * hidden * expert_width + 2.0 * hidden * (model.num_moe_experts or 0),
    }
    if settings.recompute_granularity == "full":
        block = settings.recompute_method == "block"
        chunks = scenario.layout.virtual_pipeline_model_parallel_size
        layers = (settings.recompute_num_layers or 0) * chunks if block else scenario.num_layers_of_stage
        return layers * sum(of[part] for part in ("attention", "core_attn", "moe" if model.is_moe else "mlp"))
    return scenario.num_layers_of_stage * sum(of[name] for name in settings.recompute_modules or ())


def _is_at(module: str, places: Sequence[str]) -> bool:
    return any(module == place or (place.endswith("*") and module.startswith(place[:-1])) for place in places)
