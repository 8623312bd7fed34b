"""Megatron's CPU optimizer: bytes as on an H200, the same numbers as the default optimizer, and a silent audit."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import optimizer_on_host
from memlab.allocator.pinned import PinnedMemory
from memlab.backends.cpu import cuda_replaced
from memlab.backends.simulated import of_labs_before_0_4, on_fake_tensors
from memlab.config import without_effect
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from memlab.meter.labels import Labels, labelled_by
from memlab.meter.storage_meter import simulated_meter
from tests.unit.inside import inside
from tests.unit.live import random_settings
from tests.unit.measured import measured_rows

pytestmark = pytest.mark.versions

GIB = 1024**3
NONE = MemorySettings()
ALL = TrainingState(optimizer_cpu_offload=True)
HALF = TrainingState(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
OVERLAPPED = replace(HALF, overlap_cpu_optimizer_d2h_h2d=True)
PRECISION_AWARE = replace(ALL, use_precision_aware_optimizer=True, grad_reduce_in_bf16=True, main_grads_dtype="bf16")
TINY = {"num_layers": 1, "seq_length": 64, "backend": "cpu"}


def rounded_to_power_of_two(num_bytes: int) -> int:
    size = 1
    while size < num_bytes:
        size *= 2
    return size


# GiB at rest and at the peak, and of the process on the host, which had 2 before; a script without memlab read them
# (labs/LOG.md).
@pytest.mark.parametrize(
    ("state", "rest", "peak", "host"),
    [(ALL, 17.639, 22.031, 38), (OVERLAPPED, 28.039, 32.432, 24), (PRECISION_AWARE, 7.194, 11.587, 35)],
)
def test_prediction_equals_an_h200(state: TrainingState, rest: float, peak: float, host: int) -> None:
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=4096, state=state, backend="simulated") as lab:
        record = lab.step()
        live = inside(lab).model.engine.live
        assert len(list(live.parameters())) == 2 * (2 * 128 + 7) + 3, "one parameter per expert, as on a GPU"
        on_host = [
            parameter.numel() for part in live.optimizers for parameter in part.optimizer.gpu_params_map_cpu_copy
        ]
    assert record.static_bytes / GIB == pytest.approx(rest, abs=5e-4)
    assert record.peak_allocated_bytes / GIB == pytest.approx(peak, abs=5e-4)
    assert record.residual_bytes == 0
    # Pinned are the gradients in fp32, and the parameters unless they are converted from bf16 to fp32 on the host.
    num_pinned = 1 if state.use_precision_aware_optimizer else 2
    pinned = 4 * sum(on_host) * num_pinned
    blocks = num_pinned * sum(rounded_to_power_of_two(4 * size) for size in on_host)
    assert record.host_reserved_bytes is not None
    # In addition, a block of each size that only the bf16 copies had: 1 GiB of the embedding, and small ones.
    assert blocks + GIB <= record.host_reserved_bytes < blocks + GIB + 32 * 1024**2
    pageable = record.host_bytes - pinned
    assert pageable >= 8 * sum(on_host), "both moments"
    assert (pageable + record.host_reserved_bytes) / GIB + 2 == pytest.approx(host, abs=1)


def trained(monkeypatch: pytest.MonkeyPatch, state: TrainingState) -> tuple[list[float | None], list[torch.Tensor]]:
    monkeypatch.setattr("memlab.engines.megatron.megatron_config.LEARNING_RATE", 1e-3)
    with Lab("qwen3-moe-tiny", state=state, **TINY) as lab:
        losses = [lab.step().loss for _ in range(3)]
        return losses, [parameter.detach().clone() for parameter in inside(lab).model.engine.live.parameters()]


def test_overlapped_copies_reserve_memory_of_their_own_as_on_an_h200() -> None:
    base, row = "precision-aware, bf16 gradients", "50 %, overlapped"
    measured = measured_rows("h200_optimizer_on_host")
    (steps,) = (each for each in measured if (each["base"], each["row"], each["tokens"]) == (base, row, [1024] * 4))
    second, third = steps["peak_reserved_bytes"][:2]
    assert third > second + 0.5 * GIB, "the pool of the gradients' stream grows once more in the third step"
    state = TrainingState(**optimizer_on_host.BASES[base], **optimizer_on_host.ROWS[row], **optimizer_on_host.LOSS)
    backend = of_labs_before_0_4()  # which measured them
    with Lab(optimizer_on_host.MODEL, state=state, backend=backend, **optimizer_on_host.WORKLOAD) as lab:
        for allocated, reserved in zip(steps["peak_allocated_bytes"], steps["peak_reserved_bytes"], strict=True):
            record = lab.step()
            assert record.peak_allocated_bytes == pytest.approx(allocated, rel=1e-5)
            assert record.peak_reserved_bytes == pytest.approx(reserved, rel=5e-4)


def test_losses_and_weights_equal_the_default_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = trained(monkeypatch, TrainingState())
    assert len(set(losses)) == 3, "it learns"
    for state in (ALL, OVERLAPPED):
        same_losses, same_weights = trained(monkeypatch, state)
        assert same_losses == losses
        assert all(torch.equal(*pair) for pair in zip(weights, same_weights, strict=True))


def test_settings_and_transfers_leave_the_loss_and_the_way_back() -> None:
    rng = random.Random(5)
    with Lab("qwen3-moe-tiny", state=HALF, **TINY) as lab:
        first = lab.step()
        for _ in range(8):
            record = lab.step(random_settings(lab, rng))
            assert record.loss == first.loss, str(record.settings)
        again = lab.step(NONE)
        assert (again.loss, again.peak_allocated_bytes) == (first.loss, first.peak_allocated_bytes)
        assert again.host_bytes == first.host_bytes
        assert not lab.audit_residency().complaints
        away = lab.step(MemorySettings(offload_gradients=True, offload_optimizer=True))
        on_device = away.offloaded_bytes_by_group["optimizer state"]
        parameters = replace(lab.scenario.architecture, num_layers=1).num_parameters
        # fp32 main parameters of all, moments of a half, and the fp32 copies of a half in the discarded optimizer
        assert on_device == pytest.approx((4 + 4 + 2) * parameters, rel=0.05)
        assert not lab.audit_residency().complaints
        assert lab.step(NONE).host_bytes == first.host_bytes


def test_the_audit_is_silent_where_the_precision_aware_optimizer_has_gradients_of_its_own() -> None:
    state = replace(PRECISION_AWARE, optimizer_offload_fraction=0.5)
    with Lab("qwen3-moe-tiny", state=state, **TINY) as lab:
        first = lab.step()
        for settings in (NONE, MemorySettings(offload_gradients=True, offload_optimizer=True), NONE):
            record = lab.step(settings)
            assert not lab.audit_residency().complaints
        assert (record.loss, record.peak_allocated_bytes) == (first.loss, first.peak_allocated_bytes)


def test_an_update_that_runs_out_of_memory_can_be_repeated() -> None:
    options: dict[str, Any] = {"num_layers": 2, "seq_length": 16, "backend": "cpu"}
    options["state"] = replace(HALF, manual_gc=True)
    with Lab("phi-4-tiny", **options) as lab:
        expected = lab.step()
    with Lab("phi-4-tiny", **options) as lab:
        for share in (0.85, 0.95):  # where the device lacks memory for one moment of a parameter, or for both
            lab.device_memory_bytes = int(share * expected.peak_allocated_bytes)
            failed = lab.step(warm_up=False).out_of_memory
            assert failed is not None and failed.failed_allocation.phase == "optimizer"
        lab.device_memory_bytes = None
        again = lab.step()
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "host_bytes"):
        assert getattr(again, name) == getattr(expected, name), name


def test_a_change_of_state_leaves_nothing_on_host_or_device() -> None:
    options: dict[str, Any] = {"num_layers": 1, "seq_length": 64, "backend": "simulated"}
    names = ("static_bytes", "peak_allocated_bytes", "host_bytes", "host_reserved_bytes")
    records = []
    with Lab("qwen3-moe-tiny", **options) as lab:
        for state in (
            TrainingState(),
            OVERLAPPED,
            replace(OVERLAPPED, optimizer_offload_fraction=0.9),
            TrainingState(),
        ):
            lab.set_state(state)
            records.append(lab.step())
    for record in records:
        with Lab("qwen3-moe-tiny", state=record.scenario.state, **options) as lab:
            fresh = lab.step()
        assert [getattr(record, name) for name in names] == [getattr(fresh, name) for name in names]


def test_megatron_discards_an_optimizer_that_stays_until_garbage_is_collected() -> None:
    records = {}
    for manual_gc in (False, True):
        with Lab("phi-4-tiny", state=replace(HALF, manual_gc=manual_gc), **TINY) as lab:
            records[manual_gc] = lab.step()
            if not manual_gc:
                (discarded,) = inside(lab).model.engine.live.discarded_optimizers
                copies = list(discarded.param_to_fp32_param.values())
                on_host = [copy for copy in copies if getattr(copy.untyped_storage(), "memlab_on_host", False)]
                held = sum(copy.nbytes for copy in copies) - sum(copy.nbytes for copy in on_host)
                assert held > 0
    assert records[False].static_bytes - records[True].static_bytes == held
    assert records[False].host_bytes - records[True].host_bytes == sum(copy.nbytes for copy in on_host)


def test_a_discarded_optimizer_that_does_not_stay_is_freed_before_the_first_step() -> None:
    host_bytes = {}
    gc.disable()
    try:
        for collects in (False, True):
            with Lab("phi-4-tiny", state=ALL, **TINY | {"backend": "simulated"}) as lab:
                if collects:
                    gc.collect()
                timeline = lab.step(warm_up=False).timeline
                assert timeline is not None
                host_bytes[collects] = timeline.bytes_at(timeline.num_opening_events - 1, "host")
    finally:
        gc.enable()
    assert host_bytes[False] == host_bytes[True]


def test_a_copy_that_converts_between_host_and_device_takes_the_hosts_type_on_the_device() -> None:
    labels = Labels()
    meter = simulated_meter(labels)
    with on_fake_tensors(), labelled_by(labels), meter.watching():
        host = torch.empty(2**20, pin_memory=True, device="cpu")
        device = torch.empty(2**20, dtype=torch.bfloat16, device="cuda")
        for target, source in ((host, device), (device, host)):
            for non_blocking in (False, True):
                meter.start({})
                target.copy_(source, non_blocking=non_blocking)
                timeline = meter.finish()
                assert timeline.peak_bytes("device") - device.nbytes == (4 * 2**20 if non_blocking else 0)


@pytest.mark.parametrize("active", [cuda_replaced, on_fake_tensors])
def test_is_cuda_tells_host_from_device_also_of_results(active: Any) -> None:
    labels = Labels()
    meter = simulated_meter(labels)
    with active(), labelled_by(labels), meter.watching():
        on_device = torch.empty(8, dtype=torch.bfloat16, device="cuda")
        copy = on_device.detach().clone().cpu().pin_memory()
        assert on_device.is_cuda and not copy.is_cuda
        assert not copy.float().is_cuda and not torch.zeros_like(copy).is_cuda
        assert on_device.float().is_cuda and copy.cuda().is_cuda
        assert not torch.empty(8, pin_memory=True, device="cpu").is_cuda


def test_pinned_memory_is_rounded_and_reused() -> None:
    memory = PinnedMemory()
    taken = [memory.allocate(num_bytes) for num_bytes in (5, 8, 9)]
    assert taken == [8, 8, 16] and memory.reserved_bytes == 32
    memory.free(8)
    assert memory.allocate(6) == 8 and memory.reserved_bytes == 32
    assert memory.allocate(6) == 8 and memory.reserved_bytes == 40
    memory.free(16)
    memory.empty_cache()
    assert memory.reserved_bytes == 24


def test_what_does_nothing_is_said_and_what_fails_is_refused() -> None:
    nothing = TrainingState(optimizer_cpu_offload=True, optimizer_offload_fraction=0.0)
    assert set(without_effect.of_state(nothing)) == {"optimizer_cpu_offload"}
    for name in ("overlap_cpu_optimizer_d2h_h2d", "manual_gc"):
        assert name in without_effect.of_state(TrainingState(**{name: True}))
    assert "pin_cpu_params" in without_effect.of_state(TrainingState(optimizer_cpu_offload=True, pin_cpu_params=False))
    ignored = replace(ALL, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", main_params_dtype="fp16")
    assert set(without_effect.of_state(ignored)) == {"exp_avg_dtype", "main_params_dtype"}
    with pytest.raises(ValueError, match="without the distributed optimizer"):
        replace(ALL, use_distributed_optimizer=False)
    with pytest.raises(ValueError, match="fp8_recipe is 'blockwise'"):
        replace(ALL, fp8_format="e4m3", fp8_param_gather=True, fp8_recipe="blockwise")
    with pytest.raises(ValueError, match="must be bf16"):
        Scenario.of("phi-4-tiny", dtype="fp32", state=ALL)
