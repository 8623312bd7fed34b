"""Each loss needs the bytes that the framework's own function needed on an H200."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.config.architectures import find_architecture
from memlab.config.scenario import Scenario
from memlab.config.training_state import COMPARE_WITH_TEACHER, Loss, TrainingState
from memlab.engines.megatron.losses import BY_SEQUENCE, LOSSES, LossFromLogits
from memlab.jobs.bounds import BOUNDS
from memlab.lab.lab import Lab
from tests.unit.measured import measured_rows
from tests.unit.ranks import on_ranks

ROOT = Path(__file__).parents[2]
ROWS = measured_rows("h200_loss_bytes")[1:]
TOKENS, VOCABULARY = 64, 2048


class Logits(torch.autograd.Function):
    """Makes logits, and takes their gradient without a tensor of their size."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_zeros(1), None


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return result

    def free(self, address: int, num_bytes: int) -> None:
        self.alive.discard(address)
        self.now -= num_bytes

    def peak_since(self) -> int:
        peak, self.peak = self.peak, self.now
        return peak


def bytes_of_logit(
    compute: Callable[..., torch.Tensor],
    *,
    fp32: bool,
    trains: bool,
    shape: tuple[int, ...] = (1, TOKENS, VOCABULARY),
    there: torch.Tensor | None = None,
) -> dict[str, float]:
    """Returns what a loss needs of its caller's logits: a peak in forward, and in backward what it kept and a peak."""
    weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        logits = Logits.apply(weight, shape)
        logits = logits.float() if fp32 else logits
        return compute(logits).sum()

    with Storages() as storages, torch.set_grad_enabled(trains):
        if there is not None:  # a view of it is nothing new
            storages.alive.add(there.untyped_storage()._cdata)
        loss = forward()
        found = {"forward": storages.peak_since()}
        if trains:
            found["held"] = storages.now
            loss.backward()
            found["backward"] = storages.peak_since()
    return {name: num_bytes / prod(shape) for name, num_bytes in found.items()}


BESIDE = measured_rows("h200_teacher_loss_bytes")[1:]


def test_a_teacher_s_loss_needed_on_an_h200_what_memlab_s_does_beside_the_cross_entropy_too() -> None:
    rows = [row for row in BESIDE if not row["has_bound"]]
    assert len(rows) == 10
    for row in rows:
        assert row["memlab"] == pytest.approx(row["framework"], abs=0.0011), row["case"]


def test_what_nemo_rl_s_loss_needed_beyond_memlab_s_is_within_its_bound() -> None:
    key, words = "zero_outside_topk", r" zero_outside_topk \w+"
    without = {(row["case"], row["tokens"]): row["framework"] for row in ROWS}
    rows = [row for row in BESIDE if re.search(words, row["case"])]
    assert len(rows) == 8
    shares = []
    for row in rows:
        model = replace(find_architecture("llama-3-tiny"), vocab_size=row["vocabulary"])
        scenario = Scenario.of(model, seq_length=row["tokens"], state=TrainingState(**row["state"]))
        alone = without[re.sub(words, "", row["case"]), row["tokens"]]
        more = max(row["framework"][phase] - alone[phase] for phase in ("forward", "held", "backward"))
        bound = BOUNDS[key](scenario)
        assert bound is not None
        shares.append(more * row["tokens"] * row["vocabulary"] / bound)
    assert 0.9 < max(shares) <= 1


def test_every_loss_needs_what_the_framework_s_own_needed_on_an_h200(open_lab: Callable[..., Lab]) -> None:
    labels = torch.zeros(1, TOKENS, dtype=torch.int64)
    open_lab("phi-4-tiny", num_layers=1, seq_length=96)  # makes Megatron's groups
    seen = set()
    for row in ROWS:
        if row["several_ranks"] or row["state"]["loss"] in COMPARE_WITH_TEACHER:
            continue
        values = dict(row["state"])
        if "logprobs_chunk_size" in values:
            values["logprobs_chunk_size"] = TOKENS * values["logprobs_chunk_size"] // row["tokens"]
        state, sequences = TrainingState(**values), row["sequences"]
        lengths = sequences and (TOKENS // sequences,) * sequences
        compute = partial(LossFromLogits(), labels=labels, state=state, lengths=lengths)
        found = bytes_of_logit(compute, fp32=state.fp32_output, trains=row["trains"])
        # Labels, sums of tokens and the chosen logits are small beside the logits only where the vocabulary is large.
        allowed = 0.45 if state.loss == "topk_logits" else 0.13
        assert found == pytest.approx(row["framework"], abs=allowed), (row["case"], found, row["framework"])
        seen.add(state.loss)
    # tests/unit/test_teacher.py has those that compare with a teacher.
    assert seen | set(COMPARE_WITH_TEACHER) == LOSSES.keys() == set(get_args(Loss)) - {"cross_entropy"}


def test_an_entropy_in_the_loss_of_skyrl_needs_what_its_own_needed_on_an_h200(
    open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_lab("phi-4-tiny", num_layers=1, seq_length=96)  # makes Megatron's groups
    rows = [row for row in BESIDE if "entropy loss" in row["case"]]
    assert len(rows) == 8
    for row in rows:
        in_one = 1024 if row["vocabulary"] == 32_768 else 256  # tokens, for which 512 MiB have room
        chunk = TOKENS * in_one // row["tokens"] if row["case"].endswith("chunks") else TOKENS
        monkeypatch.setattr("memlab.engines.megatron.losses._BYTES_OF_ENTROPY", 4 * 4 * VOCABULARY * chunk)
        values = {"entropy_loss": True} | row["state"]
        if "logprobs_chunk_size" in values:
            values["logprobs_chunk_size"] = TOKENS * values["logprobs_chunk_size"] // row["tokens"]
        labels = torch.zeros(1, TOKENS, dtype=torch.int64)
        compute = partial(LossFromLogits(), labels=labels, state=TrainingState(**values))
        found = bytes_of_logit(compute, fp32=True, trains=True)
        assert found == pytest.approx(row["framework"], abs=0.13), (row["case"], found, row["framework"])


@pytest.mark.parametrize(("chunk", "forward"), [(None, 12.006), (TOKENS // 4, 9.004), (TOKENS // 2, 10.005)])
def test_the_entropy_of_a_pass_needs_what_a_chunk_of_verl_s_does(
    chunk: int | None, forward: float, open_lab: Callable[..., Lab]
) -> None:
    """As torch's profiler counted verl's ``_lm_head_logits_processor`` (1dda039b) on the CPU, torch 2.13."""
    open_lab("phi-4-tiny", num_layers=1, seq_length=96)
    state = TrainingState(loss="vocab_parallel_cross_entropy", fp32_output=True, entropy_chunk_size=chunk)
    compute = partial(LossFromLogits(), labels=torch.zeros(1, TOKENS, dtype=torch.int64), state=state)
    found = bytes_of_logit(compute, fp32=True, trains=False)
    assert found == pytest.approx({"forward": forward}, abs=0.13)


def test_a_log_softmax_of_several_tensor_ranks_needs_what_ms_swift_s_did() -> None:
    labels = torch.zeros(1, TOKENS, dtype=torch.int64)
    rows = [row for row in ROWS if row["several_ranks"] and row["state"]["loss"] == "log_softmax"]
    assert [row["trains"] for row in rows] == [True, False, True, False]
    for row in rows:
        of_ranks: list[dict[str, float]] = []

        def job(_: int, group: Any, row: dict[str, Any] = row, found: list[Any] = of_ranks) -> None:
            compute = partial(LOSSES["log_softmax"], labels=labels, group=group, chunk_size=None)
            found.append(bytes_of_logit(compute, fp32=True, trains=row["trains"]))

        on_ranks(2, job)
        for found in of_ranks:
            assert found == pytest.approx(row["framework"], abs=0.1)


def test_a_step_computes_one_packed_sequence_after_the_other() -> None:
    """Of four sequences: their softmax, the gradients of all logits twice, and that of one sequence."""
    logits = 4096 * 100_352
    of_loss = {}
    for loss in ("logprobs_one_hot", "logprobs_by_sequence"):
        state = TrainingState(loss=loss, fp32_output=True)  # type: ignore[arg-type]
        with Lab("phi-4", num_layers=1, seq_length=4096, packed_sequences=4, backend="simulated", state=state) as lab:
            record = lab.step()
            assert record.timeline is not None
            of_loss[loss] = record.peak_by_module["loss"] / logits, record.peak_phase
            assert lab.forward_only().peak_by_module["fp32_output"] == 4 * logits
    assert BY_SEQUENCE[0] in of_loss
    assert of_loss["logprobs_one_hot"] == (pytest.approx(8, rel=1e-3), "forward")
    assert of_loss["logprobs_by_sequence"] == (pytest.approx(11, rel=1e-3), "backward")
