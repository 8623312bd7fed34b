"""Independent calls, spread over engines: each runs on the next free one, and on another if that one is lost.

An engine is ipyparallel's, or a process of this machine (`LocalProcesses`). ipyparallel's own load balancing notices an
engine that ends, but waits for one that hangs, and cannot end what runs in an engine. Here each engine serves the calls
in a process (`memlab.ranks.engine`) that says every second that it lives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from memlab.ranks import engine
from memlab.ranks.local_processes import LocalProcess, LocalProcesses
from memlab.ranks.messages import SILENT_SECONDS, read, request

if TYPE_CHECKING:
    from memlab.ranks.ranks import Engine, Ranks

MOST_TRIES = 3
_POLL_SECONDS = 1.0
"""How long an engine waits for a message before it answers that there is none."""
_ENGINES_CLOSED = "the engines were closed"


class CallLostError(RuntimeError):
    """A call that was lost each time it was begun, or that no engine is left for. The text names the engines."""


class _ProcessLostError(Exception):
    """The process in which an engine serves the calls has ended, or does not answer."""


class _EngineLostError(Exception):
    """An engine has ended, does not answer, or serves another owner."""


class _Place(Protocol):
    """Where a process serves calls. Each method raises `_EngineLostError` if the place does not answer."""

    def start(self, served: str, variables: dict[str, str]) -> object: ...

    def send(self, request: bytes) -> object: ...

    def receive(self, seconds: float) -> tuple[list[bytes], str]: ...

    def end(self) -> object: ...


@dataclass(eq=False, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]
    after: object
    """What an engine that served the same before does faster."""
    on_start: Callable[[Any], object]
    on_report: Callable[[Any], object]
    future: Future[Any] = field(default_factory=Future)
    losses: dict[int, str] = field(default_factory=dict)
    """By the number of the engine that lost it: how."""
    num_losses: int = 0
    """How often it was lost after it had begun."""

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it was failed because the engines were closed
            self.future.set_exception(error)


class Balanced:
    """Calls methods of an object that each engine makes in a process of its own, and keeps from call to call.

    Args:
        ranks: The engines. Who started or connected them closes them, after this.
        served: ``module:class`` of the object (`memlab.ranks.rank_process`).
        most_tries: How often a call is begun at most, if it is lost each time.
    """

    def __init__(
        self,
        ranks: Ranks | LocalProcesses,
        served: str,
        variables: dict[str, str] | None = None,
        *,
        most_tries: int = MOST_TRIES,
    ) -> None:
        self._ranks = ranks
        self._served = served
        self._variables = variables or {}
        self._most_tries = most_tries
        self._served_last: dict[int, object] = {}
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._serving = {one.number for one in ranks.engines}
        for one in ranks.engines:
            threading.Thread(target=self._serve, args=(one,), name=f"memlab-{one.number}", daemon=True).start()

    def __len__(self) -> int:
        """Returns how many engines are left."""
        return len(self._serving)

    def submit(
        self,
        method: str,
        *args: Any,
        after: object = None,
        on_start: Callable[[Any], object] = lambda _: None,
        on_report: Callable[[Any], object] = lambda _: None,
    ) -> Future[Any]:
        """Calls a method on the next free engine.

        Args:
            *args: Its arguments, which have to be picklable, as its answer.
            after: An engine takes a waiting call whose value is that of its last call before others.
            on_start: Called with each engine that begins the call, on a thread of its own.
            on_report: Called there with what the object reports.

        Returns:
            The future answer. It raises what the method raised, or `CallLostError`.
        """
        call = _Call(method, args, after, on_start, on_report)
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            if self._closed:
                self._fail_waiting(_ENGINES_CLOSED)
            self._fail_if_none_is_left("all engines are lost")
        return call.future

    def close(self) -> None:
        """Ends the processes, whatever they do. Calls without an answer fail."""
        with self._changed:
            self._closed = True
            self._waiting.extend(self._running.values())
            self._fail_waiting(_ENGINES_CLOSED)
            serving = [one for one in self._ranks.engines if one.number in self._serving]
            self._changed.notify_all()
        self._ranks.end_processes(serving)  # type: ignore[arg-type]  # of the one class or of the other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, one: Engine | LocalProcess) -> None:
        place: _Place = one if isinstance(one, LocalProcess) else _OnEngine(one, self._ask)
        process = _Process(str(one), place, self._start)
        while (call := self._next(one.number)) is not None:
            try:
                call.on_start(one)
                process.call(call)
            except (_ProcessLostError, _EngineLostError) as lost:
                if self._closed:
                    return
                engine_is_lost = isinstance(lost, _EngineLostError) or not process.end()
                if process.has_begun:
                    call.num_losses += 1
                self._lose(call, one, str(lost), engine_is_lost=engine_is_lost)
                if engine_is_lost:
                    return
            except Exception as error:  # noqa: BLE001  # of the callbacks, or of an argument that cannot be pickled
                call.fail(error)
                process.end()  # it may be in the middle of the call

    def _start(self, place: _Place) -> None:
        """Starts the process of an engine, but none that `close`, which ends all, would not see."""
        if not isinstance(place, LocalProcess):
            place.start(self._served, self._variables)  # `_ask` sees whether it is closed
            return
        with self._changed:
            if self._closed:
                raise _EngineLostError("was closed")
            place.start(self._served, self._variables)

    def _next(self, number: int) -> _Call | None:
        """Waits for a call that this engine has not lost, or that all have; None if no more will come."""
        with self._changed:
            self._running.pop(number, None)
            while not self._closed:
                last = self._served_last.get(number)
                own = [
                    call for call in self._waiting if number not in call.losses or self._serving <= call.losses.keys()
                ]
                if own:
                    call = next((each for each in own if each.after == last), own[0])
                    self._waiting.remove(call)
                    self._running[number] = call
                    self._served_last[number] = call.after
                    return call
                self._changed.wait()
            return None

    def _lose(self, call: _Call, one: Engine | LocalProcess, why: str, *, engine_is_lost: bool) -> None:
        call.losses[one.number] = f"{one} {why}"
        with self._changed:
            del self._running[one.number]
            if call.num_losses < self._most_tries:
                self._waiting.appendleft(call)
            else:
                times = "once" if call.num_losses == 1 else f"{call.num_losses} times"
                call.fail(CallLostError(f"lost {times}: {'; '.join(call.losses.values())}"))
            if engine_is_lost:
                self._serving.discard(one.number)
                self._fail_if_none_is_left(f"the last engine is lost: {one} {why}")
            self._changed.notify_all()

    def _fail_if_none_is_left(self, why: str) -> None:
        if not self._serving:
            self._fail_waiting(why)

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(CallLostError(why))

    def _ask(self, one: Engine, function: Any, *args: Any) -> Any:
        """Calls a function of `memlab.ranks.engine`, and waits for its answer.

        Raises:
            _EngineLostError: If there is none. An engine that hangs is ended, if it runs on this machine.
        """
        import ipyparallel  # as long as all that a search imports without torch, which rarely has such an engine

        from memlab.ranks.ranks import ANSWER_SECONDS, NO_ENGINE, why_lost

        assert not isinstance(self._ranks, LocalProcesses)
        try:
            with self._changed:  # so that nothing is sent after `close` has ended the processes
                if self._closed:
                    raise _EngineLostError("was closed")
                answer = self._ranks.call(one.number, function, self._ranks.owner, *args)
            return answer.get(ANSWER_SECONDS)
        except ipyparallel.error.RemoteError as error:
            raise _EngineLostError(why_lost(error)) from None
        except TimeoutError:
            self._ranks.kill(one)
            raise _EngineLostError(f"has not answered for {ANSWER_SECONDS:.0f} s") from None
        except NO_ENGINE:
            raise _EngineLostError("has ended") from None


class _OnEngine:
    """The process of an engine of ipyparallel."""

    def __init__(self, one: Engine, ask: Callable[..., Any]) -> None:
        self._engine = one
        self._ask = ask

    def start(self, served: str, variables: dict[str, str]) -> None:
        self._ask(self._engine, engine.start, served, variables)

    def send(self, request: bytes) -> None:
        self._ask(self._engine, engine.send, request)

    def receive(self, seconds: float) -> tuple[list[bytes], str]:
        received: tuple[list[bytes], str] = self._ask(self._engine, engine.receive, seconds)
        return received

    def end(self) -> None:
        self._ask(self._engine, engine.end)


class _Process:
    """The process in which an engine serves calls, one after another; the first call starts it."""

    def __init__(self, name: str, place: _Place, start: Callable[[_Place], object]) -> None:
        self._name = name
        self._place = place
        self._start = start
        self._number = 0
        self._is_started = False
        self.has_begun = False
        """Whether the latest call reached the process."""

    def call(self, call: _Call) -> None:
        self.has_begun = False
        if not self._is_started:
            self._start(self._place)
            self._is_started = True
        self._number += 1
        self._place.send(request(self._number, call.method, call.args))
        self.has_begun = True
        heard = time.monotonic()
        while True:
            messages, ended = self._place.receive(_POLL_SECONDS)
            if messages:
                heard = time.monotonic()
            for kind, value in read(messages, self._number, self._name):
                if kind == "progress":
                    call.on_report(value)
                elif kind == "answer":
                    with suppress(InvalidStateError):
                        call.future.set_result(value)
                    return
                elif kind == "error":
                    call.fail(value)
                    return
            if ended:
                raise _ProcessLostError(f"lost its process, which {ended}")
            if time.monotonic() - heard > SILENT_SECONDS:
                raise _ProcessLostError(f"lost its process, which has not answered for {SILENT_SECONDS:.0f} s")

    def end(self) -> bool:
        """Ends the process, and returns whether the engine answers."""
        self._is_started = False
        try:
            self._place.end()
        except _EngineLostError:
            return False
        return True
