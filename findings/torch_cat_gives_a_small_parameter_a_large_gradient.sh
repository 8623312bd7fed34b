#!/usr/bin/env bash
# torch 2.13.0: a parameter that is concatenated with activations, as a class token, the tokens of prompt tuning or learned
# queries are, gets a gradient that is a part of the gradient of the whole sequence. The backward of torch.cat narrows
# that gradient, and autograd takes a first gradient as it is if it is contiguous, also a part of a larger one
# (`accumulateGrad`, torch/csrc/autograd/functions/accumulate_grad.h). So long as `.grad` lives, all of it stays
# allocated; further micro-batches are added into it. torch.save of the gradient writes all. No size of the gradient
# but that of its storage shows it. A batch of more than one sums the parameter's copies into a tensor of its own.
# Guess before the run: the gradient has the parameter's bytes.
# Seen on 2026-11-30, Python 3.11, 8 tokens of 64 numbers in front of 4,096:
#   batch of 1: a gradient of 2,048 bytes in a storage of 1,050,624; torch.save writes 1.1 MB
#   batch of 1, two micro-batches: a gradient of 2,048 bytes in a storage of 1,050,624; torch.save writes 1.1 MB
#   packed rows, no batch: a gradient of 2,048 bytes in a storage of 1,050,624; torch.save writes 1.1 MB
#   batch of 2: a gradient of 2,048 bytes in a storage of 2,048; torch.save writes 0.0 MB
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/gradients.py" <<'PY'
import io

import torch


def show(name, *shape, micro_batches=1):
    tokens = torch.nn.Parameter(torch.randn(*(1 for _ in shape), 8, 64))
    for _ in range(micro_batches):
        sequence = torch.randn(*shape, 4096, 64)
        torch.cat([tokens.expand(*shape, 8, 64), sequence], dim=-2).square().sum().backward()
    file = io.BytesIO()
    torch.save(tokens.grad, file)
    print(
        f"{name}: a gradient of {tokens.grad.nbytes:,} bytes in a storage of {tokens.grad.untyped_storage().nbytes():,}; "
        f"torch.save writes {len(file.getvalue()) / 1e6:.1f} MB"
    )


show("batch of 1", 1)
show("batch of 1, two micro-batches", 1, micro_batches=2)
show("packed rows, no batch")
show("batch of 2", 2)
PY
"$folder/venv/bin/python" "$folder/gradients.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
