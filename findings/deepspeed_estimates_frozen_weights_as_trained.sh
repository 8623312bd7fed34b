#!/usr/bin/env bash
# DeepSpeed 0.19.8: its memory estimators for a live model (`estimate_zero2_model_states_mem_needs_all_live`, and the one
# of ZeRO-3) never ask whether a parameter is trained (`sum(dict((p.data_ptr(), p.numel()) for p in model.parameters())
# .values())` in runtime/zero/stage_1_and_2.py and stage3.py), so that frozen weights get gradients, an fp32 copy and
# moments in the estimate, which DeepSpeed itself makes for the optimizer's parameters only. A model of which LoRA or a
# frozen tower leaves a tenth to train is estimated like one that is trained whole, and nothing is said.
# Guess before the run: the estimates are the same.
# Seen on 2026-11-29, Python 3.11, torch 2.13.0, ten linear layers of 4,096 x 4,096, one GPU, nothing offloaded:
#   167.8 M of 167.8 M parameters are trained. ZeRO-2 estimates 3.13GB per GPU; ZeRO-3 2.88GB per GPU
#   16.8 M of 167.8 M parameters are trained. ZeRO-2 estimates 3.13GB per GPU; ZeRO-3 2.88GB per GPU
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8
cat > "$folder/estimate.py" <<'PY'
import contextlib
import io
import re

import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live


def said_by(estimate, model) -> str:
    """Returns the last row of the estimator's table: nothing offloaded, one GPU."""
    with contextlib.redirect_stdout(io.StringIO()) as table:
        estimate(model, num_gpus_per_node=1, num_nodes=1)
    return re.findall(r"\|\s+(\S+GB) \| .*offload_optimizer=none", table.getvalue())[-1] + " per GPU"


layers = [torch.nn.Linear(4096, 4096) for _ in range(10)]
model = torch.nn.Sequential(*layers)
for frozen in ([], layers[:9]):
    for layer in frozen:
        layer.requires_grad_(False)
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    second = said_by(estimate_zero2_model_states_mem_needs_all_live, model)
    third = said_by(estimate_zero3_model_states_mem_needs_all_live, model)
    print(f"{trained / 1e6:.1f} M of {count / 1e6:.1f} M parameters are trained. ZeRO-2 estimates {second}; ZeRO-3 {third}")
PY
DS_ACCELERATOR=cpu "$folder/venv/bin/python" "$folder/estimate.py" 2> "$folder/errors" | grep "are trained" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
