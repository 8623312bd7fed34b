#!/usr/bin/env bash
# torch 2.13.0: `x @ weight` with activations of [batch, heads, tokens, channels] and one matrix for each head,
# [heads, channels, channels], copies the weight once for each sequence of the batch, and keeps the copies for backward:
# matmul expands both to the same batch dimensions and reshapes them to three dimensions for bmm, which copies a weight that
# is expanded beside other dimensions. That holds for a frozen weight too. einsum computes the same product and keeps the
# weight itself, and so does matmul where the weight has one matrix only. (`_matmul_impl`,
# aten/src/ATen/native/LinearAlgebra.cpp.)
# Guess before the run: copied and kept, also with one matrix (wrong).
# Seen on 2026-11-30, Python 3.11, a batch of 8, 4 heads, 16 tokens, 64 channels, fp32; kept for backward in place of
# the weight, in sizes of the weight:
#   [8, 4, 16, 64] @ [4, 64, 64]: 8
#   [8, 4, 16, 64] @ [4, 64, 64], frozen: 8
#   [8, 4, 16, 64] @ [1, 64, 64]: the weight itself
#   einsum("bhtc,hcd->bhtd"): the weight itself
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch


def show(name, x, weight, product=torch.matmul):
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata != x.untyped_storage()._cdata and tensor.shape[-2:] == weight.shape[-2:]:
            kept[storage._cdata] = storage.nbytes(), storage._cdata == weight.untyped_storage()._cdata
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        product(x, weight)
    [(size, itself)] = kept.values()
    print(f"{name}: {'the weight itself' if itself else size // weight.nbytes}")


x = torch.randn(8, 4, 16, 64, requires_grad=True)
by_head = torch.randn(4, 64, 64, requires_grad=True)
show("[8, 4, 16, 64] @ [4, 64, 64]", x, by_head)
show("[8, 4, 16, 64] @ [4, 64, 64], frozen", x, by_head.detach())
show("[8, 4, 16, 64] @ [1, 64, 64]", x, torch.randn(1, 64, 64, requires_grad=True))
spelled = "bhtc,hcd->bhtd"
show(f'einsum("{spelled}")', x, by_head, lambda one, other: torch.einsum(spelled, one, other))
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
