"""The CPU stands in for CUDA: Megatron's own code runs unchanged, small and for real, on a machine without a GPU.

Three things are replaced while a `stand_in` block runs, and put back after it: the parts of ``torch.cuda`` that
Megatron touches, tensor calls that name a CUDA device, and the few places in megatron-core that need Transformer
Engine (written against 0.16.1 and 0.19.2). A storage remembers whether it would live in host memory, so that
offloading is seen although both pools are the same RAM.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from memlab.backends import Backend
from memlab.backends.cuda_calls import CUDA_API, CudaOnCpu, is_on_host, random_state
from memlab.backends.host import host_memory_bytes
from memlab.config.scenario import Scenario
from memlab.meter.labels import one_kernel
from memlab.meter.storage_meter import StorageMeter
from memlab.model.layers import torch_moe
from memlab.model.layers.torch_layers import TorchProvider
from memlab.units import format_bytes


def backend(reason: str) -> Backend:
    """Returns the CPU backend: the live model at small sizes, with real values."""
    return Backend(
        name="cpu",
        reason=reason,
        layer_provider=TorchProvider,
        distributed_backend="fake",
        active=stand_in,
        meter=StorageMeter,
        require_room=require_host_memory,
    )


def require_host_memory(scenario: Scenario) -> None:
    """Compares a model's parameters, gradients and optimizer state with the host memory that this process may use.

    Raises:
        ValueError: If the model is larger. The system would end the process in the middle of the build, without an
            error message.
    """
    model = replace(scenario.architecture, num_layers=scenario.num_layers)
    # Bytes per parameter: (parameter, in bf16) + fp32 gradient + fp32 main parameter + Adam's two moments.
    per_parameter = 2 + 4 + 4 + 8 if scenario.dtype == "bf16" else 4 + 4 + 8
    needed, limit = model.num_parameters * per_parameter, host_memory_bytes()
    if needed > limit:
        raise ValueError(
            f"{scenario} takes {format_bytes(needed)} before its first step, and this process may use "
            f"{format_bytes(limit)} of host memory: take fewer layers, or predict it (memlab predict, backend "
            "'simulated')"
        )


@contextmanager
def stand_in(calls: type[TorchFunctionMode] = CudaOnCpu) -> Iterator[None]:
    """Lets Megatron run on this thread as if the CPU were a CUDA device, for the block.

    The functions that are replaced are so on every thread meanwhile: torch has them once a process.

    Args:
        calls: The mode that serves calls which name a device.
    """
    with ExitStack() as stack:
        # One operation of a small model is shorter than waking a second thread, and where another process wants the
        # core, OpenMP's threads wait for each other: a step of 50 ms became one of 1.9 s.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for name, value in CUDA_API.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for module, name, value in _megatron_parts():
            stack.enter_context(patch.object(module, name, value, create=True))
        stack.enter_context(patch.object(torch, "get_rng_state", random_state))
        # Its C++ signature refuses any other stream than CUDA's before a function mode is asked.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(calls())
        yield


def _megatron_parts() -> Iterator[tuple[Any, str, Any]]:
    """Yields (module, name, stand-in) for what megatron-core takes from CUDA, Transformer Engine or torch.compile."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    yield random, "_get_cuda_rng_state", random_state
    yield random, "_set_cuda_rng_state", lambda state, *_, **__: torch.default_generator.set_state(state)
    # random.py's CheckpointWithoutOutput asks TE whether FP8 is on, also where it is not.
    yield random, "FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    yield random, "activation_recompute_forward", lambda **_: contextlib.nullcontext()
    yield random, "fp8_autocast", lambda **_: contextlib.nullcontext()
    if hasattr(random, "_get_share_storage"):  # 0.19 compiles an extension for it
        yield random, "_get_share_storage", lambda: _move_block
    # fine_grained_activation_offload.py turns TE's own offloading on around a group, and refuses to run without it.
    yield transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)
    if hasattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload"):  # 0.19 looks at the tensor's device
        yield ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(_is_offloadable)
    # moe_utils.py names te_general_gemm without TE although its import failed; None selects torch.mm.
    yield moe_utils, "te_general_gemm", None
    yield moe_utils, "HAVE_TE", True
    yield moe_utils, "fused_permute", torch_moe.permute
    yield moe_utils, "fused_permute_with_probs", torch_moe.permute_with_probs
    yield moe_utils, "fused_unpermute", torch_moe.unpermute
    yield moe_utils, "fused_sort_chunks_by_index", torch_moe.sort_chunks_by_index
    yield moe_utils, "fused_sort_chunks_by_index_with_probs", torch_moe.sort_chunks_by_index_with_probs
    yield from _optimizer_parts()
    yield from _compiled_functions()


def _optimizer_parts() -> Iterator[tuple[Any, str, Any]]:
    # Where Transformer Engine is installed Megatron takes its CUDA kernels; these are what it takes where it is not.
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as mixed_precision

    yield optimizer, "USING_PYTORCH_OPTIMIZER", True
    yield optimizer, "Adam", torch.optim.AdamW
    for module in (clip_grads, mixed_precision):
        yield module, "multi_tensor_applier", utils.local_multi_tensor_applier
        yield module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale
    yield clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm
    yield clip_grads, "multi_tensor_scale_tensor_impl", None


def _move_block(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Gives a recomputed tensor's memory to the output that was discarded.

    On a GPU both storages then point to one block. Of the recomputed tensor backward needs only the graph, so here its
    block may leave it: one block either way.
    """
    num_bytes = recomputed.untyped_storage().nbytes()
    with one_kernel():
        block = recomputed.data.clone()
        recomputed.untyped_storage().resize_(0)
        output.untyped_storage().resize_(num_bytes)
        output.data.copy_(block)  # through .data, so that autograd sees no change
        del block


def _is_offloadable(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and not is_on_host(tensor)


def _compiled_functions() -> Iterator[tuple[Any, str, Any]]:
    # What Megatron compiles into one kernel (megatron/core/jit.py) runs eagerly here, as one kernel for the meter.
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    own_classes = [cls for cls in classes if cls.__module__.startswith("megatron.core.")]
    for owner in (*modules, *own_classes):
        for name, value in list(vars(owner).items()):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None:
                yield owner, name, _as_one_kernel(original)


def _as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with one_kernel():
            return function(*args, **kwargs)

    return run
