#!/usr/bin/env bash
# torch 2.13.0: of two modules that share one weight (embedding and output layer), `to_empty`, with which a model that was
# built on the meta device gets its memory, makes two: one matrix of the vocabulary more, with its gradient and optimizer
# state, and both are trained. `.to("meta")` does it too. `load_state_dict(..., assign=True)` makes two parameters of one
# memory, which Adam then moves twice a step. deepcopy and `.to` with another type keep one weight, and so does
# `to_empty` after FSDP2's fully_shard.
# Seen on 2026-11-29, Python 3.11, an embedding of 16 x 4 and an output layer that share their weight:
#   built: 64 parameters in 1 storage, Adam with a rate of 0.1 moves them by 0.10
#   deepcopy: 64 parameters in 1 storage, Adam with a rate of 0.1 moves them by 0.10
#   to(float64): 64 parameters in 1 storage, Adam with a rate of 0.1 moves them by 0.10
#   meta, then to_empty: 128 parameters in 2 storages, Adam with a rate of 0.1 moves them by 0.10
#   to(meta), then to_empty: 128 parameters in 2 storages, Adam with a rate of 0.1 moves them by 0.10
#   meta, then fully_shard, then to_empty: 64 parameters in 1 storage, Adam with a rate of 0.1 moves them by 0.10
#   meta, then load_state_dict with assign=True: 128 parameters in 1 storage, Adam with a rate of 0.1 moves them by 0.20
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cat > "$folder/tied.py" <<'PY'
import copy
import tempfile

import torch
from torch.distributed.fsdp import fully_shard

store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))


def built() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16, bias=False))
    model[1].weight = model[0].weight
    torch.nn.init.ones_(model[0].weight)
    return model


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return built()


def emptied(model) -> torch.nn.Module:
    return filled(model.to_empty(device="cpu"))


def filled(model) -> torch.nn.Module:
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    return model


def assigned(model) -> torch.nn.Module:
    model.load_state_dict(built().state_dict(), assign=True)
    return model


ways = {
    "built": built(),
    "deepcopy": copy.deepcopy(built()),
    "to(float64)": built().to(torch.float64),
    "meta, then to_empty": emptied(on_meta()),
    "to(meta), then to_empty": emptied(built().to("meta")),
    "meta, then fully_shard, then to_empty": emptied(fully_shard(on_meta(), mesh=mesh)),
    "meta, then load_state_dict with assign=True": assigned(on_meta()),
}
for name, model in ways.items():
    parameters = list(model.parameters())
    shards = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    storages = {shard.untyped_storage().data_ptr() for shard in shards}
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    model(torch.arange(16)).sum().backward()
    optimizer.step()
    count = sum(parameter.numel() for parameter in parameters)
    moved = (1 - shards[0]).abs().max().item()
    print(
        f"{name}: {count} parameters in {len(storages)} storage{'s'[: len(storages) - 1]}, "
        f"Adam with a rate of 0.1 moves them by {moved:.2f}"
    )
PY
"$folder/venv/bin/python" -W ignore "$folder/tied.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
