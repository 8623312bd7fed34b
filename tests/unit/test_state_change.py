"""The training state of a live lab changes: what is rebuilt equals a fresh lab, and nothing of the old one stays."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from memlab.analysis.difference import obstacles
from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.config.lora import LoRA
from memlab.config.option import options_of
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState, what_rebuilds
from memlab.engines.megatron import build, engine
from memlab.lab.lab import Lab
from memlab.lab.progress import Progress
from memlab.lab.request import StepRequest
from memlab.record.step_record import StepRecord
from memlab.views.text.compare import common_scenario, record_names
from tests.unit.builders import record_of, training_step
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, random_settings, recompute

pytestmark = pytest.mark.versions

PLAIN = TrainingState()
BF16_GRADIENTS = TrainingState(grad_reduce_in_bf16=True)
FUSED_GRADIENTS = TrainingState(
    grad_reduce_in_bf16=True,
    gradient_accumulation_fusion=True,
    moe_permute_fusion=False,
    moe_token_dispatcher_type="allgather",
    mtp_num_layers=1,
)
NOT_DISTRIBUTED = TrainingState(
    use_distributed_optimizer=False,
    moe_expert_capacity_factor=1.25,
    moe_pad_expert_input_to_capacity=True,
    num_labels=2,
)
FUSED_LOSS = TrainingState(cross_entropy_loss_fusion=True)
IN_PLACE = TrainingState(
    attention_backend="unfused",
    apply_rope_fusion=True,
    bias_activation_fusion=False,
    moe_router_dtype="fp64",
    moe_z_loss_coeff=1e-3,
    loss="logprobs",
    logprobs_chunk_size=16,
    create_attention_mask_in_dataloader=True,
)
OTHER_OPTIMIZER = TrainingState(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="fp8",
    create_attention_mask=True,
    moe_router_fusion=True,
    moe_router_force_load_balancing=True,
)
CPU_OPTIMIZER = TrainingState(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
FP8 = TrainingState(fp8_format="hybrid", fp8_recipe="delayed", gradient_accumulation_fusion=True)
TINY: dict[str, Any] = {"num_layers": 2, "seq_length": 64}


def same(one: StepRecord, two: StepRecord) -> dict[str, tuple[Any, Any]]:
    """What of two steps' memory and loss differs: nothing, if the one's lab is like the other's."""
    names = ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes", "peak_by_category")
    return {
        name: (getattr(one, name), getattr(two, name)) for name in names if getattr(one, name) != getattr(two, name)
    }


def kept_bytes(lab: Lab) -> tuple[int, int]:
    gc.collect()
    return inside(lab).model.meter.live_bytes(), inside(lab).model.meter.live_bytes("host")


def test_every_field_says_what_it_rebuilds() -> None:
    assert all(one.rebuilds for one in options_of(TrainingState).values())
    own = {field.name for field in fields(TrainingState)} - {"lora"} | {f"lora_{field.name}" for field in fields(LoRA)}
    assert set(options_of(TrainingState)) == own
    assert what_rebuilds(PLAIN, PLAIN) == "nothing"
    assert what_rebuilds(FUSED_LOSS, IN_PLACE) == "nothing"
    assert what_rebuilds(FUSED_LOSS, replace(OTHER_OPTIMIZER, loss="logprobs")) == "optimizer"
    assert what_rebuilds(OTHER_OPTIMIZER, BF16_GRADIENTS) == "model"


ON_CPU = [FUSED_GRADIENTS, FUSED_LOSS, IN_PLACE, OTHER_OPTIMIZER, CPU_OPTIMIZER, NOT_DISTRIBUTED]


@pytest.mark.parametrize(
    ("backend", "states"), [pytest.param("cpu", ON_CPU, marks=pytest.mark.slow), ("simulated", [*ON_CPU, FP8])]
)
def test_a_changed_state_equals_a_fresh_lab_s_to_the_byte(backend: str, states: list[TrainingState]) -> None:
    fresh = {}
    for state in states:
        with Lab("qwen3-moe-tiny", **TINY, state=state, backend=backend) as lab:
            fresh[state] = lab.step(FULL)
    with Lab("qwen3-moe-tiny", **TINY, backend=backend) as lab:
        fresh[PLAIN] = lab.step(FULL)
        before = kept_bytes(lab)
        for state in (*states, PLAIN):
            lab.set_state(state)
            record = lab.step()
            assert record.scenario.state == state
            assert not same(record, fresh[state]), state
        assert kept_bytes(lab) == before
        rebuilt = [change.rebuilt for change in lab.state_changes]
        assert rebuilt[:6] == ["model", "model", "nothing", "optimizer", "model", "model"]


def test_only_what_reads_the_state_when_it_is_built_is_replaced(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", **TINY)
    plain = lab.step(offload("core_attn"))
    live = inside(lab).model.engine.live
    weights, optimizer = id(next(live.parameters())), live.optimizer
    change = lab.set_state(FUSED_LOSS)
    assert live.optimizer is optimizer and live.config.cross_entropy_loss_fusion
    assert (change.rebuilt, change.changed) == ("nothing", {"cross_entropy_loss_fusion": True})
    assert str(change) == "cross_entropy_loss_fusion: nothing rebuilt"
    change = lab.set_state(OTHER_OPTIMIZER)
    assert live.optimizer is not optimizer and id(next(live.parameters())) == weights
    assert str(change).startswith("use_precision_aware_optimizer, exp_avg_dtype bf16, exp_avg_sq_dtype fp8, cross_")
    lab.set_state(BF16_GRADIENTS)
    assert inside(lab).model.engine.live is not live
    lab.set_state(PLAIN)
    assert lab.settings == offload("core_attn"), "settings hold for the new model"
    assert not same(lab.step(), plain)


def test_a_step_may_change_the_state_first_and_reports_what_it_rebuilds(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", **TINY)
    places: list[Progress] = []
    records = [lab.step(FULL, state=BF16_GRADIENTS, on_progress=places.append), lab.step(), lab.step(state=PLAIN)]
    assert places[0].phase == "rebuilding the model"
    assert [record.scenario.state for record in lab.records] == [BF16_GRADIENTS, BF16_GRADIENTS, PLAIN]
    assert [record.step_index for record in records] == [1, 2, 4], "a changed state warms up"
    assert len(lab.state_changes) == 2


def test_settings_and_a_state_need_only_hold_together() -> None:
    """Delayed scaling refuses moe_act."""
    with Lab("qwen3-moe-tiny", **TINY, state=FP8, backend="simulated") as lab:
        fresh = lab.step()
    with Lab("qwen3-moe-tiny", **TINY, backend="simulated") as lab:
        former = lab.step(recompute("moe_act"))
        for settings, state in ((former.settings, FP8), (MemorySettings(), "FP8")):
            with pytest.raises(ValueError, match=r"moe_act|must be TrainingState"):
                lab.submit(StepRequest(settings=settings, state=state))  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "get_megatron_optimizer", fails_once(build.get_megatron_optimizer))
            with pytest.raises(torch.OutOfMemoryError, match="former state"):
                lab.step(MemorySettings(), state=FP8)
        assert (lab.settings, lab.scenario.state) == (former.settings, PLAIN)
        assert not same(lab.step(), former)
        assert not same(lab.step(MemorySettings(), state=FP8), fresh)
        lab.set_state(PLAIN, former.settings)
        assert not same(lab.step(), former)
        in_place = lab.step(FULL, state=FUSED_LOSS)
        assert (in_place.settings, in_place.scenario.state) == (FULL, FUSED_LOSS)


def test_groups_on_the_host_come_back_or_are_dropped(open_lab: Callable[..., Any]) -> None:
    away = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
    lab = open_lab("qwen3-moe-tiny", **TINY)
    lab.pinned_host_memory = False
    first = lab.step(away)
    on_host = kept_bytes(lab)
    for state in (OTHER_OPTIMIZER, BF16_GRADIENTS, PLAIN):
        lab.set_state(state)
        assert not lab.pinned_host_memory
        assert kept_bytes(lab)[0] > on_host[0], "everything is on the device until the next step has ended"
        assert not lab.audit_residency().complaints
        last = lab.step()
    assert not same(last, first)
    assert kept_bytes(lab) == on_host


class _FailureError(Exception):
    pass


def _fail_in(module: torch.nn.Module, lab: Lab, settings: MemorySettings) -> None:
    def fail(*_: object) -> None:
        raise _FailureError

    handle = module.register_forward_hook(fail)
    try:
        with suppress(_FailureError):
            lab.step(settings)
    finally:
        handle.remove()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rebuilt_lab_equals_a_new_one_whatever_was_done_before(seed: int) -> None:
    rng = random.Random(seed)
    states = (PLAIN, BF16_GRADIENTS, CPU_OPTIMIZER, FP8, TrainingState(overlap_grad_reduce=True))
    before, target = rng.sample(states, 2)
    away = MemorySettings(offload_optimizer_except_update=True)
    options: dict[str, Any] = {**TINY, "backend": "simulated"}
    with Lab("qwen3-moe-tiny", **options, state=target) as lab:
        fresh = lab.step()
        fresh_bytes = kept_bytes(lab)
    with Lab("qwen3-moe-tiny", **options, state=before) as lab:
        doings = [
            lambda: lab.step(random_settings(lab, rng)),
            lambda: lab.forward_only(recompute("layernorm")),
            lambda: _fail_in(rng.choice(inside(lab).model.engine.live.modules()), lab, random_settings(lab, rng)),
            lambda: lab.set_workload(seq_length=96),
        ]
        for do in rng.choices(doings, k=3):
            with suppress(ValueError):  # random settings need not hold in this state
                do()
        with suppress(ValueError):
            lab.step(away)  # its main parameters hold the gradient buffer
        lab.set_workload(seq_length=TINY["seq_length"])
        lab.set_state(target, MemorySettings())
        record = lab.step()
        assert not same(record, fresh)
        assert record.peak_reserved_bytes == fresh.peak_reserved_bytes
        assert kept_bytes(lab) == fresh_bytes


def test_a_rebuild_frees_the_old_gradient_buffer_before_it_builds_the_new_one() -> None:
    """After such a step the list of what is on the host has main parameters, whose gradients are views of the buffer."""
    away = MemorySettings(offload_optimizer_except_update=True)
    limits = TrainingState(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=100000)
    with Lab("phi-4-tiny", backend="simulated") as lab:
        fresh = lab.step()
        lab.set_state(limits)
        lab.step(away)
        assert lab.step(MemorySettings(), state=PLAIN).peak_allocated_bytes == fresh.peak_allocated_bytes


def fails_once(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    built = []

    def fail_once(config: Any, chunks: Any, **options: Any) -> Any:
        built.append(get_optimizer(config, chunks, **options))
        if len(built) == 1:
            raise torch.OutOfMemoryError("2 GiB requested\nwith 1 GiB free")
        return built.pop()

    return fail_once


def _refuse() -> None:
    raise AssertionError("no,\nnot so")


def test_a_refused_state_leaves_everything_as_it_was(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("phi-4-tiny", **TINY)
    plain, live = lab.step(), inside(lab).model.engine.live
    with pytest.raises(ValueError, match=r"state is 'bf16', must be TrainingState"):
        lab.set_state("bf16")
    with lab.tap(0), pytest.raises(ValueError, match=r"a tap or a residency fault is on.*leave the with block"):
        lab.set_state(BF16_GRADIENTS)
    monkeypatch.setattr(engine, "optimizer_config", lambda scenario: _refuse())
    with pytest.raises(ValueError, match=r"^Megatron refuses .* 'grad_reduce_in_bf16' \(no, not so\): choose another$"):
        lab.set_state(BF16_GRADIENTS)
    assert inside(lab).model.engine.live is live and lab.scenario.state == PLAIN and not lab.state_changes
    assert not same(lab.step(), plain)


@pytest.mark.parametrize("state", [NOT_DISTRIBUTED, OTHER_OPTIMIZER])
def test_a_state_that_does_not_fit_leaves_the_former_one(open_lab: Callable[..., Any], state: TrainingState) -> None:
    lab = open_lab("qwen3-moe-tiny", **TINY)
    plain = lab.step()
    before = kept_bytes(lab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "get_megatron_optimizer", fails_once(build.get_megatron_optimizer))
        with pytest.raises(torch.OutOfMemoryError, match=r"^the training state .* former state.* again; [^\n]*$"):
            lab.set_state(state)
    assert lab.scenario.state == PLAIN
    assert not same(lab.step(), plain)
    assert kept_bytes(lab) == before


def test_a_lab_that_gets_no_state_at_all_is_closed_in_one_line(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", **TINY)
    record = lab.step()
    lab.device_memory_bytes = 1000
    with pytest.raises(RuntimeError, match=r"^the training state .* this lab is closed, open another with Lab[^\n]*$"):
        lab.set_state(BF16_GRADIENTS)
    assert lab.closed and lab.records == [record]
    assert kept_bytes(lab) == (0, 0)
    with pytest.raises(ValueError, match="closed: open another"):
        lab.step()
    assert not same(open_lab("qwen3-moe-tiny", **TINY).step(), record)


def test_a_rebuilt_lab_answers_every_question(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", **TINY)
    lab.step()
    lab.set_state(BF16_GRADIENTS)
    record = lab.step()
    assert lab.forward_only().loss == record.loss
    assert lab.fit(record, "80GiB").fits
    assert all(known.scenario.state == BF16_GRADIENTS for known in lab.records[1:])
    lab.audit_offload(offload("expert_fc1"))
    assert lab.groups_used()["optimizer"]
    with lab.tap(0) as tap:
        lab.step(FULL)
    assert tap.look() is None
    lab.device_memory_bytes = record.static_bytes + record.activation_peak_bytes // 2
    failed = lab.step(MemorySettings())
    assert failed.out_of_memory is not None and failed.scenario.state == BF16_GRADIENTS
    lab.device_memory_bytes = None
    lab.set_workload(seq_length=32)
    lab.set_state(PLAIN)
    assert lab.step().scenario.seq_length == 32
    lab.drop()
    assert kept_bytes(lab) == (0, 0)


def test_steps_of_different_states_are_named_by_what_differs() -> None:
    aware = TrainingState(use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    records = [
        record_of(training_step(), scenario=replace(record_of(training_step()).scenario, state=state))
        for state in (PLAIN, aware, replace(aware, exp_avg_dtype="bf16"))
    ]
    assert record_names(records) == [
        "none (default state)",
        "none (use_precision_aware_optimizer, main_grads_dtype bf16)",
        "none (use_precision_aware_optimizer, main_grads_dtype bf16, exp_avg_dtype bf16)",
    ]
    assert record_names(records[1:]) == ["none (exp_avg_dtype fp32)", "none (exp_avg_dtype bf16)"]
    assert common_scenario(records[1:]).endswith(", use_precision_aware_optimizer, main_grads_dtype bf16")
    assert "state" not in common_scenario(records[:2]) and "main_grads" not in common_scenario(records[:2])
    predicted = replace(records[1], backend="simulated")
    (line,) = obstacles([predicted, replace(records[2], backend="cuda")])
    assert "differ in state.exp_avg_dtype (fp32 predicted, bf16 measured)" in line


# Settings under other optimizers: test_precision_aware_optimizer.py and test_cpu_optimizer.py.
@pytest.mark.parametrize("state", [NOT_DISTRIBUTED, IN_PLACE], ids=str)
def test_no_setting_changes_the_loss_of_a_state_and_the_way_back_is_exact(
    open_lab: Callable[..., Any], state: TrainingState
) -> None:
    lab, rng = open_lab("qwen3-moe-tiny", **TINY), random.Random(15)
    plain = lab.step()
    first = lab.step(state=state)
    for _ in range(3):
        settings = random_settings(lab, rng)
        record = lab.step(settings)
        assert record.status == "ok"
        assert record.loss == pytest.approx(first.loss, rel=loss_tolerance(first, record), abs=0), settings
    assert not same(lab.step(MemorySettings()), first)
    assert not same(lab.step(state=PLAIN), plain)


def test_submit_takes_a_state_beside_settings_and_none_beside_a_request() -> None:
    state = TrainingState(grad_reduce_in_bf16=True)
    with Lab("phi-4-tiny", num_layers=1, seq_length=32, backend="simulated") as lab:
        record = lab.submit(MemorySettings(offload_optimizer=True), state=state).result()
        assert record.scenario.state == state and record.settings.offload_optimizer
        with pytest.raises(ValueError, match="state is given beside a StepRequest, which has its own"):
            lab.submit(StepRequest(), state=state)
