#!/usr/bin/env bash
# torch 2.13.0: a DataLoader's worker sends tensors by shared memory, and of a view it shares the whole storage. A dataset
# that has its tokens in one large tensor and returns slices of it (`batch_size=None`, or a collate_fn that does not
# stack) so moves its whole tensor into /dev/shm, once for each worker, when each sends its first item; until then the
# workers had shared the tensor with the main process. The default collate_fn stacks, which copies the slices alone.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, Linux, a dataset of 4,000,000 bytes, items of 16,000:
#   batch_size=None, 1 workers: an item arrives in a storage of 4,000,000 bytes; 4,000,000 bytes of shared memory in all
#   batch_size=None, 4 workers: an item arrives in a storage of 4,000,000 bytes; 16,000,000 bytes of shared memory in all
#   default collate_fn, 4 workers: an item arrives in a storage of 16,000 bytes; 128,000 bytes of shared memory in all
#   batch_size=None, items cloned, 4 workers: an item arrives in a storage of 16,000 bytes; 128,000 bytes of shared memory in all
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/shared.py" <<'PY'
import torch


class Tokens(torch.utils.data.Dataset):
    def __init__(self, clone=False):
        self.tokens, self.clone = torch.zeros(250, 4000), clone

    def __len__(self):
        return 8

    def __getitem__(self, index):
        item = self.tokens[index]
        return item.clone() if self.clone else item


def show(name, workers, dataset, **options):
    items = list(torch.utils.data.DataLoader(dataset, num_workers=workers, persistent_workers=True, **options))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in items}
    print(
        f"{name}, {workers} workers: an item arrives in a storage of {items[0].untyped_storage().nbytes():,} bytes; "
        f"{sum(storages.values()):,} bytes of shared memory in all"
    )


show("batch_size=None", 1, Tokens(), batch_size=None)
show("batch_size=None", 4, Tokens(), batch_size=None)
show("default collate_fn", 4, Tokens(), batch_size=1)
show("batch_size=None, items cloned", 4, Tokens(clone=True), batch_size=None)
PY
"$folder/venv/bin/python" "$folder/shared.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
