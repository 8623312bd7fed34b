"""A rank's part of packed sequences under context parallelism, compared with Transformer Engine's own choice."""

from __future__ import annotations

from itertools import accumulate

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")

LENGTHS = (24, 12, 36)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_rank_takes_the_tokens_that_transformer_engine_takes(
    ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformer_engine_torch as tex
    from megatron.core import parallel_state

    from memlab.engines.megatron.training_step import chunks_of_this_rank

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    row = torch.arange(sum(LENGTHS), device="cuda").unsqueeze(0)
    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    indices = tex.thd_get_partitioned_indices(ends, row.shape[1], ranks, rank)
    assert chunks_of_this_rank(row, LENGTHS).equal(row.index_select(1, indices))
