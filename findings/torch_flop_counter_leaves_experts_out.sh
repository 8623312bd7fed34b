#!/usr/bin/env bash
# torch 2.13.0, transformers 5.24.0: torch's FlopCounterMode, with which many compute the share of a GPU's speed that a
# training reaches, counts the experts of a mixture of experts as nothing. It looks operations up in a list, and that of
# grouped matrix products (`torch._grouped_mm`, which transformers 5 takes for experts unless told otherwise, and torchtitan
# too) is not in it; what is not in the list counts 0, without a word. Of Qwen3-30B-A3B's products with weights these are 60 %
# (by arithmetic), and all other experts of a model. Attention on a CPU is missing too, so a count that is made
# without a GPU lacks it; the meta device has it.
# Guess before the run: both are counted, with a doubt about grouped products.
# Seen on 2026-12-01, Python 3.11, bf16, 256 tokens; counted, of what the products of forward and backward need:
#   experts one by one: 18,874,368 of 18,874,368
#   experts as one grouped product: 0 of 18,874,368
#   attention on the CPU, forward: 0 of 67,108,864
#   attention on the meta device, forward: 67,108,864 of 67,108,864
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/count.py" <<'PY'
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

TOKENS, CHOSEN, HIDDEN, EXPERT = 256, 2, 64, 32


def counted(computation):
    with FlopCounterMode(display=False) as counter:
        computation()
    return counter.get_total_flops()


def experts(implementation):
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=EXPERT, num_experts=8, num_experts_per_tok=CHOSEN
    )
    if implementation is not None:
        config._experts_implementation = implementation
    layer = Qwen3MoeExperts(config).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.stack([torch.randperm(8)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.full((TOKENS, CHOSEN), 1 / CHOSEN, dtype=torch.bfloat16)
    return counted(lambda: layer(hidden, chosen, weights).sum().backward())


def attention(device):
    heads = torch.randn(1, 4, TOKENS, 64, dtype=torch.bfloat16, device=device)
    return counted(lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads))


# Three matrices of each chosen expert, two operations a number, in forward and twice in backward.
needed = 3 * 2 * 3 * TOKENS * CHOSEN * HIDDEN * EXPERT
print(f"experts one by one: {experts('eager'):,} of {needed:,}")
print(f"experts as one grouped product: {experts('grouped_mm'):,} of {needed:,}")
needed = 2 * 2 * 4 * TOKENS * TOKENS * 64
print(f"attention on the CPU, forward: {attention('cpu'):,} of {needed:,}")
print(f"attention on the meta device, forward: {attention('meta'):,} of {needed:,}")
PY
"$folder/venv/bin/python" "$folder/count.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
