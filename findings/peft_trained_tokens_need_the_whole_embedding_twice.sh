#!/usr/bin/env bash
# PEFT 0.21.2: `trainable_token_indices` trains the embeddings of a few new tokens, and stores a row for each of them. But
# each forward pass makes a copy of the whole embedding matrix with these rows in it (`index_copy`, tuners/trainable_tokens
# /layer.py), and backward makes the whole matrix' gradient, of which it takes the rows. Where the output layer shares
# the weight, both do it, and the output layer's copy is kept for backward. Plain LoRA needs none of these matrices; for
# a vocabulary of 128,256 and a hidden size of 4,096 each is 1.05 GB in bf16. What is saved is optimizer state.
# Guess before the run: so, but that both copies of a tied weight are kept.
# Seen on 2026-11-30, Python 3.11, transformers 5.24.0, torch 2.13.0, a Llama in bf16; what is allocated of the embedding
# matrix' size or more, in its sizes:
#   LoRA, untied: forward 0.0, kept 0.0, backward 0.0
#   and three tokens, 192 parameters more, untied: forward 1.0, kept 0.0, backward 1.0
#   LoRA, tied: forward 0.0, kept 0.0, backward 0.0
#   and three tokens, 192 parameters more, tied: forward 2.0, kept 1.0, backward 2.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 numpy
cat > "$folder/tokens.py" <<'PY'
import peft
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

WORDS, WIDTH = 4096, 64


class Matrices(TorchDispatchMode):
    """Adds up the large tensors that operations make, in sizes of the embedding matrix in bf16."""

    total = 0.0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.numel() >= WORDS * WIDTH:
            if result.untyped_storage()._cdata not in given:
                self.total += result.nbytes / (2 * WORDS * WIDTH)
        return result


def trained(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def show(tied):
    plain = 0
    for tokens in (None, [1, 2, 3]):
        config = transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=WORDS, tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=tokens))
        weights = {each.untyped_storage()._cdata for each in model.parameters()}
        kept = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights and storage.nbytes() >= 2 * WORDS * WIDTH:
                kept[storage._cdata] = storage.nbytes() / (2 * WORDS * WIDTH)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), Matrices() as forward:
            logits = model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits
        with Matrices() as backward:
            logits.float().sum().backward()
        name = f"and three tokens, {trained(model) - plain} parameters more" if tokens else "LoRA"
        plain = trained(model)
        print(
            f"{name}, {'tied' if tied else 'untied'}: forward {forward.total:.1f}, kept {sum(kept.values()):.1f}, "
            f"backward {backward.total:.1f}"
        )


show(tied=False)
show(tied=True)
PY
"$folder/venv/bin/python" "$folder/tokens.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
