#!/usr/bin/env bash
# PEFT 0.21.2: the same LoRA configuration (r=8, target_modules="all-linear") trains more parameters of the experts of
# Qwen3-MoE with transformers 5 than with transformers 4. transformers 5.24.0 keeps gate_proj and up_proj of all experts
# in one parameter, gate_up_proj. PEFT adapts it although it is no linear layer, with rank 16, so that each of the two
# former layers can have its rank 8. Its A has 16 rows, as many as the two former ones together, but B has 16 columns
# for each of the 1,536 rows where it had 8. So of an expert of Qwen3-30B-A3B (2,048 x 768), 79,872 parameters are
# trained instead of 67,584: 18 % more, and as much more of gradients and optimizer state.
# Seen on 2026-11-28, Python 3.11, torch 2.13.0, a Qwen3-MoE of one layer with 4 experts of these sizes:
#   transformers 4.57.1: of each expert, LoRA trains 67584 parameters
#   transformers 5.24.0: of each expert, LoRA trains 79872 parameters
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/count.py" <<'PY'
import logging
import os
import warnings

warnings.filterwarnings("ignore")
import peft
import torch
import transformers

logging.disable(logging.WARNING)
config = transformers.Qwen3MoeConfig(
    num_hidden_layers=1, hidden_size=2048, moe_intermediate_size=768, num_experts=4, num_experts_per_tok=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256,
)
model = peft.get_peft_model(
    transformers.Qwen3MoeForCausalLM(config), peft.LoraConfig(r=8, target_modules="all-linear")
)
trained = sum(
    parameter.numel() for name, parameter in model.named_parameters() if "experts" in name and parameter.requires_grad
)
print(f"transformers {transformers.__version__}: of each expert, LoRA trains {trained // 4} parameters")
PY
for version in 4.57.1 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip install --quiet torch==2.13.0 "transformers==$version" peft==0.21.2
  "$folder/$version/bin/python" "$folder/count.py" 2> /dev/null | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
transformers 4.57.1: of each expert, LoRA trains 67584 parameters
transformers 5.24.0: of each expert, LoRA trains 79872 parameters
SEEN
