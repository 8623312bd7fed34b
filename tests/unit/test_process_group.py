"""Ranks that join each other more than once in one job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memlab.backends.cuda import own_device
from memlab.config.layout import Layout
from memlab.engines.process_group import join_others, require_started_ranks
from tests.unit.processes import on_processes

pytestmark = pytest.mark.versions


def join_three_times() -> None:
    """Runs on every rank."""
    for _ in range(3):
        join_others("gloo")
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        pair = torch.distributed.new_group([0, 1])
        torch.distributed.all_reduce(total, group=pair)
        assert total.item() == 4
        store = torch.distributed.distributed_c10d._get_default_store()
        name = f"rank-{torch.distributed.get_rank()}"
        assert not store.check([name]), "the keys of the last time are still there"
        store.set(name, "joined")
        torch.distributed.destroy_process_group()


def test_ranks_of_one_job_join_again_under_keys_of_their_own(tmp_path: Path) -> None:
    on_processes(2, join_three_times, folder=tmp_path, seconds=60)


def test_a_process_is_the_rank_that_its_layout_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    require_started_ranks(Layout(data_parallel_size=2, rank=1))
    with pytest.raises(ValueError, match=r"rank of the layout is 0, and torchrun started this process as rank 1"):
        require_started_ranks(Layout(data_parallel_size=2))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', must be a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, must be below the 2 GPUs"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK is not set beside WORLD_SIZE, 2"),
    ],
)
def test_a_device_that_is_no_rank_s_of_this_machine_is_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        own_device()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == 1
