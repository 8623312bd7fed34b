#!/usr/bin/env bash
# torch 2.13.0: two things that a plan of tensor parallelism (`parallelize_module`) does without a word. An embedding and an
# output layer that share one weight become two, each with a gradient and optimizer state, and training moves them apart
# (each style registers a new parameter in its own module). And linears that read the same sharded sequence, such as q, k
# and v, with `ColwiseParallel(input_layouts=Shard(0))`, gather it each for itself: each keeps a whole sequence for
# backward on each rank. With one PrepareModuleInput for the module around them, they share one.
# Guess before the run: so, both.
# Seen on 2026-11-30, Python 3.11, two ranks over gloo; what a rank keeps of the forward pass of an RMSNorm, three linears
# and an output linear, beside weights, in sizes of the whole sequence:
#   tied before: 1 weight, 1,024 numbers; after: 2 weights, 2,048 numbers; equal after a step: False
#   three linears that gather: keeps 4.0
#   one gather for the three: keeps 2.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/plans.py" <<'PY'
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

TOKENS, WIDTH, WORDS = 256, 16, 64


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.output = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words):
        return self.output(self.embedding(words))


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        return self.out(self.q(x) + self.k(x) + self.v(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = torch.nn.RMSNorm(WIDTH), Attention()

    def forward(self, x):
        return self.attention(self.norm(x))


def local(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(tensor, "elem", tensor)  # of a collective that has been waited for


def untie(mesh):
    torch.manual_seed(0)
    model = Model()
    text = "tied before: "
    for moment in ("", "; after: "):
        if moment:
            plan = {
                "embedding": RowwiseParallel(input_layouts=Replicate()),
                "output": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(model, mesh, plan)
        weights = list(model.parameters())
        text += f"{moment}{len(weights)} weight{'s' * (len(weights) > 1)}, {sum(each.numel() for each in weights):,} numbers"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    are_equal = torch.equal(model.embedding.weight.full_tensor(), model.output.weight.full_tensor())
    return f"{text}; equal after a step: {are_equal}"


def kept(mesh, attention):
    layer = Layer()
    plan = {"norm": SequenceParallel(sequence_dim=0), "attention.out": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(layer, mesh, plan | attention)
    weights = {local(each).untyped_storage().data_ptr() for each in layer.parameters()}
    storages = {}

    def note(tensor):
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = layer(torch.randn(TOKENS // 2, WIDTH))
    num_bytes = sum(each.nbytes() for address, each in storages.items() if address not in weights)
    result.sum().backward()
    return f"keeps {num_bytes / (TOKENS * WIDTH * 4):.1f}"


def work(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    names = [f"attention.{name}" for name in "qkv"]
    gather = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    lines = [
        untie(mesh),
        "three linears that gather: " + kept(mesh, {name: ColwiseParallel(input_layouts=Shard(0)) for name in names}),
        "one gather for the three: "
        + kept(mesh, {"attention": gather} | {name: ColwiseParallel() for name in names}),
    ]
    if rank == 0:
        print(*lines, sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(port,), nprocs=2)
PY
"$folder/venv/bin/python" "$folder/plans.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
