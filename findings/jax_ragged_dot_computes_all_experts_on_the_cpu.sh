#!/usr/bin/env bash
# jax 0.10.2: `jax.lax.ragged_dot`, the grouped product that mixtures of experts are written with, multiplies each row with the
# matrix of its own group. Compiled for the CPU it is one dense product: all rows are copied once for each group, with
# zeros for the rows of other groups, and multiplied with the matrices of all groups. So memory and operations that are
# read without an accelerator (`memory_analysis`, `cost_analysis`) grow with the number of experts, where those of the
# model do not: 128 experts need 128 copies of the tokens, in backward more than twice that.
# Guess before the run: 1 to 2 tensors of the size of its input.
# Seen on 2026-12-01, Python 3.11, 1,024 rows of 256 numbers, matrices of 256 x 256, fp32; temporary memory in sizes of the
# rows, operations in those of one matrix a row:
#   4 groups: forward 5, gradient 14; operations of forward 4
#   16 groups: forward 20, gradient 52; operations of forward 16
#   64 groups: forward 80, gradient 208; operations of forward 65
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2
cat > "$folder/ragged.py" <<'PY'
import jax
import jax.numpy as jnp

ROWS, WIDTH = 1_024, 256


def forward(rows, matrices, sizes):
    return jax.lax.ragged_dot(rows, matrices, sizes)


def loss(rows, matrices, sizes):
    return (forward(rows, matrices, sizes) ** 2).sum()


for groups in (4, 16, 64):
    rows, matrices = jnp.ones((ROWS, WIDTH)), jnp.ones((groups, WIDTH, WIDTH))
    sizes = jnp.full((groups,), ROWS // groups)
    compiled = [
        jax.jit(each).lower(rows, matrices, sizes).compile() for each in (forward, jax.grad(loss, argnums=(0, 1)))
    ]
    memory = [each.memory_analysis().temp_size_in_bytes / rows.nbytes for each in compiled]
    operations = compiled[0].cost_analysis()["flops"] / (2 * ROWS * WIDTH * WIDTH)
    print(f"{groups} groups: forward {memory[0]:.0f}, gradient {memory[1]:.0f}; operations of forward {operations:.0f}")
PY
"$folder/venv/bin/python" "$folder/ragged.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
