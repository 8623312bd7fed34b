#!/usr/bin/env bash
# torch 2.13.0: `torch.nn.SiLU(inplace=True)` saves no memory in training. SiLU's backward needs the input, so autograd
# clones it before the operation overwrites it, and nothing is said: a clone is allocated where the result would be.
# Mish, Hardswish, Hardsigmoid, Hardtanh and ReLU6 do the same, and so do `clamp_` and a `mul_` by what needs a gradient.
# ReLU needs its result only, which it keeps in both cases; LeakyReLU, ELU and SELU keep their result when they are in
# place, and save a tensor. (The generated code clones `self` for an in-place operation whose formula in
# tools/autograd/derivatives.yaml names `self`.)
# Guess before the run: so, but for Hardsigmoid and ReLU6, of which nothing was said.
# Seen on 2026-11-30, Python 3.11; alive after linear layer, activation and linear layer, besides the last output, in
# sizes of the activation; out of place, and in place:
#   ReLU: 1, 1
#   LeakyReLU: 2, 1
#   ELU: 2, 1
#   SELU: 2, 1
#   SiLU: 2, 2
#   Mish: 2, 2
#   Hardswish: 2, 2
#   Hardsigmoid: 2, 2
#   Hardtanh: 2, 2
#   ReLU6: 2, 2
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/alive.py" <<'PY'
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations make and that are not freed yet."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.nbytes > 4096:
            storage = result.untyped_storage()
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.storages.pop, storage._cdata)
        return result


first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
known = {each.untyped_storage()._cdata for each in (*first.parameters(), *last.parameters())}
inputs = torch.randn(256, 64)


def alive(activation):
    with Alive() as seen:
        output = last(activation(first(inputs)))
    return sum(size for address, size in seen.storages.items() if address not in known) // inputs.nbytes


for name in "ReLU LeakyReLU ELU SELU SiLU Mish Hardswish Hardsigmoid Hardtanh ReLU6".split():
    kind = getattr(torch.nn, name)
    print(f"{name}: {alive(kind())}, {alive(kind(inplace=True))}")
PY
"$folder/venv/bin/python" "$folder/alive.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
