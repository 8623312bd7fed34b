#!/usr/bin/env bash
# torchao 0.18.0: quantization-aware training computes each weight's rounded values in forward by operations of torch, and
# in eager mode autograd keeps what they need: matrices of the weight's size for each layer, whatever the number of
# tokens, and how many depends on the configuration. Training in bf16 keeps none of it; with int4 weights and FP8
# activations it is 24 bytes for each parameter, more than weights, gradients and Adam's state together.
# With frozen weights, as beside adapters, one copy is kept, the rounded weight. (The first configuration has int8 weights.)
# Guess before the run: three fp32 matrices, so 6.0, with integers of 8 and 4 bits.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, two linear layers of 512 x 512 in bf16; kept for backward that stays the
# same from 64 to 128 tokens, in multiples of what the weights take in bf16:
#   no QAT: 0.0
#   Int8DynamicActivationIntxWeightConfig: 2.1
#   Int8DynamicActivationIntxWeightConfig, frozen weights: 1.0
#   Float8DynamicActivationFloat8WeightConfig: 8.0
#   Float8DynamicActivationFloat8WeightConfig, frozen weights: 1.0
#   Int4WeightOnlyConfig: 9.1
#   Int4WeightOnlyConfig, frozen weights: 1.0
#   Float8DynamicActivationInt4WeightConfig: 12.0
#   Float8DynamicActivationInt4WeightConfig, frozen weights: 1.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchao==0.18.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch
import torchao.quantization
from torchao.quantization.qat import QATConfig

NAMES = (
    "Int8DynamicActivationIntxWeightConfig", "Float8DynamicActivationFloat8WeightConfig", "Int4WeightOnlyConfig",
    "Float8DynamicActivationInt4WeightConfig",
)


def kept(model, tokens):
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    inputs = torch.randn(tokens, 512, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(inputs)
    known = {each.untyped_storage()._cdata for each in (inputs, *model.parameters())}
    return sum(size for address, (size, _) in seen.items() if address not in known)


def show(name, trained):
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).bfloat16().requires_grad_(trained)
    if name:
        base = getattr(torchao.quantization, name)()
        torchao.quantization.quantize_(model, QATConfig(base, step="prepare"))
    model.requires_grad_(trained)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    constant = 2 * kept(model, 64) - kept(model, 128)
    print(f"{name or 'no QAT'}{'' if trained else ', frozen weights'}: {constant / weights:.1f}")


show(None, True)
for name in NAMES:
    show(name, True)
    show(name, False)
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
