"""A search next to a lab that is open in this process.

The simulated backend replaces torch's CUDA calls and Megatron's process groups for the whole process, so a panel
searches in another one: `SearchProcess` starts ``python -m memlab.lab.search_process`` and sends it the scenario as
JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from memlab.config.backend_kind import KINDS
from memlab.config.scenario import Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.fitting.pareto_front import SearchResult
from memlab.fitting.search import SearchInterrupted
from memlab.import_path import variables_that_import_memlab
from memlab.lab.search_steps import NO_GPU
from memlab.lab.search_workers import front_of, open_workers

_logger = logging.getLogger(__name__)


class SearchProcess:
    """A search in a process of its own. It ends by itself or by `stop`; `on_end` is called once, whatever happens.

    Args:
        scenario: What is run.
        base: What each setting does at least.
        limit_bytes: What torch may hold.
        resolution_bytes: As for `memlab.fitting.search.search`.
        alone: As for `memlab.fitting.search.search`.
        backend: Name of the backend whose steps are predicted; on the ``cpu``, routing is as chance spreads tokens.
        on_line: Called on a thread of its own with each line of progress.
        on_end: Called on that thread with the result, or with one line that says what went wrong.
    """

    def __init__(
        self,
        scenario: Scenario,
        base: MemorySettings,
        limit_bytes: int,
        *,
        resolution_bytes: int,
        alone: bool = False,
        backend: str = "simulated",
        on_line: Callable[[str], object],
        on_end: Callable[[SearchResult | str], object],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memlab-search-")
        request = {
            "scenario": scenario.to_dict(),
            "base": base.to_dict(),
            "limit_bytes": limit_bytes,
            "resolution_bytes": resolution_bytes,
            "alone": alone,
            "backend": backend,
            "answer": str(Path(self._folder.name) / "search.json"),
        }
        self._stopped = False
        self._process = subprocess.Popen(  # this interpreter
            [sys.executable, "-m", "memlab.lab.search_process"],
            env=os.environ | variables_that_import_memlab() | NO_GPU,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupted cell ends no search
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin:
            # A process that has ended without reading it: `_follow` reports why.
            self._process.stdin.write(json.dumps(request))
        self._thread = threading.Thread(target=self._follow, args=(request["answer"], on_line, on_end), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the search with what it has found so far; a second call ends the process at once."""
        if self._stopped:
            self._process.terminate()
        else:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Returns when the search has ended and `on_end` was called."""
        self._thread.join()

    def _follow(
        self, answer: str, on_line: Callable[[str], object], on_end: Callable[[SearchResult | str], object]
    ) -> None:
        try:
            outcome = self._wait_for_outcome(answer, on_line)
        except Exception as error:  # `on_line` may raise anything, and the caller waits for `on_end`
            _logger.exception("a search could not be followed to its end")
            outcome = f"The search was lost ({type(error).__name__}: {error}): search again."
        on_end(outcome)

    def _wait_for_outcome(self, answer: str, on_line: Callable[[str], object]) -> SearchResult | str:
        process, last = self._process, ""
        assert process.stderr is not None
        with process, self._folder:
            for line in process.stderr:
                last = line.strip() or last
                if " predicted, " in line or " processes predict: " in line:
                    on_line(last)
            code = process.wait()
            if code == 0:
                return SearchResult.from_dict(json.loads(Path(answer).read_text()))
        if self._stopped:
            return "Stopped: search again, or choose settings by hand."
        return f"The search ended with code {code} ({last}): change the memory limit or the workload, and search again."


def main() -> None:
    """Reads a request from stdin, as JSON, and writes the result to the file that the request names."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    request = json.load(sys.stdin)
    answer = Path(request.pop("answer"))
    scenario, base = Scenario.from_dict(request.pop("scenario")), MemorySettings.from_dict(request.pop("base"))
    backend = request.pop("backend")
    if not KINDS[backend].has_allocator:  # as the panel predicts a single change
        scenario = routed_by_chance(scenario)
    with open_workers(backend=backend) as workers:
        try:
            found = front_of(base, [scenario], workers, **request)
        except SearchInterrupted as interrupt:
            found = interrupt.found
    answer.write_text(json.dumps(replace(found, backend=backend).to_dict()))


if __name__ == "__main__":
    main()
