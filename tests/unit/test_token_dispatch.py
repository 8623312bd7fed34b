"""All-gathered tokens and the capacity of experts: the CPU's bytes, the loss of the usual dispatcher, rows by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from tests.unit.live import FULL, offload, recompute

pytestmark = pytest.mark.versions

TOKENS, EXPERTS, CHOSEN, WIDTH = 64, 8, 2, 64
SMALL: dict[str, Any] = {"num_layers": 3, "seq_length": TOKENS}
SETTINGS = (MemorySettings(), FULL, recompute("moe"), offload("expert_fc1", "moe_act"))


@pytest.mark.parametrize(
    ("state", "is_lossless"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, True),
        pytest.param(
            {"moe_token_dispatcher_type": "allgather", "moe_permute_fusion": False}, True, marks=pytest.mark.slow
        ),
        # No expert of this model has more rows than there are tokens, 4 times its share.
        pytest.param({"moe_expert_capacity_factor": 4.0}, True, marks=pytest.mark.slow),
        ({"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}, False),
    ],
)
def test_every_setting_has_one_loss_and_the_predicted_bytes(state: dict[str, Any], is_lossless: bool) -> None:
    with Lab("qwen3-moe-tiny", **SMALL, backend="cpu") as lab:
        loss = lab.step().loss
        lab.set_state(TrainingState(**state))
        real = [lab.step(each) for each in SETTINGS]
    with Lab("qwen3-moe-tiny", **SMALL, backend=of_the_cpu_backend(), state=TrainingState(**state)) as lab:
        fake = [lab.step(each) for each in SETTINGS]
    assert len({one.loss for one in real}) == 1
    assert (real[0].loss == pytest.approx(loss, rel=1e-4)) or not is_lossless
    for one, other in zip(real, fake, strict=True):
        for figure in ("activation_peak_bytes", "residual_bytes", "offloaded_bytes_by_module"):
            assert getattr(one, figure) == getattr(other, figure), (figure, one.settings)


def test_a_capacity_drops_the_rows_above_it() -> None:
    """By hand: a row keeps its token's 128 elements, two of the MLP's 64 and their product in bf16, its probability in
    fp32, and twice its int32 place among the chunks.

    Of a skewed routing, the experts above their share keep as many rows as the share; a balanced one loses none.
    """

    def kept(routing: Routing, num_layers: int) -> tuple[int, int]:
        state = TrainingState(moe_expert_capacity_factor=1.0)
        sizes = SMALL | {"num_layers": num_layers}
        with Lab(
            "qwen3-moe-tiny", **sizes, backend=of_the_cpu_backend(), state=state, routing=routing, replay=False
        ) as lab:
            peak = lab.step().peak_allocated_bytes
        chosen = routing.tokens_per_expert(TOKENS, EXPERTS, CHOSEN, 0)
        return peak, sum(min(rows, TOKENS * CHOSEN // EXPERTS) for rows in chosen)

    skewed, balanced = Routing(kind="skewed", factor=3.0), Routing()
    per_row = {}
    for routing in (skewed, balanced):
        (more, rows), (less, _) = kept(routing, 4), kept(routing, 3)
        per_row[routing.kind] = more - less, rows
    (skewed_bytes, skewed_rows), (balanced_bytes, balanced_rows) = per_row["skewed"], per_row["balanced"]
    assert balanced_rows == TOKENS * CHOSEN
    assert skewed_rows < balanced_rows
    of_a_row = 2 * (128 + 2 * WIDTH + WIDTH) + 4 + 2 * 4
    assert balanced_bytes - skewed_bytes == of_a_row * (balanced_rows - skewed_rows)


def test_an_expert_is_not_padded_to_more_rows_than_there_are_tokens() -> None:
    state = TrainingState(moe_expert_capacity_factor=5.0, moe_pad_expert_input_to_capacity=True)
    with pytest.raises(
        ValueError, match=r"moe_expert_capacity_factor is 5 .* must be at most 4 \(experts / moe_router"
    ):
        Scenario.of("qwen3-moe-tiny", state=state)
    with pytest.raises(ValueError, match=r"True, must have moe_expert_capacity_factor, by a rule of Megatron-Core"):
        Scenario.of("qwen3-moe-tiny", state=TrainingState(moe_pad_expert_input_to_capacity=True))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("moe_expert_capacity_factor: -1", {}),
        (
            "moe_expert_capacity_factor: 2\n  moe_pad_expert_input_to_capacity: true",
            {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
        ),
        ("moe_token_drop_policy: position", {}),
        (
            "moe_expert_capacity_factor: 1.5\n  moe_token_drop_policy: position",
            {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"},
        ),
    ],
)
def test_jobs_say_how_tokens_are_dispatched(text: str, state: dict[str, Any], tmp_path: Path) -> None:
    """A factor below 0 drops nothing (``TransformerConfig.__post_init__``, 0.16.1), and then nobody reads the others."""
    swift = "megatron sft --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 --max_length 2048 "
    (tmp_path / "run.sh").write_text(
        "NPROC_PER_NODE=8 " + swift + " ".join(f"--{line.strip().replace(':', '')}" for line in text.split("\n"))
    )
    job = Job.read(tmp_path / "run.sh")
    changed = job.required()[0].state.changed()
    of_dispatch = {name: value for name, value in changed.items() if "capacity" in name or "token_d" in name}
    assert of_dispatch == state
    assert not [one.key for one in job.not_modelled if "capacity" in one.key or "token_d" in one.key]


def test_ms_swift_refuses_a_dispatcher_for_sequences_of_one_length(tmp_path: Path) -> None:
    """Megatron-Core refuses allgather with `variable_seq_lengths`, which mcore-bridge always sets."""
    swift = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 --max_length 2048"
    (tmp_path / "run.sh").write_text(f"{swift} --moe_token_dispatcher_type allgather")
    assert "sequences of variable length, which ms-swift refuses" in str(Job.read(tmp_path / "run.sh").cannot_start)
