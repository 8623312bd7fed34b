#!/usr/bin/env bash
# megatron-bridge 0.6.2, Python 3.11: `PipelineOverlapCfg`, which says how an output is summed in user buffers, declares
# `fp8_buf: bool = (False,)`. The default is a tuple, which is true, so the option is on unless it is set to False
# (training/comm_overlap.py). Transformer Engine 2.16.1 asks `user_ub_cfg[name].get("fp8_buf", False)` and allocates a
# user buffer of one byte for each element where that is true and the job computes in FP8 (`initialize_ub` in
# pytorch/module/base.py); the linear then gives its output in FP8. `RingExchangeOverlapCfg` has False.
# Seen on 2026-11-29:
#   PipelineOverlapCfg: fp8_buf is (False,), which is True
#   RingExchangeOverlapCfg: fp8_buf is False, which is False
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download -q --no-deps --python-version 3.12 --only-binary=:all: -d "$folder" megatron-bridge==0.6.2
python3 -m zipfile -e "$folder"/megatron_bridge-*.whl "$folder/package"
cat > "$folder/defaults.py" <<'PY'
import sys
from dataclasses import asdict
from types import ModuleType
from unittest.mock import MagicMock

# The file alone: the package's own imports need Megatron-Core and Transformer Engine, which these classes do not use.
for name in (
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.utils", "megatron.bridge.models",
    "megatron.bridge.models.gpt.gpt_builder", "megatron.bridge.models.hybrid.hybrid_builder",
    "megatron.bridge.utils.cuda_graph",
):
    sys.modules[name] = MagicMock()
module = ModuleType("comm_overlap")
sys.modules["comm_overlap"] = module
path = f"{sys.argv[1]}/megatron/bridge/training/comm_overlap.py"
exec(compile(open(path).read(), path, "exec"), module.__dict__)
of_pipeline = module.PipelineOverlapCfg(num_sm=24, cga_size=2, num_splits=4, set_sm_margin=True)
for config in (of_pipeline, module.RingExchangeOverlapCfg()):
    value = asdict(config)["fp8_buf"]
    print(f"{type(config).__name__}: fp8_buf is {value}, which is {bool(value)}")
PY
python3 "$folder/defaults.py" "$folder/package" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
PipelineOverlapCfg: fp8_buf is (False,), which is True
RingExchangeOverlapCfg: fp8_buf is False, which is False
SEEN
