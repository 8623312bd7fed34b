"""What a step needs at least, known without stepping it: a step that needs more than there is cannot fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from memlab.config.parameters import kept_bytes
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.estimate import INSIDE
from memlab.record.step_record import StepRecord

_LAYER = re.compile(r"^decoder\.layers\.\d+")
_IN_LAYER = "layer"


def least_peak_bytes(job: Scenario, base: MemorySettings) -> int:
    """Returns what a rank of the last pipeline stage allocates at least, whatever it recomputes: a bound from below.

    Counted are parameters, gradients, optimizer state, and the logits that the loss is computed from; nothing of an
    optimizer on the host. So no layout is left out that would fit.
    """
    layout, state, is_bf16 = job.layout, job.state, job.dtype == "bf16"
    static = bytes_at_update(replace(job, layout=replace(layout, rank=layout.world_size - 1)))
    if base.offload_optimizer_except_update:
        return static  # the logits are freed before the update, the only time at which all of it is on the device
    tokens = job.seq_length * job.micro_batch_size // layout.context_parallel_size
    of_logit = 4 if not is_bf16 else 2 + 4 * state.copies_logits_in_fp32
    return static + tokens * job.outputs_of_a_token * of_logit


def bytes_at_update(scenario: Scenario) -> int:
    """Returns what a rank has on the device at least while its optimizer updates, whatever its memory settings.

    Counted are parameters, gradients and optimizer state; nothing of an optimizer on the host.
    """
    kept = kept_bytes(scenario)
    return kept.parameters + kept.gradients + (0 if scenario.state.optimizer_cpu_offload else kept.optimizer)


def bytes_at_peak(record: StepRecord) -> dict[str, int]:
    """Returns what was requested of a predicted step's device bytes at their peak, by module, all layers together.

    Empty for a step that recomputes or offloads activations: `least_peak_with` would know nothing from it.
    """
    timeline, settings = record.timeline, record.settings
    if timeline is None or settings.recompute_granularity is not None or settings.offload_modules:
        return {}
    found: dict[str, int] = {}
    by_module = timeline.breakdown(timeline.peak_index(), by="module", with_rounding=False)
    for module, num_bytes in by_module.items():
        part = _LAYER.sub(_IN_LAYER, module)
        found[part] = found.get(part, 0) + num_bytes
    return found


def least_peak_with(recompute: MemorySettings, at_peak: Mapping[str, int]) -> int:
    """Returns what a step with recompute allocates at least at the moment at which the step without it peaks.

    Up to that moment both steps do the same, and recompute frees only what the modules inside its checkpoints have
    allocated. So whatever other modules have allocated is there in both. Only what was requested counts: a block of
    the allocator may be smaller in the other step.

    Example in GiB: without recompute, a step peaks with 60 of parameters, gradients and optimizer state, 2 of norms
    and 30 of the other modules of the layers. With the norms recomputed it needs 90 at least.

    Args:
        recompute: The settings of a step without recompute, and recompute in addition.
        at_peak: `bytes_at_peak` of the step without it; if it is empty, the answer is 0.
    """
    recomputed = [f"^{_IN_LAYER}"] if recompute.recompute_granularity == "full" else []
    for name in recompute.recompute_modules or ():
        recomputed += [f"^{_IN_LAYER}{inside}" for inside in INSIDE.get(name, ("",))]
    recomputed.append(r"\blayers\.\d+")  # of multi-token prediction, whose modules have other names
    freed = re.compile("|".join(recomputed))
    return sum(num_bytes for part, num_bytes in at_peak.items() if not freed.search(part))
