#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0: fully_shard (FSDP2) shards the packed 4-bit weights of QLoRA where `quant_storage` is a
# floating type, but not their scales. These (`absmax`, one fp32 number for 64 weights) are in an object of the module,
# `quant_state`, which is neither a parameter nor a buffer: each rank keeps those of the whole model, 1/16 byte a weight, as
# much as the shard of the weights itself on 8 ranks. For 70 B weights that is 4.4 GB a rank, however many there are. Double
# quantization (`compress_statistics=True`, bitsandbytes' default and not transformers') makes it 1/64 byte and a little.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, gloo, two layers of 1,024 x 1,024; the bytes that one rank keeps:
#   double quantization False, 2 ranks: shards 524,288, scales 131,072
#   double quantization False, 4 ranks: shards 262,144, scales 131,072
#   double quantization True, 2 ranks: shards 524,288, scales 33,280
#   double quantization True, 4 ranks: shards 262,144, scales 33,280
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy
cat > "$folder/shards.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 1024


def layer(double):
    linear = Linear4bit(
        WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4",
        quant_storage=torch.bfloat16,
    )
    linear.load_state_dict({"weight": torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)})
    return linear.to("cpu")  # quantizes the weight


def scales(state):
    """Returns the bytes of a layer's scales; those of double quantization are quantized in blocks themselves."""
    inner = 0 if state.state2 is None else scales(state.state2)
    return state.absmax.untyped_storage().nbytes() + inner


def run(rank, ranks, double, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}{ranks}{double}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(layer(double), layer(double))
    batch = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    expected = model(batch)
    for each in model:
        fully_shard(each, mesh=init_device_mesh("cpu", (ranks,)))
    assert torch.equal(model(batch), expected)
    for each in model:
        each.reshard()
    shards = sum(each.to_local().untyped_storage().nbytes() for each in model.parameters())
    if rank == 0:
        kept = sum(scales(each.quant_state) for each in model)
        print(f"double quantization {double}, {ranks} ranks: shards {shards:,}, scales {kept:,}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for double in (False, True):
        for ranks in (2, 4):
            torch.multiprocessing.spawn(run, (ranks, double, sys.argv[1]), ranks)
PY
"$folder/venv/bin/python" "$folder/shards.py" "$folder/store" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
