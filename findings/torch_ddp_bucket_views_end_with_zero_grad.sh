#!/usr/bin/env bash
# torch 2.13.0: DistributedDataParallel(gradient_as_bucket_view=True) saves a copy of all gradients, since gradients are
# views of the buckets that are reduced. Gradient accumulation takes that back: `zero_grad()` sets gradients to None, the
# backward pass of a micro-batch under `no_sync()` then makes gradients of their own, and the buckets, which never go,
# are beside them until a pass synchronizes. So the option saves nothing at the peak, and nothing is said.
# `zero_grad(set_to_none=False)` keeps the views.
# Guess before the run: twice the gradients' bytes.
# Seen on 2026-11-30, Python 3.11, gloo on a CPU, the third step; gradients and buckets, in sizes of all gradients, after
# the first of two micro-batches and after the second, which synchronizes:
#   gradient_as_bucket_view=False, zero_grad(): 2.0, then 2.0
#   gradient_as_bucket_view=True, zero_grad(): 2.0, then 1.0
#   gradient_as_bucket_view=True, zero_grad(set_to_none=False): 1.0, then 1.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/buckets.py" <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def show(views, **how):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(12)])
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    buckets = []

    def hook(_, bucket):
        buckets.append(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def held():
        tensors = [*buckets, *(parameter.grad for parameter in model.parameters())]
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        return sum(storages.values()) / sum(parameter.nbytes for parameter in model.parameters())

    parallel.register_comm_hook(None, hook)
    inputs = torch.ones(4, 512)
    for step in range(3):
        with parallel.no_sync():
            parallel(inputs).sum().backward()
        first = held() if step == 2 else None
        buckets.clear()  # the first step's buckets are replaced by others
        parallel(inputs).sum().backward()
        second = held()
        parallel.zero_grad(**how)
    called = ", ".join(f"{name}={value}" for name, value in how.items())
    print(f"gradient_as_bucket_view={views}, zero_grad({called}): {first:.1f}, then {second:.1f}")


show(False)
show(True)
show(True, set_to_none=False)
PY
"$folder/venv/bin/python" "$folder/buckets.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
