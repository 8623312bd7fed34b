"""The meter against torch's own allocation profiler, and its labels and categories on a live step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _maybe_wrap_tensor
from torch.profiler import ProfilerActivity, profile

import memlab.lab.one_process
from memlab.config.settings import MemorySettings
from memlab.engines.megatron.layers.torch_functions import Norm
from memlab.lab.lab_model import LabModel
from memlab.meter.labels import Labels, labelled_by, on_host, one_kernel
from memlab.meter.observe_program import ObserveProgram
from memlab.meter.observers import ObserveResults
from memlab.meter.storage_meter import StorageMeter, plain_meter, simulated_meter
from memlab.record.timeline import Timeline
from memlab.units import MIB
from memlab.vocabulary import CATEGORIES, PHASES, POOLS
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute

pytestmark = pytest.mark.versions

MOVED = offload("expert_fc1", "qkv_linear")

# A Python number in an operation becomes an 8-byte tensor that lives inside that one operation.
PYTHON_NUMBER_BYTES = 8


class ProfiledModel(LabModel):
    """A model under torch's allocation profiler from its first byte, with a mark in it after every operation."""

    def build(self) -> None:
        self.meter_totals: list[int] = []
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()
        self._running = 0
        meter: Any = self.meter
        observe, event = meter.storages.after_operation, meter.storages.log.note

        def count(delta: int, allocation: Any) -> None:
            self._running += delta if abs(delta) > PYTHON_NUMBER_BYTES else 0
            event(delta, allocation)

        def observe_and_mark(results: Any, arguments: Any = ()) -> None:
            observe(results, arguments)
            with torch.autograd.profiler.record_function(f"mark {len(self.meter_totals)}"):
                self.meter_totals.append(self._running)

        meter.storages.log.note, meter.storages.after_operation = count, observe_and_mark
        super().build()

    def disagreements(self, from_mark: int) -> list[tuple[int, int]]:
        """Returns (mark, profiler's bytes - meter's bytes) wherever they differ."""
        self.profile.stop()
        assert self.profile.profiler is not None
        rows = []
        for event in self.profile.profiler.kineto_results.events():
            if event.name() == "[memory]" and abs(event.nbytes()) > PYTHON_NUMBER_BYTES:
                rows.append((event.start_ns(), -1, event.nbytes()))
            elif event.name().startswith("mark "):
                rows.append((event.start_ns(), int(event.name()[5:]), 0))
        allocated, found = 0, []
        for _, mark, num_bytes in sorted(rows):
            allocated += num_bytes
            if mark >= from_mark and allocated != self.meter_totals[mark]:
                found.append((mark, allocated - self.meter_totals[mark]))
        return found


@pytest.mark.parametrize("family", ["qwen3-moe-tiny", pytest.param("phi-4-tiny", marks=pytest.mark.slow)])
def test_every_event_agrees_with_torch_s_allocation_profiler(
    family: str, open_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # offload("core_attn", "attn_proj") and the host groups resize storages in place, both ways.
    moved = MemorySettings(
        offload_modules=["core_attn", "attn_proj"],
        min_offloaded_tensor_size=0,
        offload_parameters=True,
        offload_optimizer=True,
    )
    monkeypatch.setattr(memlab.lab.one_process, "LabModel", ProfiledModel)
    lab = open_lab(family, num_layers=4, seq_length=32)
    model: Any = inside(lab).model
    built = len(model.meter_totals)
    for settings in (MemorySettings(), FULL, recompute("layernorm", "core_attn"), moved):
        lab.step(settings)
    assert len(model.meter_totals) - built > 10_000
    assert inside(lab).worker.submit(lambda: model.disagreements(from_mark=built)).result() == []


def metered(labels: Labels, work: Any) -> Timeline:
    meter = plain_meter(labels)
    with labelled_by(labels), meter.watching():
        meter.start({})
        work(meter)
        return meter.finish()


def test_a_resize_in_place_is_a_death_and_a_birth() -> None:
    def work(meter: StorageMeter) -> None:
        tensor = torch.empty(1000, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(400)
        del tensor

    assert metered(Labels(), work).delta_bytes.tolist() == [1000, -1000, 400, -400]


@pytest.mark.parametrize("kind", [plain_meter, simulated_meter])
def test_a_storage_that_has_no_space_to_grow_keeps_its_size(kind: Callable[[Labels], StorageMeter]) -> None:
    labels = Labels()
    meter = kind(labels)
    with labelled_by(labels), meter.watching():
        meter.start({})
        tensor = torch.empty(3 * MIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        meter.device_memory_bytes = 2 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            tensor.untyped_storage().resize_(3 * MIB)
        assert tensor.untyped_storage().nbytes() == 0
        tensor.detach()  # an operation that sees the storage again
        meter.device_memory_bytes = None
        tensor.untyped_storage().resize_(3 * MIB)
        assert meter.live_bytes("device") == 3 * MIB
        del tensor
        meter.finish()


def test_views_are_not_new_bytes_and_the_last_reference_ends_a_storage() -> None:
    def work(meter: StorageMeter) -> None:
        tensor = torch.empty(1000, dtype=torch.uint8)
        view = tensor[500:].view(5, 100)
        del tensor
        assert meter.live_bytes() == 1000
        del view
        assert meter.live_bytes() == 0

    assert metered(Labels(), work).delta_bytes.tolist() == [1000, -1000]


def test_what_wraps_a_collective_s_output_until_it_is_there_has_no_bytes() -> None:
    def work(meter: StorageMeter) -> None:
        wrapped = _maybe_wrap_tensor(torch.empty(1000, dtype=torch.uint8))
        assert isinstance(wrapped, AsyncCollectiveTensor) and meter.live_bytes() == 1000

    assert metered(Labels(), work).delta_bytes.tolist() == [1000, -1000]


def test_what_stays_inside_a_fused_kernel_never_counts_as_device_memory() -> None:
    def work(meter: StorageMeter) -> None:
        with one_kernel():
            inner = torch.zeros(1000, dtype=torch.uint8)
            outer = inner + 1
            del inner
        assert meter.live_bytes("device") == 1000
        with on_host():
            copy = outer.clone()
        assert (meter.live_bytes("host"), meter.live_bytes("on_chip")) == (1000, 0)
        del outer, copy

    timeline = metered(Labels(), work)
    assert timeline.peak_bytes("device") == 1000
    assert timeline.peak_bytes("on_chip") == 2000
    assert timeline.peak_bytes("host") == 1000
    assert timeline.total_bytes()[-1] == 0


def test_lifetime_tells_activations_from_temporaries() -> None:
    labels = Labels()

    def work(meter: StorageMeter) -> None:
        labels.enter_phase("forward")
        kept, dropped = torch.empty(100, dtype=torch.uint8), torch.empty(10, dtype=torch.uint8)
        del dropped
        labels.enter_phase("backward")
        with labels.recompute():
            again = torch.empty(40, dtype=torch.uint8)
        gradient = torch.empty(7, dtype=torch.uint8)
        del kept, again, gradient

    timeline = metered(labels, work)
    born = {name: timeline.allocated_bytes_of(name) for name in ("activations", "temporary", "recomputed")}
    assert born == {"activations": 100, "temporary": 17, "recomputed": 40}


def test_a_norm_s_own_numbers_stay_on_chip() -> None:
    inputs, weight = torch.randn(64, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)

    def work(meter: StorageMeter) -> None:
        leaf = inputs.clone().requires_grad_()
        output = Norm.apply(leaf, weight, None, 1e-5)
        torch.autograd.grad(output, leaf, torch.ones_like(output))

    timeline = metered(Labels(), work)
    births = timeline.delta_bytes[(timeline.delta_bytes > 0) & (timeline.pool == POOLS.index("device"))]
    # The leaf, the output and its gradient, the input's gradient; the weight's; the reciprocals; nothing large in fp32.
    assert sorted(births.tolist()) == [32 * 2, 64 * 4, *[64 * 32 * 2] * 4]
    assert timeline.peak_bytes("on_chip") > 64 * 32 * 4


def test_activations_that_come_back_from_the_host_are_activations(open_lab: Any) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain, moved = (born_in_backward(record.timeline, "activations") for record in (lab.step(), lab.step(MOVED)))
    assert plain == 0
    assert moved == sum(lab.records[-1].offloaded_bytes_by_module.values()) > 0


def born_in_backward(timeline: Timeline, category: str) -> int:
    born = (timeline.delta_bytes > 0) & (timeline.pool == POOLS.index("device"))
    backward = timeline.phase == PHASES.index("backward")
    return int(timeline.delta_bytes[born & backward & (timeline.category == CATEGORIES.index(category))].sum())


def test_what_is_retained_after_a_step_is_no_temporary(open_lab: Any) -> None:
    record = open_lab("qwen3-moe-tiny").step(FULL)
    timeline = record.timeline
    assert "temporary" not in timeline.breakdown(timeline.num_opening_events - 1)
    assert timeline.breakdown(len(timeline) - 1)["activations"] == record.residual_bytes


def test_the_modules_of_peak_residual_and_recomputed_bytes_add_up_to_them(open_lab: Any) -> None:
    lab = open_lab("qwen3-moe-tiny")
    for record in (lab.step(), lab.step(FULL), lab.step(FULL)):
        assert sum(record.peak_by_module.values()) == record.peak_allocated_bytes
        assert sum(record.residual_by_module.values()) == record.residual_bytes
        assert sum(record.recomputed_by_module.values()) == record.recomputed_bytes
    assert lab.records[-1].residual_bytes > lab.records[0].residual_bytes == 0


def test_a_step_s_categories_hold_exactly_the_model_s_own_bytes(open_lab: Any) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    record = lab.step()
    parameters = lab.scenario.architecture.num_parameters
    opening = record.timeline.breakdown(record.timeline.num_opening_events - 1)
    num_tensors = len(list(inside(lab).model.engine.live.chunk.parameters()))
    # DDP starts each tensor at a multiple of 64 elements in its buffer, and pads the end to one of 128.
    padded = opening["parameters"] // 2
    assert parameters <= padded <= parameters + 64 * num_tensors + 128
    assert opening["gradients"] == 4 * padded
    assert opening["optimizer state"] == 12 * parameters + 4 * num_tensors  # and torch's AdamW counts steps by tensor
    assert sum(record.peak_by_category.values()) == record.peak_allocated_bytes
    assert sum(opening.values()) == record.static_bytes


def test_bytes_are_named_by_module_and_phase_in_forward_and_backward(open_lab: Any) -> None:
    timeline = open_lab("qwen3-moe-tiny", num_layers=4).step().timeline
    born = timeline.delta_bytes > 0
    for phase in ("forward", "backward"):
        of_phase = born & (timeline.phase == PHASES.index(phase))
        named = of_phase & (timeline.module > 0)
        assert timeline.delta_bytes[named].sum() > 0.9 * timeline.delta_bytes[of_phase].sum()
        layers = {timeline.modules[code] for code in timeline.module[of_phase]}
        assert "decoder.layers.3.mlp.experts.linear_fc1" in layers


def test_a_phase_that_is_stopped_as_it_begins_ends_in_idle() -> None:
    labels = Labels()

    def stop() -> None:
        if labels.phase != PHASES.index("idle"):
            raise RuntimeError("stopped")

    labels.on_move = stop
    with pytest.raises(RuntimeError, match="stopped"), labels.phase_of("forward"):
        pass
    assert PHASES[labels.phase] == "idle"


def test_a_free_that_the_meter_could_not_count_fails_the_timeline_and_every_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = plain_meter(Labels())
    with meter.watching():
        meter.start({})
        kept = torch.ones(1000)
        with monkeypatch.context() as patched:
            patched.setattr(
                meter.storages.log, "note", lambda *_: (_ for _ in ()).throw(MemoryError("no memory for an event"))
            )
            del kept
        for end in (meter.finish, lambda: meter.start({})):
            with pytest.raises(RuntimeError, match=r"missed a free \(MemoryError: no memory for an event\).*another"):
                end()


def test_torch_wraps_the_meter_for_its_compiler_only_where_a_program_may_compile() -> None:
    assert hasattr(ObserveProgram.__torch_dispatch__, "__wrapped__")
    assert not hasattr(ObserveResults.__torch_dispatch__, "__wrapped__")
