"""verl's earlier trainer for fine-tuning: what it does is read, and not predicted."""

from pathlib import Path

import pytest

from memlab.jobs.frameworks.registry import writer_of
from memlab.jobs.job import Job

_COMMAND = (
    "torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen2.5-7B "
    "data.train_batch_size=64 data.micro_batch_size_per_gpu=2 data.max_length=4096 data.multiturn.enable=true {keys}"
)


@pytest.mark.parametrize(
    ("keys", "version", "rows", "ranks"),
    [
        ("", 2, (4096, 2, 2), (1, 16)),
        ("use_remove_padding=true", 2, (4096, 2, 2), (1, 16)),  # it does so beside Ulysses alone
        ("use_remove_padding=true ulysses_sequence_parallel_size=4 model.strategy=fsdp", 1, (8192, 1, 8), (4, 4)),
    ],
)
def test_rows_lose_their_padding_beside_ulysses_alone(
    keys: str, version: int, rows: tuple[int, ...], ranks: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(_COMMAND.format(keys=keys))
    job = Job.read(tmp_path / "run.sh")
    assert "fsdp_sft_trainer" in str(job.not_supported)
    assert not [one for one in job.not_modelled if one.effect == "unknown"]
    read = Job.read(tmp_path / "run.sh", fields_only=True).required()[0]
    assert (read.state.fsdp_version, read.state.fp32_sharded_params, read.state.defer_fsdp_grad_sync) == (
        version,
        True,
        False,
    )
    assert (read.seq_length, read.micro_batch_size, read.num_microbatches) == rows
    assert (read.layout.context_parallel_size, read.layout.data_parallel_size) == ranks
    assert ("use_remove_padding" in {one.key for one in job.not_modelled}) is (ranks[0] == 1)


def test_memlab_writes_the_keys_of_the_present_trainer() -> None:
    assert writer_of("verl-sft", "fsdp2").name == "verl-sft-fsdp"
