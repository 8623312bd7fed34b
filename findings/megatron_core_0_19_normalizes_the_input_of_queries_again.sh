#!/usr/bin/env bash
# megatron-core 0.19.2, torch 2.13.0, Python 3.12: latent attention without a low rank of queries (`q_lora_rank` None, as
# in DeepSeek-V2-Lite and Moonlight) and with `qk_layernorm` gets a norm of its own in front of `linear_q_proj`, although
# the layer's specification asks for a plain linear there and has normalized the same input before
# (`QKNormConfigResolver`, megatron/core/transformer/mla_qk_norm_config.py). 0.16.1 and 0.18.2 build the plain linear, and
# checkpoints of these models have no weight for the norm: 27 layers of 2,048 numbers in Moonlight-16B-A3B.
# With a low rank, only the up-projection has a norm, as the specification says. The two names below stand for
# Transformer Engine's linears, which need a GPU build.
# Output seen:
#   q_lora_rank None: linear_q_proj is asked for as Linear and becomes LayerNormLinear
#   q_lora_rank 16: linear_q_up_proj is asked for as LayerNormLinear and stays LayerNormLinear
# Exits with 1 if this changes. PYTHON names another Python 3.12 or 3.13.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.19.2
cat > "$work/resolve.py" <<'PY'
from types import SimpleNamespace

from megatron.core.transformer import mla_qk_norm_config


class Linear: ...


class LayerNormLinear: ...


provider = SimpleNamespace(
    layer_norm=lambda **_: object,
    column_parallel_linear=lambda: Linear,
    column_parallel_layer_norm_linear=lambda: LayerNormLinear,
)
mla_qk_norm_config.get_backend = lambda _: provider
for rank, name, asked in ((None, "linear_q_proj", Linear), (16, "linear_q_up_proj", LayerNormLinear)):
    config = SimpleNamespace(
        q_lora_rank=rank,
        qk_layernorm=True,
        qk_l2_norm=False,
        normalization="RMSNorm",
        transformer_impl="transformer_engine",
        experimental_attention_variant=None,
    )
    parts = SimpleNamespace(
        linear_q_proj=Linear,
        linear_q_up_proj=LayerNormLinear,
        linear_kv_up_proj=LayerNormLinear,
        q_layernorm=None,
        kv_layernorm=None,
    )
    found = mla_qk_norm_config.QKNormConfigResolver(config, parts).resolve()[name]
    verb = "stays" if found is asked else "becomes"
    print(f"q_lora_rank {rank}: {name} is asked for as {asked.__name__} and {verb} {found.__name__}")
PY
seen=$("$work/venv/bin/python" -W ignore "$work/resolve.py" 2> "$work/errors") || { cat "$work/errors"; exit 1; }
echo "$seen"
[ "$seen" = "q_lora_rank None: linear_q_proj is asked for as Linear and becomes LayerNormLinear
q_lora_rank 16: linear_q_up_proj is asked for as LayerNormLinear and stays LayerNormLinear" ]
