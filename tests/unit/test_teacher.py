"""A teacher's logits, and the losses that compare with them: values, bytes, and what the step of a student holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.parameters import kept_bytes
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import COMPARE_WITH_TEACHER, TrainingState
from memlab.config.validation import RuleError
from memlab.engines.megatron.losses import LOSSES, LossFromLogits, _kl_of_largest
from memlab.engines.megatron.training_step import _beside_cross_entropy
from memlab.jobs.writing import written
from memlab.lab.lab import Lab
from tests.unit.inside import inside
from tests.unit.job_files import read_job
from tests.unit.ranks import on_ranks
from tests.unit.test_loss_bytes import ROWS, VOCABULARY, bytes_of_logit

pytestmark = pytest.mark.versions

GKD = TrainingState(loss="jsd", reference_model="copy", fp32_output=True)
KL = TrainingState(loss="logits_kl", reference_model="copy")


def divergence(loss: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns each token's divergence, from its definition: KL(teacher | student), or half of both from the mixture."""
    if loss == "logits_kl":
        target, own = teacher.softmax(-1), student.softmax(-1)
        return (target * (target / own).log()).sum(-1)
    target, own = (teacher / 0.9).softmax(-1), (student / 0.9).softmax(-1)
    mixture = (target + own) / 2
    return sum((one * (one / mixture).log()).sum(-1) / 2 for one in (target, own))  # type: ignore[return-value]


def check_on_one_rank_and_two(
    compute: Callable[..., torch.Tensor], student: torch.Tensor, teacher: Any, wanted: torch.Tensor
) -> None:
    """Checks the values and the gradient of a loss that is computed in parts of the vocabulary.

    Args:
        teacher: Whole logits, of which each rank has its part, or what each rank has.
    """
    (gradient,) = torch.autograd.grad(wanted.sum(), student)

    def job(rank: int, group: Any) -> None:
        def part(whole: torch.Tensor) -> torch.Tensor:
            return whole.detach().chunk(group.size(), -1)[rank].contiguous()

        own, labels = part(student).requires_grad_(), torch.zeros(student.shape[:2], dtype=torch.int64)
        of_teacher = part(teacher) if isinstance(teacher, torch.Tensor) else teacher
        found = compute(own * 1, labels, group, None, teacher=of_teacher)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-6)
        (of_own,) = torch.autograd.grad(found.sum(), own)
        torch.testing.assert_close(of_own, part(gradient), rtol=1e-3, atol=1e-6)

    for ranks in (1, 2):
        on_ranks(ranks, job)


@pytest.mark.parametrize("loss", COMPARE_WITH_TEACHER)
def test_a_loss_is_the_divergence_of_two_distributions_on_one_rank_and_on_two(loss: str) -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 1, 600, 32, dtype=torch.float64).unbind()  # two parts of ms-swift's 512 tokens
    student = student.float().requires_grad_()
    teacher = teacher.float()
    check_on_one_rank_and_two(LOSSES[loss], student, teacher, divergence(loss, student, teacher))


def test_the_largest_logits_are_compared_by_themselves_on_one_rank_and_on_two() -> None:
    """By definition: both distributions over the teacher's 5 largest logits of each token, and no others."""
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 1, 600, 32).unbind()
    student.requires_grad_()
    values, places = teacher.topk(5)
    wanted = divergence("jsd", student.gather(-1, places).double(), values.double()).float()
    check_on_one_rank_and_two(LOSSES["jsd"], student, (values, places), wanted)


def test_model_optimizer_compares_the_largest_logits_by_themselves_on_one_rank_and_on_two() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 1, 60, 32).unbind()
    student.requires_grad_()
    values, places = teacher.topk(5)
    wanted = divergence("logits_kl", student.gather(-1, places).double(), values.double()).float()
    check_on_one_rank_and_two(partial(_kl_of_largest, topk=5), student, teacher, wanted)


@pytest.mark.parametrize(("ranks", "held"), [(1, 5.024), (2, 5.792)])
def test_model_optimizer_s_largest_logits_need_what_its_function_does(ranks: int, held: float) -> None:
    """Bytes per logit of 1,024 tokens and 8,000 logits, 512 of them compared: ``TopKLogitsKLLoss`` (a2fbac7b).

    torch's profiler counted them on the CPU, torch 2.13; of several ranks in a group of one, which gathers half.
    """
    shape = (1, 1024, 8000)
    labels, teacher = torch.zeros(shape[:2], dtype=torch.int64), torch.zeros(shape, dtype=torch.bfloat16)
    found: list[dict[str, float]] = []

    def job(_: int, group: Any) -> None:
        compute = partial(_kl_of_largest, labels=labels, group=group, chunk_size=None, teacher=teacher, topk=512)
        found.append(bytes_of_logit(compute, fp32=False, trains=True, shape=shape, there=teacher))

    on_ranks(ranks, job)
    for of_rank in found:
        assert of_rank == pytest.approx(
            {"forward": 14.0, "held": held, "backward": 8.768}, abs=0.8 * (ranks - 1) + 0.05
        )


@pytest.mark.parametrize(
    ("state", "forward", "held", "backward"), [(KL, 34.002, 12.001, 16.001), (GKD, 45.002, 30.001, 41.0)]
)
def test_a_loss_beside_the_cross_entropy_needs_what_both_functions_do(
    state: TrainingState, forward: float, held: float, backward: float, open_lab: Callable[..., Lab]
) -> None:
    """As above: ``LogitsKLLoss`` or ``gkd_loss`` beside ``vocab_parallel_cross_entropy`` of megatron-core 0.16.1."""
    lab = open_lab("phi-4-tiny", num_layers=1, seq_length=96)  # makes Megatron's groups
    shape, model = (1024, 1, 8000) if state is KL else (1, 1024, 8000), inside(lab).model.engine.live.chunk
    labels, teacher = torch.zeros(1, 1024, dtype=torch.int64), torch.zeros(shape, dtype=torch.bfloat16)
    beside = TrainingState(**state.changed(), lm_loss_beside=True)

    def compute(logits: torch.Tensor) -> torch.Tensor:
        own = partial(LossFromLogits(), logits, labels, beside, None, teacher)
        return _beside_cross_entropy(own, model, logits, labels, beside)

    found = bytes_of_logit(compute, fp32=state.fp32_output, trains=True, shape=shape, there=teacher)
    assert found == pytest.approx({"forward": forward, "held": held, "backward": backward}, abs=0.15)


@pytest.mark.parametrize(("reference", "ranks", "most"), [("copy", 1, 256), ("copy", 2, 128), ("none", 2, 256)])
def test_no_more_logits_are_compared_than_there_are(reference: str, ranks: int, most: int) -> None:
    """Of 256: each rank's part with a teacher on the GPUs, whose ranks look for the largest, and all of a server's."""
    layout = Layout(tensor_model_parallel_size=ranks)
    for k in (most, most + 1):
        state = TrainingState.of_options({"loss": "jsd", "reference_model": reference, "gkd_logits_topk": k})
        is_refused = pytest.raises(RuleError, match=f"must be at most {most}, the logits")
        with nullcontext() if k == most else is_refused:
            Scenario.of("llama-3-tiny", layout=layout, state=state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_the_largest_logits_needs_what_ms_swift_s_function_does(ranks: int) -> None:
    """Bytes per logit of 1,024 tokens and 8,000 logits, 64 of them compared: torch's profiler on the CPU, torch 2.13."""
    shape, k = (1, 1024, 8000), 64
    labels = torch.zeros(shape[:2], dtype=torch.int64)
    teacher = (torch.zeros(1, 1024, k, dtype=torch.bfloat16), torch.arange(k).repeat(1, 1024, 1))
    found: list[dict[str, float]] = []

    def job(_: int, group: Any) -> None:
        compute = partial(LOSSES["jsd"], labels=labels, group=group, chunk_size=None, teacher=teacher)
        found.append(bytes_of_logit(compute, fp32=True, trains=True, shape=shape))

    on_ranks(ranks, job)
    few = {"forward": 8.36, "held": 4.27, "backward": 8.1}
    wanted = few if ranks == 1 else {"forward": 8.44, "held": 4.29, "backward": 8.1}
    for of_rank in found:
        assert of_rank == pytest.approx(wanted, abs=0.15)


@pytest.mark.parametrize(
    ("loss", "ranks", "forward", "held", "backward"),
    [
        ("logits_kl", 1, 30.0, 8.0, 12.0),
        ("logits_kl", 2, 34.012, 8.002, 12.004),
        ("jsd", 1, 45.007, 26.0, 37.0),
        ("jsd", 2, 47.013, 26.006, 37.006),
    ],
)
def test_a_loss_needs_what_the_framework_s_own_function_does(
    loss: str, ranks: int, forward: float, held: float, backward: float
) -> None:
    """Bytes per logit of 1,024 tokens that torch's profiler counted on the CPU, torch 2.13, as CUDA's allocator does.

    Of Model Optimizer's ``LogitsKLLoss`` (a2fbac7b) and of ms-swift's ``gkd_loss`` (3602360), which keeps all parts of
    512 tokens for backward. The teacher's logits were there before. Functions, cases and the way of measurement are
    those of benchmarks/losses_of_frameworks.py; of other sizes, an H200 had the same as these, and memlab's losses the
    same as the functions (``labs/results/h200_loss_bytes.jsonl``).
    """
    shape = (1, 1024, VOCABULARY)
    labels = torch.zeros(shape[:2], dtype=torch.int64)
    teacher = torch.zeros(shape, dtype=torch.bfloat16)
    found: list[dict[str, float]] = []

    def job(_: int, group: Any) -> None:
        compute = partial(LOSSES[loss], labels=labels, group=group, chunk_size=None, teacher=teacher)
        found.append(bytes_of_logit(compute, fp32=loss == "jsd", trains=True, shape=shape, there=teacher))

    on_ranks(ranks, job)
    wanted = {"forward": forward, "held": held, "backward": backward}
    for of_rank in found:
        assert of_rank == pytest.approx(wanted, abs=0.15)


@pytest.mark.parametrize(
    ("model", "state"),
    [
        ("llama-3-tiny", KL),
        (
            "qwen3-dense-tiny",
            TrainingState(**{**GKD.changed(), "teacher_model": "qwen3-moe-tiny", "lora": LoRA(rank=4)}),
        ),
        ("qwen3-moe-tiny", TrainingState(loss="jsd", lora=LoRA(rank=4), reference_model="without_adapters")),
        ("llama-3-tiny", TrainingState(**GKD.changed(), gkd_logits_topk=16)),
        ("llama-3-tiny", TrainingState(loss="jsd", fp32_output=True, gkd_logits_topk=16)),
        ("llama-3-tiny", TrainingState(**KL.changed(), logit_kl_topk=16, lm_loss_beside=True)),
        ("llama-3-tiny", TrainingState(**GKD.changed(), lm_loss_beside=True)),
    ],
    ids=[
        *("the same model", "another one, beside adapters", "without adapters", "largest logits", "of a server"),
        *("largest logits beside cross entropy", "beside cross entropy"),
    ],
)
def test_a_step_is_the_cpu_s_to_the_byte(model: str, state: TrainingState) -> None:
    records = []
    for backend in ("cpu", of_the_cpu_backend()):
        with Lab(model, state=state, backend=backend, num_microbatches=3, num_layers=2, seq_length=64) as lab:
            records.append(lab.step())
    real, fake = records
    assert real.activation_peak_bytes == fake.activation_peak_bytes
    assert real.peak_by_module | {"": 0} == fake.peak_by_module | {"": 0}
    assert (real.loss or 0) > 0 or state.reference_model == "without_adapters"


def test_what_a_replay_leaves_out_changes_no_byte_of_a_step_with_a_teacher() -> None:
    options: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "num_microbatches": 4, "backend": "simulated"}
    beside = TrainingState(**GKD.changed(), lm_loss_beside=True)
    for state in (KL, GKD, beside, TrainingState(**GKD.changed(), gkd_logits_topk=16)):
        peaks = set()
        for replay in (True, False):
            with Lab("llama-3-tiny", state=state, replay=replay, **options) as lab:
                record = lab.step()
                peaks.add((record.peak_allocated_bytes, record.peak_reserved_bytes, record.activation_peak_bytes))
        assert len(peaks) == 1


def test_a_teacher_in_fp8_keeps_a_byte_of_each_weight_of_its_matrices() -> None:
    """It has no backward, and so no values by column; what it is trained beside changes nothing of that."""
    options: dict[str, Any] = {"num_layers": 1, "seq_length": 512, "backend": "simulated"}
    in_fp8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    kept = {}
    for reference in ("none", "copy"):
        for fp8 in ({}, in_fp8):
            state = TrainingState.of_options({"reference_model": reference} | fp8)
            with Lab("llama-3.1-8b", state=state, **options) as lab:
                lab.step()
                kept[reference, bool(fp8)] = lab.step().static_bytes
    of_both, of_one = (kept[each, True] - kept[each, False] for each in ("copy", "none"))
    matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    # The allocator leaves up to 1 MiB of a block unsplit.
    assert of_one == pytest.approx(2 * matrices, abs=3 * 2**19)
    assert of_both - of_one == pytest.approx(matrices, abs=3 * 2**19)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (KL, 1),
        (GKD, 1),
        (TrainingState(reference_model="copy"), 0),
        # The other stages: they compute no loss, or DPO's, whose reference takes its passes as on the first one.
        *(pytest.param(state, 0, marks=pytest.mark.slow) for state in (KL, GKD)),
        pytest.param(TrainingState(reference_model="copy"), 1, marks=pytest.mark.slow),
    ],
)
def test_a_stage_of_two_models_is_replayed_as_it_is_stepped(state: TrainingState, stage: int) -> None:
    layout = Layout(pipeline_model_parallel_size=2, rank=stage)
    options: dict[str, Any] = {"num_layers": 4, "seq_length": 64, "num_microbatches": 6, "layout": layout}
    peaks = set()
    for replay in (True, False):
        with Lab("llama-3-tiny", state=state, replay=replay, backend="simulated", **options) as lab:
            lab.step()
            record = lab.step()
            peaks.add((record.static_bytes, record.peak_allocated_bytes, record.peak_reserved_bytes))
    assert len(peaks) == 1


def test_gkd_holds_the_teacher_s_logits_of_all_micro_batches_and_model_optimizer_those_of_one() -> None:
    """phi-4's vocabulary: 100,352 logits of 2 bytes for each of 512 tokens, once more for each micro-batch."""
    logits, options = 512 * 100_352 * 2, {"num_layers": 1, "seq_length": 512, "backend": "simulated"}
    for state, more in ((KL, 0), (GKD, 3)):
        peaks = []
        for batches in (1, 4):
            with Lab("phi-4", state=state, num_microbatches=batches, **options) as lab:  # type: ignore[arg-type]
                peaks.append(lab.step().activation_peak_bytes)
        assert peaks[1] - peaks[0] == pytest.approx(more * logits, abs=0.01 * logits)


def test_the_frameworks_own_losses_needed_on_an_h200_what_memlab_s_do() -> None:
    """On one rank; each case has two sizes, and one way of several ranks, which one process measures for theirs."""
    rows = [row for row in ROWS if row["state"]["loss"] in COMPARE_WITH_TEACHER]
    assert len(rows) == 8
    for row in rows:
        assert row["several_ranks"] == (row["memlab"] is None)
        assert row["memlab"] in (None, row["framework"])


def test_a_dense_teacher_reads_no_routing_of_its_student_s_experts() -> None:
    state = TrainingState(**KL.changed(), teacher_model="qwen3-dense-tiny")
    scenario = Scenario.of("qwen3-moe-tiny", state=state, routing=Routing(kind="random"), expert_buffers=True)
    assert scenario.teacher.routing == Routing()


def test_the_teacher_s_parameters_are_counted_with_all_its_layers() -> None:
    """Llama 3.2 3B has 3,212,749,824 parameters, half of them on each of two tensor parallel ranks but for its norms."""
    layout = Layout(tensor_model_parallel_size=2)
    alone = kept_bytes(Scenario.of("meta-llama/Llama-3.2-1B", layout=layout))
    state = TrainingState(**KL.changed() | {"teacher_model": "meta-llama/Llama-3.2-3B"})
    both = kept_bytes(Scenario.of("meta-llama/Llama-3.2-1B", layout=layout, state=state))
    norms = 3072 * (2 * 28 + 1)
    assert both.parameters - alone.parameters == 2 * ((3_212_749_824 - norms) // 2 + norms)
    assert both[1:] == alone[1:]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "jsd"}, "and reference_model is 'none': choose 'copy', or 'without_adapters' with lora_rank"),
        ({"reference_model": "copy", "teacher_model": "phi-4"}, "but loss is 'cross_entropy', and only logits_kl"),
        ({**KL.changed(), "lora": LoRA(rank=4)}, "must be 'without_adapters' there"),
        ({**KL.changed(), "logprobs_chunk_size": 8}, "only the losses logprobs"),
        ({"lm_loss_beside": True}, "only the losses logits_kl and jsd are computed beside"),
    ],
)
def test_what_a_teacher_does_not_go_with_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        TrainingState(**values)


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ("qwen3-8b", "vocabulary of 151936, must have that of phi-4"),
        ("phi-5", "teacher_model is 'phi-5': architecture 'phi-5' is neither a known name"),
    ],
)
def test_a_teacher_that_memlab_cannot_compare_with_is_refused(teacher: str, words: str) -> None:
    with pytest.raises(RuleError, match=words):
        Scenario.of("phi-4", state=TrainingState(**KL.changed(), teacher_model=teacher))


_GKD = "megatron rlhf --rlhf_type gkd --model Qwen/Qwen3-8B --max_length 512 --micro_batch_size 1 --global_batch_size 8"
_SERVER = f"{_GKD} --lmbda 0 --teacher_model_server http://localhost:8000 --gkd_logits_topk 32"
_OTHER = f"{_GKD} --lmbda 0 --teacher_model Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("text", "found", "missed"),
    [
        (_OTHER, ("jsd", "copy", "Qwen/Qwen3-32B"), {"rlhf_type": "less"}),
        (_OTHER.replace("32B", "8B"), ("jsd", "copy", None), {"rlhf_type": "less"}),
        (f"{_OTHER.replace('32B', '8B')} --tuner_type lora", ("jsd", "without_adapters", None), {"rlhf_type": "less"}),
        (f"{_OTHER} --tuner_type lora", ("jsd", "copy", "Qwen/Qwen3-32B"), {"rlhf_type": "less"}),
        (
            f"{_OTHER} --offload_teacher_model true --sft_alpha 0.1",
            ("jsd", "copy", "Qwen/Qwen3-32B"),
            {"rlhf_type": "less", "offload_teacher_model": "less"},
        ),
        (
            f"{_OTHER} --steps_per_generation 4 --beta 1",
            ("jsd", "copy", "Qwen/Qwen3-32B"),
            {"rlhf_type": "less", "steps_per_generation": "more", "beta": "less"},
        ),
        (
            f"{_OTHER} --pipeline_model_parallel_size 2 --fp8_format hybrid --fp8_recipe tensorwise",
            ("jsd", "copy", "Qwen/Qwen3-32B"),
            {"rlhf_type": "less"},
        ),
        # What memlab does not predict with it stays a bound from one side.
        (f"{_GKD} --lmbda 0 --gkd_logits_topk 64", ("log_softmax", "none", None), {"rlhf_type": "more"}),
        (
            f"{_OTHER} --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2",
            ("log_softmax", "none", None),
            {"rlhf_type": "more", "teacher_model": "more"},
        ),
        (
            _OTHER.replace("Qwen/Qwen3-32B", "somebody/unknown"),
            ("log_softmax", "none", None),
            {"rlhf_type": "more", "teacher_model": "more"},
        ),
        (_GKD + " --lmbda 0", ("log_softmax", "none", None), {"rlhf_type": "more"}),
    ],
)
def test_jobs_of_ms_swift_have_their_teacher(
    text: str, found: tuple[str, str, str | None], missed: dict[str, str], tmp_path: Path
) -> None:
    job = read_job(text, tmp_path)
    state = job.required()[0].state
    assert (state.loss, state.reference_model, state.teacher_model) == found
    assert {one.key: one.effect for one in job.not_modelled} == missed


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (f"{_OTHER} --gkd_logits_topk 32", "copy"),
        (_SERVER, "none"),
        (f"{_SERVER} --pipeline_model_parallel_size 2 --fp8_format hybrid --fp8_recipe tensorwise", "none"),
    ],
)
def test_jobs_of_ms_swift_compare_with_the_largest_logits(text: str, reference: str, tmp_path: Path) -> None:
    """``_compute_teacher_logits`` in swift/megatron/trainers/gkd_trainer.py (3602360)."""
    job = read_job(text, tmp_path)
    state = job.required()[0].state
    assert (state.loss, state.reference_model, state.gkd_logits_topk) == ("jsd", reference, 32)
    assert {one.key: one.effect for one in job.not_modelled} == {"rlhf_type": "less"}


@pytest.mark.parametrize("beside", [False, True])
def test_a_written_job_of_ms_swift_has_its_teacher(beside: bool, tmp_path: Path) -> None:
    state = TrainingState(**GKD.changed(), teacher_model="Qwen/Qwen3-32B", lm_loss_beside=beside)
    scenario = Scenario.of("Qwen/Qwen3-8B", seq_length=1024, num_microbatches=2, state=state)
    new = written("ms-swift", scenario, MemorySettings())
    assert not {"loss", "reference_model", "teacher_model"} & new.unsaid.keys()
    assert ("add --sft_alpha NUMBER" in new.unsaid.get("lm_loss_beside", "")) == beside
    again = read_job(f"megatron rlhf {' '.join(new.lines)}{' --sft_alpha 0.1' * beside}", tmp_path).required()[0]
    assert again.state == state
    assert (again.seq_length, again.num_microbatches) == (1024, 2)
