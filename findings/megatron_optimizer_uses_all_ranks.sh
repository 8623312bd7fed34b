#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Python 3.11: building an optimizer is a collective operation over ALL ranks of the
# job. `_get_param_groups`, which `get_megatron_optimizer` calls, gathers the keys of the parameter groups over torch's
# default group, which is none of Megatron's own groups. So a rank that builds its optimizer alone waits for the others,
# and under NCCL the job gets one communicator of all ranks more, which no group in parallel_state names.
# Output seen (2 ranks, TP2, gloo):
#   rank 0: collectives while the parameter groups were made: default_pg all-gathers 2
#   rank 1: collectives while the parameter groups were made: default_pg all-gathers 2
#   a rank alone: waits for the others
# Exits with 1 if this changes.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.16.1
cat > "$work/ranks.py" <<'PY'
import os
import sys
from collections import Counter
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, _get_param_groups

rank, alone = int(sys.argv[1]), sys.argv[3] == "alone"
store = torch.distributed.FileStore(sys.argv[2], 2)
seconds = timedelta(seconds=10 if alone else 60)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
calls = Counter()
kind = torch.distributed.ProcessGroup
allgather = kind.allgather


def counting(group, *arguments, **named):
    calls[group.group_desc] += 1
    return allgather(group, *arguments, **named)


kind.allgather = counting
config = OptimizerConfig(optimizer="adam", lr=0.001, bf16=False, params_dtype=torch.float32)
if not alone or rank == 0:
    try:
        _get_param_groups([torch.nn.Linear(2, 2)], config, None)
    except RuntimeError:
        print("a rank alone: waits for the others", flush=True)
        os._exit(0 if alone else 1)
    used = ", ".join(f"{group} all-gathers {count}" for group, count in calls.items())
    print(f"rank {rank}: collectives while the parameter groups were made: {used or 'none'}", flush=True)
else:
    import time

    time.sleep(25)
os._exit(0)
PY
run() {  # run together|alone: both ranks, and what they print
  "$work/venv/bin/python" -W ignore "$work/ranks.py" 0 "$work/store-$1" "$1" > "$work/0" 2> "$work/errors-0" &
  local first=$!
  "$work/venv/bin/python" -W ignore "$work/ranks.py" 1 "$work/store-$1" "$1" > "$work/1" 2> "$work/errors-1"
  wait "$first"
  grep -hE '^(rank|a rank)' "$work/0" "$work/1"
}
seen=$(run together; run alone)
echo "$seen"
[ "$seen" = "rank 0: collectives while the parameter groups were made: default_pg all-gathers 2
rank 1: collectives while the parameter groups were made: default_pg all-gathers 2
a rank alone: waits for the others" ]
