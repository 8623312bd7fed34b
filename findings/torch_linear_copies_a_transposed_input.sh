#!/usr/bin/env bash
# torch 2.13.0: a linear layer whose input of three dimensions is not contiguous (`x.transpose(0, 1)`, which goes from
# batch first to sequence first) makes a contiguous copy of it and keeps the copy for backward; so does each other layer
# that reads the same input. Query, key and value projections, or gate and up, so keep one copy each where they would
# share one tensor. `.contiguous()` before the layers makes one copy, which they share. With gradients, the input is
# reshaped to two dimensions whether there is a bias or not (`should_fold`, aten/src/ATen/native/LinearAlgebra.cpp).
# Guess before the run: three copies. Not run on a GPU; the meta device, which is no CPU either, shows the same.
# Seen on 2026-11-30, Python 3.11, three layers that read one input of 32 x 128 x 64 in bf16, kept besides weights:
#   cpu, bias, batch first: 524,288 bytes in 1 tensor
#   cpu, bias, transposed: 1,572,864 bytes in 3 tensors
#   cpu, bias, transposed, then contiguous: 524,288 bytes in 1 tensor
#   cpu, no bias, batch first: 524,288 bytes in 1 tensor
#   cpu, no bias, transposed: 1,572,864 bytes in 3 tensors
#   cpu, no bias, transposed, then contiguous: 524,288 bytes in 1 tensor
#   meta, bias, transposed: 1,572,864 bytes in 3 tensors
#   meta, no bias, transposed: 1,572,864 bytes in 3 tensors
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch
from torch import nn

WAYS = {
    "batch first": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "transposed, then contiguous": lambda x: x.transpose(0, 1).contiguous(),
}


def show(device, bias, name):
    layers = [nn.Linear(64, 64, bias=bias, dtype=torch.bfloat16, device=device) for _ in range(3)]
    x = torch.empty(32, 128, 64, dtype=torch.bfloat16, device=device, requires_grad=True) * 1
    own = {weight.untyped_storage()._cdata for layer in layers for weight in layer.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        given = WAYS[name](x)
        results = [layer(given) for layer in layers]
    assert all(result.requires_grad for result in results)
    with_bias = "bias" if bias else "no bias"
    print(f"{device}, {with_bias}, {name}: {sum(kept.values()):,} bytes in {len(kept)} tensor{'s' * (len(kept) > 1)}")


for bias in (True, False):
    for name in WAYS:
        show("cpu", bias, name)
for bias in (True, False):
    show("meta", bias, "transposed")
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
