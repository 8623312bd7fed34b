#!/usr/bin/env bash
# DeepSpeed 0.19.8: its memory estimators for a live model (`estimate_zero2_model_states_mem_needs_all_live`, and the one
# of ZeRO-3) count parameters by their address, so that tied weights count once (`{p.data_ptr(): p.numel()}` in
# runtime/zero/stage_1_and_2.py and stage3.py). On torch's meta device, where people build what is too large for their
# machine, every tensor has the address 0: the whole model counts as its last parameter, and nothing is said.
# Seen on 2026-11-29, Python 3.11, torch 2.13.0, ten linear layers of 1,024 x 1,024 and their biases:
#   cpu: 10.5 M parameters. ZeRO-2 estimates for 10M total params, 0.04GB per GPU; ZeRO-3 for 10M total params, 0.03GB per GPU
#   meta: 10.5 M parameters. ZeRO-2 estimates for 0M total params, 0.00GB per GPU; ZeRO-3 for 0M total params, 0.00GB per GPU
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
    """Returns the count of parameters in the estimator's table, and its last row: nothing offloaded, 8 GPUs."""
    with contextlib.redirect_stdout(io.StringIO()) as table:
        estimate(model, num_gpus_per_node=8, num_nodes=1)
    count = re.search(r"(\w+) total params", table.getvalue())[0]
    per_gpu = re.findall(r"\|\s+(\S+GB) \| .*offload_optimizer=none", table.getvalue())[-1]
    return f"{count}, {per_gpu} per GPU"


for device in ("cpu", "meta"):
    with torch.device(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    second = said_by(estimate_zero2_model_states_mem_needs_all_live, model)
    third = said_by(estimate_zero3_model_states_mem_needs_all_live, model)
    print(f"{device}: {parameters / 1e6:.1f} M parameters. ZeRO-2 estimates for {second}; ZeRO-3 for {third}")
PY
DS_ACCELERATOR=cpu "$folder/venv/bin/python" "$folder/estimate.py" 2> "$folder/errors" | grep "M parameters" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
