"""A meter for the CPU tensors of any program, those that existed before it started included."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from memlab.live_objects import references_to_instances_of, with_subclasses
from memlab.meter.events import EventLog
from memlab.meter.labels import Labels
from memlab.meter.memory import PlainMemory
from memlab.meter.observe_program import ObserveProgram
from memlab.meter.observers import tensors_in, tensors_with_memory, unobserved
from memlab.meter.storage_meter import StorageMeter
from memlab.meter.storages import Storages


class ProgramTensors:
    """Tells storages of a program's CPU tensors but those of `without`; other devices are not its business."""

    def __init__(self, labels: Labels, storages: Storages, without: Iterable[torch.Tensor]) -> None:
        self._labels, self._storages = labels, storages
        self._not_counted = {storage._cdata: storage for storage in (each.untyped_storage() for each in without)}

    def count_existing(self) -> None:
        """Counts the tensors that Python's garbage collector knows and that have not been counted.

        It knows neither what an operation has saved for backward without returning it, nor what `gc.freeze` has hidden.
        """
        for reference in _references_to_tensors():
            # What another thread frees meanwhile is gone: a step of a lab there would otherwise have a higher peak.
            self.after_operation(reference())

    def count_unseen(self) -> None:
        """Counts as unlabelled what exists now and no operation on the meter's thread has returned.

        Other threads have made it, or a function that is no operation, such as ``torch.from_numpy``.
        """
        with unobserved(), self._labels.category("unlabelled"):
            self.count_existing()

    def after_operation(self, results: Any, arguments: Any = ()) -> None:
        """As that of `Storages`; of a sparse tensor or a wrapper it counts the parts, each as memory of the device."""
        found: Iterable[torch.Tensor] = ()
        if isinstance(results, torch.Tensor):
            found = (results,)
        elif isinstance(results, (tuple, list)):
            found = tensors_in(results)
        for tensor in found:
            for part in tensors_with_memory(tensor):
                storage: Any = part.untyped_storage()
                if storage.device.type == "cpu" and storage._cdata not in self._not_counted:
                    self._storages.count(storage)


def program_meter(labels: Labels, without: Iterable[torch.Tensor] = ()) -> tuple[StorageMeter, ProgramTensors]:
    """Returns a meter of a program, and what tells it of tensors; for the arguments see `ProgramTensors`."""
    log = EventLog(labels)
    storages = Storages(labels, log, PlainMemory(log))
    tensors = ProgramTensors(labels, storages, without)
    return StorageMeter(labels, storages, lambda: ObserveProgram(tensors.after_operation)), tensors


def _references_to_tensors() -> list[weakref.ref[torch.Tensor]]:
    lazy = with_subclasses(UninitializedParameter) | with_subclasses(UninitializedBuffer)
    return references_to_instances_of(with_subclasses(torch.Tensor) - lazy)
