#!/usr/bin/env bash
# datasets 5.2.0: `Dataset.map` whose function returns a list of tokens keeps 1,000 rows as Python lists before it writes
# them (`writer_batch_size`): 40 bytes a token, ten times what the file takes, in each process of `num_proc`. With rows of
# 32,768 tokens these are 1.3 GB a process, and 42 GB in 32 of them. An array of int32 is kept as it is, 4 bytes a token.
# Guess before the run: 36 bytes a token (8 of the list and 28 of the number).
# Seen on 2026-11-30, Python 3.11, 1,200 rows of 20,000 tokens; MB that Python has allocated after 100 rows, 200 and so on:
#   lists: 80 160 240 320 400 480 560 640 720 800 80 160
#   lists, writer_batch_size=100: 80 80 80 80 80 80 80 80 80 80 80 80
#   arrays of int32: 8 16 24 32 40 48 56 64 72 80 8 16
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 numpy==2.4.6
cat > "$folder/rows.py" <<'PY'
import sys
import tracemalloc

import datasets
import numpy as np

datasets.disable_progress_bars()
datasets.Dataset.from_dict({"number": list(range(1200))}).save_to_disk(sys.argv[1])


def show(name, as_rows, **options):
    seen = []

    def tokens(row):
        made = as_rows(1000 + row["number"])
        if row["number"] % 100 == 99:
            seen.append(str(round(tracemalloc.get_traced_memory()[0] / 1e6)))
        return {"input_ids": made}

    given = datasets.load_from_disk(sys.argv[1])
    tracemalloc.start()
    given.map(tokens, load_from_cache_file=False, **options)
    tracemalloc.stop()
    print(f"{name}:", *seen)


show("lists", lambda first: list(range(first, first + 20_000)))
show("lists, writer_batch_size=100", lambda first: list(range(first, first + 20_000)), writer_batch_size=100)
show("arrays of int32", lambda first: np.arange(first, first + 20_000, dtype=np.int32))
PY
"$folder/venv/bin/python" -W ignore "$folder/rows.py" "$folder/given" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
