"""The search for a front: which settings are predicted, each by a step of its own, and which are pruned.

What offload modules save and transfer adds up, module by module and under any recompute (to 0.2 % where it was tried,
`labs/LOG.md`). So a setting is estimated from its parts, a little too good. If a predicted step is still at least as
good on all criteria, the setting is not on the front, and is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import added_offload, candidates, each_alone, without_added_offload
from memlab.fitting.does_it_fit import VERDICTS
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.pareto_front import Point, SearchResult, criteria, is_dominated
from memlab.fitting.prediction import Predict, Prediction, PredictionLostError
from memlab.fitting.recompute_cost import recomputed_operations

_OPTIMISM = 1.05
"""By how much more a module may save with others than it did by itself."""


_Measures = tuple[tuple[float, ...], int]
"""What points are compared by: as `criteria`, and the peak in bytes."""
Likely = Callable[[], Iterator[tuple[Scenario, MemorySettings]]]
"""Returns the steps that a search will probably ask for next, the most probable first."""


class SearchInterrupted(Interrupted[SearchResult]):
    """The end of a search that has predicted at least one setting."""


def search(
    base: MemorySettings,
    scenarios: Sequence[Scenario],
    predict: Predict,
    limit_bytes: int,
    *,
    outside_torch_bytes: int = 0,
    resolution_bytes: int = 1,
    max_steps: int | None = None,
    alone: bool = False,
    is_allowed: Callable[[MemorySettings], bool] = lambda settings: True,
    on_point: Callable[[Point, SearchResult, Callable[[], int]], object] = lambda point, found, count_likely: None,
    look_ahead: Callable[[Likely], object] = lambda likely: None,
) -> SearchResult:
    """Predicts settings until no other setting can be on the front.

    Args:
        base: What each setting does at least.
        scenarios: The model and its workload, on each rank that is judged: the worst of them counts.
        outside_torch_bytes: What else is on the GPU; only copied to the result.
        max_steps: The most settings to predict; None is as many as are needed.
        alone: Predicts settings with one change only (`each_alone`), and all of them.
        is_allowed: Says which settings may be proposed; the base is always predicted.
        on_point: Called with each point, what has been found with it, and a function that counts how many settings
            probably follow.
        look_ahead: Called once, before the first step, with a function that says at any moment which steps will
            probably follow. Steps that are predicted ahead never change the result: the search asks for the same steps
            in the same order.

    Raises:
        SearchInterrupted: At Ctrl-C or `PredictionLostError`, with what was found until then.
    """

    def tried(settings: MemorySettings, scenario: Scenario) -> list[MemorySettings]:
        every = each_alone(settings, scenario) if alone else candidates(settings, scenario)
        return [one for one in every if one == base or is_allowed(one)]

    frontier = _Frontier(base, scenarios, limit_bytes, resolution_bytes, tried)

    def found() -> SearchResult:
        return SearchResult(
            scenario=scenarios[0],
            ranks=tuple(scenario.layout.rank for scenario in scenarios),
            base=base,
            limit_bytes=limit_bytes,
            outside_torch_bytes=outside_torch_bytes,
            resolution_bytes=resolution_bytes,
            points=tuple(frontier.points.values()),
            num_candidates=frontier.num_candidates,
            num_pruned=frontier.num_candidates - len(frontier.points) - len(frontier.pending),
            num_left=len(frontier.pending),
            may_offload_optimizer=is_allowed(replace(base, offload_optimizer_except_update=True)),
        )

    def likely_settings() -> Iterator[MemorySettings]:
        return islice(frontier.likely(), None if max_steps is None else max_steps - len(frontier.points))

    look_ahead(lambda: ((scenario, settings) for settings in likely_settings() for scenario in scenarios))
    try:
        for settings in frontier:
            if max_steps is not None and len(frontier.points) >= max_steps:
                break
            ranks = [predict(scenario, settings) for scenario in scenarios]
            if frontier.had_no_effect(settings, ranks):
                continue
            point = frontier.add(settings, ranks)
            on_point(point, found(), lambda: sum(1 for _ in likely_settings()))
    except (KeyboardInterrupt, PredictionLostError) as interrupt:
        if not frontier.points:
            raise
        raise SearchInterrupted(found()) from interrupt
    return found()


class _Frontier:
    """Which setting is predicted next: first those that others are estimated from, then what is cheap and would fit."""

    def __init__(
        self,
        base: MemorySettings,
        scenarios: Sequence[Scenario],
        limit_bytes: int,
        resolution: int,
        candidates_of: Callable[[MemorySettings, Scenario], list[MemorySettings]],
    ) -> None:
        every = candidates_of(base, scenarios[0])
        for scenario in scenarios[1:]:
            of_rank = set(candidates_of(base, scenario))
            every = [settings for settings in every if settings in of_rank]
        self.points: dict[MemorySettings, Point] = {}
        self.pending: dict[MemorySettings, Point | None] = dict.fromkeys(every)
        """With their estimates; None before there is one."""
        self.num_candidates = len(every)
        self._base, self._limit_bytes, self._resolution = base, limit_bytes, resolution
        self._scenarios = scenarios
        self._num_layers = min(scenario.num_layers_of_chunk for scenario in scenarios)
        self._of_ranks: dict[MemorySettings, list[Prediction]] = {}
        self._without_effect: frozenset[str] | None = None
        without_offload = [settings for settings in self.pending if not added_offload(settings, self._base)]
        self._first = [*without_offload, *self._single_module_settings().values()]

    def __iter__(self) -> Iterator[MemorySettings]:
        for settings in self._first:
            if settings in self.pending:
                yield settings
        self._estimate_pending()
        while self.pending:
            yield min(self.pending, key=self._order)

    def likely(self) -> Iterator[MemorySettings]:
        """Yields pending settings in the order of their steps, as far as the estimates say which will have one."""
        first = [settings for settings in self._first if settings in self.pending]
        yield from first
        if first:
            return
        before: list[_Measures] = []
        for settings in sorted(self.pending, key=self._order):
            estimate = self.pending[settings]
            if estimate is None:
                yield settings
                continue
            measures = self._measures(estimate)
            if not any(_is_no_better(measures, point) for point in before):
                yield settings
                before.append(measures)

    def add(self, settings: MemorySettings, ranks: list[Prediction]) -> Point:
        """Keeps a point, and prunes what is estimated to be no better than it on any criterion."""
        self.pending.pop(settings)
        self._of_ranks[settings] = ranks
        worst = max(ranks, key=lambda rank: (VERDICTS.index(rank.verdict), rank.peak_allocated_bytes))
        point = self.points[settings] = Point(
            settings=settings,
            rank=worst.rank,
            peak_allocated_bytes=max(rank.peak_allocated_bytes for rank in ranks),
            recomputed_operations=max(recomputed_operations(settings, scenario) for scenario in self._scenarios),
            transferred_bytes=max(rank.transferred_bytes for rank in ranks),
            host_bytes=max(rank.host_bytes for rank in ranks),
            verdict=worst.verdict,
            peak_range=max(ranks, key=lambda rank: rank.peak_allocated_bytes).peak_range,
            peak_phase=max(ranks, key=lambda rank: rank.peak_allocated_bytes).peak_phase,
        )
        self._prune([point])
        return point

    def had_no_effect(self, seen: MemorySettings, ranks: list[Prediction]) -> bool:
        """Whether something that the base does not set did nothing on any rank; candidates that set it are dropped."""
        without_effect = frozenset.intersection(*(rank.without_effect for rank in ranks))
        if self._without_effect is None:
            self._without_effect = without_effect
        idle = without_effect - self._without_effect
        if not idle:
            return False
        seen_with = self._without_added_offload(seen)
        for settings in list(self.pending):
            names = {f"offload_modules:{name}" for name in added_offload(settings, self._base)}
            # What does nothing next to the base's recompute does nothing next to any other.
            same_recompute = seen_with in (self._base, self._without_added_offload(settings))
            if settings == seen or (same_recompute and names & idle):
                del self.pending[settings]
                self.num_candidates -= 1
        return True

    def _single_module_settings(self) -> dict[str, MemorySettings]:
        """Returns for each offload module the candidate with the fewest modules that has it, and the base's recompute.

        That is the module by itself, or with the module that a rule requires: ``attn_proj`` comes with ``core_attn``.
        """
        single: dict[str, MemorySettings] = {}
        for settings in sorted(self.pending, key=lambda each: len(added_offload(each, self._base))):
            if self._without_added_offload(settings) == self._base:
                for name in added_offload(settings, self._base):
                    single.setdefault(name, settings)
        return single

    def _without_added_offload(self, settings: MemorySettings) -> MemorySettings:
        return without_added_offload(settings, self._base)

    def _estimate_pending(self) -> None:
        """Estimates settings on each rank, from points with the same recompute and from what each offload module saves.

        peak(recompute, modules) = peak(recompute) - share of layers x sum of 1.05 x saved(module)
        transferred(recompute, modules) = transferred(recompute) + sum of transferred(module)

        Example in MiB: the base peaks at 100, with ``core_attn`` at 90, with ``moe_act`` at 80; with full recompute of
        2 of 4 layers at 70. So ``core_attn`` saves up to 10.5 and ``moe_act`` up to 21, and under that recompute both
        together 31.5 x 3/3: a peak of 38.5 at least. Where a point needs no more FLOPs and bytes and peaks at 38 or
        less, the setting is pruned. The worst rank counts, which may be another one after modules are offloaded.
        """
        parts = [self._savings_by_module(place) for place in range(len(self._scenarios))]
        for settings in list(self.pending):
            alike = self._without_added_offload(settings)
            names = added_offload(settings, self._base)
            if (
                alike not in self.points
                or self._changes_base_offload(settings)
                or not all(set(names) <= set(saved) for saved, _ in parts)
            ):
                continue  # cannot be estimated, so it is predicted
            share, peaks, transfers = self._share_of_layers(settings), [], []
            for rank, (saved, transferred) in zip(self._of_ranks[alike], parts, strict=True):
                peaks.append(rank.peak_allocated_bytes - round(share * sum(saved[name] for name in names)))
                transfers.append(rank.transferred_bytes + sum(transferred[name] for name in names))
            self.pending[settings] = replace(
                self.points[alike],
                settings=settings,
                peak_allocated_bytes=max(peaks),
                transferred_bytes=max(transfers),
                peak_range=None,
                verdict="fits" if max(peaks) <= self._limit_bytes else "does not fit",
            )
        self._prune(list(self.points.values()))

    def _savings_by_module(self, place: int) -> tuple[dict[str, float], dict[str, int]]:
        """Returns for each offload module what it saves at most on a rank, and what it transfers.

        A module that was only tried together with others gets what they do not account for: the base peaks at 100 MiB,
        ``core_attn`` saves 10, and with ``attn_proj`` the peak is 85, so ``attn_proj`` saves 15 - 10 = 5.
        """
        saved: dict[str, float] = {}
        transferred: dict[str, int] = {}
        base = self._of_ranks[self._base][place]
        tried = [settings for settings in self.points if self._without_added_offload(settings) == self._base]
        for settings in sorted(tried, key=lambda each: len(added_offload(each, self._base))):
            names, rank = added_offload(settings, self._base), self._of_ranks[settings][place]
            for name in names:
                others = [other for other in names if other != name]
                if name not in saved and all(other in saved for other in others):
                    less = base.peak_allocated_bytes - rank.peak_allocated_bytes
                    more = rank.transferred_bytes - base.transferred_bytes
                    saved[name] = max(0.0, less * _OPTIMISM - sum(saved[other] for other in others))
                    transferred[name] = more - sum(transferred[other] for other in others)
        return saved, transferred

    def _changes_base_offload(self, settings: MemorySettings) -> bool:
        """Whether smaller tensors are offloaded than in the base, so that its own modules transfer more too."""
        differs = settings.min_offloaded_tensor_size != self._base.min_offloaded_tensor_size
        return bool(self._base.offload_modules) and differs

    def _share_of_layers(self, settings: MemorySettings) -> float:
        """Returns the share of the layers in which offload saves something: not where all is recomputed, nor the last.

        One layer is added to be optimistic: of 4 layers with 2 recomputed (4 - 2 + 1) / (4 - 1) = 1.
        """
        if settings.recompute_method != "block":
            return 1.0
        left = self._num_layers - (settings.recompute_num_layers or 0) + 1
        return min(1.0, left / max(1, self._num_layers - 1))

    def _prune(self, points: list[Point]) -> None:
        predicted = [self._measures(point) for point in points]
        for settings, estimate in list(self.pending.items()):
            if estimate is None:
                continue
            measures = self._measures(estimate)
            if any(_is_no_better(measures, point) for point in predicted):
                del self.pending[settings]

    def _measures(self, point: Point) -> _Measures:
        """Returns what a point, or an estimate, is compared by."""
        peak = point.peak_allocated_bytes
        return criteria(peak, point.fits, point.work, self._limit_bytes, self._resolution), peak

    def _order(self, settings: MemorySettings) -> tuple[Any, ...]:
        estimate = self.pending[settings]
        return (True,) if estimate is None else (not estimate.fits, estimate.work, estimate.peak_allocated_bytes)


def _is_no_better(estimate: _Measures, point: _Measures) -> bool:
    (ours, our_peak), (theirs, their_peak) = estimate, point
    return their_peak <= our_peak if ours == theirs else is_dominated(ours, theirs)
