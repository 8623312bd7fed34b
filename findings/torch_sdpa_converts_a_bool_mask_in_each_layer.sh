#!/usr/bin/env bash
# torch 2.13.0: scaled_dot_product_attention turns a boolean mask into one of the query's type (0 and -inf) in every call,
# and each call keeps its own for backward: twice the mask's bytes in bf16, once for each layer, although all layers were
# given the same tensor. A mask that was converted once before the layers is kept once. A padding mask of
# [batch, 1, 4096, 4096] so takes 32 MiB a layer and sequence. (`convert_boolean_attn_mask`, attention.cpp. It comes
# before the choice of a kernel, so the trace of a call on fake tensors of a GPU begins with the same operation.)
# Seen on 2026-11-29, Python 3.11, 4 layers of 4 heads of 64, 512 tokens, bf16, on the CPU:
#   boolean mask of 262,144 bytes: masks kept for backward: 4, 2,097,152 bytes
#   bf16 mask of 524,288 bytes: masks kept for backward: 1, 524,288 bytes
#   fake cuda tensors, boolean mask: aten.where.self makes torch.bfloat16 [1, 1, 512, 512]
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/masks.py" <<'PY'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 512
SHAPE = (1, 1, TOKENS, TOKENS)


def say_what_is_kept(name, mask):
    hidden = torch.zeros(1, 4, TOKENS, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def keep(tensor):
        if tuple(tensor.shape) == SHAPE:
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(4):
            hidden = scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
    print(f"{name} mask of {mask.nbytes:,} bytes: masks kept for backward: {len(kept)}, {sum(kept.values()):,} bytes")


class SayWhatMakesMasks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and tuple(made.shape) == SHAPE:
            print(f"fake cuda tensors, boolean mask: {func} makes {made.dtype} {list(made.shape)}")
        return made


causal = torch.ones(SHAPE, dtype=torch.bool).tril()
say_what_is_kept("boolean", causal)
say_what_is_kept("bf16", torch.zeros(SHAPE, dtype=torch.bfloat16).masked_fill(~causal, float("-inf")))
with FakeTensorMode():
    query = torch.empty(1, 4, TOKENS, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.empty(SHAPE, dtype=torch.bool, device="cuda")
    with SayWhatMakesMasks():
        scaled_dot_product_attention(query, query, query, attn_mask=mask)
PY
"$folder/venv/bin/python" -W ignore "$folder/masks.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
