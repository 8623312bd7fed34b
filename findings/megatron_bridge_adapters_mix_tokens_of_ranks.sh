#!/usr/bin/env bash
# megatron-bridge 0.6.2, megatron-core 0.19.2, torch 2.13.0, Python 3.12: under sequence parallelism the adapter of a
# linear that each rank has whole mixes the tokens of different ranks. Such linears are `linear_q_down_proj` and
# `linear_kv_down_proj` of latent attention (TELinear with parallel_mode "duplicated"), for which
# `get_adapter_attributes_from_linear` gives input_is_parallel=False and base_linear_is_parallel=False (peft/utils.py).
# `ParallelLinearAdapter` then sets disable_sequence_parallel_comm, so that each rank reads its own part of the sequence;
# but its `linear_in` shares the rows of the first matrix over the ranks and gathers the products along the features. A
# token's adapter has one half of its features from another token, at the same place of the other rank's part. Matrices
# that start at zero hide this in the first step.
# Output seen (2 ranks, TP2, gloo, on a CPU):
#   first rank's tokens give the result of the whole sequence: False
#   first rank's result is the same after only the second rank's tokens changed: False
# Exits with 1 if this changes.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3.12 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy megatron-core==0.19.2
"$work/venv/bin/pip" download -q --no-deps -d "$work" megatron-bridge==0.6.2
"$work/venv/bin/python" -m zipfile -e "$work"/megatron_bridge-*.whl "$work/package"
cat > "$work/ranks.py" <<'PY'
import sys
from types import ModuleType

import torch
from megatron.core import ModelParallelConfig, parallel_state

rank, store, package = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.cuda.current_device = lambda: "cpu"  # Megatron-Core allocates there what it gathers
# The adapters alone: the package's own imports need every model, which the adapters do not use.
for name in ("megatron.bridge", "megatron.bridge.peft"):
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [f"{package}/{name.replace('.', '/')}"]
from megatron.bridge.peft.utils import ParallelLinearAdapter

torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
adapter = ParallelLinearAdapter(
    8, 6, 4, "linear_kv_down_proj", activation="identity", row_init_method="normal", input_is_parallel=False,
    disable_sequence_parallel_comm=False, base_linear_is_parallel=False,
    model_parallel_config=ModelParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=True
    ),
)
tokens = torch.randn(4, 1, 8)
changed = tokens.clone()
changed[2:] += 1  # the second rank's part of the sequence
own = slice(2 * rank, 2 * rank + 2)
with torch.no_grad():
    whole = adapter(tokens)[own]  # where both ranks read all tokens
    of_part, beside_changed = adapter(tokens[own]), adapter(changed[own])
if rank == 0:
    print("first rank's tokens give the result of the whole sequence:", torch.allclose(of_part, whole))
    same = torch.allclose(of_part, beside_changed)
    print("first rank's result is the same after only the second rank's tokens changed:", same, flush=True)
torch.distributed.barrier()
PY
"$work/venv/bin/python" -W ignore "$work/ranks.py" 1 "$work/store" "$work/package" > "$work/1" 2>&1 &
seen=$("$work/venv/bin/python" -W ignore "$work/ranks.py" 0 "$work/store" "$work/package" 2> "$work/errors" || cat "$work/errors")
wait
echo "$seen"
[ "$seen" = "first rank's tokens give the result of the whole sequence: False
first rank's result is the same after only the second rank's tokens changed: False" ]
