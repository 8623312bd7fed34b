#!/usr/bin/env bash
# filelock 4.3.1, Python 3.12 and later: importing filelock (which torch, transformers and huggingface-hub do) installs an
# audit hook that is written in Python. An audit hook can never be removed, and it sees every audited event, among them
# each call of the builtin `id`. So from then on, `id(x)` runs Python code: it takes 5 to 10 times as long, and another
# thread may run in the middle of what was one call of C, such as `list(map(id, objects))`. On Python 3.11 there is no
# such hook (filelock/_core/_fork.py).
# Output seen (Python 3.13.0):
#   Python functions called by 1000 calls of id: before the import 0, after it 1000
# Exits with 1 if this changes.
set -euo pipefail
python=
for each in python3 python3.12 python3.13; do "$each" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && python=$each && break; done
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q filelock==4.3.1
cat > "$work/calls.py" <<'PY'
import sys


def python_calls() -> int:
    """Counts the Python functions that 1,000 calls of `id` run."""
    counted = 0

    def note(frame, event, argument):
        nonlocal counted
        counted += event == "call"

    objects = [object()] * 1000
    sys.setprofile(note)
    list(map(id, objects))
    sys.setprofile(None)
    return counted


before = python_calls()
import filelock

after = python_calls()
print(f"Python functions called by 1000 calls of id: before the import {before}, after it {after}")
sys.exit(not (before == 0 and after >= 1000))
PY
"$work/venv/bin/python" "$work/calls.py"
