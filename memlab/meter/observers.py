"""How a meter sees what torch does with storages: the results of every operation, and every resize in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Observer(Protocol):
    """What is told."""

    def observe(self, results: Any, arguments: Any = ()) -> None:
        """Is told of an operation that is over."""

    def resizes(self, storage: Any, num_bytes: int) -> None:
        """Is told of a resize that is about to happen; what it raises keeps it from happening."""

    def resized(self, storage: Any) -> None:
        """Is told of a resize that has happened."""


class ObserveResults(TorchDispatchMode):
    """Tells of every operation on this thread."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._observer.observe(results, args)
        return results


@contextmanager
def observe_resizes(observer: Observer) -> Iterator[None]:
    """Tells of every `UntypedStorage.resize_`: Megatron frees and refills storages in place with it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, num_bytes: int) -> Any:
        observer.resizes(storage, num_bytes)
        result = original(storage, num_bytes)
        observer.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among an operation's arguments, those in lists included."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_in(argument)
