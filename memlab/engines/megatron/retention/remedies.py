"""Three remedies for the retained checkpoint input, as they were proposed upstream; Megatron itself has none.

- ``detach``: the dispatcher keeps its probabilities without their graph. Nothing is retained, and nothing is at risk
  (OpenPipe/ART #858; Megatron reads only the attribute's dtype, ``token_dispatcher.py``).
- ``clear_gradient``: each checkpoint drops its input's gradient once backward has passed it on; the input itself stays
  (Megatron-LM #6339). Half the bytes.
- ``release_storage``: each checkpoint empties the storages of its input and of the input's gradient (verl #5251). All
  the bytes, but anything else that uses the input finds an empty storage (verl #7328). Here a storage with another
  owner is never emptied, and the record says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from memlab.upstream.patching import patched

_KEEPERS = (
    (MoEAlltoAllTokenDispatcher, "dispatch_preprocess", "probs"),
    (MoEAllGatherTokenDispatcher, "dispatch_postprocess", "local_probs"),
)
"""Dispatchers, each with the method that keeps probabilities with their graph, and the attribute that keeps them."""
_BACKWARD = f"{random.__name__}.CheckpointFunction.backward"
_UPSTREAM_BACKWARD = random.CheckpointFunction.backward


class CheckpointRemedy:
    """The remedies of one live model, one of which may be in effect in a step."""

    def __init__(self) -> None:
        self._release = ReleaseStorage()
        self._remedies: dict[str | None, Callable[[], AbstractContextManager[None]]] = {
            None: nullcontext,
            "detach": detach,
            "clear_gradient": clear_gradient,
            "release_storage": self._release.in_effect,
        }

    @property
    def spares_shared(self) -> bool:
        """Whether ``release_storage`` leaves inputs with another owner alone; upstream does not (verl #7328)."""
        return self._release.spares_shared

    @spares_shared.setter
    def spares_shared(self, value: bool) -> None:
        self._release.spares_shared = value

    def during_step(self, name: str | None) -> AbstractContextManager[None]:
        """Returns a context for a step in which the named remedy is in effect."""
        self._release.num_spared = 0
        return self._remedies[name]()

    def without_effect(self) -> dict[str, str]:
        """Returns what the last step left alone, in the form of `StepRecord.without_effect`."""
        num_spared = self._release.num_spared
        if not num_spared:
            return {}
        inputs = "1 checkpoint input" if num_spared == 1 else f"{num_spared} checkpoint inputs"
        return {
            "checkpoint_input_remedy": f"on {inputs}, left alone because something else refers to "
            "the same storage and would find it empty: use 'detach'"
        }


def detach() -> AbstractContextManager[None]:
    """Lets every MoE dispatcher keep its probabilities without their graph, in the block."""

    def detaching(dispatch: Callable[..., Any], attribute: str) -> Callable[..., Any]:
        def dispatch_then_detach(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            result = dispatch(dispatcher, *args, **kwargs)
            setattr(dispatcher, attribute, getattr(dispatcher, attribute).detach())
            return result

        return dispatch_then_detach

    return patched(
        {
            f"{kind.__module__}.{kind.__name__}.{method}": detaching(getattr(kind, method), attribute)
            for kind, method, attribute in _KEEPERS
        }
    )


def clear_gradient() -> AbstractContextManager[None]:
    """Lets every checkpoint drop its input's gradient when its backward ends, in the block."""

    def clear(saved: torch.Tensor, leaf: torch.Tensor) -> None:
        leaf.grad = None

    return _at_end_of_backward(clear, copy_gradients=False)


class ReleaseStorage:
    """Empties the storages of each checkpoint's input and of the input's gradient when its backward ends."""

    def __init__(self) -> None:
        self.num_spared = 0
        """Inputs of the last step that were left alone because of another owner."""
        self.spares_shared = True
        """Whether inputs with another owner are left alone."""
        self._unshared: _Owners | None = None

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Releases in the block."""
        self._unshared = _unshared_owners()
        with _at_end_of_backward(self._release, copy_gradients=True):
            yield

    def _release(self, saved: torch.Tensor, leaf: torch.Tensor) -> None:
        if self.spares_shared and _owners(saved, leaf) != self._unshared:
            self.num_spared += 1
            return
        for tensor in (leaf, leaf.grad):
            if tensor is not None:
                tensor.record_stream(torch.cuda.current_stream())
                tensor.untyped_storage().resize_(0)


def _at_end_of_backward(
    finish: Callable[[torch.Tensor, torch.Tensor], None], *, copy_gradients: bool
) -> AbstractContextManager[None]:
    """Calls `finish` at the end of each checkpoint's backward, in the block.

    Args:
        finish: Called with each saved input and the leaf that the checkpoint made of it.
        copy_gradients: Whether the gradients that are passed on are copies. They are the leaves' own, and `finish` may
            empty those.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        pairs: list[tuple[Any, Any]] = []
        detach_variable = random.detach_variable

        def detach_and_note(inputs: Any) -> Any:
            leaves = detach_variable(inputs)
            pairs.extend(zip(inputs, leaves, strict=True))
            return leaves

        with patched({f"{random.__name__}.detach_variable": detach_and_note}):
            results = _UPSTREAM_BACKWARD(ctx, *grads)
        if copy_gradients:
            results = tuple(grad.clone() if isinstance(grad, torch.Tensor) else grad for grad in results)
        while pairs:
            saved, leaf = pairs.pop()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                finish(saved, leaf)
        return results

    return patched({_BACKWARD: staticmethod(backward)})


class _Owners(NamedTuple):
    """How often a checkpoint's input is referred to.

    A storage may be emptied only if nothing but the checkpoint uses it. The counts in that case depend on the versions
    of Python, torch and Megatron, so `_unshared_owners` counts once per step, in a checkpoint of one element. Any other
    reference raises one of the counts:

        a Python name for the input               names + 1
        an autograd node that saved the input     tensors + 1 (it owns the tensor in C++)
        a view of the input, as a layer's output  storages + 1 (another tensor over the same storage)

    Example: the calibration counts (4, 2, 3); an input with (4, 2, 4) has a view somewhere, and is left alone.
    """

    names: int
    tensors: int
    storages: int


def _owners(saved: torch.Tensor, leaf: torch.Tensor) -> _Owners:
    return _Owners(
        names=sys.getrefcount(saved),
        tensors=saved._use_count(),  # type: ignore[attr-defined,unused-ignore]  # torch 2.15 declares it
        storages=torch._C._storage_Use_Count(leaf.untyped_storage()._cdata),
    )


def _unshared_owners() -> _Owners:
    """Returns the counts of an input that nothing but its checkpoint refers to."""
    counts: list[_Owners] = []

    # Called as `_release` is: each frame with a name for the input counts.
    def count(saved: torch.Tensor, leaf: torch.Tensor) -> None:
        counts.append(_owners(saved, leaf))

    with _at_end_of_backward(count, copy_gradients=False):
        start = torch.ones(1, device=torch.cuda.current_device(), requires_grad=True)
        torch.autograd.backward(random.checkpoint(torch.neg, False, start * 1).sum())
    return counts[0]
