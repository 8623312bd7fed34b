#!/usr/bin/env bash
# liger-kernel 0.8.5, torch 2.13.0: Liger's fused losses in plain torch (liger_kernel.chunked_loss) compute gradients in
# forward, chunk by chunk, and hold them until backward. Where the output layer is frozen, as under LoRA, those for
# preferences leave its gradient out (`weight.requires_grad`). Those for distillation, JSD and cosine similarity, compute
# it all the same, and hold a matrix of the vocabulary's size through backward that nobody reads: 0.6 GB in bf16 for
# 151,936 words of 2,048 numbers.
# Guess before the run: DPO's and GRPO's loss, too, compute the frozen layer's gradient.
# Seen on 2026-11-30, Python 3.11, bf16, 256 rows of 2,000 logits; bytes that forward leaves, in sizes of the output layer:
#   DPO: trained 1.1, frozen 0.1
#   ORPO: trained 1.1, frozen 0.1
#   GRPO: trained 1.1, frozen 0.1
#   JSD: trained 1.1, frozen 1.1
#   cosine similarity: trained 1.1, frozen 1.1
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps liger-kernel==0.8.5
cat > "$folder/losses.py" <<'PY'
import weakref

import torch
from liger_kernel.chunked_loss import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearORPOLoss,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS, TOKENS, WIDTH, WORDS = 8, 32, 64, 2000


class Meter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(results):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive.keys() | given:
                self.alive[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata)
        return results

    def free(self, address):
        self.bytes -= self.alive.pop(address)


def numbers(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


labels = torch.randint(0, WORDS, (ROWS, TOKENS))
of_reference, reference = numbers(ROWS, TOKENS, WIDTH), numbers(WORDS, WIDTH)
flat = of_reference.flatten(0, 1)
LOSSES = {
    "DPO": lambda x, head: LigerFusedLinearDPOLoss(compiled=False)(
        head, x, labels, ref_input=of_reference, ref_weight=reference
    ),
    "ORPO": lambda x, head: LigerFusedLinearORPOLoss(compiled=False)(head, x, labels),
    "GRPO": lambda x, head: LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=False, beta=0.0)(
        x, head, labels, torch.ones(ROWS, TOKENS), torch.randn(ROWS)
    ),
    "JSD": lambda x, head: LigerFusedLinearJSDLoss(compiled=False, chunk_size=32)(
        x.flatten(0, 1), head, flat, reference, labels.flatten()
    ),
    "cosine similarity": lambda x, head: LigerFusedLinearCosineSimilarityLoss(compiled=False, chunk_size=32)(
        x.flatten(0, 1), head, flat, reference, labels.flatten()
    ),
}
for name, loss in LOSSES.items():
    left = []
    for is_trained in (True, False):
        head, x = numbers(WORDS, WIDTH).requires_grad_(is_trained), numbers(ROWS, TOKENS, WIDTH).requires_grad_()
        with Meter() as meter:
            result = loss(x, head)
            left.append(meter.bytes / head.nbytes)
            (result[0] if isinstance(result, tuple) else result).backward()
        assert (head.grad is not None) is is_trained and x.grad is not None
    print(f"{name}: trained {left[0]:.1f}, frozen {left[1]:.1f}")
PY
"$folder/venv/bin/python" -W ignore "$folder/losses.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
