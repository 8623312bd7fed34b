"""How much more memory real steps needed than predicted ones: what decides between "fits" and "may fit".

This is the only place that has these shares. They are measurements and not guarantees: of one kind of GPU, and of the
two families of models that memlab knows. Each is the largest error of a measured limit (`benchmarks/fit_boundary.py`,
``labs/results/h200_limits.jsonl``), rounded up; a limit that was measured again counts both times. Where experts are
spread over ranks, this is the error of predictions with random routing (0.59 %, ``labs/LOG.md``, 2026-11-24, night),
because nobody knows the router's counts before the job has run. With these counts the error is 0.04 %.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.config.scenario import Scenario


class Margin(NamedTuple):
    """What real steps needed more than predicted."""

    share: float
    """Of the predicted need."""
    steps: str
    """Which steps these were, and on which GPUs, in words."""


MARGIN_WITHOUT_EXPERTS = Margin(0.001, "on H200s, steps of dense models")
"""The smallest limit of torch's allocator with which steps of phi-4 completed on H200s was up to 0.1 % higher than
predicted, on one rank, with two pipeline stages, and with tensor parallelism."""
MARGIN_WITH_EXPERTS = Margin(0.003, "on H200s, steps of models with experts")
"""The same of Qwen3-30B-A3B with all experts on one rank. The limit of one step was 0.22 % higher than predicted when
it was first measured, and 0.01 % higher the second time (``labs/LOG.md``, 2026-11-27, late night)."""
MARGIN_WITH_SPREAD_EXPERTS = Margin(
    0.007, "on H200s, steps of models with experts spread over ranks, with one micro-batch,"
)
"""The same with experts spread over two ranks, and one micro-batch in a step. The experts of each layer get another
number of rows, so that a block that one layer has freed may be a little too small for the next."""
MARGIN_WITH_SPREAD_EXPERTS_AND_MICROBATCHES = Margin(
    0.085, "on H200s, steps of models with experts spread over ranks, with several micro-batches,"
)
"""The same with three micro-batches. Whether the freed blocks are large enough for later micro-batches depends on the
router: of five random routings, three were predicted to need 8 % more than the other two, as the real one did. Steps of
24 ranks of four H200s reserved between 7.8 % more and 0.1 % less than balanced routing predicts, those with full
recompute 0.04 % more at most (``labs/results/h200x4_plain_megatron.jsonl``)."""

MARGIN_OF_FSDP2 = Margin(0.015, "on H200s, steps under FSDP2")
"""Of 30 limits without stages the largest is 1.42 % above the predicted one (Qwen2.5 7B, tensor parallelism of two),
the next 1.0 % (CPU offload) and 0.6 % (``labs/results/h200_plain_fsdp2_limits.jsonl``)."""
MARGIN_OF_FSDP1 = Margin(
    0.015, "on H200s, steps under FSDP1 without a limit, counting all that blocks may add which wait for other streams,"
)
"""No limit was measured. Of 26 steps without one, one reserved 1.46 % more than predicted with all that blocks may add
which wait for other streams (Llama 3.1 8B, prefetch in forward, two ranks), and the next 0.43 %; without what they may
add, the same step reserved 11.0 % more, and eight others 3 to 10 % (``labs/results/h200x2_plain_fsdp_options.jsonl``,
``h200_plain_fsdp_options.jsonl``, ``h200_plain_fsdp_combined.jsonl``). So "fits" includes it."""
MARGIN_WITH_STAGES_OF_FSDP2 = Margin(0.015, "on H200s, stages of pipelines under FSDP2 that make masks once,")
"""Of three limits that were predicted before they were measured, the largest is 0.5 % above the predicted one
(``labs/results/h200_plain_fsdp2_limits.jsonl``). Without a limit, of 46 ranks over NCCL none reserved more than 0.14 %
more than predicted (``labs/results/h200x2_plain_fsdp2_pipeline.jsonl``). Where each pass waits for the device, as with
transformers' own masks and without NeMo Automodel, one of the same ranks reserved 9.2 % more."""

MARGIN_WITH_VISION_TOWER = Margin(0.015, "on H200s, steps under FSDP2, none of them with a vision tower,")
"""No limit was measured: it is that of FSDP2's limits without a tower. Of 18 steps without a limit one reserved 0.29 %
more than predicted, one 0.16 %, and the others 0.05 % at most (``labs/results/h200_plain_fsdp2_images.jsonl``)."""


def needs_whole_reserve(scenario: Scenario) -> bool:
    """Whether a step is sure to complete only with all that torch reserves for it without a limit.

    With less, torch returns cached segments, and whether later requests then find blocks depends on which of several
    free blocks of one size torch has taken: that at the lowest address (``BlockComparatorSize``,
    c10/cuda/CUDACachingAllocator.cpp, torch 2.11). CUDA's addresses are not documented. Of 12 limits of Qwen3-30B-A3B
    on an H200 with two to four micro-batches, four were 0.2 to 4.1 % above the predicted ones, and none was more than
    0.14 % above the bytes that torch is predicted to reserve (``labs/results/h200_microbatch_limits.jsonl``). Given
    the addresses and the requests of the real steps, the simulated allocator has ten of the eleven limits without
    expandable segments to 0.03 %. Limits of seven jobs of FSDP2 with several micro-batches were at most 0.6 % above the
    predicted ones; none of them had stages, experts spread over ranks, or a vision tower.
    """
    layout = scenario.layout
    is_measured = scenario.engine == "fsdp2" and scenario.state.fsdp_version == 2 and scenario.vision_tower is None
    is_measured = is_measured and layout.pipeline_model_parallel_size == layout.expert_model_parallel_size == 1
    return scenario.num_microbatches > 1 and not scenario.allocator.expandable_segments and not is_measured


def further_steps_of(scenario: Scenario) -> int:
    """Returns how many steps after the predicted one have to complete within a limit.

    Under FSDP2 the blocks that a step leaves are others than those that it found, since gathers and reductions have
    streams of their own. With a limit, the third or a later step of half of 20 jobs on an H200 was the first to fail,
    with up to 16 % more than two steps need (``labs/results/h200_plain_fsdp2_limits.jsonl``, five steps each). Repeated
    requests of the second step have the limits of real further steps. The limits of Megatron's jobs are of two steps.
    """
    return _FURTHER_STEPS_OF_FSDP2 if scenario.engine == "fsdp2" else 0


_FURTHER_STEPS_OF_FSDP2 = 5


def measured_margin(scenario: Scenario) -> Margin:
    """Returns what a real step may need more than predicted."""
    if scenario.engine == "fsdp2" and scenario.layout.pipeline_model_parallel_size > 1:
        return MARGIN_WITH_STAGES_OF_FSDP2
    if scenario.vision_tower is not None:
        margin = MARGIN_WITH_VISION_TOWER
    elif not scenario.architecture.routes:
        margin = MARGIN_WITHOUT_EXPERTS
    elif scenario.layout.expert_model_parallel_size == 1:
        margin = MARGIN_WITH_EXPERTS
    elif scenario.num_microbatches == 1:
        margin = MARGIN_WITH_SPREAD_EXPERTS
    else:
        margin = MARGIN_WITH_SPREAD_EXPERTS_AND_MICROBATCHES
    if scenario.engine != "fsdp2":
        return margin
    return max(margin, MARGIN_OF_FSDP1 if scenario.state.fsdp_version == 1 else MARGIN_OF_FSDP2)


def limit_with_margin(limit_bytes: int, scenario: Scenario) -> int:
    """Returns the limit in which a predicted step has to complete so that a real one fits the whole limit.

    Example: of 80 GiB for torch a predicted step with experts on one rank may need 80 / 1.003 = 79.8 GiB.
    """
    return int(limit_bytes / (1 + measured_margin(scenario).share))


def keeps_fp8_gathers(scenario: Scenario) -> bool:
    """Whether Transformer Engine gathers FP8 tensors and their scales in one collective, which torch may keep.

    See `StepRecord.kept_gather_bytes` for what that adds.

    See ``_start_all_gather_fp8_blockwise`` and ``_all_gather_mxfp8`` in ``transformer_engine/pytorch/distributed.py``
    (version 2.12).
    """
    state = scenario.state
    has_scales = state.fp8_format is not None and state.fp8_recipe in ("blockwise", "mxfp8")
    is_spread = scenario.layout.tensor_model_parallel_size > 1
    return has_scales and is_spread and scenario.versions.keeps_freed_gathers
