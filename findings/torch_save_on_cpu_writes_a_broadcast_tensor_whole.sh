#!/usr/bin/env bash
# torch 2.13.0: `torch.autograd.graph.save_on_cpu(pin_memory=True)`, which moves what is kept for backward to the host,
# writes a broadcast tensor at its whole size, one copy for each operation that keeps it, and in backward brings it back
# to the device at that size. A mask or a weight that was expanded over batch and heads, and costs nothing on the device,
# so takes as many times its bytes as it was repeated (`torch.empty(tensor.size(), ...)`, autograd/graph.py).
# Guess before the run: so. Run without a GPU, where the option copies too, to memory that is not pinned.
# Seen on 2026-11-30, Python 3.11, a mask of 128 x 128 in fp32, expanded to 4 sequences and 8 heads, which two layers read:
#   without: kept 65,536 bytes for the mask; backward reads it from a storage of 65,536 bytes
#   save_on_cpu: kept 4,194,304 bytes for the mask; backward reads it from a storage of 2,097,152 bytes
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/masks.py" <<'PY'
from contextlib import nullcontext

import torch

mask = torch.ones(1, 1, 128, 128).expand(4, 8, 128, 128)
scores = torch.randn(4, 8, 128, 128, requires_grad=True)


def show(name, moved):
    with moved:
        first = scores * mask
        second = first * mask
    nodes = [second.grad_fn, second.grad_fn.next_functions[0][0]]
    read = [each._saved_other.untyped_storage() for each in nodes]
    kept = {each._cdata: each.nbytes() for each in read}
    print(f"{name}: kept {sum(kept.values()):,} bytes for the mask; backward reads it from a storage of {read[0].nbytes():,} bytes")


show("without", nullcontext())
show("save_on_cpu", torch.autograd.graph.save_on_cpu(pin_memory=True))
PY
"$folder/venv/bin/python" "$folder/masks.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
