"""The live Megatron model: how it is built, changed between steps, stepped, offloaded and freed."""

import logging
import warnings

import torch

from memlab.upstream.compiler_on_demand import compiled_when_called, put_off
from memlab.upstream.patching import patched, swapped

# Importing megatron-core advises on optional packages (Apex, Transformer Engine), which `memlab doctor` reports. A CUDA
# build of torch logs where there is a compiler for CUDA and no GPU (torch/utils/cpp_extension.py, 2.13.0).
with (
    warnings.catch_warnings(),
    swapped([(logging.getLogger("torch.utils.cpp_extension"), "disabled", True)]),
):
    warnings.simplefilter("ignore")
    # torch.compile imports torch's compiler when the first function is decorated: 2 s of CPU. Without a GPU memlab runs
    # the functions below Megatron's decorators (backends/cpu.py), and needs no compiler.
    has_gpu = torch.cuda.device_count() > 0
    if not has_gpu:
        put_off()
    with patched({"torch.compile": torch.compile if has_gpu else compiled_when_called}):
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    del has_gpu
