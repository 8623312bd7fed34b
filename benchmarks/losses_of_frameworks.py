"""Measures on a GPU what the frameworks' own losses need per logit, and what memlab's losses need beside them.

    python benchmarks/losses_of_frameworks.py CHECKOUTS labs/results/h200_loss_bytes.jsonl

CHECKOUTS is a folder of clones, or of the files that `FILES` names: RL (NVIDIA-NeMo), SkyRL (NovaSky-AI), slime
(THUDM), ms-swift (modelscope) and verl (verl-project). A function is taken out of its file with the names that it
needs, so that nothing of a framework has to be installed. One process is the whole tensor-parallel group.

Logits are bf16 [1, tokens, vocabulary] and count themselves. The caller keeps them, or their fp32 copy, until the loss
is there, as Megatron's schedules do; ``Float16Module``'s own function copies them. All numbers are bytes per logit.
"""

from __future__ import annotations

import __future__

import argparse
import ast
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.nn
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import float16_to_fp32

from memlab.config.training_state import TrainingState
from memlab.model.losses import LossFromLogits

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
    "verl": "verl/verl/utils/megatron/tensor_parallel.py",
    "verl_engine": "verl/verl/workers/engine/megatron/transformer_impl.py",
}
Loss = Callable[[torch.Tensor], torch.Tensor]


class Logits(torch.autograd.Function):
    """Makes logits, as an output layer does, and takes their gradient without a tensor of their size."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=weight.device).normal_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_zeros(1), None


class Data(dict[str, Any]):
    """What of NeMo-RL's BatchedDataDict its wrapper uses."""

    def slice(self, start: int, end: int) -> Data:
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
            code = compile(part, f"{file}:{number}", "exec", flags=__future__.annotations.compiler_flag)
            exec(code, space)  # noqa: S102 - the frameworks' own code is what is measured
        except (NameError, AttributeError):
            print(f"{file}: {getattr(node, 'name', number)} needs what is not installed", file=sys.stderr)
    return space


def cases(checkouts: Path, tokens: int, vocabulary: int, device: str) -> dict[str, tuple[bool, bool, Loss, Any]]:
    """Returns for each case: whether logits are copied to fp32 and whether there is a backward, and both losses."""
    group = parallel_state.get_tensor_model_parallel_group()
    ids = torch.randint(vocabulary, (1, tokens), device=device)
    ends = torch.arange(SEQUENCES + 1, device=device, dtype=torch.int32) * (tokens // SEQUENCES)
    one_row = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    lengths = (tokens // SEQUENCES,) * SEQUENCES
    found: dict[str, tuple[bool, bool, Loss, Any]] = {}

    def ours(loss: str, *, packed: bool = False, chunk: int | None = None, fp32: bool = True) -> Loss:
        state = TrainingState(loss=loss, logprobs_chunk_size=chunk, fp32_output=fp32)  # type: ignore[arg-type]
        compute = LossFromLogits()
        return lambda logits: compute(logits, ids, state, lengths if packed else None)

    nemo = taken(checkouts, "nemo_rl", {"need_top_k_or_top_p_filtering": lambda _: False, "nn": torch.nn})
    kinds = SimpleNamespace(LOGIT=0, LOGPROB=1, DISTILLATION=2)
    prepare = taken(checkouts, "nemo_rl_loss", nemo | {"LossInputType": kinds})
    wrapper = taken(checkouts, "nemo_rl_wrapper", {})["SequencePackingLossWrapper"]
    places = {"vocab_parallel_rank": 0, "vocab_parallel_group": group, "context_parallel_group": None}

    def nemo_rl(kind: int, logits: torch.Tensor, chunk: int | None, ends: torch.Tensor) -> torch.Tensor:
        class Sum:
            input_type, zero_outside_topk, kl_type = kind, False, "forward"

            def __call__(self, data: Data, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                student = given.get("next_token_logprobs", given.get("student_topk_logprobs"))
                assert student is not None
                return student.sum(), {}

        rows, length = len(ends) - 1, tokens // (len(ends) - 1)
        data = Data(input_ids=ids.view(rows, length))
        if kind == kinds.DISTILLATION:
            data["teacher_topk_indices"] = torch.randint(vocabulary, (rows, length, TOPK), device=device)
            data["teacher_topk_logits"] = torch.zeros(rows, length, TOPK, device=device)
        prepared = partial(prepare["prepare_loss_input"], chunk_size=chunk)
        loss: torch.Tensor = wrapper(Sum(), prepared, ends, ends, **places)(logits, data, None, None)[0]
        return loss

    def nemo_rl_pass(logits: torch.Tensor, chunk: int | None) -> torch.Tensor:
        loss: torch.Tensor = nemo["from_parallel_logits_to_logprobs_packed_sequences"](
            logits, ids, ends, tokens, 0, vocabulary, group, inference_only=True, chunk_size=chunk
        )
        return loss

    for chunk in (None, CHUNK):
        for fp32 in (True, False):
            name = f"nemo-rl {'whole' if chunk is None else 'chunks'} {'fp32' if fp32 else 'deferred'}"
            both = partial(nemo_rl, kinds.LOGPROB, chunk=chunk)
            by_sequence = ours("logprobs_by_sequence", packed=True, chunk=chunk, fp32=fp32)
            found[f"{name} one sequence"] = (
                fp32, True, partial(both, ends=one_row), ours("logprobs_one_hot", chunk=chunk, fp32=fp32),
            )  # fmt: skip
            found[f"{name} packed"] = fp32, True, partial(both, ends=ends), by_sequence
            found[f"{name} forward only"] = fp32, False, partial(nemo_rl_pass, chunk=chunk), by_sequence
    for name, of_row, packed in (("one sequence", one_row, False), ("packed", ends, True)):
        of_topk = partial(nemo_rl, kinds.DISTILLATION, chunk=None, ends=of_row)
        found[f"nemo-rl distillation {name}"] = True, True, of_topk, ours("topk_logits", packed=packed)

    skyrl = taken(checkouts, "skyrl", {})["from_parallel_logits_to_logprobs_packed_sequences"]
    for chunk in (None, CHUNK):
        for trains in (True, False):
            of_row = partial(
                skyrl, target=ids, cu_seqlens_padded=ends, unpacked_seqlen=tokens, vocab_start_index=0,
                vocab_end_index=vocabulary, group=group, inference_only=not trains, chunk_size=chunk,
            )  # fmt: skip
            name = f"skyrl {'whole' if chunk is None else 'chunks'}{'' if trains else ' forward only'}"
            found[name] = True, trains, of_row, ours("logprobs", packed=True, chunk=chunk)

    slime = taken(checkouts, "slime", {})
    slime_loss = taken(checkouts, "slime_loss", slime)["get_log_probs_and_entropy"]
    for temperature, loss in ((1.0, "softmax"), (0.8, "scaled_softmax")):
        for chunk in (None, CHUNK):
            of_slime = partial(_slime, slime_loss, ids, temperature, chunk)
            name = f"slime temperature {temperature} {'whole' if chunk is None else 'chunks'}"
            found[name] = True, True, of_slime, ours(loss, chunk=chunk)
            found[f"{name} forward only"] = True, False, of_slime, ours(loss, chunk=chunk)

    swift = taken(checkouts, "swift", {})["compute_logps_and_entropy_from_logits"]
    ranks = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 2,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_group=lambda: group,
    )
    of_ranks = taken(checkouts, "swift", {"mpu": ranks})["compute_logps_and_entropy_from_logits"]
    for trains in (True, False):
        end = "" if trains else " forward only"
        found[f"ms-swift grpo{end}"] = True, trains, partial(_swift, swift, ids), ours("log_softmax")
        # One process goes the way of several; memlab's loss needs a group of several for it.
        found[f"ms-swift grpo, several tensor ranks{end}"] = True, trains, partial(_swift, of_ranks, ids), None

    verl = taken(checkouts, "verl_engine", taken(checkouts, "verl", {}) | {"Callable": Callable})
    for trains in (True, False):
        name = f"verl{'' if trains else ' forward only'}"
        of_verl = partial(_verl, verl["_lm_head_logits_processor"], ids, with_entropy=not trains)
        found[name] = True, trains, of_verl, ours("vocab_parallel_cross_entropy")
    return found


def _slime(
    compute: Any, ids: torch.Tensor, temperature: float, chunk: int | None, logits: torch.Tensor
) -> torch.Tensor:
    args = Namespace(
        rollout_temperature=temperature, log_probs_chunk_size=chunk or -1, entropy_coef=0.0, allgather_cp=False,
        qkv_format="thd",
    )  # fmt: skip
    length = ids.shape[1]
    result = compute(
        logits, args=args, unconcat_tokens=[ids[0]], total_lengths=[length], response_lengths=[length - 1],
        with_entropy=True,
    )  # fmt: skip
    return torch.cat(result[1]["log_probs"])


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
    return of_labels


def measured(tokens: int, vocabulary: int, *, fp32: bool, trains: bool, loss: Loss) -> dict[str, float]:
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
        logits = float16_to_fp32(logits) if fp32 else logits
        return loss(logits).sum()

    torch.cuda.reset_peak_memory_stats()
    with nullcontext() if trains else torch.no_grad():
        result = forward()
    found = {"forward": since()}
    if trains:
        found["held"] = round((torch.cuda.memory_allocated() - before) / tokens / vocabulary, 3)
        result.backward()
        found["backward"] = since()
    return found


def main() -> None:
    """Measures all cases and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()
    rows: list[dict[str, Any]] = []
    for tokens, vocabulary in SIZES:
        for name, (fp32, trains, theirs, ours) in cases(options.checkouts, tokens, vocabulary, "cuda").items():
            row: dict[str, Any] = {"case": name, "tokens": tokens, "vocabulary": vocabulary}
            for whose, loss in (("framework", theirs), ("memlab", ours)):
                if loss is None:
                    continue
                try:
                    row[whose] = measured(tokens, vocabulary, fp32=fp32, trains=trains, loss=loss)
                except Exception as error:  # noqa: BLE001 - the other cases are still to be measured
                    row[whose] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    options.out.write_text("".join(json.dumps(row) + "\n" for row in (versions, *rows)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
