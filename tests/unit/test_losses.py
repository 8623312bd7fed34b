"""The loss: what each way to compute it allocates, and that all of them compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from memlab.backends.fused_cross_entropy import te_parallel_cross_entropy
from memlab.backends.simulated_version import imitating
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.config.training_state import COMPARE_WITH_TEACHER, READ_CHUNK_SIZE, Loss, TrainingState
from memlab.config.versions import Versions
from memlab.engines.megatron import losses
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import PHASES, POOLS
from tests.unit.live import gradients_of_step
from tests.unit.ranks import on_ranks

pytestmark = pytest.mark.versions

UNFUSED = TrainingState()
NATIVE = TrainingState(cross_entropy_loss_fusion=True)
TE = TrainingState(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
LOGPROBS = TrainingState(loss="logprobs")
CHUNKED = TrainingState(loss="logprobs", logprobs_chunk_size=40)
OF_TEACHERS = ("topk_logits", *COMPARE_WITH_TEACHER)
WHOLE = [TrainingState(loss=loss, fp32_output=True) for loss in get_args(Loss)[2:] if loss not in OF_TEACHERS]
IN_CHUNKS = [replace(state, logprobs_chunk_size=40) for state in WHOLE if state.loss in READ_CHUNK_SIZE]


def predicted(state: TrainingState, **options: Any) -> StepRecord:
    with Lab("phi-4", num_layers=2, backend="simulated", state=state, **{"seq_length": 4096, **options}) as lab:
        return lab.step()


@pytest.mark.parametrize(
    ("state", "bytes_on_h200", "phase"),
    [(NATIVE, 36_498_746_368, "forward"), (TE, 34_279_841_792, "backward")],
    ids=["native", "te"],
)
def test_a_fused_loss_allocates_what_it_did_on_an_h200(state: TrainingState, bytes_on_h200: int, phase: str) -> None:
    record = predicted(state)
    assert record.peak_allocated_bytes == pytest.approx(bytes_on_h200, abs=4096)
    assert record.peak_phase == phase


def test_each_tensor_rank_copies_its_part_of_the_logits() -> None:
    part = 4096 * 100_352 // 2
    peaks = [
        predicted(state, layout=Layout(tensor_model_parallel_size=2)).peak_allocated_bytes
        for state in (UNFUSED, NATIVE)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(4 * part, rel=0.01)


@pytest.mark.parametrize(
    ("state", "dtype"),
    [
        *((state, dtype) for state in (NATIVE, TE) for dtype in ("bf16", "fp32")),
        *((state, "fp32") for state in (LOGPROBS, CHUNKED, *WHOLE, *IN_CHUNKS)),
        (WHOLE[0], "bf16"),
    ],
    ids=str,
)
def test_every_loss_has_the_values_of_the_unfused_cross_entropy(
    open_lab: Callable[..., Lab], state: TrainingState, dtype: str
) -> None:
    # 96 is no power of 2, so that dividing by it rounds.
    small: dict[str, Any] = {"architecture": "phi-4-tiny", "num_layers": 1, "seq_length": 96, "dtype": dtype}
    expected, gradients = gradients_of_step(open_lab(**small), MemorySettings())
    lab = open_lab(**small, state=state)
    loss, of_other = gradients_of_step(lab, MemorySettings())
    assert loss == pytest.approx(expected, rel=1e-6)
    assert lab.forward_only().loss == pytest.approx(expected, rel=1e-6)
    # TE rounds each gradient twice in the logits' type; the native fusion rounds it to bf16, whatever that type is.
    tolerance = 0.01 if dtype == "bf16" or state is NATIVE else 1e-6
    for buffer, other in zip(gradients, of_other, strict=True):
        assert (other - buffer).norm() <= tolerance * buffer.norm()
        assert other.norm() > 0


@pytest.mark.parametrize("loss", losses.WITH_ENTROPY)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_tensor_ranks_subtract_the_entropy_together_as_one_rank_does(loss: str, chunk_size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(2, 7, 40, generator=generator), torch.randn(2, 7, generator=generator)
    labels = torch.randint(40, (2, 7), generator=generator)
    whole = logits.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=whole)
    expected = -distribution.log_prob(labels) - 0.01 * distribution.entropy()
    expected.backward(weights)
    assert whole.grad is not None
    of_ranks: dict[int, tuple[torch.Tensor, ...]] = {}

    def job(rank: int, group: Any) -> None:
        part = logits[:, :, 20 * rank : 20 * (rank + 1)].clone().requires_grad_()
        together = losses.WITH_ENTROPY[loss](part * 1, labels, group, chunk_size)
        of_ranks[rank] = together.detach(), *torch.autograd.grad(together, part, weights)

    on_ranks(2, job)
    for rank, (of_labels, gradient) in of_ranks.items():
        torch.testing.assert_close(of_labels, expected.detach())
        torch.testing.assert_close(gradient, whole.grad[:, :, 20 * rank : 20 * (rank + 1)])


@pytest.mark.parametrize(("version", "beside"), [("2.17", []), ("2.18", [2]), ("2.19", [1]), ("2.20", [1])])
def test_a_release_of_transformer_engine_decides_what_its_cross_entropy_has_beside_the_logits(
    version: str, beside: list[int]
) -> None:
    """By hand, in multiples of the bf16 logits: ``cross_entropy_forward`` of each release. Backward returns bf16."""
    line = predicted(TE, versions=Versions(transformer_engine=version)).timeline
    multiples = line.delta_bytes / (2 * 4096 * 100_352)
    made = (line.pool == POOLS.index("device")) & (multiples > 0.99)
    in_forward, in_backward = (made & (line.phase == PHASES.index(phase)) for phase in ("forward", "backward"))
    assert multiples[in_forward].round(2).tolist() == [1, *beside]
    assert (multiples[in_backward].round(2) == 1).sum() == (version == "2.18"), "autograd's copy in bf16"


def test_a_distillation_makes_as_many_logits_as_the_teacher_sends() -> None:
    """In fp32, of each token at least what is picked and its log-softmax."""
    with Lab("phi-4-tiny", num_layers=1, seq_length=4096, backend="simulated") as lab:
        few, many = (
            lab.step(state=TrainingState(loss="topk_logits", topk_logits_k=number)).peak_by_module["loss"]
            for number in (64, 2048)
        )
    assert many - few >= 2 * 4 * 4096 * (2048 - 64)


def test_the_entropy_keeps_and_makes_what_the_frameworks_keep_and_make() -> None:
    """By hand, in fp32: verl keeps a copy of the logits and a softmax; slime the logits, and makes their gradient.

    Without the entropy the loss keeps one of these, and the logits are freed before backward.
    """
    logits = 4096 * 100_352
    with Lab("phi-4", num_layers=2, seq_length=4096, backend="simulated") as lab:
        for loss, phase in (("vocab_parallel_cross_entropy", "forward"), ("softmax", "backward")):
            plain = TrainingState(loss=loss, fp32_output=True)  # type: ignore[arg-type]
            without, beside = lab.step(state=plain), lab.step(state=replace(plain, entropy_loss=True))
            assert beside.peak_by_module["loss"] == pytest.approx(8 * logits, rel=1e-3)
            assert beside.peak_allocated_bytes - without.peak_allocated_bytes == pytest.approx(4 * logits, rel=1e-3)
            assert beside.peak_phase == phase


@pytest.mark.parametrize(
    "how", ["te 2.17", "te 2.18", "te 2.19", "log-probabilities", "chunks", "one-hot chunks", "softmax", "log_softmax"]
)
def test_tensor_ranks_compute_together_what_one_rank_does(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(2, 7, 40, generator=generator), torch.randn(2, 7, generator=generator)
    labels = torch.randint(40, (2, 7), generator=generator)

    whole = logits.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=whole)
    expected = distribution.log_prob(labels)
    expected.backward(weights)
    assert whole.grad is not None
    of_ranks: dict[int, tuple[torch.Tensor, ...]] = {}

    def job(rank: int, group: Any) -> None:
        part = logits[:, :, 20 * rank : 20 * (rank + 1)].clone().requires_grad_()
        if how.startswith("te "):
            together = -te_parallel_cross_entropy(part * 1, labels, group)
        elif how in losses.LOSSES:
            together = -losses.LOSSES[how](part * 1, labels, group, None)
        else:
            chunk_size, one_hot = 3 if "chunks" in how else None, how == "one-hot chunks"
            together = losses.log_probabilities(part, labels, group, chunk_size, one_hot=one_hot)
        entropy = losses.entropy(part, group, 3 if how == "chunks" else None)
        of_ranks[rank] = together.detach(), entropy, *torch.autograd.grad(together, part, weights)

    with imitating(Versions(transformer_engine=how.removeprefix("te ")) if how.startswith("te ") else Versions()):
        on_ranks(2, job)
    for rank, (of_labels, entropy, gradient) in of_ranks.items():
        torch.testing.assert_close(of_labels, expected.detach())
        torch.testing.assert_close(entropy, distribution.entropy().detach())
        torch.testing.assert_close(gradient, whole.grad[:, :, 20 * rank : 20 * (rank + 1)])


def test_chunks_copy_less_of_the_logits_in_fp32() -> None:
    """All at once: the logits, what is shifted and its exponentials. In backward: all gradients, and four of a chunk."""
    copy, chunk = 4 * 4096 * 100_352, 4 * 1024 * 100_352
    by_chunk_size = {None: (3 * copy, 3 * copy), 1024: (copy + 4 * chunk, 3 * chunk)}
    with Lab("phi-4", num_layers=2, seq_length=4096, backend="simulated") as lab:
        default = lab.step()
        for chunk_size, (in_training, forward_only) in by_chunk_size.items():
            trained = lab.step(state=TrainingState(loss="logprobs", logprobs_chunk_size=chunk_size))
            assert trained.peak_by_module["loss"] == pytest.approx(in_training, rel=1e-3)
            assert lab.forward_only().peak_by_module["loss"] == pytest.approx(forward_only, rel=1e-3)
        assert lab.step(state=UNFUSED).peak_by_module == default.peak_by_module


def test_only_the_last_pipeline_stage_computes_the_loss() -> None:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    small = {"num_layers": 2, "seq_length": 64, "num_microbatches": 2, "backend": "simulated", "state": CHUNKED}
    for stage in range(2):
        with Lab("qwen3-moe-tiny", layout=Layout(rank=4 * stage, **sizes), **small) as lab:
            record = lab.step()
        assert record.status == "ok"
        assert record.timeline is not None
        allocates = {record.timeline.modules[code] for code in record.timeline.module}
        assert ("loss" in allocates) == (stage == 1)
        assert record.without_effect.keys() == (set() if stage else {"loss", "logprobs_chunk_size"})


def test_a_forward_only_pass_has_a_token_budget_of_its_own(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("phi-4-tiny", num_layers=1, seq_length=96, state=LOGPROBS)
    trained = lab.step()
    same, longer = lab.forward_only(), lab.forward_only(seq_length=192, micro_batch_size=2, num_microbatches=2)
    assert (longer.scenario.tokens_per_step, longer.scenario.state) == (8 * 96, LOGPROBS)
    assert longer.activation_peak_bytes > 3 * same.activation_peak_bytes
    assert lab.scenario == trained.scenario
    again = lab.step()
    assert (again.loss, again.activation_peak_bytes) == (trained.loss, trained.activation_peak_bytes)
    with pytest.raises(ValueError, match="seq_length is 0"):
        lab.forward_only(seq_length=0)


@pytest.mark.parametrize(
    ("state", "take", "option"),
    [
        (UNFUSED, Lab.forward_only, "cross_entropy_loss_fusion and cross_entropy_fusion_impl 'te'"),
        (LOGPROBS, Lab.step, "logprobs_chunk_size 1024"),
        (CHUNKED, Lab.forward_only, None),
    ],
    ids=["unfused", "logprobs", "chunks"],
)
def test_out_of_memory_in_the_loss_names_the_option_that_makes_it_smaller(
    state: TrainingState, take: Callable[[Lab], StepRecord], option: str | None
) -> None:
    with Lab("phi-4", num_layers=1, seq_length=4096, backend="simulated", state=state) as lab:
        lab.device_memory_bytes = take(lab).peak_allocated_bytes - 4096 * 100_352
        failed = take(lab).out_of_memory
    assert failed is not None
    if option is None:
        assert "logits" not in failed.advice
    else:
        assert failed.advice.endswith(f"The loss copies all logits in fp32; with {option} it does not")
