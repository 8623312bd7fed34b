"""Compares what memlab reads in launch scripts with what bash itself starts for them.

    python -m benchmarks.scripts_against_bash random --first 0 --count 2000      random valid scripts, about 15 a second
    python -m benchmarks.scripts_against_bash folder ~/Megatron-LM               every *.sh below a folder

Random scripts consist of builtins and a stub of the program, so plain bash runs them. The scripts of a folder run in a
root of their own, in which bash is the only program: no command of theirs exists, nothing outside can be read or
written, and there is no network. Commands that are not found count as started and as successful. That needs ``unshare``
of util-linux and a kernel that lets users make namespaces.

Each script is ``equal`` (the same commands with the same words), ``agrees`` (equal, but for words that memlab says it
does not know), ``doubted`` (different, and memlab warns of something in this script), ``none`` (bash starts no job: the
script needs a machine that it does not find), ``empty`` (nor does memlab see one) or ``wrong``: different without a
word. Then the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from memlab.jobs.formats import is_job
from memlab.jobs.shell.script import read_script
from tests.unit.shell_scripts import ScriptMaker, can_be, compared, starts_of_bash

_END = "\x1e"
_PRELUDE = r"""
_started() { printf '%s\0' "$@" $'\x1e' >> /out/started; }
command_not_found_handle() {
  local i
  for ((i = 1; i < $#; i++)); do
    if [[ ${!i} == @(bash|sh|*/bash|*/sh) ]] && local j=$((i + 1)) && [[ ${!j} =~ ^-[a-z]*c$ ]]; then
      (j=$((i + 2)); text=${!j}; shift $((i + 2 < $# ? i + 2 : $#)); eval "$text")
      return 0
    fi
  done
  _started "$@"
}
shopt -s extglob
cd() { builtin cd "$@" 2> /dev/null; return 0; }
exec() { if (($#)); then "$@"; exit; fi; }
exit() {
  local code=${1:-$?} text= part
  [[ -s /out/started ]] && while IFS= read -r -d '' part; do text+="$part "; done < /out/started
  [[ $text == *--*--* || $text == *=*=*=* || $BASH_SUBSHELL -gt 0 ]] && builtin exit "$code"
  return "$code"
}
nohup() { "$@"; }
env() {
  while [[ $1 == -* || $1 == *=* ]]; do [[ $1 == @(-u|-C) ]] && shift; shift; done
  "$@"
}
dirname() {
  [[ $1 == -- ]] && shift
  local p=${1%%+(/)}
  case $p in */*) p=${p%/*}; printf '%s\n' "${p:-/}" ;; *) echo . ;; esac
}
basename() { [[ $1 == -- ]] && shift; local p=${1%%+(/)}; p=${p##*/}; printf '%s\n' "${p%"$2"}"; }
realpath() {
  while [[ $1 == -* ]]; do shift; done
  local path=$1 part IFS=/
  local -a made=()
  [[ $path == /* ]] || path=$PWD/$path
  for part in $path; do
    case $part in '' | .) ;; ..) unset 'made[-1]' ;; *) made+=("$part") ;; esac
  done
  printf '/%s\n' "${made[*]}"
}
readlink() { realpath "$@"; }
cat() { (($#)) && return; local l; while IFS= read -r l || [[ -n $l ]]; do printf '%s\n' "$l"; done; }
"""
"""What stands in the place of the programs that memlab knows; everything else is noted, and does nothing."""


def random_scripts(first: int, count: int) -> Iterator[tuple[str, str]]:
    """Yields each seed's name with its result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "run.sh"
        for seed in range(first, first + count):
            maker = ScriptMaker(seed)
            text, arguments = maker.script(), maker.arguments()
            path.write_text(text)
            try:
                starts = starts_of_bash(path, folder, arguments)
            except subprocess.TimeoutExpired:
                yield f"seed {seed}", "none"
                continue
            yield f"seed {seed}", compared(read_script(text, path, arguments=arguments), starts) if starts else "none"


def scripts_of(folder: Path, limit_s: float) -> Iterator[tuple[str, str]]:
    """Yields each script of a folder with its result."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _fill(root)
        for source in sorted(folder.rglob("*")):
            if source.is_file() and source.suffix in (".sh", ".env", ".conf", ".slurm", ".sub"):
                copy = root / "scripts" / source.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
        for path in sorted((root / "scripts").rglob("*.sh")):
            yield str(path.relative_to(root / "scripts")), _result(path, root, limit_s)


def _fill(root: Path) -> None:
    """Puts bash, the libraries that it loads and what scripts may expect into a root."""
    bash = Path(_path_of("bash")).resolve()
    listed = subprocess.run([_path_of("ldd"), str(bash)], check=True, capture_output=True, text=True).stdout
    for library in [bash, *(Path(word) for word in listed.split() if word.startswith("/"))]:
        copy = root / ("bin/bash" if library == bash else str(library).lstrip("/"))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    for name in ("out", "tmp", "dev", "proc", "scripts"):
        (root / name).mkdir(exist_ok=True)
    (root / "dev" / "fd").symlink_to("/proc/self/fd")  # which <(...) needs
    (root / "dev" / "null").write_text("")
    (root / "prelude").write_text(_PRELUDE)


def _path_of(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise SystemExit(f"{program} is not installed, which keeps the scripts apart: install util-linux and coreutils")
    return found


def _result(path: Path, root: Path, limit_s: float) -> str:
    inside = "/" + str(path.relative_to(root))
    try:
        read = read_script(path.read_text(errors="replace"), path, is_job=is_job)
    except ValueError as error:
        return f"said ({error})"
    starts = [words for words in _starts(inside, root, limit_s) if is_job(words)]
    commands = [one for one in read.commands if is_job([word for word, _ in one.words])]
    words = [[word.replace(str(root), "") for word, _ in one.words] for one in commands]
    if not starts:
        return "none" if commands else "empty"
    if words == starts:
        return "equal"
    if len(words) == len(starts) and all(can_be(*pair) for pair in zip(words, starts, strict=True)):
        return "agrees"
    is_certain = all(one.is_certain for one in commands)
    says_something = read.warnings or read.causes or read.lacks_arguments or not is_certain
    return f"{'doubted' if says_something else 'wrong'}: {words} is read, {starts} is started"


def _starts(script: str, root: Path, limit_s: float) -> list[list[str]]:
    """Runs a script in its root, and returns the words of each command that is no builtin."""
    found = root / "out" / "started"
    found.write_bytes(b"")
    command = 'ulimit -t 5 -f 20000 -v 2000000; exec /bin/bash "$0"'
    apart = [_path_of("unshare"), "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    apart.append(f"--mount-proc={root / 'proc'}")
    with contextlib.suppress(subprocess.TimeoutExpired):  # what a script started until then is compared
        subprocess.run(
            [*apart, _path_of("chroot"), str(root), "/bin/bash", "-c", command, script],
            check=False,
            capture_output=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            env={"PATH": "/nowhere", "BASH_ENV": "/prelude", "HOME": "~"},
        )
    starts: list[list[str]] = [[]]
    for text in os.fsdecode(found.read_bytes()).split("\0")[:-1]:
        if text == _END:
            starts.append([])
        else:
            starts[-1].append(text)
    return starts[:-1]


def main() -> int:
    """Compares, prints each script that is not equal, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_random = kinds.add_parser("random")
    of_random.add_argument("--first", type=int, default=0)
    of_random.add_argument("--count", type=int, default=1000)
    of_folder = kinds.add_parser("folder")
    of_folder.add_argument("folder", type=Path)
    of_folder.add_argument("--limit-s", type=float, default=10)
    arguments = parser.parse_args()
    if arguments.kind == "random":
        results = random_scripts(arguments.first, arguments.count)
    else:
        results = scripts_of(arguments.folder, arguments.limit_s)
    counts = Counter[str]()
    for name, result in results:
        counts[result.partition(":")[0].partition(" ")[0]] += 1
        if result != "equal":
            print(f"{name}: {result}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
