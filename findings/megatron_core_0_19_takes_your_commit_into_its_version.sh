#!/usr/bin/env bash
# megatron-core 0.19.2 (its wheel, torch 2.13.0): `megatron.core.__version__` ends in the commit of whatever git repository the
# installed package lies in. With the usual `.venv` in a clone of one's own project, that is one's own commit, although the
# files are the wheel's. So two runs with the same package record two versions, and `Version(megatron.core.__version__)`
# differs from 0.19.2. `package_info.py` asks `git rev-parse` in its own folder at each import; `importlib.metadata` names
# the release. The variable NO_VCS_VERSION=1 turns it off. 0.16.1 does not do it.
# Guess before the run: a wheel's version is fixed when the wheel is built.
# It asks for Python 3.12 or newer. Seen on 2026-11-30 with Python 3.12.1 (the commit's number, here COMMIT, is that of the project that the script makes):
#   installed outside of a repository: 0.19.2, equal to 0.19.2: True
#   installed in a project's folder: 0.19.2+COMMIT, equal to 0.19.2: False
#   the same after a commit in the project: 0.19.2+COMMIT, equal to 0.19.2: False, another version than before: True
#   the same, by importlib.metadata: 0.19.2
#   the same, with NO_VCS_VERSION=1: 0.19.2, equal to 0.19.2: True
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export GIT_CEILING_DIRECTORIES=$folder GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
project=$folder/project
mkdir "$project"
python3 -m venv "$project/.venv"
"$project/.venv/bin/pip" install -q torch==2.13.0 megatron-core==0.19.2 packaging
show() { # show: the version, without the commit's number if it is that of the project
  "$project/.venv/bin/python" -W ignore - "$(git -C "$project" rev-parse --short HEAD 2> /dev/null || echo none)" 2> /dev/null << 'PY'
import sys

import megatron.core
from packaging.version import Version

seen = megatron.core.__version__
print(f"{seen.replace(sys.argv[1], 'COMMIT')}, equal to 0.19.2: {Version(seen) == Version('0.19.2')}")
PY
}
number() { "$project/.venv/bin/python" -W ignore -c "import megatron.core; print(megatron.core.__version__)" 2> /dev/null; }
{
  echo "installed outside of a repository: $(show)"
  git -C "$project" init -q
  git -C "$project" commit -q --allow-empty --message first
  first=$(number)
  echo "installed in a project's folder: $(show)"
  git -C "$project" commit -q --allow-empty --message second
  [ "$(number)" != "$first" ] && other=True || other=False
  echo "the same after a commit in the project: $(show), another version than before: $other"
  echo "the same, by importlib.metadata: $("$project/.venv/bin/python" -c 'from importlib.metadata import version; print(version("megatron-core"))')"
  echo "the same, with NO_VCS_VERSION=1: $(NO_VCS_VERSION=1 show)"
} > "$folder/seen"
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
