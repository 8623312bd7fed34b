"""Where a model runs. A backend is what differs: the context of a job, layers, collectives and meter."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.backend_kind import KINDS, BackendKind, BackendName

if TYPE_CHECKING:  # so that the names of the backends can be read without torch
    from memlab.config.layout import Layout
    from memlab.config.scenario import Scenario
    from memlab.config.versions import Versions
    from memlab.meter.labels import Labels
    from memlab.meter.protocol import Meter

BACKENDS = ("auto", *KINDS)
BACKEND_VARIABLE = "MEMLAB_BACKEND"
"""Environment variable with the backend that ``auto`` chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """What a lab needs to know of the place where its model runs."""

    kind: BackendKind
    reason: str
    """Why this backend was chosen, in words."""
    layer_provider: type
    """A megatron-core `BackendSpecProvider` class."""
    join: Callable[[Layout], None]
    """Joins torch.distributed's process group: with the other ranks, or alone as one rank of the layout."""
    active: Callable[[], AbstractContextManager[None]]
    """Every job on the model runs inside this context."""
    meter: Callable[[Labels], Meter]
    sharding: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context in which FSDP2 shards the tensors that are here."""
    fp8_layer_provider: type | None = None
    """The provider under FP8, if it is another one."""
    own_layer_provider: type | None = None
    """The provider of Megatron's own layers (`transformer_impl` local); None if they cannot be built here."""
    fill_workspaces: Callable[[Scenario], None] = lambda scenario: None
    """Allocates, once a model is built, what kernels keep on the device outside tensors."""
    check: Callable[[Scenario], None] = lambda scenario: None
    """Raises `ValueError` for a scenario that cannot be built here: too few ranks, or too little memory."""
    allocator: Callable[[], AllocatorSettings] = AllocatorSettings
    """Returns the options that torch's allocator has if a lab is given none."""
    versions: Callable[[Versions], Versions] = lambda asked: asked
    """Returns the versions of a lab that is asked for some; raises `ValueError` for those that it cannot have."""
    compiles: bool = False
    """Whether Megatron's small functions go through ``torch.compile``."""

    @property
    def name(self) -> BackendName:
        """One of `BACKENDS`, without ``auto``."""
        return self.kind.name

    def provider_for(self, scenario: Scenario) -> type:
        """Returns the layer provider of a scenario."""
        if scenario.state.transformer_impl == "local":
            assert self.own_layer_provider is not None, "the backend refuses such a scenario"
            return self.own_layer_provider
        return (scenario.state.fp8_format and self.fp8_layer_provider) or self.layer_provider


def find_backend(name: str | Backend) -> Backend:
    """Returns a backend by name.

    Args:
        name: A backend, which is returned as it is, or one of `BACKENDS`; ``auto`` chooses the one in
            `BACKEND_VARIABLE`, and without it ``cuda`` if it is available, else ``cpu``.

    Raises:
        ValueError: If the name is unknown, or the backend cannot be used here.
    """
    if isinstance(name, Backend):
        return name
    if name == "auto":
        name = os.environ.get(BACKEND_VARIABLE, name)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}, must be one of {', '.join(BACKENDS)}: choose one of them")
    from memlab.backends import cpu, cuda, simulated

    if name != "auto":
        return {"cpu": cpu, "cuda": cuda, "simulated": simulated}[name].backend("requested")
    cuda.prepare_environment()
    unavailable = cuda.check_available()
    if unavailable is None:
        return cuda.backend("a CUDA device and Transformer Engine are available")
    return cpu.backend(unavailable.problem)
