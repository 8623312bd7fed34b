"""The processes that predict the steps of a search: on the cores of this machine, or on the engines of a cluster.

The search itself runs here, and asks for one step after the other as in one process. While it waits for a step, free
processes also take the steps for which it will probably ask next. A step that it does not ask for changes no result.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, contextmanager, suppress
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from memlab.backends.host_system import free_host_memory_bytes
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.cpu_info import num_cores
from memlab.fitting.largest import Largest, Tried, What, largest
from memlab.fitting.layouts import FittingLayout, Known, LayoutSearch, Step, search_layouts
from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.prediction import Prediction, PredictionLostError
from memlab.fitting.search import Likely, search
from memlab.jobs.frameworks.framework import NotModelled
from memlab.lab.kept_predictions import BACKEND as KEPT_BACKEND
from memlab.lab.kept_predictions import KeptPredictions
from memlab.lab.search_steps import NO_GPU, Predictor
from memlab.ranks.balanced import Balanced, CallLostError
from memlab.ranks.local_processes import LocalProcesses
from memlab.units import GIB, format_bytes, remaining

if TYPE_CHECKING:
    from memlab.ranks.ranks import Ranks

SERVED = "memlab.lab.preloaded:Predictor"
_PROCESS_BYTES = GIB
"""Of host memory, for a process that predicts: 12 layers of Qwen3-30B-A3B took 0.23 GiB, and longer steps take more."""
_STEPS_TO_CHOOSE_FROM = 4
_NEW_ESTIMATE_SECONDS = 2.0
IMPORTS = ("memlab.lab.preloaded",)


def tell(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def open_workers(
    engines: Ranks | int | None = None,
    *,
    at_most: int = sys.maxsize,
    replay: bool = True,
    backend: str = "simulated",
    not_modelled: Sequence[NotModelled] = (),
    apart: bool = False,
    kept: KeptPredictions | None = None,
    say: Callable[[str], object] = tell,
) -> Iterator[Workers]:
    """Opens processes that predict, for the block.

    Args:
        engines: How many processes of this machine; 0 and 1 are this process alone, and None is one per core, as far as
            they fit into half of the free host memory. Or the engines of a cluster.
        at_most: How many processes None is at most.
        apart: Whether this process, which may have a live model, predicts nothing itself.
        kept: What earlier searches have predicted; the engines of a cluster, which may have another version of
            memlab, neither use it nor add to it.
        say: Called with a line if host memory is short.
    """
    how: dict[str, Any] = {"replay": replay, "backend": backend, "not_modelled": not_modelled}
    is_here = engines is None or isinstance(engines, int)
    how["kept"] = kept if replay and backend == KEPT_BACKEND and is_here else None
    number = _num_processes(at_most, say) if engines is None else engines
    if number in (0, 1) and not apart:
        with closing(_ThisProcess()) as alone:
            yield Workers(alone, **how)
        return
    places = LocalProcesses(number, IMPORTS) if isinstance(number, int) else number
    with Balanced(places, SERVED, NO_GPU) as balanced:
        yield Workers(balanced, **how)


def _num_processes(at_most: int, say: Callable[[str], object]) -> int:
    """Returns one process per core, or as many as fit into half of the free host memory; the rest is for the model."""
    wanted = max(1, min(num_cores(), at_most))
    free_bytes = free_host_memory_bytes()
    number = max(1, min(wanted, free_bytes // 2 // _PROCESS_BYTES))
    if number < wanted:
        say(
            f"only {number} of {wanted} processes predict: {format_bytes(free_bytes)} of host memory are free, of "
            f"which they may take half, and each may need {format_bytes(_PROCESS_BYTES)}"
        )
    return number


class _ThisProcess:
    """Predicts in this process, one step whenever it is waited for."""

    def __init__(self) -> None:
        self._opened: Predictor | None = None
        self._waiting: list[tuple[Future[Any], object, Callable[[], Prediction]]] = []
        self._last: object = None

    def __len__(self) -> int:
        return 1

    def submit(self, method: str, *args: Any, after: object) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, after, lambda: getattr(self._predictor, method)(*args)))
        return future

    @property
    def _predictor(self) -> Predictor:
        """Imports torch and Megatron, which a search does not need whose steps are all kept."""
        if self._opened is None:
            self._opened = Predictor()
        return self._opened

    def wait(self) -> None:
        """Predicts the first step that was submitted, or rather the first one of the scenario whose lab is open."""
        chosen = next((each for each in self._waiting if each[1] == self._last), self._waiting[0])
        self._waiting.remove(chosen)
        future, self._last, predict = chosen
        try:
            future.set_result(predict())
        except Exception as error:  # noqa: BLE001  # only the caller that asks for this step gets it
            future.set_exception(error)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class Workers:
    """Predicts steps in several processes, each of which has a simulated lab of its own.

    Args:
        processes: They serve `Predictor`.
        kept: What earlier searches have predicted. It is used, and added to.
    """

    def __init__(
        self,
        processes: Balanced | _ThisProcess,
        *,
        replay: bool = True,
        backend: str = "simulated",
        not_modelled: Sequence[NotModelled] = (),
        kept: KeptPredictions | None = None,
    ) -> None:
        self._processes, self._kept = processes, kept
        self._asked: set[Step] = set()
        self._found: set[Step] = set()
        """What earlier searches have kept, also of steps that this one only expected to ask for."""
        self._how = replay, backend, tuple(not_modelled), kept
        self._predictions: dict[Step, Future[Prediction]] = {}
        self._stopped = Future[None]()

    @property
    def num_kept(self) -> int:
        """Predictions that earlier searches have kept, and this one has used."""
        return len(self._asked & self._found)

    def stop(self) -> None:
        """Ends the wait for a step, or the next one, with KeyboardInterrupt; for any thread."""
        with suppress(InvalidStateError):
            self._stopped.set_result(None)

    def predict(
        self,
        scenario: Scenario,
        settings: MemorySettings,
        limit_bytes: int,
        likely: Callable[[], Iterator[Step]] = lambda: iter(()),
        *,
        num_scenarios: int = 1,
    ) -> Prediction:
        """Returns a prediction, which may have been made ahead.

        Args:
            likely: Says which steps will probably be asked for next.
            num_scenarios: Of how many scenarios these are. A process that goes from one to another opens another lab,
                so it then gets several steps from which it takes those of one scenario first.

        Raises:
            PredictionLostError: If the processes that should take the step are lost.
        """
        most = len(self._processes) * (1 if num_scenarios == 1 else _STEPS_TO_CHOOSE_FROM)
        processes = self._processes
        self._asked.add(Step(scenario, settings, limit_bytes))
        try:
            if isinstance(processes, _ThisProcess):
                begun = self._begun(scenario, settings, limit_bytes)
                return self._wait_for(begun, likely, most, lambda _: processes.wait())
            with _interrupted_while_waiting() as wait_for_one:
                begun = self._begun(scenario, settings, limit_bytes)
                return self._wait_for(begun, likely, most, wait_for_one)
        except CallLostError as error:
            raise PredictionLostError(f"{settings} cannot be predicted: {error}") from error

    def _wait_for(
        self,
        future: Future[Prediction],
        likely: Callable[[], Iterator[Step]],
        most: int,
        wait_for_one: Callable[[set[Future[Any]]], None],
    ) -> Prediction:
        """Waits for a prediction, and lets other processes take the steps that will probably follow, so many."""
        while not future.done():
            running = {future, *(each for each in self._predictions.values() if not each.done())}
            for following in likely():
                if len(running) >= most:
                    break
                if not (ahead := self._begun(*following)).done():
                    running.add(ahead)
            wait_for_one({*running, self._stopped})
            if self._stopped.done():
                raise KeyboardInterrupt
        return future.result()

    def known(self, scenario: Scenario, settings: MemorySettings, limit_bytes: int) -> Prediction | None:
        """Returns a prediction that has been made, or None."""
        future = self._predictions.get(Step(scenario, settings, limit_bytes))
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def _begun(self, scenario: Scenario, settings: MemorySettings, limit_bytes: int) -> Future[Prediction]:
        key = Step(scenario, settings, limit_bytes)
        if key in self._predictions:
            return self._predictions[key]
        kept = None if self._kept is None else self._kept.prediction(*key, self._how[2])
        if kept is None:
            begun = self._processes.submit("predict", *key, *self._how, after=scenario)
        else:
            begun = Future()
            begun.set_result(kept)
            self._found.add(key)
        self._predictions[key] = begun
        return begun


@contextmanager
def _interrupted_while_waiting() -> Iterator[Callable[[set[Future[Any]]], None]]:
    """Returns a context whose value waits until one of some futures is done, and in which Ctrl-C ends only this wait.

    Elsewhere Python may raise KeyboardInterrupt after it has taken a lock of a future, and before the block that
    releases it (https://bugs.python.org/issue29988). The thread that sets the future's result then waits forever.
    """
    done: SimpleQueue[Future[Any] | None] = SimpleQueue()  # a signal's handler may put something in while another does
    interrupts: list[int] = []

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        done.put(None)

    def wait_for_one(futures: set[Future[Any]]) -> None:
        for future in futures - followed:
            future.add_done_callback(done.put)
        followed.update(futures)
        done.get()
        if interrupts:
            raise KeyboardInterrupt

    followed: set[Future[Any]] = set()
    is_heard = threading.current_thread() is threading.main_thread()
    is_heard = is_heard and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, note)
    try:
        yield wait_for_one
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt


def front_of(
    base: MemorySettings,
    scenarios: Sequence[Scenario],
    workers: Workers,
    limit_bytes: int,
    *,
    say: Callable[[str], object] = tell,
    **options: Any,
) -> SearchResult:
    """Searches the memory settings of a job, and reports its progress, on stderr if nothing else is said.

    Args:
        base: What each setting does at least.
        workers: They predict. How many there are does not change the result.
        **options: As `memlab.fitting.search.search` takes them.
    """
    known: list[Likely] = [lambda: iter(())]

    def predict(scenario: Scenario, settings: MemorySettings) -> Prediction:
        predicted = workers.predict(
            scenario,
            settings,
            limit_bytes,
            lambda: (Step(*step, limit_bytes) for step in known[-1]()),
            num_scenarios=len(scenarios),
        )
        if settings == base and scenario != scenarios[-1]:  # the line of the setting follows the last rank
            peak = format_bytes(predicted.peak_allocated_bytes)
            say(f"rank {predicted.rank} alone: {settings}: {peak}, {predicted.verdict}")
        return predicted

    return search(
        base,
        scenarios,
        predict,
        limit_bytes,
        on_point=progress_in_lines(say),
        look_ahead=known.append,
        **options,
    )


def largest_of(
    what: What, settings: MemorySettings, scenarios: Sequence[Scenario], workers: Workers, limit_bytes: int, **rest: Any
) -> Largest:
    """Finds the largest workload that fits, and reports each value that is tried on stderr.

    Args:
        workers: They predict. How many there are does not change the result.
        **rest: As `memlab.fitting.largest.largest` takes it.
    """

    def predict_all(now: Sequence[Scenario], following: Sequence[Scenario]) -> list[Prediction]:
        asked = [Step(scenario, settings, limit_bytes) for scenario in (*now, *following)]
        return [workers.predict(scenario, settings, limit_bytes, lambda: iter(asked)) for scenario in now]

    started = time.monotonic()

    def report(tried: Tried) -> None:
        seconds = time.monotonic() - started
        peak = format_bytes(tried.peak_allocated_bytes)
        tell(f"{what} {tried.value:,}: {tried.verdict}, peak {peak} ({seconds:.0f} s so far)")

    return largest(what, settings, scenarios, predict_all, limit_bytes, on_tried=report, **rest)


def layouts_that_fit(
    job: Scenario,
    given: dict[str, int],
    base: MemorySettings,
    gpu_memory_bytes: int,
    workers: Workers,
    is_allowed: Callable[[MemorySettings], bool] = lambda settings: True,
) -> LayoutSearch:
    """Searches the layouts of a job, and reports each that is predicted on stderr.

    Args:
        job: With data parallelism alone.
        given: Sizes that are not varied.
        base: What each setting does at least.
        workers: They predict. How many there are does not change the result.
        is_allowed: Says which settings may be proposed.
    """
    started, numbers = time.monotonic(), count(1)
    best: FittingLayout | None = None
    following: list[Callable[[Known], Iterator[Step]]] = [lambda known: iter(())]

    def likely() -> Iterator[Step]:
        return following[-1](lambda step: workers.known(*step))

    def predict(step: Step) -> Prediction:
        return workers.predict(*step, likely=likely)

    def report(tried: Scenario, found: FittingLayout | None, num_left: int) -> None:
        nonlocal best
        left = remaining(time.monotonic() - started, next(numbers), num_left).replace("about", "at most about")
        words = "does not fit" if found is None else f"{found.verdict} with '{found.settings}'"
        if found is not None and (best is None or found.cost < best.cost):
            best, words = found, f"{words}, the best so far"
        tell(f"{tried.layout}: {words}; at most {num_left} layouts to go{left}")

    return search_layouts(
        job,
        given,
        base,
        gpu_memory_bytes,
        predict,
        is_allowed=is_allowed,
        on_layout=report,
        look_ahead=following.append,
    )


def progress_in_lines(say: Callable[[str], object]) -> Callable[[Point, SearchResult, Callable[[], int]], None]:
    """Returns a function that reports each point of a search in a line, with the remaining time and the best so far."""
    numbers, started = count(1), time.monotonic()
    estimated, left = started, ""
    best: Point | None = None

    def report(point: Point, found: SearchResult, count_likely: Callable[[], int]) -> None:
        nonlocal estimated, left, best
        number, num_left, now = next(numbers), found.num_left, time.monotonic()
        if now - estimated > _NEW_ESTIMATE_SECONDS:  # counting takes time
            estimated, left = now, _between(now - started, number, count_likely(), num_left)
        peak = format_bytes(point.peak_allocated_bytes)
        still = f"at most {num_left} to go{left}" if num_left else "none to go"
        former, best = best, found.best if point.fits else best
        better = "" if best is None or best is former else f"; best so far: '{best.settings}' {best.verdict}"
        say(f"{number} predicted, {still}: {point.settings}: {peak}{better}")

    return report


def _between(seconds: float, num_done: int, num_likely: int, num_left: int) -> str:
    """Says how long a search still takes: the likely steps at least, and all that are left at most."""
    least, most = (remaining(seconds, num_done, number) for number in (num_likely, num_left))
    if not least:
        return most.replace("about", "at most about")
    return least if least == most else f"{least.removesuffix(' left')} to {most.removeprefix(', about ')}"
