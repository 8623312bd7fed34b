#!/usr/bin/env bash
# torch 2.13.0: index_add, by which the outputs of a mixture's experts are summed for each token, keeps what it added until
# backward, though backward only gathers rows of the sum's gradient: of the source it needs the number of dimensions and
# the shape (`source.dim() > 0 ? grad.index_select(dim, index).expand_as(source)`, tools/autograd/derivatives.yaml).
# scatter_reduce with "sum" keeps the source, what it adds to, and the sum. scatter_add and index_put keep the indices.
# In transformers 5.24.0 the eager experts of Mixtral and others call index_add_ with a product that nothing else
# keeps: tokens x experts of a token x hidden size, in each layer.
# Guess before the run: of torch's operations, gather and take_along_dim alone keep a tensor whose values backward never
# reads. Wrong: with each saved tensor replaced by NaN, 69 of 443 in torch's own list gave the same gradients in one of
# six samples or more, avg_pool, take and padding by replication among them.
# Seen on 2026-11-30, Python 3.11, 2,048 rows of 256 numbers in fp32 (2,097,152 bytes) added to 512 rows, kept for backward:
#   scatter_add: indices
#   index_put with accumulate: indices
#   index_add: indices and 2,097,152 bytes
#   index_add_: indices and 2,097,152 bytes
#   scatter_reduce sum: indices and 3,145,728 bytes
#   the same gradient if what index_add keeps is replaced by NaN: True
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch

TOKENS, ROWS, WIDTH = 512, 2048, 256
rows = torch.randint(0, TOKENS, (ROWS,))
everywhere = rows[:, None].expand(-1, WIDTH)
SUMS = {
    "scatter_add": lambda total, source: total.scatter_add(0, everywhere, source),
    "index_put with accumulate": lambda total, source: total.index_put((rows,), source, accumulate=True),
    "index_add": lambda total, source: total.index_add(0, rows, source),
    "index_add_": lambda total, source: total.index_add_(0, rows, source),
    "scatter_reduce sum": lambda total, source: total.scatter_reduce(0, everywhere, source, "sum"),
}


def gradient(add, unpack):
    leaf, kept = torch.ones(ROWS, WIDTH, requires_grad=True), {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    source, total = leaf * 1, torch.zeros(TOKENS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        result = add(total, source)
    (result * torch.arange(WIDTH)).sum().backward()
    return leaf.grad, [each.untyped_storage().nbytes() for each in kept.values() if each.is_floating_point()]


for name, add in SUMS.items():
    _, kept = gradient(add, lambda tensor: tensor)
    print(f"{name}: indices{f' and {sum(kept):,} bytes' if kept else ''}")
right, _ = gradient(SUMS["index_add"], lambda tensor: tensor)
without, _ = gradient(
    SUMS["index_add"], lambda tensor: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor
)
print(f"the same gradient if what index_add keeps is replaced by NaN: {torch.equal(right, without)}")
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
