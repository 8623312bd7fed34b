#!/usr/bin/env bash
# galore-torch 1.0, torch 2.13.0: GaLore keeps moments of a low rank, and a matrix of `rank` singular vectors for each
# weight, which projects gradients. With fp32 weights that matrix is `Vh[:rank, :]` as it is, a view
# (`get_orthogonal_matrix`, galore_projector.py), so that all singular vectors stay allocated, and torch.save writes them
# all. For a square weight that is a matrix of the weight's size, half of what Adam's state takes. With bf16 weights the
# type is changed, which copies the view alone. The matrix is in an object (`GaLoreProjector`) in the optimizer's state,
# where a sum over the state's tensors finds nothing. apollo-torch 1.0.3 does the same with `proj="svd"`, and not with
# "random".
# Guess before the run, from the source: the whole matrix in fp32, the part in bf16.
# Seen on 2026-11-30, Python 3.11, a weight of 1,024 x 1,024, rank 16, two steps; bytes of state for each parameter:
#   GaLore, torch.float32: moments 0.125, vectors 0.062 in storages of 4.000, torch.save of the state 4.13
#   GaLore, torch.bfloat16: moments 0.062, vectors 0.031 in storages of 0.031, torch.save of the state 0.10
#   APOLLO with svd, torch.float32: moments 0.125, vectors 0.062 in storages of 4.000, torch.save of the state 4.13
#   APOLLO with random, torch.float32: moments 0.125, vectors 0.062 in storages of 0.062, torch.save of the state 0.19
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 galore-torch==1.0 apollo-torch==1.0.3
cat > "$folder/state.py" <<'PY'
import io

import torch
from apollo_torch import APOLLOAdamW
from galore_torch import GaLoreAdamW

SIZE = 1024


def show(name, optimizer, dtype, **options):
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE, dtype=dtype))
    group = {"params": [weight], "rank": 16, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std", **options}
    optimizer = optimizer([group], lr=1e-3)
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    state = optimizer.state[weight]
    moments = state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    vectors = state["projector"].ortho_matrix
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    numbers = SIZE * SIZE
    print(
        f"{name}, {dtype}: moments {moments / numbers:.3f}, vectors {vectors.nbytes / numbers:.3f} in storages of "
        f"{vectors.untyped_storage().nbytes() / numbers:.3f}, torch.save of the state {len(file.getvalue()) / numbers:.2f}"
    )


show("GaLore", GaLoreAdamW, torch.float32)
show("GaLore", GaLoreAdamW, torch.bfloat16)
show("APOLLO with svd", APOLLOAdamW, torch.float32, proj="svd", scale_type="channel")
show("APOLLO with random", APOLLOAdamW, torch.float32, proj="random", scale_type="channel")
PY
"$folder/venv/bin/python" "$folder/state.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
