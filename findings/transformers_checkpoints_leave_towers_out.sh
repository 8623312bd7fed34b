#!/usr/bin/env bash
# transformers 5.24.0: `gradient_checkpointing_enable()` reaches layers that derive from GradientCheckpointingLayer, and some
# towers' layers do not: those of Llama 3.2 Vision's images (MllamaVisionEncoderLayer), and of the sound of Gemma 3n, Gemma 4
# and Phi-4 multimodal. The call is accepted, `is_gradient_checkpointing` is True, and a tower that trains keeps all that it
# keeps without: in the models named the text's layers are checkpointed beside it.
# Guess before the run: no causal model has such layers, or few; found by reading all of them.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, the CPU, tiny models in training; bytes that forward keeps for backward,
# as a share of those without checkpoints:
#   MllamaVisionModel: is_gradient_checkpointing True, keeps 1.00
#   MllamaTextModel: is_gradient_checkpointing True, keeps 0.05
#   SiglipVisionModel: is_gradient_checkpointing True, keeps 0.15
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0 numpy pillow
cat > "$folder/towers.py" <<'PY'
import torch
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig
from transformers.models.mllama.modeling_mllama import MllamaTextModel, MllamaVisionModel
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

SIZES = {"hidden_size": 64, "intermediate_size": 256}


def kept(model, inputs):
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model(**inputs)
    del outputs
    return sum(each.nbytes() for address, each in storages.items() if address not in weights)


def show(model, inputs):
    model.train()
    whole = kept(model, inputs)
    model.gradient_checkpointing_enable()
    share = kept(model, inputs) / whole
    name = type(model).__name__
    print(f"{name}: is_gradient_checkpointing {model.is_gradient_checkpointing}, keeps {share:.2f}", flush=True)


config = MllamaVisionConfig(
    **SIZES, image_size=56, patch_size=14, num_hidden_layers=8, num_global_layers=4, attention_heads=4,
    vision_output_dim=128, intermediate_layers_indices=[3], max_num_tiles=1, supported_aspect_ratios=[[1, 1]],
)
image = {
    "pixel_values": torch.randn(1, 1, 1, 3, 56, 56),
    "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
    "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
}
show(MllamaVisionModel(config), image)
config = MllamaTextConfig(
    **SIZES, vocab_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    cross_attention_layers=[], pad_token_id=0,
)
words = torch.arange(64)[None]
show(MllamaTextModel(config), {"input_ids": words, "attention_mask": torch.ones_like(words), "use_cache": False})
config = SiglipVisionConfig(**SIZES, image_size=56, patch_size=14, num_hidden_layers=8, num_attention_heads=4)
show(SiglipVisionModel(config), {"pixel_values": torch.randn(4, 3, 56, 56)})
PY
"$folder/venv/bin/python" "$folder/towers.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
