"""Which parts of a step are replayed, by what the step runs and by what looks at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memlab import Layout, LoRA, MemorySettings, TrainingState
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.scenario import Scenario
from memlab.replay.plan import Circumstances, Plan, plan_step

PARTS = ("passes", "microbatches", "update", "whole_step")
STAGES = {"layout": Layout(pipeline_model_parallel_size=2)}
CHUNKS = {"layout": Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)}
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OFFLOAD = MemorySettings(offload_modules=("core_attn",))
HALF = MemorySettings(offload_modules=("core_attn",), activation_offload_fraction=0.5)
RELEASE = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
                         checkpoint_input_remedy="release_storage")  # fmt: skip


ALTERNATING = replace(ARCHITECTURES["qwen3-moe-tiny"], moe_layer_freq=(1, 0, 1, 0))


def plan(
    architecture: str | Architecture = "phi-4-tiny",
    settings: MemorySettings | None = None,
    *,
    has_limit: bool = False,
    is_looked_at: bool = False,
    follows_full_recompute: bool = False,
    forward_only: bool = False,
    is_tapped: bool = False,
    has_fault: bool = False,
    **scenario: Any,
) -> Plan:
    step = Circumstances(
        scenario=Scenario.of(architecture, num_layers=4, seq_length=64, **{"num_microbatches": 2} | scenario),
        settings=settings or MemorySettings(),
        forward_only=forward_only,
        is_tapped=is_tapped,
        has_fault=has_fault,
    )
    return plan_step(
        step, has_limit=has_limit, is_looked_at=is_looked_at, follows_full_recompute=follows_full_recompute
    )


def test_everything_of_a_plain_step_is_replayed() -> None:
    assert plan() == Plan(passes=True, microbatches=True, update=True, gradients=True, whole_step=True, opens=True)


@pytest.mark.parametrize(
    ("arguments", "stepped"),
    [
        ({"forward_only": True}, {"passes", "whole_step"}),
        ({"is_tapped": True}, {"passes", "microbatches", "whole_step"}),
        ({"has_fault": True}, set(PARTS)),
        ({"is_looked_at": True}, set(PARTS)),
        ({"state": TrainingState(fp8_format="hybrid")}, set(PARTS)),
        ({"state": TrainingState(overlap_grad_reduce=True)}, {"update", "whole_step"}),
        ({"settings": OFFLOAD}, {"microbatches", "whole_step"}),
        ({"settings": HALF}, {"passes", "microbatches", "whole_step"}),
        ({"settings": OFFLOAD, "has_limit": True}, {"passes", "microbatches", "whole_step"}),
        ({"settings": OFFLOAD, **STAGES}, {"passes", "microbatches", "whole_step"}),
        ({"has_limit": True}, set()),
        (CHUNKS, {"microbatches"}),
        # Only MoE layers keep graphs until their next pass.
        ({"follows_full_recompute": True}, set()),
        ({"architecture": "qwen3-moe-tiny", "follows_full_recompute": True}, {"passes"}),
        ({"architecture": "qwen3-moe-tiny", "has_limit": True}, {"passes"}),
        ({"architecture": ALTERNATING}, set()),
        ({"architecture": ALTERNATING, **STAGES}, {"passes"}),
        ({"architecture": "qwen3-moe-tiny", "settings": FULL, **STAGES}, set()),
        ({"architecture": "qwen3-moe-tiny", "settings": FULL, **CHUNKS}, {"passes", "microbatches"}),
        ({"architecture": "qwen3-moe-tiny", "settings": RELEASE}, set()),
        ({"architecture": "qwen3-moe-tiny", "settings": RELEASE, **STAGES}, {"passes", "microbatches", "whole_step"}),
    ],
)
def test_what_may_differ_or_is_looked_at_is_stepped(arguments: dict[str, Any], stepped: set[str]) -> None:
    found = plan(**arguments)
    assert {part for part in PARTS if not getattr(found, part)} == stepped


@pytest.mark.parametrize(
    "stepped",
    [
        STAGES,
        {"forward_only": True},
        {"has_fault": True},
        {"state": TrainingState(overlap_grad_reduce=True)},
        {"state": TrainingState(cuda_graph_impl="full_iteration")},
    ],
)
def test_gradients_are_finalized_where_ranks_send_them_or_something_else_decides(stepped: dict[str, Any]) -> None:
    assert plan(settings=OFFLOAD).gradients
    assert not plan(**stepped).gradients


def test_layers_of_checkpoints_are_replayed_alone_where_it_is_known_what_keeps_their_input() -> None:
    adapters = TrainingState(lora=LoRA(rank=8))
    assert plan(settings=FULL).opens
    assert plan(settings=FULL, **STAGES).opens
    assert plan(settings=FULL, state=adapters).opens
    assert plan("qwen3-moe-tiny", FULL).opens
    assert not plan("qwen3-moe-tiny", FULL, **STAGES).opens
    assert not plan("qwen3-moe-tiny", FULL, state=adapters).opens
    assert not plan("qwen3-moe-tiny", RELEASE).opens
    assert not plan(ALTERNATING, FULL).opens
    assert not plan(settings=OFFLOAD).opens


def test_passes_without_backward_are_replayed_apart() -> None:
    assert plan(forward_only=True).forward_only_passes
    assert not plan().forward_only_passes
    for stepped in ({"has_limit": True}, {"is_tapped": True}, {"settings": OFFLOAD}):
        assert not plan(forward_only=True, **stepped).forward_only_passes, stepped


def test_only_replayed_passes_tell_the_offload_manager() -> None:
    assert plan(settings=OFFLOAD).offloads
    assert not plan(settings=HALF).offloads
