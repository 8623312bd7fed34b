#!/usr/bin/env bash
# optax 0.2.8, jax 0.10.2: optax.contrib.muon takes Muon for arrays of two dimensions and Adam for all others
# (`'muon' if x.ndim == 2 else 'adam'`, optax/contrib/_muon.py). Where layers are stacked to be scanned, as JAX programs
# for large models do, a layer's matrices have three dimensions and its norms two. So all matrices of all layers are
# trained by Adam, with twice Muon's state, and the norms by Muon, which mixes the layers. Nothing is said. The argument
# `muon_weight_dimension_numbers` names the two dimensions of a matrix.
# Guess before the run: state of one array for each weight, stacked or not.
# Seen on 2026-11-30, Python 3.11, on a CPU; state in sizes of what is trained:
#   a list of layers: state of the matrices 1.0, of the norms 2.0
#   stacked layers: state of the matrices 2.0, of the norms 1.0
#   stacked layers, with dimension numbers: state of the matrices 1.0, of the norms 2.0
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optax==0.2.8 'jax[cpu]==0.10.2' numpy
cat > "$folder/state.py" <<'PY'
import jax
import jax.numpy as jnp
import optax

LAYERS, ROWS, COLUMNS = 8, 64, 128
layers = [{"matrix": jnp.ones((ROWS, COLUMNS)), "norm": jnp.ones(COLUMNS)} for _ in range(LAYERS)]
stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
dimensions = {"matrix": optax.contrib.MuonDimensionNumbers(1, 2), "norm": None}


def show(name, parameters, **options):
    state = optax.contrib.muon(1e-3, **options).init(parameters)
    sizes = {"matrix": 0, "norm": 0}
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        for each in sizes:
            sizes[each] += array.nbytes if each in jax.tree_util.keystr(path) else 0
    matrices, norms = sizes["matrix"] / (4 * LAYERS * ROWS * COLUMNS), sizes["norm"] / (4 * LAYERS * COLUMNS)
    print(f"{name}: state of the matrices {matrices:.1f}, of the norms {norms:.1f}")


show("a list of layers", layers)
show("stacked layers", stacked)
show("stacked layers, with dimension numbers", stacked, muon_weight_dimension_numbers=dimensions)
PY
"$folder/venv/bin/python" "$folder/state.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
