#!/usr/bin/env bash
# torch 2.13.0: `Optimizer.load_state_dict` casts every tensor of the state to the type of its parameter, all but the one
# that is named "step", if the parameter is a floating-point one. That holds for integers too, such as counters or 8-bit
# codes of an optimizer's own, and for torch's own NAdam and ASGD: with bf16 parameters, the fp32 product of NAdam's
# momentum schedule is bf16 after a resume. Nothing is said. (`_process_value_according_to_param_policy`, optimizer.py.)
# An optimizer whose state has another type than its parameters needs its own load_state_dict.
# Seen on 2026-11-29, Python 3.11, parameters in bf16, after 3 steps:
#   NAdam: mu_product torch.float32 0.091214 saved, torch.bfloat16 0.091309 loaded
#   own optimizer: codes torch.uint8 saved, torch.bfloat16 loaded; tokens torch.int64 1001 saved, torch.bfloat16 1000 loaded
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cat > "$folder/resume.py" <<'PY'
import torch


class Own(torch.optim.Optimizer):
    """An optimizer with 8-bit codes of a moment, and a counter of tokens."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            codes = torch.zeros(parameter.shape, dtype=torch.uint8)
            self.state[parameter] = {"codes": codes, "tokens": torch.tensor(1001)}


def saved_and_loaded(kind):
    parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer, resumed = kind([parameter], lr=1e-3), kind([parameter], lr=1e-3)
    for _ in range(3):
        optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    return optimizer.state[parameter], resumed.state[parameter]


saved, loaded = saved_and_loaded(torch.optim.NAdam)
before, after = saved["mu_product"], loaded["mu_product"]
print(f"NAdam: mu_product {before.dtype} {before.item():.6f} saved, {after.dtype} {after.item():.6f} loaded")
saved, loaded = saved_and_loaded(Own)
before, after = saved["tokens"], loaded["tokens"]
print(
    f"own optimizer: codes {saved['codes'].dtype} saved, {loaded['codes'].dtype} loaded; "
    f"tokens {before.dtype} {before.item()} saved, {after.dtype} {after.item():.0f} loaded"
)
PY
"$folder/venv/bin/python" -W ignore "$folder/resume.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
