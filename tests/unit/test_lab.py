"""A Lab from its opening to its closing."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from memlab.lab.progress import Progress
from memlab.lab.request import PassRequest
from memlab.record.step_record import StepRecord
from memlab.views.display import show
from tests.unit.inside import inside
from tests.unit.live import FULL, offload


def test_closing_gives_every_byte_back(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    lab.step(MemorySettings(offload_modules=["moe_act"], min_offloaded_tensor_size=0, offload_optimizer=True))
    lab.step(FULL)
    meter = inside(lab).model.meter
    assert meter.live_bytes() > 1_000_000
    lab.close()
    gc.collect()
    assert [meter.live_bytes(pool) for pool in ("device", "host", "on_chip")] == [0, 0, 0]
    assert {"GPTModel", "DistributedOptimizer"} & {type(thing).__name__ for thing in gc.get_objects()} == set()


def test_a_second_lab_in_the_process_measures_the_same(open_lab: Callable[..., Any]) -> None:
    first = open_lab("qwen3-moe-tiny")
    one = first.step(FULL)
    first.close()
    two = open_lab("qwen3-moe-tiny").step(FULL)
    for name in ("static_bytes", "peak_allocated_bytes", "residual_bytes", "loss"):
        assert getattr(one, name) == getattr(two, name), name


def test_opening_a_lab_closes_the_open_one_and_says_so(open_lab: Callable[..., Any]) -> None:
    first = open_lab("phi-4-tiny")
    with pytest.warns(UserWarning, match=r"closing the open lab \(phi-4-tiny"):
        second = open_lab("phi-4-tiny")
    with pytest.raises(ValueError, match=r"closed: open another with Lab\(...\), or run its cell again"):
        first.step()
    assert second.step().status == "ok"


def test_a_failed_build_leaves_room_for_the_next(open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from memlab.engines.megatron import build
    from memlab.meter.storage_meter import StorageMeter

    closed: list[StorageMeter] = []

    def close(meter: StorageMeter) -> None:
        closed.append(meter)

    with monkeypatch.context() as patched:
        patched.setattr(build, "_fuse_adam", lambda optimizer: 1 / 0)
        patched.setattr(StorageMeter, "close", close)
        with pytest.raises(ZeroDivisionError):
            open_lab("phi-4-tiny")
    assert len(closed) == 1, "a GPU's meter would go on recording the allocator's history"
    assert open_lab("phi-4-tiny").step().status == "ok"


def test_a_close_that_fails_still_closes_the_meter(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlab.engines.megatron.retention import megatron_globals
    from memlab.meter.storage_meter import StorageMeter

    closed: list[StorageMeter] = []
    release = megatron_globals.release

    def close(meter: StorageMeter) -> None:
        closed.append(meter)

    def release_and_fail(live: Any) -> None:
        release(live)
        raise ZeroDivisionError

    monkeypatch.setattr(StorageMeter, "close", close)
    monkeypatch.setattr(megatron_globals, "release", release_and_fail)
    lab = open_lab("phi-4-tiny")
    with pytest.raises(ZeroDivisionError):
        lab.close()
    assert lab.closed
    assert len(closed) == 1


def test_the_steps_of_one_setting_are_alike_to_the_byte(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    for settings in (MemorySettings(), FULL, offload("core_attn", "attn_proj", "expert_fc1")):
        records = [lab.step(settings) for _ in range(3)]
        for name in (
            "static_bytes",
            "peak_allocated_bytes",
            "residual_bytes",
            "host_bytes",
            "peak_by_category",
            "loss",
        ):
            assert len({str(getattr(record, name)) for record in records}) == 1, name


def test_warm_up_steps_are_taken_only_after_a_change(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    indices = [lab.step().step_index, lab.step().step_index, lab.step(FULL).step_index, lab.step(FULL).step_index]
    assert indices == [1, 2, 4, 5]
    assert lab.step(MemorySettings(), warm_up=False).step_index == 6
    assert [record.step_index for record in lab.records] == [1, 2, 4, 5, 6]


def test_a_record_says_whether_later_steps_repeat_its_step(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    for settings in (MemorySettings(), offload("core_attn", "attn_proj", "expert_fc1")):
        first, second, third = (lab.step(settings, warm_up=False) for _ in range(3))
        assert [record.is_steady for record in (first, second, third)] == [False, True, True]
        assert first.peak_allocated_bytes < second.peak_allocated_bytes == third.peak_allocated_bytes
    assert lab.step(FULL).is_steady

    def stop() -> None:
        stopped = lab.step(on_progress=lambda progress: progress.phase == "backward" and lab.stop())
        assert (stopped.status, stopped.is_steady) == ("interrupted", False)

    def run_out_of_memory() -> None:
        lab.device_memory_bytes = 1000
        assert [(record.status, record.is_steady) for record in (lab.step(), lab.step(warm_up=False))] == [
            ("out_of_memory", False)
        ] * 2
        lab.device_memory_bytes = None

    for change in (
        stop,
        run_out_of_memory,
        lambda: lab.apply(lab.settings),
        lambda: lab.set_workload(seq_length=64),
        lambda: lab.set_state(TrainingState(cross_entropy_loss_fusion=True)),
        lambda: lab.offload("gradients"),
    ):
        change()
        assert [lab.step(warm_up=False).is_steady for _ in range(2)] == [False, True]


def test_a_simulated_step_is_not_steady_after_starting_over_or_under_other_options_of_the_allocator() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=32, backend="simulated") as lab:
        steps = [lab.step(), lab.step(), lab.step(warm_up=False)]  # the later ones repeat the first
        assert lab.start_over()
        steps += [lab.step(warm_up=False) for _ in range(2)]
        other = AllocatorSettings(expandable_segments=True)
        steps += [lab.step(allocator=other, warm_up=False) for _ in range(2)]
        assert [record.is_steady for record in steps] == [True, True, True, False, True, False, True]


def test_work_happens_on_one_thread_of_the_lab_s_own(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    threads = {inside(lab).worker.submit(threading.get_ident).result() for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_torch_is_as_it_was_outside_a_job(open_lab: Callable[..., Any]) -> None:
    import torch

    def touched() -> list[object]:
        return [
            torch.cuda.current_stream,
            torch.Tensor.record_stream,
            torch.UntypedStorage.resize_,
            torch.get_rng_state,
        ]

    before = touched()
    lab = open_lab("phi-4-tiny")
    lab.step(FULL)
    assert touched() == before
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_a_record_survives_its_lab_and_the_disk(open_lab: Callable[..., Any], tmp_path: Path) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=2, num_microbatches=2)
    record = lab.step(FULL)
    lab.close()
    loaded = StepRecord.load(record.save(tmp_path / "record"))
    assert loaded == record
    assert loaded.timeline is not None and record.timeline is not None
    assert loaded.timeline.total_bytes().tolist() == record.timeline.total_bytes().tolist()
    assert loaded.timeline.modules == record.timeline.modules


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"seed": 2**63}, "seed is .* below"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"seq_length": 1.5}, "seq_length is 1.5"),
        ({"dtype": "fp8"}, "dtype is 'fp8'.*bf16, fp32"),
        ({"backend": "tpu"}, "backend is 'tpu'.*auto, cpu"),
        ({"architecture": 5}, "architecture is 5, must be a name, a path or an Architecture: choose from .*phi-4"),
        ({"layout": "PP4"}, r"layout is 'PP4', must be Layout\(\.\.\.\): name its fields, or write Layout.from_text\("),
        ({"routing": 5}, r"routing is 5, must be Routing\(\.\.\.\): .* takes a name or a path"),
        ({"state": "fp8"}, r"state is 'fp8', must be TrainingState\(\.\.\.\)"),
        ({"allocator": 5}, r"allocator is 5, must be AllocatorSettings\(\.\.\.\)"),
    ],
)
def test_a_wrong_scenario_is_refused_before_anything_is_built(options: dict[str, Any], words: str) -> None:
    from memlab.lab.lab import Lab

    with pytest.raises(ValueError, match=words):
        Lab(**{"architecture": "phi-4-tiny"} | options)


def test_a_whole_scenario_opens_a_lab_and_arguments_replace_its_fields() -> None:
    scenario = Scenario.of("qwen3-moe-tiny", num_layers=2, seq_length=64, routing="skewed:2", packed_sequences=2)
    state = TrainingState(grad_reduce_in_bf16=True)
    with Lab(scenario, backend="simulated") as lab:
        assert lab.scenario is scenario
        record = lab.step()
    with Lab(scenario, routing="balanced", seq_length=128, state=state, backend="simulated") as lab:
        assert lab.scenario == replace(scenario, routing=Routing(), seq_length=128, state=state)
    named: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "packed_sequences": 2, "routing": "skewed:2"}
    with Lab("qwen3-moe-tiny", **named, backend="simulated") as lab:
        assert lab.scenario == scenario
        assert lab.step().peak_allocated_bytes == record.peak_allocated_bytes


def test_a_pass_may_have_another_workload_and_nothing_else() -> None:
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, backend="simulated") as lab:
        longer = replace(lab.scenario, seq_length=128, micro_batch_size=2)
        record = lab.take(PassRequest(scenario=longer))
        assert (record.forward_only, record.scenario) == (True, longer)
        with pytest.raises(ValueError, match=r"^the pass has another num_layers, another dtype than the lab"):
            lab.take(PassRequest(scenario=replace(longer, num_layers=1, dtype="fp32")))
        assert lab.step().scenario == replace(lab.scenario, seq_length=64, micro_batch_size=1)


def test_a_step_that_needs_more_than_the_device_ends_in_a_record_and_the_model_steps_on(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain = lab.step()
    assert plain.tokens_per_second > 0
    for share in (0.2, 0.9):
        lab.device_memory_bytes = plain.static_bytes + int(share * plain.activation_peak_bytes)
        record = lab.step()
        assert record.status == "out_of_memory"
        assert (record.loss, record.tokens_per_second) == (None, 0.0)
        assert record.residual_bytes == 0
        assert record.peak_allocated_bytes <= lab.device_memory_bytes
        assert "requested with" in record.message and "decoder.layers" in record.message
        lab.device_memory_bytes = None
        again = lab.step()
        for name in ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes"):
            assert getattr(again, name) == getattr(plain, name), (share, name)


def test_an_out_of_memory_while_loading_or_in_the_first_optimizer_step_is_survived_too(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab("phi-4-tiny", num_layers=4)
    parameters = lab.scenario.architecture.num_parameters
    lab.device_memory_bytes = 11 * parameters + 4_000_000
    assert lab.step().status == "out_of_memory", "Adam's moments do not fit"
    lab.device_memory_bytes = None
    plain = lab.step()
    on_host = lab.step(MemorySettings(offload_parameters=True, offload_optimizer=True))
    lab.device_memory_bytes = 6 * parameters
    assert "in load" in lab.step().message
    lab.device_memory_bytes = None
    assert lab.step().static_bytes == on_host.static_bytes
    assert lab.step(MemorySettings()).peak_allocated_bytes == plain.peak_allocated_bytes


def test_a_setting_that_fits_fits_also_after_one_that_did_not(open_lab: Callable[..., Any]) -> None:
    # The dispatchers of an MoE model would keep the failed step's whole graph, and the next step never reach them.
    lab = open_lab("qwen3-moe-tiny", seq_length=512)
    fits = lab.step(FULL)
    lab.device_memory_bytes = fits.peak_allocated_bytes + 100_000
    assert lab.step(MemorySettings()).status == "out_of_memory"
    again = lab.step(FULL)
    assert (again.status, again.static_bytes) == ("ok", fits.static_bytes)


def test_stop_ends_a_step_between_two_layers_and_the_model_steps_on(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    plain = lab.step(FULL)
    for phase in ("forward", "backward", "optimizer"):
        stopped = lab.step(on_progress=lambda progress, phase=phase: progress.phase == phase and lab.stop())
        assert stopped.status == "interrupted"
        assert stopped.message.startswith("stopped in ")
        again = lab.step()
        for name in ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes"):
            assert getattr(again, name) == getattr(plain, name), (phase, name)


def test_an_error_inside_a_step_is_told_and_the_model_steps_on(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=4)
    plain = lab.step(FULL)
    attention = inside(lab).model.engine.live.chunk.module.decoder.layers[2].self_attention.core_attention
    with monkeypatch.context() as broken:
        broken.setattr(type(attention), "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lab.step()
    again = lab.step()
    assert (again.loss, again.peak_allocated_bytes) == (plain.loss, plain.peak_allocated_bytes)


def test_progress_names_phase_and_layer_and_ends_at_its_total(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=4, num_microbatches=2)
    seen: list[Any] = []
    lab.step(FULL, on_progress=seen.append)
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert {progress.total for progress in seen} == {2 * 4 * 2 * 2}
    assert done[-1] == 2 * 4 * 2 * 2
    places = [(progress.phase, progress.module) for progress in seen]
    assert ("warm-up forward", "decoder.layers.3") in places
    assert ("backward", "decoder.layers.0") in places
    assert {"load", "optimizer", "offload"} <= {phase for phase, _ in places}


def test_a_busy_lab_refuses_a_second_step_in_words(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    gate = threading.Event()
    running = lab.submit(on_progress=lambda progress: gate.wait(30))
    assert lab.busy
    jobs: list[Callable[[], Any]] = [
        lab.submit,
        lab.step,
        lambda: lab.apply(FULL),
        lambda: lab.set_workload(seq_length=16),
        lambda: setattr(lab, "device_memory_bytes", 10**9),
        lambda: setattr(lab, "pinned_host_memory", False),
    ]
    for again in jobs:
        with pytest.raises(ValueError, match="this lab is busy with a step"):
            again()
    gate.set()
    assert running.result().status == "ok"
    assert lab.device_memory_bytes is None and lab.pinned_host_memory
    assert not lab.busy
    assert not lab.stop()
    assert lab.step().status == "ok", "a stop that came too late stops nothing"


def test_the_workload_changes_without_a_rebuild(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", seq_length=64)
    model = inside(lab).model.engine.live.chunk
    short = lab.step()
    lab.set_workload(seq_length=128, micro_batch_size=2)
    long = lab.step()
    assert inside(lab).model.engine.live.chunk is model
    assert long.scenario.tokens_per_step == 4 * short.scenario.tokens_per_step
    lab.close()
    fresh = open_lab("qwen3-moe-tiny", seq_length=128, micro_batch_size=2).step()
    assert long.loss == fresh.loss
    # Megatron caches the rotary angles of every length it has seen: fp32 [sequence, 1, 1, channels].
    angles_of_the_short_sequence = 64 * 32 * 4
    assert long.peak_allocated_bytes == fresh.peak_allocated_bytes + angles_of_the_short_sequence
    lab = open_lab("phi-4-tiny")
    with pytest.raises(ValueError, match=r"seq_length is 1\.5"):
        lab.set_workload(seq_length=1.5)


def test_dropping_a_moe_model_s_names_frees_little_and_each_holder_is_named(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    record = lab.step(FULL)
    meter = inside(lab).model.meter
    left = lab.drop()
    assert lab.closed
    assert meter.live_bytes() == 0
    dispatchers = next(size for holder, size in left.items() if holder.startswith("token dispatchers"))
    parameters = record.peak_by_category["parameters"] + record.peak_by_category["gradients"]
    assert dispatchers > parameters, "parameters and gradients stay with the model"
    assert any("angles" in holder for holder in left)
    dense = open_lab("phi-4-tiny")
    dense.step(FULL)
    assert not [holder for holder in dense.drop() if "dispatchers" in holder], "a dense model keeps no graph"
    assert open_lab("phi-4-tiny").step().status == "ok"


CLEAR, DROP, COLLECT = "optimizer.state.clear()", "recipe.optimizer = None", "gc.collect()"


def _freed_by_line(moments: dict[str, Any]) -> dict[str, int]:
    sizes = {name: moment.allocated_bytes for name, moment in moments.items()}
    lines = list(sizes)
    return {line: sizes[former] - sizes[line] for former, line in itertools.pairwise(lines)}


def test_clearing_an_optimizer_frees_the_moments_even_if_something_else_holds_it(open_lab: Callable[..., Any]) -> None:
    # Architecture, settings, what is held, whether the optimizer is cleared; the line that frees the moments, and
    # whether garbage collection frees the rest: a dispatcher's graph holds an MoE model as a reference would.
    cases = (
        ("phi-4-tiny", None, "nothing", False, DROP, True),
        ("phi-4-tiny", None, "model", True, CLEAR, False),
        ("phi-4-tiny", None, "optimizer", True, CLEAR, False),
        ("phi-4-tiny", None, "optimizer", False, None, False),
        ("qwen3-moe-tiny", FULL, "nothing", True, CLEAR, False),
    )
    for architecture, settings, held, clears, freed_by, is_collected in cases:
        lab = open_lab(architecture)
        lab.step(settings)
        num_parameters = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters())
        counters = lab.audit_residency().device_bytes("optimizer state") - 12 * num_parameters
        meter = inside(lab).model.meter
        freed = _freed_by_line(lab.release_recipe(held, clears=clears))
        assert lab.closed
        assert meter.live_bytes() == 0
        moments = 8 * num_parameters + counters  # main parameters are not in the optimizer's state
        large = {line for line, num_bytes in freed.items() if num_bytes >= moments}
        assert large == ({freed_by} if freed_by else set()) | ({COLLECT} if is_collected else set())
        assert freed_by is None or moments <= freed[freed_by] <= moments + 8
    lab = open_lab("phi-4-tiny")
    with pytest.raises(ValueError, match="must be one of nothing, model, optimizer"):
        lab.release_recipe("scheduler")
    assert lab.step().status == "ok"


def test_only_an_emptied_cache_returns_what_a_release_has_freed() -> None:
    lab = Lab("phi-4-tiny", backend="simulated", num_layers=4, seq_length=128)
    lab.step()
    moments = list(lab.release_recipe().values())
    reserved = [moment.reserved_bytes for moment in moments]
    assert len(set(reserved[:-1])) == 1
    allocated = [moment.allocated_bytes for moment in moments]
    assert allocated[-2] == allocated[-1] <= reserved[-1]
    # Every freed byte was reserved, and a segment of at most 20 MiB stays where a workspace or a mask uses a part of it.
    assert reserved[0] - reserved[-1] > allocated[0] - allocated[-1] - 20 * 2**20
    assert all(moment.active_bytes == moment.allocated_bytes for moment in moments)
    table = str(show({"before": moments[0], "after": moments[-1]})).splitlines()
    assert [word for word in table[0].split() if word != "MiB"] == [
        "moment",
        "freed",
        "allocated",
        "active",
        "reserved",
    ]


def test_a_lab_whose_last_name_is_gone_is_closed_by_the_next(open_lab: Callable[..., Any]) -> None:
    from memlab.lab.lab import Lab

    def take_a_step() -> int:
        peak: int = Lab("phi-4-tiny", seq_length=32).step().peak_allocated_bytes
        return peak

    with pytest.warns(UserWarning, match="closing the open lab"):
        assert take_a_step() == take_a_step() == take_a_step()
    with pytest.warns(UserWarning, match="closing the open lab"):
        open_lab("phi-4-tiny")


def test_an_unmetered_step_leaves_the_account_right(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny")
    with pytest.raises(ValueError, match="take a step under the current settings first"):
        lab.unmetered_step_seconds()
    for settings in (MemorySettings(), MemorySettings(offload_parameters=True, offload_optimizer=True), FULL):
        before = lab.step(settings)
        assert lab.unmetered_step_seconds() > 0
        after = lab.step()
        for name in ("loss", "static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes"):
            assert getattr(after, name) == getattr(before, name), (settings, name)


def test_a_callback_on_the_lab_s_own_thread_is_refused_instead_of_waiting_for_itself(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab("phi-4-tiny")
    refusals: list[str] = []

    def call(action: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match="runs on the lab's own thread") as refusal:
            action()
        refusals.append(str(refusal.value))

    lab.step(on_progress=lambda progress: call(lab.close) if progress.phase == "optimizer" else None)
    running = lab.submit()
    done = threading.Event()
    running.add_done_callback(lambda _: (call(lambda: lab.apply(FULL)), done.set()))
    assert done.wait(30)
    assert len(refusals) == 2


def test_closing_from_several_threads_while_a_step_runs_is_harmless(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    gate = threading.Event()
    running = lab.submit(on_progress=lambda progress: gate.wait(30))
    closers = [threading.Thread(target=lab.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    gate.set()
    for closer in closers:
        closer.join()
    assert running.result().status == "interrupted"
    assert lab.closed
    for call in (lab.step, lambda: lab.set_workload(seq_length=16), lambda: lab.apply(FULL)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_closed_lab_can_be_closed_again_from_threads_that_begin_later(open_lab: Callable[..., Any]) -> None:
    # The system gives the number of an ended thread to a new one, often to the very next.
    lab = open_lab("phi-4-tiny")
    lab.close()
    errors: list[Exception] = []

    def close() -> None:
        try:
            lab.close()
        except ValueError as error:
            errors.append(error)

    for _ in range(10):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert errors == []


def test_what_is_no_setting_or_no_workload_is_refused_in_words(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    for wrong in ("full", {"recompute_granularity": "full"}):
        with pytest.raises(ValueError, match=r"must be MemorySettings\(\.\.\.\)"):
            lab.step(wrong)
    with pytest.raises(ValueError, match=r"must be MemorySettings\(\.\.\.\): .* state=TrainingState"):
        lab.step(TrainingState(manual_gc=True))
    with pytest.raises(ValueError, match=r"must be MemorySettings\(\.\.\.\): .* write \.settings behind it"):
        lab.step(lab.step(warm_up=False))
    with pytest.raises(ValueError, match="seq_length is 0, must be a whole number of at least 1"):
        lab.set_workload(seq_length=0)


def test_another_number_of_micro_batches_offloads_like_a_lab_that_began_with_it(open_lab: Callable[..., Any]) -> None:
    settings = offload("moe_act", "expert_fc1")
    changed = open_lab("qwen3-moe-tiny", num_layers=2)
    changed.step(settings)
    for num_microbatches in (2, 1):
        changed.set_workload(num_microbatches=num_microbatches)
        seen = changed.step()
        changed.apply(settings)
        anew = changed.step()
        assert seen.offloaded_bytes_by_module == anew.offloaded_bytes_by_module
        assert seen.peak_allocated_bytes == anew.peak_allocated_bytes


@pytest.mark.parametrize("settings", [MemorySettings(), offload("core_attn")], ids=str)
@pytest.mark.parametrize(
    ("backend", "architecture"),
    [
        pytest.param("cpu", "phi-4-tiny", marks=pytest.mark.slow),
        ("cpu", "qwen3-moe-tiny"),
        ("simulated", "qwen3-moe-tiny"),
    ],
)
def test_the_step_after_a_change_of_workload_is_that_of_a_lab_that_began_with_it(
    backend: str, architecture: str, settings: MemorySettings
) -> None:
    model: dict[str, Any] = {"num_layers": 2, "seq_length": 32, "backend": backend}
    with Lab(architecture, **model, micro_batch_size=4) as lab:
        lab.step(settings)
        lab.set_workload(micro_batch_size=1)
        changed = lab.step()
        lab.set_workload(micro_batch_size=1)  # changes nothing
        again = lab.step(warm_up=False)
    with Lab(architecture, **model) as lab:
        new = lab.step(settings)
    assert bool(new.offloaded_bytes_by_module) == bool(settings.offload_modules)
    for record in (changed, again):
        assert record.is_steady
        assert _bytes_of(record) == _bytes_of(new)


def _bytes_of(record: StepRecord) -> dict[str, Any]:
    """Returns all that a record counts in bytes, but what the allocator reserves: that depends on earlier steps."""
    names = [name for name in dir(record) if "bytes" in name or name.startswith("peak_by")]
    values = {name: getattr(record, name) for name in names if "reserved" not in name or name.startswith("host")}
    return {name: value for name, value in values.items() if not callable(value)}


def test_a_progress_callback_that_asks_a_closing_lab_is_refused_and_the_lab_closes(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab("phi-4-tiny")
    reached, go_on, answers = threading.Event(), threading.Event(), []

    def ask(progress: Progress) -> None:
        if not answers:
            answers.append("")
            reached.set()
            go_on.wait(20)
            with pytest.raises(ValueError, match="own thread") as refusal:
                lab.audit_residency()
            answers.append(str(refusal.value))

    lab.submit(on_progress=ask)
    assert reached.wait(20)
    closing = threading.Thread(target=lab.close, daemon=True)
    closing.start()
    while not inside(lab).worker._starting.locked():
        pass
    go_on.set()
    closing.join(20)
    assert lab.closed and len(answers) == 2


def test_a_lab_that_fails_to_close_leaves_room_for_the_next(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = open_lab("phi-4-tiny")
    monkeypatch.setattr(type(inside(lab).model.engine.live), "parameters", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.close()
    assert lab.closed
    lab.close()
    monkeypatch.undo()
    assert open_lab("phi-4-tiny").step().status == "ok"


def test_a_layout_that_cannot_be_opened_leaves_the_open_lab_alone(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    with pytest.raises(ValueError, match="or choose backend 'simulated', which predicts one rank of any layout"):
        open_lab("phi-4-tiny", layout=Layout(pipeline_model_parallel_size=2))
    assert not lab.closed and lab.step().status == "ok"


def test_a_closed_lab_says_so_of_its_groups(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny")
    lab.close()
    with pytest.raises(ValueError, match=r"closed.*open another"):
        _ = lab.pinned_host_memory
    with pytest.raises(ValueError, match=r"closed.*open another"):
        lab.check_state(TrainingState(), MemorySettings())


def test_progress_of_a_pipeline_stage_ends_at_its_total() -> None:
    seen: list[Progress] = []
    layout = Layout(pipeline_model_parallel_size=2)
    with Lab("phi-4-tiny", num_layers=4, seq_length=64, layout=layout, backend="simulated") as lab:
        lab.step(on_progress=seen.append)
        for layer in (2, 1.0):
            with pytest.raises(ValueError, match="must be from 0 to 1"), lab.tap(layer):  # type: ignore[arg-type]
                pass
    assert (seen[-1].done, seen[-1].total) == (2 * 2 * 2, 2 * 2 * 2)


def test_a_model_that_the_host_has_no_memory_for_is_refused_before_it_is_built(open_lab: Callable[..., Any]) -> None:
    open_one = open_lab("phi-4-tiny")
    with pytest.raises(
        ValueError, match=r"takes at least 245.7.* between its steps, and this process may use .*memlab predict"
    ):
        open_lab("phi-4", num_layers=None)
    assert not open_one.closed


@pytest.mark.parametrize("given", [None, MemorySettings(), "x"])
def test_only_requests_are_taken(open_lab: Callable[..., Lab], given: Any) -> None:
    lab = open_lab()
    with pytest.raises(ValueError, match=r"must be StepRequest\(...\) or PassRequest\(...\)"):
        lab.take(given)
    with pytest.raises(ValueError, match="submit takes only training steps"):
        lab.submit(PassRequest(scenario=lab.scenario))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scenario is 'x', must be Scenario"):
        PassRequest(scenario="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warm_up is 'no', must be True or False"):
        lab.step(warm_up="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="suspend_offload is 0, must be True or False"):
        lab.forward_only(suspend_offload=0)  # type: ignore[arg-type]
    assert not lab.records
