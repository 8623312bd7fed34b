"""Predictions on simulated labs: of the ranks of a larger job, and of steps that were measured elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from memlab.allocator.request_log import RequestLog
from memlab.analysis.limits import Limit
from memlab.backends import Backend
from memlab.backends.simulated import of_labs_before_0_4
from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import WORKLOAD, Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.fitting.measured_margin import further_steps_of
from memlab.lab.lab import Lab
from memlab.lab.search_steps import stepping
from memlab.record.step_record import StepRecord

_DRAWS = 3
"""Of a random routing, to predict a limit. Of five draws three gave the limit that a real job of two ranks had
(``labs/LOG.md``, 2026-11-23), and two gave one that was 8 % lower."""


def predict_ranks(
    architecture: str | Path | Architecture,
    layout: Layout,
    settings: MemorySettings | None = None,
    *,
    ranks: Sequence[int] | None = None,
    routing: Routing | str = "balanced",
    replay: bool = True,
    **workload: Any,
) -> dict[str, StepRecord]:
    """Predicts a step on ranks of a job, one after the other, as ``memlab predict --rank all`` does.

    Args:
        architecture: An architecture, as for a `Lab`.
        layout: How the job is spread; its own `rank` is ignored.
        settings: The memory settings of all ranks; None is plain Megatron.
        ranks: The ranks to predict; None takes one rank of every kind (`Scenario.ranks_of_every_kind`).
        routing: Which experts the tokens go to. Unless routing is balanced, ranks with different experts are of
            different kinds; with random routing, every rank is a kind of its own.
        replay: As for a `Lab`.
        **workload: Further fields of the job's `Scenario`.

    Returns:
        The records, by names such as ``"rank-3"``, in the order of the ranks.

    Raises:
        ValueError: If a value breaks its rule.
    """
    given = {name: value for name, value in workload.items() if value is not None}
    job = Scenario.of(architecture, layout=layout, routing=routing, **given)
    records = {}
    for rank in job.ranks_of_every_kind if ranks is None else ranks:
        with Lab(job.on_rank(rank), backend="simulated", replay=replay) as lab:
            records[f"rank-{rank}"] = lab.step(settings)
    return records


def predict_measured(measured: Sequence[StepRecord]) -> list[StepRecord]:
    """Predicts steps that were measured, in the order in which they were taken.

    A record may have the numbers of tokens that the router sent to each expert, as its scenario's routing: the
    prediction has them too. Otherwise the experts are drawn at random (`routed_by_chance`).

    Args:
        measured: Steps that finished; the steps of one lab follow each other.

    Returns:
        The predictions, without their timelines.

    Raises:
        ValueError: If a step did not finish, or cannot be predicted with the installed versions.
    """
    failed = next((record for record in measured if record.status != "ok"), None)
    if failed is not None:
        raise ValueError(f"{failed.scenario}, {failed} did not finish, so there is nothing to compare: leave it out")
    return list(_predictions(measured))


def _predictions(measured: Sequence[StepRecord]) -> Iterator[StepRecord]:
    lab: Lab | None = None
    former: StepRecord | None = None
    try:
        for record in measured:
            scenario = routed_by_chance(record.scenario)
            # Steps of one lab are numbered in their order, and one version of memlab took them.
            is_other_lab = (
                former is None or record.step_index <= former.step_index or record.versions != former.versions
            )
            former = record
            try:
                if lab is None or is_other_lab or not set(lab.scenario.differences(scenario)) <= set(WORKLOAD):
                    if lab is not None:
                        lab.close()
                    lab = Lab(scenario, backend=_predicting_labs_of(record.versions.get("memlab", "")))
                lab.set_workload(**scenario.workload)
                settings = record.settings
                predicted = lab.forward_only(settings, warm_up=True) if record.forward_only else lab.step(settings)
            except ValueError as error:
                measured_with = ", ".join(f"{name} {version}" for name, version in record.versions.items())
                raise ValueError(
                    f"{record.scenario}, {record}, was measured with {measured_with}, and memlab cannot predict it "
                    f"with the versions here ({error}): leave its line out, or install those versions"
                ) from error
            yield replace(predicted, timeline=None)
            lab.records.clear()
    finally:
        if lab is not None:
            lab.close()


def _predicting_labs_of(version: str) -> str | Backend:
    return of_labs_before_0_4() if version.startswith(("0.1.", "0.2.", "0.3.")) else "simulated"


def predict_limit(scenario: Scenario, settings: MemorySettings) -> Limit:
    """Predicts the smallest memory with which a step completes in a process of its own.

    Where experts are spread over ranks, the limit depends on how many rows the experts of each layer get: it is the one
    with which the step completes under each of several random routings.

    Args:
        scenario: Of any rank of a job: one rank of every kind takes the step.
        settings: Of all ranks.
    """
    chance = routed_by_chance(scenario)
    draws = chance.routing.kind == "random" and chance.rows_vary
    routings = [replace(chance.routing, seed=seed) for seed in range(_DRAWS)] if draws else [chance.routing]

    taken: list[tuple[StepRecord, RequestLog]] = []
    for routing, rank in product(routings, chance.ranks_of_every_kind):
        with stepping(replace(chance.on_rank(rank), routing=routing)) as steps:
            record = steps(settings)
            assert steps.requests is not None, "torch's allocator is simulated"
            taken.append((record, steps.requests))
    most, _ = max(taken, key=lambda each: each[0].peak_reserved_bytes or 0)
    further_steps = further_steps_of(scenario)
    return Limit.find(most, lambda limit: all(log.completes_within(limit, further_steps) for _, log in taken))
