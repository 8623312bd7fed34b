"""torch's compiler is imported when something is compiled, and a prediction compiles nothing."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from memlab import own_process
from memlab.upstream.patching import originals, swapped

pytestmark = pytest.mark.versions

_PREDICT = """
import sys
from importlib.metadata import version
import torch
from memlab import own_process

own_process.declare()
from memlab import Lab, MemorySettings

def has_compiler():
    return "torch._dynamo.eval_frame" in sys.modules

def has_without_need():
    is_left_out = version("megatron-core").startswith("0.16.")
    names = ["sympy.core", "torch.distributed.tensor", "triton.language"] if is_left_out else []
    return [name for name in names if name in sys.modules]

def import_a_part():
    import torch._dynamo.utils as part
    assert part is sys.modules["torch._dynamo"].utils

with Lab("phi-4", num_layers=1, seq_length=64, backend="simulated") as lab:
    peak = lab.step(MemorySettings()).peak_allocated_bytes
    assert not has_compiler()
    assert not has_without_need()
    lab._session.worker.submit(import_a_part).result()
    assert has_compiler()
    assert torch.fx.experimental.symbolic_shapes.ShapeEnv()
    assert lab.step(MemorySettings()).peak_allocated_bytes == peak

from megatron.core.fusions.fused_bias_swiglu import swiglu

layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
compiled = torch.compile(lambda x: layer(x).sum(), backend="eager")
compiled(torch.ones(2)).backward()
optimizer.step()
halves = torch.ones(2, 4).chunk(2, -1)
assert torch.equal(swiglu(torch.ones(2, 4)), torch.nn.functional.silu(halves[0]) * halves[1])
"""


def test_a_prediction_imports_no_compiler_and_one_that_comes_within_a_step_is_whole() -> None:
    # In a process of its own: other tests have imported the compiler.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", _PREDICT], check=True, env=environment)


def test_megatron_is_whole_in_a_process_that_has_other_code() -> None:
    importlib.import_module("memlab.engines.megatron")
    assert not own_process.is_own()
    for name, flag in (("finalize_model_grads", "HAVE_DTENSOR"), ("torch_fully_sharded_data_parallel", "HAVE_FSDP")):
        assert getattr(importlib.import_module(f"megatron.core.distributed.{name}"), flag)


def test_originals_are_there_for_a_block_and_replacements_after_it() -> None:
    original = torch.cuda.synchronize
    with swapped([(torch.cuda, "synchronize", print), (torch, "made_up", 1)]), swapped([(torch, "made_up", 2)]):
        with originals():
            assert torch.cuda.synchronize is original
            assert not hasattr(torch, "made_up")
        assert torch.cuda.synchronize is print
        assert torch.made_up == 2
    assert torch.cuda.synchronize is original
    assert not hasattr(torch, "made_up")
