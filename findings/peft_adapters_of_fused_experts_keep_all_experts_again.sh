#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: LoRA on the experts of a mixture of experts keeps a second copy of all experts'
# weights for backward, in each layer. transformers 5 has the experts' weights in one parameter of three dimensions, which
# PEFT adapts by a parametrization (`_LoraParameterProxy`, tuners/lora/layer.py): forward computes weight + change for all
# experts, also for those that no token chose, and the matrix products save the sum, since backward needs it for the
# input's gradient. target_modules="all-linear" does it too. Without adapters the products save the parameter itself,
# which is there anyway.
# Guess before the run: one copy of all experts.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, a Qwen3-MoE of one layer in bf16, 16 experts, of which a token uses two;
# kept for backward that stays the same from 64 to 128 tokens, in multiples of the experts' weights:
#   full training: 0.00
#   LoRA on attention: 0.00
#   LoRA on the experts' parameters: 1.00
#   LoRA on all-linear: 1.00
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/kept.py" <<'PY'
import peft
import torch
import transformers

CONFIG = transformers.Qwen3MoeConfig(
    num_hidden_layers=1,
    hidden_size=256,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=64,
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def bytes_kept(model, tokens):
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.arange(tokens)[None] % 64
        output = model.train()(input_ids=ids, use_cache=False, logits_to_keep=1)
    assert output.logits.requires_grad
    return sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in own)


def show(name, model):
    experts = sum(each.nbytes for name, each in model.named_parameters() if "experts" in name and "lora" not in name)
    constant = 2 * bytes_kept(model, 64) - bytes_kept(model, 128)
    print(f"{name}: {constant / experts:.2f}")


def adapted(**targets):
    model = transformers.Qwen3MoeForCausalLM(CONFIG).bfloat16()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **targets), autocast_adapter_dtype=False)


show("full training", transformers.Qwen3MoeForCausalLM(CONFIG).bfloat16())
show("LoRA on attention", adapted(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
show("LoRA on the experts' parameters", adapted(target_modules=["q_proj"], target_parameters=EXPERTS))
show("LoRA on all-linear", adapted(target_modules="all-linear"))
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
