"""What predictions cost, now and at an earlier commit: processor seconds of whole models, and how they grow.

Each case runs in processes of their own, which take turns between the two versions; the median of user and system time
counts, which another program on the machine disturbs less than the clock. The earlier commit is checked out into a
temporary folder and runs in the same environment. What it does not know (a flag, a model) has no ratio.

Searches keep what they predict (`memlab.lab.kept_predictions`). In the rows ``again``, the same search has run before,
so that each of its steps is kept. In all other rows nothing is kept, and every step is predicted.

    python benchmarks/prediction_time.py                                     # this version alone
    python benchmarks/prediction_time.py --against 1191acc                   # and the ratio to a commit
    python benchmarks/prediction_time.py --against 1191acc --rounds 1 --only setting layers
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EP8 = "Layout(data_parallel_size=8, expert_model_parallel_size=8)"
_ENDS = "num_layers_in_first_pipeline_stage=11, num_layers_in_last_pipeline_stage=11"
PP8 = f"Layout(pipeline_model_parallel_size=8, rank=1, {_ENDS})"
QWEN, LARGE = "'qwen3-30b-a3b', seq_length=4096", "'qwen3-235b-a22b', seq_length=4096"
SETTING = """
import time
from memlab import Lab, Layout, MemorySettings
other = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm",))
with Lab({lab}, backend="simulated") as lab:
    if {first}:
        started = time.process_time()
    lab.step(MemorySettings())
    if not {first}:
        started = time.process_time()
        lab.step(other)
    print("seconds", time.process_time() - started)
"""
"""Prints the processor seconds of a step: the first one of a lab, or one under a changed setting."""
JOB = """
import tempfile, time
from pathlib import Path
from memlab.cli import main
text = '''
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 512
  train_micro_batch_size: 1
  logprob_batch_size: 1
  max_total_sequence_length: 4096
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: false}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    expert_model_parallel_size: 8
    distributed_data_parallel_config: {overlap_grad_reduce: true, overlap_param_gather: true}
  generation: {vllm_cfg: {gpu_memory_utilization: 0.6, tensor_parallel_size: 4}}
cluster: {gpus_per_node: 8, num_nodes: 4}
'''
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "config.yaml"
    path.write_text(text)
    main(["predict", "--job", str(path), "--json"])
print("seconds", time.process_time())
"""
"""Predicts a job of NeMo-RL: 16 micro-batches under full recompute, and its pass for log-probabilities."""
SEARCH = ("-m", "memlab", "search", "--gpu-memory", "79GiB", "--json", "--engines", "1")
"""In this process alone: `os.wait4` does not count what the processes of a search use, which another one forks."""
CASES: dict[str, tuple[str, ...]] = {
    "setting: Qwen3-30B-A3B EP8, changed": ("-c", SETTING.format(lab=f"{QWEN}, layout={EP8}", first=False)),
    "setting: phi-4, changed": ("-c", SETTING.format(lab="'phi-4', seq_length=4096", first=False)),
    "batches: Qwen3-30B-A3B EP8, 16 micro-batches, changed": (
        "-c",
        SETTING.format(lab=f"{QWEN}, num_microbatches=16, layout={EP8}", first=False),
    ),
    "batches: Qwen3-235B-A22B PP8, 64 micro-batches, first": (
        "-c",
        SETTING.format(lab=f"{LARGE}, num_microbatches=64, layout={PP8}", first=True),
    ),
    "layers: Qwen3-235B-A22B, 12 layers, changed": ("-c", SETTING.format(lab=f"{LARGE}, num_layers=12", first=False)),
    "layers: Qwen3-235B-A22B, 94 layers, changed": ("-c", SETTING.format(lab=f"{LARGE}, num_layers=94", first=False)),
    "job: NeMo-RL, Qwen3-30B-A3B EP8, 16 micro-batches": ("-c", JOB),
    "command: predict phi-4": ("-m", "memlab", "predict", "phi-4", "--seq-length", "4096"),
    "command: predict Qwen3-30B-A3B": ("-m", "memlab", "predict", "qwen3-30b-a3b", "--seq-length", "4096"),
    "search: phi-4 TP2": (*SEARCH, "phi-4", "--tensor-model-parallel-size", "2", "--world-size", "8"),
    "search: Qwen3-30B-A3B EP8": (*SEARCH, "qwen3-30b-a3b", "--expert-model-parallel-size", "8", "--world-size", "8"),
    "again: phi-4 TP2, all of its steps kept": (
        *SEARCH,
        "phi-4",
        "--tensor-model-parallel-size",
        "2",
        "--world-size",
        "8",
    ),
    "again: Qwen3-30B-A3B EP8, all of its steps kept": (
        *SEARCH,
        "qwen3-30b-a3b",
        "--expert-model-parallel-size",
        "8",
        "--world-size",
        "8",
    ),
    "layouts: Qwen3-30B-A3B, 8 GPUs": (*SEARCH, "qwen3-30b-a3b", "--gpus", "8"),
    "largest: phi-4 TP2": (
        *SEARCH,
        "phi-4",
        "--tensor-model-parallel-size",
        "2",
        "--world-size",
        "8",
        "--largest",
        "tokens",
    ),
}
"""What Python runs. A case that prints ``seconds`` measures a part of itself."""


def cost(arguments: tuple[str, ...], folder: Path, kept: Path | None = None) -> tuple[float, float] | None:
    """Returns processor seconds and the largest resident size in GB of a case; None if this version cannot run it.

    Args:
        arguments: Of Python.
        folder: The version's.
        kept: Where predictions are kept; None keeps none.
    """
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment["MEMLAB_PREDICTIONS"] = "" if kept is None else str(kept)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode not in (0, 1):  # 1: it was predicted that nothing fits
        return None
    if arguments[0] == "-c":
        printed = [line.split()[1] for line in lines if line.startswith("seconds ")]
        if not printed:
            return None
        return float(printed[-1]), usage.ru_maxrss * 1024 / 1e9
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Checks a commit out into a temporary folder, for the block."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "memlab"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)  # noqa: S607
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)  # noqa: S607


def compare(cases: dict[str, tuple[str, ...]], versions: list[Path], rounds: int) -> None:
    """Prints a row per case: median seconds and largest GB of each version, and the ratio of the seconds."""
    names = ["now"] if len(versions) == 1 else ["before", "now"]
    print(f"{'':56}" + "".join(f"{name + ', s':>11}{'GB':>7}" for name in names) + f"{'ratio':>9}")
    for case, arguments in cases.items():
        costs: list[list[tuple[float, float]]] = [[] for _ in versions]
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) if case.startswith("again") else None
            if kept is not None:
                cost(arguments, versions[-1], kept)
            for _ in range(rounds):
                for version, each in zip(versions, costs, strict=True):
                    one = cost(arguments, version, kept)
                    if one is not None:
                        each.append(one)
        row, medians = f"{case:56}", []
        for each in costs:
            medians.append(statistics.median(seconds for seconds, _ in each) if each else None)
            row += f"{medians[-1]:11.2f}{max(size for _, size in each):7.2f}" if each else f"{'-':>11}{'-':>7}"
        if len(medians) == 2 and medians[0] is not None and medians[1]:
            row += f"{medians[0] / medians[1]:8.1f}x"
        print(row, flush=True)


def main() -> None:
    """Reads the command line, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="an earlier version; without it, only this one is measured")
    parser.add_argument("--rounds", type=int, default=5, help="processes per case and version (default 5)")
    kinds = sorted({case.split(":")[0] for case in CASES})
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="leave the other cases out")
    arguments = parser.parse_args()
    cases = {case: given for case, given in CASES.items() if case.split(":")[0] in arguments.only}
    if arguments.against is None:
        compare(cases, [ROOT], arguments.rounds)
        return
    with checked_out(arguments.against) as former:
        compare(cases, [former, ROOT], arguments.rounds)


if __name__ == "__main__":
    main()
