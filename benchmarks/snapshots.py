"""How long reading a memory snapshot of a million entries takes, and how much memory; the goals are 10 s and 2 GB.

The snapshot is written as torch writes one: stacks of twenty frames, a list of its own for each allocation and each
free, the frames in them shared. Reading runs in a process of its own, whose peak resident memory is printed.

    python benchmarks/snapshots.py
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

NUM_ENTRIES = 1_000_000
NUM_FRAMES = 20
MOST_SECONDS, MOST_BYTES = 10.0, 2 * 10**9
_READ = """
import resource, sys, time
from memlab.record.timeline import Timeline
started, started_cpu = time.perf_counter(), time.process_time()
timeline = Timeline.from_snapshot(sys.argv[1])
print(time.perf_counter() - started, time.process_time() - started_cpu)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(timeline))
"""


def snapshot(num_entries: int) -> dict[str, Any]:
    """Returns blocks of every size that come and go, in one segment for the small and one for the large."""
    random = np.random.default_rng(0)
    torch_s, own = ("/python3.11/site-packages/torch/nn/modules/module_{}.py", "/home/me/model_{}.py")
    frames = [
        {"filename": (own if number < 2000 else torch_s).format(number), "line": number, "name": "forward"}
        for number in range(2200)
    ]
    innermost = random.integers(2000, 2200, (num_entries, NUM_FRAMES - 8))
    stacks = np.concatenate([innermost, random.integers(0, 2000, (num_entries, 8))], axis=1)
    sizes = (512 * 2 ** random.uniform(0, 16, num_entries)).astype(int) // 512 * 512
    free: dict[int, list[int]] = {}
    tops = {True: 2**46, False: 2**46 + 2**42}
    live: list[tuple[int, int, list[dict[str, Any]]]] = []
    trace: list[dict[str, Any]] = []

    def note(action: str, address: int, num_bytes: int, stack: list[dict[str, Any]]) -> None:
        entry = {"action": action, "addr": address, "size": num_bytes, "stream": 0, "time_us": 10**15 + len(trace)}
        # torch makes a new string for each entry here.
        trace.append(entry | {"compile_context": b"N/A".decode(), "user_metadata": "", "frames": stack})

    while len(trace) < num_entries - 1:
        turn = len(trace)
        stack = [frames[number] for number in stacks[turn].tolist()]
        if len(live) < 5000 or random.random() < 0.5:
            num_bytes = int(sizes[turn])
            is_small = num_bytes <= 2**20
            address = free[num_bytes].pop() if free.get(num_bytes) else tops[is_small]
            tops[is_small] = max(tops[is_small], address + num_bytes)
            live.append((address, num_bytes, stack))
            note("alloc", address, num_bytes, stack)
        else:
            at = int(random.integers(len(live)))
            live[at], live[-1] = live[-1], live[at]
            address, num_bytes, _ = live.pop()
            free.setdefault(num_bytes, []).append(address)
            note("free_requested", address, num_bytes, stack)
            note("free_completed", address, num_bytes, stack)
    segments = [_segment(2**46, tops[True], live), _segment(2**46 + 2**42, tops[False], live)]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {"expandable_segments": False}}


def _segment(start: int, end: int, live: list[tuple[int, int, list[dict[str, Any]]]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at = start
    for address, num_bytes, frames in sorted(live, key=lambda block: block[0]):
        if start <= address < end:
            if at < address:
                blocks.append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive"})
            block = {"address": address, "size": num_bytes, "requested_size": num_bytes, "frames": frames}
            blocks.append(block | {"state": "active_allocated"})
            at = address + num_bytes
    if at < end:
        blocks.append({"address": at, "size": end - at, "requested_size": 0, "state": "inactive"})
    return {"device": 0, "address": start, "total_size": end - start, "stream": 0, "blocks": blocks}


def main() -> None:
    """Writes a snapshot, reads it in a process of its own, and prints what that took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        with path.open("wb") as file:
            pickle.dump(snapshot(NUM_ENTRIES), file)
        print(f"{NUM_ENTRIES:,} entries in a file of {path.stat().st_size / 1e6:.0f} MB")
        done = subprocess.run([sys.executable, "-c", _READ, path], capture_output=True, text=True, check=True)
    seconds, cpu_seconds, peak_bytes, num_events = (float(word) for word in done.stdout.split())
    print(f"{seconds:.1f} s (goal {MOST_SECONDS:.0f} s), {cpu_seconds:.1f} s of a core, for {int(num_events):,} events")
    print(f"{peak_bytes / 1e9:.2f} GB resident at most (goal {MOST_BYTES / 1e9:.0f} GB)")


if __name__ == "__main__":
    main()
