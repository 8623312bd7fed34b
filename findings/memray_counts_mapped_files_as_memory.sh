#!/usr/bin/env bash
# memray 1.20.0, numpy 2.4.6, torch 2.13.0, safetensors 0.8.0: memray counts each mapping of a file as memory of the size
# of the file, though no byte of it has been read, and pages of it would be the kernel's to drop. A token file that a
# data loader maps (Megatron's .bin by np.memmap) is so in the peak with all its terabytes, and hides the rest. And
# `safetensors.torch.load_file` counts twice, since it maps the file twice. What a limit of a container counts is less.
# Guess before the run: mapped files are counted, once.
# Seen on 2026-11-30, Python 3.11, a file of 200 MB; the peak that memray states, and the anonymous memory that came:
#   np.memmap: 200 MB, anonymous 0 MB
#   torch.load(mmap=True): 200 MB, anonymous 0 MB
#   safetensors.torch.load_file: 400 MB, anonymous 0 MB
#   np.zeros, never touched: 200 MB, anonymous 0 MB
#   np.ones: 200 MB, anonymous 200 MB
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 memray==1.20.0 numpy==2.4.6 safetensors==0.8.0
cat > "$folder/peaks.py" <<'PY'
import os
import sys
from pathlib import Path

import memray
import numpy as np
import torch
from safetensors.torch import load_file, save_file

SIZE = 200_000_000
folder = Path(sys.argv[1])
with open(folder / "tokens.bin", "wb") as file:
    file.truncate(SIZE)
torch.save(torch.zeros(SIZE, dtype=torch.uint8), folder / "tokens.pt")
save_file({"tokens": torch.zeros(SIZE, dtype=torch.uint8)}, folder / "tokens.safetensors")


def anonymous():
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


ways = {
    "np.memmap": lambda: np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r"),
    "torch.load(mmap=True)": lambda: torch.load(folder / "tokens.pt", mmap=True),
    "safetensors.torch.load_file": lambda: load_file(folder / "tokens.safetensors"),
    "np.zeros, never touched": lambda: np.zeros(SIZE, np.uint8),
    "np.ones": lambda: np.ones(SIZE, np.uint8),
}
for number, (name, make) in enumerate(ways.items()):
    before = anonymous()
    with memray.Tracker(folder / f"{number}.bin"):
        made = make()
    came = anonymous() - before
    peak = memray.FileReader(os.fspath(folder / f"{number}.bin")).metadata.peak_memory
    print(f"{name}: {round(peak / 5e7) * 50} MB, anonymous {round(came / 5e7) * 50} MB")
    del made
PY
"$folder/venv/bin/python" -W ignore "$folder/peaks.py" "$folder" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
