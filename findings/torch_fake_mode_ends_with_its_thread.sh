#!/usr/bin/env bash
# torch 2.11.0, a CUDA build without a GPU (what `pip install torch==2.11.0` brings): a fake mode that is entered on a
# thread after the thread of the first one has ended kills the process. The first one replaces the process's device guard
# of CUDA by a fake one, which belongs to its thread (`tls_fake_device_guard`, c10/core/impl/DeviceGuardImplInterface.cpp).
# pytorch/pytorch#178950 repaired it: 2.12.0 and later have one static guard. DTensor enters a fake mode, so that FSDP2 does.
# Seen on 2026-11-29, Python 3.11.2:
#   torch 2.11.0, the guard made on a thread that ended: exit status 139
#   torch 2.11.0, the guard made on the main thread: exit status 0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 numpy
cat > "$folder/enter.py" <<'PY'
import sys
import threading

from torch._subclasses import FakeTensorMode


def enter() -> None:
    with FakeTensorMode():
        pass


def take_memory() -> None:
    [bytearray(64) for _ in range(100_000)]


if sys.argv[1] == "main":
    enter()
for target in (enter, take_memory) * 30:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
PY
for where in "a thread that ended" "the main thread"; do
    status=0
    CUDA_VISIBLE_DEVICES= "$folder/venv/bin/python" -W ignore "$folder/enter.py" "$([ "$where" = "the main thread" ] && echo main || echo other)" 2> "$folder/errors" || status=$?
    echo "torch 2.11.0, the guard made on $where: exit status $status"
done | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
