"""The one thread on which all of a lab's work runs, so that cells, widgets and headless runs do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Worker:
    """A thread that does one job at a time, and of which only a step may be waited for later.

    Args:
        at_work: The context that every job runs in.
        describe: Says in words whose worker it is and what it steps under, for its refusals.
    """

    def __init__(self, at_work: Callable[[], AbstractContextManager[None]], describe: Callable[[], str]) -> None:
        self._at_work = at_work
        self._describe = describe
        self._running: Future[Any] | None = None
        self._starting = threading.Lock()
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="memlab")
        self._identity = self._thread.submit(threading.get_ident).result()

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._running is not None and not self._running.done()

    @property
    def closed(self) -> bool:
        """Whether the thread is gone."""
        return self._thread is None

    def alone(self, job: Callable[[], _Result]) -> _Result:
        """Does a job, and waits for it.

        Raises:
            ValueError: If a step is running, the worker is closed, or this is its own thread.
        """
        self.refuse_on_own_thread()  # before the lock, which `finish` holds while this thread ends
        with self._starting:
            self._refuse_if_busy()
            return self.submit(job).result()

    def start(self, step: Callable[[], _Result], before: Callable[[], None]) -> Future[_Result]:
        """Starts a step and returns at once; until it ends every other job is refused.

        Args:
            step: The job.
            before: Called once it is certain that the step will run.

        Raises:
            ValueError: As `alone`; nothing has then run.
        """
        self.refuse_on_own_thread()
        with self._starting:
            self._refuse_if_busy()
            before()
            self._running = running = self.submit(step)
        return running

    def finish(self, last_job: Callable[[], _Result]) -> _Result | None:
        """Waits for a running step, does a last job and ends the thread; does nothing where that has been done."""
        self.refuse_on_own_thread()
        with self._starting:
            if self._thread is None:
                return None
            try:
                return self.submit(last_job).result()
            finally:
                self.end()

    def end(self) -> None:
        """Ends the thread without a last job."""
        assert self._thread is not None
        self._thread.shutdown()
        self._thread = None

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Lines a job up, whatever is running.

        Raises:
            ValueError: If the worker is closed.
        """
        if self._thread is None:
            raise ValueError(f"this lab ({self._describe()}) is closed: open another with Lab(...)")

        def run() -> _Result:
            with self._at_work():
                return job()

        return self._thread.submit(run)

    def refuse_on_own_thread(self) -> None:
        """Refuses a call that would wait for itself.

        Raises:
            ValueError: If this is the worker's thread.
        """
        if threading.get_ident() == self._identity:
            raise ValueError("a progress or done callback runs on the lab's own thread: call the lab from another one")

    def _refuse_if_busy(self) -> None:
        if self.busy:
            raise ValueError(f"this lab is busy with a step ({self._describe()}): wait for it, or stop it")
