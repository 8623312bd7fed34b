#!/usr/bin/env bash
# megatron-core 0.16.1 does not train its layers of multi-token prediction if they compute in FP8 and are recomputed:
# their parameters get no gradient, without an error or a warning, and only the output layer learns from their loss.
# MultiTokenPredictionLayer._checkpointed_forward (multi_token_prediction.py) gives te_checkpoint all tensors by name.
# Transformer Engine's checkpoint puts arguments by name into one dict, so that its autograd function receives no
# tensor that needs a gradient, and its output needs none. Without FP8, Megatron's own checkpoint gets the tensors by
# position. megatron-core 0.19.2 passes them by position in both cases (read, not run).
# Seen on 2026-11-29 on an H200, Python 3.12.3, torch 2.11.0, Transformer Engine 2.16.1:
#   bf16, recomputed: 10 of 10 parameters of the layer have a gradient
#   FP8: 10 of 10 parameters of the layer have a gradient
#   FP8, recomputed: 0 of 10 parameters of the layer have a gradient
# Exits with 1 if that changes. Needs a GPU that computes in FP8, a compiler of CUDA 13, and 9 GB in the temporary
# folder; the versions that are installed are the newest that pip installs beside each other (TE 2.12.0).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/train.py" <<'PY'
import os
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
for words, options in (("bf16, recomputed", FULL), ("FP8", FP8), ("FP8, recomputed", FP8 | FULL)):
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512, mtp_num_layers=1, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, add_bias_linear=False, gated_linear_unit=True,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False, **options,
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(
        config, spec, vocab_size=1024, max_sequence_length=128, position_embedding_type="rope",
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True),
    ).cuda().bfloat16()
    tokens = torch.randint(1024, (1, 128), device="cuda")
    places = torch.arange(128, device="cuda")[None]
    loss = model(tokens, places, None, labels=tokens, loss_mask=torch.ones(1, 128, device="cuda"))
    loss.float().mean().backward()
    own = [(name, value) for name, value in model.named_parameters() if name.startswith("mtp.")]
    trained = sum(value.grad is not None and bool(value.grad.count_nonzero()) for _, value in own)
    print(f"{words}: {trained} of {len(own)} parameters of the layer have a gradient")
    sys.stdout.flush()
torch.distributed.destroy_process_group()
PY
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.11.0 megatron-core==0.16.1 'setuptools<82' wheel pybind11 ninja
"${pip[@]}" install --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.12.0'
"$folder/venv/bin/python" "$folder/train.py" 2> /dev/null | tee "$folder/seen"
cmp "$folder/seen" - <<'SEEN'
bf16, recomputed: 10 of 10 parameters of the layer have a gradient
FP8: 10 of 10 parameters of the layer have a gradient
FP8, recomputed: 0 of 10 parameters of the layer have a gradient
SEEN
