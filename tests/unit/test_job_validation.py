"""Validation whose micro-batches are larger than those of the training is named; a smaller one is not."""

from pathlib import Path

import pytest

from memlab.jobs.job import Job

_NEMO_RL = """policy:
  train_micro_batch_size: 2
  {engine}: {{enabled: true}}
  sequence_packing: {{enabled: {packs}}}
sft: {{val_micro_batch_size: {size}}}
"""
_MEGATRON_LM = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 \
--num-attention-heads 8 --seq-length 2048 --micro-batch-size 2 --eval-micro-batch-size {size}
"""
_BRIDGE = "model: {{hf_model_id: meta-llama/Llama-3.2-1B}}\ntrain: {{micro_batch_size: 2}}\nvalidation: {{eval_micro_batch_size: {size}}}\n"


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("job.yaml", _NEMO_RL.replace("{engine}", "megatron_cfg"), "sft.val_micro_batch_size"),
        ("job.yaml", _NEMO_RL.replace("{engine}", "dtensor_cfg"), "sft.val_micro_batch_size"),
        ("job.sh", _MEGATRON_LM, "eval_micro_batch_size"),
        ("job.yaml", _BRIDGE, "validation.eval_micro_batch_size"),
    ],
)
def test_only_a_larger_micro_batch_of_validation_is_named(tmp_path: Path, file: str, text: str, key: str) -> None:
    for size, packs, is_named in ((2, "false", False), (3, "false", True), (3, "true", "{packs}" not in text)):
        (tmp_path / file).write_text(text.format(size=size, packs=packs))
        job = Job.read(tmp_path / file)
        assert (key in {one.key for one in job.not_modelled}) is is_named
        assert (key in job.without_effect) is not is_named
