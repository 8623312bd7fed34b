"""Micro-batches over which verl and slime balance a step's work, and which can hold more tokens than their budget."""

from __future__ import annotations

import math

from memlab.jobs.frameworks.budgets import by_first_fit, by_tokens
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.reinforcement import of_one_copy, take_rows
from memlab.jobs.frameworks.verl_checkout import RELEASE


def take_rows_of_verl(
    reading: Reading, key: str, tokens_per_rank: int, longest: int | None, sequences: int | None
) -> None:
    """Takes the micro-batches that verl fills up to a budget; see `take_rows` for the arguments.

    ``rearrange_micro_batches`` adds micro-batches since 0.9.1 until each is within the budget. Before (0.7.1, 0.8.0,
    0.9.0 and 1dda039b), the budget is only what they hold on average.
    """
    is_known, is_limited = reading.version is not None, reading.version == RELEASE
    counted = by_tokens if is_known and not is_limited else by_first_fit
    take_rows(
        *(reading, key, tokens_per_rank, longest, sequences),
        counted=counted,
        is_refused=True,
        are_shared_evenly=True,
    )
    if not is_limited:
        of_copy = of_one_copy(reading, sequences)
        warn_of_fuller_rows(reading, key, tokens_per_rank, longest, of_copy, cause="verl before 0.9.1")


def warn_of_fuller_rows(
    reading: Reading, key: str, tokens_per_rank: int, longest: int | None, sequences: int | None, *, cause: str
) -> None:
    """Warns that a row can hold more than the budget, and says how much where all sequences are the longest.

    Args:
        reading: The job, whose rows are known.
        key: The key of the budget.
        tokens_per_rank: The budget of one rank.
        longest: Tokens of the longest sequence, where it is known.
        sequences: Those that share the rows, where they are known.
        cause: What balances the rows.
    """
    context = reading.values.get("context_parallel_size") or 1
    budget, fullest = tokens_per_rank * context, 0
    if longest and sequences:
        longest = min(longest, budget)
        rows = min(sequences, math.ceil(sequences * longest / budget))
        if rows == 1:
            return
        fullest = math.ceil(sequences / rows) * longest
    text = f"{key}: {cause} shares the sequences by their work over as many rows as the tokens fill, so a row can hold "
    if fullest > budget:
        text += (
            f"more than the budget, such as {fullest:,} tokens where all sequences have {longest:,}; memlab predicts "
            f"rows of the budget: give --set {key}={math.ceil(fullest / context)} to predict that row"
        )
    else:
        text += "more than the budget, which memlab predicts"
    reading.warnings.append(text)
