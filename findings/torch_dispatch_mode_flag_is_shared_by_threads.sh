#!/usr/bin/env bash
# torch 2.13.0: the stack of dispatch modes belongs to a thread, but whether there is one at all
# (torch.utils._python_dispatch.is_in_torch_dispatch_mode) is one variable of the process, which a mode saves when it is
# entered and puts back when it is left. If the modes of two threads overlap (a FLOP counter in one, a memory tracker in
# the other) and the first is left before the second, it stays true on every thread until the process ends, although the
# stack of each thread is empty.
# Output seen on 2026-11-28, Python 3.11:
#   torch 2.13.0: after both modes were left: modes on this thread 0, in a dispatch mode True
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat > "$folder/overlap.py" <<'PY'
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack, is_in_torch_dispatch_mode

first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()


def first():
    with TorchDispatchMode():
        first_is_in.set()
        second_is_in.wait()
    first_is_out.set()


def second():
    first_is_in.wait()
    with TorchDispatchMode():
        second_is_in.set()
        first_is_out.wait()


threads = [threading.Thread(target=each) for each in (first, second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
version = torch.__version__.partition("+")[0]
print(
    f"torch {version}: after both modes were left: modes on this thread {_len_torch_dispatch_stack()}, "
    f"in a dispatch mode {is_in_torch_dispatch_mode()}"
)
PY
"$folder/venv/bin/python" "$folder/overlap.py" | tee "$folder/seen"
echo "torch 2.13.0: after both modes were left: modes on this thread 0, in a dispatch mode True" | diff "$folder/seen" -
