"""Engines that hold the ranks of a job: started on this machine, or connected to where they run already.

The engines are ipyparallel's, which also brings launchers for MPI, Slurm, Kubernetes and ssh
(https://ipyparallel.readthedocs.io). Each engine runs one rank in a process of its own (`memlab.ranks.engine`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import ipyparallel
import psutil

from memlab.config.validation import check_whole_number, shortened
from memlab.import_path import variables_that_import_memlab
from memlab.ranks import engine
from memlab.ranks.forked_process import ADDRESS_VARIABLE
from memlab.ranks.guard import PROFILE, end_trees

_START_SECONDS = 60
ANSWER_SECONDS = 15.0
"""An engine that does not answer for so long is lost."""
_KEEP_SECONDS = 5.0
NO_ENGINE = (IndexError, ipyparallel.error.NoEnginesRegistered, OSError)
"""What `Ranks.call` raises for an engine that has left, and once the ranks are closed."""
_MOST_REFRESHES = 3
"""How often engines that have ended are replaced in one go."""
_HAS_ENDED = "EngineError"
"""What ipyparallel's controller answers for an engine that has left."""
_END_SECONDS = 3.0
"""How long an engine has to end its process."""


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One engine: where it runs, and with which packages."""

    number: int
    """ipyparallel's."""
    host: str
    pid: int
    versions: dict[str, str]
    started: float
    """When its process started, in seconds since 1970. Another process may get the same number later."""

    def __str__(self) -> str:
        return f"engine {self.number} (process {self.pid} on {self.host})"


class Ranks:
    """Engines for the ranks of a `Lab`; `start` and `connect` make one.

    An engine keeps the process of its rank between labs, so that the next lab starts at once. `close` ends the engines
    that `start` started. They also end when this process ends, in whatever way, and when no variable refers to these
    ranks or to their labs any more, so that a notebook's cell may run again.
    """

    _connected: ClassVar[weakref.WeakSet[Ranks]] = weakref.WeakSet()

    def __init__(self, client: ipyparallel.Client, local: _LocalCluster | None) -> None:
        self.client = client
        self._local = local
        self._ended: set[int] = set()
        """Numbers of engines that this process has ended."""
        self._used: set[int] = set()
        """Numbers of engines that have run a rank of this connection; others may run those of another notebook."""
        self.owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:6]}"
        """Names this connection to the engines, which serve one at a time."""
        self.engines: list[Engine] = []
        self._closed = threading.Event()
        self._sending = threading.Lock()  # two threads could give two messages one number
        self.refresh()
        self._end_connection = weakref.finalize(self, _end_connection, client, self._closed, self._sending)
        threading.Thread(
            target=_keep, args=(weakref.ref(self), self._closed), name="memlab-keep-engines", daemon=True
        ).start()

    @classmethod
    def start(cls, number: int) -> Ranks:
        """Starts engines on this machine. They listen on 127.0.0.1 only. Each takes a second or two to start.

        On GPUs rank n takes device n, and runs on the processors of the device's NUMA node. Without a GPU, its process
        is forked from one that has imported torch and Megatron (`memlab.ranks.fork_server`).

        Args:
            number: How many engines; a lab may use fewer.

        Raises:
            ValueError: If the number is not a positive whole number, or the engines do not start.
        """
        check_whole_number("ranks", number, at_most=1024)
        local = _LocalCluster()
        try:
            return cls(local.start(number), local)
        except BaseException:
            local.end()
            raise

    @classmethod
    def connect(cls, profile: str = "default", cluster_id: str = "") -> Ranks:
        """Connects to engines that run already, which were started with ``ipcluster start --profile=PROFILE``.

        A second connection of this process to the same cluster closes the first one, whose ranks would occupy the
        engines. So a notebook's cell may run again.

        Args:
            profile: The profile of ipyparallel that describes the cluster.
            cluster_id: If the profile has several clusters, the one that ``ipcluster list`` shows.

        Raises:
            ValueError: If no such cluster answers, or it has no engines.
        """
        start = f"start it with: ipcluster start --profile={profile} -n NUMBER"
        try:
            client = ipyparallel.Client(profile=profile, cluster_id=cluster_id, timeout=10)
        except (OSError, TimeoutError, ipyparallel.error.IPythonError) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"no cluster of profile {profile!r} answers ({words}): {start}") from error
        if not client.ids:
            client.close()
            raise ValueError(f"the cluster of profile {profile!r} has no engines: {start}")
        try:
            connected = cls(client, None)
        except BaseException:
            client.close()
            raise
        for former in tuple(cls._connected):
            if former.client.session.key == client.session.key and not former.closed:
                warnings.warn("closing the earlier connection of this process to the same engines", stacklevel=2)
                former.close()
        cls._connected.add(connected)
        return connected

    def refresh(self) -> None:
        """Asks which engines there are now; a local cluster first replaces the ones that have ended.

        Raises:
            ValueError: If these ranks are closed, an engine does not answer, engines end again and again, they have
                different versions, or their memlab is not that of this process.
        """
        if self.closed:
            again = f"ranks = Ranks.start({len(self.engines)})"
            raise ValueError(f"these ranks are closed: start others, as with {again}, and open the lab on them")
        for _ in range(_MOST_REFRESHES):
            if self._local is not None:
                self._local.replace_lost(self._present, {known.number for known in self.engines})
            found = self._describe_all()
            if found is not None:
                # Neighbouring ranks, which share tensors, on one host.
                self.engines = sorted(found, key=lambda one: (one.host, one.number))
                _require_equal_versions(self.engines)
                return
        assert self._local is not None  # others are not replaced
        raise ValueError(
            f"engines on this machine ended as soon as they had started, {_MOST_REFRESHES} times: look at free memory "
            f"and at the logs in {self._local.folder}/log, and start engines again"
        )

    def _describe_all(self) -> list[Engine] | None:
        """Asks all engines where they run; None if one of a local cluster has left, or was silent and is ended."""
        asked, numbers = {}, self._present()
        for number in numbers:
            with suppress(*NO_ENGINE):  # it has just left
                asked[number] = self.call(number, engine.describe)
        wait(asked.values(), timeout=ANSWER_SECONDS)
        silent = [number for number, answer in asked.items() if not answer.done() or _lacks_memory(answer)]
        if silent:
            self._end_silent(silent)
            return None
        found = []
        for number, answer in asked.items():
            try:
                found.append(Engine(number, **answer.get()))
            except ipyparallel.error.RemoteError as error:
                if error.ename != _HAS_ENDED:
                    raise ValueError(
                        f"engine {number} answers {error.ename}: {error.evalue}: install memlab where it runs, and "
                        "start it again"
                    ) from None
        return None if self._local is not None and len(found) < len(numbers) else found

    def _end_silent(self, silent: list[int]) -> None:
        known = [one for one in self.engines if one.number in silent]
        if self._local is None or len(known) < len(silent):
            raise ValueError(
                f"engines {', '.join(map(str, silent))} do not answer, or have no host memory left: end them, and "
                "start the cluster again"
            )
        for one in known:
            self.kill(one)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def call(self, number: int, function: Any, *args: Any) -> ipyparallel.AsyncResult:
        """Calls a function of `memlab.ranks.engine` in an engine, and returns the future answer.

        Raises:
            IndexError: If the engine has left. (`NO_ENGINE` has this error and the two below.)
            NoEnginesRegistered: If all engines have left.
            ConnectionError: If these ranks are closed.
        """
        with self._sending:
            if self.closed:
                raise ConnectionError("these ranks are closed")
            # The client keeps the name of every message that it ever sent, which only its `%px` magics look up.
            self.client.history.clear()
            answer = self.client[number].apply_async(function, *args)
        if function is engine.start:
            answer.add_done_callback(lambda done: self._used.add(number) if done.exception() is None else None)
        return answer

    def end_processes(self, engines: Sequence[Engine]) -> None:
        """Ends the processes that run for this connection on some engines, whatever these processes are doing.

        If an engine does not answer, it is ended too.
        """
        asked = {}
        engines = [one for one in engines if one.number in self._used]
        for one in engines:
            with suppress(*NO_ENGINE):
                asked[one] = self.call(one.number, engine.end, self.owner)
        wait(asked.values(), timeout=_END_SECONDS)
        for one in engines:
            if one not in asked or not asked[one].done():
                self.kill(one)

    def kill(self, lost: Engine) -> None:
        """Ends an engine that does not answer, if it runs on this machine."""
        with suppress(psutil.NoSuchProcess):
            if lost.host == socket.gethostname() and psutil.Process(lost.pid).create_time() == lost.started:
                self._ended.add(lost.number)
                end_trees([lost.pid])

    def _present(self) -> list[int]:
        """Returns the numbers of the engines, without those that the controller does not miss yet: it takes 30 s."""
        return [number for number in self.client.ids if number not in self._ended]

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all engines run here."""
        return {one.host for one in self.engines} == {socket.gethostname()}

    def keep(self) -> None:
        """Tells the engines that this process still exists; without this news, they end what they run for it."""
        for one in self.engines:
            with suppress(*NO_ENGINE):
                self.call(one.number, engine.keep, self.owner)

    def close(self) -> None:
        """Ends the processes of this connection's ranks, and the engines if `start` started them."""
        if self._local is None and not self.closed:
            self.end_processes(self.engines)
        self._end_connection()
        if self._local is not None:
            self._local.end()

    def __len__(self) -> int:
        return len(self.engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        hosts = {one.host for one in self.engines}
        return f"Ranks({len(self)} engines on {', '.join(sorted(hosts))})"


def _end_connection(client: ipyparallel.Client, closed: threading.Event, sending: threading.Lock) -> None:
    """Closes a client once nothing is being sent; what comes later finds that it is closed."""
    with sending:
        closed.set()
        client.close()


def _keep(ranks: weakref.ref[Ranks], closed: threading.Event) -> None:
    """Keeps the engines of ranks that still have a name."""
    while not closed.wait(_KEEP_SECONDS):
        named = ranks()
        if named is None:
            return
        named.keep()
        del named


def _lacks_memory(answer: ipyparallel.AsyncResult) -> bool:
    """Whether an engine could not answer because its host, or a limit of its process, gave it no memory."""
    error = answer.exception()
    return isinstance(error, ipyparallel.error.RemoteError) and error.ename == "MemoryError"


def why_lost(error: ipyparallel.error.RemoteError) -> str:
    """Says in words what became of an engine that answers with an error."""
    if error.ename == "MemoryError":
        return "has no host memory left"
    return "has ended" if error.ename == _HAS_ENDED else f"answers: {error.evalue}"


def _require_equal_versions(engines: list[Engine]) -> None:
    for other in engines[1:]:
        first = engines[0]
        _compare(f"on {first}", first.versions, other, first.versions.keys() | other.versions.keys())
    own = engine.own_code()
    for first in engines[:1]:
        # A host with GPUs may have another torch than this one, but it has to understand what memlab sends.
        _compare("in this process", own, first, own.keys())


def _compare(place: str, versions: dict[str, str], other: Engine, names: Iterable[str]) -> None:
    for name in sorted(names):
        here, there = versions.get(name, "missing"), other.versions.get(name, "missing")
        if here != there:
            raise ValueError(
                f"{name} is {here} {place} and {there} on {other}, must be the same on all ranks: install one version "
                "everywhere, and start the engines again"
            )


class _LocalCluster:
    """ipyparallel's controller and engines on this machine, in a folder of their own, and the guard that ends them."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="memlab-ranks-")  # of mode 0700: it holds the connection keys
        variables = variables_that_import_memlab()
        self.cluster = ipyparallel.Cluster(
            profile_dir=self.folder, controller_ip="127.0.0.1", log_level=40, shutdown_atexit=False
        )
        self.cluster.controller_args = [
            "--nodb",  # by default the controller keeps up to 1 GiB of answers
            # An engine is listed after two beats of its heart: 6 s by default. A lost one is missed after 30 s, as by
            # default.
            "--HeartMonitor.period=500",
            "--HeartMonitor.max_heartmonitor_misses=60",
        ]
        self.cluster.config.LocalEngineSetLauncher.delay = 0
        helpers = [_helper("guard", self.folder, os.environ | variables)]
        if _may_fork():
            address = str(Path(self.folder) / "fork-server")
            helpers.append(_helper("fork_server", address, os.environ | variables | {PROFILE: self.folder}))
            variables[ADDRESS_VARIABLE] = address
        self.cluster.config.LocalEngineSetLauncher.environment = variables
        self._end_at_exit = weakref.finalize(self, _close_inputs, helpers)

    def start(self, number: int) -> ipyparallel.Client:
        self.cluster.start_controller_sync()
        client = self.cluster.connect_client_sync()
        self._start_engines(lambda: client.ids, number)
        return client

    def replace_lost(self, present: Callable[[], list[int]], known: set[int]) -> None:
        """Starts an engine for each that is known and not present."""
        lost = known - set(present())
        if lost:
            self._start_engines(present, len(lost))

    def _start_engines(self, present: Callable[[], list[int]], number: int) -> None:
        wanted = len(present()) + number
        self.cluster.start_engines_sync(number)
        deadline = time.monotonic() + _START_SECONDS
        while len(present()) < wanted:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{number} engines did not start within {_START_SECONDS} s, and {_end_of_logs(Path(self.folder))}: "
                    "start fewer, or end other processes"
                )
            time.sleep(0.1)

    def end(self) -> None:
        self._end_at_exit()


def _end_of_logs(folder: Path) -> str:
    """Says in one line how the logs of a cluster end, whose folder is removed when its start has failed."""
    logs = [path for kind in ("ipcontroller", "ipengine") for path in sorted((folder / "log").glob(f"{kind}*.log"))]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f"the last line of their logs is {shortened(lines[-1])}" if lines else "they wrote no log"


def _may_fork() -> bool:
    """Whether a process that is forked on this machine works: a GPU cannot be used after a fork."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def _helper(module: str, argument: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a process that ends when its standard input does, and so with this process."""
    return subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-m", f"memlab.ranks.{module}", argument],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _close_inputs(helpers: Sequence[subprocess.Popen[str]]) -> None:
    for helper in helpers:
        assert helper.stdin is not None
        helper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            helper.wait(timeout=10)
