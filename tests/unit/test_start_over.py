"""A simulated lab that starts over: its next step is that of a new lab, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import find_architecture
from memlab.config.scenario import Scenario
from memlab.lab import search_steps
from memlab.lab.search_steps import stepping
from memlab.replay.passes import NotReplayableError
from memlab.replay.replayer import Replayer
from tests.unit.inside import inside
from tests.unit.live import FULL
from tests.unit.of_old_core import skip_if_newer_core_changed
from tests.unit.replayed import Case, require_identical, take_anew

PLAIN = MemorySettings()


CASES = {
    "experts": Case(
        architecture="qwen3-moe-tiny",
        arguments={
            "num_layers": 2,
            "seq_length": 64,
            "layout": Layout(expert_model_parallel_size=2, data_parallel_size=2),
        },
        settings=[
            MemorySettings(offload_modules=("core_attn",), min_offloaded_tensor_size=0, offload_optimizer=True),
            replace(FULL, checkpoint_input_remedy="release_storage"),
        ],
        allocator=AllocatorSettings(expandable_segments=True),
    ),
    "stage": Case(
        architecture="phi-4-tiny",
        arguments={
            "num_layers": 4,
            "seq_length": 64,
            "num_microbatches": 3,
            "layout": Layout(pipeline_model_parallel_size=2),
            "state": TrainingState(
                use_precision_aware_optimizer=True, exp_avg_dtype="bf16", gradient_accumulation_fusion=True
            ),
        },
        settings=[PLAIN, MemorySettings(offload_gradients=True, offload_parameters=True)],
    ),
}


def small_lab() -> Lab:
    return Lab("phi-4-tiny", num_layers=1, seq_length=32, backend="simulated")


@pytest.mark.parametrize(
    "case", [CASES["experts"], pytest.param(CASES["stage"], marks=pytest.mark.slow)], ids=["experts", "stage"]
)
def test_a_step_after_others_is_that_of_a_new_lab(case: Case) -> None:
    number = 0
    for alone, after_others in take_anew(case):
        assert after_others is not None, "the lab could not start over"
        require_identical(alone, after_others)
        assert after_others.peak_reserved_bytes == alone.peak_reserved_bytes
        assert (after_others.step_index, after_others.message) == (alone.step_index, alone.message)
        number += 1
    assert number == 2 * len(case.settings)


@pytest.mark.parametrize("state", [TrainingState(fp8_format="hybrid"), TrainingState(optimizer_cpu_offload=True)])
def test_where_a_lab_cannot_start_over_a_search_opens_another(
    state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    simulated_lab = search_steps._simulated_lab

    def open_lab(*args: Any, **options: Any) -> Any:
        opened.append(args)
        return simulated_lab(*args, **options)

    monkeypatch.setattr(search_steps, "_simulated_lab", open_lab)
    scenario = Scenario.of("qwen3-moe-tiny", num_layers=1, seq_length=32, state=state)
    with stepping(scenario) as step:
        peaks = [step(settings, None).peak_reserved_bytes for settings in (PLAIN, FULL, PLAIN)]
    assert len(opened) == 3
    assert peaks[0] == peaks[2]


def test_a_lab_keeps_its_records_and_its_limit_when_it_starts_over() -> None:
    limit = 1 << 40
    with small_lab() as lab:
        lab.device_memory_bytes = limit
        first = lab.step(FULL)
        assert lab.start_over()
        assert (lab.settings, lab.records, lab.device_memory_bytes) == (PLAIN, [first], limit)
        assert lab.step(FULL).step_index == first.step_index
    with pytest.raises(ValueError, match="closed"):
        lab.start_over()


@pytest.mark.parametrize(
    "state",
    [TrainingState(grad_reduce_in_bf16=True), TrainingState(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")],
)
def test_a_model_that_was_built_anew_cannot_start_over(state: TrainingState) -> None:
    with small_lab() as lab:
        lab.set_state(state)
        assert not lab.start_over()


def test_an_update_that_replay_did_not_see_is_undone_too() -> None:
    with small_lab() as lab:
        first = lab.step()
        assert lab.start_over()
        lab.groups_used()  # takes a step that nothing records
        assert lab.start_over()
        require_identical(first, lab.step())


def test_under_a_tap_a_lab_does_not_start_over_and_loses_no_memory() -> None:
    with small_lab() as lab:
        reserved = lab.step().peak_reserved_bytes
        with lab.tap(0):
            lab.step(FULL)
            assert not lab.start_over()
        assert lab.start_over()
        assert lab.step().peak_reserved_bytes == reserved


def test_an_audit_after_starting_over_expects_no_host_copies() -> None:
    with small_lab() as lab:
        lab.step(MemorySettings(offload_parameters=True))
        assert lab.start_over()
        assert not lab.audit_residency().complaints


def test_passes_without_backward_start_over() -> None:
    """A recompute of the norms that no backward ends keeps what it would recompute from."""
    selective = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm",))
    with small_lab() as lab:
        first = lab.forward_only(selective, warm_up=True)
        lab.step(selective)
        assert lab.start_over()
        require_identical(first, lab.forward_only(selective, warm_up=True))


def test_real_tensors_do_not_start_over() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=32, backend="cpu") as lab:
        lab.step()
        assert not lab.start_over()


def test_a_lab_that_could_not_replay_a_step_replays_again_after_it_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab("phi-4-tiny", num_layers=5, seq_length=32, backend="simulated") as lab:
        model: Any = inside(lab).model
        expected = lab.step()
        assert model.replay.num_replayed
        assert lab.start_over()
        with monkeypatch.context() as patch:
            patch.setattr(Replayer, "gradient_of", _is_not_known)
            lab.step(FULL)
        lab.step(PLAIN)
        assert not model.replay.num_replayed, "what replay knows is wrong somewhere"
        assert lab.start_over()
        require_identical(expected, lab.step())
        assert model.replay.num_replayed


def test_a_lab_that_could_not_replay_a_step_replays_again_with_a_new_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab("phi-4-tiny", num_layers=6, seq_length=32, backend="simulated") as lab:
        model: Any = inside(lab).model
        lab.step()
        with monkeypatch.context() as patch:
            patch.setattr(Replayer, "gradient_of", _is_not_known)
            lab.step(FULL)
        assert not model.replay.is_on
        assert lab.set_state(TrainingState(grad_reduce_in_bf16=True)).rebuilt == "model"
        lab.step()
        assert model.replay.num_replayed


@pytest.mark.parametrize(
    ("architecture", "offload", "numbers", "num_replayed"),
    [
        ("phi-4-tiny", None, (4, 6, 5), [0, 8, 7, 8, 7, 8]),
        ("phi-4-tiny", ("core_attn",), (4, 6, 5), [0, 0, 7, 7, 7, 8]),
        ("qwen3-moe-tiny", ("core_attn",), (2, 2, 4), [0, 0, 2, 3, 0, 3]),
    ],
)
def test_what_equal_layers_did_is_known_after_starting_over(
    architecture: str, offload: tuple[str, ...] | None, numbers: tuple[int, ...], num_replayed: list[int]
) -> None:
    """How many layers are recomputed decides which layer is of which kind, and not what a layer of a kind does.

    The first pass of all has cuBLAS's workspaces allocated, which no later one repeats, so it is stepped. So is the
    pass through the first router that is not in a checkpoint: it allocates Megatron's tracker of the experts' losses.
    """
    block = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    block = replace(block, offload_modules=offload, min_offloaded_tensor_size=0)
    num_layers = 8 if architecture == "phi-4-tiny" else 6
    arguments: dict[str, Any] = {"num_layers": num_layers, "seq_length": 64, "backend": "simulated"}
    expected, replayed = {}, []
    settings = [replace(block, recompute_num_layers=number) for number in numbers]
    for each in dict.fromkeys(settings):
        with Lab(architecture, **arguments, replay=False) as lab:
            expected[each] = [lab.step(each, warm_up=False) for _ in range(2)]
    with Lab(architecture, **arguments) as lab:
        for each in settings:
            for record in expected[each]:
                require_identical(record, lab.step(each, warm_up=False))
                model: Any = inside(lab).model
                replayed.append(model.replay.num_replayed)
            assert lab.start_over()
    assert replayed == num_replayed


def test_a_kernel_that_some_layers_have_is_timed_in_the_first_of_them() -> None:
    """Under block recompute of three layers, layer 1 times it, and layer 3 is as layer 1 under that of one layer."""
    sizes: dict[str, Any] = {
        "num_layers": 6,
        "linear_attention_freq": (0, 1) * 3,
        "num_moe_experts": None,
        "moe_router_topk": 0,
    }
    shared: dict[str, Any] = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
    some = replace(find_architecture("qwen3-next-tiny"), **sizes, **shared, moe_ffn_hidden_size=0, moe_aux_loss_coeff=0)
    skip_if_newer_core_changed(some)
    block = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    settings = [replace(block, recompute_num_layers=number) for number in (3, 1)]
    with Lab(some, seq_length=32, backend="simulated", replay=False) as lab:
        expected = lab.step(settings[1], warm_up=False)
    with Lab(some, seq_length=32, backend="simulated") as lab:
        lab.step(settings[0])
        assert lab.start_over()
        require_identical(expected, lab.step(settings[1], warm_up=False))


def _is_not_known(*_: Any) -> Any:
    raise NotReplayableError("the backward is not known")
