"""Measures on a GPU what the frameworks' own losses need per logit, and what memlab's losses need beside them.

    python benchmarks/losses_of_frameworks.py CHECKOUTS labs/results/h200_loss_bytes.jsonl

CHECKOUTS is a folder of clones, or of the files that `FILES` names: RL (NVIDIA-NeMo), SkyRL (NovaSky-AI), slime
(THUDM), ms-swift (modelscope), Model-Optimizer (NVIDIA) and verl (verl-project). A function is taken out of its file
with the names that it needs, so that nothing of a framework has to be installed. One process is the whole
tensor-parallel group.

Logits are bf16 [1, tokens, vocabulary] and count themselves. The caller keeps them, or their fp32 copy, until the loss
is there, as Megatron's schedules do; ``Float16Module``'s own function copies them. All numbers are bytes per logit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
import torch.distributed
import torch.distributed.nn
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import float16_to_fp32

from memlab.config.training_state import TrainingState
from memlab.engines.megatron.losses import LossFromLogits

SIZES = ((8192, 32_768), (4096, 75_968))
"""Tokens and vocabulary of one rank."""
CHUNK, SEQUENCES, TOPK = 1024, 4, 64
FILES = {
    "nemo_rl": "RL/nemo_rl/distributed/model_utils.py",
    "nemo_rl_loss": "RL/nemo_rl/algorithms/loss/utils.py",
    "nemo_rl_wrapper": "RL/nemo_rl/algorithms/loss/wrapper.py",
    "skyrl": "SkyRL/skyrl/backends/skyrl_train/distributed/megatron/model_utils.py",
    "slime": "slime/slime/utils/ppo_utils.py",
    "slime_loss": "slime/slime/backends/megatron_utils/loss.py",
    "swift": "ms-swift/swift/megatron/trainers/vocab_parallel_utils.py",
    "swift_gkd": "ms-swift/swift/rlhf_trainers/gkd_loss.py",
    "swift_gkd_ranks": "ms-swift/swift/megatron/trainers/gkd_utils.py",
    "modelopt": "Model-Optimizer/modelopt/torch/distill/plugins/megatron.py",
    "verl": "verl/verl/utils/megatron/tensor_parallel.py",
    "verl_engine": "verl/verl/workers/engine/megatron/transformer_impl.py",
}
Loss = Callable[[torch.Tensor], torch.Tensor]


class Logits(torch.autograd.Function):
    """Makes logits, as an output layer does, and takes their gradient without a tensor of their size."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns random logits of this shape."""
        return torch.empty(shape, dtype=torch.bfloat16, device=weight.device).normal_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Drops the gradient of the logits."""
        return gradient.new_zeros(1), None


class Data(dict[str, Any]):
    """What of NeMo-RL's BatchedDataDict its wrapper uses."""

    def slice(self, start: int, end: int) -> Data:
        """Returns these sequences."""
        return Data({name: value[start:end] for name, value in self.items()})


def taken(checkouts: Path, file: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs all functions and classes of a framework's file, without its imports, and returns its names.

    Methods of verl's engine become functions, since its classes need what is not installed.
    """
    tree = ast.parse((checkouts / FILES[file]).read_text())
    if file == "verl_engine":
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
        methods = (part for one in classes for part in one.body if isinstance(part, ast.FunctionDef))
        tree.body = [part for part in methods if part.name == "_lm_head_logits_processor"]
    else:
        tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    space = {"torch": torch, "dist": torch.distributed, "tensor_parallel": tensor_parallel, "mpu": parallel_state}
    space |= {"Any": Any, "math": __import__("math"), "partial": partial, "DTensor": torch.distributed.tensor.DTensor}
    space |= names
    for number, node in enumerate(tree.body):
        part = ast.Module([node], [])
        try:
            code = compile(part, f"{file}:{number}", "exec", flags=annotations.compiler_flag)
            exec(code, space)  # noqa: S102 - the frameworks' own code is what is measured
        except (NameError, AttributeError):
            print(f"{file}: {getattr(node, 'name', number)} needs what is not installed", file=sys.stderr)
    return space


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of a framework through its loss, and memlab's loss for it."""

    name: str
    theirs: Loss
    state: TrainingState
    trains: bool = True
    packed: bool = False
    several_ranks: bool = False
    """Whether their function goes the way of several tensor-parallel ranks; memlab's needs such a group for it."""
    teacher: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    """Logits that are there before the measurement, or the largest of them and their places."""
    has_bound: bool = False
    """Whether memlab only bounds what their function needs beyond the state's loss."""


def state_of(loss: str, *, fp32: bool = True, chunk: int | None = None) -> TrainingState:
    """Returns memlab's training state of a loss."""
    return TrainingState(loss=loss, fp32_output=fp32, logprobs_chunk_size=chunk)  # type: ignore[arg-type]


def cases(checkouts: Path, tokens: int, vocabulary: int, device: str) -> list[Case]:
    """Returns all cases, for a row of so many tokens."""
    ids = torch.randint(vocabulary, (1, tokens), device=device)
    return [
        *nemo_rl_cases(checkouts, ids, vocabulary),
        *skyrl_cases(checkouts, ids, vocabulary),
        *slime_cases(checkouts, ids),
        *swift_cases(checkouts, ids),
        *teacher_cases(checkouts, ids, vocabulary),
        *verl_cases(checkouts, ids),
        *cases_beside(checkouts, ids, vocabulary),
    ]


def nemo_rl_cases(checkouts: Path, ids: torch.Tensor, vocabulary: int) -> Iterator[Case]:
    """Yields the log-probabilities and the distillation of NeMo-RL, in a row of one sequence and of several."""
    group, device, tokens = parallel_state.get_tensor_model_parallel_group(), ids.device, ids.shape[1]
    space = taken(checkouts, "nemo_rl", {"need_top_k_or_top_p_filtering": lambda _: False, "nn": torch.nn})
    kinds = SimpleNamespace(LOGIT=0, LOGPROB=1, DISTILLATION=2)
    prepare = taken(checkouts, "nemo_rl_loss", space | {"LossInputType": kinds})["prepare_loss_input"]
    wrapper = taken(checkouts, "nemo_rl_wrapper", {})["SequencePackingLossWrapper"]
    places = {"vocab_parallel_rank": 0, "vocab_parallel_group": group, "context_parallel_group": None}

    def train(kind: int, chunk: int | None, rows: int, logits: torch.Tensor, divergence: str = "") -> torch.Tensor:
        class Sum:
            input_type, zero_outside_topk, kl_type = kind, bool(divergence), divergence

            def __call__(self, data: Data, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                student = given.get("next_token_logprobs", given.get("student_topk_logprobs"))
                assert student is not None
                entropy = given.get("H_all")
                return student.sum() if entropy is None else student.sum() + entropy.sum(), {}

        length = tokens // rows
        data = Data(input_ids=ids.view(rows, length))
        if kind == kinds.DISTILLATION:
            data["teacher_topk_indices"] = torch.randint(vocabulary, (rows, length, TOPK), device=device)
            data["teacher_topk_logits"] = torch.zeros(rows, length, TOPK, device=device)
        ends = torch.arange(rows + 1, device=device, dtype=torch.int32) * length
        compute = wrapper(Sum(), partial(prepare, chunk_size=chunk), ends, ends, **places)
        loss: torch.Tensor = compute(logits, data, None, None)[0]
        return loss

    def forward_only(chunk: int | None, logits: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(SEQUENCES + 1, device=device, dtype=torch.int32) * (tokens // SEQUENCES)
        loss: torch.Tensor = space["from_parallel_logits_to_logprobs_packed_sequences"](
            logits, ids, ends, tokens, 0, vocabulary, group, inference_only=True, chunk_size=chunk
        )
        return loss

    for chunk in (None, CHUNK):
        for fp32 in (True, False):
            name = f"nemo-rl {'whole' if chunk is None else 'chunks'} {'fp32' if fp32 else 'deferred'}"
            one, several = (
                state_of(loss, fp32=fp32, chunk=chunk) for loss in ("logprobs_one_hot", "logprobs_by_sequence")
            )
            of_labels = partial(train, kinds.LOGPROB, chunk)
            yield Case(name=f"{name} one sequence", theirs=partial(of_labels, 1), state=one)
            yield Case(name=f"{name} packed", theirs=partial(of_labels, SEQUENCES), state=several, packed=True)
            passed = partial(forward_only, chunk)
            yield Case(name=f"{name} forward only", theirs=passed, state=several, trains=False, packed=True)
    of_topk, topk = partial(train, kinds.DISTILLATION, None), state_of("topk_logits")
    yield Case(name="nemo-rl distillation one sequence", theirs=partial(of_topk, 1), state=topk)
    yield Case(name="nemo-rl distillation packed", theirs=partial(of_topk, SEQUENCES), state=topk, packed=True)
    for divergence in ("forward", "mixed"):
        outside = partial(of_topk, divergence=divergence)
        name = f"nemo-rl distillation zero_outside_topk {divergence}"
        yield Case(name=f"{name} one sequence", theirs=partial(outside, 1), state=topk, has_bound=True)
        yield Case(name=f"{name} packed", theirs=partial(outside, SEQUENCES), state=topk, packed=True, has_bound=True)


def skyrl_cases(checkouts: Path, ids: torch.Tensor, vocabulary: int) -> Iterator[Case]:
    """Yields SkyRL's log-probabilities of packed rows."""
    space = taken(checkouts, "skyrl", {"prod": prod})
    compute = space["from_parallel_logits_to_logprobs_packed_sequences"]
    group, tokens = parallel_state.get_tensor_model_parallel_group(), ids.shape[1]
    ends = torch.arange(SEQUENCES + 1, device=ids.device, dtype=torch.int32) * (tokens // SEQUENCES)
    for chunk in (None, CHUNK):
        for trains in (True, False):
            theirs = partial(
                compute, target=ids, cu_seqlens_padded=ends, unpacked_seqlen=tokens, vocab_start_index=0,
                vocab_end_index=vocabulary, group=group, inference_only=not trains, chunk_size=chunk,
            )  # fmt: skip
            name = f"skyrl {'whole' if chunk is None else 'chunks'}{'' if trains else ' forward only'}"
            state = state_of("logprobs", chunk=chunk)
            yield Case(name=name, theirs=theirs, state=state, trains=trains, packed=True)
            for entropy_chunk in (None, 0) if trains else ():
                both = partial(_with_entropy_of_skyrl, theirs, space["vocab_parallel_entropy"], entropy_chunk)
                full = f"{name} entropy loss {'whole' if entropy_chunk is None else 'chunks'}"
                yield Case(name=full, theirs=both, state=state, packed=True, has_bound=True)


def slime_cases(checkouts: Path, ids: torch.Tensor) -> Iterator[Case]:
    """Yields slime's log-probabilities with the entropy as a metric."""
    compute = taken(checkouts, "slime_loss", taken(checkouts, "slime", {}))["get_log_probs_and_entropy"]
    for temperature, loss in ((1.0, "softmax"), (0.8, "scaled_softmax")):
        for chunk in (None, CHUNK):
            for trains in (True, False):
                name = f"slime temperature {temperature} {'whole' if chunk is None else 'chunks'}"
                theirs = partial(_slime, compute, ids, temperature, chunk, 0.0)
                state = state_of(loss, chunk=chunk)
                full = name + " forward only" * (not trains)
                yield Case(name=full, theirs=theirs, state=state, trains=trains)
                if trains:
                    theirs = partial(_slime, compute, ids, temperature, chunk, 0.01)
                    yield Case(name=f"{name} entropy loss", theirs=theirs, state=replace(state, entropy_loss=True))


def swift_cases(checkouts: Path, ids: torch.Tensor) -> Iterator[Case]:
    """Yields the log-probabilities of ms-swift's GRPO, on one tensor-parallel rank and as on several."""
    ranks = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 2,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group,
    )
    for several, names in ((False, {}), (True, {"mpu": ranks})):
        compute = taken(checkouts, "swift", names)["compute_logps_and_entropy_from_logits"]
        for trains in (True, False):
            name = f"ms-swift grpo{', several tensor ranks' if several else ''}{'' if trains else ' forward only'}"
            theirs = partial(_swift, compute, ids)
            yield Case(name=name, theirs=theirs, state=state_of("log_softmax"), trains=trains, several_ranks=several)


def teacher_cases(checkouts: Path, ids: torch.Tensor, vocabulary: int) -> Iterator[Case]:
    """Yields the losses that compare with a teacher's logits, which are there before: Model Optimizer's and GKD's."""
    group, shape = parallel_state.get_tensor_model_parallel_group(), (1, ids.shape[1], vocabulary)
    teacher = torch.randn(shape, dtype=torch.bfloat16, device=ids.device)
    names = {"nn": torch.nn, "F": torch.nn.functional, "_Loss": torch.nn.Module, "Tensor": torch.Tensor,
             "ABCMeta": type, "parallel_state": parallel_state, "dist_nn": torch.distributed.nn}  # fmt: skip
    compute = taken(checkouts, "modelopt", names)["LogitsKLLoss"]
    for ranks in (1, 2):
        config = SimpleNamespace(tensor_model_parallel_size=ranks)
        theirs = partial(_modelopt, compute(config), teacher)
        name = "modelopt logits kl" + ", several tensor ranks" * (ranks > 1)
        state = TrainingState(loss="logits_kl", reference_model="copy")
        yield Case(name=name, theirs=theirs, state=state, teacher=teacher, several_ranks=ranks > 1)
    names = {"F": torch.nn.functional, "dataclass": dataclass, "Enum": Enum, "Optional": Optional, "Tuple": tuple,
             "Callable": Callable}  # fmt: skip
    gkd = taken(checkouts, "swift_gkd", names)
    several = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 2, get_tensor_model_parallel_group=lambda: group
    )
    of_ranks = taken(checkouts, "swift", {"mpu": several})
    state = TrainingState(loss="jsd", reference_model="copy", fp32_output=True)
    for ranks in (1, 2):
        functions = {} if ranks == 1 else {
            "log_softmax_fn": of_ranks["vocab_parallel_log_softmax"], "kl_div_fn": of_ranks["vocab_parallel_kl_div"]
        }  # fmt: skip
        theirs = partial(_gkd, gkd, ids, teacher, functions)
        name = "ms-swift gkd" + ", several tensor ranks" * (ranks > 1)
        yield Case(name=name, theirs=theirs, state=state, teacher=teacher, several_ranks=ranks > 1)
    largest = torch.topk(teacher, TOPK, dim=-1)
    several.get_tensor_model_parallel_rank = lambda: 0
    gather = taken(checkouts, "swift_gkd_ranks", {"mpu": several})["tp_gather_topk"]
    for ranks in (1, 2):
        theirs = partial(_gkd, gkd, ids, tuple(largest), {} if ranks == 1 else {"gather_fn": gather})
        yield Case(
            name="ms-swift gkd top-k" + ", several tensor ranks" * (ranks > 1),
            theirs=theirs,
            state=replace(state, gkd_logits_topk=TOPK),
            teacher=tuple(largest),
            several_ranks=ranks > 1,
        )


def cases_beside(checkouts: Path, ids: torch.Tensor, vocabulary: int) -> Iterator[Case]:
    """Yields losses of a teacher's logits beside the cross entropy, and Model Optimizer's of the largest logits.

    The cross entropy is that of Megatron-Core's language models, which both frameworks call.
    """
    shape = (1, ids.shape[1], vocabulary)
    teacher = torch.randn(shape, dtype=torch.bfloat16, device=ids.device)
    of_labels = partial(_cross_entropy, ids)
    names = {"nn": torch.nn, "F": torch.nn.functional, "_Loss": torch.nn.Module, "Tensor": torch.Tensor,
             "ABCMeta": type, "parallel_state": parallel_state, "dist_nn": torch.distributed.nn}  # fmt: skip
    space = taken(checkouts, "modelopt", names)
    config = SimpleNamespace(tensor_model_parallel_size=1)
    whole, largest = space["LogitsKLLoss"](config), space["TopKLogitsKLLoss"](config, top_k=512)
    kl = TrainingState(loss="logits_kl", reference_model="copy")
    for name, compute, state in (
        ("modelopt logits kl", whole, kl),
        ("modelopt largest logits kl", largest, replace(kl, logit_kl_topk=512)),
    ):
        for beside in (False, True):
            if compute is whole and not beside:
                continue  # `teacher_cases` has it
            alone = partial(_modelopt, compute, teacher)
            yield Case(
                name=name + ", beside cross entropy" * beside,
                theirs=partial(_sum_of, of_labels, alone) if beside else alone,
                state=replace(state, lm_loss_beside=beside),
                teacher=teacher,
            )
    gkd = taken(checkouts, "swift_gkd", {"F": torch.nn.functional, "dataclass": dataclass, "Enum": Enum,
                                         "Optional": Optional, "Tuple": tuple, "Callable": Callable})  # fmt: skip
    state = TrainingState(loss="jsd", reference_model="copy", fp32_output=True, lm_loss_beside=True)
    few = tuple(torch.topk(teacher, TOPK, dim=-1))
    for name, given, of_case in (("", teacher, state), (" top-k", few, replace(state, gkd_logits_topk=TOPK))):
        alone = partial(_gkd, gkd, ids, given, {})
        theirs = partial(_sum_of, alone, of_labels)
        yield Case(name=f"ms-swift gkd{name}, beside cross entropy", theirs=theirs, state=of_case, teacher=given)


def _cross_entropy(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    model = SimpleNamespace(config=SimpleNamespace(cross_entropy_loss_fusion=False), pg_collection=None)
    loss: torch.Tensor = LanguageModule.compute_language_model_loss(model, ids, logits.transpose(0, 1).contiguous())
    return loss


def _sum_of(first: Loss, second: Loss, logits: torch.Tensor) -> torch.Tensor:
    # Their values are added as the frameworks' loss functions add them: after both are there.
    one, other = first(logits), second(logits)
    return one.sum() + 0.1 * other.sum()


def _with_entropy_of_skyrl(of_labels: Loss, entropy: Any, chunk: int | None, logits: torch.Tensor) -> torch.Tensor:
    log_probs = of_labels(logits)
    return log_probs.sum() - 0.01 * entropy(logits, chunk_size=chunk).sum()


def _modelopt(compute: Any, teacher: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    of_tokens: torch.Tensor = compute(logits, teacher)[0]
    return of_tokens


def _gkd(
    space: dict[str, Any], ids: torch.Tensor, teacher: Any, functions: dict[str, Any], logits: torch.Tensor
) -> torch.Tensor:
    names = ("topk_logprobs", "topk_indices") if isinstance(teacher, tuple) else ("full_logits",)
    given = dict(zip(names, teacher if isinstance(teacher, tuple) else (teacher,), strict=True))
    output = space["TeacherOutput"](**given, labels=ids)
    total: torch.Tensor = space["gkd_loss"](logits, output, ids, 0.5, 0.9, **functions)[0]
    return total


def verl_cases(checkouts: Path, ids: torch.Tensor) -> Iterator[Case]:
    """Yields verl's log-probabilities, which have the entropy beside them where nothing is trained."""
    names = taken(checkouts, "verl", {}) | {"Callable": Callable}
    compute = taken(checkouts, "verl_engine", names)["_lm_head_logits_processor"]
    for trains in (True, False):
        theirs = partial(_verl, compute, ids, with_entropy=not trains)
        state = state_of("vocab_parallel_cross_entropy")
        yield Case(name=f"verl{'' if trains else ' forward only'}", theirs=theirs, state=state, trains=trains)
    theirs = partial(_verl, compute, ids, with_entropy=True)
    yield Case(name="verl entropy loss", theirs=theirs, state=replace(state, entropy_loss=True))


def _slime(
    compute: Any, ids: torch.Tensor, temperature: float, chunk: int | None, coefficient: float, logits: torch.Tensor
) -> torch.Tensor:
    args = Namespace(
        rollout_temperature=temperature, log_probs_chunk_size=chunk or -1, entropy_coef=coefficient, allgather_cp=False,
        qkv_format="thd",
    )  # fmt: skip
    length = ids.shape[1]
    result = compute(
        logits, args=args, unconcat_tokens=[ids[0]], total_lengths=[length], response_lengths=[length - 1],
        with_entropy=True,
    )  # fmt: skip
    log_probs = torch.cat(result[1]["log_probs"])
    return log_probs + coefficient * torch.cat(result[1]["entropy"]) if coefficient else log_probs


def _swift(compute: Any, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    logits.div_(0.9)
    of_labels: torch.Tensor = compute(logits, ids)[0]
    return of_labels


def _verl(compute: Any, ids: torch.Tensor, logits: torch.Tensor, *, with_entropy: bool) -> torch.Tensor:
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    temperature = torch.ones(ids.shape, device=logits.device)
    result = compute(
        engine, logits, ids, temperature, calculate_sum_pi_squared=False, calculate_entropy=with_entropy,
        distillation_use_topk=False, distillation_only=False, logits_processor_func=None, batch=None,
        data_format="thd",
    )  # fmt: skip
    of_labels: torch.Tensor = result["log_probs"]
    is_in_loss = with_entropy and torch.is_grad_enabled()
    return of_labels + 0.01 * result["entropy"] if is_in_loss else of_labels


def _memlab(labels: torch.Tensor, state: TrainingState, given: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    compute = partial(LossFromLogits(), logits, labels, state, **given)
    if not state.lm_loss_beside:
        return compute()
    of_labels = partial(_cross_entropy, labels)
    first, second = (of_labels, lambda _: compute()) if state.loss == "logits_kl" else (lambda _: compute(), of_labels)
    return _sum_of(first, second, logits)


def measured(tokens: int, vocabulary: int, case: Case, loss: Loss) -> dict[str, float]:
    """Returns bytes per logit: at the peak of forward, held between forward and backward, at the peak of backward."""
    weight = torch.zeros(1, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    def since() -> float:
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        return round(peak / tokens / vocabulary, 3)

    def forward() -> torch.Tensor:
        logits = Logits.apply(weight, (1, tokens, vocabulary))
        logits = float16_to_fp32(logits) if case.state.fp32_output else logits
        return loss(logits).sum()

    torch.cuda.reset_peak_memory_stats()
    with nullcontext() if case.trains else torch.no_grad():
        result = forward()
    found = {"forward": since()}
    if case.trains:
        found["held"] = round((torch.cuda.memory_allocated() - before) / tokens / vocabulary, 3)
        result.backward()
        found["backward"] = since()
    return found


def main() -> None:
    """Measures all cases and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a case's name has (default: all)")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()
    rows: list[dict[str, Any]] = []
    for tokens, vocabulary in SIZES:
        lengths = (tokens // SEQUENCES,) * SEQUENCES
        for case in cases(options.checkouts, tokens, vocabulary, "cuda"):
            if not any(word in case.name for word in options.only):
                continue
            row: dict[str, Any] = {
                "case": case.name, "tokens": tokens, "vocabulary": vocabulary, "state": case.state.changed(),
                "sequences": SEQUENCES if case.packed else None, "trains": case.trains,
                "several_ranks": case.several_ranks, "has_bound": case.has_bound,
            }  # fmt: skip
            labels = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
            given = {"lengths": lengths if case.packed else None, "teacher": case.teacher}
            ours = partial(_memlab, labels, case.state, given)
            is_compared = not (case.several_ranks or case.has_bound)
            row["framework"] = measured(tokens, vocabulary, case, case.theirs)
            row["memlab"] = measured(tokens, vocabulary, case, ours) if is_compared else None
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    options.out.write_text("".join(json.dumps(row) + "\n" for row in (versions, *rows)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
