#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict of an optimizer that has not stepped makes
# its state: all moments are allocated before the first forward pass, and stay. To make it, the function takes a step
# with a rate of 0 and gradients of zero (`_init_optim_state`), which Adam counts. So the first real step corrects its
# bias as a second one, and is a quarter smaller: a checkpoint that is saved before training changes the training, and
# nothing is said. (Known:
# pytorch/pytorch#164929, open; torchtitan repaired its own copy in August 2026, pytorch/torchtitan#4382.)
# Guess before the run: the state is made, and the steps are the same.
# Seen on 2026-11-30, Python 3.11, AdamW with a rate of 0.1, a constant gradient; what the first three steps move a weight by:
#   not read: 0.1000, 0.1000, 0.1000; state before the first step 0 bytes
#   read: 0.0744, 0.0858, 0.0910; state before the first step 32,772 bytes
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/steps.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

for reads in (False, True):
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    if reads:
        get_optimizer_state_dict(model, optimizer)
    state = sum(each.nbytes for one in optimizer.state.values() for each in one.values())
    moves = []
    for _ in range(3):
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        moves.append(f"{(before - model.weight)[0, 0].item():.4f}")
    name = "read" if reads else "not read"
    print(f"{name}: {', '.join(moves)}; state before the first step {state:,} bytes")
PY
"$folder/venv/bin/python" "$folder/steps.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
