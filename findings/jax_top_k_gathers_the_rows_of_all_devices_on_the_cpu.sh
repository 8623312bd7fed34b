#!/usr/bin/env bash
# jax 0.10.2: `jax.lax.top_k` of rows that are sharded over devices needs nothing of other rows, as a router that chooses
# experts for each token does not. Compiled for the CPU, it gathers all rows on each device first: top_k is a call that the
# partitioner cannot divide there. `argsort`, which computes more, is divided. So memory and communication of a mixture of
# experts that are read from a program for several devices of the CPU grow with the tokens of all devices.
# Guess before the run: neither gathers anything.
# Seen on 2026-12-01, Python 3.11, 8 devices of the CPU, rows of 64 numbers in fp32; what each device gathers:
#   top_k of 1,024 rows: f32[1024,64]
#   argsort of 1,024 rows: nothing
#   top_k of 4,096 rows: f32[4096,64]
#   argsort of 4,096 rows: nothing
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2
cat > "$folder/top.py" <<'PY'
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
CHOICES = {"top_k": lambda rows: jax.lax.top_k(rows, 4)[1], "argsort": lambda rows: jnp.argsort(rows, axis=-1)[:, -4:]}
for count in (1_024, 4_096):
    rows = jax.device_put(jnp.ones((count, 64)), NamedSharding(mesh, PartitionSpec("data")))
    for name, choose in CHOICES.items():
        program = jax.jit(choose).lower(rows).compile().as_text()
        gathered = re.findall(r"= (\w+\[[\d,]*\])\S* all-gather", program)
        print(f"{name} of {count:,} rows: {', '.join(gathered) or 'nothing'}")
PY
"$folder/venv/bin/python" "$folder/top.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
