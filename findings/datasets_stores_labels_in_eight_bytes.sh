#!/usr/bin/env bash
# datasets 5.2.0: how many bytes a token takes depends on the column's name. Lists of whole numbers become int32 in a
# column `input_ids` and int8 in `attention_mask`, `token_type_ids` and `special_tokens_mask`; under any other name they
# become int64 (`OptimizedTypedSequence`, datasets/arrow_writer.py). So labels take twice what the tokens take, and a
# mask under another name eight times what an attention mask takes: in the cache files, and in RAM where a dataset comes
# from a list, since then `map` keeps its result there (no cache file is written).
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, a map that returns 100 numbers under each name; bytes a number, without offsets:
#   input_ids: int32, 4
#   attention_mask: int8, 1
#   labels: int64, 8
#   completion_mask: int64, 8
#   prompt_ids: int64, 8
#   position_ids: int64, 8
#   chosen_input_ids: int64, 8
#   from a list: the result is in RAM; from a file: the result is in a cache file
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0
cat > "$folder/columns.py" <<'PY'
import sys

import datasets

datasets.disable_progress_bars()
NAMES = ("input_ids", "attention_mask", "labels", "completion_mask", "prompt_ids", "position_ids", "chosen_input_ids")
given = datasets.Dataset.from_list([{"text": "a"} for _ in range(100)])
result = given.map(lambda _: {name: [1] * 100 for name in NAMES})
for name in NAMES:
    kind = result.features[name].feature.dtype
    numbers = result.data.column(name).combine_chunks().values
    print(f"{name}: {kind}, {numbers.nbytes // len(numbers)}")
given.save_to_disk(sys.argv[1])
of_file = datasets.load_from_disk(sys.argv[1]).map(lambda _: {"input_ids": [1] * 100})
where = ["a cache file" if each.cache_files else "RAM" for each in (result, of_file)]
print(f"from a list: the result is in {where[0]}; from a file: the result is in {where[1]}")
PY
"$folder/venv/bin/python" "$folder/columns.py" "$folder/saved" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
