"""By how much the losses of two steps may differ if only their memory settings do: not at all, with one exception."""

from __future__ import annotations

from memlab.config.model_restrictions import checkpoints_moe_layers
from memlab.record.step_record import StepRecord

_SORTS_ALWAYS = "0.16."
_UNSORTED = 1e-4


def loss_tolerance(*records: StepRecord) -> float:
    """Returns the share of the loss by which the losses of steps under different memory settings may differ.

    megatron-core 0.19 sorts a token's experts only where gradients are recorded (``transformer/moe/moe_utils.py``,
    ``_compute_topk``: ``sorted=torch.is_grad_enabled()``). The first pass of a checkpoint around a router records none,
    its softmax adds in another order, and its recomputation is not quite what forward computed: 2.3e-5 of the loss on
    an H200 (Qwen3-30B-A3B, 2 layers, 2048 tokens, bf16), 2.6e-6 on a CPU, and exactly 0 if it always sorts.

    Returns:
        0.0 if losses must be equal to the last bit.
    """
    unsorted = any(
        not record.versions.get("megatron-core", _SORTS_ALWAYS).startswith(_SORTS_ALWAYS)
        and checkpoints_moe_layers(record.settings, record.scenario.architecture)
        for record in records
    )
    return _UNSORTED if unsorted else 0.0
