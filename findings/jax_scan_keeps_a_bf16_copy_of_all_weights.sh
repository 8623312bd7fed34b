#!/usr/bin/env bash
# jax 0.10.2, flax 0.12.8: weights in fp32 that a layer casts to bf16 (Flax's `param_dtype=float32, dtype=bfloat16`) are kept
# for backward in bf16 too. In a loop over layers XLA may compute the cast again, but not in a scan, by which models of
# many layers are written: it stacks what each layer keeps, and so holds a bf16 copy of all layers' weights from forward
# to backward, 2 bytes a parameter whatever the number of tokens. `jax.checkpoint` around the layer keeps the fp32
# weights only, which are there anyway.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, the CPU, 16 layers of 256 x 256 over 8 tokens; what backward of the scan is given of
# the size of all weights, and of a Flax model:
#   a scan: bfloat16 (16, 256, 256)
#   a scan with jax.checkpoint: float32 (16, 256, 256)
#   a scan of flax.linen.Dense: bfloat16 (16, 256, 256)
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 flax==0.12.8 numpy
cat > "$folder/kept.py" <<'PY'
import flax.linen as nn
import jax
import jax.numpy as jnp

LAYERS, TOKENS, WIDTH = 16, 8, 256
x = jnp.ones((TOKENS, WIDTH), jnp.bfloat16)
weights = jnp.ones((LAYERS, WIDTH, WIDTH))


def layer(x, weight):
    return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None


def show(name, model, weights):
    _, backward = jax.vjp(model, weights)
    size = LAYERS * WIDTH * WIDTH
    kept = [f"{each.dtype} {each.shape}" for each in jax.tree.leaves(backward) if getattr(each, "size", 0) >= size]
    print(f"{name}: {', '.join(kept)}", flush=True)


show("a scan", lambda weights: jax.lax.scan(layer, x, weights)[0].sum(), weights)
show("a scan with jax.checkpoint", lambda weights: jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum(), weights)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16)(x)), None


model = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()
parameters = model.init(jax.random.key(0), x, None)
show("a scan of flax.linen.Dense", lambda parameters: model.apply(parameters, x, None)[0].sum(), parameters)
PY
"$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
