"""What the frameworks of reinforcement learning have in common: packed rows, and as many passes as these fill."""

from __future__ import annotations

import math

from memlab.config.scenario import Scenario
from memlab.jobs.framework import Reading
from memlab.jobs.keys import Missing

LORA = "low-rank adapters: gradients and optimizer state of the adapters only, so memlab's figures are an upper bound"
FROZEN_ROUTER = Missing("*freeze_moe_router", "less", "the frozen router has no gradients and no optimizer state")


def copies(reading: Reading) -> int:
    """Returns how many copies of the model the job has; 1 where its sizes do not divide."""
    values = reading.values
    per_copy = math.prod(
        values.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "context", "pipeline_model")
    )
    world_size = values.get("world_size") or per_copy
    return int(max(1, world_size // max(1, per_copy)))


def take_rows(reading: Reading, key: str, tokens_per_rank: int, longest: int | None, sequences: int | None) -> None:
    """Takes packed micro-batches: rows of so many tokens on each rank.

    Args:
        reading: The job; its sizes are known already.
        key: The key of the budget.
        tokens_per_rank: The budget of one rank; context parallel ranks share a row.
        longest: Tokens of the longest sequence, where it is known.
        sequences: Sequences of a step over all copies, where they are known.
    """
    values = reading.values
    context = values.get("context_parallel_size") or 1
    reading.take(key, "seq_length", max(1, tokens_per_rank) * context)
    values["micro_batch_size"] = 1
    rows = None
    if longest and sequences:
        rows = math.ceil(sequences / copies(reading) * longest / values["seq_length"])
    values["num_microbatches"] = _full_rows(rows, values.get("pipeline_model_parallel_size") or 1)
    reading.warnings.append(
        f"{key}: micro-batches are filled up to a budget, so their number depends on the data; memlab predicts "
        f"{values['num_microbatches']} full ones, and further ones need the same memory again"
    )


def _full_rows(rows: int | None, stages: int) -> int:
    """Returns so many rows that a further one needs the same memory again, a multiple of the pipeline stages."""
    most = 2 * stages
    return -(-min(most, max(1, rows or most)) // stages) * stages


def is_packed(scenario: Scenario) -> bool:
    """Whether a budget of tokens describes the workload, so that `take_rows` reads it back."""
    stages, passes = scenario.layout.pipeline_model_parallel_size, scenario.num_microbatches
    divides = scenario.seq_length % scenario.layout.context_parallel_size == 0
    return scenario.micro_batch_size == 1 and divides and _full_rows(passes, stages) == passes


def take_passes(reading: Reading, sequences: int | None) -> None:
    """Takes the passes of a step: the sequences of a copy, divided by those of a micro-batch."""
    if not sequences:
        return
    per_pass = max(1, (reading.values.get("micro_batch_size") or 1) * copies(reading))
    reading.values["num_microbatches"] = max(1, sequences // per_pass)
