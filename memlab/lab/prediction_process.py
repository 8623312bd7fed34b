"""Predictions of single steps in a process of their own, next to a lab that is open in this one.

The simulated backend replaces torch's CUDA calls for the whole process, so a panel on a live lab cannot predict in its
own. `PredictionProcess` starts a process that runs `main`, and sends it one question per line. That process keeps its
simulated lab as long as the questions are about the same scenario and backend, and the lab can start over: the next
answer then takes no longer than a step and its warm-up.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from memlab.backends.simulated import predicting
from memlab.config.scenario import Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.import_path import variables_that_import_memlab
from memlab.lab.search_steps import NO_GPU, SimulatedSteps, stepping
from memlab.ranks.process_log import ProcessLog
from memlab.record.step_record import StepRecord

_PROGRAM = "from memlab.quiet_import import imported; imported('memlab.lab.prediction_process').main()"
_NICENESS = 5
"""The live model goes first."""


class PredictionProcess:
    """Predicts one step after another, for any thread; it ends with the process that started it."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[str], ProcessLog] | None = None
        self._starting = threading.Lock()
        self._asking = threading.Lock()

    def start(self) -> tuple[subprocess.Popen[str], ProcessLog]:
        """Starts the process, so that it has imported torch and Megatron when the first question comes.

        Returns:
            The process, and what it prints.
        """
        with self._starting:  # not the lock of a question, for whose answer a panel would wait
            if self._running is None or self._running[0].poll() is not None:
                log = ProcessLog()
                self._running = _start(log), log
            return self._running

    def predict(self, scenario: Scenario, settings: MemorySettings, backend: str) -> StepRecord:
        """Predicts a step on one rank, and waits for the answer.

        Args:
            scenario: What is run. An MoE model's routing is predicted as chance spreads tokens.
            settings: The memory settings.
            backend: Name of the backend whose step is predicted: bytes on the ``cpu`` have no allocator's rounding.

        Returns:
            The record, without its timeline.

        Raises:
            ValueError: If the step cannot be predicted, or the process has ended.
        """
        question: dict[str, Any] = {"scenario": routed_by_chance(scenario).to_dict(), "settings": settings.to_dict()}
        question["backend"] = backend
        with self._asking:
            process, log = self.start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                process.communicate()  # closes its pipes
                words = log.last_words(process.returncode, num_lines=1)
                log.close()
                raise ValueError(f"the prediction process {words}: change a setting, which starts a new one")
            log.shorten()
        answer = json.loads(line)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return StepRecord.from_dict(answer)


def _start(log: ProcessLog) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | variables_that_import_memlab() | NO_GPU,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.file.fileno(),
        text=True,
        start_new_session=True,  # an interrupted cell ends no prediction
    )


def main() -> None:
    """Answers each line of stdin by a line on stdout: a record as JSON, or why there is none."""
    os.nice(_NICENESS)
    gc.collect()
    gc.freeze()  # as in memlab/__init__.py: this process is the predictions' own
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    open_for: tuple[Scenario, str] | None = None
    steps: SimulatedSteps | None = None
    with ExitStack() as opened:
        for line in sys.stdin:
            question = json.loads(line)
            scenario, backend_name = Scenario.from_dict(question["scenario"]), question["backend"]
            try:
                if steps is None or (scenario, backend_name) != open_for:
                    steps = None
                    opened.close()
                    steps = opened.enter_context(stepping(scenario, backend=predicting(backend_name)))
                    open_for = scenario, backend_name
                record = steps(MemorySettings.from_dict(question["settings"]))
                answer = replace(record, timeline=None).to_dict()
            except ValueError as error:
                answer = {"refused": str(error)}
            print(json.dumps(answer), file=answers, flush=True)
