"""The events of one pass through a layer, recorded so that a later pass of an equal layer can have the same ones.

A recording names each storage by its role, so that it holds for every layer of its kind: the third storage that this
pass allocated, the second one of the layer's forward pass, the layer's input. Bytes that the allocator adds are not
part of it: a replay asks the allocator again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.allocator.protocol import NO_BLOCK, Operations
from memlab.meter.allocations import Allocation, Event, category_of
from memlab.vocabulary import CATEGORIES, POOLS

_DEVICE, _HOST, _RESERVED = (POOLS.index(name) for name in ("device", "host", "reserved"))
_TEMPORARY = CATEGORIES.index("temporary")
OWN, FORWARD, INPUT, GRADIENT, RETAINED, PREVIOUS, RELOADED, HOST_COPY = range(8)
"""Whose storage a role is: allocated in this pass, or in the same layer's forward pass, before it; the layer's input;
the gradient of its output; what the layer retained when its last backward ended; what its latest other forward pass
whose backward has not ended yet allocated; what the backward pass of the layer after it has copied back from the host;
what other layers have on the host, outside of a pool, when its backward begins."""


class Role(NamedTuple):
    """What a storage is to a layer's pass."""

    owner: int
    number: int


class Birth(NamedTuple):
    """How a role of this pass is allocated."""

    pool: int
    module: int
    """As in `Recording.module`."""
    phase: int
    span: int
    """Counted from the pass's start."""
    recomputed: bool
    category: int | None
    stream: int


@dataclass(slots=True, eq=False)
class Recording:
    """One pass through a layer. All columns have a row per event, without those of the pool ``reserved``."""

    requested_bytes: npt.NDArray[np.int64]
    pool: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    category: npt.NDArray[np.int64]
    module: npt.NDArray[np.int64]
    """Place in the names of a layer's modules, from 0; or -1 - its code, for a module outside the layer."""
    owner: npt.NDArray[np.int64]
    role: npt.NDArray[np.int64]
    births: list[Birth]
    num_spans: int
    on_device: npt.NDArray[np.int64] = field(init=False)
    """Rows of the device's events."""
    operations: Operations = field(init=False)
    """The device's events. The slots of own roles are their numbers; those of `used` follow."""
    used: list[Role] = field(init=False)
    """Roles of others in the device's events."""
    others: list[tuple[int, Role]] = field(init=False)
    """Rows about storages that neither this pass nor its forward pass allocated."""
    host_bytes: int = field(init=False)
    most_host_bytes: int = field(init=False)
    signature: bytes = field(init=False)
    """Equal for equal passes."""
    freed: set[Role] = field(init=False)
    """Roles of others that this pass frees."""
    totals: dict[Role, int] = field(init=False)
    """Requested bytes that the pass leaves allocated of each role, below 0 for one that it frees."""
    live: list[int] = field(init=False)
    """Own roles that the pass leaves allocated."""
    last_pools: dict[int, int] = field(init=False)
    """The pools of the own roles at the end: what outlives a fused kernel moves from on chip to the device."""

    def __post_init__(self) -> None:
        self.on_device = np.flatnonzero(self.pool == _DEVICE)
        rows = zip(self.owner.tolist(), self.role.tolist(), self.requested_bytes.tolist(), strict=True)
        of_rows = list(rows)
        self.operations, self.used = self._operations()
        self.others = [(row, Role(owner, role)) for row, (owner, role, _) in enumerate(of_rows) if owner > FORWARD]
        host = np.cumsum(np.where(self.pool == _HOST, self.requested_bytes, 0))
        self.host_bytes, self.most_host_bytes = (int(host[-1]), int(host.max())) if len(host) else (0, 0)
        columns = (self.requested_bytes, self.pool, self.phase, self.category, self.module, self.owner, self.role)
        self.signature = b"".join(column.tobytes() for column in columns) + repr((self.births, self.num_spans)).encode()
        sums: dict[tuple[int, int], int] = {}
        for owner, role, size in of_rows:
            sums[owner, role] = sums.get((owner, role), 0) + size
        self.totals = totals = {Role(*role): total for role, total in sums.items()}
        self.freed = {role for role, total in totals.items() if role.owner != OWN and total < 0}
        self.live = [role.number for role, total in totals.items() if role.owner == OWN and total > 0]
        pools = zip(of_rows, self.pool.tolist(), strict=True)
        self.last_pools = {role: pool for (owner, role, _), pool in pools if owner == OWN}

    def spans_before(self, row: int) -> int:
        """Returns how many spans have ended when an error at an allocation has left the pass, and its recompute."""
        own = self.role[: row + 1][self.owner[: row + 1] == OWN]
        if not len(own):
            return 0
        latest = self.births[int(own.max())]
        return latest.span + latest.recomputed

    def _operations(self) -> tuple[Operations, list[Role]]:
        owner, role, size = (column[self.on_device] for column in (self.owner, self.role, self.requested_bytes))
        is_own = owner == OWN
        others = list(zip(owner[~is_own].tolist(), role[~is_own].tolist(), strict=True))
        slots = {other: len(self.births) + place for place, other in enumerate(dict.fromkeys(others))}
        streams = np.array([birth.stream for birth in self.births], dtype=np.int64)
        table = np.zeros((len(size), 3), dtype=np.int64)
        table[is_own, 0], table[~is_own, 0] = role[is_own], [slots[other] for other in others]
        table[:, 1] = np.maximum(size, 0)
        table[is_own, 2] = streams[role[is_own]]
        return Operations(table), [Role(*other) for other in slots]


def record(
    events: Sequence[Any],
    known: Mapping[int, Role],
    first_span: int,
    last_span: int,
    places: Mapping[int, int],
    buffers: Collection[int],
    *,
    left_out: Collection[int] = (),
    other_streams: bool = False,
    ignores_unknown: bool = False,
) -> tuple[Recording, list[Any]] | None:
    """Records a pass.

    Args:
        events: The meter's events during the pass.
        known: The roles of the storages that it may free, by the identity of their allocations.
        first_span: The span at its start.
        last_span: The span at its end.
        places: The layer's modules: place by code.
        buffers: Identities of the pinned allocations that can be replayed.
        left_out: Identities of allocations that no other pass would make.
        other_streams: Whether the pass may request memory on other streams than the default one.
        ignores_unknown: Leaves out what happens to storages that have no role: the recording only shows what the pass
            leaves allocated, and cannot be replayed.

    Returns:
        The recording and the allocations of its own roles; None if something happened that has no role.
    """
    own: dict[int, Role] = {}
    allocations: list[Allocation] = []
    births: list[Birth] = []
    rows = []
    for event in events:
        if type(event) is not Event:
            return None
        _, delta, pool, allocation, phase, rounding, _ = event
        key = id(allocation)
        # Zero bytes are those of a workspace, at the first product that needs it.
        if pool == _RESERVED or delta == rounding or key in left_out:
            continue
        place = places.get(allocation.module)
        module = -1 - allocation.module if place is None else place
        role = known.get(key)
        if role is None:
            role = own.get(key)
            if role is None:
                is_unknown = delta < 0 or allocation.span < first_span
                if is_unknown and ignores_unknown:
                    continue
                if is_unknown or (allocation.pinned_bytes and key not in buffers):
                    return None
                if allocation.stream and not other_streams:
                    return None
                role = own[key] = Role(OWN, len(births))
                allocations.append(allocation)
                birth = (module, allocation.phase, allocation.span - first_span, allocation.recomputed)
                births.append(Birth(pool, *birth, allocation.category, allocation.stream))
        if role.owner <= FORWARD:
            is_freed = allocation.freed_in_span is not None
            category = allocation.final_category if is_freed else category_of(allocation)
        else:  # it is another layer's, and keeps its own labels
            module = category = 0
        rows.append((delta - rounding, pool, phase, category, module, *role))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    sizes, pools, phases, categories, modules, owners, roles = (column.copy() for column in columns)
    spans = last_span - first_span
    return Recording(sizes, pools, phases, categories, modules, owners, roles, births, spans), allocations


def freed_by(events: Iterable[Any], known: Mapping[int, Role]) -> list[tuple[int, Role]]:
    """Returns what a stepped pass frees of the storages that it finds, in order.

    Args:
        known: The roles of the storages, by the identity of their allocations.

    Returns:
        How many storages of the default stream the pass has allocated before each free, and what it frees. Other
        streams are those of offload, which differs between equal layers.
    """
    num_allocated, freed = 0, dict[Role, int]()
    for _, delta, pool, allocation, _, rounding, _ in events:
        role = known.get(id(allocation))
        if delta < 0 and role is not None:
            freed[role] = num_allocated
        elif delta > rounding and pool != _RESERVED:
            num_allocated += allocation.stream == 0
            if role is not None:  # emptied before, and filled again
                freed.pop(role, None)
    return [(number, role) for role, number in freed.items()]


@dataclass(slots=True, eq=False)
class Replay:
    """A pass that had the events of a recording; one item among the events of a step."""

    recording: Recording
    modules: npt.NDArray[np.int64]
    """The codes of the layer's modules, by place."""
    forward: Replay | None
    """The forward pass that a backward pass belongs to."""
    others: list[tuple[int, Any]]
    """Rows with the allocation that they are about, or with a replay and a role of it."""
    started: int
    ended: int
    """Nanoseconds on the meter's clock."""
    num_bytes: npt.NDArray[np.int64]
    """Of the blocks of the device's events."""
    reserved: list[tuple[int, int]]
    """Rows before which the reserved bytes changed, and by how much."""
    of_reserved: Allocation
    """Stands for the reserved bytes."""
    blocks: list[int]
    """Of the own roles, while they are allocated."""
    span: int
    """At its start."""
    first_birth: int
    attached: dict[int, Allocation] = field(default_factory=dict)
    """Own roles that have become allocations of their own."""
    is_over: bool = False
    """Whether its backward pass has ended too."""
    number: int = -1
    """The number of its first storage in the timeline."""

    def has(self, role: int) -> bool:
        """Whether an own role that this pass has left allocated still belongs to it."""
        if role in self.attached:
            return False
        return self.blocks[role] != NO_BLOCK or self.recording.last_pools[role] != _DEVICE

    def left_allocated(self) -> list[tuple[int, int]]:
        """Returns the own roles that are still allocated, without those in `attached`, with their requested bytes."""
        recording, rows = self.recording, self.num_rows
        requested = [0] * len(recording.births)
        of_own = recording.owner[:rows] == OWN
        others = [False] * len(requested)
        columns = (column[:rows][of_own] for column in (recording.role, recording.requested_bytes, recording.pool))
        for role, size, pool in zip(*columns, strict=True):
            requested[role] += int(size)
            others[role] = pool != _DEVICE and not self.is_over
        on_device = [block != NO_BLOCK for block in self.blocks]
        return [
            (role, size)
            for role, size in enumerate(requested)
            if size > 0 and role not in self.attached and (on_device[role] or others[role])
        ]

    @property
    def num_rows(self) -> int:
        """How many rows it has in a timeline, without those of reserved bytes."""
        n, on_device = len(self.num_bytes), self.recording.on_device
        return int(on_device[n]) if n < len(on_device) else len(self.recording.pool)

    @property
    def num_roles(self) -> int:
        """How many storages it allocated, or would have if memory had not run out."""
        return len(self.recording.births)

    def columns(self, numbers: dict[int, int], next_number: int) -> npt.NDArray[np.int64]:
        """Returns its rows of a timeline, int64 of shape [8, events], in the order of `timeline_of`.

        Args:
            numbers: The storages' numbers by the identity of their allocations; its own are added.
            next_number: The number that its first storage gets.
        """
        recording = self.recording
        n, rows = len(self.num_bytes), self.num_rows  # fewer than recorded if memory ran out
        self.number = next_number
        columns = np.empty((8, rows), dtype=np.int64)
        ns, delta, pool, category, phase, module, number, rounding = columns
        ns[:] = np.linspace(self.started, self.ended, rows)
        requested, on_device = recording.requested_bytes[:rows], recording.on_device[:n]
        delta[:] = requested
        delta[on_device] = np.sign(requested[on_device]) * self.num_bytes
        rounding[:] = delta - requested
        pool[:], phase[:], category[:] = recording.pool[:rows], recording.phase[:rows], recording.category[:rows]
        owner, role, place = recording.owner[:rows], recording.role[:rows], recording.module[:rows]
        module[:] = np.where(place < 0, -1 - place, self.modules.take(place, mode="clip"))
        number[:] = role + next_number
        if self.forward is not None:
            of_forward = owner == FORWARD
            number[of_forward] = role[of_forward] + self.forward.number
        if rows < len(recording.pool) and recording.owner[rows] == OWN:
            # What a fused kernel has left on chip did not reach the device: it is freed in the span of its birth.
            failed = int(recording.role[rows])
            if recording.births[failed].category is None:
                category[(owner == OWN) & (role == failed)] = _TEMPORARY
        for of_own, allocation in self.attached.items():
            numbers[id(allocation)] = next_number + of_own
            category[(owner == OWN) & (role == of_own)] = allocation.final_category
        for row, other in self.others:
            if row >= rows:
                break
            if isinstance(other, tuple):
                replay, of_previous = other
                birth = replay.recording.births[of_previous]
                number[row] = replay.number + of_previous
                module[row] = replay.modules[birth.module] if birth.module >= 0 else -1 - birth.module
                category[row] = replay.category_of_role(of_previous)
            else:
                number[row], module[row] = numbers[id(other)], other.module
                category[row] = other.final_category
        if self.reserved:
            places = [place for place, _ in self.reserved]
            changes = [change for _, change in self.reserved]
            columns = np.insert(columns, places, 0, axis=1)
            at = np.array(places) + np.arange(len(places))
            columns[0, at] = ns[np.minimum(places, rows - 1)] if rows else self.ended
            columns[1, at] = changes
            columns[2, at] = _RESERVED
            columns[3, at] = self.of_reserved.final_category
            columns[4, at] = recording.phase[0] if rows else 0
            columns[5, at] = self.of_reserved.module
            columns[6, at] = numbers[id(self.of_reserved)]
        return columns

    def category_of_role(self, role: int) -> int:
        """Returns the category of an own role that was freed after this pass."""
        allocation = self.attached.get(role)
        if allocation is not None:
            return allocation.final_category
        birth = self.recording.births[role]
        return category_of(birth)
