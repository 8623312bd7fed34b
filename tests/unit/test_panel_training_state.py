"""The training state on the panel: a change waits for the next run, which says what it rebuilds."""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ipywidgets
import pytest
from ipywidgets.widgets.widget import _instances as open_widgets

from memlab.cli import build_parser
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.lora import LoRA
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.views.panel import exports
from memlab.views.panel.panel import Panel, panel
from memlab.views.panel.run import Run

from .builders import training_step
from .fake_lab import FakeBackend, FakeLab

AWARE = TrainingState(
    use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16"
)


@pytest.fixture
def shown() -> Iterator[Panel]:
    made = panel(FakeLab(timeline=training_step()))
    yield made
    made.close()


def press_run(shown: Panel) -> None:
    content = {"data": {"method": "custom", "content": {"event": "click"}}}
    shown.run_bar.run._handle_msg({"content": content, "buffers": []})


def receive(shown: Panel, name: str, value: Any) -> None:
    """Does what a message of the page does."""
    control = shown.training_state.by_name[name]
    value = ", ".join(value) if isinstance(value, tuple) else value
    data = {"index": control.options.index(value)} if isinstance(control, ipywidgets.Dropdown) else {"value": value}
    control._handle_msg({"content": {"data": {"method": "update", "state": data}}, "buffers": []})


def test_an_option_without_a_control_keeps_its_value(shown: Panel) -> None:
    state = TrainingState(hidden_dropout=0.1, freeze_moe_router=True, lora=LoRA(rank=4, alpha=64, dropout=0.1))
    form = shown.state.form.with_preset(MemorySettings(), state, 0)
    assert form.state == state
    assert form.with_values(lora_rank=8).state == replace(state, lora=replace(state.lora, rank=8))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "state",
    [
        TrainingState(grad_reduce_in_bf16=True, overlap_grad_reduce=True, ddp_bucket_size=1000),
        AWARE,
        TrainingState(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, pin_cpu_grads=False),
        TrainingState(use_distributed_optimizer=False, loss="logprobs", logprobs_chunk_size=64),
        TrainingState(fp8_format="hybrid", fp8_recipe="blockwise", attention_backend="fused"),
        TrainingState(lora=LoRA(rank=16, target_modules=("linear_qkv", "*.layers.0.*"))),
    ],
    ids=str,
)
def test_each_control_by_message_gives_what_the_api_gives(shown: Panel, state: TrainingState) -> None:
    for name, value in state.changed().items():
        receive(shown, name, value)
    of_state = {name for name, one in options_of(TrainingState).items() if one.group and "megatron" in one.engines}
    assert set(shown.training_state.by_name) == of_state | {
        name for name, one in options_of(AllocatorSettings).items() if one.group
    }
    assert shown.state.form.scenario(shown.state.scenario).state == state
    assert shown.state.lab.scenario.state == TrainingState(), "nothing is rebuilt before the next run"
    press_run(shown)
    assert shown.state.lab.scenario.state == state
    assert shown.runs.table.rows[0]["settings"] == f"none; {state}"
    assert str(state) in shown.timeline.title.value


def test_a_panel_of_fsdp2_has_its_own_controls_and_its_recipe() -> None:
    shown = panel(FakeLab("phi-4-tiny", engine="fsdp2"))
    values = {"fp32_sharded_params": True, "reshard_after_forward": "none", "adam_implementation": "fused"}
    try:
        own = {"defer_fsdp_grad_sync", "grad_reduce_in_bf16", "fsdp_cpu_offload", "dp_replicate_size"}
        own |= {"lora_rank", "lora_target_modules", "master_weights", "store_param_remainders"}
        own |= {"attn_implementation", "fsdp_version", "use_orig_params"}
        own |= {"fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth"}
        own |= {"vision_tower", "images_per_sequence", "patches_per_image", "freeze_vision_tower"}
        own |= {
            "reshard_after_forward_ranks",
            *(name for name, one in options_of(AllocatorSettings).items() if one.group),
        }
        assert set(shown.training_state.by_name) == {*values, *own}
        assert {name.partition(":")[0] for name in shown.controls.by_name} == {
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "seq_length", "micro_batch_size"),
            *("selective_ac", "checkpoint_every"),
            *("offload_parameters", "offload_gradients", "offload_optimizer", "offload_optimizer_except_update"),
        }
        for name, value in values.items():
            receive(shown, name, value)
        press_run(shown)
        assert shown.state.lab.scenario.state == TrainingState(**values)
        receive(shown, "images_per_sequence", 1)
        assert "images_per_sequence has no effect" in html.unescape(shown.training_state.note.value)
        receive(shown, "images_per_sequence", 0)
        recipe = "NeMo Automodel: phi-4 on SQuAD"
        assert [name for name in shown.presets.choice.options if ":" in name] == [recipe]
        shown.presets.choice.value = recipe
        press_run(shown)
        release = {"separate_embeddings": "both", "loss_of_transformers": "masked_cross_entropy"}
        assert shown.state.lab.scenario.state == TrainingState(defer_fsdp_grad_sync=True, **release)
        assert shown.state.lab.submitted[-1].recompute_granularity == "full"
        shown.controls.by_name["recompute_granularity"].value = "selective"
        assert "checkpoints whole layers" in html.unescape(shown.controls.heads["Recompute"].value)
    finally:
        shown.close()


def test_the_run_button_the_note_and_the_notice_say_what_is_rebuilt(shown: Panel) -> None:
    lab, run, note = shown.state.lab, shown.run_bar.run, shown.training_state.note
    assert run.description == "Run" and "default state" in note.value
    receive(shown, "cross_entropy_loss_fusion", True)
    assert run.description == "Run" and "not yet in effect: the next run rebuilds nothing" in note.value
    receive(shown, "grad_reduce_in_bf16", True)
    assert run.description == "Rebuild model and run" and run.tooltip.startswith("Rebuilds the model")
    lab.holds = True
    press_run(shown)
    assert "Rebuilding the model for 'grad_reduce_in_bf16, " in shown.run_bar.status.value
    lab.progress(phase="rebuilding the model", module="", done=0, total=0)
    assert shown.run_bar.place.value == "rebuilding the model"
    lab.end()
    assert "model rebuilt in 2.50 s" in shown.run_bar.status.value
    assert run.description == "Run" and "not yet in effect" not in note.value


def test_a_broken_rule_and_a_refused_state_are_next_to_the_group(shown: Panel) -> None:
    receive(shown, "exp_avg_dtype", "bf16")
    errors = shown.training_state.error_box
    assert "exp_avg_dtype is 'bf16', must be fp32" in html.unescape(errors.value)
    assert not any("alert" in head.value for head in shown.controls.heads.values())
    press_run(shown)
    assert "Not started: exp_avg_dtype" in shown.run_bar.status.value and not shown.state.lab.submitted
    receive(shown, "exp_avg_dtype", "fp32")
    assert not errors.value
    shown.state.lab.refused_state = TrainingState(fp8_format="e4m3")
    receive(shown, "fp8_format", "e4m3")
    assert "the cpu backend cannot build it" in errors.value and shown.state.settings is None
    receive(shown, "fp8_format", "none")
    shown.state.edit(seq_length=0)
    assert not errors.value and "alert" in shown.controls.heads["Workload"].value


@pytest.mark.parametrize("seq_length", [64, 0])
def test_a_state_that_the_lab_s_model_cannot_have_is_refused_next_to_the_group(seq_length: int) -> None:
    shown = panel(FakeLab(dtype="fp32"))
    shown.state.edit(seq_length=seq_length)
    receive(shown, "optimizer_cpu_offload", True)
    receive(shown, "optimizer_offload_fraction", 0.5)
    group, workload = shown.training_state, shown.controls.heads["Workload"]
    assert ("takes no fp32 parameters" in group.error_box.value) is bool(seq_length)
    assert ("seq_length is 0" in workload.value) is not bool(seq_length)
    press_run(shown)
    assert "Not started: " in shown.run_bar.status.value and not shown.state.lab.submitted
    receive(shown, "optimizer_cpu_offload", False)
    assert not group.error_box.value and "only optimizer_cpu_offload reads it" in group.note.value
    shown.close()


@pytest.mark.parametrize("keeps_former_state", [True, False])
def test_an_error_of_a_rebuild_does_not_speak_of_a_step(shown: Panel, keeps_former_state: bool) -> None:
    lab = shown.state.lab
    lab.holds, lab.outcome = True, RuntimeError("cannot be built: the lab has its former state")
    receive(shown, "grad_reduce_in_bf16", True)
    press_run(shown)
    if keeps_former_state:
        lab.scenario = replace(lab.scenario, state=TrainingState())
    lab.end()
    (row,) = shown.runs.table.rows
    assert row["status"] == "error"
    assert ("middle of a step" in row["message"]) is not keeps_former_state
    assert shown.run_bar.run.description == ("Rebuild model and run" if keeps_former_state else "Run")


def test_an_option_without_effect_says_why(shown: Panel) -> None:
    receive(shown, "pin_cpu_grads", False)
    assert "pin_cpu_grads has no effect: only optimizer_cpu_offload reads it" in shown.training_state.note.value


def test_the_group_is_closed_until_its_button_is_pressed_and_costs_few_models() -> None:
    before = set(open_widgets)
    made = panel(FakeLab(timeline=training_step()))
    try:
        group = made.training_state
        assert group._section.layout.display == "none"
        group.toggle.value = True
        assert group._section.layout.display is None
        num_models = len(set(open_widgets) - before)
        assert num_models < 275, "a page that is loaded again creates every model before it shows the first"
    finally:
        made.close()


def test_a_run_s_state_is_used_again_and_repeated_by_its_command(shown: Panel) -> None:
    shown.state.edit(**AWARE.changed())
    press_run(shown)
    shown.state.edit(**TrainingState().options())
    press_run(shown)
    assert [row["settings"] for row in shown.runs.table.rows] == [f"none; {AWARE}", "none"]
    shown.state.show(1)
    assert "MemorySettings()\nTrainingState(use_precision_aware_optimizer=True, main_grads" in shown.runs.repeat.value
    shown.state.reuse()
    assert shown.state.rebuilds == "optimizer"
    scenario = Scenario.of(
        "phi-4-tiny",
        state=TrainingState(use_distributed_optimizer=False, pin_cpu_grads=False, fp8_format="e4m3"),
        allocator=AllocatorSettings(expandable_segments=True),
    )
    command = exports.measure_command(Run(number=1, scenario=scenario, settings=MemorySettings(), backend="cpu"))
    arguments = vars(build_parser().parse_args(shlex.split(command)[1:]))
    given = {name: arguments[name] for name in scenario.state.options() if arguments[name] is not None}
    assert TrainingState(**given) == scenario.state
    assert arguments["expandable_segments"]


ALLOCATOR = AllocatorSettings(expandable_segments=True, garbage_collection_threshold=0.75, max_split_size_mb=64)


def test_the_allocator_s_options_by_message_are_those_of_the_next_simulated_run() -> None:
    lab = FakeLab(timeline=training_step())
    lab.backend = FakeBackend("simulated")
    shown = panel(lab, predict=False)
    for name, value in ALLOCATOR.changed().items():
        receive(shown, name, value)
    assert shown.state.form.scenario(lab.scenario).allocator == ALLOCATOR and not lab.scenario.allocator.changed()
    assert shown.run_bar.run.description == "Rebuild model and run"
    assert "garbage_collection_threshold has no effect: torch reads it only where" in shown.training_state.note.value
    press_run(shown)
    assert lab.scenario.allocator == ALLOCATOR and shown.run_bar.run.description == "Run"
    assert shown.runs.table.rows[0]["settings"] == f"none; {ALLOCATOR}"
    assert "\nAllocatorSettings(expandable_segments=True, garbage" in shown.runs.repeat.value
    for name in ("garbage_collection_threshold", "max_split_size_mb"):
        receive(shown, name, 0)
    receive(shown, "expandable_segments", False)
    assert shown.state.form.scenario(lab.scenario).allocator == AllocatorSettings()
    shown.state.reuse()
    assert shown.state.form.allocator == ALLOCATOR
    shown.close()


def test_the_allocator_s_rules_are_next_to_the_group(shown: Panel) -> None:
    receive(shown, "max_split_size_mb", 5)
    assert "max_split_size_mb is 5, must be a whole number of at least 20" in shown.training_state.error_box.value
    press_run(shown)
    assert "Not started: max_split_size_mb" in shown.run_bar.status.value and not shown.state.lab.submitted
    receive(shown, "max_split_size_mb", 64)
    assert not shown.training_state.error_box.value
    assert "max_split_size_mb has no effect: a CPU has no caching allocator" in shown.training_state.note.value


def test_next_to_a_gpu_other_allocator_options_are_only_predicted() -> None:
    lab = FakeLab(timeline=training_step())
    lab.backend = FakeBackend("cuda")
    shown = panel(lab, predict=False)
    receive(shown, "expandable_segments", True)
    selection = shown.state.selection
    assert selection is not None and selection[0].allocator == AllocatorSettings(expandable_segments=True)
    assert "'expandable_segments:True' is only predicted: this process was" in shown.training_state.note.value
    assert shown.run_bar.run.description == "Run" and "run rebuilds" not in shown.training_state.note.value
    shown.close()


def test_a_simulated_run_under_other_allocator_options_reserves_what_a_new_lab_reserves() -> None:
    model: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "backend": "simulated"}
    expandable = AllocatorSettings(expandable_segments=True)
    with Lab("phi-4-tiny", allocator=expandable, **model) as lab:
        expected = lab.step()
    with Lab("phi-4-tiny", **model) as lab:
        shown = panel(lab, predict=False)
        _run_under_other_options(shown, expected)
        shown.close()


def _run_under_other_options(shown: Panel, expected: StepRecord) -> None:
    for value in (False, True, False):
        receive(shown, "expandable_segments", value)
        running = shown.state.run()
        assert running is not None
        running.result()
    plain, changed, again = shown.state.lab.records
    assert changed.peak_reserved_bytes == expected.peak_reserved_bytes != plain.peak_reserved_bytes
    assert changed.scenario == expected.scenario and changed.peak_allocated_bytes == expected.peak_allocated_bytes
    assert (again.peak_reserved_bytes, again.static_bytes) == (plain.peak_reserved_bytes, plain.static_bytes)
    assert "expandable_segments:True: model rebuilt in " in str(shown.state.lab.state_changes[0])


def test_a_real_lab_rebuilds_on_its_own_thread_and_the_page_stays_usable(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=2, seq_length=64)
    shown = panel(lab)
    for changes in ({"grad_reduce_in_bf16": True}, {"grad_reduce_in_bf16": False}):
        shown.state.edit(**changes)
        running = shown.state.run()
        assert running is not None
        running.result()
        assert "model rebuilt in " in shown.state.notice
    assert [run.scenario.state.grad_reduce_in_bf16 for run in shown.state.runs] == [True, False]
    assert lab.records[0].loss == lab.records[1].loss
    shown.close()
