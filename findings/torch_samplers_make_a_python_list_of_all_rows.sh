#!/usr/bin/env bash
# torch 2.13.0, accelerate 1.15.0: a sampler that shuffles turns its permutation of all rows into a
# Python list, which lives as long as the epoch: 40 bytes a row, where the permutation itself has 8. DistributedSampler does
# so on each rank for the rows of all ranks, also without shuffling, and then takes its own ones out. For 100 M rows that is
# 4.9 GB a process at the peak, 39 GB on a machine of eight GPUs; datasets of images or short texts have more rows.
# Sampling with replacement draws 32 numbers at a time and needs nothing.
# Guess before the run: 8 bytes a row, with a doubt about lists.
# Seen on 2026-12-01, Python 3.11, 4 M rows (of 64 ranks), without any data; bytes a row after the first row was drawn, and at
# the peak, rounded to 10:
#   RandomSampler: 40, peak 50
#   RandomSampler with replacement: 0, peak 0
#   DistributedSampler: 30, peak 50
#   DistributedSampler without shuffling: 30, peak 40
#   accelerate's SeedableRandomSampler: 40, peak 50
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0 numpy
cat > "$folder/samplers.py" <<'PY'
import resource
import sys

import torch.utils.data as data
from accelerate.data_loader import SeedableRandomSampler

ROWS = 4_000_000
SAMPLERS = {
    "RandomSampler": lambda: data.RandomSampler(range(ROWS)),
    "RandomSampler with replacement": lambda: data.RandomSampler(range(ROWS), replacement=True),
    "DistributedSampler": lambda: data.DistributedSampler(range(ROWS), num_replicas=64, rank=0),
    "DistributedSampler without shuffling": lambda: data.DistributedSampler(
        range(ROWS), num_replicas=64, rank=0, shuffle=False
    ),
    "accelerate's SeedableRandomSampler": lambda: SeedableRandomSampler(range(ROWS), data_seed=0),
}


def anonymous():
    """Returns the bytes of this process's own memory."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rounded(size):
    return 10 * round(size / ROWS / 10)


name = sys.argv[1]
before, highest = anonymous(), peak()
rows = iter(SAMPLERS[name]())
next(rows)
print(f"{name}: {rounded(anonymous() - before)}, peak {rounded(peak() - highest)}")
PY
sed -n 's/^#   \(.*\): [0-9]*, peak.*/\1/p' "$0" | while read -r name; do
  "$folder/venv/bin/python" "$folder/samplers.py" "$name" 2> "$folder/errors" || { cat "$folder/errors" >&2; exit 1; }
done > "$folder/seen"
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
