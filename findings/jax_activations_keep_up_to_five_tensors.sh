#!/usr/bin/env bash
# jax 0.10.2: backward of silu, gelu or tanh needs one tensor, their input or result, and torch keeps that one. jax keeps the
# factors into which differentiation has divided their derivatives: three for silu, five for gelu, five for the gate of
# SwiGLU (torch: three). Within one jitted function XLA can compute them again, but not across the boundary of a scan,
# by which models for many layers are written: there the residuals of all layers are stacked in memory. `jax.checkpoint`
# around the activation function alone leaves its input.
# Guess before the run: silu three, gelu four or more, relu one; tanh was not guessed.
# Seen on 2026-11-30, Python 3.11, the CPU, fp32; tensors of the input's size that jax.vjp keeps, and the temporary memory
# of the compiled gradient of a scan over 16 layers, in activations a layer beyond those that a linear layer needs:
#   relu: kept 1, in a scan 0.3
#   softmax: kept 1, in a scan 1.0
#   tanh: kept 2, in a scan 2.0
#   silu: kept 3, in a scan 3.0
#   gelu: kept 5, in a scan 5.0
#   gelu without approximation: kept 3, in a scan 3.2
#   silu in jax.checkpoint: kept 1, in a scan 1.0
#   gelu in jax.checkpoint: kept 1, in a scan 1.0
#   silu(gate) * up: kept 5
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
cat > "$folder/kept.py" <<'PY'
import jax
import jax.numpy as jnp

TOKENS, WIDTH, LAYERS = 256, 128, 16
x = jnp.ones((TOKENS, WIDTH))
weights = jnp.ones((LAYERS, WIDTH, WIDTH))


def kept(function, *inputs):
    """Returns how many fp32 tensors of the input's size jax.vjp keeps."""
    _, backward = jax.vjp(function, *inputs)
    arrays = {each.unsafe_buffer_pointer(): each for each in jax.tree.leaves(backward) if hasattr(each, "nbytes")}
    return sum(each.nbytes == x.nbytes for each in arrays.values())


def temporary(activation):
    """Returns the temporary bytes of the gradient of a scan, in activations a layer."""

    def loss(weights):
        return jax.lax.scan(lambda hidden, weight: (activation(hidden @ weight), None), x, weights)[0].sum()

    analysis = jax.jit(jax.grad(loss)).lower(weights).compile().memory_analysis()
    return analysis.temp_size_in_bytes / x.nbytes / LAYERS


FUNCTIONS = {
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu without approximation": lambda x: jax.nn.gelu(x, approximate=False),
    "silu in jax.checkpoint": jax.checkpoint(jax.nn.silu),
    "gelu in jax.checkpoint": jax.checkpoint(jax.nn.gelu),
}
linear = temporary(lambda x: x)
for name, function in FUNCTIONS.items():
    print(f"{name}: kept {kept(function, x)}, in a scan {temporary(function) - linear:.1f}")
print(f"silu(gate) * up: kept {kept(lambda gate, up: jax.nn.silu(gate) * up, x, x + 1)}")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/kept.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
