"""Estimates the peak that a step which ran out of memory would have had under other settings.

Bytes are labelled with the module that allocated them; a setting acts on what a module keeps for backward. Tables
say which is which, for the layers of Transformer Engine and of `memlab.engines.megatron.layers.torch_layers`; tests
compare them with measured steps. Every estimate is a bound from below: a setting frees at most what was allocated
where it acts, and adds at least what backward recomputes at one time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.step_record import StepRecord

RECOMPUTED = {
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "moe_act": ("mlp.experts",),
    "mla_up_proj": (
        *("self_attention", "self_attention.linear_q_proj"),
        *("self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"),
    ),
    "shared_experts": ("mlp.shared_experts", "mlp.shared_experts.*"),
    "mlp": ("mlp", "mlp.*"),
    "moe": ("mlp", "mlp.*"),
}
"""Where in a layer recompute of each module frees memory. ``core_attn`` is left out: a fused attention keeps its inputs
and its output either way, and recomputing it raised the peak wherever it was measured (`recomputed_places`)."""
_OF_UNFUSED_ATTENTION = {"core_attn": ("self_attention.core_attention", "self_attention.core_attention.*")}
INSIDE: dict[str, tuple[str, ...]] = {
    "core_attn": (r"\.self_attention\.core_attention",),
    "layernorm": (r"\.(.+\.)?\w*layernorm$",),
    "mla_up_proj": (r"\.self_attention",),
    "mlp": (r"\.mlp", r"\.pre_mlp_layernorm"),
    "moe": (r"\.mlp", r"\.pre_mlp_layernorm"),
    "moe_act": (r"\.mlp\.experts(?!\.linear_fc1)",),  # in FP8 the input of linear_fc2 too, which it keeps in 8 bits
    "shared_experts": (r"\.mlp\.shared_experts",),
}
"""Which modules of a layer allocate what a recomputed module does not keep for backward: at most these. Any other
recomputed module may free whatever a layer allocates."""
OFFLOADED = {
    "attn_norm": ("",),
    "qkv_linear": (
        *("", "self_attention", "input_layernorm"),
        *("self_attention.linear_qkv", "self_attention.q_layernorm", "self_attention.k_layernorm"),
        *("self_attention.linear_q_down_proj", "self_attention.linear_kv_down_proj"),
        *("self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"),
    ),
    "core_attn": ("self_attention", "self_attention.core_attention"),
    "attn_proj": ("self_attention.core_attention",),
    "mlp_norm": ("", "pre_mlp_layernorm"),
    "expert_fc1": ("mlp",),
    "moe_act": ("mlp.experts.linear_fc1", "mlp.router"),
}
"""Where in a layer the tensors are allocated that each offload module transfers. Those of the last layer stay."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.(.*))?$")
_ADAPTED = re.compile(r"\.(to_wrap|adapter)(\..*)?$")
_LOGITS_BYTES = 2
_FP32_LOGITS_BYTES = 4
_WORKLOAD = ("seq_length", "micro_batch_size", "num_microbatches", "seed")

LayerBytes = dict[tuple[int, str], int]
"""Layer of a chunk and module in it, to the bytes that the module has allocated."""


class StepEstimate:
    """What a step that ran out of memory would have needed, under its own settings and under others."""

    def __init__(self, record: StepRecord, earlier_records: Sequence[StepRecord]) -> None:
        assert record.out_of_memory is not None
        self.record, self.earlier_records = record, earlier_records
        self.failure = record.out_of_memory
        self.at_failure = bytes_in_layers(self.failure.activations_by_module, record.scenario)
        self.whole_step = bytes_in_whole_step(self.failure, record.scenario)
        self.retained_bytes = self._retained_bytes()
        failed = self.failure.failed_allocation
        self._requested_peak_bytes = failed.allocated_bytes + failed.pending_free_bytes + failed.requested_bytes
        self._other_needs = (self._bytes_at_loss(), *self._peaks_at_other_workloads(record.settings))

    @property
    def limit_bytes(self) -> int:
        """The most that another step could allocate."""
        return self.failure.failed_allocation.step_capacity_bytes

    @property
    def outside_model_bytes(self) -> int:
        """Allocated before the step, and by no module of the model: no setting changes it."""
        return self.failure.retained_by_module.get("", 0)

    @property
    def expected_peak_bytes(self) -> int:
        """The least that the whole step would have needed under its own settings."""
        return max(self._requested_peak_bytes, *self._other_needs)

    def covers(self, settings: MemorySettings) -> bool:
        """Whether the tables describe all that settings do in addition to the step's.

        They do not describe recompute of a fused ``core_attn``; offload next to full recompute, where what is
        offloaded and what is recomputed overlap; and offload between steps, which lowers nothing within a step.
        """
        own = self.record.settings
        groups = ("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update")
        same_groups = all(getattr(settings, group) == getattr(own, group) for group in groups)
        offloaded = set(settings.offload_modules or ()) - set(own.offload_modules or ())
        recomputed = set(settings.recompute_modules or ()) - set(own.recompute_modules or ())
        overlap = bool(offloaded) and settings.recompute_granularity == "full"
        places = recomputed_places(self.record.scenario)
        return same_groups and offloaded <= OFFLOADED.keys() and recomputed <= places.keys() and not overlap

    def freed_bytes(self, settings: MemorySettings) -> int:
        """Returns by how much settings lower the whole step's activations at most; below 0 they raise them."""
        return self._freed_of(self.whole_step, settings)

    def peak_bytes(self, settings: MemorySettings) -> int:
        """Returns the least that the whole step would need under other settings.

        The largest of three bounds, or, where the lab took a step under these settings with another workload, that
        step's peak scaled to this one:

        1. allocated + requested at the failure, less what the settings free of what was allocated then;
        2. each need of the whole step (at the loss; in other workloads), less what they free of the whole step;
        3. static bytes + all layers' activations - freed + what backward recomputes at one time.

        Example in GiB: static 50; 70 allocated and 10 requested when 20 were in the layers; the loss needs 78.
        Recomputing what holds 6 in four layers: max(80 - 6, 78 - 6, 50 + 20 - 6 + 6 / 4) = 74.
        """
        scaled = list(self._peaks_at_other_workloads(settings))
        if scaled:
            return max(scaled)
        freed = self.freed_bytes(settings)
        static_bytes = self.failure.static_bytes
        return max(
            self._requested_peak_bytes - self._freed_of(self.at_failure, settings),
            *(need - freed for need in self._other_needs),
            static_bytes + sum(self.whole_step.values()) - freed + self._recomputed_at_once(settings),
        )

    def _freed_of(self, allocated: LayerBytes, settings: MemorySettings) -> int:
        scenario, own = self.record.scenario, self.record.settings
        freed = recomputed_bytes(settings, allocated, scenario) + offloaded_bytes(settings, allocated, scenario)
        adds_remedy = settings.checkpoint_input_remedy not in (None, own.checkpoint_input_remedy)
        return freed - checkpoint_bytes(settings, allocated, scenario) + (self.retained_bytes if adds_remedy else 0)

    def _recomputed_at_once(self, settings: MemorySettings) -> int:
        """Returns what one checkpoint recomputes while the other layers still hold all that they keep.

        The first layers are recomputed last, when the backward of the others has freed what they held: 0 for a block.
        """
        if settings.recompute_method == "block":
            return 0
        scenario = self.record.scenario
        of_all = recomputed_bytes(settings, self.whole_step, scenario)
        return of_all // num_checkpoints(settings, scenario) // scenario.most_passes_in_flight

    def _retained_bytes(self) -> int:
        """Returns the most that was allocated and not needed when the allocation failed.

        In forward it is what was allocated before the step and not freed. Backward leaves the same behind, layer after
        layer: there it is up to what earlier steps under the same settings left.
        """
        left = [
            known.residual_bytes
            for known in self.earlier_records
            if known.status == "ok"
            and (known.scenario, known.settings) == (self.record.scenario, self.record.settings)
            and self.failure.failed_allocation.phase not in ("load", "forward")
        ]
        return max([self.failure.retained_bytes, *left])

    def _bytes_at_loss(self) -> int:
        """Returns what the step needs at the loss: static bytes, all layers' activations, and the logits.

        Logits that the forward pass had not reached are counted as 2 bytes per token and word of the vocabulary, and 4
        more for a loss that copies all of them in fp32: 4096 tokens and 151,936 words are 3.5 GiB together.
        """
        failed, scenario = self.failure.failed_allocation, self.record.scenario
        others = sum(self.failure.activations_by_module.values()) - sum(self.at_failure.values())
        sees_loss = scenario.layout.pipeline_stage == scenario.layout.pipeline_model_parallel_size - 1
        before_loss = failed.module.startswith(("decoder.layers", "embedding"))
        if sees_loss and failed.phase == "forward" and before_loss:
            of_each = _LOGITS_BYTES + _FP32_LOGITS_BYTES * scenario.state.copies_logits_in_fp32
            tokens = scenario.seq_length * scenario.micro_batch_size // scenario.layout.context_parallel_size
            others += tokens * scenario.outputs_of_a_token * of_each
        return self.failure.static_bytes + sum(self.whole_step.values()) + others

    def _peaks_at_other_workloads(self, settings: MemorySettings) -> Iterator[int]:
        """Yields what earlier steps under some settings would have needed with this workload, by tokens.

        peak = max(peak then, start + activation peak x tokens / tokens then). Example: a step of 1024 tokens started at
        50 GiB and peaked 6 GiB above that; with 4096 tokens it needs 50 + 6 x 4 = 74 GiB.
        """
        for known in self.earlier_records:
            if known.settings != settings or known.status != "ok" or known.offloaded_bytes_by_group:
                continue
            scenario = self.record.scenario
            if replace(known.scenario, **{name: getattr(scenario, name) for name in _WORKLOAD}) != scenario:
                continue
            longer = scenario.tokens_of_rank / known.scenario.tokens_of_rank
            scaled = known.static_bytes + int(known.activation_peak_bytes * longer)
            yield max(known.peak_allocated_bytes, scaled) + self.outside_model_bytes


def bytes_in_layers(by_module: Mapping[str, int], scenario: Scenario) -> LayerBytes:
    """Keeps what the transformer's layers allocated; the layers of several chunks are counted as one chunk's."""
    allocated: LayerBytes = {}
    in_chunks = [place for chunk in scenario.chunks_of_rank for place in range(len(chunk))]
    for name, num_bytes in by_module.items():
        found = _LAYER.match(name)
        if found is not None:
            # A linear with an adapter is in a module of its name, and so is the adapter.
            module = _ADAPTED.sub("", found[2] or "")
            place = in_chunks[int(found[1])], module
            allocated[place] = allocated.get(place, 0) + num_bytes
    return allocated


def bytes_in_whole_step(failure: OutOfMemory, scenario: Scenario) -> LayerBytes:
    """Estimates what all layers hold with the most passes in flight, from a forward pass that stopped on its way.

    Layer l had finished passes(l) = earlier passes in flight + (1 if l < the layer that stopped). With mean(module) =
    bytes of the module over the finished layers / sum of their passes, a layer that was not reached as often as it can
    be holds most_passes_in_flight x mean(module). If no layer had finished, the first counts with what it held so far.

    Example: 4 layers, one pass at a time, stopped in layer 2; layers 0 and 1 hold 10 and 12 MiB. passes = 1 and 1,
    mean = 22 / 2 = 11 MiB, and the whole step holds 10 + 12 + 11 + 11 = 44 MiB.
    """
    allocated = bytes_in_layers(failure.activations_by_module, scenario)
    at = _LAYER.match(failure.failed_allocation.module)
    if failure.failed_allocation.phase != "forward" or at is None:
        return allocated
    num_layers, most = scenario.num_layers_of_chunk, scenario.most_passes_in_flight
    here, earlier = int(at[1]) % num_layers, min(failure.passes_in_flight, most) - 1
    passes = {layer: earlier + (layer < here) for layer in range(num_layers) if layer != here}
    finished = {layer: count for layer, count in passes.items() if count} or {here: earlier + 1}
    names = {module for layer, module in allocated if layer in finished}
    bytes_of_all = {name: sum(allocated.get((layer, name), 0) for layer in finished) for name in names}
    mean = {name: num_bytes / sum(finished.values()) for name, num_bytes in bytes_of_all.items()}
    whole = {(layer, name): int(most * size) for layer in range(num_layers) for name, size in mean.items()}
    return whole | {place: size for place, size in allocated.items() if finished.get(place[0]) == most}


def recomputed_places(scenario: Scenario) -> dict[str, tuple[str, ...]]:
    """Returns where in a layer recompute of each module frees memory.

    Unfused attention keeps the probabilities of every pair of tokens, which recompute of ``core_attn`` frees.
    """
    return RECOMPUTED | _OF_UNFUSED_ATTENTION if scenario.keeps_scores else RECOMPUTED


def recomputed_bytes(settings: MemorySettings, allocated: LayerBytes, scenario: Scenario) -> int:
    """Returns the most of some allocated bytes that backward would recompute."""
    if settings.recompute_granularity == "full":
        block = settings.recompute_method == "block"
        layers = range((settings.recompute_num_layers or 0) if block else scenario.num_layers_of_chunk)
        return sum(size for (layer, _), size in allocated.items() if layer in layers)
    known = recomputed_places(scenario)
    places = [place for name in settings.recompute_modules or () for place in known.get(name, ())]
    return sum(size for (_, module), size in allocated.items() if _is_at(module, places))


def offloaded_bytes(settings: MemorySettings, allocated: LayerBytes, scenario: Scenario) -> int:
    """Returns the most of some allocated bytes that would be on the host."""
    places = [place for name in settings.offload_modules or () for place in OFFLOADED.get(name, ())]
    # With several passes in flight, only the last layer of one of them stays on the device.
    last = scenario.num_layers_of_chunk - 1 if scenario.most_passes_in_flight == 1 else None
    return sum(size for (layer, module), size in allocated.items() if layer != last and _is_at(module, places))


def checkpoint_bytes(settings: MemorySettings, allocated: LayerBytes, scenario: Scenario) -> int:
    """Returns the bytes of the inputs [sequence, batch, hidden] that one pass's checkpoints of whole layers keep."""
    if settings.recompute_granularity != "full":
        return 0
    item_bytes = 2 if scenario.dtype == "bf16" else 4
    reached = len({layer for layer, _ in allocated})
    return (
        min(num_checkpoints(settings, scenario), reached)
        * scenario.tokens_of_rank
        * (scenario.architecture.hidden_size * item_bytes)
    )


def num_checkpoints(settings: MemorySettings, scenario: Scenario) -> int:
    """Returns in how many parts the backward of one pass recomputes, one part at a time."""
    if settings.recompute_method == "uniform":
        return scenario.num_layers_of_chunk // (settings.recompute_num_layers or 1)
    return settings.recompute_num_layers or scenario.num_layers_of_chunk


def _is_at(module: str, places: Sequence[str]) -> bool:
    return any(module == place or (place.endswith("*") and module.startswith(place[:-1])) for place in places)
