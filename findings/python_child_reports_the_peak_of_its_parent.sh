#!/usr/bin/env bash
# Python 3.11, Linux: `resource.getrusage(RUSAGE_SELF).ru_maxrss`, the largest resident size of a process, is at least what
# its parent held when it started it. A program that is run as a child to learn how much memory it needs, by a test, a
# benchmark or a launcher that holds a model, so reports the launcher's memory. Linux hands the old address space's
# largest size on when a process executes another program, whether subprocess forks, uses vfork or posix_spawn.
# `VmHWM` in /proc/self/status is of the new program alone. `os.wait4` of the parent tells the wrong number too.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, a parent that holds 400 MB; what a child that does nothing states, in MB:
#   parent without the 400 MB: ru_maxrss below 50, VmHWM below 50
#   subprocess: ru_maxrss over 400, VmHWM below 50
#   subprocess with preexec_fn: ru_maxrss over 400, VmHWM below 50
#   posix_spawn: ru_maxrss over 400, VmHWM below 50
#   wait4 of the last one: over 400
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/peaks.py" <<'PY'
import os
import subprocess
import sys

CHILD = """import resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, status["VmHWM"].split()[0])"""


def words(kib):
    return "below 50" if int(kib) * 1024 < 50e6 else "over 400" if int(kib) * 1024 > 400e6 else kib


def show(name, **options):
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, **options)
    told(name, done.stdout)


def told(name, text):
    largest, of_program = text.split()
    print(f"{name}: ru_maxrss {words(largest)}, VmHWM {words(of_program)}")


show("parent without the 400 MB")
held = b"1" * 410_000_000
show("subprocess")
show("subprocess with preexec_fn", preexec_fn=lambda: None)
reads, writes = os.pipe()
child = os.posix_spawn(
    sys.executable, [sys.executable, "-c", CHILD], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writes, 1)]
)
os.close(writes)
with os.fdopen(reads) as pipe:
    told("posix_spawn", pipe.read())
_, _, usage = os.wait4(child, 0)
print("wait4 of the last one:", words(usage.ru_maxrss))
PY
"$folder/venv/bin/python" "$folder/peaks.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
