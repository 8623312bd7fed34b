#!/usr/bin/env bash
# PyYAML 6.0.4: where a mapping merges another (`<<: *base`) and sets a key again, a third mapping that merges it gets
# the old value of that key, if its name is one letter: the rank `r` of PEFT's adapters, but not `lora_alpha` beside it.
# A job then trains adapters of another size than its file says, without a word. 6.0.3 gives the value that was set last,
# as https://yaml.org/type/merge.html asks. The cause: 6.0.4 recognizes keys that occur twice by the identity of their
# strings (`id`, in `flatten_mapping` of yaml/constructor.py), and CPython has only one string of each single letter.
# Seen on 2026-11-30, Python 3.11:
#   6.0.3: large {'r': 64, 'lora_alpha': 64}, job {'r': 64, 'lora_alpha': 64}
#   6.0.4: large {'r': 64, 'lora_alpha': 64}, job {'r': 8, 'lora_alpha': 64}
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" <<'PY'
import yaml

text = """
base: &base {r: 8, lora_alpha: 8}
large: &large {<<: *base, r: 64, lora_alpha: 64}
job: {<<: *large}
"""
read = [yaml.load(text, Loader=loader) for loader in (yaml.SafeLoader, yaml.CSafeLoader)]
assert read[0] == read[1], read
print(f"{yaml.__version__}: large {read[0]['large']}, job {read[0]['job']}")
PY
for version in 6.0.3 6.0.4; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "pyyaml==$version"
  "$folder/$version/bin/python" "$folder/read.py" | tee -a "$folder/seen"
done
cat > "$folder/expected" <<'TEXT'
6.0.3: large {'r': 64, 'lora_alpha': 64}, job {'r': 64, 'lora_alpha': 64}
6.0.4: large {'r': 64, 'lora_alpha': 64}, job {'r': 8, 'lora_alpha': 64}
TEXT
diff "$folder/seen" "$folder/expected"
