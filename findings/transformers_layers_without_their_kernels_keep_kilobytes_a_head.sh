#!/usr/bin/env bash
# transformers 5.24.0: without flash-linear-attention or mamba-ssm, the layers of Qwen3-Next and Nemotron-H run in torch, of
# which the log says that it "is correct but much slower". Of memory it says nothing. The products of a chunk's tokens are
# written out in fp32, and autograd keeps 11 KB and 8 KB for each token and head, so that heads decide, not the hidden size.
# Qwen3-Next's 32 heads keep 0.36 MB a token and layer, 4.5 times its attention layer, and Nemotron-H's 128 heads 1.0 MB (by
# multiplication): at 4,096 tokens 1.5 and 4.2 GB in each layer.
# Guess before the run: 5 KB and, for Mamba-2, 130 KB and more.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, bf16, a hidden size of 256, 256 tokens; kept for backward, without weights:
#   Qwen3-Next's gated delta net, 8 heads: 90,992 bytes a token, 11,374 a head
#   Qwen3-Next's gated delta net, 32 heads: 362,387 bytes a token, 11,325 a head
#   Nemotron-H's Mamba-2, 8 heads: 71,565 bytes a token, 8,946 a head
#   Nemotron-H's Mamba-2, 32 heads: 259,525 bytes a token, 8,110 a head
#   Qwen3-Next's attention, 16 heads of 256: 80,784 bytes a token
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/layers.py" <<'PY'
import torch
import transformers
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextGatedDeltaNet,
    Qwen3NextRotaryEmbedding,
)

TOKENS, HIDDEN = 256, 256


def kept(layer, **arguments):
    """Returns the bytes that a forward pass keeps for backward, for each token, without the layer's weights."""
    layer = layer.to(torch.bfloat16)
    weights = {each.untyped_storage()._cdata for each in layer.parameters()}
    seen = {}

    def note(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden, **arguments)
    return sum(seen.values()) // TOKENS


for heads in (8, 32):
    config = transformers.Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_value_heads=heads, linear_num_key_heads=heads // 2, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    size = kept(Qwen3NextGatedDeltaNet(config, 0))
    print(f"Qwen3-Next's gated delta net, {heads} heads: {size:,} bytes a token, {size / heads:,.0f} a head")
for heads in (8, 32):
    config = transformers.NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=heads, mamba_head_dim=64, ssm_state_size=128, n_groups=8, chunk_size=128
    )
    size = kept(NemotronHMamba2Mixer(config, 0))
    print(f"Nemotron-H's Mamba-2, {heads} heads: {size:,} bytes a token, {size / heads:,.0f} a head")
config = transformers.Qwen3NextConfig(
    hidden_size=HIDDEN, num_attention_heads=16, num_key_value_heads=2, head_dim=256, num_hidden_layers=1,
    layer_types=["full_attention"], attn_implementation="sdpa",
)
angles = Qwen3NextRotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), torch.arange(TOKENS)[None])
size = kept(Qwen3NextAttention(config, 0), position_embeddings=angles, attention_mask=None)
print(f"Qwen3-Next's attention, 16 heads of 256: {size:,} bytes a token")
PY
"$folder/venv/bin/python" "$folder/layers.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
