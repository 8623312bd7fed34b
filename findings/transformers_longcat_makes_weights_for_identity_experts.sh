#!/usr/bin/env bash
# transformers 5.24.0: LongCat-Flash has 512 experts with weights and 256 identity ("zero-computation") experts without.
# transformers 5 keeps the experts' first matrices in one parameter, gate_up_proj, and makes it for all 768
# (`total_experts`, LongcatFlashExperts, modeling_longcat_flash.py), but down_proj for 512. The 256 additional matrices
# are never read, and there is no warning: a model of 560.7 B parameters (so 4.57.1 builds it) has 741.1 B, a third more
# memory, also of gradients and optimizer state. They get a gradient, of zeros, because they are part of the parameter.
# Seen on 2026-11-29, Python 3.11, torch 2.13.0:
#   default config: gate_up_proj of 768 experts, down_proj of 512 experts, 741.1 B parameters, of which 180.4 B are never read
#   a tiny model's gradient of gate_up_proj: experts 0 to 3 have one, experts 4 and 5 have zeros
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cat > "$folder/experts.py" <<'PY'
import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

config = LongcatFlashConfig()
with torch.device("meta"):
    model = LongcatFlashForCausalLM(config)
first, second = model.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.down_proj
unread = (len(first) - config.n_routed_experts) * first[0].numel() * len(model.model.layers)
count = sum(parameter.numel() for parameter in model.parameters())
print(
    f"default config: gate_up_proj of {len(first)} experts, down_proj of {len(second)} experts, "
    f"{count / 1e9:.1f} B parameters, of which {unread / 1e9:.1f} B are never read"
)

torch.manual_seed(0)
tiny = LongcatFlashConfig(
    num_layers=1, num_hidden_layers=2, hidden_size=32, ffn_hidden_size=32, expert_ffn_hidden_size=16, vocab_size=64,
    num_attention_heads=2, n_routed_experts=4, zero_expert_num=2, moe_topk=3, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, head_dim=16,
)  # fmt: skip
model = LongcatFlashForCausalLM(tiny)
model(input_ids=torch.arange(64)[None]).logits.square().sum().backward()
gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
has_one = [bool(each.any()) for each in gradient]
assert has_one == [True] * 4 + [False] * 2, has_one
print("a tiny model's gradient of gate_up_proj: experts 0 to 3 have one, experts 4 and 5 have zeros")
PY
"$folder/venv/bin/python" -W ignore "$folder/experts.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
