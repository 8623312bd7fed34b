#!/usr/bin/env bash
# torch 2.13.0: `Module.load_state_dict` copies values into the module's own tensors; `Optimizer.load_state_dict` takes the
# tensors that it is given, if type and device agree. So two optimizers of which one has loaded the other's state have
# the moments and the count of steps in common: a step of either changes both, without a word. (A state that is read
# from a file is nobody else's.) With parameters of another type the moments are copies, and the count is still shared.
# Seen on 2026-11-29, Python 3.11, AdamW, the second loaded the state of the first, then the first takes a step:
#   Linear: the second's weight is its own
#   AdamW, same type: exp_avg is shared and has changed, step is shared and has changed
#   AdamW, second in bf16: exp_avg is its own, step is shared and has changed
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cat > "$folder/shared.py" <<'PY'
import torch


def trained(dtype=torch.float32):
    layer = torch.nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters())
    step(layer, optimizer)
    return layer, optimizer


def step(layer, optimizer):
    layer(torch.ones(1, 4, dtype=layer.weight.dtype)).sum().backward()
    optimizer.step()


first, _ = trained()
second, _ = trained()
second.load_state_dict(first.state_dict())
print("Linear: the second's weight is " + ("shared" if second.weight.data_ptr() == first.weight.data_ptr() else "its own"))
for name, dtype in (("same type", torch.float32), ("second in bf16", torch.bfloat16)):
    layer, optimizer = trained()
    other, loading = trained(dtype)
    loading.load_state_dict(optimizer.state_dict())
    mine, theirs = optimizer.state[layer.weight], loading.state[other.weight]
    before = {key: theirs[key].clone() for key in ("exp_avg", "step")}
    step(layer, optimizer)
    said = []
    for key, value in before.items():
        shared = "shared" if mine[key].data_ptr() == theirs[key].data_ptr() else "its own"
        said.append(f"{key} is {shared}" + ("" if torch.equal(value, theirs[key]) else " and has changed"))
    print(f"AdamW, {name}: {', '.join(said)}")
PY
"$folder/venv/bin/python" -W ignore "$folder/shared.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
