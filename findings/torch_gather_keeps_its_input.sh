#!/usr/bin/env bash
# torch 2.13.0: the backward of torch.gather needs the indices and the shape of the input, but it keeps the whole input.
# The log-probability of each token, `logits.gather(-1, labels)`, so keeps the logits of the whole vocabulary until
# backward, for one number a row; an index, `logits[rows, labels]`, keeps the indices only. (`self: gather_backward(grad, self, dim, index, sparse_grad)`, tools/autograd/derivatives.yaml.)
# Seen on 2026-11-29, Python 3.11, 64 rows of 32,000 logits in bf16:
#   gather: the logits are kept (4,096,000 bytes)
#   take_along_dim: the logits are kept (4,096,000 bytes)
#   an index: the logits are freed
#   index_select: the logits are freed
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cat > "$folder/kept.py" <<'PY'
import weakref

import torch

weight = torch.zeros(32_000, 8, dtype=torch.bfloat16, requires_grad=True)
hidden, rows, labels = torch.zeros(64, 8, dtype=torch.bfloat16), torch.arange(64), torch.arange(64)
ways = {
    "gather": lambda logits: logits.gather(-1, labels[:, None])[:, 0],
    "take_along_dim": lambda logits: torch.take_along_dim(logits, labels[:, None], -1)[:, 0],
    "an index": lambda logits: logits[rows, labels],
    "index_select": lambda logits: logits.index_select(-1, labels),
}
for name, choose in ways.items():
    logits = hidden @ weight.t()
    storage, size = weakref.ref(logits.untyped_storage()), logits.untyped_storage().nbytes()
    chosen = choose(logits)
    del logits
    print(f"{name}: the logits are " + ("freed" if storage() is None else f"kept ({size:,} bytes)"))
    chosen.sum().backward()
PY
"$folder/venv/bin/python" -W ignore "$folder/kept.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
