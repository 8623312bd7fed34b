"""Causal masks of rows that are not packed: their bytes, how long they live, and that replay has the same events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memlab import Lab, Layout, MemorySettings, Scenario, StepRecord, TrainingState
from memlab.vocabulary import PHASES, POOLS
from tests.unit.inside import inside
from tests.unit.live import FULL, recompute
from tests.unit.replayed import require_identical

PLAIN = MemorySettings()
MASK = TrainingState(create_attention_mask=True)
TOKENS = 250
"""No other tensor has as many bytes as the pairs of so many tokens."""
OF_LOADER = TrainingState(create_attention_mask_in_dataloader=True)
"""Megatron-LM's: a mask of each of two rows."""
MADE = [4, 4, -4, 1, -4]
"""In fp32 ones and their lower triangle, without the ones, then the mask in bool, without the triangle."""


def step(settings: MemorySettings, **values: Any) -> StepRecord:
    usual: dict[str, Any] = {"num_layers": 2, "seq_length": TOKENS, "micro_batch_size": 2, "state": MASK}
    with Lab("phi-4-tiny", **usual | {"backend": "simulated"} | values) as lab:
        return lab.step(settings, warm_up=False)


def masks(record: StepRecord, tokens: int = TOKENS) -> tuple[list[int], list[int]]:
    """Returns what is allocated and freed of the size of a mask, in bytes per pair of tokens, and in which rows."""
    timeline = record.timeline
    assert timeline is not None and timeline.rounding_bytes is not None
    requested = np.where(timeline.pool == POOLS.index("device"), timeline.delta_bytes - timeline.rounding_bytes, 0)
    rows = np.flatnonzero(np.isin(np.abs(requested), [tokens**2, 2 * tokens**2, 4 * tokens**2]))
    return (requested[rows] // tokens**2).tolist(), rows.tolist()


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_a_mask_lives_until_the_next_is_made_and_the_last_one_until_the_step_ends(backend: str) -> None:
    """``make_processed_microbatch_iterator`` in nemo_rl/models/megatron/data.py, read at 7ea279ab."""
    record = step(PLAIN, num_microbatches=3, backend=backend)
    changes, rows = masks(record)
    assert changes == [*MADE, *MADE, -1, *MADE, -1, -1]
    assert record.timeline is not None
    last_allocation = np.flatnonzero(record.timeline.delta_bytes > 0)[-1]
    assert PHASES[record.timeline.phase[last_allocation]] == "optimizer"
    assert rows[-1] > last_allocation


def test_the_masks_change_no_result() -> None:
    losses = {step(PLAIN, state=state, backend="cpu").loss for state in (MASK, OF_LOADER, TrainingState())}
    assert len(losses) == 1


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_masks_of_the_data_loader_live_until_the_forward_pass_ends(backend: str) -> None:
    """``forward_step`` in pretrain_gpt.py of Megatron-LM, 0.16.1: they are its local variables."""
    changes, _ = masks(step(PLAIN, num_microbatches=2, backend=backend, state=OF_LOADER))
    assert changes == [2, -2, 2, -2]


@pytest.mark.parametrize(("stage", "most"), [(0, 8), (1, 0), (3, 2)])
def test_masks_of_the_data_loader_are_those_of_the_first_and_last_stages(stage: int, most: int) -> None:
    """``get_batch`` in pretrain_gpt.py returns nothing on the others. A checkpoint of layers keeps them."""
    stages = Layout(pipeline_model_parallel_size=4, rank=stage)
    changes, _ = masks(step(FULL, num_layers=4, num_microbatches=4, layout=stages, state=OF_LOADER))
    assert max(np.cumsum([0, *changes])) == most
    assert sum(changes) == 0


def test_a_rank_that_shares_sequences_keeps_its_part_of_the_masks() -> None:
    """``get_batch_on_this_cp_rank`` in megatron/core/utils.py, 0.16.1, copies the rank's chunks out of whole masks."""
    record = step(PLAIN, seq_length=252, layout=Layout(context_parallel_size=2), state=OF_LOADER)
    assert masks(record, 252)[0] == [2, 1, -2, -1]


@pytest.mark.parametrize(
    ("settings", "most"),
    [(PLAIN, 2), (FULL, 4), (recompute("core_attn"), 4)],
    ids=["without recompute", "layers", "attention"],
)
def test_checkpoints_keep_the_masks_of_all_passes_in_flight(settings: MemorySettings, most: int) -> None:
    """``TransformerBlock._checkpointed_forward`` and ``Attention._checkpointed_attention_forward`` save it."""
    stages = Layout(pipeline_model_parallel_size=4)
    changes, _ = masks(step(settings, num_layers=4, num_microbatches=8, layout=stages))
    in_bool = [change for change in changes if abs(change) == 1]
    assert max(np.cumsum(in_bool)) == most
    assert sum(changes) == 0


@pytest.mark.parametrize("settings", [FULL, recompute("core_attn")], ids=["layers", "attention"])
@pytest.mark.parametrize(
    ("state", "num_stages"),
    [
        (MASK, 2),
        pytest.param(OF_LOADER, 1, marks=pytest.mark.slow),
        pytest.param(OF_LOADER, 2, marks=pytest.mark.slow),
    ],
)
def test_replay_has_the_events_of_stepped_layers(
    settings: MemorySettings, state: TrainingState, num_stages: int
) -> None:
    """A replayed checkpoint keeps no mask, so the first one of a stage, whose backward frees the mask, is stepped."""
    records = []
    for replay in (False, True):
        values: dict[str, Any] = {"layout": Layout(pipeline_model_parallel_size=num_stages), "backend": "simulated"}
        values |= {"num_layers": 8, "seq_length": 64, "num_microbatches": 4}
        with Lab("phi-4-tiny", state=state, replay=replay, **values) as lab:
            records.append(lab.step(settings))
            assert (inside(lab).model.replay.num_replayed > 0) == replay
    require_identical(*records)


def test_micro_batches_that_repeat_are_inserted_with_their_masks() -> None:
    records = [step(PLAIN, num_microbatches=7, replay=replay) for replay in (False, True)]
    require_identical(*records)
    changes, _ = masks(records[1])
    assert changes == [*MADE, *[*MADE, -1] * 6, -1]


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"packed_sequences": 2}, {}),
        ({"layout": Layout(context_parallel_size=2)}, {}),
        ({}, {"attention_backend": "unfused"}),
    ],
)
def test_what_has_no_such_mask_or_more_than_one_is_refused(values: dict[str, Any], state: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="create_attention_mask is True with"):
        Scenario.of("phi-4-tiny", seq_length=64, state=TrainingState(create_attention_mask=True, **state), **values)


@pytest.mark.parametrize(("values", "state"), [({"packed_sequences": 2}, {}), ({}, {"create_attention_mask": True})])
def test_masks_of_the_data_loader_are_those_of_rows_without_another(
    values: dict[str, Any], state: dict[str, bool]
) -> None:
    with pytest.raises(ValueError, match="create_attention_mask_in_dataloader is True with"):
        Scenario.of(
            "phi-4-tiny",
            **{"seq_length": 64, "state": TrainingState(create_attention_mask_in_dataloader=True, **state)} | values,
        )
