#!/usr/bin/env bash
# transformers 5.24.0: `save_pretrained` of a mixture of experts writes each expert's matrices by name, and to divide the
# parameters in which transformers 5 has all experts, it copies the first ones, gate and up, of all layers, on the
# device of the model, before the first file is written (`Chunk.convert` in core_model_loading.py: `chunk.contiguous()`);
# `max_shard_size` changes nothing. A model on a GPU so needs much of its weights once more when it is saved: 39 GB for
# Qwen3-30B-A3B. Down is divided into views.
# Guess before the run: all experts are copied, down too.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, the CPU, bf16; new tensors at the peak, and weights of experts, both
# in sizes of all weights:
#   Qwen3-MoE, one file: 0.61 more, experts 0.92
#   Qwen3-MoE, many files: 0.61 more, experts 0.92
#   Llama, one file: 0.00 more, experts 0.00
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/save.py" <<'PY'
import sys
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


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


def show(name, model, **options):
    model = model.bfloat16()
    target = Path(sys.argv[1]) / name.replace(" ", "_")
    with Peak() as peak:
        model.save_pretrained(target, **options)
    assert (len(list(target.glob("*.safetensors"))) > 1) is ("many" in name)
    every = sum(each.nbytes for each in model.parameters())
    experts = sum(each.nbytes for key, each in model.named_parameters() if ".experts." in key)
    print(f"{name}: {peak.peak / every:.2f} more, experts {experts / every:.2f}")


sizes = dict(vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
experts = dict(moe_intermediate_size=128, num_experts=16, num_experts_per_tok=2, head_dim=32)
mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
show("Qwen3-MoE, one file", mixture)
show("Qwen3-MoE, many files", mixture, max_shard_size="500KB")
show("Llama, one file", LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=256)))
PY
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/saved" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
