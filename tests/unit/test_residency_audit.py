"""The audit of parameters, gradients and optimizer state: silent where all is well, and loud about five real errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab.config.settings import MemorySettings
from memlab.engines.megatron.residency_faults import FAULTS, PinnedAgain
from memlab.exercises.checks import check
from memlab.record.residency_audit import Holding, HostCopy, RequestedPlacement, ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import format_bytes
from memlab.views.display import show
from memlab.views.text.audits import groups_used_blocks, residency_blocks
from memlab.views.text.columns import LINE_WIDTH, as_text
from tests.unit.inside import inside
from tests.unit.live import FULL

pytestmark = pytest.mark.versions

NONE = MemorySettings()
BELOW = MemorySettings(offload_parameters=True, offload_optimizer=True)
SAME = ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes")


def audit_of(*holdings: Holding, copies: tuple[HostCopy, ...] = (), **values: int) -> ResidencyAudit:
    numbers = {"unnamed_device_bytes": 0, "move_host_bytes": 0, "move_peak_host_bytes": 0}
    return ResidencyAudit(holdings=holdings, host_copies=copies, **numbers | values)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param("qwen3-moe-tiny", {}, marks=pytest.mark.slow),
        ("qwen3-moe-tiny", {"expert_buffers": True}),
        ("phi-4-tiny", {"dtype": "fp32"}),
    ],
)
def test_the_audit_is_silent_through_any_moves_and_agrees_with_the_meter(
    architecture: str, options: dict[str, Any], open_lab: Callable[..., Any]
) -> None:
    lab = open_lab(architecture, num_layers=2, **options)
    assert not lab.audit_residency().complaints, "before the first step"
    rng = random.Random(3)
    moves = [lambda: lab.step(NONE), lambda: lab.step(BELOW), lab.hand_over]
    moves += [lambda group=group: lab.offload(group) for group in GROUPS]
    moves += [lambda group=group: lab.load(group) for group in GROUPS]
    for _ in range(16):
        try:
            rng.choice(moves)()
        except ValueError as error:
            assert "handed over from the device" in str(error)  # noqa: PT017
        audit = lab.audit_residency()
        assert audit.complaints == (), str(audit)
        assert str(audit) == "every byte is where it should be"
    lab.load(*GROUPS)
    audit = lab.audit_residency()
    parameters = replace(lab.scenario.architecture, num_layers=2).num_parameters
    per_parameter = (4, 4, 8) if lab.scenario.dtype == "fp32" else (2, 4, 12)
    for group, num_bytes in zip(GROUPS, per_parameter, strict=True):
        assert 0 <= audit.device_bytes(group) - num_bytes * parameters < 4096, group
    lab.step(NONE)
    named = sum(audit.device_bytes(group) for group in GROUPS)
    assert 0 <= inside(lab).model.meter.live_bytes() - named < 128 * 1024, "the rest is workspace"


def test_forward_and_backward_need_no_optimizer_state_and_a_sync_only_parameters(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    plain = lab.step(NONE)
    used = lab.groups_used()
    assert used == {
        "zeroing": ("gradients",),
        "forward": ("parameters",),
        "backward": ("parameters", "gradients"),
        "optimizer": GROUPS,
        "hand over": ("parameters",),
    }
    assert not lab.audit_residency().complaints
    after = lab.step(NONE)
    assert [getattr(after, name) for name in SAME] == [getattr(plain, name) for name in SAME]
    lines = as_text(groups_used_blocks(used)).splitlines()
    assert [len(line.split()) for line in lines[1:]] == [4, 4, 4, 4, 5]
    assert lines[2].split() == ["forward", "yes", "-", "-"]


def _gradients_down_and_up(lab: Any) -> None:
    lab.offload("gradients")
    lab.load("gradients")


def _all_down(lab: Any) -> None:
    lab.step(warm_up=False)
    lab.offload(*GROUPS)


def _parameters_down_twice(lab: Any) -> None:
    for _ in range(2):
        lab.offload("parameters")
        lab.load("parameters")
    lab.offload("parameters")


LOST_GRADIENTS = [
    "gradients: 0 B on the device where {dense_gradients} should be again: the storage of buffers.grad_data was not brought back to its size",
    "gradients: 0 B on the device where {expert_gradients} should be again: the storage of expert_parallel_buffers.grad_data was not brought back to its size",
]
# Fault, what shows it, and complaints: {group} is that group's size, {experts_group} the experts' share of it.
SYMPTOMS = {
    "size_not_saved": (_gradients_down_and_up, LOST_GRADIENTS),
    "inverted_condition": (_gradients_down_and_up, LOST_GRADIENTS),
    "expert_buffers_forgotten": (
        _all_down,
        [
            "parameters: {expert_parameters} on the device where 0 B should be, held by expert_parallel_buffers.param_data",
            "gradients: {expert_gradients} on the device where 0 B should be, held by expert_parallel_buffers.grad_data",
            "parameters: {dense_parameters} on the host where one copy of {parameters} should be",
        ],
    ),
    "gradients_held_by_main_parameters": (
        _all_down,
        ["gradients: {main_gradients} on the device where 0 B should be, held by the main parameters' .grad"],
    ),
    "pinned_again": (
        _parameters_down_twice,
        [
            "the last transfer took {pinned_peak} on the host at its peak, and {pinned} are enough: it made a copy before it freed the old one"
        ],
    ),
}


def test_every_fault_has_its_symptom_here() -> None:
    assert list(SYMPTOMS) == list(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_in_words_and_leaves_nothing_behind(fault: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=2, expert_buffers=True)
    plain = lab.step(NONE)
    before = inside(lab).model.meter.live_bytes("host")
    chunk = inside(lab).model.engine.live.chunk
    dense, experts = (sum(buffer.numel for buffer in each) for each in (chunk.buffers, chunk.expert_parallel_buffers))
    own = [buffer.numel * 2 for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = replace(lab.scenario.architecture, num_layers=2).num_parameters
    sizes = {
        "parameters": 2 * (dense + experts),
        "dense_parameters": 2 * dense,
        "expert_parameters": 2 * experts,
        "dense_gradients": 4 * dense,
        "expert_gradients": 4 * experts,
        "main_gradients": 4 * parameters,
        "pinned": before + sum(own),
        "pinned_peak": before + sum(own) + 2 * max(own),  # buffer after buffer: the largest three times, others once
    }
    show_symptom, complaints = SYMPTOMS[fault]
    with lab.residency_fault(fault):
        assert not lab.audit_residency().complaints, "nothing has moved yet"
        show_symptom(lab)
        found = lab.audit_residency()
    words = {name: format_bytes(size) for name, size in sizes.items()}
    assert list(found.complaints) == [complaint.format(**words) for complaint in complaints]
    assert all(complaint in " ".join(as_text(residency_blocks(found)).split()) for complaint in found.complaints)
    assert not lab.audit_residency().complaints, "the block is left"
    after = lab.step(NONE, warm_up=False)
    assert [getattr(after, name) for name in SAME] == [getattr(plain, name) for name in SAME]
    assert not inside(lab).model.transfers.has_fault
    show_symptom(lab)
    assert not lab.audit_residency().complaints, "the same moves without the fault"


def test_a_fault_that_wastes_memory_changes_no_loss(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=2, expert_buffers=True)
    plain = lab.step(NONE)
    for fault in FAULTS.keys() - {"size_not_saved", "inverted_condition"}:
        with lab.residency_fault(fault):
            assert (lab.step(BELOW).loss, lab.step(NONE).loss) == (plain.loss, plain.loss), fault


@pytest.mark.parametrize(("fault", "settings"), [("size_not_saved", NONE), ("inverted_condition", BELOW)])
def test_a_step_that_would_write_to_lost_memory_is_refused(
    fault: str, settings: MemorySettings, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    plain = lab.step(NONE)
    with lab.residency_fault(fault):
        lab.offload("gradients")
        with pytest.raises(
            ValueError, match=r"buffers.grad_data has 0 B of the .* would write to memory .* end the with"
        ):
            lab.step(settings)
        with pytest.raises(ValueError, match="would write to memory"):
            lab.step(settings)
    after = lab.step(NONE)
    assert [getattr(after, name) for name in SAME] == [getattr(plain, name) for name in SAME]


def test_gradients_lost_by_a_step_s_own_offload_are_missed_by_the_next(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    with lab.residency_fault("size_not_saved"), pytest.raises(ValueError, match=r"buffers.grad_data has 0 B"):
        lab.step(BELOW)  # the warm-up step's end empties them
    assert lab.step(BELOW).status == "ok"


def test_a_fault_is_refused_in_one_line_and_changes_nothing_then(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    plain = lab.step(NONE)
    with (
        pytest.raises(ValueError, match="residency fault is 'none', must be one of size_not_saved, inverted"),
        lab.residency_fault("none"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"has 0 expert_parallel_buffers, must have some: .* expert_buffers=True"),
        lab.residency_fault("expert_buffers_forgotten"),
    ):
        pass
    with lab.residency_fault("pinned_again"):
        with (
            pytest.raises(ValueError, match="is a second fault, must be the only one: leave the with block"),
            lab.residency_fault("size_not_saved"),
        ):
            pass
        assert type(inside(lab).model.transfers.residency) is PinnedAgain
    assert not lab.audit_residency().complaints
    assert lab.step(NONE).static_bytes == plain.static_bytes


def test_an_error_or_a_close_inside_the_block_ends_the_fault(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    plain = lab.step(NONE)
    with pytest.raises(ValueError, match="groups are"), lab.residency_fault("gradients_held_by_main_parameters"):
        lab.offload()
    assert lab.step(NONE).static_bytes == plain.static_bytes
    with lab.residency_fault("gradients_held_by_main_parameters"):
        lab.step()
        lab.close()
    assert inside(lab).model.meter.live_bytes() < plain.static_bytes / 100


def test_the_audit_finds_what_nobody_told_the_residency(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    lab.step(NONE)
    stepper, kept = inside(lab).stepper, []

    def spoil(change: Callable[[], object]) -> tuple[str, ...]:
        inside(lab).worker.submit(change).result()
        return lab.audit_residency().complaints

    buffer = stepper.model.engine.live.chunk.buffers[0]
    assert spoil(lambda: kept.append(buffer.grad_data.clone())) == (
        f"{format_bytes(4 * buffer.numel)} on the device, neither in a group nor workspace",
    )
    kept.clear()
    assert spoil(lambda: buffer.param_data.untyped_storage().resize_(0))[0].startswith(
        f"parameters: 0 B on the device where {format_bytes(2 * buffer.numel)} should be again: the storage of buffers"
    )
    assert "buffers.param_data has 0 B of the" in str(lab.submit().exception()), "and the next step is refused"
    spoil(lambda: buffer.param_data.untyped_storage().resize_(2 * buffer.numel))
    parameter = next(iter(stepper.model.engine.live.chunk.parameters()))
    size = parameter.numel() * 2
    assert spoil(lambda: setattr(parameter, "grad", torch.zeros_like(parameter))) == (
        f"gradients: {format_bytes(size)} on the device where 0 B should be, held by the parameters' .grad",
    )
    parameter.grad = None
    lab.offload("optimizer state")
    buffers = stepper.model.transfers.residency._host_buffers["optimizer state"]
    lost = buffers.pop()
    [complaint] = lab.audit_residency().complaints
    assert "optimizer state" in complaint
    assert "on the host where one copy of" in complaint
    buffers.append(lost)
    assert not lab.audit_residency().complaints


def test_what_a_checkpoint_retains_is_what_the_audit_cannot_name(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=2)
    record = lab.step(FULL)
    assert lab.audit_residency().unnamed_device_bytes == record.residual_bytes > 0


def test_what_was_asked_for_is_kept_group_by_group() -> None:
    asked = RequestedPlacement()
    asked.move("offload", ("gradients", "optimizer state"))
    asked.move("hand over", ("parameters",))
    assert (asked.away, asked.copied) == ({"gradients", "optimizer state"}, {"optimizer state", "parameters"})
    asked.move("load", GROUPS)
    assert (asked.away, asked.copied) == (set(), {"optimizer state", "parameters"})
    asked.end_step(("parameters",))
    assert (asked.away, asked.copied) == ({"parameters"}, {"parameters"})


def test_the_table_has_a_row_a_holder_and_fits_a_line() -> None:
    audit = audit_of(
        Holding(group="parameters", holder="buffers.param_data", expected_bytes=0, device_bytes=2 * 1024**2),
        copies=(HostCopy(group="parameters", expected_bytes=2 * 1024**2, host_bytes=0),),
        unnamed_device_bytes=512,
        move_host_bytes=1024,
        move_peak_host_bytes=2048,
    )
    assert len(audit.complaints) == 4
    lines = as_text(residency_blocks(audit)).splitlines()
    assert lines[1].split() == ["device,", "parameters:", "buffers.param_data", "0.00", "2.00", "2,097,152"]
    assert lines[3].split() == ["host,", "parameters", "2.00", "0.00", "0"]
    assert all(len(line) <= LINE_WIDTH for line in lines)
    assert as_text(residency_blocks(audit_of())).endswith("\n\nevery byte is where it should be")


def test_the_checks_of_an_audit_pass_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    fine, again = (
        audit_of(Holding(group="parameters", holder="here", expected_bytes=1, device_bytes=1)) for _ in range(2)
    )
    twice = audit_of(Holding(group="parameters", holder="here", expected_bytes=1, device_bytes=2))
    assert check(fine).only_on_device("parameters").complains_like(again)
    assert capsys.readouterr().out.count("reached: ") == 2
    for copied in (fine, replace(fine), copy(fine), deepcopy(fine)):
        assert not check(copied).complains_like(fine), "the same audit reproduces nothing"
        assert "the job's audit itself or a copy of it, must be an audit of your own" in capsys.readouterr().out
    assert not check(fine).only_on_device("gradients")
    assert not check(fine).only_on_device("gradients", hint="call nothing")
    assert not check(twice).only_on_device("parameters")
    assert not check(fine).complains_like(twice)
    wrong_group, of_exercise, wrong_size, other_complaint = capsys.readouterr().out.splitlines()
    assert wrong_group.startswith("not yet: the device holds parameters, must hold only gradients. Hint: offload")
    assert of_exercise.endswith("must hold only gradients. Hint: call nothing.")
    assert "the right groups, but the audit finds: parameters: 2 B on the device where 1 B should be" in wrong_size
    gone = audit_of(Holding(group="parameters", holder="here", expected_bytes=0, device_bytes=0))
    assert check(fine).only_on_device("parameters", now=lambda: again)
    assert not check(fine).only_on_device("parameters", now=lambda: gone)
    assert "of another moment: now the device holds none of the groups. Hint: change only" in capsys.readouterr().out
    assert "says 'every byte is where it should be', which is not what" in other_complaint
    assert other_complaint.endswith("Hint: nothing is wrong after the same calls: choose an error that shows in them.")
    assert "2 B" not in other_complaint, "it does not tell the answer"


def test_a_fault_comes_and_goes_and_the_kind_of_host_memory_stays(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    lab.pinned_host_memory = False
    with lab.residency_fault("size_not_saved"):
        assert not lab.pinned_host_memory
    assert not lab.pinned_host_memory


def test_a_fault_that_is_refused_leaves_the_audit_as_it_was(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    lab.step(NONE)
    lab.hand_over()
    lab.offload("optimizer state")
    with pytest.raises(ValueError, match="expert_buffers=True"), lab.residency_fault("expert_buffers_forgotten"):
        pass
    assert not lab.audit_residency().complaints


def test_several_moments_are_a_table_and_bars_that_add_up() -> None:
    def one(group: str, num_bytes: int) -> Holding:
        return Holding(group=group, holder="here", expected_bytes=num_bytes, device_bytes=num_bytes)

    late = Holding(group="gradients", holder="there", expected_bytes=0, device_bytes=4 * 2**20)
    moments = {
        "<training>": audit_of(one("parameters", 2**20), one("optimizer state", 6 * 2**20)),
        "weight sync": audit_of(one("parameters", 2**20), late),
        "generation": audit_of(),
    }
    view = show(moments)
    assert view.figure is not None
    sums = [sum(bar.y[place] for bar in view.figure.data) for place in range(3)]
    assert sums == [7.0, 5.0, 0.0]
    assert [note.text for note in view.figure.layout.annotations] == ["<b>7.00</b>", "<b>5.00</b>", "<b>0.00</b>"]
    assert view.figure.layout.xaxis.ticktext[0] == "&lt;training&gt;"
    rows = [line.split() for line in str(view).splitlines()]
    assert ["weight", "sync", "1.00", "4.00", "0.00", "5.00"] in rows
    assert f"weight sync: {late.complaint}" in str(view)


def test_versions_of_a_program_are_lines_over_the_same_moments_and_columns_of_a_table() -> None:
    def one(num_mib: int) -> ResidencyAudit:
        size = num_mib * 2**20
        return audit_of(Holding(group="gradients", holder="here", expected_bytes=size, device_bytes=size))

    view = show({"before": {"training": one(7), "sync": one(5)}, "since": {"training": one(7), "sync": one(1)}})
    assert view.figure is not None
    assert {line.name: line.y for line in view.figure.data} == {"before": (7, 7, 5, 5), "since": (7, 7, 1, 1)}
    assert len({(line.line.color, line.line.dash) for line in view.figure.data}) == 2
    labels = [(note.x, note.text) for note in view.figure.layout.annotations]
    assert labels == [(0, "<b>7.00</b>"), (1, "<b>1.00</b>"), (1, "<b>5.00</b>")]
    rows = [line.split() for line in str(view).splitlines()]
    assert ["training", "7.00", "7.00"] in rows
    assert ["sync", "5.00", "1.00"] in rows
