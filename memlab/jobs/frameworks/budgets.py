"""How many micro-batches the frameworks make of a step's sequences, where a budget of tokens fills each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """The sequences of a step and the budget that they fill."""

    sequences: int
    """Of a copy of the model, at most."""
    budget: int
    """Tokens of a micro-batch, before context parallel ranks share them."""
    longest: int | None
    """Tokens of the longest sequence that there may be; None where only the data says it."""


Counting = Callable[[Step], int]
"""Returns the most micro-batches that a copy of the model has in a step; short sequences fill one."""


def by_first_fit(step: Step) -> int:
    """Counts bins, of which one is opened only where a sequence fits into no other.

    All but the last then have at least as many sequences as the longest ones leave room for. See ``first_fit_pack``
    (slime, 624b824a), ``Balanced`` and ``FirstFitDecreasing`` (SkyRL, a9564572), ``shard_by_batch_size`` (NeMo-RL,
    7ea279ab), whose rows of dynamic batches are sorted and padded to the longest of their micro-batch, and
    ``rearrange_micro_batches`` (verl, 0.9.1), which adds bins until none is above the budget.
    """
    of_bin = max(1, step.budget // step.longest) if step.longest else 1
    return math.ceil(step.sequences / of_bin)


def by_tokens(step: Step) -> int:
    """Counts as many bins as a copy's tokens fill, over which its sequences are balanced, whatever a bin then holds.

    See ``rearrange_micro_batches`` (verl, 0.7.1 to 0.9.0 and 1dda039b), which refuses a sequence above the budget, and
    ``_pack_step_into_mbs`` with ``balance_by_flops`` (slime, 624b824a).
    """
    longest = min(step.longest or step.budget, step.budget)
    return math.ceil(step.sequences * longest / step.budget)
