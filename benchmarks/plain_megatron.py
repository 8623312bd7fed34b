"""Every rank of jobs in plain Megatron-Core and Transformer Engine, measured; and how near memlab's predictions come.

    python -m benchmarks.plain_megatron measure FOLDER [--seconds 480]        a machine with 2 or 4 GPUs
    python -m benchmarks.plain_megatron measure FOLDER --only "TP2 CP2"       jobs whose name has these words
    python -m benchmarks.plain_megatron measure FOLDER                        without GPUs: a rehearsal at tiny sizes
    python -m benchmarks.plain_megatron predict FOLDER/ranks.jsonl            anywhere

`benchmarks.megatron_jobs` lists the jobs, and `benchmarks.megatron_rank` is what runs on each GPU, without memlab. The
processes of a layout take its jobs one after the other, each with a model of its own, as long as nothing of the former
model stays allocated; then new processes go on. They are forked from this process, which imports Megatron once and
never uses a GPU. FOLDER gets ``ranks.jsonl``, a line after each job, and the output of each rank.

A job that fails, or that does not end in time, has a line with the error, and the others are taken all the same. The
same command takes the jobs that the file does not have yet. All ranks and micro-batches have the same tokens, so each
prediction is given how many of them the routers sent to each expert.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import chain, groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.flash_attn_of_torch import stand_in
from benchmarks.megatron_jobs import MODELS, Job, jobs

if TYPE_CHECKING:  # measuring imports nothing of memlab
    from memlab.record.step_record import StepRecord

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_CPU_OFFLOAD_V1": "1",
    # torch would ask CUDA itself, after which forked processes cannot use it (torch/cuda/__init__.py, 2.11).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Megatron compiles a handful of small functions: to start processes for that takes longer.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "4",
}
_STANDS_IN = "FLASH_ATTN_OF_TORCH"
if _STANDS_IN in os.environ:  # a process that was started by spawn: with flash-attn, importing TE uses a GPU
    stand_in()
JOB_SECONDS = 120
"""The most that one job may take; the first compiles kernels."""
ENDING_SECONDS = 15
LAST_STEP = 3
"""The number of the last step that `benchmarks.megatron_rank` takes, counted from 0."""
MOST_LEFT_BYTES = 8 * 2**20
"""If more of a former model stays allocated, the next job gets new processes."""
GIB, MIB = 2**30, 2**20
_OPTIONS_OF_STATE = (
    "deallocate_pipeline_outputs",
    "mtp_num_layers",
    "moe_router_load_balancing_type",
    "moe_shared_expert_overlap",
    "calculate_per_token_loss",
    "bias_activation_fusion",
)
"""Fields of Megatron's config of the model that memlab has in its training state."""
_WITHOUT_EFFECT = ("moe_router_bias_update_rate",)
"""Fields of Megatron's config that change no bytes."""


def measure(folder: Path, num_ranks: int | None, only: list[str], seconds: float) -> int:
    """Takes the jobs of so many ranks, and appends a line for each; returns how many failed or were left out.

    Args:
        folder: For the results.
        num_ranks: None takes as many as there are GPUs, and 4 without any.
        only: Words of which a job's name has at least one.
        seconds: After these no job is begun any more.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    on_gpus = torch.cuda.device_count() > 0
    num_ranks = num_ranks or torch.cuda.device_count() or 4
    in_turn = [job for job in jobs() if job.num_ranks == num_ranks and any(word in job.name for word in only)]
    if any(job.state.get("attention_backend") == "flash" for job in in_turn):
        os.environ[_STANDS_IN] = "1"
        stand_in()
    run_rank = importlib.import_module("benchmarks.megatron_rank").run_rank
    context = multiprocessing.get_context("fork" if not on_gpus or forked_processes_can_use_gpus() else "spawn")
    print(f"{time.monotonic() - started:.0f} s: imported; processes start by {context.get_start_method()}", flush=True)
    file = folder / "ranks.jsonl"
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    wanted = [job if on_gpus else job.tiny() for job in in_turn]
    left = [(number, job) for number, job in enumerate(wanted) if job.name not in done]
    failed = 0
    # A store in a file: one that this process serves has a thread, whose locks forked processes would find closed.
    with file.open("a") as lines, tempfile.TemporaryDirectory() as shared:
        path = str(Path(shared) / "store")
        store = torch.distributed.FileStore(path, -1)
        while left and time.monotonic() - started < seconds:
            _, of_layout = next(groupby(left, key=lambda numbered: numbered[1].layout))
            group = list(of_layout)
            ranks = [
                context.Process(target=run_rank, args=(rank, num_ranks, path, group, folder / f"rank-{rank}.log"))
                for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
            for number, job in group:
                left.remove((number, job))
                row = result_of(store, number, ranks)
                lines.write(json.dumps({**asdict(job), "name": job.name, **row}) + "\n")
                lines.flush()
                print(f"{time.monotonic() - started:.0f} s: {summary(job, row)}", flush=True)
                failed += "error" in row
                goes_on = "error" not in row and max(each["left_bytes"] for each in row["ranks"]) <= MOST_LEFT_BYTES
                goes_on = goes_on and time.monotonic() - started < seconds
                store.set(f"continue-{number}", "yes" if goes_on else "no")
                if not goes_on:
                    break
            end(ranks, 0 if "error" in row else ENDING_SECONDS)
    for _, job in left:
        print(f"not taken, since {seconds:.0f} s are over: {job.name}")
    return failed + len(left)


def forked_processes_can_use_gpus() -> bool:
    """Whether no import has used CUDA already: a forked process cannot use it then."""
    import torch

    def use_gpu() -> None:
        torch.ones(1, device="cuda").item()

    process = multiprocessing.get_context("fork").Process(target=use_gpu)
    process.start()
    process.join(60)
    return process.exitcode == 0


def result_of(store: Any, number: int, ranks: list[BaseProcess]) -> dict[str, Any]:
    """Waits for the rows of all ranks; returns them, or the error of those that failed."""
    deadline = time.monotonic() + JOB_SECONDS
    rows, failures = ([f"{what}-{number}-{rank}" for rank in range(len(ranks))] for what in ("row", "failed"))
    while time.monotonic() < deadline:
        if store.check(rows):
            return {"ranks": [json.loads(store.get(row)) for row in rows]}
        ended = [process.exitcode is not None for process in ranks]
        if any(ended) or any(store.check([failure]) for failure in failures):
            time.sleep(2)  # others may fail for the same reason
            known = [
                f"rank {rank}: {store.get(key).decode()}" for rank, key in enumerate(failures) if store.check([key])
            ]
            return {"error": "; ".join(known) or f"processes ended with {[each.exitcode for each in ranks]}"}
        time.sleep(0.1)
    return {"error": f"not done after {JOB_SECONDS} s"}


def end(ranks: list[BaseProcess], seconds: float) -> None:
    """Kills the processes of ranks that do not end in time."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def summary(job: Job, row: dict[str, Any]) -> str:
    """Returns a line for the terminal."""
    if "error" in row:
        return f"FAILED {job.name}: {row['error'][:300]}"
    peaks = " ".join(f"{rank['steps'][-1]['peak_bytes'] / GIB:.3f}" for rank in row["ranks"])
    outside = " ".join(f"{rank['steps'][-1]['outside_torch_bytes'] / GIB:.2f}" for rank in row["ranks"])
    left = max(rank["left_bytes"] for rank in row["ranks"]) / MIB
    return f"{job.name}: peaks {peaks} GiB, outside torch {outside} GiB, {left:.1f} MiB left"


def predict(path: Path, at_once: int) -> None:
    """Predicts each rank of each measured job, and prints the errors."""
    measured = [json.loads(line) for line in path.read_text().splitlines()]
    predicted = [row for row in measured if "ranks" in row and not unknown_parts(row)]
    pairs = [(row, rank) for row in predicted for rank in range(len(row["ranks"]))]
    heads = ("job", "rank", "start GiB", "error", "peak GiB", "predicted", "error", "reserved GiB", "error")
    heads += ("outside torch GiB", "stated")
    print(f"| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("forkserver")) as pool:
        for line in pool.map(table_row, pairs):
            print(line, flush=True)
    for row in measured:
        if "error" in row:
            print(f"\n{row['name']} failed: {row['error']}")
        elif unknown_parts(row):
            print(f"\n{row['name']} is not predicted: memlab does not have {', '.join(unknown_parts(row))}")
    print_outside_torch([rank for row in measured for rank in row.get("ranks", ()) if rank.get("first_uses")])


def print_outside_torch(ranks: list[dict[str, Any]]) -> None:
    """Prints what took memory outside torch, over the first job of each process.

    Args:
        ranks: Rows with the first uses of groups.
    """
    taken: dict[tuple[str, int], list[float]] = {}
    for rank in ranks:
        uses = rank["first_uses"]
        known = rank["outside_torch_bytes"]["CUDA's context"] + sum(use["bytes"] for use in uses)
        taken.setdefault(("CUDA's context", 1), []).append(rank["outside_torch_bytes"]["CUDA's context"] / MIB)
        libraries = rank["steps"][-1]["outside_torch_bytes"] - known
        taken.setdefault(("all else, such as libraries", 1), []).append(libraries / MIB)
        for use in uses:
            taken.setdefault((f"{use['collective']} of {use['group']}", len(use["ranks"])), []).append(
                use["bytes"] / MIB
            )
    print("\n| outside torch, MiB | ranks | times | least | median | most |\n| --- |" + " ---: |" * 5)
    for (what, size), values in sorted(taken.items()):
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"| {what} | {size} | {len(values)} | {low:.0f} | {middle:.0f} | {high:.0f} |")


def table_row(pair: tuple[dict[str, Any], int]) -> str:
    """Predicts one rank; returns its row of the table."""
    from memlab.config.validation import RuleError
    from memlab.fitting.outside_torch import outside_torch_of

    job, rank = pair
    try:
        predicted = predict_rank(job, rank)
    except RuleError as error:
        return f"| {job['name']} | {rank} | refused: {error} |"
    step = job["ranks"][rank]["steps"][-1]
    outside = step.get("outside_torch_bytes")  # left out where other processes used the same GPU
    scenario = predicted.scenario
    stated = outside_torch_of(scenario)
    inside = outside is None or stated.total_bytes <= outside <= stated.most_bytes
    is_later = outside is not None and outside > stated.most_bytes and not job["ranks"][rank].get("first_uses")
    # A later job of a process also has the groups that only jobs before it have used.
    remark = "" if inside else ", after other jobs" if is_later else ", wrong"
    cells = [
        *(f"{job['name']}", f"{rank}"),
        *figures(step["start_bytes"], predicted.static_bytes, hidden=True),
        *figures(step["peak_bytes"], predicted.peak_allocated_bytes),
        *figures(step["peak_reserved_bytes"], predicted.peak_reserved_bytes or 0, hidden=True),
        "" if outside is None else f"{outside / GIB:.2f}",
        f"{stated.total_bytes / GIB:.2f} to {stated.most_bytes / GIB:.2f}{remark}",
    ]
    return f"| {' | '.join(cells)} |"


def unknown_parts(job: dict[str, Any]) -> list[str]:
    """Names what of a measured job memlab does not have: its model, or fields of Megatron's config."""
    from memlab.config.architectures import ARCHITECTURES

    if job["model"] not in ARCHITECTURES:
        return [job["model"]]
    known = (*type(ARCHITECTURES[job["model"]]).__slots__, *_OPTIONS_OF_STATE, *_WITHOUT_EFFECT)
    return [name for name in job["config"] if name not in known]


def predict_rank(job: dict[str, Any], rank: int) -> StepRecord:
    """Predicts the second step of one rank of a measured job; see `predict_steps`."""
    return predict_steps(job, rank, last=1)[-1]


def predict_steps(job: dict[str, Any], rank: int, last: int = LAST_STEP) -> list[StepRecord]:
    """Predicts the second and further steps of one rank of a measured job, with the tokens of each of its experts.

    From one step to the next a tensor may move from a block that fits to one whose end torch leaves unsplit, on a GPU
    as in a prediction: a step is like the one of the same number.
    A user's job is the first one of its process. Of the measured ones only those with `first_uses` are.

    Args:
        job: A line of ``ranks.jsonl``.
        rank: The rank.
        last: The number of the last step, counted from 0.
    """
    from memlab import Lab, Layout, MemorySettings, TrainingState, Versions
    from memlab.config.architectures import find_architecture
    from memlab.config.routing import Routing
    from tests.unit.inside import skip_first_calls

    architecture = find_architecture(job["model"]).with_layers(job["num_layers"])
    sizes = {name: value for name, value in job["config"].items() if name in type(architecture).__slots__}
    config = MODELS[job["model"]] | job["config"]
    of_state = {name: config[name] for name in _OPTIONS_OF_STATE if name in config}
    layout = replace(Layout.from_text(job["layout"]), rank=rank)
    sharing = layout.expert_model_parallel_size * layout.expert_tensor_size  # consecutive ranks
    own = range(first := rank - rank % sharing, first + sharing)
    environment = job["ranks"][rank]["environment"]
    versions = Versions(transformer_engine=environment["transformer-engine"], torch=environment["torch"])
    with Lab(
        replace(architecture, vocab_size=job["vocab_size"], **sizes),
        num_layers=job["num_layers"],
        seq_length=job["seq_length"],
        num_microbatches=job["num_microbatches"],
        micro_batch_size=job.get("micro_batch_size", 1),  # older lines do not have it
        layout=layout,
        state=TrainingState.of_options(job["state"] | of_state),
        routing=Routing(kind="counts", counts=routes_of(job["ranks"], own)) if architecture.routes else Routing(),
        versions=versions,
        backend="simulated",
    ) as lab:
        if not job["ranks"][rank].get("first_uses"):
            skip_first_calls(lab)
        settings = MemorySettings(**job["settings"])
        records = [lab.step(settings)]
        while records[-1].step_index < last:
            records.append(lab.step(settings))
        return records


def figures(measured: int, predicted: int, *, hidden: bool = False) -> Iterator[str]:
    """Yields the cells of a figure: measured, predicted unless it is hidden, and the error."""
    yield f"{measured / GIB:.3f}"
    if not hidden:
        yield f"{predicted / GIB:.3f}"
    yield f"{predicted / measured - 1:+.3%}" if measured else "nothing measured"


def routes_of(ranks: list[dict[str, Any]], own: range) -> tuple[tuple[int, ...], ...]:
    """Returns how many tokens each expert of each layer got, over the ranks that share the experts.

    Ranks with the same experts of a layer got the same tokens, unless context parallel ranks, which have other parts
    of a sequence, share their experts with others; ranks of one pipeline stage have the same layers.

    Args:
        ranks: All of a job.
        own: Those that share the experts of the predicted rank's group, whose counts hold for its layers.
    """
    by_layer: dict[int, dict[int, list[int]]] = {}
    for rank in (*ranks[own.start : own.stop], *ranks):
        for layer, lists in rank["tokens_per_expert"].items():
            by_layer.setdefault(int(layer), {}).setdefault(rank["expert_rank"], lists[0])
    return tuple(
        tuple(chain.from_iterable(parts[each] for each in sorted(parts))) for _, parts in sorted(by_layer.items())
    )


def main() -> int:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--ranks", type=int, help="take the jobs of so many ranks (default: as many as GPUs, or 4)")
    measuring.add_argument(
        "--only", nargs="+", default=[""], help="words, one of which a job's name has (default: all)"
    )
    measuring.add_argument("--seconds", type=float, default=480, help="when no job is begun any more (default: 480)")
    predicting = commands.add_parser("predict")
    predicting.add_argument("measured", type=Path)
    predicting.add_argument("--at-once", type=int, default=1, help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        return 1 if measure(arguments.folder, arguments.ranks, arguments.only, arguments.seconds) else 0
    predict(arguments.measured, arguments.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
