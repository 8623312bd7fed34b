"""A search whose steps are taken on several engines at once, each with a simulated lab of its own.

The search itself runs here, and asks for one step after the other as in one process. While it waits for a step, the
engines also take the steps for which it will probably ask next. A step that it does not ask for changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.does_it_fit import Step, fits
from memlab.fitting.pareto_front import SearchResult
from memlab.fitting.search import Likely, PredictionLostError, search
from memlab.lab.search_process import progress_on_stderr, stepping
from memlab.ranks.balanced import Balanced, CallLostError
from memlab.ranks.ranks import Ranks
from memlab.record.step_record import StepRecord

_SERVED = "memlab.lab.search_on_engines:StepsOfOneEngine"


def search_on_engines(
    ranks: Ranks, scenario: Scenario, base: MemorySettings, limit_bytes: int, **options: Any
) -> SearchResult:
    """Searches on engines, and reports its progress on stderr; the result is that of `search_simulated`.

    Args:
        ranks: The engines.
        scenario: What is run.
        base: What each setting does at least.
        limit_bytes: What torch may hold.
        **options: As `memlab.fitting.search.search` takes them.
    """
    with Balanced(ranks, _SERVED) as engines:
        steps = StepsOnEngines(engines, scenario, limit_bytes)
        return search(
            base,
            scenario,
            steps.step,
            limit_bytes,
            on_point=progress_on_stderr(),
            look_ahead=steps.look_ahead,
            **options,
        )


class StepsOnEngines:
    """A step function for `search`, whose records come from engines.

    Args:
        engines: They serve `StepsOfOneEngine`.
        scenario: What is run.
        limit_bytes: The limit of the search.
    """

    def __init__(self, engines: Balanced, scenario: Scenario, limit_bytes: int) -> None:
        self._engines = engines
        self._scenario = scenario
        self._limit_bytes = limit_bytes
        self._records: dict[MemorySettings, Future[dict[int | None, StepRecord]]] = {}
        self._likely: Likely = lambda: iter(())

    def look_ahead(self, likely: Likely) -> None:
        """Notes how to find out which steps will probably be needed."""
        self._likely = likely

    def step(self, settings: MemorySettings, limit_bytes: int | None) -> StepRecord:
        """Returns the record of a step, without timeline.

        Raises:
            PredictionLostError: If the engines that should take the step are lost.
        """
        future = self._taken(settings)
        while not future.done():
            running = {each for each in self._records.values() if not each.done()}
            for following in self._likely():
                if len(running) >= len(self._engines):
                    break
                if not (ahead := self._taken(following)).done():
                    running.add(ahead)
            wait(running, return_when=FIRST_COMPLETED)
        try:
            return future.result()[limit_bytes]
        except CallLostError as error:
            raise PredictionLostError(f"{settings} cannot be predicted: {error}") from error

    def _taken(self, settings: MemorySettings) -> Future[dict[int | None, StepRecord]]:
        if settings not in self._records:
            self._records[settings] = self._engines.submit("take", self._scenario, settings, self._limit_bytes)
        return self._records[settings]


class StepsOfOneEngine:
    """Takes steps on a simulated lab that stays open: the object that an engine's process serves.

    Args:
        report: Not used; steps of a search report no progress.
    """

    def __init__(self, report: Callable[[Any], None]) -> None:
        del report
        self._lab = ExitStack()
        self._step: Step | None = None

    def take(self, scenario: Scenario, settings: MemorySettings, limit_bytes: int) -> dict[int | None, StepRecord]:
        """Takes the steps that a search needs for one point.

        Args:
            scenario: The same in all calls.
            settings: Of the steps.
            limit_bytes: What torch may hold.

        Returns:
            The records without what is large: of the step without a limit under None, and, if only such a step shows
            whether the settings fit, of the step with the limit under `limit_bytes`.
        """
        open_step = self._step = self._step or self._lab.enter_context(stepping(scenario))
        taken: dict[int | None, StepRecord] = {}

        def step(settings: MemorySettings, limit: int | None) -> StepRecord:
            record = open_step(settings, limit)
            taken[limit] = replace(record, timeline=None, peak_by_module={}, out_of_memory=None)
            return record

        fits(step(settings, None), step, limit_bytes)
        return taken
