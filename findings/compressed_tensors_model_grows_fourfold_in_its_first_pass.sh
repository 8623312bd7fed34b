#!/usr/bin/env bash
# compressed-tensors 0.20.0, transformers 5.24.0: a checkpoint of 4 bits that is loaded with `dequantize=False` takes half a
# byte a weight, until the model is called for the first time. That call makes bf16 weights of all layers and drops the
# packed ones, for good: 2 bytes a weight from then on, whatever loading has shown. (`decompress_model`, which a hook calls.)
# Of this the logs show a progress bar alone. To train adapters over such a model so needs what a model in bf16 needs.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, a Llama of two layers; bytes for each weight of the quantized linears:
#   loaded: 0.52
#   after a forward pass of 4 tokens: 2.02
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0 accelerate==1.15.0 numpy
cat > "$folder/model.py" <<'PY'
import json
import pathlib
import sys

import torch
import transformers
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

folder = pathlib.Path(sys.argv[1])


def save():
    """Writes a small model of 4 bits."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    scheme = preset_name_to_scheme("W4A16", targets=["Linear"])
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen", format="pack-quantized"
    )
    apply_quantization_config(model, quantization)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.fill_(0.01)
    ModelCompressor(quantization_config=quantization).compress_model(model)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    described = json.loads(json.dumps(quantization.model_dump(), default=str))
    described |= {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": described}))


def show(name, model):
    linears = [each for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)]
    tensors = [each for linear in linears for each in linear.state_dict().values()]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    print(f"{name}: {sum(storages.values()) / weights:.2f}")


save()
config = transformers.CompressedTensorsConfig(dequantize=False)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
show("loaded", model)
with torch.no_grad():
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
show("after a forward pass of 4 tokens", model)
PY
"$folder/venv/bin/python" "$folder/model.py" "$folder/saved" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
