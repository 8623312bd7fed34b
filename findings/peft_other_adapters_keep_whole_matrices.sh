#!/usr/bin/env bash
# PEFT 0.21.2: LoRA multiplies activations with two narrow matrices, and so does DoRA. Other adapters of PEFT build matrices
# of the weight's size in each forward pass and keep them for backward, in fp32, since adapters are in fp32: LoHa, LoKr
# and FourierFT the change of the weight, BOFT and HRA products of rotations (HRA one for each of its r reflections).
# DoRA does it only with dropout: an fp32 copy of the frozen weight (tuners/lora/dora.py, where `base_result` is None).
# So they need bytes that do not depend on the number of tokens: up to 29 times what the weights of a bf16 model take,
# where a few per cent of the parameters are trained; full training keeps none of it. (It would be 2.0 and not 1.9 if
# the first layer's query, key and value projections, before which nothing is trained, kept theirs too.)
# Guess before the run: DoRA and OFT none, LoHa and LoKr one matrix; dropout was not thought of.
# Seen on 2026-11-30, Python 3.11, transformers 5.24.0, torch 2.13.0, a Llama in bf16 of 2 layers (256 wide, 896 in the
# MLP), adapters on all linear layers; kept for backward that stays the same from 64 to 128 tokens, in multiples of what
# the adapted weights take in bf16:
#   full training, 100.0% of the parameters trained: 0.0
#   LoRA, 4.2% of the parameters trained: 0.0
#   MiSS, 2.2% of the parameters trained: 0.0
#   OFT, 3.8% of the parameters trained: 0.7
#   DoRA, 4.4% of the parameters trained: 0.0
#   DoRA with dropout, 4.4% of the parameters trained: 1.9
#   LoHa, 8.3% of the parameters trained: 1.9
#   LoKr, 0.4% of the parameters trained: 1.9
#   FourierFT, 0.1% of the parameters trained: 1.9
#   BOFT, 8.2% of the parameters trained: 4.7
#   HRA, 2.0% of the parameters trained: 29.2
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/kept.py" <<'PY'
import weakref

import peft
import torch
import transformers

CONFIG = transformers.LlamaConfig(
    num_hidden_layers=2, hidden_size=256, intermediate_size=896, num_attention_heads=8, num_key_value_heads=2, vocab_size=512
)
ALL = {"target_modules": "all-linear"}
ADAPTERS = {
    "LoRA": peft.LoraConfig(r=8, **ALL),
    "MiSS": peft.MissConfig(r=8, **ALL),
    "OFT": peft.OFTConfig(r=0, oft_block_size=32, **ALL),
    "DoRA": peft.LoraConfig(r=8, use_dora=True, **ALL),
    "DoRA with dropout": peft.LoraConfig(r=8, use_dora=True, lora_dropout=0.05, **ALL),
    "LoHa": peft.LoHaConfig(r=8, **ALL),
    "LoKr": peft.LoKrConfig(r=8, **ALL),
    "FourierFT": peft.FourierFTConfig(n_frequency=100, **ALL),
    "BOFT": peft.BOFTConfig(boft_block_size=32, **ALL),
    "HRA": peft.HRAConfig(r=8, **ALL),
}


class Saved:
    """A tensor that backward needs; freed with the graph that it belongs to."""

    def __init__(self, tensor):
        self.tensor = tensor


def bytes_kept(model, tokens):
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved = weakref.WeakSet()

    def keep(tensor):
        holder = Saved(tensor)
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        output = model.train()(input_ids=ids, use_cache=False, logits_to_keep=1)
    assert output.logits.requires_grad
    storages = {each.tensor.untyped_storage()._cdata: each.tensor.untyped_storage().nbytes() for each in saved}
    return sum(size for address, size in storages.items() if address not in own)


def show(name, model):
    constant = 2 * bytes_kept(model, 64) - bytes_kept(model, 128)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad) / parameters
    print(f"{name}, {trained:.1%} of the parameters trained: {constant / weights:.1f}")


model = transformers.LlamaForCausalLM(CONFIG).bfloat16()
parameters = model.num_parameters()
linears = (each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head")
weights = sum(each.weight.nbytes for each in linears)
show("full training", model)
for name, config in ADAPTERS.items():
    show(name, peft.get_peft_model(transformers.LlamaForCausalLM(CONFIG).bfloat16(), config))
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
