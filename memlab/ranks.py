"""The ranks of a larger job, one of every kind, each predicted by a step of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.architectures import Architecture
from memlab.lab import Lab
from memlab.layout import Layout
from memlab.record import StepRecord
from memlab.routing import Routing
from memlab.settings import MemorySettings


def predict_ranks(
    architecture: str | Path | Architecture,
    layout: Layout,
    settings: MemorySettings | None = None,
    *,
    ranks: Sequence[int] | None = None,
    routing: Routing | str = "balanced",
    **workload: Any,
) -> dict[str, StepRecord]:
    """Predicts a step on ranks of a job, one after the other, as ``memlab predict --rank all`` does.

    Args:
        architecture: As a `Lab` takes it.
        layout: How the job is spread; its own `rank` is not looked at.
        settings: Of all ranks; None is plain Megatron.
        ranks: Which to look at; None takes one of every kind (`Layout.distinct_ranks`).
        routing: Which experts tokens go to; where it is not balanced, ranks with other experts are of another kind.
        **workload: Further arguments of a `Lab`.

    Returns:
        The records, by names such as ``"rank-3"``, in the order of the ranks.

    Raises:
        ValueError: If a value breaks its rule.
    """
    if ranks is None:
        ranks = layout.distinct_ranks(by_expert=routing not in ("balanced", Routing()))
    records = {}
    for rank in ranks:
        spread = replace(layout, rank=rank)
        with Lab(architecture, layout=spread, routing=routing, backend="simulated", **workload) as lab:
            records[f"rank-{rank}"] = lab.step(settings)
    return records
