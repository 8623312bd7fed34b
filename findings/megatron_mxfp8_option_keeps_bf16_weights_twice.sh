#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Python 3.11: `reuse_grad_buf_for_mxfp8_param_ag`, an option that saves memory where
# parameters are in MXFP8, keeps all other parameters twice. DistributedDataParallel still allocates a buffer for the
# bf16 parameters of the distributed optimizer (embedding, output layer, norms), but no longer maps them to it
# (`_ParamAndGradBuffer`, param_and_grad_buffer.py): each has its own memory and an equal part of the buffer.
# Seen on 2026-11-29, the embedding of an MXFP8 model, 1,000 x 64 in bf16 (128,000 bytes), without a GPU:
#   without the option: 256,000 bytes for the weight and its gradient, the weight is a part of its buffer
#   with the option: 384,000 bytes for the weight and its gradient, the weight is no part of its buffer
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.16.1
cat > "$folder/buffers.py" <<'PY'
import os
import tempfile

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # the buffers are allocated on this device
store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, use_cpu_initialization=True)
for reuse in (False, True):
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=reuse,
    )
    embedding = torch.nn.Embedding(1000, 64, dtype=torch.bfloat16)
    buffer = DistributedDataParallel(config, ddp_config, embedding).buffers[0]
    tensors = (embedding.weight, buffer.param_data, buffer.grad_data)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    mapped = embedding.weight.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
    print(
        f"{'with' if reuse else 'without'} the option: {sum(storages.values()):,} bytes for the weight and its gradient, "
        f"the weight is {'a' if mapped else 'no'} part of its buffer",
        flush=True,
    )
os._exit(0)
PY
"$folder/venv/bin/python" -W ignore "$folder/buffers.py" 2> "$folder/errors" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
