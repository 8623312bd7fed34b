#!/usr/bin/env bash
# torch 2.13.0: autocast caches the bf16 copy of a weight only if the weight is trained: `cached_cast` asks
# `arg.requires_grad()` (aten/src/ATen/autocast_mode.cpp). A frozen fp32 weight gets a new copy each time it is used,
# and backward, which needs it for the input's gradient, keeps each. Two forward passes before one backward (DPO's chosen
# and rejected answers, several views of an image), or layers that are used several times, so keep several bf16 models
# if the model is frozen beside adapters, and one if it is trained. Weights that are bf16 themselves need no copy.
# Guess before the run: one copy of a trained weight, one of a frozen weight for each use.
# Seen on 2026-11-30, Python 3.11, 4 layers of 256 x 256 in fp32 (524,288 bytes as bf16), forward passes of 8 rows:
#   trained, 1 pass: 524,288 bytes of weights kept for backward
#   trained, 2 passes: 524,288 bytes of weights kept for backward
#   trained, 4 passes: 524,288 bytes of weights kept for backward
#   frozen, 1 pass: 524,288 bytes of weights kept for backward
#   frozen, 2 passes: 1,048,576 bytes of weights kept for backward
#   frozen, 4 passes: 2,097,152 bytes of weights kept for backward
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch
from torch import nn


def show(trained, passes):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).requires_grad_(trained)
    kept = {}

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.shape == (256, 256):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = [model(torch.randn(8, 256, requires_grad=True)) for _ in range(passes)]
    assert all(result.requires_grad for result in results)
    name = f"{'trained' if trained else 'frozen'}, {passes} pass{'es' * (passes > 1)}"
    print(f"{name}: {sum(kept.values()):,} bytes of weights kept for backward")


for trained in (True, False):
    for passes in (1, 2, 4):
        show(trained, passes)
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
