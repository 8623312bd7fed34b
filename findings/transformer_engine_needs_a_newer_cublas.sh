#!/usr/bin/env bash
# Transformer Engine 2.16.1 for CUDA 13 (transformer-engine-cu13) cannot be loaded with the cuBLAS that torch 2.11.0
# requires (cuda-toolkit 13.0.2: nvidia-cublas 13.1.0.3), and pip finds nothing wrong: the package of TE requires no
# version of CUDA at all. Its library asks for a function that cuBLAS has since nvidia-cublas 13.2.0.9, although its
# name ends in "_internal" and the library's own number, libcublasLt.so.13, is the same. TE 2.12.0 loads with both.
# Seen on 2026-11-28, Python 3.11.7, no GPU:
#   nvidia-cublas 13.1.0.3, transformer-engine-cu13 2.12.0: No broken requirements found. loads
#   nvidia-cublas 13.1.0.3, transformer-engine-cu13 2.16.1: No broken requirements found. undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13
#   nvidia-cublas 13.4.0.1, transformer-engine-cu13 2.16.1: No broken requirements found. loads
# Exits with 1 if that changes. Needs 5 GB in the temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/load.py" <<'PY'
import ctypes
import sysconfig
from pathlib import Path

packages = Path(sysconfig.get_paths()["purelib"])
# As transformer_engine/common/__init__.py does: what the library needs is loaded from pip's packages first.
needed = [packages / "nvidia/cu13/lib" / f"lib{name}.so.13" for name in ("cudart", "nvrtc", "cublasLt", "cublas")]
needed += sorted((packages / "nvidia/cudnn/lib").glob("libcudnn*.so.9"), key=lambda path: len(path.name))
left = [path for path in needed if path.exists()]
for _ in range(4):  # the parts of cuDNN need each other
    for path in list(left):
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            left.remove(path)
        except OSError:
            pass
try:
    ctypes.CDLL(str(packages / "transformer_engine/wheel_lib/libtransformer_engine.so"))
    print("loads")
except OSError as error:
    print(str(error).partition(": ")[2])
PY
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install --no-cache-dir nvidia-cudnn-cu13==9.19.0.56 nvidia-cuda-runtime==13.0.96 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.1.0.3
say() {  # say CUBLAS TE
  "${pip[@]}" install --no-cache-dir "nvidia-cublas==$1" "transformer-engine-cu13==$2"
  echo "nvidia-cublas $1, transformer-engine-cu13 $2: $("$folder/venv/bin/pip" --disable-pip-version-check check) $("$folder/venv/bin/python" "$folder/load.py")" | tee -a "$folder/seen"
}
say 13.1.0.3 2.12.0
say 13.1.0.3 2.16.1
say 13.4.0.1 2.16.1
cmp "$folder/seen" - <<'SEEN'
nvidia-cublas 13.1.0.3, transformer-engine-cu13 2.12.0: No broken requirements found. loads
nvidia-cublas 13.1.0.3, transformer-engine-cu13 2.16.1: No broken requirements found. undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13
nvidia-cublas 13.4.0.1, transformer-engine-cu13 2.16.1: No broken requirements found. loads
SEEN
