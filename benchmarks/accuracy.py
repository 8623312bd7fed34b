"""How near predictions come to a real GPU: the same steps on both, and the errors between them as a table.

    python benchmarks/accuracy.py measure --out h200.jsonl                                          # on a GPU
    python benchmarks/accuracy.py measure --states --out states.jsonl               # the same, of training states
    python benchmarks/accuracy.py measure --rl --out rl.jsonl           # packed rows and passes without gradients
    torchrun --nproc-per-node 2 benchmarks/accuracy.py measure --job phi-4:TP2 --out h200.jsonl     # on two
    torchrun --nproc-per-node 2 benchmarks/accuracy.py measure --rl --job phi-4:CP2 --out cp.jsonl  # packed, on two
    python benchmarks/accuracy.py predict labs/results/h200_steps.jsonl                             # anywhere

A lab is opened for each architecture, number of layers, training state and rank, and takes its cases one after the
other. A line is written after each case: a run that was cut short is continued by the same command. Ranks of a job
write a file each. A measured step keeps how many tokens its router sent to each expert, where that is one number per
layer (of all ranks together, where they share the experts), and its prediction has them too. Other predictions draw the
experts at random (`predict_measured`).
The cases with flash attention fail where the package flash-attn is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from memlab.analysis.accuracy import pairs_of
from memlab.commands.shared.ranks import abort_job_on_error, rank
from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import checkpoints_moe_layers
from memlab.config.parts.moe import Experts
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.lab.lab import Lab
from memlab.lab.predictions import predict_measured
from memlab.record.step_record import StepRecord
from memlab.views.text.accuracy import accuracy_page

USUAL_STATE = TrainingState()


class Case(NamedTuple):
    """One step."""

    architecture: str
    num_layers: int
    workload: dict[str, int]
    settings: MemorySettings
    state: TrainingState = USUAL_STATE
    packed_sequences: int | None = None
    forward_only: bool = False


OFFLOAD = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
RECOMPUTE = ("core_attn", "layernorm", "moe_act", "moe", "mlp")
WORKLOADS = (
    {"seq_length": 1024, "micro_batch_size": 4, "num_microbatches": 1},
    {"seq_length": 16384, "micro_batch_size": 1, "num_microbatches": 1},
    {"seq_length": 4096, "micro_batch_size": 2, "num_microbatches": 3},
)
USUAL = {"seq_length": 4096, "micro_batch_size": 1, "num_microbatches": 1}
SHORT = {"seq_length": 2048, "micro_batch_size": 1, "num_microbatches": 1}


def full(count: int, method: str = "uniform") -> MemorySettings:
    """Full recompute."""
    return MemorySettings(recompute_granularity="full", recompute_method=method, recompute_num_layers=count)


def recompute(*modules: str, **others: Any) -> MemorySettings:
    """Selective recompute."""
    return MemorySettings(recompute_granularity="selective", recompute_modules=modules, **others)


def cases() -> Iterator[Case]:
    """Yields every case, those of one lab together and a plain one first at each workload."""
    for architecture, is_moe, deep in (("qwen3-30b-a3b", True, 8), ("phi-4", False, 12)):
        offload = [name for name in OFFLOAD if is_moe or name not in Experts.offload_modules]
        again = [
            name for name in RECOMPUTE if (is_moe or name not in Experts.recompute_modules) and name != "mlp" * is_moe
        ]
        every = MemorySettings(offload_modules=offload)
        both = recompute("layernorm", again[-1], offload_modules=("core_attn", "attn_proj"))
        several = [MemorySettings(), full(1), every, both]
        for settings in (MemorySettings(), full(1), full(2), full(2, "block"), every, both):
            yield Case(architecture, 4, USUAL, settings, USUAL_STATE)
        for name in again:
            yield Case(architecture, 4, USUAL, recompute(name), USUAL_STATE)
        for name in offload:
            names = ("core_attn", name) if name == "attn_proj" else (name,)  # a rule: one takes the other's output
            yield Case(architecture, 4, USUAL, MemorySettings(offload_modules=names), USUAL_STATE)
        for workload in WORKLOADS:
            for settings in several:
                yield Case(architecture, 2, workload, settings, USUAL_STATE)
        for settings in (
            MemorySettings(),
            full(deep // 2, "block"),
            MemorySettings(offload_parameters=True, offload_optimizer=True),
            MemorySettings(offload_gradients=True, offload_modules=("core_attn",)),
        ):
            yield Case(architecture, deep, SHORT, settings, USUAL_STATE)


LOW_PRECISION: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "grad_reduce_in_bf16": True,
    "main_grads_dtype": "bf16",
}
"""The state of nearly all MoE recipes of NeMo-RL."""
STATES = (
    {"use_distributed_optimizer": False},
    {"grad_reduce_in_bf16": True},
    {"use_precision_aware_optimizer": True},
    LOW_PRECISION,
    LOW_PRECISION | {"main_params_dtype": "fp16"},
    *(LOW_PRECISION | {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype} for dtype in ("bf16", "fp16", "fp8")),
    LOW_PRECISION | {"exp_avg_dtype": "bf16"},
    {"optimizer_cpu_offload": True},
    {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
    {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25, "pin_cpu_grads": False},
    LOW_PRECISION | {"optimizer_cpu_offload": True},
    {"cross_entropy_loss_fusion": True},
    {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    {"loss": "logprobs"},
    {"loss": "logprobs", "logprobs_chunk_size": 1024},
    {"attention_backend": "unfused"},
    {"attention_backend": "fused"},
    {"attention_backend": "flash"},
    {"apply_rope_fusion": True},
    {"fp8_format": "hybrid"},
    {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    *(
        {"fp8_format": "e4m3", "fp8_recipe": recipe, "fp8_param_gather": True}
        for recipe in ("delayed", "tensorwise", "blockwise")
    ),
)
"""Each option of the training state alone, and those that recipes combine."""
COMBINED_STATES = (
    {},
    LOW_PRECISION | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "apply_rope_fusion": True},
    LOW_PRECISION | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "loss": "logprobs"},
    {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "cross_entropy_loss_fusion": True},
    {"loss": "logprobs", "logprobs_chunk_size": 1024, "optimizer_cpu_offload": True},
    {"attention_backend": "flash"},
)
"""States that are measured with recompute and offload, at other lengths, and with several micro-batches."""


def state_cases() -> Iterator[Case]:
    """Yields training states under settings and other workloads; each state alone is in `benchmarks/results.py`."""
    for architecture, other in (("qwen3-30b-a3b", "expert_fc1"), ("phi-4", "attn_proj")):
        for values in COMBINED_STATES:
            state = TrainingState(**values)
            yield Case(architecture, 2, USUAL, MemorySettings(), state)
            yield Case(architecture, 2, USUAL, full(1), state)
            yield Case(architecture, 2, WORKLOADS[1], MemorySettings(), state)
            yield Case(architecture, 2, WORKLOADS[2], MemorySettings(), state)
            yield Case(architecture, 2, WORKLOADS[2], full(1), state)
            if state.fp8_format is None:  # cuBLAS refuses the FP8 tensors that Megatron's offload copies back
                yield Case(architecture, 2, USUAL, MemorySettings(offload_modules=("core_attn", other)), state)


def rl_cases() -> Iterator[Case]:
    """Yields what reinforcement learning adds: packed rows, log-probabilities, and passes without gradients."""
    logprobs, chunked = TrainingState(loss="logprobs"), TrainingState(loss="logprobs", logprobs_chunk_size=1024)
    row, long = USUAL | {"seq_length": 8192}, USUAL | {"seq_length": 16384}
    for architecture, other in (("qwen3-30b-a3b", "expert_fc1"), ("phi-4", "attn_proj")):
        for settings in (MemorySettings(), full(1), MemorySettings(offload_modules=("core_attn", other))):
            yield Case(architecture, 2, row, settings, logprobs, packed_sequences=8)
        yield Case(architecture, 2, row | {"num_microbatches": 3}, MemorySettings(), logprobs, packed_sequences=8)
        yield Case(architecture, 2, long, MemorySettings(), logprobs, packed_sequences=16, forward_only=True)
        yield Case(architecture, 2, long, MemorySettings(), chunked, packed_sequences=16, forward_only=True)
        yield Case(architecture, 2, row, MemorySettings(), logprobs, forward_only=True)
        yield Case(architecture, 2, row, MemorySettings(), USUAL_STATE, packed_sequences=5)
        flash = replace(logprobs, attention_backend="flash")
        for settings in (MemorySettings(), full(1), MemorySettings(offload_modules=("core_attn", other))):
            yield Case(architecture, 2, row, settings, flash, packed_sequences=8)
        yield Case(architecture, 2, long, MemorySettings(), flash, packed_sequences=16, forward_only=True)


JOBS: dict[str, tuple[Layout, int]] = {
    "TP2": (Layout(tensor_model_parallel_size=2), 1),
    "PP2": (Layout(pipeline_model_parallel_size=2), 4),
    "EP2": (Layout(expert_model_parallel_size=2, data_parallel_size=2), 1),
    "DP2": (Layout(data_parallel_size=2), 2),
    "CP2": (Layout(context_parallel_size=2), 1),
    "PP2VP2": (Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 4),
    "TP2EP2": (
        Layout(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        1,
    ),
    "TP4": (Layout(tensor_model_parallel_size=4), 1),
    "PP4": (Layout(pipeline_model_parallel_size=4), 8),
    "EP4": (Layout(expert_model_parallel_size=4, data_parallel_size=4), 1),
    "TP2PP2": (Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 4),
    "TP2CP2": (Layout(tensor_model_parallel_size=2, context_parallel_size=2), 1),
}
"""Layouts of two and four ranks, and how many micro-batches a step has."""


def job_cases(architecture: str, job: str) -> Iterator[Case]:
    """Yields the cases of one rank of a job."""
    is_moe = find_architecture(architecture).routes
    offload = [name for name in OFFLOAD if is_moe or name not in Experts.offload_modules]
    workload = USUAL | {"num_microbatches": JOBS[job][1]}
    for settings in (
        MemorySettings(),
        full(1),
        MemorySettings(offload_modules=offload),
        recompute("layernorm", "moe_act" if is_moe else "mlp", offload_modules=("core_attn", "attn_proj")),
        MemorySettings(offload_parameters=True, offload_optimizer=True),
    ):
        yield Case(architecture, 4, workload, settings, USUAL_STATE)


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
JOB_STATES: dict[str, tuple[dict[str, Any], ...]] = {
    "DP2": (
        {},
        {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "overlap_grad_reduce": True},
        OVERLAP,
        OVERLAP | {"ddp_bucket_size": 5_000_000},
        {"grad_reduce_in_bf16": True},
        LOW_PRECISION | OVERLAP,
        LOW_PRECISION | OVERLAP | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
    "EP2": (
        {},
        OVERLAP,
        {"use_distributed_optimizer": False, "overlap_grad_reduce": True},
        LOW_PRECISION | OVERLAP,
    ),
    "TP2": (
        {},
        {"cross_entropy_loss_fusion": True},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        {"loss": "logprobs", "logprobs_chunk_size": 1024},
        {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    ),
}
"""Training states of jobs of two ranks, by job: the default state first, and FP8 last, because torch keeps what the
last step has gathered in FP8, even after the lab is closed (`labs/LOG.md`, 2026-11-22)."""


def job_state_cases(architecture: str, job: str) -> Iterator[Case]:
    """Yields the training states of one rank of a job, and in the default state a setting that moves its optimizer."""
    default, *others = (TrainingState(**values) for values in JOB_STATES[job])
    yield Case(architecture, 2, USUAL, MemorySettings(), default)
    yield Case(architecture, 2, USUAL, MemorySettings(offload_optimizer_except_update=True), default)
    for state in others:
        yield Case(architecture, 2, USUAL, MemorySettings(), state)


def job_rl_cases(architecture: str, job: str) -> Iterator[Case]:
    """Yields packed rows of one rank of a job; under context parallelism the ranks share each sequence."""
    other = "expert_fc1" if find_architecture(architecture).routes else "attn_proj"
    row = USUAL | {"seq_length": 16384, "num_microbatches": JOBS[job][1]}
    for settings in (MemorySettings(), full(1), MemorySettings(offload_modules=("core_attn", other))):
        yield Case(architecture, 2, row, settings, packed_sequences=8)
    yield Case(architecture, 2, row, MemorySettings(), packed_sequences=8, forward_only=True)
    yield Case(architecture, 2, row, MemorySettings(), packed_sequences=5)


def step(backend: str, wanted: Iterable[Case], out: Path, layout: Layout) -> int:
    """Takes the steps of one rank that the file does not have yet.

    Returns:
        How many steps failed. On a single rank the others go on; their ranks would wait for each other.
    """
    known = map(StepRecord.from_dict, map(json.loads, out.read_text().splitlines() if out.exists() else []))
    done = {_key(record) for record in known}
    failed = 0
    with out.open("a") as lines, ExitStack() as open_lab, abort_job_on_error():
        lab: Lab | None = None
        for case in wanted:
            architecture, num_layers, workload, settings, state, packed_sequences, forward_only = case
            model: dict[str, Any] = {"num_layers": num_layers, "layout": layout, "state": state}
            model |= {"packed_sequences": packed_sequences, **workload}
            scenario = Scenario.of(architecture, **model)
            if (scenario, settings, forward_only) in done:
                continue
            try:
                if lab is None or not _has_model_of(lab.scenario, scenario):
                    lab = None
                    open_lab.close()
                    lab = open_lab.enter_context(Lab(architecture, **model, backend=backend))
                lab.set_workload(**workload)
                with noting_routes() as counts:
                    record = lab.forward_only(settings, warm_up=True) if forward_only else lab.step(settings)
                record = with_routes(record, counts)
            except Exception as error:
                if layout.world_size > 1:
                    raise
                failed += 1
                print(f"FAILED {scenario}, {settings}: {type(error).__name__}: {error}"[:500])
                continue
            print(record.scenario, record, flush=True)
            values = record.to_dict() | {"peak_by_module": {}}  # most of the file
            lines.write(json.dumps(values) + "\n")
            lines.flush()
    return failed


def _key(record: StepRecord) -> tuple[Scenario, MemorySettings, bool]:
    return replace(record.scenario, routing=Routing(), versions=Versions()), record.settings, record.forward_only


@contextmanager
def noting_routes() -> Iterator[list[list[int]]]:
    """Yields a list to which each call of a layer's experts adds their numbers of tokens.

    They are on the host when the experts are called, so nothing is allocated to note them.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP  # after memlab, which silences its advice

    forward, counts = TEGroupedMLP.forward, list[list[int]]()

    def noting(experts: Any, hidden: Any, tokens_per_expert: Any, *others: Any) -> Any:
        counts.append(tokens_per_expert.tolist())
        return forward(experts, hidden, tokens_per_expert, *others)

    with patch.object(TEGroupedMLP, "forward", noting):
        yield counts


def with_routes(record: StepRecord, counts: list[list[int]]) -> StepRecord:
    """Returns a record whose scenario has the routes of its step, where each layer was passed once.

    Every rank of a job calls it. Under expert parallelism each rank notes the rows of its own experts, which the ranks
    of the group sent together. The scenario has one list for the tokens of each rank, so it gets the mean of theirs.
    """
    scenario, layout = record.scenario, record.scenario.layout
    passes_again = scenario.num_microbatches > 1 or checkpoints_moe_layers(record.settings, scenario.architecture)
    num_senders = layout.expert_model_parallel_size
    if not counts or passes_again or layout.world_size > num_senders:
        return record
    of_step = counts[-scenario.num_layers :]  # what came before filled caches
    if num_senders > 1:
        of_ranks: list[list[list[int]]] = [[]] * num_senders
        torch.distributed.all_gather_object(of_ranks, of_step)
        of_step = [_mean_of_senders(list(chain(*layers)), num_senders) for layers in zip(*of_ranks, strict=True)]
    return replace(
        record, scenario=replace(scenario, routing=Routing(kind="counts", counts=tuple(map(tuple, of_step))))
    )


def _mean_of_senders(counts: list[int], num_senders: int) -> list[int]:
    """Divides each expert's rows by the number of ranks that sent them; the first remainders are rounded up."""
    means = [count // num_senders for count in counts]
    left = sum(counts) // num_senders - sum(means)
    for expert in [place for place, count in enumerate(counts) if count % num_senders][:left]:
        means[expert] += 1
    return means


def _has_model_of(scenario: Scenario, other: Scenario) -> bool:
    """Whether a lab of one scenario can take the other's step."""
    workload: dict[str, Any] = {name: getattr(other, name) for name in USUAL}
    return replace(scenario, **workload, versions=other.versions) == other


def rank_file(path: Path, architecture: str, job: str) -> Path:
    """Returns where a rank of a job writes."""
    return path.with_name(f"{path.stem}-{architecture}-{job}-{rank()}{path.suffix}")


def measure(backend: str, job: str | None, out: Path, *, what: str, only: str | None) -> int:
    """Measures the cases of one rank, or of a job under torchrun; returns how many steps failed."""
    if job is None:
        every = {"settings": cases, "states": state_cases, "rl": rl_cases}[what]()
        wanted = (case for case in every if only in (None, case.architecture))
        return step(backend, wanted, out, Layout())
    architecture, _, name = job.partition(":")
    layout = replace(JOBS[name][0], rank=rank())
    wanted = {"settings": job_cases, "states": job_state_cases, "rl": job_rl_cases}[what](architecture, name)
    return step(backend, wanted, rank_file(out, architecture, name), layout)


def predict(measured: Path) -> None:
    """Predicts what was measured, and prints the errors."""
    steps = [StepRecord.from_dict(json.loads(line)) for line in measured.read_text().splitlines()]
    print(accuracy_page(pairs_of(steps, predict_measured(steps))))


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    stepping = commands.add_parser("measure")
    stepping.add_argument("--backend", default="auto")
    stepping.add_argument("--job", metavar="ARCHITECTURE:JOB", help=f"under torchrun, with JOB of {', '.join(JOBS)}")
    instead = stepping.add_mutually_exclusive_group()
    for name, meaning in (("states", "training states"), ("rl", "packed rows and passes without gradients")):
        text = f"measure {meaning} in place of settings"
        instead.add_argument(f"--{name}", dest="what", action="store_const", const=name, default="settings", help=text)
    stepping.add_argument("--only", metavar="ARCHITECTURE", help="measure the cases of one architecture")
    stepping.add_argument("--out", type=Path, required=True)
    commands.add_parser("predict").add_argument("measured", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        failed = measure(arguments.backend, arguments.job, arguments.out, what=arguments.what, only=arguments.only)
        if failed:
            sys.exit(f"{failed} steps failed: their lines above begin with FAILED")
    else:
        predict(arguments.measured)


if __name__ == "__main__":
    main()
