"""Ranks that join each other more than once in one job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memlab.config.layout import Layout
from memlab.model.process_group import require_started_ranks

JOB = """
from memlab.quiet_import import imported

join_others = imported("memlab.model.process_group").join_others
import torch

for times in range(3):
    join_others("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    pair = torch.distributed.new_group([0, 1])
    torch.distributed.all_reduce(total, group=pair)
    assert total.item() == 4
    store = torch.distributed.distributed_c10d._get_default_store()
    assert not store.check([f"rank-{torch.distributed.get_rank()}"]), "the keys of the last time are still there"
    store.set(f"rank-{torch.distributed.get_rank()}", "joined")
    torch.distributed.destroy_process_group()
"""


def test_ranks_of_one_job_join_again_under_keys_of_their_own(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(job)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_process_is_the_rank_that_its_layout_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    require_started_ranks(Layout(data_parallel_size=2, rank=1))
    with pytest.raises(ValueError, match=r"rank of the layout is 0, and torchrun started this process as rank 1"):
        require_started_ranks(Layout(data_parallel_size=2))
