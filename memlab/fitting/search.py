"""The search for a front: which settings are predicted, each by a step of its own, and which are pruned.

What offload modules save and transfer adds up, module by module and under any recompute (to 0.2 % where it was tried,
`labs/LOG.md`). So a setting is estimated from its parts, a little too good. If a predicted step is still at least as
good on all criteria, the setting is not on the front, and is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import added_offload, candidates, without_added_offload
from memlab.fitting.does_it_fit import Step, fits, transferred_bytes
from memlab.fitting.pareto_front import Point, SearchResult, criteria, is_dominated
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.record.step_record import StepRecord

_OPTIMISM = 1.05
"""By how much more a module may save with others than it did by itself."""


Likely = Callable[[], Iterator[MemorySettings]]
"""Returns the settings that a search will probably predict next, the most probable first."""


class PredictionLostError(RuntimeError):
    """A setting that cannot be predicted, because the processes that should do so are lost."""


class SearchInterrupted(KeyboardInterrupt):
    """The end of a search that has predicted at least one setting: by Ctrl-C, or by the error that is its cause.

    Args:
        found: What it has found so far.
    """

    def __init__(self, found: SearchResult) -> None:
        super().__init__()
        self.found = found


def search(
    base: MemorySettings,
    scenario: Scenario,
    step: Step,
    limit_bytes: int,
    *,
    outside_torch_bytes: int = 0,
    resolution_bytes: int = 1,
    max_steps: int | None = None,
    on_point: Callable[[Point, int], object] = lambda point, num_left: None,
    look_ahead: Callable[[Likely], object] = lambda likely: None,
) -> SearchResult:
    """Predicts settings until no other setting can be on the front.

    Args:
        base: What each setting does at least.
        scenario: The model and its workload.
        step: Takes a steady step of it.
        limit_bytes: The most that torch may hold.
        outside_torch_bytes: What else is on the GPU; only copied to the result.
        resolution_bytes: As in `SearchResult`.
        max_steps: The most settings to predict; None is as many as are needed.
        on_point: Called with each point, and how many settings may still follow.
        look_ahead: Called once, before the first step, with a function that says at any moment which settings will
            probably follow. Steps that are taken ahead never change the result: the search asks for the same steps in
            the same order.

    Raises:
        SearchInterrupted: At Ctrl-C or `PredictionLostError`, with what was found until then.
    """
    frontier = _Frontier(base, scenario, limit_bytes, resolution_bytes)

    def found() -> SearchResult:
        return SearchResult(
            scenario=scenario,
            base=base,
            limit_bytes=limit_bytes,
            outside_torch_bytes=outside_torch_bytes,
            resolution_bytes=resolution_bytes,
            points=tuple(frontier.points.values()),
            num_candidates=frontier.num_candidates,
            num_pruned=frontier.num_candidates - len(frontier.points) - len(frontier.pending),
            num_left=len(frontier.pending),
        )

    def likely() -> Iterator[MemorySettings]:
        return islice(frontier.likely(), None if max_steps is None else max_steps - len(frontier.points))

    look_ahead(likely)
    try:
        for settings in frontier:
            if max_steps is not None and len(frontier.points) >= max_steps:
                break
            record = step(settings, None)
            if frontier.had_no_effect(record):
                continue
            point = Point(
                settings=settings,
                peak_allocated_bytes=record.peak_allocated_bytes,
                recomputed_operations=recomputed_operations(settings, scenario),
                transferred_bytes=transferred_bytes(record),
                host_bytes=record.host_bytes,
                fits=fits(record, step, limit_bytes),
            )
            frontier.add(point)
            on_point(point, len(frontier.pending))
    except (KeyboardInterrupt, PredictionLostError) as interrupt:
        if not frontier.points:
            raise
        raise SearchInterrupted(found()) from interrupt
    return found()


class _Frontier:
    """Which setting is predicted next: first those that others are estimated from, then what is cheap and would fit."""

    def __init__(self, base: MemorySettings, scenario: Scenario, limit_bytes: int, resolution: int) -> None:
        every = candidates(base, scenario)
        self.points: dict[MemorySettings, Point] = {}
        self.pending: dict[MemorySettings, Point | None] = dict.fromkeys(every)
        """With their estimates; None before there is one."""
        self.num_candidates = len(every)
        self._base, self._limit_bytes, self._resolution = base, limit_bytes, resolution
        self._num_layers = scenario.num_layers_of_chunk
        self._without_effect: set[str] | None = None
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
        before: list[Point] = []
        for settings in sorted(self.pending, key=self._order):
            estimate = self.pending[settings]
            if estimate is None:
                yield settings
            elif not any(self._is_no_better(estimate, point) for point in before):
                yield settings
                before.append(estimate)

    def add(self, point: Point) -> None:
        """Keeps a point, and prunes what is estimated to be no better than it on any criterion."""
        self.pending.pop(point.settings)
        self.points[point.settings] = point
        self._prune([point])

    def had_no_effect(self, record: StepRecord) -> bool:
        """Whether something that the base does not set was seen to do nothing; candidates that set it are dropped."""
        if self._without_effect is None:
            self._without_effect = set(record.without_effect)
        idle = set(record.without_effect) - self._without_effect
        if not idle:
            return False
        seen_with = self._without_added_offload(record.settings)
        for settings in list(self.pending):
            names = {f"offload_modules:{name}" for name in added_offload(settings, self._base)}
            # What does nothing next to the base's recompute does nothing next to any other.
            same_recompute = seen_with in (self._base, self._without_added_offload(settings))
            if settings == record.settings or (same_recompute and names & idle):
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
        """Estimates settings from points with the same recompute and from what each offload module saves.

        peak(recompute, modules) = peak(recompute) - share of layers x sum of 1.05 x saved(module)
        transferred(recompute, modules) = transferred(recompute) + sum of transferred(module)

        Example in MiB: the base peaks at 100, with ``core_attn`` at 90, with ``moe_act`` at 80; with full recompute of
        2 of 4 layers at 70. So ``core_attn`` saves up to 10.5 and ``moe_act`` up to 21, and under that recompute both
        together 31.5 x 3/3: a peak of 38.5 at least. Where a point needs no more FLOPs and bytes and peaks at 38 or
        less, the setting is pruned.
        """
        saved, transferred = self._savings_by_module()
        for settings in list(self.pending):
            with_same_recompute = self.points.get(self._without_added_offload(settings))
            names = added_offload(settings, self._base)
            if with_same_recompute is None or not set(names) <= set(saved) or self._changes_base_offload(settings):
                continue  # cannot be estimated, so it is predicted
            frees = sum(saved[name] for name in names) * self._share_of_layers(settings)
            peak = with_same_recompute.peak_allocated_bytes - round(frees)
            self.pending[settings] = replace(
                with_same_recompute,
                settings=settings,
                peak_allocated_bytes=peak,
                transferred_bytes=with_same_recompute.transferred_bytes + sum(transferred[name] for name in names),
                fits=peak <= self._limit_bytes,
            )
        self._prune(list(self.points.values()))

    def _savings_by_module(self) -> tuple[dict[str, float], dict[str, int]]:
        """Returns for each offload module what it saves at most, and what it transfers.

        A module that was only tried together with others gets what they do not account for: the base peaks at 100 MiB,
        ``core_attn`` saves 10, and with ``attn_proj`` the peak is 85, so ``attn_proj`` saves 15 - 10 = 5.
        """
        saved: dict[str, float] = {}
        transferred: dict[str, int] = {}
        base = self.points[self._base]
        tried = [point for point in self.points.values() if self._without_added_offload(point.settings) == self._base]
        for point in sorted(tried, key=lambda each: len(added_offload(each.settings, self._base))):
            names = added_offload(point.settings, self._base)
            for name in names:
                others = [other for other in names if other != name]
                if name not in saved and all(other in saved for other in others):
                    less = base.peak_allocated_bytes - point.peak_allocated_bytes
                    more = point.transferred_bytes - base.transferred_bytes
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
        for settings, estimate in list(self.pending.items()):
            if estimate is not None and any(self._is_no_better(estimate, point) for point in points):
                del self.pending[settings]

    def _is_no_better(self, estimate: Point, point: Point) -> bool:
        ours, theirs = (
            criteria(each.peak_allocated_bytes, each.fits, each.work, self._limit_bytes, self._resolution)
            for each in (estimate, point)
        )
        if ours == theirs:
            return point.peak_allocated_bytes <= estimate.peak_allocated_bytes
        return is_dominated(ours, theirs)

    def _order(self, settings: MemorySettings) -> tuple[Any, ...]:
        estimate = self.pending[settings]
        return (True,) if estimate is None else (not estimate.fits, estimate.work, estimate.peak_allocated_bytes)
