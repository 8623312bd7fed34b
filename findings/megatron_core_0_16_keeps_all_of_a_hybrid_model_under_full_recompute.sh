#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Python 3.11: `recompute_granularity="full"` has no effect in MambaModel, the class of
# hybrid models such as Nemotron-H. Its layers are called one after the other without a checkpoint (MambaStack.forward,
# ssm/mamba_block.py), so that all activations stay until backward; there is no error and no warning. GPTModel's
# TransformerBlock checkpoints each layer. On an H200, Nemotron-H 8B with 9 layers peaked at 47,565,621,760 bytes with and
# without full recompute (Transformer Engine 2.16.1). 0.17.1 does the same (run); 0.18.2 and 0.19.2 have checkpoints
# (models/hybrid/hybrid_block.py; read, not run).
# Here the pattern has attention and MLP layers only (`*-*-*-*-`), which need neither a GPU nor mamba_ssm, beside a GPTModel
# of the same layers. On a CPU, torch's own checkpoint stands in for Megatron's, which saves the state of CUDA's random
# numbers. Guess before the run: MambaModel keeps the same with and without, GPTModel keeps little more than its inputs.
# Seen on 2026-11-29, bytes kept for backward, without parameters:
#   recompute none: GPTModel keeps 3429376, MambaModel keeps 3429376
#   recompute full: GPTModel keeps 148480, MambaModel keeps 3429376
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.16.1
cat > "$folder/kept.py" <<'PY'
import contextlib
import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

# What Megatron takes from CUDA: the device, and the state of random numbers around dropout and in checkpoints.
torch.cuda.current_device = lambda: torch.device("cpu")
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
tensor_parallel.checkpoint = lambda function, distribute_saved_activations, *arguments: torch.utils.checkpoint.checkpoint(
    function, *arguments, use_reentrant=False
)
store = torch.distributed.FileStore(sys.argv[1], 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

LAYER = get_gpt_layer_local_spec(normalization="RMSNorm")


def half_layer(*names: str) -> ModuleSpec:
    """Returns a layer that has only the named modules of a GPT layer."""
    kept = {name: getattr(LAYER.submodules, name) for name in names}
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**kept))


STACK = ModuleSpec(
    module=MambaStack,
    submodules=MambaStackSubmodules(
        attention_layer=half_layer("input_layernorm", "self_attention", "self_attn_bda"),
        mlp_layer=half_layer("pre_mlp_layernorm", "mlp", "mlp_bda"),
    ),
)


def config(num_layers: int, **recompute) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, normalization="RMSNorm", add_bias_linear=False, bias_dropout_fusion=False, **recompute,
    )


def bytes_kept(model) -> int:
    """Returns the bytes of all storages that the forward pass keeps for backward, without the parameters' own."""
    tensors = []
    tokens = torch.arange(128)[None]
    mask = torch.ones(1, 1, 128, 128).triu(1).bool()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda tensor: tensor):
        output = model(tokens, tokens, mask)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    output.sum().backward()
    return sum(storages.values())


COMMON = {"vocab_size": 128, "max_sequence_length": 128, "post_process": False, "position_embedding_type": "none"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
for words, recompute in (("none", {}), ("full", FULL)):
    gpt = GPTModel(config(4, **recompute), LAYER, **COMMON)
    hybrid = MambaModel(config(8, **recompute), STACK, hybrid_override_pattern="*-*-*-*-", **COMMON)
    print(f"recompute {words}: GPTModel keeps {bytes_kept(gpt)}, MambaModel keeps {bytes_kept(hybrid)}")
PY
"$folder/venv/bin/python" -W ignore "$folder/kept.py" "$folder/store" 2> "$folder/errors" | grep "^recompute" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
