"""How much more memory real steps needed than predicted ones: what decides between "fits" and "may fit".

This is the only place that has these shares. They are measurements and not guarantees: of one kind of GPU, and of the
two families of models that memlab knows.
"""

from __future__ import annotations

from memlab.config.architectures import Architecture

MARGIN_WITH_EXPERTS = 0.003
"""The smallest limit of torch's allocator with which a step of Qwen3-30B-A3B completed on an H200 was 0.04 and 0.27 %
higher than predicted, in the two cases of ``labs/results/h200_limits.jsonl`` (`benchmarks/fit_boundary.py`)."""
MARGIN_WITHOUT_EXPERTS = 0.001
"""The same of phi-4: within 0.1 %."""


def measured_margin(architecture: Architecture) -> float:
    """Returns the share of a predicted need that a real step may need in addition."""
    return MARGIN_WITH_EXPERTS if architecture.is_moe else MARGIN_WITHOUT_EXPERTS


def limit_with_margin(limit_bytes: int, architecture: Architecture) -> int:
    """Returns the limit in which a predicted step has to complete so that a real one fits the whole limit.

    Example: of 80 GiB for torch a predicted step with experts may need 80 / 1.003 = 79.8 GiB.
    """
    return int(limit_bytes / (1 + measured_margin(architecture)))
