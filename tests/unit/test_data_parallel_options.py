"""Data parallelism without the distributed optimizer, and with communication that overlaps computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.distributed import param_and_grad_buffer

from memlab.config import without_effect
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron import data_parallel_overlap
from memlab.lab.lab import Lab
from memlab.lab.progress import Progress
from memlab.record.transfer import GROUPS
from memlab.vocabulary import PHASES
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute
from tests.unit.replayed import Case, require_identical, take

WITHOUT = TrainingState(use_distributed_optimizer=False)
OVERLAP = TrainingState(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=20_000)
TWO_COPIES = Layout(data_parallel_size=2)
NONE, ALL_AWAY = MemorySettings(), MemorySettings(offload_parameters=True, offload_optimizer=True)


def lab_of(architecture: str = "qwen3-moe-tiny", **options: Any) -> Lab:
    values: dict[str, Any] = {"num_layers": 2, "seq_length": 32, "backend": "cpu"}
    return Lab(architecture, **(values | options))


@contextmanager
def communication(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """Notes in which phase DDP starts each of its collectives: parameters are gathered, gradients reduced."""
    seen: dict[str, list[str]] = {"gather": [], "reduce": []}
    labels = inside(lab).model.labels

    def noting(what: str, collective: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            seen[what].append(PHASES[labels.phase])
            return collective(*args, **kwargs)

        return note

    with monkeypatch.context() as patches:
        for what, name in (("gather", "dist_all_gather_func"), ("reduce", "dist_reduce_scatter_func")):
            patches.setattr(param_and_grad_buffer, name, noting(what, getattr(param_and_grad_buffer, name)))
        yield seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": "fp32"}, marks=pytest.mark.slow),
        pytest.param({"expert_buffers": True}, marks=pytest.mark.slow),
        {"backend": "simulated", "layout": TWO_COPIES},
    ],
    ids=str,
)
def test_without_the_distributed_optimizer_every_byte_is_found_and_can_leave(options: dict[str, Any]) -> None:
    with lab_of(**options) as lab:
        expected = lab.step(NONE)
    with lab_of(**options, state=WITHOUT) as lab:
        plain = lab.step(NONE)
        assert plain.loss == expected.loss
        assert all(
            inside(lab).model.meter.pool_of(each) == "device" for each in inside(lab).model.engine.live.parameters()
        )
        assert lab.audit_residency().complaints == ()
        opening = plain.timeline.breakdown(plain.timeline.num_opening_events - 1)  # type: ignore[union-attr]
        assert set(GROUPS) <= opening.keys()
        # Padding is DDP's, for the shards; with it, all data-parallel ranks hold what one of them held of the state.
        ranks = lab.scenario.layout.data_parallel_size
        for group, factor in zip(GROUPS, (1, 1, ranks), strict=True):
            assert opening[group] == pytest.approx(factor * expected.peak_by_category[group], rel=0.01), group
        away = lab.step(ALL_AWAY)
        left = away.timeline.breakdown(away.timeline.num_opening_events - 1)  # type: ignore[union-attr]
        assert not set(GROUPS) & left.keys()
        assert plain.static_bytes - away.static_bytes == sum(opening[group] for group in GROUPS)
        assert (away.loss, away.peak_allocated_bytes) == (plain.loss, plain.peak_allocated_bytes)
        assert lab.audit_residency().complaints == ()
        after = lab.step(NONE)
    for name in ("loss", "static_bytes", "peak_allocated_bytes", "host_bytes"):
        assert getattr(after, name) == getattr(plain, name), name


def test_a_parameter_outside_the_buffers_that_lost_its_storage_stops_the_step() -> None:
    with lab_of("phi-4-tiny", num_layers=1, state=WITHOUT) as lab:
        lab.step(NONE)
        parameter = next(inside(lab).model.engine.live.parameters())
        inside(lab).worker.submit(lambda: parameter.untyped_storage().resize_(0)).result()
        with pytest.raises(ValueError, match=r"buffers\.params has 0 B of the .* so it did not run"):
            lab.step()


def test_the_fault_of_main_gradients_needs_main_parameters() -> None:
    with (
        lab_of("phi-4-tiny", num_layers=1, dtype="fp32", state=WITHOUT) as lab,
        pytest.raises(ValueError, match="has no main parameters"),
        lab.residency_fault("gradients_held_by_main_parameters"),
    ):
        pass


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_overlap_moves_communication_into_backward_and_the_next_forward(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = TWO_COPIES if backend == "simulated" else Layout()
    with lab_of(
        backend=backend, layout=layout, num_microbatches=2, replay=False
    ) as lab:  # a repeated step calls nothing
        expected = lab.step(NONE)
        with communication(lab, monkeypatch) as seen:
            lab.step()
        assert seen == {"gather": ["optimizer"], "reduce": ["backward"]}
    with lab_of(backend=backend, layout=layout, num_microbatches=2, state=OVERLAP) as lab:
        (chunk,) = inside(lab).model.engine.live.chunks
        count = len(chunk.bucket_groups)
        assert count > 5
        with communication(lab, monkeypatch) as seen:
            assert lab.step(warm_up=False).loss == expected.loss
        # The first step gathers nothing, since all ranks start alike, and only learns when gradients are ready.
        assert seen == {"gather": [], "reduce": ["backward"] * count}
        with communication(lab, monkeypatch) as seen:
            record = lab.step(warm_up=False)
        assert seen == {"gather": ["forward"] * count, "reduce": ["backward"] * count}
        assert record.loss == expected.loss
        # Buckets are padded; nothing else is allocated.
        of_padding = sum(buffer.numel - buffer.numel_unpadded for buffer in chunk.buffers)
        assert abs(record.peak_allocated_bytes - expected.peak_allocated_bytes) <= 18 * of_padding + 512 * count


@pytest.mark.parametrize(
    "settings",
    [
        FULL,
        pytest.param(recompute("moe"), marks=pytest.mark.slow),
        pytest.param(recompute("layernorm", "moe_act", "core_attn"), marks=pytest.mark.slow),
        offload("moe_act"),
        ALL_AWAY,
    ],
    ids=str,
)
def test_settings_change_in_place_under_overlap(settings: MemorySettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab_of(state=OVERLAP) as lab:
        plain = lab.step(NONE)
        record = lab.step(settings)
        with communication(lab, monkeypatch) as seen:
            passed = lab.forward_only()
            lab.forward_only()
            # A rank has updated only its own part: each pass gathers all before it, as Megatron does to evaluate.
            assert seen["gather"] == ["forward"] * 2 * len(inside(lab).model.engine.live.chunk.bucket_groups)
            again = lab.step()
        assert plain.loss == record.loss == passed.loss == again.loss
        assert record.peak_allocated_bytes == again.peak_allocated_bytes
        assert not [each for each in lab.audit_residency().complaints if "nor workspace" not in each]
        lab.load(*GROUPS)
        with communication(lab, monkeypatch) as seen:
            lab.hand_over()
        assert set(seen["gather"]) == {"idle"}


def test_a_pass_before_the_first_step_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab_of(state=OVERLAP, num_layers=1) as lab, communication(lab, monkeypatch) as seen:
        assert lab.forward_only(NONE).loss == lab.step(warm_up=False).loss
        assert seen["gather"] == []


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_that_stops_in_backward_leaves_no_communication_behind(num_steps: int) -> None:
    def stop_in_backward(progress: Progress) -> None:
        if (progress.phase, progress.module) == ("backward", "decoder.layers.1"):
            lab.stop()  # at the next layer

    with lab_of(state=OVERLAP) as lab:
        for _ in range(num_steps):
            lab.step(warm_up=False)
        stopped = lab.step(warm_up=False, on_progress=stop_in_backward)
        assert (stopped.status, "backward" in stopped.message) == ("interrupted", True)
        after = lab.step(NONE)
    with lab_of(state=OVERLAP) as lab:
        assert (after.status, after.loss) == ("ok", lab.step(NONE).loss)


@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_gather_at_once_only_where_they_are_interleaved(chunks: int) -> None:
    layout = Layout(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks, data_parallel_size=2, rank=2
    )
    with lab_of(backend="simulated", layout=layout, num_layers=4, num_microbatches=4, state=OVERLAP) as lab:
        live = inside(lab).model.engine.live
        assert live.config.param_sync_func is None
        first = lab.step(NONE)
        assert lab.step(FULL).status == lab.forward_only().status == first.status == "ok"
        functions = live.config.param_sync_func
        assert functions == ([chunk.start_param_sync for chunk in live.chunks] if chunks > 1 else None)
        lab.set_workload(seq_length=4096)
        lab.device_memory_bytes = first.static_bytes
        assert lab.forward_only().status == "out_of_memory"
        lab.device_memory_bytes = None
        lab.set_workload(seq_length=32)
        assert live.config.param_sync_func == functions
        assert live.config.grad_sync_func is not None
        assert lab.step(NONE).status == "ok"
        assert "only on the first pipeline stage" in first.without_effect["ddp_bucket_size"]
        # The second stage has a single bucket per chunk.
        assert [len(chunk.bucket_groups) for chunk in live.chunks] == [1] * chunks


def test_buckets_have_megatron_s_size_unless_one_is_given() -> None:
    def sizes(state: TrainingState, **layout: int) -> int | None:
        with lab_of("phi-4-tiny", num_layers=1, backend="simulated", state=state, layout=Layout(**layout)) as lab:
            return inside(lab).model.engine.live.chunk.bucket_size  # type: ignore[no-any-return]

    overlap = TrainingState(overlap_grad_reduce=True)
    assert sizes(overlap, data_parallel_size=2) == 40_000_000
    assert sizes(overlap, data_parallel_size=64) == 64_000_000
    assert sizes(OVERLAP, data_parallel_size=64) == 20_000
    assert sizes(TrainingState(ddp_bucket_size=20_000), data_parallel_size=2) is None


def test_the_first_chunk_is_gathered_while_the_optimizer_updates_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(data_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    state = replace(OVERLAP, overlap_param_gather_with_optimizer_step=True)
    with lab_of("phi-4-tiny", num_layers=4, num_microbatches=2, backend="simulated", layout=layout, state=state) as lab:
        lab.step()
        with communication(lab, monkeypatch) as seen:
            assert lab.step().status == "ok"
        chunks = inside(lab).model.engine.live.chunks
        assert [len(buffer.buckets) for chunk in chunks for buffer in chunk.buffers] == [1, 1]
        assert seen["gather"].count("optimizer") == len(chunks[0].bucket_groups)
    with pytest.raises(
        ValueError, match="must have more, since Megatron-Core then builds an optimizer of the other chunks"
    ):
        lab_of(layout=TWO_COPIES, state=state)


@pytest.mark.parametrize(
    ("options", "is_dropped"),
    [({"packed_sequences": 2}, True), ({"layout": Layout(context_parallel_size=2)}, True), ({}, False)],
)
def test_a_dropout_that_memlab_s_attention_leaves_out_is_said(options: dict[str, Any], is_dropped: bool) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=64, state=TrainingState(attention_dropout=0.1), **options)
    assert ("attention_dropout" in without_effect.of_scenario(scenario)) == is_dropped


def test_options_without_effect_are_named() -> None:
    def reasons(state: TrainingState, **layout: int) -> set[str]:
        return set(without_effect.of_scenario(Scenario.of("qwen3-moe-tiny", state=state, layout=Layout(**layout))))

    assert reasons(TrainingState()) == reasons(WITHOUT) == set()
    alone = TrainingState(use_distributed_optimizer=False, overlap_param_gather=True)
    assert reasons(alone, data_parallel_size=2) == {"overlap_param_gather"}
    assert reasons(TrainingState(overlap_param_gather=True), data_parallel_size=2) == set()
    assert reasons(OVERLAP) == {"overlap_grad_reduce", "overlap_param_gather"}
    assert reasons(OVERLAP, data_parallel_size=2) == reasons(OVERLAP, context_parallel_size=2) == set()
    # Experts that are spread over ranks are exchanged among fewer of them.
    spread = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert reasons(OVERLAP, **spread, expert_model_parallel_size=2) == {"overlap_grad_reduce", "overlap_param_gather"}
    spread = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
    assert reasons(OVERLAP, **spread) == set()
    assert reasons(TrainingState(ddp_bucket_size=5), data_parallel_size=2) == {"ddp_bucket_size"}


def test_nothing_is_connected_without_overlap() -> None:
    with lab_of("phi-4-tiny", num_layers=1) as lab:
        live = inside(lab).model.engine.live
        lab.step(NONE)
        assert not data_parallel_overlap.gathers_in_forward(live)
        assert (live.config.no_sync_func, live.config.grad_sync_func, live.config.param_sync_func) == (None,) * 3


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3-moe-tiny", Layout(pipeline_model_parallel_size=2, data_parallel_size=2)), ("phi-4-tiny", TWO_COPIES)],
    ids=str,
)
def test_micro_batches_between_the_first_and_the_last_repeat_although_communication_overlaps(
    architecture: str, layout: Layout
) -> None:
    arguments: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "num_microbatches": 9}
    arguments |= {"layout": layout, "state": replace(OVERLAP, ddp_bucket_size=None)}
    case = Case(architecture=architecture, arguments=arguments, settings=[NONE, FULL, ALL_AWAY])
    stepped, _ = take(case, replay=False)
    replayed, num_repeated = take(case, replay=True)
    assert num_repeated > 0
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)
