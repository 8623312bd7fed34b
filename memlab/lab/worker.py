"""The one thread on which all of a lab's work runs, so that cells, widgets and headless runs behave the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Worker:
    """A thread that runs one job at a time; the caller may leave a step running and wait for it later.

    Args:
        job_context: The context that every job runs in.
        describe: Returns the scenario and the current settings in words, for error messages.
    """

    def __init__(self, job_context: Callable[[], AbstractContextManager[None]], describe: Callable[[], str]) -> None:
        self._job_context = job_context
        self._describe = describe
        self._running: Future[Any] | None = None
        self._starting = threading.Lock()
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="memlab")
        # The object and not the thread's number: the system gives the number of an ended thread to a new one.
        self._thread = self._executor.submit(threading.current_thread).result()

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._running is not None and not self._running.done()

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return self._executor is None

    def run_exclusive(self, job: Callable[[], _Result]) -> _Result:
        """Runs a job and waits for it.

        Raises:
            ValueError: If a step is running, the worker is closed, or the caller is the worker's own thread.
        """
        self.refuse_on_own_thread()  # before the lock, which `finish` holds while this thread ends
        with self._starting:
            self._refuse_if_busy()
            return self.submit(job).result()

    def start(self, step: Callable[[], _Result], before: Callable[[], None]) -> Future[_Result]:
        """Starts a step and returns at once; until it ends, `run_exclusive` and `start` refuse.

        Args:
            before: Called once it is certain that the step will run.

        Raises:
            ValueError: As for `run_exclusive`; nothing has then run.
        """
        self.refuse_on_own_thread()
        with self._starting:
            self._refuse_if_busy()
            before()
            self._running = running = self.submit(step)
        return running

    def finish(self, last_job: Callable[[], _Result]) -> _Result | None:
        """Waits for a running step, runs a last job and ends the thread; does nothing if the thread has ended."""
        self.refuse_on_own_thread()
        with self._starting:
            if self._executor is None:
                return None
            try:
                return self.submit(last_job).result()
            finally:
                self.end()

    def end(self) -> None:
        """Ends the thread without a last job; called by a job, it ends the thread after that job."""
        assert self._executor is not None
        self._executor.shutdown(wait=threading.current_thread() is not self._thread)
        self._executor = None

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Queues a job behind whatever is running.

        Raises:
            ValueError: If the worker is closed.
        """
        executor = self.require_open()

        def run() -> _Result:
            with self._job_context():
                return job()

        return executor.submit(run)

    def require_open(self) -> ThreadPoolExecutor:
        """Returns the executor.

        Raises:
            ValueError: If the worker is closed.
        """
        if self._executor is None:
            raise ValueError(
                f"this lab ({self._describe()}) is closed: open another with Lab(...), or run its cell again"
            )
        return self._executor

    def refuse_on_own_thread(self) -> None:
        """Refuses a call that would wait for itself.

        Raises:
            ValueError: If the caller is the worker's own thread.
        """
        if threading.current_thread() is self._thread:
            raise ValueError(
                "code that the lab calls (a progress or done callback, or a release or load of your own) runs on the "
                "lab's own thread: call the lab from another one"
            )

    def _refuse_if_busy(self) -> None:
        if self.busy:
            raise ValueError(f"this lab is busy with a step ({self._describe()}): wait for it, or stop it")
