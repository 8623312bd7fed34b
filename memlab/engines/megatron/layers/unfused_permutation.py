"""What Megatron selects by a mask when it sorts tokens by their experts, as CUDA runs it.

The code is Megatron's own: ``permute`` in ``megatron/core/transformer/moe/moe_utils.py`` without a fused kernel
(``moe_permute_fusion`` off), and the all-gather dispatcher in ``token_dispatcher.py`` (0.16.1), which selects
probabilities so in any case. Fake tensors do not say how many elements a mask selects, and a GPU allocates more for it
than the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def selecting_by_mask(permute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's ``permute``, which selects as a GPU does where it is not fused."""

    def permute_as_on_a_gpu(*args: Any, fused: bool = False, **named: Any) -> Any:
        if fused:
            return permute(*args, fused=fused, **named)
        with _Selecting(int(named["num_out_tokens"])):
            return permute(*args, fused=fused, **named)

    return permute_as_on_a_gpu


def selecting_own_rows(
    dispatch_postprocess: Callable[..., Any], count: Callable[[Any, torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """Returns the all-gather dispatcher's ``dispatch_postprocess``, which selects as a GPU does.

    Args:
        count: Is given the dispatcher and its map [tokens of all ranks, experts of this rank], and returns how many
            tokens each of the experts gets, on the host.
    """

    def dispatch_own_rows(dispatcher: Any, *args: Any) -> Any:
        with _CountingAndSelecting(lambda own_map: count(dispatcher, own_map)):
            return dispatch_postprocess(dispatcher, *args)

    return dispatch_own_rows


def counted(dispatcher: Any, own_map: torch.Tensor) -> torch.Tensor:
    """Returns how many tokens of a map each expert gets, on the host."""
    return torch.from_numpy(own_map.sum(dim=0).numpy().copy())


class _CountingAndSelecting(TorchFunctionMode):
    """Counts the rows of a map when Megatron sums it over the tokens, which it does before it selects."""

    def __init__(self, count: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._count = count
        self._num_rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sum and args[0].dtype is torch.bool:
            counts = self._count(args[0])
            self._num_rows = int(counts.sum())
            return counts
        if func is torch.Tensor.masked_select:
            return _MaskedSelect.apply(*args, self._num_rows)
        return func(*args, **(kwargs or {}))


class _Selecting(TorchFunctionMode):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.masked_select:
            return _MaskedSelect.apply(*args, self._num_rows)
        return func(*args, **(kwargs or {}))


class _MaskedSelect(torch.autograd.Function):
    """Saves what torch saves, and has the temporary tensors of its CUDA kernels.

    Read in torch 2.11: ``masked_select`` (``aten/src/ATen/native/cuda/IndexKernel.cpp``) makes the places of all
    elements first, in int64 for each dimension; ``masked_scatter_`` sums the mask in int64.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(values, mask)
        _places = torch.empty((num_rows, mask.dim()), dtype=torch.int64, device=values.device)
        if values.is_meta:
            return torch.empty(num_rows, dtype=values.dtype, device=values.device)
        with torch._C.DisableTorchFunction():  # the dispatcher's mode may be around Megatron's ``permute`` too
            return values.masked_select(mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        values, mask = ctx.saved_tensors
        grad_values = torch.zeros_like(values)
        _sums = torch.empty(values.shape, dtype=torch.int64, device=values.device)
        if not values.is_meta:
            grad_values.masked_scatter_(mask, grads[0])
        return grad_values, None, None
