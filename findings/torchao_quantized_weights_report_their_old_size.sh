#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0: after `quantize_(model, Int8WeightOnlyConfig())`, every usual way to ask a weight for its
# size gives that of bf16: nbytes, element_size() * numel() (which is what transformers' get_memory_footprint adds up)
# and even untyped_storage().nbytes(). The weight is a tensor subclass, which shows its former type, and its
# own storage is never allocated. Its memory is that of its inner tensors (`__tensor_flatten__`): half.
# Seen on 2026-11-29, Python 3.11, a linear layer of 1024 x 1024 in bf16:
#   before: Parameter torch.bfloat16, nbytes 2,097,152, element_size * numel 2,097,152, storage 2,097,152
#   after: Int8Tensor torch.bfloat16, nbytes 2,097,152, element_size * numel 2,097,152, storage 2,097,152
#   its inner tensors: 1,053,696 bytes; torch.save writes 1.1 MB
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchao==0.18.0 numpy
cat > "$folder/sizes.py" <<'PY'
import io

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)).bfloat16()


def say_size(when):
    weight = model[0].weight
    print(
        f"{when}: {type(weight).__name__} {weight.dtype}, nbytes {weight.nbytes:,}, element_size * numel "
        f"{weight.element_size() * weight.numel():,}, storage {weight.untyped_storage().nbytes():,}"
    )


say_size("before")
quantize_(model, Int8WeightOnlyConfig())
say_size("after")
names, _ = model[0].weight.__tensor_flatten__()
inner = sum(getattr(model[0].weight, name).untyped_storage().nbytes() for name in names)
torch.save(model.state_dict(), written := io.BytesIO())
print(f"its inner tensors: {inner:,} bytes; torch.save writes {len(written.getvalue()) / 1e6:.1f} MB")
PY
"$folder/venv/bin/python" -W ignore "$folder/sizes.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
