#!/usr/bin/env bash
# verl 0.9.1, megatron-core 0.16.1, torch 2.13.0, Python 3.11: with Megatron, `entropy_from_logits_with_chunking`, which is
# there to save memory, works only while one chunk holds the whole row, and in passes without gradients. With an entropy
# loss and a row longer than `entropy_from_logits_chunk_size`, backward raises: the backward of each chunk
# (`_VocabParallelEntropy`, verl/utils/megatron/tensor_parallel.py) changes its logits in place and changes them back,
# but the chunks are views of one tensor, which the other chunks have saved. verl's entropy for FSDP, which has the same
# option, is computed in two chunks without an error.
# Seen on 2026-11-29, one row of 4 tokens, a vocabulary of 8, one rank:
#   not in chunks: entropy 6.9757, gradient of norm 0.5734
#   chunks of 4 tokens: entropy 6.9757, gradient of norm 0.5734
#   chunks of 2 tokens: entropy 6.9757, one of the variables needed for gradient computation has been modified by an inplace operation
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.16.1
"$folder/venv/bin/pip" install -q --no-deps verl==0.9.1
cat > "$folder/chunks.py" <<'PY'
import importlib.util
import os
import sysconfig
import tempfile

import torch
from megatron.core import parallel_state

# The module alone: the package's own import needs Ray.
path = sysconfig.get_paths()["purelib"] + "/verl/utils/megatron/tensor_parallel.py"
spec = importlib.util.spec_from_file_location("verl_tensor_parallel", path)
verl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verl)

store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def outcome(entropy, *chunk_size: int) -> str:
    torch.manual_seed(0)
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    loss = entropy(hidden.clone(), *chunk_size).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return f"entropy {loss:.4f}, {str(error).split(':')[0]}"
    return f"entropy {loss:.4f}, gradient of norm {hidden.grad.norm():.4f}"


print(f"not in chunks: {outcome(verl.vocab_parallel_entropy)}")
for size in (4, 2):
    print(f"chunks of {size} tokens: {outcome(verl.vocab_parallel_entropy_with_chunking, size)}", flush=True)
os._exit(0)
PY
TORCH_COMPILE_DISABLE=1 "$folder/venv/bin/python" -W ignore "$folder/chunks.py" 2> "$folder/errors" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
