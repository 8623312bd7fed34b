"""Checkpoints of layers that keep what attention and every second product of matrices return, and recompute the rest.

NeMo Automodel calls them ``selective`` (``components/distributed/activation_checkpointing.py``, 36044ad3), torchtitan
``SelectiveAC`` (``distributed/activation_checkpoint.py``, b5bcd76c).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from memlab.upstream.compiler_on_demand import within_no_step

_aten = torch.ops.aten
_EVERY_SECOND = (_aten.mm.default, _aten.linear.default, _aten._grouped_mm.default)
_KEPT = "attention of memlab"
"""The key in a checkpoint's storage, beside torch's operations."""


@cache
def _always_kept() -> set[Any]:
    partitioners = within_no_step("torch._functorch.partitioners")  # brings torch's compiler, which takes seconds
    return {
        *(operation.default for operation in partitioners.get_default_op_list().compute_intensive_ops),
        *(_aten.addmm.default, _aten.bmm.default, _aten.topk.default, _aten.max.default),
        _aten._scaled_dot_product_cudnn_attention.default,
    }


def contexts(
    recompute: AbstractContextManager[None],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of such a checkpoint's forward, and of its recomputation, which enters `recompute` too."""
    counts = {False: 0, True: 0}

    def is_kept(context: Any, operation: Any, _: Any) -> bool:
        if operation not in _EVERY_SECOND:
            return operation in _always_kept()
        counts[context.is_recompute] += 1
        return counts[context.is_recompute] % 2 == 1

    return _keeping(is_kept, recompute)


def contexts_of_routing(
    recompute: AbstractContextManager[None], router: tuple[int, int]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a checkpoint that recomputes all but which experts tokens choose.

    NeMo Automodel keeps the router's product and its largest scores (``ignore_router_for_ac`` in
    ``components/moe/parallelizer.py``, 36044ad3), where ranks share the experts.

    Args:
        recompute: Entered around the recomputation too.
        router: The width of the hidden states, and the number of experts.
    """

    def is_kept(_: Any, operation: Any, args: Any) -> bool:
        return operation == _aten.topk.default or (operation == _aten.mm.default and args[1].shape == router)

    return _keeping(is_kept, recompute)


def _keeping(
    is_kept: Callable[[Any, Any, Any], bool], recompute: AbstractContextManager[None]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    def policy(context: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(context, operation, args) else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, _Both(recompute, again)


class _Both(AbstractContextManager[None]):
    """Enters contexts, and refers to them when they have ended.

    What is kept and not asked for, because the recomputation stops at the last product, lives until the layer's
    backward ends: torch refers to the context so long (an H200's allocator shows it, torch 2.11).
    """

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def as_one_operation(
    compute: Callable[[], tuple[torch.Tensor, ...]], *, is_kept: bool = True
) -> tuple[torch.Tensor, ...]:
    """Runs what is one operation of torch on a GPU, and several here.

    Args:
        compute: Returns its results.
        is_kept: Whether a checkpoint keeps the results, and does not run it again.
    """
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
        return compute()
    if is_kept and isinstance(mode, _CachedTorchDispatchMode):
        return mode.storage[_KEPT].pop(0)
    with _pop_mode_temporarily():
        results = compute()
    if is_kept:
        mode.storage.setdefault(_KEPT, []).append(tuple(each.detach() for each in results))
    return results
