"""What one layer keeps for backward, module by module: the numbers that a formula derived by hand has to give."""

from __future__ import annotations

import numpy as np

from memlab.record.step_record import StepRecord
from memlab.vocabulary import CATEGORIES, PHASES, POOLS

_KEPT = ("activations", "workspace")
"""What forward leaves allocated. The routing tensors to which a token dispatcher refers are workspace."""


def kept_by_module(record: StepRecord, layer: int = 0) -> dict[str, int]:
    """Returns what a layer keeps between its forward and its backward, by the module that allocated it.

    The moment is the start of the first backward pass: every micro-batch in flight has passed all layers of the rank.
    The bytes are those of the tensors themselves, without the allocator's rounding. What was allocated before the step
    is left out.

    Args:
        record: The record of a training step, with its timeline.
        layer: Number of the layer on its rank, from 0.

    Returns:
        Bytes by the name within the layer, such as ``mlp.linear_fc1``, the largest first. What the layer itself
        allocates, outside its modules, has the name ``layer``: its two additions, the second of which is its output.

    Raises:
        ValueError: If the record has no timeline or no backward pass, or the rank has no such layer.
    """
    timeline = record.timeline
    if timeline is None:
        raise ValueError("kept_by_module got a record without a timeline: pass what lab.step() returned")
    backward = np.flatnonzero(timeline.phase == PHASES.index("backward"))
    if not len(backward):
        raise ValueError("kept_by_module got a step without a backward pass: pass what lab.step() returned")
    head = slice(0, int(backward[0]))
    opened = np.unique(timeline.storage[: timeline.num_opening_events])
    mask = (timeline.pool[head] == POOLS.index("device")) & ~np.isin(timeline.storage[head], opened)
    mask &= np.isin(timeline.category[head], [CATEGORIES.index(name) for name in _KEPT])
    rounding = 0 if timeline.rounding_bytes is None else timeline.rounding_bytes
    sums = np.zeros(len(timeline.modules), dtype=np.int64)
    np.add.at(sums, timeline.module[head][mask], (timeline.delta_bytes - rounding)[head][mask])

    prefix = f"decoder.layers.{layer}"
    found = {
        name.removeprefix(prefix).removeprefix(".") or "layer": int(size)
        for name, size in zip(timeline.modules, sums, strict=True)
        if size and (name == prefix or name.startswith(f"{prefix}."))
    }
    if not found:
        raise ValueError(f"layer {layer} keeps nothing in this step, must be a layer of this rank: choose another one")
    return dict(sorted(found.items(), key=lambda item: -item[1]))
