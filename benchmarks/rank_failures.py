"""Provokes failures of a live job with two ranks, again and again: does each end soon, with the name of the rank?

    python -m benchmarks.rank_failures                      every kind once
    python -m benchmarks.rank_failures kill_rank --rounds 20

After each failure, the job has to take a step again. At the end, no process may be left.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import psutil

from memlab import Lab, Layout, MemorySettings, Ranks
from memlab.lab import job_session, stepper
from memlab.lab.rank import Rank
from memlab.ranks.group import RankFailed

MOST_SECONDS = 30.0
"""Within which a failure must end the call."""
DELAYS = (0.0, 0.05, 0.1, 0.3, 0.7, 1.2)
"""Seconds from the start of a step to its failure, one after another: other moments of the step."""
LAYOUTS = (Layout(tensor_model_parallel_size=2), Layout(data_parallel_size=2), Layout(pipeline_model_parallel_size=2))
WITHIN = "MEMLAB_FAILURE_WITHIN_A_STEP"


def _raise() -> None:
    raise RuntimeError("a fault\nof this rank alone")


def _spin() -> None:
    while True:
        pass


_TAKEN: list[bytearray] = []


def _take_host_memory() -> None:
    """Takes all that its limit allows, in smaller and smaller pieces, and keeps it: nothing is left to say so with."""
    used_bytes = psutil.Process().memory_info().vms
    psutil.Process().rlimit(psutil.RLIMIT_AS, (used_bytes + 2**28, used_bytes + 2**28))
    for size in (2**24, 2**16, 2**10):
        with suppress(MemoryError):
            while True:
                _TAKEN.append(bytearray(size))
    _TAKEN.append(bytearray(2**24))


WITHIN_A_STEP: dict[str, Callable[[], object]] = {
    "exception": _raise,
    "hang": lambda: time.sleep(1000),
    "spin": _spin,
    "host_memory": _take_host_memory,
}
"""What rank 1 does in place of its model's step."""


class FaultyRank(Rank):
    """A rank whose every fourth step has a fault, if it is rank 1."""

    num_steps = 0

    def step(self, forward_only: bool, kwargs: dict[str, Any]) -> Any:
        """As `Rank.step`."""
        self.num_steps += 1
        if os.environ["RANK"] == "1" and self.num_steps % 4 == 0:
            with patch.object(stepper, "train_step", lambda *_: WITHIN_A_STEP[os.environ[WITHIN]]()):
                return super().step(forward_only, kwargs)
        return super().step(forward_only, kwargs)


def _process_of_rank(ranks: Ranks, rank: int) -> int:
    children = psutil.Process(ranks.engines[rank].pid).children()
    return next(child.pid for child in children if "rank_process" in " ".join(child.cmdline()))


FROM_OUTSIDE: dict[str, Callable[[Ranks], None]] = {
    "kill_rank": lambda ranks: os.kill(_process_of_rank(ranks, 1), signal.SIGKILL),
    "stop_rank": lambda ranks: os.kill(_process_of_rank(ranks, 1), signal.SIGSTOP),
    "kill_engine": lambda ranks: os.kill(ranks.engines[1].pid, signal.SIGKILL),
    "stop_engine": lambda ranks: os.kill(ranks.engines[1].pid, signal.SIGSTOP),
    "ctrl_c": lambda _: os.kill(os.getpid(), signal.SIGINT),
}
"""What happens to rank 1, or to this process, while a step runs."""


def provoke(kind: str, lab: Lab, ranks: Ranks, delay: float) -> tuple[float, str]:
    """Steps until the failure; returns the seconds from there to the end of the call, and what it raised."""
    happened = [time.monotonic()]

    def happen() -> None:
        happened[0] = time.monotonic()
        FROM_OUTSIDE[kind](ranks)

    try:
        if kind in FROM_OUTSIDE:
            threading.Timer(delay, happen).start()  # without a delay, Ctrl-C may come before the step
        for number in range(1000):
            if kind in WITHIN_A_STEP:
                happened[0] = time.monotonic()  # the step that does not return began here
            lab.step(MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn",)), warm_up=False)
            if time.monotonic() - happened[0] > 2 * MOST_SECONDS:
                return time.monotonic() - happened[0], f"NO FAILURE in {number + 1} steps"
    except KeyboardInterrupt:
        return time.monotonic() - happened[0], "KeyboardInterrupt"
    except RankFailed as error:
        words = str(error) if error.rank == 1 else f"NAMES RANK {error.rank}: {error}"
        return time.monotonic() - happened[0], words
    raise AssertionError("unreachable")


def processes_left(mark: str) -> list[str]:
    """Returns the command lines of processes that inherited the mark from this one."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("MEMLAB_FAILURES") == mark:
                left.append(" ".join(process.cmdline())[-60:])
    return left


def soak(kind: str, rounds: int) -> list[str]:
    """Provokes one kind of failure so many times; returns what went wrong, and prints a line for each round."""
    os.environ["MEMLAB_FAILURES"] = mark = f"{os.getpid()}-{kind}"
    os.environ[WITHIN] = kind
    wrong: list[str] = []
    served = "benchmarks.rank_failures:FaultyRank" if kind in WITHIN_A_STEP else "memlab.lab.rank:Rank"
    with patch.object(job_session, "_SERVED", served), Ranks.start(2) as ranks:
        for number in range(rounds):
            layout = LAYOUTS[number % len(LAYOUTS)]
            with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, layout=layout, ranks=ranks, backend="cpu") as lab:
                lab.step(warm_up=False)
                seconds, words = provoke(kind, lab, ranks, DELAYS[number % len(DELAYS)])
                again = lab.step(warm_up=False).status
            print(f"{kind} {number + 1}, {layout}: ended after {seconds:.1f} s, next step {again}: {words}", flush=True)
            if seconds > MOST_SECONDS or again != "ok" or words.startswith(("NAMES", "NO ")):
                wrong.append(f"{kind} {number + 1}: {seconds:.1f} s, {again}, {words}")
    time.sleep(2)
    return wrong + [f"{kind}: left behind: {process}" for process in processes_left(mark)]


def main() -> int:
    """Runs the kinds that are named."""
    kinds = [*FROM_OUTSIDE, *WITHIN_A_STEP]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", default=kinds, choices=[*kinds, kinds], metavar="KIND", help=", ".join(kinds)
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    wrong = [words for kind in arguments.kinds for words in soak(kind, arguments.rounds)]
    print("\n".join(wrong) or f"all {arguments.rounds * len(arguments.kinds)} failures ended well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
