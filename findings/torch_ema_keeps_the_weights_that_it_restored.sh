#!/usr/bin/env bash
# torch-ema 0.3, torch 2.13.0: `with ema.average_parameters():`, in which a model is evaluated with averaged weights, clones
# the trained weights, and copies them back at its end. The clones stay in the object (`restore`, torch_ema/ema.py, copies
# `collected_params` and does not let them go), so that after the first evaluation every training step has one more
# model on the device, for good. state_dict() has it too, so checkpoints are twice as large from then on.
# Guess before the run: the clones are there inside the block only.
# Seen on 2026-11-30, Python 3.11; bytes in the average's object, in sizes of the model, and of its state dict:
#   before: 1.0 models, torch.save 1.0
#   inside: 2.0 models, torch.save 2.0
#   after: 2.0 models, torch.save 2.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torch-ema==0.3 numpy
cat > "$folder/average.py" <<'PY'
import io

import torch
from torch_ema import ExponentialMovingAverage

model = torch.nn.Linear(1024, 1024, bias=False)
ema = ExponentialMovingAverage(model.parameters(), decay=0.99)


def show(name):
    tensors = [each for value in vars(ema).values() if isinstance(value, list) for each in value]
    kept = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    size = model.weight.nbytes
    print(f"{name}: {kept / size:.1f} models, torch.save {len(file.getvalue()) / size:.1f}")


show("before")
with ema.average_parameters():
    show("inside")
show("after")
PY
"$folder/venv/bin/python" "$folder/average.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
