#!/usr/bin/env bash
# jax 0.10.2: `jax.checkpoint` around the layers of a loop in Python frees nothing in a program that is compiled for the CPU.
# XLA's CPU compiler takes away the barriers that keep recomputation apart (`optimization_barrier`), and then merges it
# with the first computation as a common subexpression. So `compiled.memory_analysis()`, with which memory is planned
# without an accelerator, and memory measured on a CPU, are those of a model without checkpoints, with `prevent_cse` or
# without. In a scan, recomputation is in another loop than the first computation, and checkpoints work.
# Guess before the run: so, with a doubt.
# Seen on 2026-11-30, Python 3.11, 16 layers of two matrices and a tanh; temporary memory of the compiled gradient, in
# sizes of a layer's input, and operations of the compiled program that compute a tanh of a layer:
#   loop, no checkpoints: 84 inputs, 16 times tanh
#   loop, checkpoints: 84 inputs, 16 times tanh
#   loop, checkpoints with prevent_cse=False: 84 inputs, 16 times tanh
#   scan, no checkpoints: 151 inputs
#   scan, checkpoints: 27 inputs
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 numpy
cat > "$folder/layers.py" <<'PY'
import re

import jax
import jax.numpy as jnp

LAYERS, TOKENS, WIDTH = 16, 4096, 256
x = jnp.ones((TOKENS, WIDTH))
weights = jnp.ones((LAYERS, WIDTH, 4 * WIDTH)), jnp.ones((LAYERS, 4 * WIDTH, WIDTH))


def layer(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def loop(weights, layer):
    result = x
    for up, down in zip(*weights, strict=True):
        result = layer(result, up, down)
    return result.sum()


def scan(weights, layer):
    return jax.lax.scan(lambda x, each: (layer(x, *each), None), x, weights)[0].sum()


def show(name, model, layer, counts=True):
    separate = tuple(list(each) for each in weights) if model is loop else weights
    compiled = jax.jit(jax.grad(lambda weights: model(weights, layer))).lower(separate).compile()
    inputs = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
    times = len(re.findall(r" tanh\(", compiled.as_text()))
    print(f"{name}: {inputs:.0f} inputs" + (f", {times} times tanh" if counts else ""), flush=True)


show("loop, no checkpoints", loop, layer)
show("loop, checkpoints", loop, jax.checkpoint(layer))
show("loop, checkpoints with prevent_cse=False", loop, jax.checkpoint(layer, prevent_cse=False))
show("scan, no checkpoints", scan, layer, counts=False)
show("scan, checkpoints", scan, jax.checkpoint(layer), counts=False)
PY
"$folder/venv/bin/python" "$folder/layers.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
