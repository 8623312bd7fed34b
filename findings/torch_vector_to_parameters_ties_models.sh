#!/usr/bin/env bash
# torch 2.13.0: `torch.nn.utils.vector_to_parameters(vector, model.parameters())` copies nothing: each parameter becomes a
# view of the vector (`param.data = vec[...].view_as(param).data`, nn/utils/convert_parameters.py). Two models that are
# filled from one vector, such as the clients of federated averaging or members of an ensemble, so have one set of
# weights: an optimizer's step of one trains the other, and the vector, the average that the next round starts from. Two
# models that seem to need the memory of two need that of one, and torch.save of one parameter writes all of them.
# Guess before the run: so.
# Seen on 2026-11-30, Python 3.11, two models of 4,096 parameters each in fp32:
#   a step of the first model changes the second: True
#   a step of the first model changes the vector: True
#   bytes of both models' weights: 16,384
#   after load_state_dict from the first, of two models that own their weights: 32,768
#   a parameter of 4,096 bytes is saved in: 16,384 or more
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/vector.py" <<'PY'
import io

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def model():
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(4)])


def size(*models):
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for one in models for each in one.parameters()}
    return sum(storages.values())


first, second = model(), model()
vector = parameters_to_vector(model().parameters()).detach().clone()
for each in (first, second):
    vector_to_parameters(vector, each.parameters())
before, before_vector = second[0].weight.detach().clone(), vector.clone()
optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
first(torch.randn(8, 32)).square().sum().backward()
optimizer.step()
print("a step of the first model changes the second:", not torch.equal(before, second[0].weight))
print("a step of the first model changes the vector:", not torch.equal(before_vector, vector))
print(f"bytes of both models' weights: {size(first, second):,}")
owners = model(), model()
owners[1].load_state_dict(owners[0].state_dict())
print(f"after load_state_dict from the first, of two models that own their weights: {size(*owners):,}")
file = io.BytesIO()
torch.save(first[0].weight, file)
assert file.tell() >= vector.nbytes
print(f"a parameter of {first[0].weight.nbytes:,} bytes is saved in: {vector.nbytes:,} or more")
PY
"$folder/venv/bin/python" "$folder/vector.py" 2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff <(sed -n 's/^#   //p' "$0") "$folder/seen"
