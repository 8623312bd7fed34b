#!/usr/bin/env bash
# transformers 5.24.0: with gradient accumulation, Trainer takes all micro-batches of an update from the loader before the
# first one is trained, to count their tokens (`get_batch_samples`, trainer.py), and accelerate's loader has then moved each
# to the device. They stay there until the update has ended. Tokens are small, but images, sound and video are not: 64
# micro-batches of four images of 1,024 x 1,024 in fp32 are 3.2 GB, where one micro-batch is 50 MB. So accumulation, with which
# people avoid large batches, has memory that grows with the whole batch.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, torch 2.13.0, accelerate 1.15.0; the most batches that are alive in a forward pass (one is
# fetched ahead), and how many the loader has moved to the device before the first one:
#   1 micro-batch an update: 2 alive, 1 moved
#   4 micro-batches an update: 5 alive, 4 moved
#   16 micro-batches an update: 17 alive, 16 moved
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cat > "$folder/batches.py" <<'PY'
import gc
import sys
import weakref

import accelerate.data_loader
import torch
import transformers

made, alive, moved = [], [], []
to_device = accelerate.data_loader.send_to_device


def send_to_device(batch, *args, **kwargs):
    moved.append(len(alive))
    return to_device(batch, *args, **kwargs)


accelerate.data_loader.send_to_device = send_to_device


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 4)

    def forward(self, pixel_values, labels, **_):
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        logits = self.linear(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows):
    pixels = torch.randn(len(rows), 64)
    made.append(weakref.ref(pixels))
    return {"pixel_values": pixels, "labels": torch.zeros(len(rows), dtype=torch.long)}


for count in (1, 4, 16):
    for each in (made, alive, moved):
        each.clear()
    arguments = transformers.TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=1, gradient_accumulation_steps=count, max_steps=2,
        report_to=[], use_cpu=True, remove_unused_columns=False, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )
    trainer = transformers.Trainer(
        model=Model(), args=arguments, train_dataset=[{"row": row} for row in range(64)], data_collator=collate
    )
    trainer.train()
    name = "micro-batch" if count == 1 else "micro-batches"
    print(f"{count} {name} an update: {max(alive)} alive, {moved.count(0)} moved")
PY
"$folder/venv/bin/python" "$folder/batches.py" "$folder/out" 2> "$folder/errors" | grep alive > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
