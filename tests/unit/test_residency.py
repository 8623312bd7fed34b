"""Parameters, gradients and optimizer state down to the host and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.config.settings import MemorySettings
from memlab.record.transfer import GROUPS
from tests.unit.inside import inside

NONE = MemorySettings()
SETTINGS = {
    "parameters": MemorySettings(offload_parameters=True),
    "gradients": MemorySettings(offload_gradients=True),
    "optimizer state": MemorySettings(offload_optimizer=True, offload_gradients=False),
}


@pytest.mark.parametrize("group", SETTINGS)
def test_each_group_leaves_and_returns_alone(group: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    plain, moved = lab.step(NONE), lab.step(SETTINGS[group])
    assert list(moved.offloaded_bytes_by_group) == [group]
    freed = moved.offloaded_bytes_by_group[group]
    assert freed == plain.timeline.breakdown(plain.timeline.num_opening_events - 1)[group]
    assert plain.static_bytes - moved.static_bytes == freed
    # Gradients are dropped; the others have one copy on the host, of the same size.
    assert moved.host_bytes - plain.host_bytes in range(8192) if group == "gradients" else moved.host_bytes >= freed
    assert moved.host_bytes < freed + 2 * plain.host_bytes or group == "gradients"
    assert moved.load_seconds > 0 < moved.offload_seconds
    assert (plain.load_seconds, plain.offload_seconds) == (0.0, 0.0)
    back = lab.step(NONE)
    assert (back.static_bytes, back.host_bytes, back.load_seconds) == (plain.static_bytes, plain.host_bytes, 0.0)


def test_a_step_after_a_full_trip_down_and_up_is_bit_identical(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory that comes back is not empty on a GPU; here the system would hand out pages of zeros.
    resize_ = torch.UntypedStorage.resize_

    def resize_into_used_memory(storage: Any, num_bytes: int) -> Any:
        result = resize_(storage, num_bytes)
        return storage.fill_(127) if num_bytes else result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_into_used_memory)
    lab = open_lab("qwen3-moe-tiny")
    lab.step(NONE)

    def state() -> dict[str, list[torch.Tensor]]:
        groups = inside(lab).model.transfers.residency.tensors()
        return {name: [tensor.clone() for tensor in groups[name]] for name in ("parameters", "optimizer state")}

    before = inside(lab).worker.submit(state).result()

    def down_and_up() -> None:
        inside(lab).model.transfers.residency.offload(GROUPS)
        assert all(
            tensor.untyped_storage().nbytes() == 0 for tensor in inside(lab).model.engine.live.chunk.module.parameters()
        ), "parameters share the emptied buffer"
        inside(lab).model.transfers.residency.load()
        inside(lab).model.transfers.residency.forget(GROUPS)

    inside(lab).worker.submit(down_and_up).result()
    after = inside(lab).worker.submit(state).result()
    for name, tensors in before.items():
        assert len(tensors) == len(after[name]) > 0
        assert all(torch.equal(old, new) for old, new in zip(tensors, after[name], strict=True)), name
    assert all(float(buffer.grad_data.abs().sum()) == 0.0 for buffer in inside(lab).model.engine.live.chunk.buffers), (
        "gradients come back zeroed"
    )


def test_the_buffers_of_experts_that_are_spread_over_ranks_move_too(open_lab: Callable[..., Any]) -> None:
    # verl #1766. On one rank Megatron puts experts into the common buffers unless their weights say otherwise.
    lab = open_lab("qwen3-moe-tiny", num_layers=4, expert_buffers=True)
    assert inside(lab).model.engine.live.chunk.expert_parallel_buffers
    record = lab.step(MemorySettings(offload_parameters=True, offload_optimizer=True))
    parameters = lab.scenario.architecture.num_parameters
    assert record.offloaded_bytes_by_group["parameters"] >= 2 * parameters
    assert record.offloaded_bytes_by_group["gradients"] >= 4 * parameters
    assert record.offloaded_bytes_by_group["optimizer state"] >= 12 * parameters


def test_host_copies_are_made_once(open_lab: Callable[..., Any]) -> None:
    # verl #6193: pinning anew at every offload holds two copies for a moment.
    lab = open_lab("phi-4-tiny")
    first = lab.step(SETTINGS["parameters"], warm_up=False)
    later = [lab.step() for _ in range(3)]
    assert {record.host_bytes for record in later} == {later[0].host_bytes}
    assert later[0].host_bytes <= first.host_bytes + 16384
    assert lab.step(NONE).host_bytes < later[0].host_bytes


def test_optimizer_state_that_went_down_before_the_first_step_goes_down_after_it(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2)
    lab.offload("optimizer state")  # the main parameters alone: Adam makes its moments in the first step
    first = lab.step(SETTINGS["optimizer state"], warm_up=False)
    assert first.offloaded_bytes_by_group == lab.step().offloaded_bytes_by_group
    assert lab.step(NONE).loss == first.loss


def test_groups_move_one_by_one_between_steps_and_the_next_step_is_the_same(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain = lab.step(NONE)
    down = lab.offload("optimizer state", "gradients")
    assert list(down.transferred_bytes) == ["gradients", "optimizer state"]
    assert down.device_bytes == plain.static_bytes - sum(down.transferred_bytes.values())
    assert down.seconds > 0
    again = lab.offload("gradients")
    assert (again.transferred_bytes, again.seconds) == ({}, 0.0)
    assert (lab.load("parameters").transferred_bytes, lab.load("parameters").seconds) == ({}, 0.0)
    handed = lab.hand_over()
    assert handed.transferred_bytes == {"parameters": lab.offload("parameters").transferred_bytes["parameters"]}
    with pytest.raises(ValueError, match="are on the host, and are handed over from the device: load them first"):
        lab.hand_over()
    with pytest.raises(ValueError, match=r"groups are \['weights'\], must be some of parameters, gradients"):
        lab.load("weights")
    with pytest.raises(ValueError, match="is one text: give each name in quotes of its own"):
        lab.load("parameters, gradients")
    # Loading gradients only to read weights takes twice the parameters' bytes for nothing (SkyRL #563).
    careless = lab.load("parameters", "gradients")
    assert careless.transferred_bytes["gradients"] == 2 * careless.transferred_bytes["parameters"]
    after = lab.step(NONE)
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "host_bytes"):
        assert getattr(after, name) == getattr(plain, name), name


def test_a_weight_sync_needs_the_parameters_alone(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    away = lab.step(MemorySettings(offload_parameters=True, offload_optimizer=True))
    up, handed, down = lab.load("parameters"), lab.hand_over(), lab.offload("parameters")
    assert (
        list(up.transferred_bytes) == list(handed.transferred_bytes) == list(down.transferred_bytes) == ["parameters"]
    )
    idle = away.timeline.total_bytes()[-1]
    assert up.device_bytes == idle + up.transferred_bytes["parameters"]
    assert down.device_bytes == idle
    assert down.host_bytes == up.host_bytes, "the host copy is made once"
    assert lab.step().loss == away.loss


def test_a_host_buffer_that_cannot_be_made_leaves_everything_on_the_device(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("phi-4-tiny")
    plain = lab.step()
    with monkeypatch.context() as patches:
        patches.setattr("memlab.engines.residency.residency.HostBuffer", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lab.offload("parameters")
    assert not lab.audit_residency().complaints
    again = lab.step()
    assert (again.status, again.loss) == ("ok", plain.loss)
    assert lab.offload("parameters").transferred_bytes
