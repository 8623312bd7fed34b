"""How long `import memlab`, and the answer to a bad flag, take in a new process; the goal is under 0.5 s each.

The same process doing nothing stands beside them, so that the interpreter's own start can be taken off.

    python benchmarks/import_time.py
"""

from __future__ import annotations

import subprocess
import sys
import time

NUM_RUNS = 10
CASES = {
    "nothing": ["-c", "pass"],
    "import memlab": ["-c", "import memlab"],
    "memlab measure, bad flag": ["-m", "memlab", "measure", "phi-4-tiny", "--recompute-granularity", "some"],
    "memlab run, bad parameter": ["-m", "memlab", "run", "labs/00_quickstart.ipynb", "-p", "seq", "8"],
}


def seconds(arguments: list[str]) -> float:
    """Times one process from its start to its end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=False, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Prints the least and the median time of each case."""
    for name, arguments in CASES.items():
        times = sorted(seconds(arguments) for _ in range(NUM_RUNS))
        print(f"{name:<26} least {times[0]:.3f} s, median {times[NUM_RUNS // 2]:.3f} s")


if __name__ == "__main__":
    main()
