"""Megatron's CPU optimizer (``HybridDeviceOptimizer``): what it keeps on the host, and the one that Megatron discards.

``DistributedOptimizer`` replaces the first ``HybridDeviceOptimizer`` by a second one, of its own shards of the main
parameters (``optimizer/distrib_optimizer.py``, megatron-core 0.16.1 and 0.19.2). The first one has fp32 copies of all
parameters: on the host of those that it would update there, on the device of the others. It is in a reference cycle, so
only Python's garbage collector frees it, and in a job that collects nothing explicitly it may stay for hundreds of
steps: on an H200 3.4 GiB of half of 1.87 B parameters were still allocated in the fourth step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from memlab.config.training_state import TrainingState
from memlab.upstream.patching import patched


@contextmanager
def noting_first_optimizers() -> Iterator[list[Any]]:
    """Yields a list, to which the block adds each CPU optimizer that Megatron makes before the distributed one."""
    first: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> HybridDeviceOptimizer:
        first.append(HybridDeviceOptimizer(*args, **kwargs))
        return first[-1]

    with patched({"megatron.core.optimizer.HybridDeviceOptimizer": make}):
        yield first


def stays_after_build(state: TrainingState) -> bool:
    """Whether the discarded optimizer is still allocated while a job trains.

    Python's collector decides it, so memlab decides it here, the same way on every backend. An optimizer per parameter
    (`overlap_cpu_optimizer_d2h_h2d`) makes so many objects that the first one outlives all young collections. Without
    it is chance: on an H200 it was collected at fraction 1.0, where it has nothing on the device, and in a published
    job at 0.5 (NeMo-RL PR #3628) it was not.
    """
    if not state.optimizer_cpu_offload or state.manual_gc:
        return False
    return state.overlap_cpu_optimizer_d2h_h2d or state.optimizer_offload_fraction < 1


def with_inner(optimizer: Any) -> list[Any]:
    """Returns an optimizer and, if it is a CPU optimizer, those that update its parameters on host and device."""
    return [optimizer, *(optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else ())]


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields what a CPU optimizer keeps besides what its ``param_groups`` and ``state`` name.

    These are the fp32 copies of parameters on host and device, and the gradients' copies on the host.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        yield from optimizer.gpu_params_map_cpu_copy.values()
        yield from optimizer.param_to_fp32_param.values()
        yield from optimizer.cpu_copy_map_grad.values()
        for inner in optimizer.sub_optimizers:
            for values in inner.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def uncollected_copies(discarded: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the fp32 copies on the device that wait for Python's garbage collector with a discarded optimizer.

    It is in a cycle: optimizer, ``sub_optimizers``, their ``_optimizer_step_post_hooks``, and in these the closures
    ``param_copy_back_gpu_hook`` and ``fp32_param_copy_back_gpu_hook``, whose cell ``self`` is the optimizer again
    (``_register_param_copy_back_gpu_hook`` in optimizer/cpu_offloading/hybrid_optimizer.py, megatron-core 0.16.1). Of
    what it has on the device, only ``param_to_fp32_param`` is its own: the copies of parameters that it would update
    there.
    """
    for optimizer in discarded:
        yield from (copy for copy in optimizer.param_to_fp32_param.values() if copy.is_cuda)


def gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the fp32 gradients that a CPU optimizer makes of bf16 ones and never frees, for parameters on the device.

    It makes them under the precision-aware optimizer (``_set_sub_optimizer_grads``).
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        for copy in optimizer.param_to_fp32_param.values():
            if copy.grad is not None and copy.grad.is_cuda:
                yield copy.grad
