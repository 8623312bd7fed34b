#!/usr/bin/env bash
# jax 0.10.2, optax 0.2.8: moments of sharded parameters are sharded too if `optimizer.init(parameters)` is called as it is, and
# whole on every device if it is called under jit, as initialization of large models is: `zeros_like` of a tracer knows a
# shape and a type, not a sharding, and the compiler then gives all of it to each device. The same happens to the sum of
# gradients over micro-batches in a scan that begins with `zeros_like`. 8 bytes and 4 bytes a parameter so do not shrink with
# the number of devices, and nothing is said. `out_shardings` prevents both. On a mesh of explicit axes, as `jax.make_mesh`
# makes it by itself now, a tracer does know its sharding; the axes of a `Mesh` are automatic.
# Guess before the run: both are sharded as the parameters are, with a doubt about the first.
# Seen on 2026-12-01, Python 3.11, 8 devices of the CPU; what a device has, in sizes of its part of the parameters:
#   Auto axes: moments of init 2.0, under jit 16.0, with out_shardings 2.0, summed gradients 8.0, summed with out_shardings 1.0
#   Explicit axes: moments of init 2.0, under jit 2.0, with out_shardings 2.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 optax==0.2.8
cat > "$folder/shards.py" <<'PY'
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

LAYERS, WIDTH = 4, 256


def on_a_device(tree):
    return sum(each.addressable_shards[0].data.nbytes for each in jax.tree.leaves(tree) if each.ndim)


def loss(weights, rows):
    return (jax.lax.scan(lambda hidden, weight: (jnp.tanh(hidden @ weight), None), rows, weights)[0] ** 2).mean()


def summed(weights, batches):
    def add(total, rows):
        return total + jax.grad(loss)(weights, rows), None

    return jax.lax.scan(add, jnp.zeros_like(weights), batches)[0]


for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        of_weights = NamedSharding(mesh, PartitionSpec(None, None, "data"))
        of_batches = NamedSharding(mesh, PartitionSpec(None, "data"))
        weights = jax.device_put(jnp.ones((LAYERS, WIDTH, WIDTH)), of_weights)
        batches = jax.device_put(jnp.ones((2, 64, WIDTH)), of_batches)
        part = on_a_device(weights)
        init = optax.adam(1e-3).init
        state = jax.tree.map(lambda each: of_weights if each.ndim else NamedSharding(mesh, PartitionSpec()), init(weights))
        seen = {"moments of init": init(weights), "under jit": jax.jit(init)(weights)}
        seen["with out_shardings"] = jax.jit(init, out_shardings=state)(weights)
        if kind == AxisType.Auto:
            seen["summed gradients"] = jax.jit(summed)(weights, batches)
            seen["summed with out_shardings"] = jax.jit(summed, out_shardings=of_weights)(weights, batches)
        print(f"{kind.name} axes: " + ", ".join(f"{name} {on_a_device(tree) / part:.1f}" for name, tree in seen.items()))
PY
"$folder/venv/bin/python" "$folder/shards.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
