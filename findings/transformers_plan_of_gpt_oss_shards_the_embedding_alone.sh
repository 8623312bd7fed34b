#!/usr/bin/env bash
# transformers 5.24.0: `from_pretrained(..., tp_plan="auto")` shards a model over the ranks by the plan in its configuration,
# and what the plan does not name each rank has whole, without a word. The plan of gpt-oss names the embedding alone
# (`base_model_tp_plan`, configuration_gpt_oss.py), and so do those of Falcon-H1 and Bamba: every rank has all layers,
# experts included, so that eight GPUs need as much memory each as two. (Another plan, for expert parallelism, names the
# experts.) DeepSeek-V3's plan leaves out attention. There is a warning where a plan's names match nothing, and none
# where a model's parameters are in no plan.
# Not guessed; seen when the patterns of all plans were matched with the models' parameters.
# Seen on 2026-12-01, Python 3.11, torch 2.13.0, two ranks over gloo, tiny models; the share of a layer's parameters, and of
# the embedding's, that a rank has:
#   Qwen3Moe: layers 0.50, embedding 0.50
#   DeepseekV3: layers 0.60, embedding 0.50
#   GptOss: layers 1.00, embedding 0.50
#   FalconH1: layers 1.00, embedding 0.50
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cat > "$folder/plan.py" <<'PY'
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import transformers

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}
FAMILIES = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 0,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4},
    "FalconH1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1},
}
folder = pathlib.Path(sys.argv[1])
first = os.environ["RANK"] == "0"
dist.init_process_group("gloo")
for family, sizes in FAMILIES.items():
    of_class = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**(COMMON | sizes))
    if first:
        of_class(config).save_pretrained(folder / family)
    dist.barrier()
    whole = dict(of_class(config).named_parameters())
    own = dict(of_class.from_pretrained(folder / family, tp_plan="auto").named_parameters())

    def share(names):
        here = [getattr(own[name], "_local_tensor", own[name]).numel() for name in names]
        return sum(here) / sum(whole[name].numel() for name in names)

    layers = [name for name in whole if ".layers." in name]
    embedding = [name for name in whole if "embed_tokens" in name]
    if first:
        print(f"{family}: layers {share(layers):.2f}, embedding {share(embedding):.2f}")
    dist.barrier()
PY
"$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/plan.py" "$folder" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
