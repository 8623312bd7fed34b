"""The passes of NeMo-RL's teacher in plain Megatron-Core, measured on a GPU; and how near memlab's predictions come.

    python -m benchmarks.megatron_teacher measure FOLDER                  a machine with a GPU; without: a rehearsal
    python -m benchmarks.megatron_teacher predict FOLDER/passes.jsonl     anywhere; without a file: only the predictions

Written after ``get_topk_logits``, ``TopkLogitsPostProcessor``, ``distributed_vocab_topk`` and ``move_model`` of NeMo-RL
(7ea279ab): a model in 16 bits without DDP comes from the host, runs all micro-batches of a step without gradients,
keeps of each token the k largest logits until the last has ended, and leaves. Measuring imports nothing of memlab.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.megatron_jobs import EMBEDDINGS, Job
from benchmarks.plain_megatron import ENVIRONMENT, figures

SECONDS, STEPS = 60, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A teacher and its passes."""

    model: str
    num_layers: int
    num_microbatches: int = 4
    seq_length: int = 4096
    sequences: int | None = None
    """Of a packed row; None takes rows of one sequence."""
    rows: int = 1
    k: int = 64
    fp32: bool = True
    """Whether the model returns its logits in fp32."""
    chunk: int | None = None

    @property
    def name(self) -> str:
        """All that distinguishes it."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    def job(self, *, tiny: bool) -> Job:
        """Returns the model as a job of one rank."""
        own = Job(
            model=self.model,
            num_layers=self.num_layers,
            layout="one rank",
            num_microbatches=self.num_microbatches,
            vocab_size=EMBEDDINGS[self.model]["vocab_size"],
            seq_length=self.seq_length,
        )
        return own.tiny() if tiny else own


CASES = (
    Case(model="llama-3.1-8b", num_layers=4),
    Case(model="llama-3.1-8b", num_layers=4, fp32=False),
    Case(model="llama-3.1-8b", num_layers=4, fp32=False, chunk=1024),
    Case(model="qwen3-4b", num_layers=12, sequences=4, seq_length=8192),
    Case(model="llama-3.2-1b", num_layers=16, num_microbatches=16, k=1024, fp32=False),
    Case(model="qwen3-8b", num_layers=8, seq_length=8192, num_microbatches=2),
    Case(model="qwen2.5-7b", num_layers=6, rows=2, num_microbatches=3, k=128),
    Case(model="llama-3.2-1b", num_layers=4, num_microbatches=40, k=512, fp32=False, chunk=512, sequences=2),
    Case(model="phi-4", num_layers=6, num_microbatches=6, k=256),
    Case(model="phi-4-mini", num_layers=8, num_microbatches=10, seq_length=8192, sequences=2, fp32=False, chunk=2048),
    Case(model="qwen3-8b", num_layers=4, num_microbatches=20, k=2048, fp32=False),
)


def run(case: Case, result: Path) -> None:
    """Measures a case in a process of its own, and writes a line."""
    import torch
    from megatron.core.transformer.module import Float16Module

    from benchmarks import megatron_rank as of_rank

    on_gpu = torch.cuda.is_available()
    job = case.job(tiny=not on_gpu)
    row = {"name": case.name, "steps": list[dict[str, int]](), **asdict(case)}
    with tempfile.TemporaryDirectory() as folder, of_rank.on_device(0):
        store = torch.distributed.FileStore(str(Path(folder) / "store"), -1)  # type: ignore[attr-defined]
        of_rank.join(store, 0, 1, job)
        of_rank.model_parallel_cuda_manual_seed(of_rank.SEED, force_reset_rng=True)  # type: ignore[attr-defined]
        config = of_rank.transformer_config(job)
        model = Float16Module(config, of_rank.gpt_model(job, config).cuda()).requires_grad_(False).eval()
        row["steps"] = [take_passes(case, job, model, on_gpu=on_gpu) for _ in range(STEPS)]
        row["environment"] = of_rank.environment()
        torch.distributed.destroy_process_group()
    with result.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def take_passes(case: Case, job: Job, model: Any, *, on_gpu: bool) -> dict[str, int]:
    """Moves the weights to the host and back, and takes all passes of a step; returns what was held."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from benchmarks import megatron_rank as of_rank

    if on_gpu:
        model.to("cpu", non_blocking=True)
        gc.collect()
        torch.cuda.empty_cache()
    step = {"left_bytes": of_rank.allocated_bytes()}
    if on_gpu:
        model.to("cuda", non_blocking=True)
    of_rank.synchronize()
    step["start_bytes"] = of_rank.allocated_bytes()
    of_rank.reset_peak()
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=partial(forward, case, job),
            data_iterator=batches(case, job),
            model=model,
            num_microbatches=job.num_microbatches,
            seq_length=job.seq_length,
            micro_batch_size=case.rows,
            forward_only=True,
        )
        step["passes_peak_bytes"] = of_rank.peak_bytes()
        sent = [torch.cat([each[name] for each in found], dim=0) for name in ("values", "places")]
    del found
    of_rank.synchronize()
    step |= {"peak_bytes": of_rank.peak_bytes(), "peak_reserved_bytes": of_rank.peak_reserved_bytes()}
    step["sent_bytes"] = sum(each.numel() * each.element_size() for each in (one.cpu() for one in sent))
    del sent
    step["outside_torch_bytes"] = of_rank.outside_torch_bytes()
    return step


def batches(case: Case, job: Job) -> Iterator[Any]:
    """Yields the tokens of a step's micro-batches, on the host."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(job.num_microbatches):
        yield torch.randint(job.vocab_size, (case.rows, job.seq_length), generator=generator)


def forward(case: Case, job: Job, data: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """Runs one micro-batch, whose logits are then searched."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, packed = next(data).cuda(), {}
    length = job.seq_length // (case.sequences or 1)
    if case.sequences:
        ends = torch.arange(0, job.seq_length + 1, length, dtype=torch.int32).cuda()
        names = ("cu_seqlens_q", "cu_seqlens_kv")
        packed["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", max_seqlen_q=length, max_seqlen_kv=length, **dict.fromkeys(names, ends)
        )
    positions = torch.arange(length).repeat(job.seq_length // length).unsqueeze(0).expand_as(tokens).cuda()
    logits = model(tokens, positions, None, fp32_output=case.fp32, **packed)
    k = min(case.k, job.vocab_size // 2)

    def keep(output: Any) -> tuple[Any, dict[str, Any]]:
        found = largest(output, k, case.chunk)
        values, places = unpacked(found, case.sequences, length) if case.sequences else found
        return output.new_zeros(()), {"values": values, "places": places}

    return logits, keep


def largest(logits: Any, k: int, chunk: int | None) -> tuple[Any, Any]:
    """Returns the k largest logits of each token and their places, by the operations of NeMo-RL's function."""
    import torch
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    all_values, all_places = [], []
    size = chunk or logits.shape[1]
    for start in range(0, logits.shape[1], size):
        part = logits[:, start : start + size, :].to(dtype=torch.float32)
        own, own_places = torch.topk(part, k, dim=-1)
        places = own_places + 0
        of_values = [torch.empty_like(own) for _ in range(group.size())]
        of_places = [torch.empty_like(places) for _ in range(group.size())]
        torch.distributed.all_gather(of_values, own, group=group)
        torch.distributed.all_gather(of_places, places, group=group)
        together, their_places = torch.cat(of_values, dim=-1), torch.cat(of_places, dim=-1)
        values, chosen = torch.topk(together, k, dim=-1)
        picked = torch.gather(their_places, dim=-1, index=chosen)
        all_values.append(values)
        all_places.append(picked)
    if len(all_values) == 1:
        return all_values[0], all_places[0]
    return torch.cat(all_values, dim=1), torch.cat(all_places, dim=1)


def unpacked(found: tuple[Any, Any], sequences: int, length: int) -> tuple[Any, Any]:
    """Returns the sequences of a packed row as rows of their own."""
    rows = [each.new_zeros((sequences, length, each.shape[-1])) for each in found]
    for number in range(sequences):
        for to, each in zip(rows, found, strict=True):
            to[number, :length, :] = each[0, number * length : (number + 1) * length, :]
    return rows[0], rows[1]


def measure(folder: Path, first: int) -> int:
    """Measures each case from a number on; returns how many failed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder.mkdir(parents=True, exist_ok=True)
    result, failed = folder / "passes.jsonl", 0
    context = multiprocessing.get_context("spawn")
    for case in CASES[first:]:
        process = context.Process(target=run, args=(case, result))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        failed += process.exitcode != 0
        print(f"{case.name}: exit code {process.exitcode}", flush=True)
    return failed


def predicted(case: Case, environment: dict[str, str]) -> dict[str, int]:
    """Predicts a case."""
    from memlab import TrainingState, Versions
    from memlab.config.architectures import find_architecture
    from memlab.config.rollout import TeacherPass
    from memlab.config.scenario import Scenario
    from memlab.lab.teacher_pass import TeacherPeaks

    state = {
        "loss": "topk_logits",
        "topk_logits_k": case.k,
        "fp32_output": case.fp32,
        "logprobs_chunk_size": case.chunk,
    }
    scenario = Scenario.of(
        find_architecture(case.model).with_layers(case.num_layers),
        seq_length=case.seq_length,
        micro_batch_size=case.rows,
        num_microbatches=case.num_microbatches,
        packed_sequences=case.sequences,
        state=TrainingState(**state),  # type: ignore[arg-type]
        versions=Versions(transformer_engine=environment["transformer-engine"], torch=environment["torch"]),
    )
    peaks = TeacherPeaks.of(TeacherPass(scenario=scenario, num_microbatches=case.num_microbatches), 0, replay=True)
    return {
        "peak_bytes": peaks.allocated_bytes,
        "peak_reserved_bytes": peaks.reserved_bytes,
        "left_bytes": peaks.left_bytes,
        "outside_torch_bytes": peaks.outside_torch_bytes,
    }


def predict(path: Path | None) -> None:
    """Prints each case, measured and predicted."""
    usual = {"transformer-engine": "2.16.1", "torch": "2.11.0"}
    measured = {} if path is None else {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    for case in CASES:
        row = measured.get(case.name)
        found = predicted(case, usual if row is None else row["environment"])
        last = {} if row is None else row["steps"][-1]
        for name, value in found.items():
            cells = [*figures(last[name], value)] if row is not None else [f"{value:,}"]
            print(f"| {case.name} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    commands.add_parser("predict").add_argument("measured", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        return measure(arguments.folder, arguments.first)
    predict(arguments.measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
