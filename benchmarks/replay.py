"""Takes the steps of random scenarios twice, and compares the timelines event by event; or the two allocators.

python -m benchmarks.replay --number 200                 # with and without replay
python -m benchmarks.replay --number 200 --start-over    # in a lab that starts over, and in new labs
python -m benchmarks.replay --number 5000 --allocators   # random requests: the allocator in Python, and compiled
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.unit.allocators import require_equal_answers
from tests.unit.replayed import Case, random_case, require_identical, take, take_anew


def _replayed(case: Case) -> tuple[int, int]:
    """Compares; returns how many steps were equal, and how many passes were replayed."""
    stepped, _ = take(case, replay=False)
    replayed, count = take(case, replay=True)
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)
    return len(stepped), count


def _anew(case: Case) -> tuple[int, int]:
    """Compares; returns how many steps were equal, and 1 if the lab could not start over."""
    equal = 0
    for alone, after_others in take_anew(case):
        if after_others is None:
            return equal, 1
        require_identical(alone, after_others)
        assert (alone.step_index, alone.message) == (after_others.step_index, after_others.message)
        equal += 1
    return equal, 0


def main() -> int:
    """Prints each scenario in which the two differ; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="random scenarios")
    parser.add_argument("--first", type=int, default=0, help="seed of the first scenario; each has the next one")
    parser.add_argument("--start-over", action="store_true", help="compare a lab that starts over with new labs")
    parser.add_argument("--allocators", action="store_true", help="compare the allocators, with random requests")
    arguments = parser.parse_args()
    if arguments.allocators:
        seeds = range(arguments.first, arguments.first + arguments.number)
        print(f"{arguments.number} scenarios, {sum(map(require_equal_answers, seeds))} operations with equal answers")
        return 0
    started, num_different, num_steps, num_passes = time.monotonic(), 0, 0, 0
    for seed in range(arguments.first, arguments.first + arguments.number):
        case = random_case(random.Random(seed))  # noqa: S311 - a scenario needs no cryptography
        try:
            equal, count = _anew(case) if arguments.start_over else _replayed(case)
        except Exception as error:  # noqa: BLE001  # it is printed, and the next scenario follows
            num_different += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"seed {seed}: {case}\n  {type(error).__name__}: {error} ({where.name}:{where.lineno})", flush=True)
            continue
        num_steps += equal
        num_passes += count
    seconds = time.monotonic() - started
    what = "labs that could not start over" if arguments.start_over else "passes through layers replayed"
    print(
        f"{arguments.number} scenarios, {num_steps} equal steps, {num_passes} {what}, "
        f"{num_different} scenarios that differ, {seconds:.0f} s"
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
