"""Provokes failures of a live job with two ranks, again and again: does each end soon, with the name of the rank?

    python -m benchmarks.rank_failures                      every kind once
    python -m benchmarks.rank_failures kill_rank --rounds 20
    python -m benchmarks.rank_failures kill_rank --rounds 20 --backend cuda          on two GPUs

After each failure, a job has to take a step on the same cluster. After each round, no process of a rank may be left but
the two of that job, and at the end none at all. The memory that is in use on a GPU must not grow by more than 256 MiB
after the first rounds, and at the end not be more than that above what it was before. `cut_connection` needs root
(`benchmarks.own_cluster.Host`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.host_memory import take_host_memory
from benchmarks.own_cluster import OF_BRIDGE, PROFILE, ROOT, Cluster, Host, Notebook
from memlab import Lab, Layout, MemorySettings, Ranks
from memlab.lab import many_ranks, stepper
from memlab.lab.rank import Rank
from memlab.lab.request import PassRequest, StepRequest
from memlab.ranks.group import RankFailed
from memlab.record.step_record import StepRecord
from memlab.units import MIB
from tests.unit.served import number_of_process

MOST_SECONDS = 30.0
"""Within which a failure must end the call."""
DELAYS = (0.0, 0.05, 0.1, 0.3, 0.7, 1.2)
"""Seconds from the start of a step to its failure, one after another: other moments of the step."""
LAYOUTS = (Layout(tensor_model_parallel_size=2), Layout(data_parallel_size=2), Layout(pipeline_model_parallel_size=2))
MOST_MORE_BYTES = 256 * MIB
"""How much more memory may be in use on a GPU than before. The CUDA context of one process takes more."""
JOB: dict[str, Any] = {"architecture": "qwen3-moe-tiny", "num_layers": 2, "seq_length": 64, "backend": "cpu"}
SETTINGS = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn",))
WITHIN = "MEMLAB_FAILURE_WITHIN_A_STEP"
MARK = "MEMLAB_FAILURES"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a failure ended."""

    seconds: float
    """From the failure to its end."""
    words: str
    """What was raised."""
    is_named: bool
    """Whether that names the rank, or the engine and what is wrong with it."""
    next_step: str
    """What became of the next step on the same cluster: ``ok``."""


def _raise() -> None:
    raise RuntimeError("a fault\nof this rank alone")


def _spin() -> None:
    while True:
        pass


WITHIN_A_STEP: dict[str, Callable[[], object]] = {
    "exception": _raise,
    "hang": lambda: time.sleep(1000),
    "spin": _spin,
    "host_memory": take_host_memory,
}
"""What rank 1 does in place of its model's step."""


class FaultyRank(Rank):
    """A rank whose every fourth step has a fault, if it is rank 1."""

    num_steps = 0

    def take(self, request: StepRequest | PassRequest) -> StepRecord:
        """As `Rank.take`."""
        self.num_steps += 1
        if os.environ["RANK"] == "1" and self.num_steps % 4 == 0:
            with patch.object(stepper, "train_step", lambda *_: WITHIN_A_STEP[os.environ[WITHIN]]()):
                return super().take(request)
        return super().take(request)


def _process_of_rank(ranks: Ranks, rank: int) -> int:
    number: int | None = ranks.call(ranks.engines[rank].number, number_of_process).get()
    assert number is not None, f"engine {ranks.engines[rank].number} has no process of its own"
    return number


FROM_OUTSIDE: dict[str, Callable[[Ranks], Callable[[], object]]] = {
    "kill_rank": lambda ranks: partial(os.kill, _process_of_rank(ranks, 1), signal.SIGKILL),
    "stop_rank": lambda ranks: partial(os.kill, _process_of_rank(ranks, 1), signal.SIGSTOP),
    "kill_engine": lambda ranks: partial(os.kill, ranks.engines[1].pid, signal.SIGKILL),
    "stop_engine": lambda ranks: partial(os.kill, ranks.engines[1].pid, signal.SIGSTOP),
    "engine_memory": lambda ranks: partial(ranks.call, ranks.engines[1].number, take_host_memory),
    "ctrl_c": lambda _: partial(os.kill, os.getpid(), signal.SIGINT),
}
"""What happens to rank 1, or to this process, while a step runs."""


def step_until_it_fails(lab: Lab, happen: Callable[[], object] | None, delay: float) -> tuple[float, str, bool]:
    """Steps until the failure.

    Args:
        lab: Of two ranks.
        happen: Called after the delay; None if the lab's rank 1 fails by itself.
        delay: In seconds. Without one, Ctrl-C may come before the step.

    Returns:
        The seconds from the failure to the end of the call, what it raised, and whether that names rank 1.
    """
    happened = [time.monotonic()]

    def fail() -> None:
        happened[0] = time.monotonic()
        assert happen is not None
        happen()

    try:
        if happen is not None:
            threading.Timer(delay, fail).start()
        for number in range(1000):
            if happen is None:
                happened[0] = time.monotonic()  # the step that does not return began here
            lab.step(SETTINGS, warm_up=False)
            if time.monotonic() - happened[0] > 2 * MOST_SECONDS:
                return time.monotonic() - happened[0], f"NO FAILURE in {number + 1} steps", False
    except KeyboardInterrupt:
        return time.monotonic() - happened[0], "KeyboardInterrupt", True
    except RankFailed as error:
        return time.monotonic() - happened[0], str(error), error.rank == 1
    raise AssertionError("unreachable")


@contextmanager
def on_local_engines(kind: str) -> Iterator[Callable[[int], Ended]]:
    """Rank 1 fails in a step on engines of `Ranks.start`."""
    served = "benchmarks.rank_failures:FaultyRank" if kind in WITHIN_A_STEP else "memlab.lab.rank:Rank"
    with patch.object(many_ranks, "_SERVED", served), Ranks.start(2) as ranks:

        def provoke(number: int) -> Ended:
            with Lab(**JOB, layout=_layout(number), ranks=ranks) as lab:
                lab.step(warm_up=False)
                happen = FROM_OUTSIDE[kind](ranks) if kind in FROM_OUTSIDE else None
                seconds, words, is_named = step_until_it_fails(lab, happen, _delay(number))
                return Ended(seconds, words, is_named, lab.step(warm_up=False).status)

        yield provoke


@contextmanager
def cut_connection() -> Iterator[Callable[[int], Ended]]:
    """The host of rank 1 is cut off in a step, and comes back a second after the error."""
    with Host(0, 2) as first, Host(1, 2) as second, Cluster(OF_BRIDGE) as cluster:
        cluster.wait_for([cluster.start_engine(first), cluster.start_engine(second)])
        with Ranks.connect(PROFILE) as ranks:

            def provoke(number: int) -> Ended:
                with Lab(**JOB, layout=_layout(number), ranks=ranks) as lab:
                    lab.step(warm_up=False)
                    seconds, words, is_named = step_until_it_fails(lab, second.cut, _delay(number))
                    time.sleep(1)
                    second.mend()
                    return Ended(seconds, words, is_named, lab.step(warm_up=False).status)

            yield provoke


@contextmanager
def on_two_engines(num_notebooks: int) -> Iterator[list[Notebook]]:
    """A cluster with two engines, and notebooks that know it."""
    with Cluster() as cluster:
        cluster.wait_for([cluster.start_engine(), cluster.start_engine()])
        with ExitStack() as stack:
            yield [stack.enter_context(Notebook()) for _ in range(num_notebooks)]


def cell(number: int, ranks: str = f"Ranks.connect({PROFILE!r})") -> str:
    """Returns a cell that opens a job, and prints the status of a step and that it is done."""
    return (
        "from memlab import *\n"
        f"ranks = {ranks}\n"
        f"lab = Lab(**{JOB!r}, layout={_layout(number)!r}, ranks=ranks)\n"
        "print(lab.step(warm_up=False).status)"
    )


@contextmanager
def kernel_restart() -> Iterator[Callable[[int], Ended]]:
    """A kernel restarts in a step on engines that run on. Until its ranks have ended, its next job may be refused."""
    with on_two_engines(1) as (notebook,):
        _open(notebook, cell(0))

        def provoke(number: int) -> Ended:
            released = _restart_in_a_step(notebook, number)
            words = opened = notebook.run(cell(number + 1))
            seconds = released.result()
            if words != "ok":
                opened = notebook.run(cell(number + 1))
            return Ended(seconds, words, words == "ok" or _is_refusal(words), opened)

        yield provoke


@contextmanager
def kernel_restart_local() -> Iterator[Callable[[int], Ended]]:
    """A kernel restarts in a step on engines that it has started, which end with it."""
    with Notebook() as notebook:
        _open(notebook, cell(0, "Ranks.start(2)"))

        def provoke(number: int) -> Ended:
            released = _restart_in_a_step(notebook, number)
            return Ended(released.result(), "", True, notebook.run(cell(number + 1, "Ranks.start(2)")))

        yield provoke


def _open(notebook: Notebook, of_job: str) -> None:
    opened = notebook.run(of_job)
    assert opened == "ok", opened


def _restart_in_a_step(notebook: Notebook, number: int) -> Future[float]:
    """Restarts a kernel that has a job; returns the future seconds from there to the end of its ranks' processes."""
    of_job = rank_processes()
    assert len(of_job) == 2, of_job
    notebook.begin("lab.set_workload(num_microbatches=64)\nlab.step()")
    time.sleep(_delay(number))
    happened = time.monotonic()

    def seconds_to_the_end() -> float:
        left = psutil.wait_procs(of_job, timeout=4 * MOST_SECONDS)[1]
        return float("inf") if left else time.monotonic() - happened

    released = ThreadPoolExecutor(1).submit(seconds_to_the_end)
    notebook.restart(now=number % 2 == 0)
    return released


def _is_refusal(words: str, owner: str = r"\d+") -> bool:
    """Whether an error names the rank, the engine, and the process whose rank the engine runs."""
    named = rf"ValueError: rank \d cannot run on engine \d .* runs a rank of another notebook \(process {owner} on"
    return re.match(named, words) is not None


@contextmanager
def two_notebooks() -> Iterator[Callable[[int], Ended]]:
    """A second notebook opens a job on engines of a first one, whose job goes on; then the first one closes its own."""
    with on_two_engines(2) as notebooks:
        _open(notebooks[0], cell(0))

        def provoke(number: int) -> Ended:
            first, second = notebooks if number % 2 == 0 else notebooks[::-1]
            step = "print(lab.step().status)"
            running = first.begin(step) if number % 4 < 2 else None
            time.sleep(_delay(number))
            happened = time.monotonic()
            words = second.run(cell(number + 1))
            seconds = time.monotonic() - happened
            is_named = _is_refusal(words, str(first.pid))
            steps = [*([first.wait(running)] if running else []), first.run(step)]
            first.run("lab.close()\nranks.close()")
            steps.append(second.run(cell(number + 1)))
            return Ended(seconds, words, is_named, "ok" if set(steps) == {"ok"} else str(steps))

        yield provoke


@contextmanager
def other_code(file: str, text: str, name: str) -> Iterator[Callable[[int], Ended]]:
    """A third engine has another memlab; the two others are free again once it has ended.

    Args:
        file: In which the other memlab differs.
        text: That it has there at the end.
        name: What the refusal says is different.
    """
    with tempfile.TemporaryDirectory(prefix="memlab-source-") as folder, Cluster() as cluster:
        source = Path(folder)
        shutil.copytree(ROOT / "memlab", source / "memlab")
        with (source / "memlab" / file).open("a") as other:
            other.write(text)
        same = [cluster.start_engine(), cluster.start_engine()]
        cluster.wait_for(same)

        def provoke(number: int) -> Ended:
            other = cluster.start_engine(source=source)
            cluster.wait_for([*same, other])
            started = time.monotonic()
            try:
                Ranks.connect(PROFILE)
                words = "NO FAILURE"
            except ValueError as error:
                words = str(error)
            seconds = time.monotonic() - started
            is_named = (
                re.match(rf"{name} is .* on engine \d+ .* on engine \d+ \(process {other.pid} on", words) is not None
            )
            cluster.end_engine(other)
            cluster.wait_for(same)
            with Ranks.connect(PROFILE) as ranks, Lab(**JOB, layout=_layout(number), ranks=ranks) as lab:
                return Ended(seconds, words, is_named, lab.step(warm_up=False).status)

        yield provoke


ON_A_CLUSTER: dict[str, Callable[[], AbstractContextManager[Callable[[int], Ended]]]] = {
    "cut_connection": cut_connection,
    "kernel_restart": kernel_restart,
    "kernel_restart_local": kernel_restart_local,
    "two_notebooks": two_notebooks,
    "other_version": partial(other_code, "_version.py", '__version__ = "9.9.9"\n', "memlab"),
    "other_source": partial(other_code, "units.py", "# other\n", "the hash of memlab's source files"),
}
"""What happens on a cluster of several processes, hosts or notebooks."""
KINDS = [*FROM_OUTSIDE, *WITHIN_A_STEP, *ON_A_CLUSTER]


def _layout(number: int) -> Layout:
    return LAYOUTS[number % len(LAYOUTS)]


def _delay(number: int) -> float:
    return DELAYS[number % len(DELAYS)]


def processes_left(mark: str) -> list[psutil.Process]:
    """Returns the processes that inherited the mark from this one."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                left.append(process)
    return left


def rank_processes() -> list[psutil.Process]:
    """Returns the processes of ranks that inherited the mark from this one."""
    found = []
    for process in processes_left(os.environ[MARK]):
        with suppress(psutil.Error):
            parent = process.parent()
            is_forked = parent is not None and all(
                "memlab.ranks.fork_server" in each.cmdline() for each in (process, parent)
            )
            if is_forked or "rank_process" in " ".join(process.cmdline()):
                found.append(process)
    return found


def bytes_in_use() -> list[int]:
    """Returns what all processes hold on each GPU that is visible; nothing on the CPU backend."""
    if JOB["backend"] != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    asked = ["nvidia-smi", f"--id={visible}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) * MIB for line in subprocess.check_output(asked, text=True).split()]


def is_more(held: list[int], before: list[int]) -> bool:
    """Returns whether a GPU holds over `MOST_MORE_BYTES` more than before."""
    return any(now > then + MOST_MORE_BYTES for now, then in zip(held, before, strict=True))


def soak(kind: str, rounds: int) -> list[str]:
    """Provokes one kind of failure so many times; returns what went wrong, and prints a line for each round."""
    at_first = bytes_in_use()
    in_rounds: list[list[int]] = []
    os.environ[MARK] = mark = f"{os.getpid()}-{kind}"
    os.environ[WITHIN] = kind
    wrong: list[str] = []
    with ON_A_CLUSTER[kind]() if kind in ON_A_CLUSTER else on_local_engines(kind) as provoke:
        for number in range(rounds):
            ended = provoke(number)
            num_left = max(0, len(rank_processes()) - 2)
            in_rounds.append(bytes_in_use())
            on_gpus = "".join(f", {held / MIB:.0f} MiB on GPU {gpu}" for gpu, held in enumerate(in_rounds[-1]))
            line = (
                f"{kind} {number + 1}, {_layout(number)}: ended after {ended.seconds:.1f} s, next step "
                f"{ended.next_step}, {num_left} ranks left behind{on_gpus}, load {os.getloadavg()[0]:.0f}: "
                f"{ended.words}"
            )
            print(line, flush=True)
            is_well = ended.is_named and ended.seconds <= MOST_SECONDS and ended.next_step == "ok" and num_left == 0
            of_layouts = [max(each) for each in zip(*in_rounds[: len(LAYOUTS)], strict=True)]
            wrong += [] if is_well and not is_more(in_rounds[-1], of_layouts) else [line]
    left = psutil.wait_procs(processes_left(mark), timeout=MOST_SECONDS)[1]
    wrong += [f"{kind}: left behind: {each}" for each in left]
    held = bytes_in_use()
    if held:
        print(f"{kind}: the GPUs held {at_first} bytes before the first round, and hold {held} after the last")
    return [*wrong, f"{kind}: left on a GPU: {held}, before: {at_first}"] if is_more(held, at_first) else wrong


def main() -> int:
    """Runs the kinds that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", default=KINDS, choices=[*KINDS, KINDS], metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each kind (default: %(default)s)")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default=JOB["backend"], help="(default: %(default)s)")
    arguments = parser.parse_args()
    JOB["backend"] = arguments.backend
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    wrong = [words for kind in arguments.kinds for words in soak(kind, arguments.rounds)]
    print("\n".join(["not ended well:", *wrong]) if wrong else "all failures ended well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
