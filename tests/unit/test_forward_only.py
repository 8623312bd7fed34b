"""Forward-only passes: what they measure, and that they leave Megatron's offload manager alone, unless told not to."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron.core
import pytest

from memlab.cli import main
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.engines.megatron import training_step
from memlab.lab.lab import Lab
from memlab.lab.one_process import OneProcess
from memlab.record.step_record import StepRecord
from memlab.vocabulary import PHASES
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute
from tests.unit.replayed import require_identical

pytestmark = pytest.mark.versions

THREE = offload("qkv_linear", "core_attn", "attn_proj")
RESETS_AFTER_FORWARD_ONLY = not megatron.core.__version__.startswith("0.16")
"""From 0.19 on the schedule resets the manager after every pass (pipeline_parallel/schedules.py)."""


@pytest.mark.parametrize("settings", [MemorySettings(), FULL, offload("moe_act")], ids=str)
def test_a_forward_only_pass_has_the_loss_and_keeps_nothing(
    open_lab: Callable[..., Lab], settings: MemorySettings
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    trained = lab.step(settings)
    record = lab.forward_only()
    assert (record.loss, record.forward_only, record.settings) == (trained.loss, True, settings)
    assert record.offloaded_bytes_by_module == {}
    assert record.residual_bytes <= trained.residual_bytes
    assert record.activation_peak_bytes < trained.activation_peak_bytes
    assert record.timeline is not None
    assert {PHASES[phase] for phase in record.timeline.phase} <= {"idle", "load", "forward", "offload"}
    assert lab.records == [trained, record]
    assert inside(lab).model.engine.live.chunk.training
    assert "forward only" in str(record)


def test_a_pass_under_selective_recompute_leaves_no_random_states_on_the_host(open_lab: Callable[..., Lab]) -> None:
    """Backward would have used them up. Each is the 5,056 bytes of ``torch.get_rng_state``; each layer's two norms have one."""
    lab = open_lab("qwen3-moe-tiny", seq_length=64)
    before = lab.step().host_bytes
    meter = inside(lab).model.meter
    without = meter.live_bytes("host")
    lab.forward_only(recompute("layernorm"))
    assert meter.live_bytes("host") == without + 2 * lab.scenario.num_layers * 5056
    assert lab.step(MemorySettings()).host_bytes == before


def test_a_warm_pass_equals_all_that_follow_as_the_first_of_a_model_does_not(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    first, second = lab.forward_only(), lab.forward_only()
    lab.close()
    lab = open_lab("qwen3-moe-tiny")
    warm = lab.forward_only(warm_up=True)
    assert (len(lab.records), warm.step_index, warm.loss) == (1, 1, second.loss)
    assert first.static_bytes < second.static_bytes == warm.static_bytes  # the rotary angles
    assert warm.peak_allocated_bytes == second.peak_allocated_bytes


def test_a_pass_is_steady_after_its_warm_up_and_does_not_replace_that_of_a_step(
    open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    assert [lab.forward_only(warm_up=warm_up).is_steady for warm_up in (False, True)] == [False, True]
    assert not lab.step(warm_up=False).is_steady
    lab.forward_only()
    assert lab.step(warm_up=False).is_steady
    lab.forward_only(seq_length=64)
    assert [lab.step(warm_up=False).is_steady for _ in range(2)] == [False, True]
    with monkeypatch.context() as patched:
        patched.setattr(training_step, "forward_only_step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lab.forward_only()
    assert not lab.step(warm_up=False).is_steady


def test_after_a_pass_that_frees_what_checkpoints_retain_a_step_warms_up_again(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    expected = lab.step(FULL)
    lab.forward_only()
    after = lab.step()
    assert (after.is_steady, after.static_bytes) == (True, expected.static_bytes)
    lab.forward_only()
    assert not lab.step(warm_up=False).is_steady


def test_a_step_after_a_pass_that_was_not_suspended_is_not_steady_and_takes_no_warm_up(
    open_lab: Callable[..., Lab],
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    before = lab.step(THREE)
    lab.forward_only(suspend_offload=False)
    after, later = lab.step(), lab.step()
    assert [record.is_steady for record in (before, after, later)] == [True, False, True]
    assert [record.step_index - before.step_index for record in (after, later)] == [2, 3]
    lab.step(MemorySettings())
    lab.forward_only(suspend_offload=False)  # nothing is offloaded
    assert lab.step().is_steady


def test_a_warm_up_that_does_not_fit_is_the_record(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    lab.device_memory_bytes = lab.forward_only().peak_allocated_bytes - 1
    record = lab.forward_only(warm_up=True)
    assert (record.status, record.step_index, record.is_steady) == ("out_of_memory", 1, False)


def test_ctrl_c_ends_a_pass_at_its_next_layer(open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain = lab.forward_only(warm_up=True)
    stopping = threading.Event()
    take_pass, stop = training_step.forward_only_step, OneProcess.stop

    def interrupted_pass(*args: Any, **kwargs: Any) -> float | None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert stopping.wait(60)
        return take_pass(*args, **kwargs)

    def noted_stop(session: OneProcess) -> bool:
        was_running = stop(session)
        stopping.set()
        return was_running

    with monkeypatch.context() as patched:
        patched.setattr(training_step, "forward_only_step", interrupted_pass)
        patched.setattr(OneProcess, "stop", noted_stop)
        with pytest.raises(KeyboardInterrupt):
            lab.forward_only(warm_up=True)
    assert not lab.busy
    assert (lab.records[1].status, lab.records[1].forward_only) == ("interrupted", True)
    assert lab.forward_only().peak_allocated_bytes == plain.peak_allocated_bytes


@pytest.mark.parametrize(
    ("architecture", "layout", "has_graph"),
    [
        ("qwen3-moe-tiny", Layout(), False),
        # Megatron adds to a layer's input under ``torch.enable_grad``: a bias, which requires gradients, or to what a
        # stage has received, which does too.
        ("gpt-tiny", Layout(), True),
        pytest.param("qwen3-moe-tiny", Layout(pipeline_model_parallel_size=2, rank=1), True, marks=pytest.mark.slow),
    ],
)
def test_passes_and_micro_batches_without_backward_that_repeat_are_not_stepped(
    architecture: str, layout: Layout, has_graph: bool
) -> None:
    taken: dict[bool, list[StepRecord]] = {}
    arguments: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "num_microbatches": 8, "layout": layout}
    for replay in (False, True):
        with Lab(architecture, **arguments, backend="simulated", replay=replay) as lab:
            taken[replay] = [lab.step(FULL, warm_up=False)]
            model: Any = inside(lab).model
            before = model.labels.num_repeated
            taken[replay].append(lab.forward_only(seq_length=32))
            assert (model.labels.num_repeated > before) == replay
            assert (model.replay.num_replayed > 0) == (replay and not has_graph)
            taken[replay].append(lab.step(warm_up=False))
    for stepped, repeated in zip(taken[False], taken[True], strict=True):
        require_identical(stepped, repeated)


@pytest.mark.parametrize(("command", "backend"), [("measure", ["--backend", "cpu"]), ("predict", [])])
def test_both_commands_take_a_pass_before_the_one_that_they_report(
    command: str, backend: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = ["qwen3-moe-tiny", "--num-layers", "2", "--seq-length", "64"]
    assert main([command, *model, *backend, "--forward-only", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["forward_only"], record["step_index"]) == (True, 1)


def test_only_the_parameters_are_brought_back_for_it(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    away = MemorySettings(offload_parameters=True, offload_optimizer=True)
    trained = lab.step(away)
    record = lab.forward_only()
    assert "optimizer state" not in record.peak_by_category
    assert "gradients" not in record.peak_by_category
    assert record.offloaded_bytes_by_group == {"parameters": trained.offloaded_bytes_by_group["parameters"]}
    assert lab.forward_only(MemorySettings()).loss == lab.step().loss == trained.loss


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_suspended_pass_changes_nothing_for_the_steps_after_it(
    open_lab: Callable[..., Lab], num_microbatches: int
) -> None:
    lab = open_lab("qwen3-moe-tiny", num_microbatches=num_microbatches)
    expected = lab.step(THREE)
    lab.forward_only()
    after = lab.step()
    lab.forward_only(offload("moe_act"))  # right after a change: before the manager's warm-up
    lab.step()
    lab.forward_only(THREE)
    fresh = lab.step()
    for record in (after, fresh):
        assert record.offloaded_bytes_by_module == expected.offloaded_bytes_by_module
        assert record.peak_allocated_bytes == expected.peak_allocated_bytes


def test_between_two_steps_a_pass_that_is_not_suspended_uses_up_the_groups(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, expected = lab.step(MemorySettings()), lab.step(THREE)
    lab.forward_only(suspend_offload=False)
    after = lab.step()
    if RESETS_AFTER_FORWARD_ONLY:
        assert after.offloaded_bytes_by_module == expected.offloaded_bytes_by_module
    else:
        assert after.offloaded_bytes_by_module == {}
        assert after.activation_peak_bytes == plain.activation_peak_bytes
        assert "forward-only" in after.without_effect["offload_modules:core_attn"]
    assert lab.step().offloaded_bytes_by_module == expected.offloaded_bytes_by_module


def test_after_a_change_a_pass_that_is_not_suspended_misleads_the_warm_up(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    expected = lab.step(THREE)
    lab.apply(THREE)
    lab.forward_only(suspend_offload=False)
    if RESETS_AFTER_FORWARD_ONLY:
        for _ in range(2):
            record = lab.step()
            assert record.offloaded_bytes_by_module.keys() == {"qkv_linear"}
            assert "forward-only" in record.without_effect["offload_modules:core_attn"]
        lab.apply(THREE)
    else:
        with pytest.raises(AssertionError, match="Chunk mismatch"):
            lab.step()
    mended = lab.step()
    assert mended.offloaded_bytes_by_module == expected.offloaded_bytes_by_module
    assert (mended.peak_allocated_bytes, mended.residual_bytes) == (expected.peak_allocated_bytes, 0)


def test_what_only_backward_would_use_is_said_to_do_nothing_without_one(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    settings = replace(offload("moe_act"), recompute_granularity="selective", recompute_modules=("layernorm",))
    reasons = lab.forward_only(settings).without_effect
    assert set(reasons) == {"recompute_granularity", "offload_modules:moe_act"}
    assert all("forward-only pass" in reason for reason in reasons.values())
    assert lab.step().without_effect == {}
