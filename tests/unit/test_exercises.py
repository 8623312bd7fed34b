"""The checks of the exercises: they pass where the goal is met, and help where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memlab.config.settings import MemorySettings
from memlab.exercises import CheckFailed, check, failure
from tests.unit.live import FULL, offload


def test_a_goal_that_is_reached_says_so_and_goals_chain(
    open_lab: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, full, moved = lab.step(), lab.step(FULL), lab.step(offload("moe_act"))
    check(full).peak_below(plain.peak_allocated_bytes).same_loss_as(plain)
    check(moved).moves("moe_act").residual_is_zero().recomputes_less_than(1)
    check(lab.step(MemorySettings(offload_optimizer=True))).starts_below(plain.static_bytes // 2)
    assert capsys.readouterr().out.count("reached: ") == 6


def test_a_goal_that_is_missed_says_by_how_much_and_where_to_look(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, full = lab.step(), lab.step(FULL)
    with pytest.raises(
        CheckFailed, match=r"the activation peak is .* must be below 1 B: the largest part .* activations"
    ):
        check(plain).activation_peak_below(1)
    with pytest.raises(CheckFailed, match="a checkpointed MoE layer keeps its input"):
        check(full).residual_is_zero()
    with pytest.raises(CheckFailed, match="under min_offloaded_tensor_size"):
        check(lab.step(MemorySettings(offload_modules=["moe_act"]))).moves("moe_act")
    with pytest.raises(CheckFailed, match="not among offload_modules"):
        check(plain).moves("moe_act")
    with pytest.raises(CheckFailed, match="a memory setting changes no number"):
        check(plain).same_loss_as(replace(plain, loss=1.0))
    lab.device_memory_bytes = plain.static_bytes + 1000
    with pytest.raises(CheckFailed, match="ended early"):
        check(lab.step(MemorySettings())).peak_below(10**12)


def test_a_failure_of_megatron_s_is_a_text_without_addresses() -> None:
    def mismatch() -> None:
        raise AssertionError("Chunk mismatch <megatron.Handler object at 0x7f15c5eb21d0>")

    assert failure(mismatch) == "AssertionError: Chunk mismatch <megatron.Handler>"
    assert failure(lambda: None) == ""
    with pytest.raises(ValueError, match="is a user's mistake"):
        failure(lambda: (_ for _ in ()).throw(ValueError("is a user's mistake")))


def test_steps_that_failed_have_no_same_loss(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    plain = lab.step()
    failed = replace(plain, status="out_of_memory", loss=None)
    for one, other in ((failed, failed), (failed, plain), (plain, failed)):
        with pytest.raises(CheckFailed, match="no loss to compare"):
            check(one).same_loss_as(other)
