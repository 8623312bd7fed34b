#!/usr/bin/env bash
# torch 2.13.0: zero-bubble schedules of torch.distributed.pipelining divide backward into a pass for the input's gradient
# and a later one for the weights' gradients, for which a stage would keep the inputs of its linears and the gradients
# of their outputs. But the first pass calls autograd with retain_graph=True (`stage_backward_input`,
# distributed/pipelining/_backward.py), which frees nothing: what activations, norms and products have saved stays until
# the weights' pass, and the gradients come on top. Between the passes a stage so keeps half as much again as after
# forward, and twice what the weights' pass reads.
# Guess before the run: nothing is freed, and gradients are kept besides.
# Seen on 2026-11-30, Python 3.11, four layers (RMSNorm, SwiGLU of four times the width, residual) of 2,048 tokens; all
# bytes besides weights and their gradients, in sizes of a layer's input:
#   after forward: 76.1
#   after the input's pass: 115.1
#   what the weights' pass reads (inputs of linears, gradients of their outputs): 56.0
#   the peak of an undivided backward: 84.2
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/passes.py" <<'PY'
import weakref

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, WIDTH = 2048, 64


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that operations make."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes, self.peak = {}, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(results):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive.keys() | given:
                self.alive[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.free, storage._cdata)
        return results

    def free(self, address):
        self.bytes -= self.alive.pop(address)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.gate, self.up = (torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


def show(name, number):
    print(f"{name}: {number / (TOKENS * WIDTH * 4):.1f}")


stage = torch.nn.Sequential(*[Layer() for _ in range(4)])
x, gradient = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, WIDTH)
with Peak() as meter:
    output = stage(x)
    show("after forward", meter.bytes)
    of_inputs, groups = stage_backward_input([output], [gradient], [x], stage.parameters())
    of_inputs = [each for each in of_inputs if each is not None]
    assert len(of_inputs) == 1 and all(each.grad is None for each in stage.parameters())
    show("after the input's pass", meter.bytes - of_inputs[0].nbytes)
    read = 4 * ((1 + 4) + (4 + 4 + 1)) * TOKENS * WIDTH * 4
    show("what the weights' pass reads (inputs of linears, gradients of their outputs)", read)
    stage_backward_weight(stage.parameters(), groups)
    del groups, of_inputs
    assert all(each.grad is not None for each in stage.parameters())
stage.zero_grad()
del output
x = torch.randn(TOKENS, WIDTH, requires_grad=True)
with Peak() as meter:
    stage(x).backward(gradient)
    show("the peak of an undivided backward", meter.peak)
PY
"$folder/venv/bin/python" "$folder/passes.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
