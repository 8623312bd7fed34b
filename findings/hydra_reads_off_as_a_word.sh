#!/usr/bin/env bash
# Hydra 1.3.8, OmegaConf 2.3.1: the same text is another value in a file than on the command line. Files are YAML 1.1,
# where `off`, `no` are False and `12:30:00` is a number of base 60; Hydra's grammar of overrides knows only true and
# false, so `offload=off` passes the word 'off', which is true for Python. Nothing is said, unless the configuration has
# types, as a dataclass has: then both become False. `0123` is 83 in a file, and a word on the command line.
# Seen on 2026-11-29, Python 3.11:
#   off: in a file False, on the command line 'off', which Python takes as True, in a field of type bool False
#   no: in a file False, on the command line 'no', which Python takes as True, in a field of type bool False
#   false: in a file False, on the command line False, which Python takes as False, in a field of type bool False
#   0123: in a file 83, on the command line '0123', which Python takes as True, in a field of type bool True
#   12:30:00: in a file 45000, on the command line '12:30:00', which Python takes as True, in a field of type bool refused
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hydra-core==1.3.8 omegaconf==2.3.1
cat > "$folder/train.py" <<'PY'
import sys
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError


@dataclass
class Typed:
    offload: bool = True


folder = Path(sys.argv[1])
for text in ("off", "no", "false", "0123", "12:30:00"):
    (folder / "job.yaml").write_text(f"offload: {text}\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        in_file = compose("job").offload
        (folder / "job.yaml").write_text("offload: true\n")
        on_line = compose("job", [f"offload={text}"]).offload
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Typed), {"offload": on_line}).offload
    except ValidationError:
        typed = "refused"
    print(
        f"{text}: in a file {in_file!r}, on the command line {on_line!r}, which Python takes as {bool(on_line)}, "
        f"in a field of type bool {typed}"
    )
PY
"$folder/venv/bin/python" "$folder/train.py" "$folder" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
