#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Python 3.11: under `torch.no_grad()` a TransformerLayer still makes a graph, if its
# linear layers have a bias, or if its input requires gradients: it adds bias and residual inside `torch.enable_grad`
# (`bias_dropout_add_exec_handler`, transformer_layer.py). On every pipeline stage but the first, the input does require
# gradients (p2p_communication.py receives into such tensors), so in a forward-only pass for log-probabilities the
# output keeps what the stage has received.
# Output seen:
#   plain input, no bias: no graph, the input is freed
#   plain input, bias: AddBackward0, the input is freed
#   input that requires grad, no bias: AddBackward0, the input is kept
# Exits with 1 if this changes.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 megatron-core==0.16.1
cat > "$work/layer.py" <<'PY'
import tempfile
import weakref

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

def output_of(requires_grad: bool, has_bias: bool) -> str:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        add_bias_linear=has_bias,
        use_cpu_initialization=True,
        perform_initialization=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=linear)
    layer = TransformerLayer(config, TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)).eval()
    given = torch.ones(4, 1, 8, requires_grad=requires_grad)
    held = weakref.ref(given)
    with torch.no_grad():
        output = layer._forward_mlp(given)
    del given
    graph = "no graph" if output.grad_fn is None else type(output.grad_fn).__name__
    return f"{graph}, the input is {'kept' if held() is not None else 'freed'}"


print(f"plain input, no bias: {output_of(False, False)}")
print(f"plain input, bias: {output_of(False, True)}")
print(f"input that requires grad, no bias: {output_of(True, False)}")
PY
seen=$("$work/venv/bin/python" -W ignore "$work/layer.py" 2> "$work/errors" | grep input)
echo "$seen"
[ "$seen" = "plain input, no bias: no graph, the input is freed
plain input, bias: AddBackward0, the input is freed
input that requires grad, no bias: AddBackward0, the input is kept" ]
