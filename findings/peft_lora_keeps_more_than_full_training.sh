#!/usr/bin/env bash
# PEFT 0.21.2: LoRA on all linear layers of a bf16 model keeps more for backward than training the whole model does. PEFT
# makes adapters in fp32 (`autocast_adapter_dtype=True` is the default of get_peft_model), and each adapted layer casts
# its input to fp32 (`_cast_input_dtype`, tuners/lora/layer.py) and keeps that copy. The layers q_proj, k_proj and v_proj,
# which share one bf16 input without LoRA, keep an fp32 copy of it each; so do gate_proj and up_proj. With adapters in
# bf16, LoRA does keep less.
# Seen on 2026-11-29, Python 3.11, transformers 5.24.0, torch 2.13.0, a Llama in bf16 of 2 layers (256 wide, 896 in the
# MLP, 8 heads, 2 for keys and values), 1,024 tokens, kept for backward besides parameters:
#   whole model: 26.7 MiB
#   LoRA of rank 8 on all linear layers: 36.6 MiB
#   LoRA of rank 8 on all linear layers, adapters in bf16: 22.9 MiB
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

config = transformers.LlamaConfig(
    num_hidden_layers=2, hidden_size=256, intermediate_size=896, num_attention_heads=8, num_key_value_heads=2, vocab_size=512
)


def mib_kept(model) -> float:
    """Returns the size of all storages that a forward pass saves for backward, without the parameters'."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.train()(input_ids=torch.zeros(1, 1024, dtype=torch.long), use_cache=False, logits_to_keep=1)
    assert output.logits.requires_grad
    return sum(size for address, size in kept.items() if address not in parameters) / 2**20


def lora(**options):
    model = transformers.LlamaForCausalLM(config).bfloat16()
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"), **options)


print(f"whole model: {mib_kept(transformers.LlamaForCausalLM(config).bfloat16()):.1f} MiB")
print(f"LoRA of rank 8 on all linear layers: {mib_kept(lora()):.1f} MiB")
in_bf16 = mib_kept(lora(autocast_adapter_dtype=False))
print(f"LoRA of rank 8 on all linear layers, adapters in bf16: {in_bf16:.1f} MiB")
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
