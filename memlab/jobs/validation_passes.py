"""Validation between training steps: passes without backward, which need more only where their micro-batches do."""

from __future__ import annotations

from memlab.config.validation import is_whole_number
from memlab.jobs.frameworks.framework import Reading

_MICRO_BATCH_OF_TRAINING = {
    "eval_micro_batch_size": "micro_batch_size",
    "validation.eval_micro_batch_size": "train.micro_batch_size",
} | {f"{name}.val_micro_batch_size": "policy.train_micro_batch_size" for name in ("dpo", "rm", "sft")}
"""Of Megatron-LM (``TrainingConfig``, d98e8a64), Megatron-Bridge (067f987d) and NeMo-RL (``validate`` in
nemo_rl/algorithms/, 7ea279ab)."""
_BY_BUDGET = ("policy.sequence_packing.enabled", "policy.dynamic_batching.enabled")
"""With these, NeMo-RL's validation has the training's budget of tokens, and no micro-batch of its own."""


def note_validation(reading: Reading) -> None:
    """Names a validation whose micro-batches are larger than those of the training."""
    entries = reading.entries
    if any(entries.get(key) is True for key in _BY_BUDGET):
        return
    sizes = {one.key: one.value for one in reading.taken}
    for key, of_training in _MICRO_BATCH_OF_TRAINING.items():
        own, usual = entries.get(key), sizes.get(of_training)
        if is_whole_number(own) and is_whole_number(usual) and own > usual:
            reason = f"validation's passes, without backward, have more than the {usual} of {of_training}"
            reading.miss(key, "more", reason)
