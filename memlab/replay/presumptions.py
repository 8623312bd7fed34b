"""Passes that are replayed before they are proven, and compared with stepped ones at both ends of their row.

In a row of equal units, a unit has another neighbour only at an end. So each row needs only one stepped unit before
those that are replayed, and one after them: their passes must have equal events, or the step begins again without
presumptions. Where an end differs from the units beside it (it finds no group to bring back, or offloads none), the
second unit from there is stepped too.

Whether an end differs is not guessed: it has been seen in an earlier step with the same recompute, of which more units
were stepped. So the first step of its kind presumes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memlab.replay.passes import Key, Known, NotReplayableError, Pass, Unit

_DIRECTIONS = ("forward", "backward")
_PLACES = ("front", "inner", "back")


class _Row(NamedTuple):
    """The passes of one direction and micro-batch through the units of a kind."""

    direction: str
    kind: int
    number: int


@dataclass(slots=True, eq=False)
class _Shown:
    """A stepped pass."""

    key: Key
    known: Known
    does: tuple[Any, ...]
    """Equal for passes that can take each other's place."""


@dataclass(slots=True, eq=False)
class _Pending:
    """What passes of a row have done so far only because a stepped pass did it."""

    known: Known
    keys: set[Key]


@dataclass(slots=True, eq=False)
class Presumptions:
    """Which passes of a step are replayed before they are proven."""

    _is_allowed: bool = False
    _is_suspended: bool = False
    """Whether a presumption was wrong since the model was built, or has started over."""
    _is_first_step: bool = False
    _agree: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    """Whether the passes at two places of a row are equal, by what was seen."""
    _shown: dict[_Row, dict[int, _Shown]] = field(default_factory=dict)
    """The stepped passes of this step by their place in the row."""
    _classes: dict[_Row, tuple[tuple[Any, ...], int]] = field(default_factory=dict)
    """With the row's number of units."""
    _pending: dict[_Row, _Pending] = field(default_factory=dict)
    _saves_input: dict[_Row, bool] = field(default_factory=dict)
    """Whether presumed forward passes have kept their input, by the row of their backward passes."""

    def begin_step(self, *, is_allowed: bool, is_first: bool) -> None:
        """Begins a step.

        Args:
            is_allowed: Whether passes may be presumed in it.
            is_first: Whether it is the first one of a model.
        """
        self._is_allowed, self._is_first_step = is_allowed and not self._is_suspended, is_first
        for of_step in (self._shown, self._classes, self._pending, self._saves_input):
            of_step.clear()

    def end_step(self) -> None:
        """Notes which passes of the step were equal.

        Raises:
            NotReplayableError: If a presumption was not compared with any stepped pass.
        """
        if self._pending:
            raise NotReplayableError("the passes of a row of layers were not compared with one that is stepped")
        for row, shown in self._shown.items():
            of_row, length = self._classes[row]
            for name, one, other in (("front", 0, 1), ("inner", 1, length - 2), ("back", length - 2, length - 1)):
                if one < other and one in shown and other in shown:
                    place = *of_row, row.direction, name
                    self._agree[place] = self._agree.get(place, True) and _are_equal(shown[one], shown[other])

    def start_over(self) -> None:
        """Says that the model is about to start over."""
        self._is_suspended = False

    def give_up(self) -> bool:
        """Presumes nothing until the model starts over, and less from then on.

        Returns:
            Whether the last step has presumed anything.
        """
        for row in self._saves_input:
            of_row, _ = self._classes[row]
            agreed = [(*of_row, each, name) for each in _DIRECTIONS for name in ("front", "back")]
            if not any(self._agree.get(place, False) for place in agreed):
                agreed = [(*of_row, each, "inner") for each in _DIRECTIONS]
            self._agree.update(dict.fromkeys(agreed, False))
        self._is_suspended |= bool(self._saves_input)
        return bool(self._saves_input)

    def forward(self, one: Pass, key: Key) -> Known | None:
        """Returns what a forward pass may be presumed to do; None if it has to be known."""
        shown = self._front(one, key)
        return None if shown is None else shown.known

    def will_show_backward(self, one: Pass, key: Key) -> bool:
        """Whether the backward pass that belongs to a forward pass with this key may be presumed."""
        return self._front(one, key) is not None

    def must_step(self, one: Pass, key: Key) -> bool:
        """Whether a forward pass is one that those before it are compared with."""
        is_relied_on = _Row("backward", one.unit.kind, one.number) in self._saves_input
        return is_relied_on and one.unit.place >= self._ends(one.unit, key)[1]

    def begin_forward(self, one: Pass, key: Key, known: Known) -> None:
        """Says that a forward pass is replayed, and that it is presumed, or its backward pass will be."""
        source, row = known.source, _Row("forward", one.unit.kind, one.number)
        saves_input = source.saves_input
        if saves_input is None:
            saves_input = source.input is not None and source.input.num_bytes > 0
        of_backward = row._replace(direction="backward")
        self._saves_input[of_backward] = saves_input
        self._classes[of_backward] = self._classes[row] = self._class_of(one.unit, key), one.unit.row_length
        if not known.is_proven:
            self._presume(row, key, known)

    def backward(self, one: Pass, key: Key) -> Known | None:
        """Presumes what a backward pass does, and returns it; None if it has to be known."""
        row = _Row("backward", one.unit.kind, one.number)
        if row not in self._saves_input:
            return None
        shown = self._shown.get(row, {}).get(self._ends(one.unit, key)[1])
        if shown is None or not _have_equal_keys(shown.key, key):
            return None
        self._presume(row, key, shown.known)
        return shown.known

    def _presume(self, row: _Row, key: Key, known: Known) -> None:
        self._pending.setdefault(row, _Pending(known, set())).keys.add(key)

    def note(self, key: Key, known: Known) -> list[tuple[Key, Known]]:
        """Notes a stepped pass, and returns what it proves of passes with other keys.

        Raises:
            NotReplayableError: If it differs from those that were presumed.
        """
        one, unit = known.source, known.source.unit
        row = _Row(key.direction, unit.kind, one.number)
        if key.direction not in _DIRECTIONS or not unit.row_length:
            return []
        self._classes[row] = self._class_of(unit, key), unit.row_length
        self._shown.setdefault(row, {})[unit.place] = _Shown(key, known, _does(known, key.direction))
        is_compared = unit.place == self._ends(unit, key)[1]
        if is_compared and self._saves_input.get(row, one.saves_input) != one.saves_input:
            raise NotReplayableError(f"layer {unit.layers[0]} saves its input, or does not, unlike those before it")
        pending = self._pending.pop(row, None)
        if pending is None:
            return []
        if _does(pending.known, key.direction) != _does(known, key.direction):
            raise NotReplayableError(f"layer {unit.layers[0]} has another {key.direction} pass than was presumed")
        known.is_proven = pending.known.is_proven = True
        return [(other, pending.known) for other in pending.keys]

    def not_noted(self, key: Key, one: Pass) -> None:
        """Says that a stepped pass shows nothing.

        Raises:
            NotReplayableError: If it had to show that others are as was presumed.
        """
        if _Row(key.direction, one.unit.kind, one.number) in self._pending:
            raise NotReplayableError(f"the pass of layer {one.unit.layers[0]} could not be recorded")

    def _front(self, one: Pass, key: Key) -> _Shown | None:
        """Returns the stepped forward pass at the front of a unit's row, if the unit's own may be presumed."""
        unit, first, last = one.unit, *self._ends(one.unit, key)
        shown_of_row = self._shown.get(_Row("forward", unit.kind, one.number), {})
        if not self._is_allowed or not shown_of_row or not first < unit.place < last:
            return None
        shown = shown_of_row.get(first)
        if first == 0 and shown is not None and shown.known.source.offloads_input:
            shown = shown_of_row.get(1) if unit.place > 1 else None
        return shown if shown is not None and _have_equal_keys(shown.key, key) else None

    def _ends(self, unit: Unit, key: Key) -> tuple[int, int]:
        """Returns the places of the two units of a row which the passes between them are compared with."""
        of_row, last = self._class_of(unit, key), unit.row_length - 1
        agrees = {name: all(self._agree.get((*of_row, each, name), False) for each in _DIRECTIONS) for name in _PLACES}
        if not agrees["inner"]:
            return last, 0
        return 0 if agrees["front"] else 1, last if agrees["back"] else last - 1

    def _class_of(self, unit: Unit, key: Key) -> tuple[Any, ...]:
        """Returns what rows have in common whose ends may be expected to differ, or not."""
        is_later, offloads = key.circumstances[0], min(len(key.groups), 3)
        return unit.structure, is_later, offloads, self._is_first_step


def _have_equal_keys(one: Key, other: Key) -> bool:
    """Whether two passes of a row find the same."""
    return (one.circumstances, one.groups, one.roles) == (other.circumstances, other.groups, other.roles)


def _are_equal(one: _Shown, other: _Shown) -> bool:
    return _have_equal_keys(one.key, other.key) and one.does == other.does


def _does(known: Known, direction: str) -> tuple[Any, ...]:
    does = known.signature, known.result, known.spec, known.keeps_states, known.has_checkpoint
    if direction == "forward":
        return does
    left = known.source.left
    return *does, known.source.saves_input, left.in_graph, left.referred, left.holders, len(left.others)
