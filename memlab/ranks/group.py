"""The processes of one job, one per rank: calls in which all take part, and what ends them when one fails.

A rank that has failed leaves the others waiting in a collective operation, where nothing but the end of their process
reaches them. So the whole group ends with the first rank that fails, and a new group is started for the next lab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ipyparallel

from memlab.ranks import engine
from memlab.ranks.messages import SILENT_SECONDS, read, request
from memlab.ranks.rank_process import Whereabouts
from memlab.ranks.ranks import ANSWER_SECONDS, NO_ENGINE, Engine, Ranks, why_lost

_POLL_SECONDS = 0.5
"""How long an engine waits for a message before it answers that there is none."""
_GRACE_SECONDS = 3.0
"""After the first error, how long the other ranks have to end by themselves."""
STALL_SECONDS = 20.0
"""Ranks of which none has moved for so long, and none computes, wait for each other."""
_IDLE_CPU_SECONDS = 0.1
"""A process that computes less than this in a second waits."""
_MOST_CPU_SECONDS = 15.0
"""A process that computes for longer within one call waits for its GPU, or does not end: no operation takes so long."""


class RankFailed(RuntimeError):  # noqa: N818  # what happened, not a kind of error
    """A rank failed, and the processes of all ranks have been ended. The text names the rank.

    Attributes:
        rank: Which one.
        errors: What ranks raised, by rank; empty if a process or an engine was lost.
    """

    def __init__(self, rank: int, words: str, errors: dict[int, BaseException]) -> None:
        super().__init__(f"rank {rank} {words}; the processes of all ranks were ended, and the next step starts others")
        self.rank = rank
        self.errors = errors


@dataclass(slots=True)
class _Member:
    """One rank during a call."""

    rank: int
    engine: Engine
    poll: ipyparallel.AsyncResult | None = None
    asked: float = 0.0
    alive: float = field(default_factory=time.monotonic)
    """When its process last said that it lives."""
    moved: float = field(default_factory=time.monotonic)
    """When it last was in other calls than before."""
    cpu_seconds: float = 0.0
    """What it has computed since."""
    computes: bool = True
    whereabouts: Whereabouts | None = None
    answer: Any = None
    error: BaseException | None = None
    text: str = ""
    done: bool = False

    def hear(self, kind: str, value: Any) -> None:
        """Notes a message of its process."""
        self.alive = now = time.monotonic()
        if kind == "alive":
            before, self.whereabouts = self.whereabouts, value
            if before is None or before.calls != value.calls:
                self._move(now)
            self.cpu_seconds += value.cpu_seconds
            # On a busy machine a process may have no processor for long, and is not idle.
            self.computes = value.cpu_seconds + value.queued_seconds > _IDLE_CPU_SECONDS
        elif kind == "progress":
            self._move(now)
        else:
            self.done = True
            self.answer, self.error = (value, None) if kind == "answer" else (None, value)

    def _move(self, now: float) -> None:
        self.moved, self.cpu_seconds = now, 0.0

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.whereabouts is not None and self.whereabouts.waits

    def has_stalled(self, now: float) -> bool:
        """Whether it has not moved for long, and waits, is idle, or computes without an end."""
        is_still = now - self.moved > STALL_SECONDS
        return is_still and (self.waits or not self.computes or self.cpu_seconds > _MOST_CPU_SECONDS)

    def __str__(self) -> str:
        return f"rank {self.rank} is in {self.whereabouts.at if self.whereabouts is not None else 'no place yet'}"


class RankGroup:
    """Processes on the first engines of a cluster, each with one object of the same class.

    Args:
        served: ``module:class`` of the object.

    Raises:
        ValueError: If there are fewer engines, or one of them runs a rank of another notebook.
    """

    def __init__(self, ranks: Ranks, size: int, served: str) -> None:
        if len(ranks) < size:
            raise ValueError(f"the job has {size} ranks, and there are {len(ranks)} engines: start {size} engines")
        self._ranks = ranks
        self._engines = ranks.engines[:size]
        self._number = 0
        self.alive = True
        """Whether the processes can be called."""
        local: dict[str, int] = {}
        try:
            for rank, one in enumerate(self._engines):
                local_rank = local.setdefault(one.host, 0)
                local[one.host] += 1
                self._ask(rank, engine.start, served, {"LOCAL_RANK": str(local_rank)})
        except BaseException:
            self.end()
            raise

    def __len__(self) -> int:
        return len(self._engines)

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        on_progress: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Calls a method on every rank at the same time, and waits for all answers.

        Args:
            arguments: For each rank, from rank 0 on; ranks without arguments are not called.
            on_progress: Called with what the object of rank 0 reports. If it raises, the group ends.

        Returns:
            The answers, in the order of the ranks.

        Raises:
            RankFailed: If a rank raised an error, was lost, or all wait for each other; the group has then ended.
            Exception: If every rank that was called raised the same error, which is raised. The group lives on.
        """
        self._number += 1
        members = [_Member(rank, self._engines[rank]) for rank in range(len(arguments))]
        for member in members:
            self._ask(member.rank, engine.send, request(self._number, method, arguments[member.rank]))
        try:
            self._wait(members, on_progress)
        except BaseException:  # of `on_progress`, or an interrupt: the ranks are in the middle of something
            self.end()
            raise
        errors = [member for member in members if member.error is not None or member.text]
        if not errors:
            return [member.answer for member in members]
        first = min(errors, key=_is_consequence)
        if first.error is not None and len({repr(member.error) for member in members}) == 1:
            raise first.error
        raise self._failure(first.rank, _words(first), members) from first.error

    def _wait(self, members: list[_Member], on_progress: Callable[[Any], None] | None) -> None:
        """Waits until all ranks have answered, or for a while after the first one has failed."""
        failed: float | None = None
        while not all(member.done for member in members):
            self._receive(members, on_progress)
            if any(member.error is not None or member.text for member in members):
                failed = failed or time.monotonic()
                if time.monotonic() - failed > _GRACE_SECONDS:
                    return
            else:
                self._watch(members)

    def notify(self, method: str, *args: Any) -> None:
        """Calls a method on every rank at once, next to what it does now, without an answer."""
        self._tell(engine.send, request(0, method, args))

    def _tell(self, function: Any, *args: Any) -> None:
        for one in self._engines:
            with suppress(*NO_ENGINE):  # the next call finds that it is lost
                self._ranks.call(one.number, function, self._ranks.owner, *args)

    def end(self) -> None:
        """Ends the processes of all ranks, and engines that do not answer."""
        self.alive = False
        self._ranks.end_processes(self._engines)

    def _ask(self, rank: int, function: Any, *args: Any) -> Any:
        one = self._engines[rank]
        try:
            return self._ranks.call(one.number, function, self._ranks.owner, *args).get(ANSWER_SECONDS)
        except ipyparallel.error.RemoteError as error:
            if error.ename == "ValueError" and function is engine.start:
                raise ValueError(f"rank {rank} cannot run on {one}: {error.evalue}") from None
            raise self._failure(rank, f"is lost: {one} {why_lost(error)}") from None
        except (TimeoutError, *NO_ENGINE):
            raise self._failure(rank, f"is lost: {one} does not answer") from None

    def _receive(self, members: list[_Member], on_progress: Callable[[Any], None] | None) -> None:
        waiting = [member for member in members if not member.done]
        for member in waiting:
            if member.poll is None:
                member.asked = time.monotonic()
                try:
                    member.poll = self._ranks.call(
                        member.engine.number, engine.receive, self._ranks.owner, _POLL_SECONDS
                    )
                except NO_ENGINE:
                    member.text, member.done = f"is lost: {member.engine} has ended", True
        polls = [member.poll for member in waiting if member.poll is not None]
        wait(polls, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        for member in waiting:
            poll = member.poll
            if poll is None:
                continue
            if poll.done():
                member.poll = None
                self._take(member, poll, on_progress)
            elif time.monotonic() - member.asked > ANSWER_SECONDS:
                member.text, member.done = f"is lost: {member.engine} does not answer", True

    def _take(self, member: _Member, poll: ipyparallel.AsyncResult, on_progress: Callable[[Any], None] | None) -> None:
        try:
            messages, ended = poll.get()
        except ipyparallel.error.RemoteError as error:
            member.text, member.done = f"is lost: {member.engine} {why_lost(error)}", True
            return
        for kind, value in read(messages, self._number, f"rank {member.rank}"):
            if kind == "progress" and member.rank == 0 and on_progress is not None:
                on_progress(value)
            member.hear(kind, value)
        if ended and not member.done:
            member.text, member.done = f"is lost: its process on {member.engine} {ended}", True

    def _watch(self, members: list[_Member]) -> None:
        """Finds ranks that are stopped, and ranks that wait for each other for good."""
        now = time.monotonic()
        running = [member for member in members if not member.done]
        for member in running:
            if now - member.alive > SILENT_SECONDS:
                member.text = f"is lost: its process on {member.engine} has not answered for {SILENT_SECONDS:.0f} s"
                return
        if running and all(member.has_stalled(now) for member in running):
            # The one that holds the others up does not wait for them, and a rank that waits for its GPU looks busy.
            first = min(running, key=lambda member: (member.waits, member.computes))
            places = "; ".join(map(str, running))
            first.text = f"has made no progress for {now - first.moved:.0f} s ({places})"

    def _failure(self, rank: int, words: str, members: Sequence[_Member] = ()) -> RankFailed:
        self.end()
        return RankFailed(rank, words, {member.rank: member.error for member in members if member.error is not None})


def _is_consequence(member: _Member) -> bool:
    """Whether a rank failed because another one had left: the words are gloo's and NCCL's (torch 2.11 and 2.13)."""
    words = str(member.error)
    return member.error is not None and any(part in words for part in _CONNECTION_WORDS)


_CONNECTION_WORDS = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "NCCL", "remote process")


def _words(member: _Member) -> str:
    if member.error is None:
        return member.text
    if isinstance(member.error, MemoryError):
        return "ran out of host memory (MemoryError): start fewer ranks on this host, or open a smaller model"
    return f"failed ({type(member.error).__name__}: {' '.join(str(member.error).split())})"
