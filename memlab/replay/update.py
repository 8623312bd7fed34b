"""Ends of steps that memlab does not step, because each has the events of the one before.

After the last backward pass, Megatron finalizes the gradients: it reduces them over ranks, and under sequence
parallelism it sums those of norms. Then the optimizer updates the parameters. Both work on the parameters, the
gradients and the optimizer's state, whatever the layers recompute and whatever the step trains on. If one of them
leaves nothing allocated, and frees nothing that it found, only equal ones can follow: it is recorded, and its events
happen again in later steps. An update that leaves fp32 copies of bf16 gradients to the next step does not qualify.

The first update allocates Adam's state. It is recorded too: after the model has started over (`Stepper.start_over`),
the first update allocates the same again, for the same tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.graph_capture import has_optimizer_state
from memlab.engines.megatron.groups import tensors_in
from memlab.engines.megatron.training_step import update_parameters
from memlab.meter import collectives
from memlab.meter.labels import Labels
from memlab.meter.recording import Recording
from memlab.meter.repeater import Repeater

_NO_MODULES = np.zeros(1, dtype=np.int64)
_UPDATE = "update"


class _Done(NamedTuple):
    """What finalizes gradients has done, or an update."""

    recording: Recording
    allocations: list[Any]
    """By role."""
    sent: Counter[str]


@dataclass(slots=True, eq=False)
class _FirstUpdate:
    """What the first update of a model allocates: Adam's state."""

    recording: Recording
    sent: Counter[str]
    storages: list[tuple[int, torch.UntypedStorage]]
    """Those of the state, each with its role."""
    states: list[dict[Any, Any]]
    """Of each optimizer."""
    scales: list[dict[Any, Any]]


class EndReplay:
    """Finalizes the gradients of one model and updates its parameters, or replays what earlier steps did."""

    def __init__(self, live: LiveModel, labels: Labels, meter: Repeater) -> None:
        self._live, self._labels, self._meter = live, labels, meter
        self._first: _FirstUpdate | None = None
        self._known: dict[Any, _Done] = {}
        """What leaves nothing allocated, by what its events depend on."""

    def leaves_new(self) -> bool:
        """Whether the next update may leave something allocated that has no category yet."""
        return not (has_optimizer_state(self._live) and _UPDATE in self._known)

    def forget(self) -> None:
        """Forgets what was recorded: the training state changes, or a step ended early."""
        self._first = None
        self._known.clear()

    def release(self) -> None:
        """Drops the model."""
        self.forget()
        del self._live

    def free_state(self) -> None:
        """Frees Adam's state for the meter, but keeps its tensors for the next first update."""
        if self._first is not None:
            self._meter.storages.free_all(storage for _, storage in self._first.storages)

    @contextmanager
    def finalizing(self) -> Iterator[None]:
        """Replays in the block what finalizes gradients, once it is known."""
        config, labels = self._live.config, self._labels
        original: Callable[..., None] = config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> None:
            # The first one of a model may allocate what later ones find.
            key = has_optimizer_state(self._live), labels.module, labels.phase
            if not self._replays(key):
                self._learn(key, self._step(partial(original, *args, **kwargs)))

        config.finalize_model_grads_func = finalize
        try:
            yield
        finally:
            config.finalize_model_grads_func = original

    def update(self) -> None:
        """Takes the place of `update_parameters`."""
        live, is_first = self._live, not has_optimizer_state(self._live)
        if is_first and self._first is not None and self._meter.memory.limit_bytes is None:
            self._replay_first(live, self._first)
        elif is_first or not self._replays(_UPDATE):
            done = self._step(partial(update_parameters, live))
            if is_first:
                self._first = None if done is None else _first_of(live, done)
            else:
                self._learn(_UPDATE, done)

    def _replays(self, key: Any) -> bool:
        """Lets the events happen again that are known; returns whether they are."""
        known = self._known.get(key)
        if known is None:
            return False
        self._meter.replay(known.recording, _NO_MODULES, None, {})
        collectives.send_again(known.sent)
        return True

    def _step(self, act: Callable[[], None]) -> _Done | None:
        """Acts, and returns what that does; None if it frees what it finds."""
        meter, labels = self._meter, self._labels
        at, span, sent_before = meter.position(), labels.span, collectives.sent_bytes.copy()
        act()
        recorded = meter.record(at, meter.position(), {}, (span, labels.span), {})
        return None if recorded is None else _Done(*recorded, collectives.sent_since(sent_before))

    def _learn(self, key: Any, done: _Done | None) -> None:
        if done is not None and not done.recording.live:
            self._known[key] = done._replace(allocations=[])

    def _replay_first(self, live: LiveModel, first: _FirstUpdate) -> None:
        """Lets a first update's events happen again, and gives the optimizers the state that it had made."""
        meter = self._meter
        done = meter.replay(first.recording, _NO_MODULES, None, {})
        collectives.send_again(first.sent)
        requested_bytes = dict(done.left_allocated())
        for role, storage in first.storages:
            meter.storages.follow(storage, meter.separate(done, role, requested_bytes[role]))
        for part, state, scales in zip(live.optimizers, first.states, first.scales, strict=True):
            part.optimizer.state.update(state)
            _scales_of(part.optimizer).update(scales)


def _first_of(live: LiveModel, done: _Done) -> _FirstUpdate | None:
    """Returns what a first update has allocated; None if that is not just Adam's state."""
    recording, allocations, sent = done
    states = [dict(part.optimizer.state) for part in live.optimizers]
    scales = [dict(_scales_of(part.optimizer)) for part in live.optimizers]
    own = (tensor.untyped_storage() for parts in (*states, *scales) for tensor in tensors_in(parts))
    storages = {storage._cdata: storage for storage in own}
    roles = {allocations[role].key: role for role in recording.live}
    if storages.keys() != roles.keys():
        return None
    return _FirstUpdate(recording, sent, [(role, storages[key]) for key, role in roles.items()], states, scales)


def _scales_of(optimizer: Any) -> dict[Any, Any]:
    """Returns the scales of states of lower precision, which `memlab.backends.fused_adam.FusedAdam` has."""
    return getattr(optimizer, "_scales", {})
