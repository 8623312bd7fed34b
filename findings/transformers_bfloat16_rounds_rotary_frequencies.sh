#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0: `model.bfloat16()` (and `.to(torch.bfloat16)`) is not what `dtype=torch.bfloat16`
# is when a model is built or loaded: it also casts the buffer with the frequencies of the rotary embedding. The angles are
# then computed in fp32 from rounded frequencies, so that their error grows with the position. No parameter and no
# shape shows it.
# Seen on 2026-11-29, Python 3.11, a Llama with heads of 128:
#   built with dtype=bfloat16: frequencies in torch.float32, largest error of an angle at position 100: 0.00, at 4,096: 0.00
#   .bfloat16() after it was built: frequencies in torch.bfloat16, largest error of an angle at position 100: 0.12, at 4,096: 5.01
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cat > "$folder/angles.py" <<'PY'
import torch
import transformers

config = transformers.LlamaConfig(
    num_hidden_layers=1, hidden_size=256, num_attention_heads=2, head_dim=128, intermediate_size=64, vocab_size=64
)
exact = 1 / 10_000 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
ways = {
    "built with dtype=bfloat16": transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
    ".bfloat16() after it was built": transformers.AutoModelForCausalLM.from_config(config).bfloat16(),
}
for name, model in ways.items():
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    frequencies = model.model.rotary_emb.inv_freq
    error = (frequencies.double() - exact).abs().max().item()
    print(
        f"{name}: frequencies in {frequencies.dtype}, largest error of an angle at position 100: {100 * error:.2f}, "
        f"at 4,096: {4096 * error:.2f}"
    )
PY
"$folder/venv/bin/python" -W ignore "$folder/angles.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
