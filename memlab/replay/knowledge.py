"""What stepped passes have shown, by what decides about a pass beside the model and the settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memlab.meter.recording import GRADIENT, Role
from memlab.replay.offload_calls import spec_of
from memlab.replay.passes import Key, Known, Pass, PassesOfStep, Unit
from memlab.replay.presumptions import Presumptions
from memlab.replay.retention import Retention

_MOST_KNOWN = 256
"""Recorded passes that are kept when a model starts over: 10 to 30 for one settings."""

Freed = list[tuple[int, Role]]
"""As `memlab.meter.recording.freed_by` returns it."""


@dataclass(slots=True, eq=False)
class Knowledge:
    """Remembers recorded passes, and which of them are proven.

    A pass is proven by another one with the same events: the next or the last one through a unit of its kind, or with
    its key; or by those at both ends of its row (`Presumptions`).
    After the model has started over, it is still known what it did under one settings, which are a part of a kind. In
    its first step, the first pass with a key may allocate what later ones find. So that one is replayed only as the
    first pass with this key of an earlier model's first step. With MoE layers, that one must have done the same as the
    pass before it or after it.
    """

    step: PassesOfStep
    retention: Retention
    presumptions: Presumptions
    _known: dict[Key, Known] = field(default_factory=dict)
    _last: dict[tuple[str, int, bool], tuple[Key, Known]] = field(default_factory=dict)
    """The pass of a kind that was stepped last."""
    _keeps_result: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    """Whether units of a kind keep the gradient of their input, so that the pass that is given it does not free it."""
    _freed: dict[tuple[Any, ...], Freed] = field(default_factory=dict)
    _freed_lately: dict[int, Freed] = field(default_factory=dict)
    """What the forward pass that was stepped last in this step has freed, whatever its key, by kind."""
    _num_steps: int = 0
    """Since the model was built, or has started over."""
    _opening: dict[Key, Any] = field(default_factory=dict)
    """The signature of the first pass with a key in a first step; None if that has done more than later ones."""
    _met: set[Key] = field(default_factory=set)
    """Keys of passes that this step has stepped."""
    _has_forgotten: bool = False
    """Whether other settings or another workload preceded those of this step."""

    def begin_step(self, *, may_presume: bool) -> None:
        """Forgets what is known only of the step before.

        Args:
            may_presume: Whether passes of this step may be replayed before they are proven.
        """
        self._freed_lately.clear()
        self._met.clear()
        self._num_steps += 1
        self.presumptions.begin_step(is_allowed=may_presume, is_first=self._num_steps == 1)

    def forget(self) -> None:
        """Forgets what was recorded."""
        for known in (self._known, self._last, self._keeps_result, self._freed, self._opening):
            known.clear()
        self._has_forgotten = self._num_steps > 0

    def settings_change(self) -> None:
        """Forgets what was recorded under other settings, unless the model is as it was when it was built."""
        if self._num_steps:
            self.forget()

    def start_over(self) -> None:
        """Says that the model is about to start over."""
        # Of one step, it is not known what a second one would repeat. Where only some layers have a kernel that is
        # timed, the first of them may be at a place where an earlier model has timed it already.
        is_unsure = self._has_forgotten or self._num_steps == 1
        is_unsure |= len(set(self.retention.units.kinds_of_layers)) > 1
        if is_unsure or len(self._known) > _MOST_KNOWN:
            self.forget()
        self._num_steps, self._has_forgotten = 0, False
        self._last.clear()
        self.presumptions.start_over()
        for known in self._known.values():
            self.retention.settle(known.source)

    def get(self, key: Key) -> Known | None:
        """Returns what was recorded last; None if the pass may do more, as the first one of all."""
        known = self._known.get(key)
        return known if known is None or known.is_opening or self._num_steps > 1 or key in self._met else None

    def forward_of(self, one: Pass, key: Key) -> Known | None:
        """Returns what a forward pass does, as is proven or may be presumed; None if it has to be stepped."""
        known = self.get(key)
        if self.presumptions.must_step(one, key):
            return None
        return known if known is not None and known.is_proven else self.presumptions.forward(one, key)

    def begin_forward(self, one: Pass, key: Key, known: Known) -> None:
        """Says that a forward pass is replayed."""
        if not known.is_proven or not self.will_know_backward(one):
            self.presumptions.begin_forward(one, key, known)

    def backward_of(self, one: Pass, key: Key) -> Known | None:
        """Returns what a backward pass does, as is proven or was presumed; None if neither is."""
        known = self.get(key)
        if known is not None and known.is_proven:
            return known
        known = self.presumptions.backward(one, key)
        if known is not None:
            self._keeps_result[key.kind, key.circumstances, key.groups] = Role(GRADIENT, 0) not in known.recording.freed
        return known

    def forward(self, one: Pass, given: torch.Tensor) -> Key:
        """Returns what decides about a forward pass."""
        unit = one.unit
        earlier = self._retained(unit), self.step.previous(one) is not None
        shape, strides, dtype = spec_of(given)
        strides = tuple(stride for stride, size in zip(strides, shape, strict=True) if size > 1)
        circumstances = one.number > 0, earlier, shape, strides, dtype, given.requires_grad
        return Key("forward", unit.kind, circumstances, (unit.before,), one.groups)

    def without_graph(self, unit: Unit, given: torch.Tensor) -> Key:
        """Returns what decides about a pass through a layer in the forward pass of its checkpoint."""
        retained = self._retained(unit)
        return Key(
            "without graph", unit.kind, (spec_of(given), retained), (unit.before, unit.after) if retained else ()
        )

    def _retained(self, unit: Unit) -> tuple[Any, ...]:
        """Returns what a pass may free of an earlier one, maybe under other settings, by places in this list."""
        retained = self.retention.of(unit)
        return tuple((unit.places.get(each.module, 0), each.phase, each.requested_bytes) for each in retained)

    def backward(self, one: Pass, *, is_latest: bool) -> Key:
        """Returns what decides about a backward pass."""
        unit, step = one.unit, self.step
        follows_backward = step.refills and step.overlaps and bool(self.retention.of(unit))
        circumstances = one.number > 0, is_latest, follows_backward, one.copies_allocated
        return Key("backward", unit.kind, circumstances, (unit.before, unit.after), one.groups, one.roles_of_forward)

    def learn(self, key: Key, known: Known) -> None:
        """Remembers a pass that was stepped, if later ones may be replayed."""
        if not self.step.replays:
            return
        former, of_kind, signature = self._known.get(key), self._of_kind(key, known.source), known.signature
        is_equal = former is not None and former.signature == signature
        last_key, last = self._last.get(of_kind, (key, None))
        follows_equal = last is not None and last.signature == signature
        known.is_proven = follows_equal or is_equal
        if self._num_steps == 1:
            self._opening.setdefault(key, None if known.has_unseen else signature)
            self._met.add(key)
        # The first router of a model allocates Megatron's tracker of the experts' losses, and no other pass does.
        known.is_opening = self._opening.get(key) == signature and (follows_equal or not self.step.is_moe)
        if last is not None and follows_equal:  # each proves the other
            last.is_proven = True
            last.is_opening = self._opening.get(last_key) == signature
        self._last[of_kind], self._known[key] = (key, known), known
        if key.direction == "backward":
            behind = known.source.unit.after, key.circumstances, key.groups
            is_kept = Role(GRADIENT, 0) not in known.recording.freed
            self._keeps_result[behind] = is_kept and self._keeps_result.get(behind, True)
        for other, proven in self.presumptions.note(key, known):
            if other not in self._known or not self._known[other].is_proven:
                opening = self._opening.setdefault(other, signature) if self._num_steps == 1 else None
                self._known[other] = replace(proven, is_opening=opening == signature)
                self._met.add(other)

    def not_recorded(self, key: Key, one: Pass) -> None:
        """Says that a stepped pass could not be recorded."""
        self._last.pop(self._of_kind(key, one), None)
        self.not_learned(key, one)

    def not_learned(self, key: Key, one: Pass) -> None:
        """Says that the pass that was stepped shows nothing of later ones."""
        self.presumptions.not_noted(key, one)
        if self._num_steps == 1:
            self._opening.setdefault(key, None)

    def _of_kind(self, key: Key, one: Pass) -> tuple[str, int, bool]:
        return key.direction, key.kind, self.step.is_latest(one)

    def keeps_result(self, key: Key) -> bool:
        """Whether a unit keeps the gradient of its input after a backward pass."""
        return self._keeps_result.get((key.kind, key.circumstances, key.groups), False)

    def will_know_backward(self, one: Pass) -> bool:
        """Whether two equal backward passes will have been stepped before that of a pass which begins now."""
        return all(self._will_know_backward(one, is_latest=each) for each in self.step.may_be_latest(one))

    def _will_know_backward(self, one: Pass, *, is_latest: bool) -> bool:
        unit, key = one.unit, self.backward(one, is_latest=is_latest)
        backward = self.get(key)
        if backward is not None and backward.is_proven:
            return True
        # Backward begins at the last unit, with the earliest micro-batch. Until it has ended there, a pass of the first
        # or last unit may still turn out to free what has no role.
        earlier = (each for each in self.step.in_flight if each.replay is None and each.output >= 0)
        waiting = [each for each in earlier if self.step.may_be_latest(each) == (is_latest,)]
        same = [each for each in waiting if self.backward(each, is_latest=is_latest) == key]
        if backward is not None and any(each.unit is unit for each in same):
            return True
        is_between = not (unit.is_first or unit.ends_chunk)
        if is_between and len([each for each in same if each.number < one.number]) >= 2:
            return True
        return unit.num_equal_after >= 2

    def note_freed(self, key: Key, freed: Freed) -> None:
        """Notes what a stepped forward pass has freed of the storages that it found."""
        self._freed[key.kind, key.circumstances] = self._freed_lately[key.kind] = freed

    def freed(self, key: Key) -> Freed | None:
        """Returns what the last stepped forward pass has freed that found the same; None if there is none."""
        return self._freed.get((key.kind, key.circumstances))

    def freed_lately(self, key: Key) -> Freed:
        """Returns what the last stepped forward pass of this step through a unit of the kind has freed."""
        return self._freed_lately.get(key.kind, [])
