#!/usr/bin/env bash
# torch 2.13.0: torch.func.grad (and grad_and_value) of a training loss needs more than twice the memory of
# `loss.backward()`. It differentiates with create_graph=True, so that it can be nested (`_autograd_grad`,
# torch/_functorch/eager_transforms.py): backward itself is recorded, no activation is freed on the way, and the
# gradient of each activation stays until the end. Nothing asks for a second derivative here. torch.func.vjp, called
# outside any other transform, gives the same gradients without it.
# Guess before the run: torch.func.grad needs as much as backward.
# Seen on 2026-11-30, Python 3.11, 16 layers of tanh on 4,096 x 64 numbers; all bytes of tensors at the peak, in sizes
# of one activation:
#   loss.backward(): 20.0
#   torch.autograd.grad(loss, weights): 20.0
#   torch.func.vjp(loss, weights): 20.0
#   torch.func.grad(loss)(weights): 49.3
#   torch.func.grad_and_value(loss)(weights): 49.3
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/peaks.py" <<'PY'
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


x = torch.randn(4096, 64)
weights = [torch.randn(64, 64) * 0.1 for _ in range(16)]
leaves = [weight.clone().requires_grad_() for weight in weights]


def loss(weights):
    hidden = x
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    return hidden.square().mean()


def show(name, run):
    with Peak() as peak:
        run()
    print(f"{name}: {peak.peak / x.nbytes:.1f}")


show("loss.backward()", lambda: loss(leaves).backward())
show("torch.autograd.grad(loss, weights)", lambda: torch.autograd.grad(loss(leaves), leaves))
show("torch.func.vjp(loss, weights)", lambda: torch.func.vjp(loss, weights)[1](torch.tensor(1.0)))
show("torch.func.grad(loss)(weights)", lambda: torch.func.grad(loss)(weights))
show("torch.func.grad_and_value(loss)(weights)", lambda: torch.func.grad_and_value(loss)(weights))
by_vjp = torch.func.vjp(loss, weights)[1](torch.tensor(1.0))[0]
assert all(torch.allclose(one, other) for one, other in zip(torch.func.grad(loss)(weights), by_vjp, strict=True))
PY
"$folder/venv/bin/python" "$folder/peaks.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
