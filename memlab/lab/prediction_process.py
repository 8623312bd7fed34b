"""Predictions of single steps in a process of their own, next to a lab that is open in this one.

The simulated backend replaces torch's CUDA calls for the whole process, so a panel on a live lab cannot predict in its
own. The process of a `PredictionProcess` keeps its simulated lab as long as the questions are about the same scenario
and backend, and the lab can start over: the next answer then takes no longer than a step and its warm-up.
"""

from __future__ import annotations

import threading

from memlab.config.scenario import Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.lab.search_steps import NO_GPU
from memlab.lab.search_workers import IMPORTS, SERVED
from memlab.ranks.balanced import Balanced, CallLostError
from memlab.ranks.local_processes import LocalProcesses
from memlab.record.step_record import StepRecord


class PredictionProcess:
    """Predicts one step after another, for any thread; it ends with the process that started it.

    Args:
        served: ``module:class`` of what predicts (`memlab.lab.search_steps.Predictor`).
    """

    def __init__(self, served: str = SERVED) -> None:
        self._served = served
        self._serving: Balanced | None = None
        self._starting = threading.Lock()

    def start(self) -> Balanced:
        """Starts the process, so that it has imported torch and Megatron when the first question comes."""
        with self._starting:
            if self._serving is None:
                self._serving = Balanced(LocalProcesses(1, IMPORTS), self._served, NO_GPU, most_tries=1)
                self._serving.submit("give_way")
            return self._serving

    def predict(self, scenario: Scenario, settings: MemorySettings, backend: str) -> StepRecord:
        """Predicts a step on one rank, and waits for the answer.

        Args:
            scenario: What is run. An MoE model's routing is predicted as chance spreads tokens.
            backend: Name of the backend whose step is predicted: bytes on the ``cpu`` have no allocator's rounding.

        Returns:
            The record, without its timeline.

        Raises:
            ValueError: If the step cannot be predicted, or the process has ended.
        """
        try:
            record: StepRecord = self.start().submit("record", routed_by_chance(scenario), settings, backend).result()
        except CallLostError as error:
            raise ValueError(f"the process that predicts was {error}: change a setting, which starts another") from None
        return record
