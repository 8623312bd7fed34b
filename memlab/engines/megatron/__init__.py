"""The live Megatron model: how it is built, changed between steps, stepped, offloaded and freed."""

import logging
import warnings
from importlib.metadata import version

import torch

from memlab.own_process import is_own
from memlab.upstream import compiler_on_demand, symbols_on_demand
from memlab.upstream.hidden_modules import hidden
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
    if has_gpu:
        import megatron.core.models.gpt.gpt_layer_specs
    else:
        compiler_on_demand.put_off()
        absent, later = list[str](), list[str]()
        if is_own():
            symbols_on_demand.put_off()
        if is_own() and version("megatron-core").startswith("0.16."):  # later ones cannot be imported without these
            absent += ["triton", "torch.distributed._tensor", "torch.distributed.fsdp"]
            absent += ["megatron.core.distributed.fsdp.src.megatron_fsdp"]
            later += ["torch.distributed.checkpoint", "torch.distributed.checkpoint.default_planner"]
        with patched({"torch.compile": compiler_on_demand.compiled_when_called}), hidden(absent, later):
            import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
        del absent, later
    del has_gpu
