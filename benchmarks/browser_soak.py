"""Runs the browser tests many times in random order, on a quiet machine or beside processes that only count.

One JupyterLab server and one chromium serve all rounds, so a test also meets what the tests before it left behind.

    python -m benchmarks.browser_soak --rounds 20 --burners 2
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest


class Rounds:
    """Repeats the collected tests in a new order per round, and prints a line per round."""

    def __init__(self, num_rounds: int, seed: int) -> None:
        self.num_rounds = num_rounds
        self.seed = seed
        self.failures: list[Counter[str]] = [Counter()]
        self.started = time.monotonic()
        self._num_tests = 0
        self._num_done = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Orders the tests: all of round 1, then all of round 2, and so on."""
        self._num_tests = len(items)
        rng = random.Random(self.seed)  # noqa: S311 - an order needs no cryptography
        order: list[pytest.Item] = []
        for _ in range(self.num_rounds):
            of_round = rng.sample(items, len(items))
            if order and of_round[0] is order[-1]:  # pytest prepares no fixtures for an item that follows itself
                of_round.append(of_round.pop(0))
            order += of_round
        items[:] = order

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts failures by test, also those of a test's fixtures."""
        if report.failed:
            self.failures[-1][f"{report.nodeid.rpartition('/')[2]} ({report.when})"] += 1

    def pytest_runtest_logfinish(self) -> None:
        """Prints a round that is complete."""
        self._num_done += 1
        if self._num_done % self._num_tests:
            return
        seconds = time.monotonic() - self.started
        failed = ", ".join(self.failures[-1]) or "passed"
        print(f"\nround {len(self.failures):3} of {self.num_rounds}: {seconds:7.0f} s: {failed}", flush=True)
        self.failures.append(Counter())
        self.started = time.monotonic()


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Keeps as many processors busy, and ends the processes that do so."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Prints a line per round, and returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--burners", type=int, default=0, help="processes that keep a processor busy meanwhile")
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument("tests", nargs="*", default=["tests/browser"])
    arguments = parser.parse_args()
    rounds = Rounds(arguments.rounds, arguments.seed)
    with burners(arguments.burners):
        return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments.tests], plugins=[rounds]))


if __name__ == "__main__":
    sys.exit(main())
