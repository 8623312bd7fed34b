#!/usr/bin/env bash
# torch 2.13.0: 1F1B is there to make a stage's memory independent of the number of micro-batches, and activations are.
# But torch.distributed.pipelining gives a stage one receive buffer for each micro-batch, for activations from the stage
# before and for gradients from the stage behind, and keeps all of them between steps (`_prepare_forward_infra` and
# `_prepare_backward_infra`, stage.py). The last stage moreover keeps the logits of all micro-batches, and `step()`
# returns a concatenation of them: both are there at once, also where the caller wants the losses only. It does not with
# `return_outputs=False`, which is not the default.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, gloo, two stages of four layers; buffers and the peak of the first stage's step in
# sizes of one micro-batch's activation, the last stage's peak in sizes of one micro-batch's logits:
#   4 micro-batches: buffers 4 and 4; first stage 20; last stage 8, with return_outputs=False 4
#   8 micro-batches: buffers 8 and 8; first stage 20; last stage 16, with return_outputs=False 4
#   16 micro-batches: buffers 16 and 16; first stage 20; last stage 32, with return_outputs=False 4
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/stages.py" <<'PY'
import gc
import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, WIDTH, WORDS = 64, 32, 4000


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that operations make."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes, self.peak = {}, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(results):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive.keys() | given:
                self.alive[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.free, storage._cdata)
        return results

    def free(self, address):
        self.bytes -= self.alive.pop(address)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def measure(rank, num_microbatches):
    """Returns the activations that are alive between steps, and the peaks of a step with and without outputs."""
    layers = [Layer() for _ in range(4)] + [torch.nn.Linear(WIDTH, WORDS, bias=False)] * (rank == 1)
    stage = PipelineStage(torch.nn.Sequential(*layers), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss)
    batch, labels = torch.randn(num_microbatches, TOKENS, WIDTH), torch.randint(0, WORDS, (num_microbatches, TOKENS))

    def step(**options):
        stage.submod.zero_grad()
        return schedule.step(batch, **options) if rank == 0 else schedule.step(target=labels, **options)

    step()
    stage.submod.zero_grad()
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    buffers = {each.untyped_storage()._cdata for each in tensors if tuple(each.shape) == (1, TOKENS, WIDTH)}
    peaks = []
    for options in ({}, {"return_outputs": False}):
        with Peak() as peak:
            step(**options)
        peaks.append(peak.peak // (TOKENS * 4 * (WORDS if rank else WIDTH)))
    return len(buffers), *peaks


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for count in (4, 8, 16):
        both = [None, None]
        dist.all_gather_object(both, measure(rank, count))
        if rank == 0:
            first, last = both
            print(
                f"{count} micro-batches: buffers {first[0]} and {last[0]}; first stage {first[1]}; "
                f"last stage {last[1]}, with return_outputs=False {last[2]}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), 2)
PY
"$folder/venv/bin/python" "$folder/stages.py" "$folder/store" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
