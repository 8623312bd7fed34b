#!/usr/bin/env bash
# transformers 5 renames a key of saved files: a Qwen3-MoE config with 64 experts that 5.24.0 saves says
# "num_local_experts": 64, and has no "num_experts" (4.57.1 saves "num_experts": 64, and 5.24.0 still does so for
# Qwen2-MoE). 4.57.1 reads the newer file without a word as a model with its default, 128 experts: twice the expert
# weights. The other way round, 5.24.0 reads the older file rightly.
# Seen on 2026-11-28, Python 3.11:
#   5.24.0 saves Qwen3-MoE as num_local_experts 64, and Qwen2-MoE as num_experts 64
#   4.57.1 saves Qwen3-MoE as num_experts 64, and Qwen2-MoE as num_experts 64
#   4.57.1 reads the file of 5.24.0 as a model with 128 experts
#   5.24.0 reads the file of 4.57.1 as a model with 64 experts
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.1 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip install --quiet "transformers==$version"
done
cat > "$folder/save.py" <<'PY'
import json, sys
from pathlib import Path
import transformers

into, said = Path(sys.argv[1]), []
for name, kind in (("Qwen3-MoE", transformers.Qwen3MoeConfig), ("Qwen2-MoE", transformers.Qwen2MoeConfig)):
    kind(num_experts=64).save_pretrained(into / name)
    saved = json.loads((into / name / "config.json").read_text())
    keys = [f"{key} {saved[key]}" for key in ("num_experts", "num_local_experts") if key in saved]
    said.append(f"{name} as {' and '.join(keys)}")
print(f"{transformers.__version__} saves {', and '.join(said)}")
PY
cat > "$folder/read.py" <<'PY'
import sys
import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1] + "/Qwen3-MoE")
print(f"{transformers.__version__} reads the file of {sys.argv[2]} as a model with {config.num_experts} experts")
PY
{
  for version in 5.24.0 4.57.1; do "$folder/$version/bin/python" "$folder/save.py" "$folder/of-$version"; done
  "$folder/4.57.1/bin/python" "$folder/read.py" "$folder/of-5.24.0" 5.24.0
  "$folder/5.24.0/bin/python" "$folder/read.py" "$folder/of-4.57.1" 4.57.1
} 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
