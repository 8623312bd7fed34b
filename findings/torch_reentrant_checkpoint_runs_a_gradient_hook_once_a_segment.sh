#!/usr/bin/env bash
# torch 2.13.0: a weight that several layers share gets its whole gradient before the hook of
# `register_post_accumulate_grad_hook` runs, once in a backward pass. With `checkpoint(..., use_reentrant=True)` the hook
# runs once for each checkpoint that uses the weight, since each is a backward pass of its own. An optimizer that steps in
# the hook and frees the gradient, which saves the memory of all gradients, so takes several steps with parts of the
# gradient, and nothing is said.
# Guess before the run: twice with use_reentrant=True, once without.
# Seen on 2026-11-30, Python 3.11, one layer used twice, Adam with a rate of 0.1 in the hook:
#   no checkpoint: the hook ran 1 time, Adam has taken 1 step
#   use_reentrant=False: the hook ran 1 time, Adam has taken 1 step
#   use_reentrant=True: the hook ran 2 times, Adam has taken 2 steps
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/hooks.py" <<'PY'
import torch
from torch.utils.checkpoint import checkpoint

WAYS = {
    "no checkpoint": lambda layer, x: layer(x),
    "use_reentrant=False": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "use_reentrant=True": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}
for name, run in WAYS.items():
    layer = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    runs = []

    def step_in_backward(parameter):
        runs.append(parameter)
        optimizer.step()
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(step_in_backward)
    x = torch.randn(4, 8, requires_grad=True)
    run(layer, run(layer, x).relu()).sum().backward()
    steps = int(optimizer.state[layer.weight]["step"])
    print(f"{name}: the hook ran {len(runs)} time{'s' * (len(runs) > 1)}, Adam has taken {steps} step{'s' * (steps > 1)}")
PY
"$folder/venv/bin/python" "$folder/hooks.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
