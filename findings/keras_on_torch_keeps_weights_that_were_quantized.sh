#!/usr/bin/env bash
# keras 3.15.1 on torch 2.13.0: `quantize("int8")` of a Sequential model frees nothing. A Sequential that was given an Input
# wraps a functional model, which has noted the kernels as torch parameters when it was built (`_torch_params`,
# backend/torch/layer.py). After it has quantized, Keras notes them again, so that the old ones can go (`_post_quantize`,
# models/model.py), but not in that inner model. So the fp32 kernels stay beside the new ones, and `model.parameters()`
# yields them, where `summary()` states a quarter of the bytes. A model that was written as a functional one frees them.
# Guess before the run: int8 kernels only, as summary() says.
# Seen on 2026-11-30, Python 3.11, the CPU, four layers of 256 x 256 numbers (1,048,576 bytes in fp32):
#   Sequential, int8: variables of the model 266,240 bytes; old kernels alive 4 of 4, 1,048,576 bytes
#   Sequential, int4: variables of the model 145,408 bytes; old kernels alive 4 of 4, 1,048,576 bytes
#   Functional, int8: variables of the model 266,240 bytes; old kernels alive 0 of 4, 0 bytes
#   a layer alone, int8: variables of the model 66,560 bytes; old kernels alive 0 of 1, 0 bytes
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 keras==3.15.1
cat > "$folder/quantize.py" <<'PY'
import gc
import weakref

import keras
import torch

torch.set_default_device("cpu")
WIDTH = 256


def functional():
    x = given = keras.Input((WIDTH,))
    for _ in range(4):
        x = keras.layers.Dense(WIDTH, use_bias=False)(x)
    return keras.Model(given, x)


def sequential():
    return keras.Sequential([keras.Input((WIDTH,)), *[keras.layers.Dense(WIDTH, use_bias=False) for _ in range(4)]])


def alone():
    layer = keras.layers.Dense(WIDTH, use_bias=False)
    layer.build((None, WIDTH))
    return layer


def show(name, model, mode):
    before = [weakref.ref(each.value.untyped_storage()) for each in model.variables]
    model.quantize(mode)
    gc.collect()
    alive = [storage().nbytes() for storage in before if storage() is not None]
    size = sum(each.value.nbytes for each in model.variables)
    print(
        f"{name}, {mode}: variables of the model {size:,} bytes; "
        f"old kernels alive {len(alive)} of {len(before)}, {sum(alive):,} bytes"
    )


show("Sequential", sequential(), "int8")
show("Sequential", sequential(), "int4")
show("Functional", functional(), "int8")
show("a layer alone", alone(), "int8")
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" -W ignore "$folder/quantize.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
