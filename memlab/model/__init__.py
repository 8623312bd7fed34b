"""The live Megatron model: how it is built, changed between steps, stepped, offloaded and freed."""

import warnings
from functools import partial

import torch

from memlab.upstream.patching import patched

with warnings.catch_warnings():
    # Importing megatron-core advises on optional packages (Apex, Transformer Engine): `memlab doctor` reports them.
    warnings.simplefilter("ignore")
    # torch.compile imports its default compiler, inductor, when the first function is decorated: 1.4 s of CPU. Without
    # a GPU memlab runs the functions below Megatron's decorators (backends/cpu.py), and needs no compiler.
    decorator = torch.compile if torch.cuda.device_count() else partial(torch.compile, backend=lambda graph, _: graph)
    with patched({"torch.compile": decorator}):
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    del decorator
