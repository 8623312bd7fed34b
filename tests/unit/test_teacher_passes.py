"""The passes of NeMo-RL's teacher: what they compute, hold and keep, and the phase of a job that they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.megatron_teacher import CASES, predicted
from memlab.backends.kernel_temporaries import bytes_of_topk, logsumexp
from memlab.config.cublas import CUBLAS_WORKSPACE_BYTES
from memlab.config.layout import Layout
from memlab.config.rollout import Rollout, TeacherPass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron.losses import _largest
from memlab.fitting.outside_torch import RING_OF_ONE_BYTES
from memlab.jobs.job import Job
from memlab.lab.job_phases import predict_phases
from memlab.lab.lab import Lab
from memlab.lab.search_steps import stepping
from memlab.lab.teacher_pass import TeacherPeaks
from memlab.record.job_phases import JobPhases
from tests.unit.measured import measured_by_name
from tests.unit.ranks import on_ranks
from tests.unit.test_loss_bytes import Storages

STATE = TrainingState(loss="topk_logits", topk_logits_k=16)


def teacher(**options: Any) -> Scenario:
    values = {"state": STATE, "num_layers": 2, "seq_length": 256, "num_microbatches": 4, **options}
    return Scenario.of("llama-3-tiny", **values)  # type: ignore[arg-type]


BEYOND = 2**20 + 2**19 + 2**17 - 2**25
"""By which the process of a teacher of one layer of Qwen3-4B differs from a lab: its weights of 95, 47.5 and 741.875 MiB
have segments of whole 2 MiB each, whose ends of up to 1 MiB stay with them, and autograd's thread has no workspace."""


def large(**options: Any) -> Scenario:
    values = {"state": STATE, "num_layers": 1, "seq_length": 256, **options}
    return Scenario.of("qwen3-4b", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_largest_logits_are_those_of_the_whole_vocabulary(chunk: int | None) -> None:
    logits = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))
    wanted = logits.topk(5)

    def job(rank: int, group: Any) -> None:
        own = logits.chunk(group.size(), -1)[rank].contiguous()
        values, places = _largest(own, 5, group, chunk)
        assert torch.equal(values, wanted.values)
        assert torch.equal(places, wanted.indices)

    for ranks in (1, 2):
        on_ranks(ranks, job)


@pytest.mark.parametrize(
    ("rows", "values", "on_h200"),
    [
        (4096, 151936, [16384, 32768, 32768, 4194304, 20971520, 163840, 163840]),
        (2048, 128256, [8192, 16384, 16384, 2097152, 8388608, 65536, 65536]),
        (4096, 1024, [16384, 32768, 32768, 4194304, 2097152, 16384, 16384]),
        (40, 151936, [160, 320, 320, 40960, 409600, 3200, 3200]),
        (300, 32000, [1200, 2400, 2400, 307200, 460800, 3600, 3600]),
        (4096, 128, []),
    ],
)
def test_topk_allocates_what_its_kernel_did_on_an_h200(rows: int, values: int, on_h200: list[int]) -> None:
    """Recorded by torch's allocator, 2.11.0+cu130; beside these a scan takes 1,279 to 1,535 bytes."""
    assert bytes_of_topk(rows, values) == [*on_h200, *[1536] * bool(on_h200)]


def test_a_simulated_logsumexp_has_torch_s_values_and_gradient() -> None:
    values = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    found, wanted = logsumexp(values, 0), torch.logsumexp(values, dim=0)
    torch.testing.assert_close(found, wanted)
    own, of_torch = (torch.autograd.grad(each.square().sum(), values)[0] for each in (found, wanted))
    torch.testing.assert_close(own, of_torch)


def test_a_simulated_logsumexp_s_backward_peaks_as_torch_s_does() -> None:
    peaks = []
    for compute in (logsumexp, torch.logsumexp):
        values = torch.zeros(2, 64, 256, requires_grad=True)
        result = compute(values, 0)
        with Storages() as storages:
            result.backward(torch.ones_like(result))
        peaks.append(storages.peak)
    assert peaks[0] == peaks[1]


def peaks_of(scenario: Scenario, *, replay: bool = True) -> tuple[int, int | None]:
    away = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
    with stepping(scenario, forward_only=True, replay=replay) as steps:
        record = steps(away)
    return record.peak_allocated_bytes, record.peak_reserved_bytes


@pytest.mark.parametrize(
    ("layout", "packed"), [({}, None), ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 2)]
)
def test_what_a_replay_leaves_out_changes_no_byte_of_a_teacher_s_passes(
    layout: dict[str, int], packed: int | None
) -> None:
    scenario = teacher(layout=Layout(**layout), packed_sequences=packed, num_microbatches=7)
    assert peaks_of(scenario) == peaks_of(scenario, replay=False)


def test_each_micro_batch_keeps_its_largest_logits_and_what_is_not_stepped_is_added() -> None:
    """12 bytes of each of 16 logits of 256 tokens, a value in fp32 and its place, but for the ends of blocks."""
    (few, _), (many, _) = (peaks_of(large(num_microbatches=number)) for number in (8, 40))
    kept = 12 * 16 * 256
    assert many - few == pytest.approx(32 * kept, rel=0.05)
    passes = TeacherPass(scenario=large(), num_microbatches=40)
    assert passes.kept_bytes(1) == kept
    assert TeacherPeaks.of(passes, 0, replay=True).allocated_bytes == pytest.approx(many + BEYOND, abs=2**17)


def test_what_is_sent_is_there_twice_in_the_end() -> None:
    """With enough of it, that is the peak: all micro-batches, and their copy in one tensor, beside the weights."""
    scenario = large(state=replace(STATE, topk_logits_k=4096), num_microbatches=40)
    peak, _ = peaks_of(scenario)
    sent, weights = 12 * 4096 * 256 * 40, 2 * scenario.architecture.with_layers(1).num_parameters
    assert peak == pytest.approx(weights + 2 * sent, rel=0.06)
    found = TeacherPeaks.of(TeacherPass(scenario=scenario, num_microbatches=40), 0, replay=True)
    assert found.allocated_bytes == pytest.approx(peak + BEYOND, rel=1e-3)


def test_a_live_pass_finds_the_largest_logits(open_lab: Any) -> None:
    lab: Lab = open_lab("llama-3-tiny", num_layers=1, seq_length=64, num_microbatches=2, state=STATE)
    record = lab.forward_only()
    assert record.loss is None
    assert record.status == "ok"


def phases(job: Scenario, rollout: Rollout) -> tuple[JobPhases, dict[str, int]]:
    found = predict_phases(job, MemorySettings(), rollout)
    return found, {phase.name: phase.training_bytes for phase in found.phases}


def test_a_teacher_s_passes_are_a_phase_beside_what_the_student_leaves() -> None:
    job = Scenario.of("llama-3-tiny", num_layers=1, seq_length=128, state=STATE)
    usual = Rollout(is_colocated=False, ranks_per_node=1, seq_length=128, computes_log_probabilities=False)
    passes = TeacherPass(scenario=teacher(), num_microbatches=4)
    without, _ = phases(job, usual)
    found, by_name = phases(job, replace(usual, teacher=passes))
    freed, of_freed = phases(job, replace(usual, teacher=passes, freed_for_teacher=("gradients", "optimizer state")))
    alone = TeacherPeaks.of(passes, 0, replay=True)
    assert list(by_name) == ["generation", "teacher's passes", "training step", "weight sync"]
    for phase in without.phases:
        assert by_name[phase.name] == phase.training_bytes + alone.left_bytes
    assert by_name["teacher's passes"] == without.phases[0].training_bytes + alone.reserved_bytes
    assert found.outside_torch_bytes == without.outside_torch_bytes + alone.outside_torch_bytes
    assert found.host_bytes_of_rank - without.host_bytes_of_rank == alone.host_bytes
    (one,) = (phase for phase in found.phases if phase.name == "teacher's passes")
    assert (one.allocated_bytes, one.active_bytes, one.reserved_bytes) == (
        alone.allocated_bytes, alone.active_bytes, alone.reserved_bytes
    )  # fmt: skip
    assert freed.to_dict()["phases"][1]["allocated_bytes"] == alone.allocated_bytes
    trained = job.architecture.with_layers(1).num_parameters
    assert by_name["teacher's passes"] - of_freed["teacher's passes"] == pytest.approx((4 + 12) * trained, rel=0.01)


NEMO = """policy:
  model_name: Qwen/Qwen3-1.7B
  max_total_sequence_length: 1024
  train_micro_batch_size: 1
  train_global_batch_size: 64
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}
  generation: {backend: vllm, colocated: {enabled: COLOCATED, resources: {gpus_per_node: 4}}}
teacher:
  model_name: Qwen/Qwen3-4B
  logprob_batch_size: 2
  logprob_chunk_size: 256
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, defer_fp32_logits: true}
  sequence_packing: {enabled: PACKED, logprob_mb_tokens: 4096}
distillation: {topk_logits_k: 32, num_prompts_per_step: 32, num_generations_per_prompt: 2}
cluster: {gpus_per_node: 8}
"""


def nemo(folder: Path, *overrides: str, packed: bool = True, colocated: bool = True) -> Job:
    path = folder / "config.yaml"
    path.write_text(NEMO.replace("COLOCATED", str(colocated).lower()).replace("PACKED", str(packed).lower()))
    return Job.read(path, overrides=overrides)


@pytest.mark.parametrize(
    ("packed", "row"),
    # 64 sequences of 1,024 tokens on 2 copies: 32 of each, 4 in a packed row, or 2 in a micro-batch.
    [(True, (4096, 1, 4, 8)), (False, (1024, 2, None, 16))],
)
def test_nemo_rl_s_teacher_is_a_policy_of_its_own(packed: bool, row: tuple[int, ...], tmp_path: Path) -> None:
    """``setup`` in nemo_rl/algorithms/distillation.py, and ``_shard_for_logprob`` in lm_policy.py (7ea279ab)."""
    job = nemo(tmp_path, packed=packed)
    assert job.rollout is not None and job.rollout.teacher is not None
    passes, scenario = job.rollout.teacher, job.rollout.teacher.scenario
    assert scenario.architecture.name == "qwen3-4b"
    assert (scenario.layout.tensor_model_parallel_size, scenario.layout.data_parallel_size) == (4, 2)
    number = passes.num_microbatches or scenario.num_microbatches
    assert (scenario.seq_length, scenario.micro_batch_size, scenario.packed_sequences, number) == row
    state = scenario.state
    assert (state.loss, state.topk_logits_k, state.logprobs_chunk_size, state.fp32_output) == (
        "topk_logits", 32, 256, False
    )  # fmt: skip
    assert job.required()[0].state.logprobs_chunk_size is None
    assert "teacher.model_name" not in {one.key for one in job.not_modelled}
    assert {one.key for one in job.taken} >= {"teacher.model_name", "teacher.logprob_batch_size"}
    assert not any("policy.logprob" in text for text in job.warnings)
    of_budget = [text for text in job.warnings if text.startswith("teacher") and "filled up to a budget" in text]
    assert len(of_budget) == packed, "the passes' own note, in place of that of a training's micro-batches"


DTENSOR = """
defaults: {}
policy:
  model_name: Qwen/Qwen3-1.7B
  precision: bfloat16
  train_global_batch_size: 8
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: false}
  dtensor_cfg: {enabled: true, _v2: true, tensor_parallel_size: 1}
  generation: {backend: vllm, colocated: {enabled: true}}
teacher:
  model_name: Qwen/Qwen3-32B
  precision: bfloat16
  train_micro_batch_size: 1
  logprob_batch_size: 2
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: false}
  dtensor_cfg: {enabled: true, _v2: true, tensor_parallel_size: 4}
distillation: {topk_logits_k: 32, num_prompts_per_step: 32}
cluster: {gpus_per_node: 8}
"""


def test_a_teacher_with_dtensor_is_a_policy_of_its_own(tmp_path: Path) -> None:
    """``get_topk_logits`` in nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py (7ea279ab)."""
    (tmp_path / "config.yaml").write_text(DTENSOR)
    job = Job.read(tmp_path / "config.yaml")
    assert job.rollout is not None and job.rollout.teacher is not None
    scenario = job.rollout.teacher.scenario
    assert (scenario.engine, scenario.architecture.name) == ("fsdp2", "qwen3-32b")
    assert (scenario.layout.tensor_model_parallel_size, scenario.layout.data_parallel_size) == (4, 2)
    assert (scenario.seq_length, scenario.micro_batch_size) == (1024, 2)
    assert scenario.state.loss_of_transformers == job.required()[0].state.loss_of_transformers == "topk_logits"
    assert {one.key for one in job.not_modelled} <= {
        *("policy.precision", "teacher.precision", "teacher.sequence_packing.enabled")
    }
    more = Job.read(tmp_path / "config.yaml", overrides=["distillation.topk_logits_k=4096"]).not_modelled
    assert [one.effect for one in more if one.key == "distillation.topk_logits_k"] == ["more"]
    other = Job.read(tmp_path / "config.yaml", overrides=["teacher.dtensor_cfg.enabled=false"])
    assert other.rollout is not None and other.rollout.teacher is None
    (named,) = (one for one in other.not_modelled if one.key == "teacher.model_name")
    assert "give --format nemo-rl-teacher to predict the teacher alone" in named.reason


def test_a_teacher_s_shards_are_on_the_device_in_its_passes_alone() -> None:
    state = TrainingState(fp32_sharded_params=True, loss_of_transformers="topk_logits")
    scenario = Scenario.of("llama-3-tiny", engine="fsdp2", state=state, num_layers=2, seq_length=64, num_microbatches=5)
    peaks = TeacherPeaks.of(TeacherPass(scenario=scenario, num_microbatches=None), 0, replay=True)
    shards = 4 * scenario.architecture.with_layers(2).num_parameters
    assert peaks.host_bytes == pytest.approx(shards, rel=0.01)
    assert peaks.left_bytes == pytest.approx(
        CUBLAS_WORKSPACE_BYTES, abs=4096
    )  # of the thread that runs forward; nothing stays gathered
    assert peaks.allocated_bytes > shards + peaks.left_bytes


def test_what_leaves_the_device_for_nemo_rl_s_teacher(tmp_path: Path) -> None:
    """``offload_before_refit``, which ``distillation_train`` calls where the engine has other GPUs."""
    freed = [
        nemo(tmp_path, *overrides, colocated=colocated).rollout.freed_for_teacher  # type: ignore[union-attr]
        for colocated, overrides in (
            (True, ()),
            (False, ()),
            (False, ("policy.offload_optimizer_for_refit=false",)),
        )
    ]
    assert freed == [(), ("gradients", "optimizer state"), ("gradients",)]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("policy.generation.backend=megatron", "Megatron's own engine generates"),
        ("teacher.model_name=somebody/unknown", "somebody/unknown"),
        ("teacher.megatron_cfg.enabled=false", "give --format nemo-rl-dtensor-teacher to predict the teacher alone"),
        (
            "teacher.megatron_cfg.defer_fp32_logits=false",
            "teacher.logprob_chunk_size is 256 without teacher.megatron_cfg",
        ),
    ],
)
def test_a_teacher_that_is_not_predicted_is_named_with_the_reason(override: str, why: str, tmp_path: Path) -> None:
    job = nemo(tmp_path, override)
    assert job.rollout is not None and job.rollout.teacher is None
    (one,) = (one for one in job.not_modelled if one.key == "teacher.model_name")
    assert why in one.reason
    assert one.effect == "more"


@pytest.mark.parametrize("colocated", [True, False])
def test_graphs_of_a_teacher_whose_weights_leave_the_device_are_named(colocated: bool, tmp_path: Path) -> None:
    job = nemo(tmp_path, "teacher.megatron_cfg.cuda_graph_impl=transformer_engine", colocated=colocated)
    assert job.rollout is not None and job.rollout.teacher is not None
    assert job.rollout.teacher.scenario.state.cuda_graph_impl == "none"
    assert "teacher.megatron_cfg.cuda_graph_impl" in {one.key for one in job.not_modelled}


def test_a_value_that_a_teacher_cannot_have_is_refused_by_its_own_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"teacher\.logprob_batch_size is 'two'"):
        nemo(tmp_path, "teacher.logprob_batch_size=two")


def test_the_same_file_is_read_as_its_teacher_s(tmp_path: Path) -> None:
    nemo(tmp_path)
    scenario, _ = Job.read(tmp_path / "config.yaml", format_name="nemo-rl-teacher").required()
    assert scenario.architecture.name == "qwen3-4b"
    assert scenario.seq_length == 4096


MEASURED = measured_by_name("h200_teacher_passes")


@pytest.mark.parametrize(
    "number",
    [
        3,
        *(pytest.param(number, marks=pytest.mark.slow) for number in range(len(CASES)) if number != 3),
    ],
)
def test_a_teacher_holds_what_it_did_on_an_h200(number: int) -> None:
    """Plain Megatron-Core without DDP. Its script uses no group of all ranks, which NeMo-RL does when it starts."""
    case = CASES[number]
    row = MEASURED[case.name]
    last, found = row["steps"][-1], predicted(case, row["environment"])
    assert found["peak_bytes"] == pytest.approx(last["peak_bytes"], rel=3e-4)
    assert found["left_bytes"] == pytest.approx(last["left_bytes"], abs=2**18)
    assert found["peak_reserved_bytes"] == pytest.approx(last["peak_reserved_bytes"], rel=0.06)
    assert found["outside_torch_bytes"] - RING_OF_ONE_BYTES == pytest.approx(last["outside_torch_bytes"], rel=0.06)
