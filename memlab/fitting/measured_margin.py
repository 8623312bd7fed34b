"""How much more memory real steps needed than predicted ones: what decides between "fits" and "may fit".

This is the only place that has these shares. They are measurements and not guarantees: of one kind of GPU, and of the
two families of models that memlab knows. Each is the largest of the limits in ``labs/results/h200_limits.jsonl``
(`benchmarks/fit_boundary.py`), rounded up.
"""

from __future__ import annotations

from memlab.config.scenario import Scenario

MARGIN_WITHOUT_EXPERTS = 0.001
"""The smallest limit of torch's allocator with which steps of phi-4 completed on H200s was up to 0.1 % higher than
predicted, on one rank, with two pipeline stages, and with tensor parallelism."""
MARGIN_WITH_EXPERTS = 0.003
"""The same of Qwen3-30B-A3B with all experts on one rank."""
MARGIN_WITH_SPREAD_EXPERTS = 0.007
"""The same with experts spread over two ranks, and one micro-batch in a step. The experts of each layer get another
number of rows, so that a block that one layer has freed may be a little too small for the next."""
MARGIN_WITH_SPREAD_EXPERTS_AND_MICROBATCHES = 0.085
"""The same with three micro-batches. Whether the freed blocks are large enough for later micro-batches depends on the
router: of five random routings, three were predicted to need 8 % more than the other two, as the real one did."""


def measured_margin(scenario: Scenario) -> float:
    """Returns the share of a predicted need that a real step may need in addition."""
    if not scenario.architecture.is_moe:
        return MARGIN_WITHOUT_EXPERTS
    if scenario.layout.expert_model_parallel_size == 1:
        return MARGIN_WITH_EXPERTS
    several = scenario.num_microbatches > 1
    return MARGIN_WITH_SPREAD_EXPERTS_AND_MICROBATCHES if several else MARGIN_WITH_SPREAD_EXPERTS


def limit_with_margin(limit_bytes: int, scenario: Scenario) -> int:
    """Returns the limit in which a predicted step has to complete so that a real one fits the whole limit.

    Example: of 80 GiB for torch a predicted step with experts on one rank may need 80 / 1.003 = 79.8 GiB.
    """
    return int(limit_bytes / (1 + measured_margin(scenario)))
