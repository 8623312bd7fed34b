"""Data-parallel communication that passes begin, which Megatron's DDP overlaps with computation.

DDP gathers parameters before the forward pass of the first module that needs them, and reduces the gradients of a
bucket once backward has reached all its parameters (``overlap_param_gather`` and ``overlap_grad_reduce`` of
megatron-core 0.16.1). Which pass begins a collective depends on where buckets end, and equal layers may differ. So
recordings leave it out, and a replayed pass tells DDP what a stepped one would: DDP's own code begins the collectives.
They use DDP's buffers and allocate nothing, which is checked at each of them: so the order in which one layer's own
gradients are ready, which replay does not know, changes no byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from memlab.engines.megatron.build import LiveModel
from memlab.meter import collectives
from memlab.meter.repeater import Repeater
from memlab.replay.passes import NotReplayableError
from memlab.upstream.patching import patched

_GROUP = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"


class Communication:
    """The communication of one model's passes."""

    def __init__(self, live: LiveModel, meter: Repeater) -> None:
        self._meter = meter
        self._sent = Counter[str]()
        """What it has sent, of `collectives.sent_bytes`."""
        self._layers = [(chunk, layer) for chunk in live.chunks for layer in chunk.module.decoder.layers]

    @property
    def sent_without(self) -> Counter[str]:
        """What the rank has sent so far, without this communication."""
        return collectives.sent_bytes - self._sent

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follows the communication of the block; without overlap, no pass begins any.

        Raises:
            NotReplayableError: If a collective allocates or frees memory.
        """
        configs = [chunk.ddp_config for chunk, _ in self._layers]  # none on a stage without layers
        overlaps = any(config.overlap_param_gather or config.overlap_grad_reduce for config in configs)
        names = ("start_param_sync", "start_grad_sync") if overlaps else ()
        with patched({f"{_GROUP}.{name}": self._follow(getattr(_ParamAndGradBucketGroup, name)) for name in names}):
            yield

    def _follow(self, begin: Callable[..., None]) -> Callable[..., None]:
        def begin_and_count(*args: Any, **kwargs: Any) -> None:
            position, sent = self._meter.position(), collectives.sent_bytes.copy()
            begin(*args, **kwargs)
            self._sent += collectives.sent_since(sent)
            if self._meter.position() != position:
                raise NotReplayableError("data-parallel communication has allocated memory within a pass")

        return begin_and_count

    def before_forward(self, layer: int) -> None:
        """Has DDP gather what a replayed forward pass of a layer needs, as before each of its modules."""
        chunk, model = self._layers[layer]
        handles = chunk.remove_forward_pre_hook_handles
        for module in model.modules() if handles else ():
            module._forward_pre_hooks[handles[module].id](module)

    def after_backward(self, layer: int) -> None:
        """Tells DDP that a replayed backward pass of a layer has given its gradients."""
        chunk, model = self._layers[layer]
        if chunk.ddp_config.overlap_grad_reduce:
            for parameter in model.parameters():
                group = chunk.param_to_bucket_group.get(parameter)
                if group is not None:
                    group.register_grad_ready(parameter, chunk.force_all_reduce)

    def release(self) -> None:
        """Drops the model."""
        self._layers.clear()
