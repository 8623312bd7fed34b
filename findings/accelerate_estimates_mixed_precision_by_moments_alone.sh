#!/usr/bin/env bash
# accelerate 1.15.0: `accelerate estimate-memory` says in its row float16 that training with Adam in mixed precision needs
# half of what training in float32 needs. Its table shows the largest of four numbers, and the largest one, "step", is the
# moments alone (`memory_sizes["step"] = memory_sizes["optimizer"]`, estimate_training_usage, commands/estimate.py).
# bfloat16, which the function takes and the command does not offer, is computed alike, and runs on a CPU.
# Accelerate's mixed precision is autocast: weights, gradients and moments are in fp32, and all of them are there at
# the same time, 16 bytes a parameter, without activations. The parts that the estimator itself states add up to
# more than its peak. Guess before the run: Accelerator(mixed_precision="bf16") holds four times the fp32 weights.
# Seen on 2026-11-29, Python 3.11, torch 2.13.0, on a CPU, as multiples of the weights' bytes in fp32:
#   float32: estimated 4.0 at most, held when the optimizer has stepped 4.0
#   bfloat16: estimated 2.0 at most, held when the optimizer has stepped 4.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0
cat > "$folder/estimate.py" <<'PY'
import torch
from accelerate import Accelerator
from accelerate.commands.estimate import estimate_training_usage
from accelerate.state import AcceleratorState

for name, precision in (("float32", "no"), ("bfloat16", "bf16")):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(2, 256)).float().sum())
    optimizer.step()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    held = sum(parameter.nbytes for parameter in model.parameters()) + gradients + moments
    most = max(estimate_training_usage(weights, name).values())
    print(f"{name}: estimated {most / weights:.1f} at most, held when the optimizer has stepped {held / weights:.1f}")
PY
"$folder/venv/bin/python" -W ignore "$folder/estimate.py" 2> "$folder/errors" | grep "estimated" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
