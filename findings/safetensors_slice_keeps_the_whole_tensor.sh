#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.13.0, on the CPU: `safe_open(...).get_slice(name)[...]`, by which a rank of tensor
# parallelism reads its part of a weight, returns a view of the whole tensor in the mapped file, not a tensor of its part.
# So torch.save of the part writes the whole weight, and so does each rank. `.clone()` is the part alone.
# Seen on 2026-11-29, Python 3.11:
#   rows [0:10] of 4000 x 1000: 40,000 bytes in a storage of 16,000,000; torch.save writes 16.0 MB
#   columns [0:10] of 4000 x 1000: 160,000 bytes in a storage of 16,000,000; torch.save writes 16.0 MB
#   its clone: 160,000 bytes in a storage of 160,000; torch.save writes 0.2 MB
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy
cat > "$folder/slices.py" <<'PY'
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

folder = Path(sys.argv[1])
save_file({"weight": torch.zeros(4000, 1000)}, folder / "model.safetensors")
with safe_open(folder / "model.safetensors", "pt") as file:
    weight = file.get_slice("weight")
    columns = weight[:, 0:10]
    parts = {"rows [0:10] of 4000 x 1000": weight[0:10], "columns [0:10] of 4000 x 1000": columns, "its clone": columns.clone()}
for name, part in parts.items():
    torch.save(part, folder / "part.pt")
    written = (folder / "part.pt").stat().st_size
    storage = part.untyped_storage().nbytes()
    print(f"{name}: {part.nbytes:,} bytes in a storage of {storage:,}; torch.save writes {written / 1e6:.1f} MB")
PY
"$folder/venv/bin/python" "$folder/slices.py" "$folder" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
