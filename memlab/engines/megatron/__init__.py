"""The live Megatron model: how it is built, changed between steps, stepped, offloaded and freed."""

import logging
import warnings
from functools import partial

import torch

from memlab.upstream.patching import patched, swapped

# Importing megatron-core advises on optional packages (Apex, Transformer Engine), which `memlab doctor` reports. A CUDA
# build of torch logs where there is a compiler for CUDA and no GPU (torch/utils/cpp_extension.py, 2.13.0).
with (
    warnings.catch_warnings(),
    swapped([(logging.getLogger("torch.utils.cpp_extension"), "disabled", True)]),
):
    warnings.simplefilter("ignore")
    # torch.compile imports its default compiler, inductor, when the first function is decorated: 1.4 s of CPU. Without
    # a GPU memlab runs the functions below Megatron's decorators (backends/cpu.py), and needs no compiler.
    decorator = torch.compile if torch.cuda.device_count() else partial(torch.compile, backend=lambda graph, _: graph)
    with patched({"torch.compile": decorator}):
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    del decorator
