"""The timeline of a step: every storage that is allocated, freed or transferred, as columns.

A running sum over `delta_bytes` is the memory in use, so a timeline needs no reference to any tensor, and one with a
million events is a few arrays. What was allocated before the step comes first, as opening events. For example, a step
that begins with 100 bytes, allocates 30, and frees 20 of the first:

    delta_bytes         100   30   -20       num_opening_events = 1
    running sum         100  130   110       the peak is after event 1
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memlab._version import __version__
from memlab.record.file_format import FORMAT, check_format
from memlab.snapshot.reader import SNAPSHOT_POOLS, read_snapshot
from memlab.vocabulary import CATEGORIES, PHASES, POOLS, place_in_words

IntArray = npt.NDArray[np.int64]
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(np.uint8) for name in ("pool", "category", "phase")}
_DTYPES |= {name: np.dtype(np.int32) for name in ("module", "storage")}
_REMAINDERS_BYTES = 4 * 1024**2
"""More than the unsplit remainders of two steps differ by: up to 1 MiB for each of a few large blocks."""
_COLUMNS = ("nanoseconds", "delta_bytes", "pool", "category", "phase", "module", "storage")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Memory events of one step, in the order in which they happened. All columns have the same length."""

    nanoseconds: IntArray
    """Time since the step's start; 0 for opening events."""
    delta_bytes: IntArray
    """Positive when a storage is allocated or grows, negative when it is freed or shrinks."""
    pool: npt.NDArray[np.uint8]
    """Index into `POOLS`."""
    category: npt.NDArray[np.uint8]
    """Index into `CATEGORIES`: what the storage is; the same when it is allocated and when it is freed."""
    phase: npt.NDArray[np.uint8]
    """Index into `PHASES`: when the event happened."""
    module: npt.NDArray[np.int32]
    """Index into `modules`: which module allocated the storage."""
    storage: npt.NDArray[np.int32]
    """Number of the storage that the event is about; it joins a free to its allocation."""
    modules: tuple[str, ...]
    """Module names, for example ``decoder.layers.0.mlp.experts.linear_fc1``."""
    num_opening_events: int
    """Number of events at the head that describe what was allocated when the step began."""
    rounding_bytes: IntArray | None = None
    """One more column: the part of `delta_bytes` that the allocator gave beyond the request, by rounding and by unsplit
    remainders. None if unknown: in a snapshot, and in files from before this column existed."""

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in _COLUMNS}
        lengths |= set() if self.rounding_bytes is None else {len(self.rounding_bytes)}
        assert len(lengths) == 1, f"columns of different lengths: {lengths}"

    def __len__(self) -> int:
        return len(self.delta_bytes)

    def scanned(self) -> Timeline:
        """Returns this timeline for many questions in a row: it keeps the running totals that it has added up."""
        return _Scanned(**{each.name: getattr(self, each.name) for each in fields(self)})

    def total_bytes(self, pool: str = "device") -> IntArray:
        """Returns the bytes in use in a pool after each event, int64 of shape [events]."""
        return np.cumsum(np.where(self.pool == POOLS.index(pool), self.delta_bytes, 0))

    def category_bytes(self, pool: str = "device") -> IntArray:
        """Returns the bytes in use by category after each event, int64 of shape [categories, events]."""
        in_pool = np.where(self.pool == POOLS.index(pool), self.delta_bytes, 0)
        return np.stack([np.cumsum(np.where(self.category == code, in_pool, 0)) for code in range(len(CATEGORIES))])

    def categories_of(self, pool: str = "device") -> set[str]:
        """Returns the categories of which something was allocated in a pool, before the step or in it."""
        return {CATEGORIES[code] for code in np.unique(self.category[self.pool == POOLS.index(pool)])}

    @property
    def first_step_event(self) -> int:
        """Index of the event after which the step starts: the last opening event, or 0 if there is none."""
        return max(self.num_opening_events - 1, 0)

    def place(self, index: int) -> str:
        """Says in words where event `index` happened, such as ``forward of gpt_model``."""
        return place_in_words(PHASES[self.phase[index]], self.modules[self.module[index]])

    def peak_index(self, pool: str = "device", phases: Sequence[str] | None = None) -> int:
        """Returns the index of the first event after which the pool is at its peak.

        Args:
            pool: One of `POOLS`.
            phases: Considers only events of these phases; None considers all, and the last opening event.
        """
        first = self.first_step_event
        totals = self.total_bytes(pool)[first:]
        if len(totals) == 0:
            return 0
        if phases is not None:
            codes = [PHASES.index(phase) for phase in phases]
            outside = ~np.isin(self.phase[first:], codes)
            if outside.all():
                return first
            totals = np.where(outside, np.int64(-1), totals)
        return first + int(np.argmax(totals))

    def peak_phase(self) -> str:
        """Returns the phase in which the device's allocated bytes peak, one of `PHASES`; empty without events.

        A step may begin at its peak and reach it again: with bf16 gradients, fp32 copies of the gradients stay until
        the next step. The phase is then that of the later moment, even if the two peaks differ by unsplit remainders.
        """
        if not len(self):
            return ""
        total, peak = self.total_bytes(), self.peak_index()
        if peak < self.num_opening_events < len(self):
            in_step = self.num_opening_events + int(np.argmax(total[self.num_opening_events :]))
            peak = in_step if total[in_step] > total[peak] - _REMAINDERS_BYTES else peak
        return PHASES[self.phase[peak]]

    def categories_near_peak(self, within_bytes: int) -> dict[str, tuple[int, int]]:
        """Returns each category's fewest and most bytes at the moments at which the device nearly reaches its peak.

        A step can nearly reach its peak several times, with other things allocated. Which moment is the peak may then
        depend on unsplit remainders.

        Args:
            within_bytes: How far below the peak a moment may be.
        """
        first = self.first_step_event
        total = self.total_bytes()[first:]
        near = total >= total.max(initial=0) - within_bytes
        by_category = self.category_bytes()[:, first:][:, near]
        rows = zip(CATEGORIES, by_category, strict=True)
        return {name: (int(row.min()), int(row.max())) for name, row in rows if row.any()}

    def peak_active_bytes(self) -> int:
        """Returns the most bytes in use on the device, including those that only another stream still uses."""
        first = self.first_step_event
        return int((self.total_bytes("device") + self.total_bytes("pending_free"))[first:].max(initial=0))

    def peak_bytes(self, pool: str = "device", phases: Sequence[str] | None = None) -> int:
        """Returns the most bytes in use in a pool, after any event of the given phases."""
        return self.bytes_at(self.peak_index(pool, phases), pool)

    def bytes_at(self, index: int, pool: str = "device") -> int:
        """Returns the bytes in use in a pool after event `index`."""
        head = slice(0, index + 1)
        return int(self.delta_bytes[head][self.pool[head] == POOLS.index(pool)].sum())

    @property
    def opening_bytes(self) -> int:
        """Device bytes in use when the step began."""
        return self.bytes_at(self.num_opening_events - 1)

    def breakdown(
        self,
        index: int,
        by: Literal["category", "module"] = "category",
        pool: str = "device",
        categories: Sequence[str] = CATEGORIES,
        *,
        with_rounding: bool = True,
    ) -> dict[str, int]:
        """Splits the bytes in use after event `index`.

        Args:
            by: Whether the parts are categories or modules.
            pool: One of `POOLS`.
            categories: Some of `CATEGORIES`; others are left out.
            with_rounding: False leaves out what the allocator gave beyond the requests, as far as it is known. A
                prediction then has the bytes of the tensors themselves, as a step on the CPU does.

        Returns:
            Bytes by name, the largest first, without empty parts. With all categories the values add up to `bytes_at`.
        """
        head = slice(0, index + 1)
        mask = self.pool[head] == POOLS.index(pool)
        mask &= np.isin(self.category[head], [CATEGORIES.index(name) for name in categories])
        names = CATEGORIES if by == "category" else self.modules
        codes = (self.category if by == "category" else self.module)[head][mask]
        sums = np.zeros(len(names), dtype=np.int64)
        requested = self.delta_bytes
        if not with_rounding and self.rounding_bytes is not None:
            requested = requested - self.rounding_bytes
        np.add.at(sums, codes, requested[head][mask])
        order = np.argsort(-sums, kind="stable")
        return {names[code]: int(sums[code]) for code in order if sums[code] != 0}

    def allocated_bytes_by_module(self, category: str) -> dict[str, int]:
        """Returns the device bytes of a category that the step allocated, by module; frees are not subtracted."""
        mask = (
            (self.category == CATEGORIES.index(category))
            & (self.pool == POOLS.index("device"))
            & (self.delta_bytes > 0)
        )
        mask[: self.num_opening_events] = False
        sums = np.zeros(len(self.modules), dtype=np.int64)
        np.add.at(sums, self.module[mask], self.delta_bytes[mask])
        return {self.modules[code]: int(sums[code]) for code in np.flatnonzero(sums)}

    def allocated_bytes_of(self, category: str) -> int:
        """Returns the sum of `allocated_bytes_by_module`."""
        return sum(self.allocated_bytes_by_module(category).values())

    def allocated_bytes_in(self, phase: str) -> int:
        """Returns the device bytes that the step allocated in a phase, one of `PHASES`; frees are not subtracted."""
        mask = (self.phase == PHASES.index(phase)) & (self.pool == POOLS.index("device")) & (self.delta_bytes > 0)
        mask[: self.num_opening_events] = False
        return int(self.delta_bytes[mask].sum())

    def phases(self) -> list[str]:
        """Returns the phases in which something happened in the step, in the order of `PHASES`."""
        return [PHASES[code] for code in np.unique(self.phase[self.num_opening_events :])]

    def save(self, path: Path) -> None:
        """Writes the columns to a compressed ``.npz`` file."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        if self.rounding_bytes is not None:
            arrays["rounding_bytes"] = self.rounding_bytes
        np.savez_compressed(
            path,
            format=np.int64(FORMAT),
            memlab=np.array(__version__),
            modules=np.array(self.modules),
            num_opening_events=np.int64(self.num_opening_events),
            **arrays,
        )

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """Reads what `save` wrote, and what memlab 0.1.0 wrote, which had no format number.

        Nothing in the file is executed: pickled arrays are refused.

        Raises:
            ValueError: If a newer memlab wrote it, or it is damaged.
        """
        try:
            return cls._of_arrays(_read_arrays(path))
        except _DAMAGED as error:
            raise ValueError(f"{path} is not a whole timeline ({_reason(error)}): take the step again") from error

    @classmethod
    def _of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Timeline:
        if "format" in arrays:
            check_format(int(arrays["format"]), str(arrays.get("memlab", "an unknown version")))
        missing = [name for name in (*_COLUMNS, "modules", "num_opening_events") if name not in arrays]
        if missing:
            raise ValueError(f"the columns {', '.join(missing)} are missing")
        num_opening_events = int(arrays["num_opening_events"])
        columns = {name: arrays[name] for name in (*_COLUMNS, "rounding_bytes") if name in arrays}
        for name, column in columns.items():
            dtype = _DTYPES.get(name, np.dtype(np.int64))
            if column.dtype != dtype or column.ndim != 1 or column.size != columns["delta_bytes"].size:
                raise ValueError(f"the column {name} is {column.dtype} of shape {column.shape}")
        modules = tuple(str(name) for name in arrays["modules"])
        limits = {"pool": POOLS, "category": CATEGORIES, "phase": PHASES, "module": modules}
        for name, names in limits.items():
            if not _is_index(columns[name], len(names)):
                raise ValueError(f"the column {name} has values outside 0 to {len(names) - 1}")
        if not 0 <= num_opening_events <= len(columns["delta_bytes"]):
            raise ValueError(f"num_opening_events is {num_opening_events}")
        return cls(modules=modules, num_opening_events=num_opening_events, **columns)

    @classmethod
    def from_snapshot(cls, path: Path | str, device: int | None = None) -> Timeline:
        """Reads a memory snapshot of torch: a pickle that ``torch.cuda.memory._dump_snapshot`` wrote, by any program.

        The running totals end at the snapshot's own bytes; what existed before its first entry is found by going back
        from there. The bytes of a block are exactly those that torch counts, with one exception: a block over 1 MiB
        that was allocated before the first entry and freed with free memory behind it. Such a block counts with its
        request, rounded to 512 bytes, and may have been up to 1 MiB larger. (Under ``roundup_power2_divisions`` this is
        so for every block that was freed.)

        Category and phase are unknown: ``unlabelled``, ``idle``. Module is the text that the program had set with
        ``torch.cuda.memory._set_memory_metadata``, or else the line outside torch that allocated, if stacks were
        recorded. What `StepRecord.export_snapshot` wrote is read back with its bytes, modules and categories.

        Args:
            path: Path of the pickle. Nothing in it is executed: it is refused if it contains more than plain data.
            device: Number of the device; None takes the only one that the snapshot contains.

        Raises:
            ValueError: If the file cannot be read, is not a snapshot, or does not contain the device.
        """
        events = read_snapshot(path, device)
        unlabelled = CATEGORIES.index("unlabelled")
        codes = [CATEGORIES.index(name) if name in CATEGORIES else unlabelled for name in events.categories]
        return cls(
            nanoseconds=events.nanoseconds,
            delta_bytes=events.delta_bytes,
            pool=np.array([POOLS.index(name) for name in SNAPSHOT_POOLS], dtype=np.uint8)[events.pool],
            category=np.array(codes, dtype=np.uint8)[events.category],
            phase=np.full(len(events.pool), PHASES.index("idle"), dtype=np.uint8),
            module=events.module.astype(np.int32),
            storage=events.storage.astype(np.int32),
            modules=events.modules,
            num_opening_events=events.num_opening_events,
        )


class _Scanned(Timeline):
    """A timeline that adds up each pool's bytes only once."""

    def total_bytes(self, pool: str = "device") -> IntArray:
        known: IntArray | None = vars(self).get(pool)
        if known is None:
            known = vars(self)[pool] = super().total_bytes(pool)
        return known

    def bytes_at(self, index: int, pool: str = "device") -> int:
        return int(self.total_bytes(pool)[: index + 1][-1:].sum())


_MAX_BYTES = 4 * 1024**3
"""A timeline of 100 million events, which no step has, takes less. A few kilobytes of zip can hold petabytes."""
# What numpy and zipfile raise when they read a damaged file; neither documents a closed list.
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("it is not a file")
    with zipfile.ZipFile(path) as archive:
        num_bytes = sum(member.file_size for member in archive.infolist())
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"it holds {num_bytes} bytes, more than any step's")
    with np.load(path, allow_pickle=False) as opened:
        return dict(opened)


def _is_index(column: npt.NDArray[Any], count: int) -> bool:
    return not len(column) or (int(column.min()) >= 0 and int(column.max()) < count)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
