"""A frozen model that computes the loss of each micro-batch first, as DPO compares with it: bytes, values, jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.model_restrictions import check_on_model
from memlab.config.parameters import kept_bytes
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError
from memlab.engines.megatron import training_step
from memlab.engines.routing_draws import RoutingDraws
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.live import FULL, gradients_of_step, offload

pytestmark = pytest.mark.versions

LORA = LoRA(rank=4)
COPY = TrainingState(reference_model="copy")
WITHOUT_ADAPTERS = TrainingState(lora=LORA, reference_model="without_adapters")
SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64}


@pytest.mark.parametrize(
    ("model", "state"), [("phi-4-tiny", COPY), ("qwen3-moe-tiny", WITHOUT_ADAPTERS)], ids=["copy", "without adapters"]
)
def test_a_step_is_the_cpu_s_to_the_byte_and_its_loss_is_the_policy_s(model: str, state: TrainingState) -> None:
    records = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab(model, state=state, backend=backend, num_microbatches=2, **SMALL) as lab:
            records.append(lab.step(FULL))
    real, fake = records
    assert real.activation_peak_bytes == fake.activation_peak_bytes
    assert real.peak_by_module | {"": 0} == fake.peak_by_module | {"": 0}
    with Lab(model, state=TrainingState(lora=state.lora), num_microbatches=2, **SMALL) as lab:
        alone = lab.step(FULL)
    assert real.loss == alone.loss
    parameters = kept_bytes(alone.scenario).parameters if state is COPY else 0
    # Its rotary embedding keeps angles of its own: 32 for each of 64 tokens and 16 frequencies, in fp32.
    assert real.static_bytes - alone.static_bytes == parameters + 4 * (64 * 32 + 16) * (state is COPY)
    assert kept_bytes(real.scenario).parameters - kept_bytes(alone.scenario).parameters == parameters


@pytest.mark.parametrize("state", [COPY, WITHOUT_ADAPTERS], ids=str)
def test_each_micro_batch_has_the_loss_of_the_frozen_weights_first(
    open_lab: Callable[..., Lab], state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is as it was built, but for adapters, so both halves of what the schedule gets are equal.

    A second matrix of an adapter begins with zeros: filled with ones, it changes the second half alone.
    """
    halves: list[tuple[torch.Tensor, ...]] = []
    mean = training_step._reduced_second_half

    def note(state: TrainingState, per_token: torch.Tensor) -> Any:
        assert per_token.grad_fn is not None
        halves.append(tuple(half.detach().clone() for half in per_token.chunk(2)))
        return mean(state, per_token)

    monkeypatch.setattr(training_step, "_reduced_second_half", note)
    lab = open_lab("phi-4-tiny", state=state, **SMALL)
    lab.step(warm_up=False)
    (of_reference, of_policy), *_ = halves
    assert torch.equal(of_reference, of_policy)
    halves.clear()

    def change() -> None:
        with torch.no_grad():
            for parameter in inside(lab).model.engine.live.chunk.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.01)

    inside(lab).worker.submit(change).result()
    lab.step(warm_up=False)
    (of_frozen, of_policy), *_ = halves
    assert torch.equal(of_frozen, of_reference)
    assert not torch.equal(of_policy, of_reference)


@pytest.mark.parametrize("state", [COPY, WITHOUT_ADAPTERS], ids=str)
def test_a_reference_pass_has_the_tokens_per_expert_of_its_micro_batch(
    state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[int, int]] = []
    of_pass = RoutingDraws.of_pass

    def noted(draws: RoutingDraws, dispatcher: Any) -> tuple[int, int]:
        passes.append(of_pass(draws, dispatcher))
        return passes[-1]

    monkeypatch.setattr(RoutingDraws, "of_pass", noted)
    layout, routing = Layout(expert_model_parallel_size=2, data_parallel_size=2), Routing(kind="random")
    options: dict[str, Any] = {"layout": layout, "routing": routing, "num_microbatches": 2, "backend": "simulated"}
    with Lab("qwen3-moe-tiny", state=state, **options, **SMALL) as lab:
        lab.step(warm_up=False)
    assert passes == [(layer, batch) for batch in (0, 1) for _ in ("reference", "policy") for layer in (0, 1)]


def test_the_gradients_are_those_without_a_reference_model(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("phi-4-tiny", **SMALL)
    loss, gradients = gradients_of_step(lab, MemorySettings())
    lab.set_state(COPY)
    same, others = gradients_of_step(lab, FULL)
    assert loss == same
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reference_model": "without_adapters"}, "'without_adapters' without lora_rank, must be 'copy' there"),
        ({"reference_model": "copy", "lora": LORA}, "'copy' with lora_rank, must be 'without_adapters' there"),
        ({"reference_model": "copy", "num_labels": 1}, "with num_labels 1, which memlab does not predict together"),
        (
            {
                "reference_model": "copy",
                "fp8_format": "e4m3",
                "fp8_recipe": "mxfp8",
                "fp8_param_gather": True,
                "reuse_grad_buf_for_mxfp8_param_ag": True,
            },
            "with fp8_param_gather and fp8_recipe 'mxfp8', which memlab does not predict together",
        ),
    ],
)
def test_what_a_reference_model_does_not_go_with_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        TrainingState(**values)


def test_interleaved_stages_and_activation_offload_are_refused_beside_it() -> None:
    stages = Layout(pipeline_model_parallel_size=2)
    assert Scenario.of("phi-4-tiny", state=COPY, layout=stages).layout == stages
    interleaved = replace(stages, virtual_pipeline_model_parallel_size=2)
    words = "virtual_pipeline_model_parallel_size 2, which memlab does not predict together"
    with pytest.raises(RuleError, match=words):
        Scenario.of("phi-4-tiny", state=COPY, layout=interleaved, num_microbatches=2)
    with pytest.raises(RuleError, match=r"offload_modules has .'core_attn'. with reference_model 'copy'"):
        check_on_model(offload("core_attn"), Scenario.of("phi-4-tiny", state=COPY))


_DPO = "megatron rlhf --rlhf_type {} --model Qwen/Qwen3-8B --max_length 512 --micro_batch_size 2 --global_batch_size 8"


@pytest.mark.parametrize(
    ("text", "reference_model", "missed"),
    [
        (_DPO.format("dpo"), "copy", set()),
        (f"{_DPO.format('dpo')} --tuner_type lora", "without_adapters", set()),
        (f"{_DPO.format('dpo')} --tuner_type lora --ref_adapters x", "none", {"rlhf_type"}),
        (f"{_DPO.format('dpo')} --pipeline_model_parallel_size 2", "copy", set()),
        (f"{_DPO.format('dpo')} --fp8_format hybrid --fp8_recipe tensorwise", "copy", set()),
        (
            f"{_DPO.format('dpo')} --tuner_type lora --lora_rank 16 --fp8_format hybrid --fp8_recipe tensorwise",
            "without_adapters",
            set(),
        ),
        (
            f"{_DPO.format('dpo')} --tuner_type lora --model openai/gpt-oss-20b --attention_backend fused",
            "none",
            {"lora_rank", "rlhf_type"},
        ),
        (_DPO.format("kto"), "copy", {"rlhf_type"}),
        (_DPO.format("rm"), "none", set()),
    ],
)
def test_jobs_of_ms_swift_compare_with_a_reference_model(
    text: str, reference_model: str, missed: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    job = Job.read(path)
    assert job.required()[0].state.reference_model == reference_model
    assert {one.key for one in job.not_modelled} == missed


@pytest.mark.parametrize(("rows", "is_said"), [(2, True), (3, False)])
def test_a_written_job_of_ms_swift_has_the_rows_of_its_micro_batches(rows: int, is_said: bool, tmp_path: Path) -> None:
    """DPO has pairs; an odd number of sequences, as KTO may have, is written without a reference model."""
    path = tmp_path / "run.sh"
    path.write_text(_DPO.format("kto") + f" --micro_batch_size {rows} --global_batch_size {2 * rows}")
    scenario, settings = Job.read(path).required()
    job = written("ms-swift", scenario, settings)
    path.write_text(f"megatron {'rlhf' if is_said else 'sft'} {' '.join(job.lines)}")
    again, _ = Job.read(path).required()
    assert (again.micro_batch_size, again.num_microbatches) == (rows, 2)
    assert (again.state.reference_model == "copy") == is_said == ("reference_model" not in job.unsaid)
