#!/usr/bin/env bash
# transformers 5.24.0: rows in which several documents are packed are told by positions that start over (`position_ids`), from
# which a mask is made that keeps documents apart, if the model makes no cache. A model has to give the positions to the
# function that makes the mask; 134 of 167 files of causal models do so. gpt-oss, AFMoE (Trinity), Granite 4's mixtures of
# experts (GraniteMoeHybrid, here with attention alone) and OPT are among the others: with eager attention or sdpa each
# document attends to those before it, and nothing is said. gpt-oss has no sdpa, so eager attention is what it
# takes by itself. The step has no mask for each row either, so that memory planned from it is too small.
# Guess before the run: all families with attention only keep documents apart.
# Seen on 2026-12-01, Python 3.11, torch 2.13.0, two documents of 32 tokens in a row, use_cache=False; how far the second
# one's logits are from those that it has alone, as a share of them:
#   Qwen3Moe: eager 0.00, sdpa 0.00
#   Mixtral: eager 0.00, sdpa 0.00
#   GptOss: eager 0.60
#   Afmoe: eager 1.01, sdpa 1.01
#   GraniteMoeHybrid: eager 0.73, sdpa 0.73
#   OPT: eager 0.28, sdpa 0.28
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/packed.py" <<'PY'
import torch
import transformers

COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = COMMON | {"intermediate_size": 64, "num_key_value_heads": 2}
FAMILIES = {
    "Qwen3Moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 32},
    "Mixtral": GROUPED | {"num_local_experts": 4},
    "GptOss": GROUPED | {"num_local_experts": 4, "head_dim": 16},
    "Afmoe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_dense_layers": 1},
    "GraniteMoeHybrid": GROUPED | {"num_local_experts": 4, "layer_types": ["attention"] * 2, "mamba_d_head": 16, "mamba_n_heads": 8},
    "OPT": COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 64},
}


def distance(family, attention):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    config._attn_implementation = attention
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    documents = torch.randint(3, 100, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).repeat(1, 2)
    with torch.no_grad():
        alone = model(input_ids=documents[1:], position_ids=positions[:, :32], use_cache=False).logits[0]
        packed = model(input_ids=documents.view(1, -1), position_ids=positions, use_cache=False).logits[0, 32:]
    return float((packed - alone).norm() / alone.norm())


for family in FAMILIES:
    kinds = ["eager"] if family == "GptOss" else ["eager", "sdpa"]
    print(f"{family}: " + ", ".join(f"{kind} {distance(family, kind):.2f}" for kind in kinds))
PY
"$folder/venv/bin/python" "$folder/packed.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
