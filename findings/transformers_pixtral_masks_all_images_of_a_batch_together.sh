#!/usr/bin/env bash
# transformers 5.24.0: the vision tower of Pixtral and Mistral Small 3.1 lays the patches of all images of a batch in one
# row, and keeps images apart by one mask of all patches by all patches (`generate_block_attention_mask`, modeling_pixtral.py).
# With sdpa, the default, memory so grows with the square of the number of images: 2 bytes for each pair, kept for backward.
# 32 images of 1,024 x 1,024 in patches of 16 are 131,072 patches, and a mask of 34 GB, where each image for itself needs one
# of 34 MB or none. With flash attention there is no mask.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, bf16, images of 256 patches; kept for backward in two layers:
#   1 image: mask 131,072 bytes, other 6,004 bytes a patch
#   4 images: mask 2,097,152 bytes, other 6,004 bytes a patch
#   16 images: mask 33,554,432 bytes, other 6,004 bytes a patch
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/tower.py" <<'PY'
import torch
import transformers
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

SIDE, PATCH = 128, 8
config = transformers.PixtralVisionConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=PATCH
)
model = PixtralVisionModel(config).to(torch.bfloat16)
weights = {each.untyped_storage()._cdata for each in model.parameters()}

for images in (1, 4, 16):
    patches = images * (SIDE // PATCH) ** 2
    masks, others = {}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            group = masks if tuple(tensor.shape[-2:]) == (patches, patches) else others
            group[storage._cdata] = storage.nbytes()
        return tensor

    pixels = torch.randn(images, 3, SIDE, SIDE, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(pixels, image_sizes=torch.tensor([(SIDE, SIDE)] * images))
    name = "image" if images == 1 else "images"
    print(f"{images} {name}: mask {sum(masks.values()):,} bytes, other {sum(others.values()) // patches:,} bytes a patch")
PY
"$folder/venv/bin/python" "$folder/tower.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
