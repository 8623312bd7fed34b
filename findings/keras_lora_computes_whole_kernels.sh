#!/usr/bin/env bash
# keras 3.15.1 on torch 2.13.0: `enable_lora` of a Dense layer makes adapters of a low rank, but `kernel` of the layer is then computed as a whole matrix, the frozen kernel plus the product of the adapters, in each call (`kernel` in
# layers/core/dense.py). autograd keeps that matrix for the gradient of the layer's input, where a layer that trains fully
# keeps none of its own, and backward makes a gradient of the kernel's size to get those of the adapters. So training
# adapters in fp32 needs 4 bytes a parameter of the frozen model from forward to backward, whatever the number of tokens.
# Once a layer is quantized, it applies the adapters apart and keeps no such matrix.
# Guess before the run: so; and that quantized layers keep a dequantized kernel, which they do not.
# Seen on 2026-11-30, Python 3.11, the CPU, four Dense layers of 256 x 256 over 8 tokens whose gradient is asked for; what
# forward keeps besides the weights, in sizes of all kernels, and matrices of a kernel's size that backward makes:
#   trained fully: keeps 0.03, backward makes 4 matrices
#   adapters of rank 8: keeps 1.09, backward makes 4 matrices
#   adapters of rank 8, int8: keeps 0.09, backward makes 0 matrices
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q keras==3.15.1 torch==2.13.0 numpy
cat > "$folder/adapters.py" <<'PY'
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, LAYERS = 256, 4


class Matrices(TorchDispatchMode):
    """Counts the products of a kernel's size."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.number += sum(each.shape[-2:] == (WIDTH, WIDTH) for each in tree_leaves(results))
        return results


def show(name, has_adapters, quantized=None):
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS))]
    )
    if quantized:
        model.quantize(quantized)
    if has_adapters:
        for layer in model.layers:
            layer.enable_lora(8)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = model(torch.randn(8, WIDTH, requires_grad=True), training=True)
    kept = sum(each.nbytes() for address, each in storages.items() if address not in weights)
    storages.clear()
    with Matrices() as matrices:
        result.sum().backward()
    size = LAYERS * WIDTH * WIDTH * 4
    print(f"{name}: keeps {kept / size:.2f}, backward makes {matrices.number} matrices", flush=True)


show("trained fully", has_adapters=False)
show("adapters of rank 8", has_adapters=True)
show("adapters of rank 8, int8", has_adapters=True, quantized="int8")
PY
"$folder/venv/bin/python" "$folder/adapters.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
