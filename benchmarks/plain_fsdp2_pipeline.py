"""Steps of transformers' models in stages of a pipeline under torch's FSDP2, measured without memlab; and predictions.

    python -m benchmarks.plain_fsdp2_pipeline measure FOLDER [--seconds 480]    a machine with 2 GPUs
    python -m benchmarks.plain_fsdp2_pipeline measure FOLDER                    without GPUs: a rehearsal at tiny sizes
    python -m benchmarks.plain_fsdp2_pipeline predict FOLDER/steps.jsonl        anywhere
    python -m benchmarks.plain_fsdp2_pipeline predict-jobs FILE                 before a measurement

The stages are torch's own (`torch.distributed.pipelining`). They are told the shapes that they send, as by NeMo
Automodel; with `PipelineJob.finds_shapes`, torch finds them in the first step, by a forward pass of each stage whose
blocks the allocator keeps. In each pass of a stage transformers asks the device whether rows are packed, and waits for
it; with `PipelineJob.keeps_masks` no pass waits, as with NeMo Automodel, which makes each stage's mask once. A job of
more ranks than GPUs is taken for one of its ranks, with torch's ``fake`` process group in the place of the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.forked_jobs import GIB, NoMemory, about_gpu, prepare
from benchmarks.forked_jobs import measure as measure_jobs
from benchmarks.plain_fsdp2 import MODELS, Job, compared, model_of, optimizer_of, predicted_of, print_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineJob(Job):
    """A step of a pipeline."""

    num_microbatches: int = 4
    num_ranks: int = 2
    stages: int = 2
    chunks: int = 1
    """Model chunks of a rank; with several, the schedule is interleaved."""
    rank: int | None = None
    """The rank that is taken of a job with the ``fake`` process group."""
    schedule_runs: int = 1
    return_outputs: bool = True
    finds_shapes: bool = False
    keeps_masks: bool = False

    @property
    def layers_of_parts(self) -> list[int]:
        """How many layers each part of the model has, in its order: the first ones have one more, as with Automodel."""
        each, more = divmod(self.num_layers, parts := self.stages * self.chunks)
        return [each + (number < more) for number in range(parts)]

    @property
    def num_processes(self) -> int:
        """How many processes take it."""
        return self.num_ranks if self.rank is None else 1

    @property
    def name(self) -> str:
        """Its fields that are not the default."""
        default = asdict(PipelineJob(model="", num_layers=0))
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != default[key])


def jobs() -> list[PipelineJob]:
    """Returns the jobs, the most telling first."""
    llama = PipelineJob(model="llama-3.1-8b", num_layers=8)
    qwen, phi = replace(llama, model="qwen3-8b"), replace(llama, model="phi-4")
    qwen2, mistral = replace(llama, model="qwen2.5-7b"), replace(llama, model="mistral-7b-v0.3")
    of_two = [
        llama,
        replace(qwen, chunks=2, checkpointing=True, fp32_sharded_params=True),
        replace(llama, seq_length=4096, checkpointing=True),
        replace(llama, chunks=2, seq_length=4096),
        replace(qwen, fp32_sharded_params=True),
        replace(llama, chunks=2, reshard_after_forward="none", num_microbatches=8),
        replace(phi, seq_length=4096, return_outputs=False, adam_implementation="fused"),
        replace(llama, num_microbatches=8, schedule_runs=2),
        replace(qwen2, chunks=4, seq_length=4096, checkpointing=True, return_outputs=False),
        replace(mistral, chunks=2, micro_batch_size=2, adam_implementation="fused"),
        replace(qwen, return_outputs=False, num_microbatches=6, checkpointing=True),
        replace(llama, chunks=2, lora_rank=16, seq_length=4096),
        replace(llama, num_layers=7),
        replace(qwen, num_layers=7, chunks=2, seq_length=4096, checkpointing=True),
        replace(mistral, num_layers=5, chunks=2, fp32_sharded_params=True),
    ]
    eight = [
        replace(llama, num_ranks=8, seq_length=4096),
        replace(llama, num_ranks=8, seq_length=4096, chunks=2, checkpointing=True, fp32_sharded_params=True),
        replace(qwen, num_ranks=8, stages=4, num_layers=16, chunks=2, seq_length=4096),
        replace(phi, num_ranks=8, num_layers=16, stages=4, checkpointing=True, num_microbatches=8),
    ]
    alone = [replace(job, rank=rank) for job in eight for rank in (0, 8 - 8 // job.stages)]
    kept = [replace(job, keeps_masks=True) for job in of_two + _later_jobs()]
    return of_two + alone + [replace(job, finds_shapes=True) for job in of_two] + _later_jobs() + kept


def _later_jobs() -> list[PipelineJob]:
    """Returns jobs that were predicted by the code to which the others had led."""
    llama = PipelineJob(model="llama-3.1-8b", num_layers=8)
    moe = replace(llama, model="qwen3-30b-a3b", num_layers=4)
    return [
        moe,
        replace(llama, model="phi-4", num_layers=10, seq_length=4096, chunks=2, checkpointing=True),
        replace(llama, model="qwen3-8b", num_layers=12, chunks=3, adam_implementation="fused"),
        replace(llama, model="mistral-7b-v0.3", num_layers=9, seq_length=8192, num_microbatches=8, checkpointing=True),
        replace(llama, model="qwen2.5-7b", seq_length=4096, num_microbatches=6, fp32_sharded_params=True),
        replace(llama, num_layers=6, chunks=2, micro_batch_size=2, return_outputs=False, reshard_after_forward="all"),
        replace(moe, num_layers=6, seq_length=4096, chunks=2, checkpointing=True, adam_implementation="fused"),
        replace(llama, model="phi-4", num_microbatches=12, schedule_runs=3, grad_reduce_in_bf16=True),
    ]


def stages_of(job: PipelineJob, rank: int, *, on_gpu: bool) -> list[Any]:
    """Returns torch's stages of a rank, whose parts of the model are sharded."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage

    kind = "cuda" if on_gpu else "cpu"
    mesh = init_device_mesh(kind, (job.stages, job.num_ranks // job.stages), mesh_dim_names=("pp", "dp"))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if job.grad_reduce_in_bf16 else torch.float32
    )
    num_stages, stage, found = job.stages * job.chunks, rank // (job.num_ranks // job.stages), []
    ends = [*accumulate(job.layers_of_parts)]
    for number in range(stage, num_stages, job.stages):
        model = model_of(job, on_gpu=on_gpu)
        is_first, is_last = number == 0, number == num_stages - 1
        model.model.layers = nn.ModuleList(
            model.model.layers[ends[number] - job.layers_of_parts[number] : ends[number]]
        )
        if not is_first:
            model.model.embed_tokens = None
        if not is_last:
            model.model.norm, model.lm_head = nn.Identity(), None
        model.forward = _forward_of(model, is_first=is_first, is_last=is_last)
        for layer in model.model.layers:
            kept = {"all": True, "none": False}.get(job.reshard_after_forward, layer is not model.model.layers[-1])
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=kept)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
        if not on_gpu:
            model.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=kind)
        for parameter in model.parameters():
            parameter.to_local().detach().normal_(0, 0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(kind)
        options: dict[str, Any] = {}
        if not job.finds_shapes:
            rows, config = (job.micro_batch_size, job.seq_length), model.config
            widths = (config.hidden_size, config.vocab_size)
            hidden, logits = (torch.empty(*rows, width, dtype=torch.bfloat16, device="meta") for width in widths)
            hidden.requires_grad_(), logits.requires_grad_()
            tokens = torch.empty(rows, dtype=torch.int64, device="meta")
            options = {"input_args": tokens if is_first else hidden, "output_args": logits if is_last else hidden}
        device = torch.device(kind, torch.cuda.current_device()) if on_gpu else torch.device(kind)
        found.append(PipelineStage(model, number, num_stages, device, group=mesh["pp"].get_group(), **options))
    return found


def _forward_of(model: Any, *, is_first: bool, is_last: bool) -> Any:
    def forward(received: Any) -> Any:
        given = {"input_ids" if is_first else "inputs_embeds": received}
        hidden = model.model(**given).last_hidden_state
        return model.lm_head(hidden) if is_last else hidden

    return forward


def join(job: PipelineJob, rank: int, shared: str, *, on_gpu: bool) -> int:
    """Joins the other ranks, or what answers for them; returns the rank of the job."""
    import torch

    if job.rank is None:
        how, store = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", f"file://{shared}/store"
        torch.distributed.init_process_group(how, init_method=store, rank=rank, world_size=job.num_ranks)
        return rank
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=job.num_ranks)
    return job.rank


def take_steps(job: PipelineJob, rank: int, shared: str, *, on_gpu: bool, num_steps: int = 3) -> dict[str, Any]:
    """Takes steps, and returns what the last one needed."""
    import torch
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

    memory: Any = torch.cuda if on_gpu else NoMemory()
    memory.set_device(rank if job.rank is None else 0)
    rank = join(job, rank, shared, on_gpu=on_gpu)
    if job.keeps_masks:
        from transformers import masking_utils

        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    stages = stages_of(job, rank, on_gpu=on_gpu)
    optimizers = [optimizer_of(job, stage.submod) for stage in stages]
    config = stages[0].submod.config

    def loss_of(logits: Any, labels: Any) -> Any:
        return stages[-1].submod.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size)

    options: dict[str, Any] = {"loss_fn": loss_of, "scale_grads": False}
    num_microbatches = job.num_microbatches // job.schedule_runs
    schedule: Any = (
        Schedule1F1B(stages[0], num_microbatches, **options)
        if job.chunks == 1
        else ScheduleInterleaved1F1B(stages, num_microbatches, **options)
    )
    if job.rank is not None and hasattr(schedule, "_warmup_p2p"):  # since torch 2.12; the fake group has no answers
        _without_votes(schedule)
    shape = (num_microbatches * job.micro_batch_size, job.seq_length)
    device = "cuda" if on_gpu else "cpu"
    row: dict[str, Any] = {}
    for _ in range(num_steps):
        gc.collect()
        memory.empty_cache() if not row else None
        memory.synchronize()
        memory.reset_peak_memory_stats()
        row, started = {"start": memory.memory_allocated(), "phases": {}}, time.monotonic()
        losses: list[Any] = []
        for _ in range(job.schedule_runs):
            tokens = torch.randint(config.vocab_size, shape, device=device)
            given = (tokens,) if stages[0].is_first else ()
            of_last: dict[str, Any] = {"target": tokens.clone(), "losses": losses} if stages[-1].is_last else {}
            schedule.step(*given, return_outputs=job.return_outputs, **of_last)
            del tokens, given, of_last
        memory.synchronize()
        row["phases"]["schedule"] = memory.max_memory_allocated()
        memory.reset_peak_memory_stats()
        row["loss"] = sum(loss.item() for loss in losses) / len(losses) if losses else None
        del losses
        parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        memory.synchronize()
        row["phases"]["optimizer"] = memory.max_memory_allocated()
        row |= {"peak": max(row["phases"].values()), "reserved": memory.max_memory_reserved()}
        row["seconds"] = round(time.monotonic() - started, 3)
    if on_gpu:
        row |= about_gpu()
    return row


def _without_votes(schedule: Any) -> None:
    from torch.distributed.pipelining._utils import InferenceMode

    def warm_up(stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = warm_up


def measure(folder: Path, only: str, seconds: float) -> int:
    """Takes the jobs; returns how many failed."""
    num_gpus = prepare({MODELS[job.model][0] for job in jobs()})
    wanted = [job for job in jobs() if re.search(only, job.name)]
    rehearsed = wanted if num_gpus else [replace(job, seq_length=64) for job in wanted]
    return measure_jobs(rehearsed, take_steps, folder, seconds)


def layout_of(job: PipelineJob, rank: int) -> Any:
    """Returns memlab's layout of a rank."""
    from memlab import Layout

    return Layout(
        data_parallel_size=job.num_ranks // job.stages,
        pipeline_model_parallel_size=job.stages,
        virtual_pipeline_model_parallel_size=job.chunks,
        pipeline_model_parallel_layout=f"E{'|'.join('t' * number for number in job.layers_of_parts)}L",
        rank=rank,
    )


def ranks_of(job: PipelineJob) -> list[int]:
    """Returns the ranks that are measured."""
    return list(range(job.num_ranks)) if job.rank is None else [job.rank]


def predicted_of_rank(job: PipelineJob, rank: int) -> dict[str, int]:
    """Returns what memlab predicts of a rank, with what the job's passes wait for."""
    from memlab.engines.fsdp2 import pipelined_model
    from memlab.meter.labels import stream_order

    divide = pipelined_model.PipelinedModel._divide

    def divided(model: Any, module: Any, scenario: Any) -> Any:
        parts = divide(model, module, scenario)
        for part in parts:
            part.model.rotary_emb.register_forward_pre_hook(lambda *_: stream_order().synchronize())
        return parts

    with ExitStack() as changes:
        if job.rank is not None:  # the fake group has no stream that uses what is sent
            changes.enter_context(patch.object(pipelined_model, "record_stream", lambda tensor, stream: None))
        elif not job.keeps_masks:
            changes.enter_context(patch.object(pipelined_model.PipelinedModel, "_divide", divided))
        return predicted_of(job, layout_of(job, rank))


def predict_jobs(file: Path) -> None:
    """Writes what memlab predicts of each job, before it is measured."""
    for job in jobs():
        ranks = [predicted_of_rank(job, rank) for rank in ranks_of(job)]
        with file.open("a") as lines:
            lines.write(json.dumps({"name": job.name, "predicted": ranks}) + "\n")
        print(job.name, [{key: round(value / GIB, 3) for key, value in one.items()} for one in ranks], flush=True)


def predict(file: Path) -> int:
    """Prints the errors of memlab's predictions; returns how many peaks are more than 1 % off."""
    errors: dict[str, list[float]] = {"start": [], "peak": [], "reserved": []}
    for row in map(json.loads, file.read_text().splitlines()):
        if "error" in row:
            print(f"{row['name']}: not measured: {row['error']}")
            continue
        job = PipelineJob(**row["job"])
        for rank, measured in zip(ranks_of(job), row["ranks"], strict=True):
            print(f"{job.name}, rank {rank}: {compared(predicted_of_rank(job, rank), measured, errors)}", flush=True)
    print_summary(errors)
    return sum(abs(percent) > 1 for percent in errors["peak"])


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--only", default="", help="a regular expression for the names of jobs")
    measuring.add_argument("--seconds", type=float, default=480)
    for name in ("predict", "predict-jobs"):
        commands.add_parser(name).add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "predict-jobs":
        predict_jobs(arguments.file)
        return 0
    if arguments.command == "predict":
        return predict(arguments.file)
    return measure(arguments.folder, arguments.only, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
