#!/usr/bin/env bash
# torch 2.13.0: `softmax(x, dim, dtype=torch.float32)` and log_softmax on a GPU read fp16 and write fp32 in one kernel, but
# for bf16 they first make an fp32 copy of the whole input: 4 bytes for each logit of the vocabulary, besides the result.
# The condition names Half only (`input.is_cuda() && input.scalar_type() == Half`, aten/src/ATen/native/SoftMax.cpp), from
# the time before bf16. It also asks for the device, so that tensors on torch's meta device show a copy for fp16 too,
# and a memory estimate on meta tensors has one tensor of the logits' size more than the GPU.
# Seen on 2026-11-29, Python 3.11, no GPU (the operations on fake tensors of a device):
#   fake cuda, torch.float16: _log_softmax
#   fake cuda, torch.bfloat16: _to_copy, _log_softmax
#   fake meta, torch.float16: _to_copy, _log_softmax
#   fake meta, torch.bfloat16: _to_copy, _log_softmax
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/operations.py" <<'PY'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Noting(TorchDispatchMode):
    """Notes the names of the operations that make a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.names.append(func.overloadpacket.__name__)
        return made


for device in ("cuda", "meta"):
    for dtype in (torch.float16, torch.bfloat16):
        with FakeTensorMode():
            logits = torch.empty(4, 128, dtype=dtype, device=device)
            with Noting() as noted:
                logits.log_softmax(-1, dtype=torch.float32)
        print(f"fake {device}, {dtype}: {', '.join(noted.names)}")
PY
"$folder/venv/bin/python" -W ignore "$folder/operations.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
