#!/usr/bin/env bash
# filelock 4.3.1, Python 3.12 and later: importing filelock (as megatron-core 0.19.2 does on its way) installs an
# audit hook that is written in Python. An audit hook can never be removed, and it sees every audited event, among them
# each call of the builtin `id`. So from then on, `id(x)` runs Python code: it takes 5 to 10 times as long, and another
# thread may run in the middle of what was one call of C, such as `list(map(id, objects))`. On Python 3.11 there is no
# such hook (filelock/_core/_fork.py).
# Output seen (Python 3.13.0):
#   steps of another thread meanwhile: before the import 0, after it many
# Exits with 1 if this changes.
set -euo pipefail
python=
for each in python3 python3.12 python3.13; do "$each" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && python=$each && break; done
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q filelock==4.3.1
cat > "$work/calls.py" <<'PY'
import sys
import threading
from itertools import repeat, starmap

sys.setswitchinterval(1e-5)
steps, ends = [], threading.Event()


def work() -> None:
    while not ends.is_set():
        steps.append(None)


def steps_meanwhile() -> int:
    """Counts the steps of the other thread during 100,000 calls of `id` that one call of C makes."""
    counts = list(zip(map(id, repeat(None, 100_000)), starmap(steps.__len__, repeat(()))))
    return counts[-1][1] - counts[0][1]


other = threading.Thread(target=work)
other.start()
before = steps_meanwhile()
import filelock

after = steps_meanwhile()
ends.set()
other.join()
print(f"steps of another thread meanwhile: before the import {before}, after it {'many' if after else 0}")
sys.exit(not (before == 0 and after > 0))
PY
"$work/venv/bin/python" "$work/calls.py"
