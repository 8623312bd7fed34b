#!/usr/bin/env bash
# NeMo Automodel 0.7.0: LoRA freezes the whole model, and tensor parallelism with sequence parallelism makes the norms
# of all layers trainable again. torch's SequenceParallel gives a module new parameters, which require gradients;
# translate_to_lora therefore puts a style of Automodel's own in its place, but only where its class is SequenceParallel
# itself. The plans for Llama and Qwen give the norms of layers a subclass, SequenceParallelAllGatherActivation. So these
# norms get gradients and moments, and move, although the adapters alone are saved.
# Seen on 2026-11-29, Python 3.11, torch 2.13.0, one rank over gloo:
#   a frozen norm under SequenceParallel is frozen
#   a frozen norm under SequenceParallelAllGatherActivation is trained
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/train.py" <<'PY'
import logging
import os

logging.disable(logging.WARNING)
import torch
from nemo_automodel.components.distributed.optimized_tp_plans import SequenceParallelAllGatherActivation
from nemo_automodel.components.distributed.parallel_styles import translate_to_lora
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

meeting = "file://" + os.path.join(os.path.dirname(__file__), "ranks")
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=meeting)
mesh = init_device_mesh("cpu", (1,))
for style in (SequenceParallel(), SequenceParallelAllGatherActivation(use_local_output=False)):
    norm, name = torch.nn.RMSNorm(8).requires_grad_(False), type(style).__name__
    parallelize_module(norm, mesh, translate_to_lora(style))
    print(f"a frozen norm under {name} is {'trained' if norm.weight.requires_grad else 'frozen'}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy packaging pyyaml
"$folder/venv/bin/python" -m pip install --quiet --no-deps nemo-automodel==0.7.0
"$folder/venv/bin/python" "$folder/train.py" 2> "$folder/errors" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
a frozen norm under SequenceParallel is frozen
a frozen norm under SequenceParallelAllGatherActivation is trained
SEEN
