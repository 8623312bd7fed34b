#!/usr/bin/env bash
# transformers 5.24.0: a mixture of experts sends each token to its chosen experts alone, so what a layer keeps for backward does
# not grow with the number of experts. Llama 4's does: `Llama4TextMoe` repeats all tokens for each expert, with a factor of
# zero where the expert was not chosen, and all experts compute all tokens.
# Guess before the run: what is kept does not grow with the experts but for the router's scores, in any family.
# Seen on 2026-12-01, Python 3.11, torch 2.13.0: one layer, 512 tokens, hidden size 128, one expert a token; what the forward
# pass of a whole model keeps for backward beside the weights:
#   Llama4: 4 experts 8.0 MiB, 16 experts 20.0 MiB, 64 experts 68.2 MiB
#   Qwen3Moe: 4 experts 4.9 MiB, 16 experts 5.0 MiB, 64 experts 5.0 MiB
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/kept.py" <<'PY'
import torch
import transformers

TOKENS = 512
COMMON = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(family, experts):
    torch.manual_seed(0)
    if family == "Llama4":
        config = transformers.Llama4TextConfig(
            **COMMON, head_dim=32, intermediate_size=64, intermediate_size_mlp=64, num_local_experts=experts,
            num_experts_per_tok=1, interleave_moe_layer_step=1,
        )
    else:
        config = transformers.Qwen3MoeConfig(
            **COMMON, head_dim=32, intermediate_size=64, moe_intermediate_size=64, num_experts=experts, num_experts_per_tok=1,
        )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def kept_mib(family, experts):
    model = model_of(family, experts)
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    tokens = torch.randint(3, 100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, use_cache=False).logits.sum()
    return sum(size for size, _ in kept.values()) / 2**20


for family in ("Llama4", "Qwen3Moe"):
    print(f"{family}: " + ", ".join(f"{experts} experts {kept_mib(family, experts):.1f} MiB" for experts in (4, 16, 64)))
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
