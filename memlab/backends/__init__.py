"""Where a model lives. A backend says what differs there: the stand-ins around a job, the layers, the collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

BACKENDS = ("auto", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """What a lab asks of the place that its model lives in."""

    name: str
    reason: str
    """Why this one was taken, in words."""
    layer_provider: type
    """A megatron-core `BackendSpecProvider` class."""
    distributed_backend: str
    """torch.distributed's name for the collectives: ``nccl``, or ``fake`` for a rank that is alone."""
    active: Callable[[], AbstractContextManager[None]]
    """Everything that touches the model runs inside this context."""


def find_backend(name: str) -> Backend:
    """Returns a backend by name.

    Args:
        name: One of `BACKENDS`; ``auto`` takes the best that this machine has.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}, must be one of {', '.join(BACKENDS)}: choose one of them")
    from memlab.backends import cpu

    reason = "asked for" if name == "cpu" else "the only backend of this version"
    return cpu.backend(reason)
