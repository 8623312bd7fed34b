#!/usr/bin/env bash
# torch 2.13.0: an optimizer that steps inside backward, in a hook of each parameter (`register_post_accumulate_grad_hook`),
# frees each gradient before the next layer's exists. With `torch.compile` of the whole model the same loop holds all
# gradients at once: the compiled backward is one function, whose results reach the parameters when it has ended. The
# hooks still run, and nothing is said. Compiling each layer keeps what the hooks were written for.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, the CPU, 16 linear layers that step with SGD in a hook; gradients that other parameters
# hold or wait for while a parameter's hook runs, at most:
#   not compiled: 0
#   the model compiled with aot_eager: 15
#   each layer compiled with aot_eager: 0
# With inductor it is 15 too (seen once, and left out, since it compiles for minutes on a busy machine).
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/hooks.py" <<'PY'
import gc

import torch

WIDTH, LAYERS = 128, 16


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.nn.functional.silu(self.linear(x))


def others(own):
    """Counts the storages of other gradients of a weight's shape that exist now."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == own.shape]
    return len({each.untyped_storage().data_ptr() for each in found} - {own.grad.untyped_storage().data_ptr()})


def train(name, compiled):
    torch._dynamo.reset()
    layers, most = [Layer() for _ in range(LAYERS)], 0
    optimizers = {each.linear.weight: torch.optim.SGD([each.linear.weight], lr=0.01) for each in layers}

    def step(parameter):
        nonlocal most
        most = max(most, others(parameter))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    before = layers[-1].linear.weight.detach().numpy().tobytes()
    model = compiled(layers)
    for _ in range(2):
        model(torch.randn(32, WIDTH)).sum().backward()
    assert layers[-1].linear.weight.detach().numpy().tobytes() != before
    print(f"{name}: {most}", flush=True)


train("not compiled", lambda layers: torch.nn.Sequential(*layers))
train("the model compiled with aot_eager", lambda layers: torch.compile(torch.nn.Sequential(*layers), backend="aot_eager"))
train(
    "each layer compiled with aot_eager",
    lambda layers: torch.nn.Sequential(*[torch.compile(each, backend="aot_eager") for each in layers]),
)
PY
"$folder/venv/bin/python" "$folder/hooks.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
