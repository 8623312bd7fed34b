#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0: where adapters are trained over frozen quantized weights, backward needs each weight again
# for the gradient of its input. torchao's weight-only types convert the weight to bf16 in forward, and autograd keeps the
# result in each layer, whatever the number of tokens: 1 byte (int8) and 2 bytes (bf16) a weight are there at once, where
# a model that was never quantized has 2. optimum-quanto 0.2.7 keeps its own quantized weight and converts it a second
# time in backward, and so do bitsandbytes' 4 bits. Gradient checkpointing leaves one checkpoint's matrices.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, one frozen bf16 linear of 1,024 x 1,024, two tokens whose gradient is asked for; bytes
# a weight that the layer has, and that autograd keeps besides:
#   torch, not quantized: has 2.0, keeps 0.0 more
#   torchao Int8WeightOnlyConfig: has 1.0, keeps 2.0 more
#   torchao Float8WeightOnlyConfig: has 1.0, keeps 2.0 more
#   quanto qint8: has 1.0, keeps 0.0 more
#   quanto qfloat8: has 1.0, keeps 0.0 more
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchao==0.18.0 optimum-quanto==0.2.7 "numpy<3" setuptools
cat > "$folder/kept.py" <<'PY'
import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

SIZE = 1024


def parts(tensor):
    """Returns the plain tensors of which a tensor consists."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


def storages(tensors):
    return {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for each in tensors for part in parts(each)}


def with_torchao(config):
    return lambda model: quantize_(model, config)


def with_quanto(kind):
    def change(model):
        quantize(model, weights=kind)
        freeze(model)

    return change


def show(name, change):
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    change(model)
    model.requires_grad_(False)
    own, kept = storages(model.parameters()), {}
    x = torch.randn(2, SIZE, dtype=torch.bfloat16, requires_grad=True)

    def keep(tensor):
        kept.update(storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    more = sum(size for address, size in kept.items() if address not in own.keys() | storages([x]).keys())
    print(f"{name}: has {sum(own.values()) / SIZE**2:.1f}, keeps {more / SIZE**2:.1f} more")
    output.sum().backward()
    assert x.grad is not None


show("torch, not quantized", lambda model: None)
show("torchao Int8WeightOnlyConfig", with_torchao(Int8WeightOnlyConfig()))
show("torchao Float8WeightOnlyConfig", with_torchao(Float8WeightOnlyConfig()))
show("quanto qint8", with_quanto(qint8))
show("quanto qfloat8", with_quanto(qfloat8))
PY
"$folder/venv/bin/python" -W ignore "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
