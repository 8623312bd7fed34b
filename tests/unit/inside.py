"""The one door through which tests and benchmarks look at what a lab hides: its live model, its thread, its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlab.lab.lab import Lab
from memlab.lab.one_process import OneProcess
from memlab.meter.labels import PRODUCTS

if TYPE_CHECKING:
    from memlab.lab.many_ranks import ManyRanks


def inside(lab: Lab) -> OneProcess:
    """Returns the session of a model in this process: its `model`, the `stepper` that takes its steps, and the `worker` that is the thread."""
    assert isinstance(lab._session, OneProcess)
    return lab._session


def ranks_of(lab: Lab) -> ManyRanks:
    """Returns the session of a lab with ranks."""
    from memlab.lab.many_ranks import ManyRanks  # with ipyparallel, which a machine with a GPU may not have

    assert isinstance(lab._session, ManyRanks)
    return lab._session


def skip_first_calls(lab: Lab) -> None:
    """Makes the lab's process one in which other models were: kernels are timed, and libraries have their workspaces."""
    labels = inside(lab).model.labels
    labels.on_timing = None
    for product in PRODUCTS:
        if labels.on_product is not None:
            labels.on_product(product)
