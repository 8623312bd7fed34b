"""A search next to a lab that is open in this process.

The simulated backend replaces torch's CUDA calls and Megatron's process groups for the whole process, so other
processes predict the steps. Which steps, a thread of this one decides.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from memlab.config.backend_kind import KINDS
from memlab.config.scenario import Scenario, routed_by_chance
from memlab.config.settings import MemorySettings
from memlab.fitting.pareto_front import SearchResult
from memlab.fitting.prediction import PredictionLostError
from memlab.fitting.search import SearchInterrupted
from memlab.lab.search_workers import Workers, front_of, open_workers

_logger = logging.getLogger(__name__)


class BackgroundSearch:
    """A search on a thread of its own. It ends by itself or by `stop`; `on_end` is called once, whatever happens.

    Args:
        base: What each setting does at least.
        resolution_bytes: As for `memlab.fitting.search.search`.
        alone: As for `memlab.fitting.search.search`.
        backend: Name of the backend whose steps are predicted; on the ``cpu``, routing is as chance spreads tokens.
        on_line: Called on that thread with each line of progress.
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
        scenario = scenario if KINDS[backend].has_allocator else routed_by_chance(scenario)  # as the panel predicts one
        self._stopping = threading.Event()
        self._workers: Workers | None = None

        def search() -> SearchResult | str:
            with open_workers(backend=backend, apart=True, say=on_line) as workers:
                self._workers = workers
                if self._stopping.is_set():
                    workers.stop()
                options = {"resolution_bytes": resolution_bytes, "alone": alone}
                try:
                    found = front_of(base, [scenario], workers, limit_bytes, say=on_line, **options)
                except SearchInterrupted as interrupted:
                    found = interrupted.found
            return replace(found, backend=backend)

        self._thread = threading.Thread(target=lambda: on_end(_outcome(search)), name="memlab-search", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the search with what it has found so far."""
        self._stopping.set()
        if self._workers is not None:
            self._workers.stop()

    def wait(self) -> None:
        """Returns when the search has ended and `on_end` was called."""
        self._thread.join()


def _outcome(search: Callable[[], SearchResult | str]) -> SearchResult | str:
    try:
        return search()
    except KeyboardInterrupt:  # `Workers.stop`, before anything was found
        return "Stopped: search again, or choose settings by hand."
    except (ValueError, PredictionLostError) as error:
        return f"The search ended ({error}): change the memory limit or the workload, and search again."
    except Exception as error:  # `on_line` may raise anything, and the caller waits for `on_end`
        _logger.exception("a search could not be followed to its end")
        return f"The search was lost ({type(error).__name__}: {error}): search again."
