#!/usr/bin/env bash
# torch 2.13.0: the gradient of `torch.nn.Embedding(..., sparse=True)` holds a row for each token, not for each word, and
# gradient accumulation appends: the rows of each micro-batch are added to those before, also where the words are the
# same ones, since neither gradient is coalesced. So the gradient grows with the tokens of the whole update, beyond the
# dense one, whose size it was to save. `coalesce()`, which SparseAdam calls in its step, adds the rows of a word, and
# takes as much again: its tensors are made for all rows and then narrowed, so that 50 rows have the storage of 4,000.
# Guess before the run: the gradient grows; the coalesced one takes the bytes of its 50 rows, 3,600.
# Seen on 2026-11-30, Python 3.11, 1,000 words of 16 fp32 numbers; 500 tokens of 50 words in each micro-batch:
#   dense gradient: 64,000 bytes
#   micro-batch 1: 500 rows, 36,000 bytes; coalesced: 50 rows, 36,000 bytes
#   micro-batch 2: 1,000 rows, 72,000 bytes; coalesced: 50 rows, 72,000 bytes
#   micro-batch 4: 2,000 rows, 144,000 bytes; coalesced: 50 rows, 144,000 bytes
#   micro-batch 8: 4,000 rows, 288,000 bytes; coalesced: 50 rows, 288,000 bytes
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/embedding.py" <<'PY'
import torch


def size(gradient):
    return gradient._indices().untyped_storage().nbytes() + gradient._values().untyped_storage().nbytes()


embedding = torch.nn.Embedding(1000, 16, sparse=True)
print(f"dense gradient: {embedding.weight.nbytes:,} bytes")
for count in range(1, 9):
    embedding(torch.arange(500) % 50).sum().backward()
    if count in (1, 2, 4, 8):
        gradient, small = embedding.weight.grad, embedding.weight.grad.coalesce()
        print(
            f"micro-batch {count}: {gradient._nnz():,} rows, {size(gradient):,} bytes; "
            f"coalesced: {small._nnz()} rows, {size(small):,} bytes"
        )
PY
"$folder/venv/bin/python" "$folder/embedding.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
