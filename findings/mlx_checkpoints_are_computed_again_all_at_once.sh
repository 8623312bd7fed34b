#!/usr/bin/env bash
# mlx 0.32.4: `mx.checkpoint` (`nn.utils.checkpoint`) lowers the memory of a training step little, and that of a small model
# not at all. Recomputation of a layer needs only the layer's input, and MLX orders a graph breadth first, up to 20 arrays
# wide, before it goes deep: so it computes many layers again before backward has reached them, and holds what they have.
# Forward alone keeps the inputs, as it should. With the environment's MLX_BFS_MAX_WIDTH=1 the same step needs a sixth.
# Guess before the run: the peak is that of the inputs and of one layer.
# Seen on 2026-11-30, Python 3.11, the CPU, layers of two linears and a tanh; each operation waits for the one before it;
# what checkpoints leave of the largest memory that loss and gradients take, beyond weights and data:
#   8 layers: 1.0 of it, with MLX_BFS_MAX_WIDTH=1 0.3
#   32 layers: 0.4 of it, with MLX_BFS_MAX_WIDTH=1 0.2
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlx[cpu]==0.32.4
cat > "$folder/layers.py" <<'PY'
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn

WIDTH, TOKENS = 32, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def __call__(self, x):
        return x + self.down(mx.tanh(self.up(x)))


def peak(num_layers, has_checkpoints):
    model = nn.Sequential(*[Layer() for _ in range(num_layers)])
    data = mx.random.normal((TOKENS, WIDTH))
    mx.eval(model.parameters(), data)

    def loss(model, x):
        for layer in model.layers:
            x = nn.utils.checkpoint(layer)(x) if has_checkpoints else layer(x)
        return x.square().mean()

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(nn.value_and_grad(model, loss)(model, data))
    return (mx.get_peak_memory() - before) / (TOKENS * WIDTH * 4)


if len(sys.argv) > 1:
    mx.set_default_device(mx.cpu)
    mx.set_memory_limit(1)  # each operation waits until the memory of those before it is free
    mx.set_cache_limit(0)
    num_layers = int(sys.argv[1])
    print(f"{peak(num_layers, True) / peak(num_layers, False):.1f}")
else:
    for num_layers in ("8", "32"):
        seen = []
        for width in ("20", "1"):
            environment = os.environ | {"MLX_BFS_MAX_WIDTH": width}
            command = [sys.executable, __file__, num_layers]
            seen += subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        print(f"{num_layers} layers: {seen[0]} of it, with MLX_BFS_MAX_WIDTH=1 {seen[1]}")
PY
"$folder/venv/bin/python" "$folder/layers.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
