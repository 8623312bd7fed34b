"""Updates of the parameters that memlab does not step: every step's update has the events of the one before.

The optimizer works on the parameters, the gradients and its state, whatever the layers recompute and whatever the step
trains on. An update that leaves nothing allocated, and frees nothing that it found, can only be followed by equal ones:
it is recorded, and its events happen again in later steps. An update that leaves fp32 copies of bf16 gradients to the
next step does not qualify.

The first update allocates Adam's state. It is recorded too: after the model has started over (`Stepper.start_over`),
the first update allocates the same again, for the same tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

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


class UpdateReplay:
    """Updates the parameters of one model, or replays an earlier update."""

    def __init__(self, labels: Labels, meter: Repeater) -> None:
        self._labels, self._meter = labels, meter
        self._first: _FirstUpdate | None = None
        self._known: tuple[Recording, Counter[str]] | None = None
        """With what the rank sends."""

    def is_known(self, live: LiveModel) -> bool:
        """Whether the next update is replayed, and leaves nothing allocated."""
        return self._known is not None and has_optimizer_state(live)

    def forget(self) -> None:
        """Forgets what was recorded: the training state changes, or a step ended early."""
        self._first = self._known = None

    def free_state(self) -> None:
        """Frees Adam's state for the meter, but keeps its tensors for the next first update."""
        if self._first is not None:
            self._meter.storages.free_all(storage for _, storage in self._first.storages)

    def __call__(self, live: LiveModel) -> None:
        """Takes the place of `update_parameters`."""
        meter, labels = self._meter, self._labels
        is_first = not has_optimizer_state(live)
        if is_first and self._first is not None and meter.memory.limit_bytes is None:
            self._replay_first(live, self._first)
            return
        if self._known is not None and not is_first:
            recording, sent = self._known
            meter.replay(recording, _NO_MODULES, None, {})
            collectives.send_again(sent)
            return
        at, span, sent_before = meter.position(), labels.span, collectives.sent_bytes.copy()
        update_parameters(live)
        recorded = meter.record(at, meter.position(), {}, (span, labels.span), {})
        sent = collectives.sent_since(sent_before)
        if is_first:
            self._first = None if recorded is None else _first_of(live, *recorded, sent)
        elif recorded is not None and not recorded[0].live:
            self._known = recorded[0], sent

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


def _first_of(live: LiveModel, recording: Recording, allocations: list[Any], sent: Counter[str]) -> _FirstUpdate | None:
    """Returns what a first update has allocated; None if that is not just Adam's state."""
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
    scales: dict[Any, Any] = getattr(optimizer, "_scales", {})
    return scales
