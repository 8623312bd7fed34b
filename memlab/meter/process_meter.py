"""A meter for the CPU tensors of any program, those that existed before it started included."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import compress
from typing import Any, ClassVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from memlab.meter.observers import ObserveAnyResults, ObserveResults, strided_parts, tensors_in
from memlab.meter.storage_meter import StorageMeter
from memlab.vocabulary import POOLS


class ProcessMeter(StorageMeter):
    """Counts the storages of CPU tensors; those of other devices are not its business."""

    _observe: ClassVar[type[ObserveResults]] = ObserveAnyResults

    def count_existing(self) -> None:
        """Counts the tensors that Python's garbage collector knows.

        It knows neither what an operation has saved for backward without returning it, nor what `gc.freeze` has hidden.
        """
        for tensor in _live_tensors():
            self.after_operation(tensor)

    def after_operation(self, results: Any, arguments: Any = ()) -> None:
        """As `StorageMeter` does; of a sparse result it counts the indices and the values."""
        try:
            super().after_operation(results, arguments)
        except NotImplementedError:  # a sparse tensor has no storage of its own
            for tensor in tensors_in((results,)):
                for part in strided_parts(tensor):
                    super().after_operation(part, arguments)

    def _count_storage(self, storage: Any, arguments: Any) -> None:
        if storage.device.type == "cpu":
            super()._count_storage(storage, arguments)

    def _pool_of_new(self, arguments: Any) -> int:
        return POOLS.index("device")


def _live_tensors() -> Iterator[torch.Tensor]:
    objects = gc.get_objects()
    # Classes are looked at, not objects: `isinstance` asks a lazy module for its class, which imports it. A program
    # has about a million objects and a few thousand classes.
    wanted = {
        kind
        for kind in set(map(type, objects))
        if issubclass(kind, torch.Tensor) and not issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    }
    return compress(objects, map(wanted.__contains__, map(type, objects)))
