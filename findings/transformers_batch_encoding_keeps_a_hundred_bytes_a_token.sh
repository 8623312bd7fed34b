#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3: what a fast tokenizer returns looks like a dictionary of lists of numbers, and
# holds much more. Behind `input_ids` and `attention_mask` it keeps the encodings of the Rust library, with each token's
# text, offsets, word, type and masks, about 100 bytes a token that no list shows, as long as the BatchEncoding lives; a
# list of them for 100 M tokens is 10 GB. `dict(encoding)`, `encoding.data` or the library's own `encode_batch_fast` do
# not hold them.
# Guess before the run: 100 bytes a token.
# Seen on 2026-11-30, Python 3.11, a BPE vocabulary of 2,000 words, 200 texts; anonymous memory of the process, in bytes a
# token (rounded to 25):
#   tokenizer(texts): 125
#   dict(tokenizer(texts)): 25
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3 numpy
cat > "$folder/encodings.py" <<'PY'
import ctypes
import gc
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def anonymous():
    """Returns the bytes of the process that are mapped from no file."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024


draw = random.Random(0)
letters = "abcdefghijklmnopqrstuvwxyz"
words = ["".join(draw.choice(letters) for _ in range(draw.randint(2, 9))) for _ in range(3000)]
texts = [" ".join(draw.choice(words) for _ in range(1000)) for _ in range(200)]
trained = Tokenizer(models.BPE())
trained.pre_tokenizer = pre_tokenizers.ByteLevel()
trained.train_from_iterator(texts[:50], trainers.BpeTrainer(vocab_size=2000, show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained)
tokenizer(texts)  # caches of the library
for name, keep in (("tokenizer(texts)", lambda each: each), ("dict(tokenizer(texts))", dict)):
    before = anonymous()
    held = keep(tokenizer(texts))
    tokens = sum(map(len, held["input_ids"]))
    print(f"{name}: {25 * round((anonymous() - before) / tokens / 25)}", flush=True)
    del held
PY
"$folder/venv/bin/python" "$folder/encodings.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
