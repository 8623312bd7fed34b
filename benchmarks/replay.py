"""Takes the steps of random scenarios with and without replay, and compares the timelines event by event.

python -m benchmarks.replay --number 200
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.unit.replayed import random_case, require_identical, take


def main() -> int:
    """Prints each scenario in which the two differ; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="random scenarios")
    parser.add_argument("--first", type=int, default=0, help="seed of the first scenario; each has the next one")
    arguments = parser.parse_args()
    started, num_different, num_steps, num_passes = time.monotonic(), 0, 0, 0
    for seed in range(arguments.first, arguments.first + arguments.number):
        case = random_case(random.Random(seed))  # noqa: S311 - a scenario needs no cryptography
        try:
            stepped, _ = take(case, replay=False)
            replayed, count = take(case, replay=True)
            for one, other in zip(stepped, replayed, strict=True):
                require_identical(one, other)
        except Exception as error:  # noqa: BLE001  # it is printed, and the next scenario follows
            num_different += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"seed {seed}: {case}\n  {type(error).__name__}: {error} ({where.name}:{where.lineno})", flush=True)
            continue
        num_steps += len(stepped)
        num_passes += count
    seconds = time.monotonic() - started
    print(
        f"{arguments.number} scenarios, {num_steps} equal steps, {num_passes} passes through layers replayed, "
        f"{num_different} scenarios that differ, {seconds:.0f} s"
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
