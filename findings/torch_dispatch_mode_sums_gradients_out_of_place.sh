#!/usr/bin/env bash
# torch 2.13.0, Python 3.11: a TorchDispatchMode that only observes changes how much memory a backward pass needs. Where
# a tensor is read twice, autograd adds the second gradient to the first in place; while any dispatch mode is active, it
# makes a third tensor for the sum (`accumulate` in torch/csrc/autograd/input_buffer.cpp asks `isTensorSubclassLike`,
# which is true under a mode). So a memory profiler that is written as a mode counts bytes that the program does not need
# without it: one gradient more at the peak.
# Output seen:
#   alone: the sum is in the first gradient's memory
#   under a mode that only observes: the sum is in new memory
# Exits with 1 if this changes.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
cat > "$work/sums.py" <<'PY'
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 1 << 20


class Observing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, addresses):
        ctx.addresses = addresses
        return torch.zeros(SIZE)

    @staticmethod
    def backward(ctx, gradient):
        ctx.addresses.append(gradient.data_ptr())
        return gradient.sum().view(1), None


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made, addresses):
        ctx.addresses = addresses
        return made.sum()

    @staticmethod
    def backward(ctx, gradient):
        of_made = torch.ones(SIZE)
        ctx.addresses.append(of_made.data_ptr())
        return of_made, None


def adds_in_place():
    addresses, weight = [], torch.zeros(1, requires_grad=True)
    made = Made.apply(weight, addresses)
    (Read.apply(made, addresses) + Read.apply(made, addresses)).backward()
    assert weight.grad.item() == 2 * SIZE
    first, second, added = addresses
    return added == first


alone = adds_in_place()
with Observing():
    observed = adds_in_place()
for who, in_place in (("alone", alone), ("under a mode that only observes", observed)):
    where = "the first gradient's" if in_place else "new"
    print(f"{who}: the sum is in {where} memory")
raise SystemExit(0 if (alone, observed) == (True, False) else 1)
PY
"$work/venv/bin/python" "$work/sums.py"
