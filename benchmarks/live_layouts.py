"""Runs a job in every layout of 2 and 4 ranks, live on CPUs: does each rank hold the predicted bytes exactly?

    python -m benchmarks.live_layouts                          all layouts of 2 and of 4 ranks
    python -m benchmarks.live_layouts --ranks 8 --every 7      every seventh layout of 8 ranks
    python -m benchmarks.live_layouts --at-once 3              three jobs at the same time, on a machine with 12 cores

Each job takes a plain step and one under full recompute. It has to pass the tests of `tests/unit/test_cpu_ranks.py`,
which has some of these layouts: each rank's bytes are as predicted, loss and gradients are those of a job with one
rank, and the loss is the same under both settings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from tests.unit import test_cpu_ranks
from tests.unit.live import FULL
from tests.unit.processes import on_processes
from tests.unit.test_cpu_ranks import PLAIN, Job, name_of, take_steps

ARCHITECTURES = ("qwen3-moe-tiny", "phi-4-tiny")
TESTS = (
    test_cpu_ranks.test_every_rank_s_bytes_are_those_predicted_for_it,
    test_cpu_ranks.test_loss_and_gradients_are_those_of_one_rank,
    test_cpu_ranks.test_memory_settings_change_no_loss,
)


def jobs_of(architecture: str, num_ranks: int) -> Iterator[Job]:
    """Yields one job for each layout of `num_ranks` ranks that the model supports."""
    seen = set()
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for tensor, context, stages, chunks, experts, expert_tensor in product(sizes, sizes, sizes, (1, 2), sizes, sizes):
        copies, rest = divmod(num_ranks, tensor * context * stages)
        if rest:
            continue
        given = {
            "tensor_model_parallel_size": tensor,
            "context_parallel_size": context,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": chunks,
            "expert_model_parallel_size": experts,
            "expert_tensor_parallel_size": expert_tensor,
            "data_parallel_size": copies,
        }
        if expert_tensor == tensor:
            del given["expert_tensor_parallel_size"]
        sizes_that_differ = {name: size for name, size in given.items() if size != getattr(Layout(), name)}
        job = Job(sizes_that_differ, (PLAIN, FULL), architecture)
        try:
            layout = Layout(**job.sizes)
            Scenario.of(
                architecture,
                layout=layout,
                num_layers=job.num_layers,
                seq_length=64,
                num_microbatches=job.num_microbatches,
            )
        except ValueError:  # such as more ranks for experts than a stage has
            continue
        if str(layout) not in seen:
            seen.add(str(layout))
            yield job


def what_differs(job: Job, num_ranks: int) -> str:
    """Runs a job; returns what is wrong, empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            live = [steps[0] for steps in on_processes(num_ranks, take_steps, [job], folder=Path(folder))]
        except AssertionError as error:
            return f"did not run: {error}"
    wrong = []
    for test in TESTS:
        try:
            test(job, live)
        except AssertionError as error:
            wrong.append(f"{test.__name__}: {error}")
    return "; ".join(wrong)


def main() -> int:
    """Runs the jobs, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--every", type=int, default=1, help="run only every so many-th layout (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (default: %(default)s)")
    arguments = parser.parse_args()
    num_wrong = num_jobs = 0
    for num_ranks in arguments.ranks:
        jobs = [job for name in ARCHITECTURES for job in jobs_of(name, num_ranks)][:: arguments.every]
        started = time.monotonic()
        with ProcessPoolExecutor(arguments.at_once, get_context("forkserver")) as pool:
            for job, wrong in zip(jobs, pool.map(partial(what_differs, num_ranks=num_ranks), jobs), strict=True):
                print(f"{name_of(job)}, {num_ranks} ranks: {wrong or 'passed'}", flush=True)
                num_wrong += bool(wrong)
        num_jobs += len(jobs)
        print(f"{len(jobs)} layouts of {num_ranks} ranks in {time.monotonic() - started:.0f} s", flush=True)
    print(f"{num_jobs - num_wrong} of {num_jobs} layouts passed")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
