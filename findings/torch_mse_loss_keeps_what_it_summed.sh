#!/usr/bin/env bash
# torch 2.13.0: the scalar that mse_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss return is as large in
# memory as their input: its storage is made for the loss of each element, and then the tensor is resized to one element,
# which never shrinks a storage. So long as the scalar lives, also detached, all of it stays allocated, and torch.save
# writes all of it. huber_loss, l1_loss, binary_cross_entropy_with_logits and cross_entropy return 4 bytes. (For mse_loss
# and smooth_l1_loss it is the shape function that every device shares: `maybe_get_output().resize_({})`,
# aten/src/ATen/native/Loss.cpp.) On the meta device the scalar has 4 bytes: estimates do not see it.
# Seen on 2026-11-29, Python 3.11, on the CPU, inputs of 1,000 x 1,000 in fp32, the loss detached:
#   mse_loss: 1 element, storage of 4,000,000 bytes, torch.save writes 4.0 MB; on meta 4 bytes
#   smooth_l1_loss: 1 element, storage of 4,000,000 bytes, torch.save writes 4.0 MB; on meta 4 bytes
#   binary_cross_entropy: 1 element, storage of 4,000,000 bytes, torch.save writes 4.0 MB; on meta 4 bytes
#   soft_margin_loss: 1 element, storage of 4,000,000 bytes, torch.save writes 4.0 MB; on meta 4 bytes
#   huber_loss: 1 element, storage of 4 bytes, torch.save writes 0.0 MB; on meta 4 bytes
#   l1_loss: 1 element, storage of 4 bytes, torch.save writes 0.0 MB; on meta 4 bytes
#   binary_cross_entropy_with_logits: 1 element, storage of 4 bytes, torch.save writes 0.0 MB; on meta 4 bytes
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cat > "$folder/losses.py" <<'PY'
import io

import torch
from torch.nn import functional

given = torch.full((1000, 1000), 0.5, requires_grad=True)
target = torch.ones(1000, 1000)
names = ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"]
names += ["huber_loss", "l1_loss", "binary_cross_entropy_with_logits"]
for name in names:
    loss = getattr(functional, name)(given, target).detach()
    on_meta = getattr(functional, name)(given.detach().to("meta"), target.to("meta"))
    torch.save(loss, written := io.BytesIO())
    print(
        f"{name}: {loss.numel()} element, storage of {loss.untyped_storage().nbytes():,} bytes, "
        f"torch.save writes {len(written.getvalue()) / 1e6:.1f} MB; on meta {on_meta.untyped_storage().nbytes()} bytes"
    )
PY
"$folder/venv/bin/python" -W ignore "$folder/losses.py" | tee "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
