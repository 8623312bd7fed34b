#!/usr/bin/env bash
# transformers 5.24.0: rows in which several documents are packed are told by positions that start over (`position_ids`).
# With sdpa and eager attention each document then attends to itself alone, but only if the model makes no cache of keys
# and values: `use_cache` is True by default, in training too, and with a cache the documents attend to those before
# them, without a word (`_preprocess_mask_arguments` in masking_utils.py asks that `cache is None`). The step
# also keeps less, so that memory planned from it is too small: the right one has a mask of S x S.
# `use_cache=False` makes it right; the Trainer sets it.
# Guess before the run: a mask is made in both cases.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, the CPU, a Qwen3 of two layers, two documents of 512 tokens in a row;
# largest difference of the second document's logits from those that it has alone, and what forward keeps, in MB:
#   sdpa, default: differs by more than 0.1, keeps 12.0
#   sdpa, use_cache=True: differs by more than 0.1, keeps 12.0
#   sdpa, use_cache=False: differs by less than 0.001, keeps 21.0
#   eager, default: differs by more than 0.1, keeps 46.1
#   eager, use_cache=False: differs by less than 0.001, keeps 46.1
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy transformers==5.24.0
cat > "$folder/packed.py" <<'PY'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTH = 512
torch.manual_seed(0)


def kept(function, model):
    """Returns the bytes that the function's operations save for backward, weights left out."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = function()
    del outputs
    return sum(each.nbytes() for address, each in storages.items() if address not in weights)


for attention, caches in (("sdpa", (None, True, False)), ("eager", (None, False))):
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, attn_implementation=attention,
        )
    ).train()
    first, second = torch.randint(128, (2, 1, LENGTH))
    row, positions = torch.cat([first, second], 1), torch.arange(LENGTH).repeat(2)[None]
    alone = model(second).logits
    for cache in caches:
        arguments = {} if cache is None else {"use_cache": cache}
        logits = model(row, position_ids=positions, **arguments).logits[:, LENGTH:]
        largest = (logits - alone).abs().max().item()
        differs = "less than 0.001" if largest < 1e-3 else "more than 0.1" if largest > 0.1 else largest
        num_bytes = kept(lambda: model(row, position_ids=positions, labels=row, **arguments), model)
        name = "default" if cache is None else f"use_cache={cache}"
        print(f"{attention}, {name}: differs by {differs}, keeps {num_bytes / 1e6:.1f}")
PY
"$folder/venv/bin/python" "$folder/packed.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
