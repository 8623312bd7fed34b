"""Overlap of data-parallel communication with computation, as Megatron-LM's training loop sets it up.

megatron-core leaves this to its caller: ``train`` and ``evaluate_and_print_results`` in megatron/training/training.py,
and the flags that ``validate_args`` in arguments.py derives. It concerns ``overlap_grad_reduce`` and
``overlap_param_gather``; without them nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memlab.engines.megatron.build import LiveModel


def connect(live: LiveModel) -> None:
    """Connects schedule and DDP of a new model; parameters are not gathered in forward before `start_gathering`."""
    if gathers_in_forward(live):
        for chunk in live.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
    _connect_schedule(live)


def gathers_in_forward(live: LiveModel) -> bool:
    """Whether DDP gathers parameters in forward, and not at the end of the optimizer's step."""
    return bool(live.chunks[0].use_forward_hook)


def start_gathering(live: LiveModel) -> None:
    """Gathers parameters in forward from now on: Megatron does so after the first step, all whose ranks start alike."""
    if not gathers_in_forward(live) or _is_gathering(live):
        return
    for chunk in live.chunks:
        chunk.enable_forward_pre_hook()
    _connect_schedule(live)


def fill_buffers(live: LiveModel) -> None:
    """Copies the main parameters to where DDP gathers them in forward, if that is the buffer of zeroed gradients.

    ``train_step`` in megatron/training/training.py calls it between zeroing and forward.
    """
    if live.scenario.state.reuse_grad_buf_for_mxfp8_param_ag and gathers_in_forward(live) and _is_gathering(live):
        for part in live.optimizers:
            part._copy_main_params_to_param_buffer()


@contextmanager
def gathered(live: LiveModel) -> Iterator[None]:
    """Runs the block with all parameters gathered before, and none in forward: as Megatron evaluates."""
    was_gathering = gathers_in_forward(live) and _is_gathering(live)
    if was_gathering:
        for chunk in live.chunks:
            chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        if was_gathering:
            for chunk in live.chunks:
                chunk.enable_forward_pre_hook()


def gather_now(live: LiveModel) -> None:
    """Gathers all parameters: the optimizer has updated only the part of its own rank (``force_param_sync``)."""
    if gathers_in_forward(live):
        for chunk in live.chunks:
            chunk.start_param_sync(force_sync=True)


def forget_communication(live: LiveModel) -> None:
    """Waits for what a step that did not reach its end has started, and forgets which gradients were ready.

    The interleaved schedule takes functions out of the config for a forward-only pass, and puts them back at its end.
    """
    for chunk in live.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for name in ("param_gather_handle", "grad_reduce_handle"):
                handle = getattr(group, name)
                if handle is not None:
                    handle.wait()
                    setattr(group, name, None)
            group.per_param_grad_ready_counts = {}
    _connect_schedule(live)


def _connect_schedule(live: LiveModel) -> None:
    config, chunks = live.config, live.chunks
    ddp_config = chunks[0].ddp_config
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = _of_each(chunks, "no_sync")
        config.grad_sync_func = _of_each(chunks, "start_grad_sync")
    if ddp_config.align_param_gather and _is_gathering(live):
        config.param_sync_func = _of_each(chunks, "start_param_sync")


def _is_gathering(live: LiveModel) -> bool:
    return bool(live.chunks[0].remove_forward_pre_hook_handles)


def _of_each(chunks: list[Any], method: str) -> Callable[..., Any] | list[Callable[..., Any]]:
    """Returns a method of each chunk in the form that the schedules expect: not in a list if there is one chunk."""
    methods = [getattr(chunk, method) for chunk in chunks]
    return methods[0] if len(methods) == 1 else methods
