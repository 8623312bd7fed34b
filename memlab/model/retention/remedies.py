"""Three remedies for the retained checkpoint input, as they were proposed upstream; Megatron itself has none.

- ``detach``: the dispatcher keeps its probabilities without their graph. Nothing is held, nothing is risked
  (OpenPipe/ART #858; Megatron reads the attribute's dtype alone, ``token_dispatcher.py``).
- ``clear_gradient``: each checkpoint drops its input's gradient once it is handed on; the input itself stays
  (Megatron-LM #6339). Half the bytes.
- ``release_storage``: each checkpoint empties the storages of its input and of the input's gradient (verl #5251). All
  the bytes, but whoever else uses the input is left with an empty storage (verl #7328): here a storage that anything
  else refers to is never emptied, and the record says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random

from memlab.model.build import LiveModel


def set_detach(live: LiveModel, detach: bool) -> None:
    """Lets every MoE dispatcher of the model keep its probabilities detached, or as Megatron does."""
    for module in live.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is None:
            continue
        vars(dispatcher).pop("dispatch_preprocess", None)
        if detach:
            dispatcher.dispatch_preprocess = _detaching(dispatcher, dispatcher.dispatch_preprocess)


def _detaching(dispatcher: Any, dispatch_preprocess: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_then_detach(*args: Any, **kwargs: Any) -> Any:
        result = dispatch_preprocess(*args, **kwargs)
        dispatcher.probs = dispatcher.probs.detach()
        return result

    return dispatch_then_detach


@dataclass(frozen=True, kw_only=True, slots=True)
class Tapped:
    """What a tap sees of the tensor that it keeps, as plain data: nothing here reads the tensor's memory."""

    layer: int
    shape: tuple[int, ...]
    tensor_bytes: int
    """What a tensor of that shape needs."""
    storage_bytes: int
    """What its storage still has."""

    @property
    def is_dangling(self) -> bool:
        """Whether a read would go past the storage's end."""
        return self.storage_bytes < self.tensor_bytes

    def __str__(self) -> str:
        fate = "safe to read"
        if self.is_dangling:
            fate = "a read is a use after free: on a GPU an illegal memory access, reported later and somewhere else"
        return (
            f"output of decoder.layers.{self.layer}: shape {list(self.shape)} of {self.tensor_bytes} bytes, "
            f"{self.storage_bytes} bytes in its storage: {fate}"
        )


class Tap:
    """Keeps a layer's output after each forward without gradients; its storage is the next checkpoint's input too."""

    def __init__(self, live: LiveModel, layer: int) -> None:
        self._layer = layer
        self._kept: list[torch.Tensor] = []
        self._handle = live.layers[layer].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._kept[:] = [output[0]]

    def look(self) -> Tapped | None:
        """Says what is there of the last output that was kept; None if no checkpointed forward has passed."""
        for tensor in self._kept:
            return Tapped(
                layer=self._layer,
                shape=tuple(tensor.shape),
                tensor_bytes=tensor.nbytes,
                storage_bytes=tensor.untyped_storage().nbytes(),
            )
        return None

    def take_off(self) -> None:
        """Ends it and lets the output go."""
        self._handle.remove()
        self._kept.clear()


class CheckpointRemedy:
    """What a checkpoint does with its input once backward has passed it."""

    def __init__(self) -> None:
        self.num_refused = 0
        """Inputs that ``release_storage`` left alone in the last step because something else refers to them."""
        self.spares_shared = True
        """Whether ``release_storage`` leaves such inputs alone; upstream's patch does not (verl #7328)."""
        self._unshared = (0, 0, 0)

    def without_effect(self) -> dict[str, str]:
        """Names what the last step left alone, as `StepRecord.without_effect` does."""
        if not self.num_refused:
            return {}
        inputs = "1 checkpoint input is" if self.num_refused == 1 else f"{self.num_refused} checkpoint inputs are"
        return {
            "checkpoint_input_remedy": f"{inputs} left alone: something else refers to "
            "their storage and would find it empty: use 'detach'"
        }

    @contextmanager
    def during_step(self, remedy: str | None) -> Iterator[None]:
        """Applies ``clear_gradient`` or ``release_storage`` to every checkpoint of the block; others change nothing."""
        self.num_refused = 0
        if remedy not in ("clear_gradient", "release_storage"):
            yield
            return
        release = remedy == "release_storage"
        self._unshared = _unshared_owners()
        finish = self._release if release else _clear_gradient
        backward = _handing_over(random.CheckpointFunction.backward, finish, copy=release)
        with patch.object(random.CheckpointFunction, "backward", staticmethod(backward)):
            yield

    def _release(self, saved: torch.Tensor, leaf: torch.Tensor) -> None:
        if self.spares_shared and _owners(saved, leaf) != self._unshared:
            self.num_refused += 1
            return
        for tensor in (leaf, leaf.grad):
            if tensor is not None:
                tensor.record_stream(torch.cuda.current_stream())
                tensor.untyped_storage().resize_(0)


def _clear_gradient(saved: torch.Tensor, leaf: torch.Tensor) -> None:
    leaf.grad = None


def _handing_over(
    upstream_backward: Callable[..., Any], finish: Callable[[torch.Tensor, torch.Tensor], None], *, copy: bool
) -> Callable[..., Any]:
    """Wraps ``CheckpointFunction.backward``: `finish` sees each saved input and the leaf made of it, at the end.

    The gradients that are handed on are the leaves' own; `copy` makes them outlive what `finish` does to those.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        pairs: list[tuple[Any, Any]] = []
        detach_variable = random.detach_variable

        def detach_and_note(inputs: Any) -> Any:
            leaves = detach_variable(inputs)
            pairs.extend(zip(inputs, leaves, strict=True))
            return leaves

        with patch.object(random, "detach_variable", detach_and_note):
            results = upstream_backward(ctx, *grads)
        if copy:
            results = tuple(grad.clone() if isinstance(grad, torch.Tensor) else grad for grad in results)
        while pairs:
            saved, leaf = pairs.pop()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                finish(saved, leaf)
        return results

    return backward


def _owners(saved: torch.Tensor, leaf: torch.Tensor) -> tuple[int, int, int]:
    """Counts who refers to an input: Python names, tensors' owners in C++, and tensors over its storage."""
    return (
        sys.getrefcount(saved),
        saved._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(leaf.untyped_storage()._cdata),
    )


def _unshared_owners() -> tuple[int, int, int]:
    """Returns what `_owners` counts where nothing but a checkpoint has the input: asked of a checkpoint of its own."""
    counts: list[tuple[int, int, int]] = []

    def count(saved: torch.Tensor, leaf: torch.Tensor) -> None:
        counts.append(_owners(saved, leaf))

    backward = _handing_over(_UPSTREAM_BACKWARD, count, copy=False)
    with patch.object(random.CheckpointFunction, "backward", staticmethod(backward)):
        start = torch.ones(1, device=torch.cuda.current_device(), requires_grad=True)
        torch.autograd.backward(random.checkpoint(torch.neg, False, start * 1).sum())
    return counts[0]


_UPSTREAM_BACKWARD = random.CheckpointFunction.backward
