"""Jobs of plain Megatron-Core with CUDA graphs on one GPU: what torch's allocator holds before, at and after a capture.

    python -m benchmarks.cuda_graphs measure FOLDER [NAME ...]      a machine with a GPU; each job in its own process
    python -m benchmarks.cuda_graphs collect FOLDER                 prints all lines

`tests/unit/test_cuda_graphs.py` compares the lines of `labs/results/h200_cuda_graphs.jsonl` with predictions. Measuring
imports nothing of memlab. Eager steps come first, then the capture, then replayed steps. A capture by Transformer
Engine is a phase of its own; Megatron captures graphs of layers at the end of the first step, and a graph of the whole
iteration within a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ACTIVATION = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
BRIDGE = {
    "gradient_accumulation_fusion": True,
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
}
"""Of the recipes of Megatron-Bridge whose performance NVIDIA publishes."""
LOW = {"grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
WHOLE = {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"], "cuda_graph_warmup_steps": 2}
LOCAL = {"cuda_graph_impl": "local", "cuda_graph_scope": [], "cuda_graph_warmup_steps": 1}
REUSE = "graph_capture_record_stream_reuse:True"
EXPAND = "expandable_segments:True"
SEQUENCE = 4096
STEPS_AFTER = 3


def _job(
    model: str,
    num_layers: int,
    num_microbatches: int,
    graphs: dict[str, Any],
    allocator: str = "",
    *,
    state: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    job = {"model": model, "num_layers": num_layers, "num_microbatches": num_microbatches}
    job |= {"state": state or {}, "settings": settings or {}, "graphs": graphs}
    variables = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "NCCL_GRAPH_REGISTER": "0"} if allocator else {}
    return {**job, "environment_variables": variables, "ddp_on_side_stream": False, "frozen_mlp": False} | others


def _by_engine(*scope: str) -> dict[str, Any]:
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [*scope], "cuda_graph_warmup_steps": 2}


_side = {"ddp_on_side_stream": True}
_tensorwise = BRIDGE | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
_delayed = BRIDGE | {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
LLAMA, QWEN, EXPERTS = "llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b"
ROUTED = ("attn", "moe_router", "moe_preprocess")
JOBS = {
    "full-1": _job(LLAMA, 3, 1, WHOLE, **_side),
    "full-2": _job(LLAMA, 3, 2, WHOLE, **_side),
    "full-3-fused": _job(LLAMA, 3, 3, WHOLE, state=BRIDGE, **_side),
    "full-3-bridge": _job(LLAMA, 3, 3, WHOLE, f"{EXPAND},{REUSE}", state=BRIDGE, **_side),
    "full-2-no-side-stream": _job(LLAMA, 3, 2, WHOLE, state=BRIDGE),
    "full-2-recompute": _job(LLAMA, 3, 2, WHOLE, settings=FULL, **_side),
    "full-2-fp8": _job(LLAMA, 3, 2, WHOLE, state=_tensorwise, **_side),
    "unseen-full-qwen3-8b": _job(QWEN, 4, 4, WHOLE, f"{EXPAND},{REUSE}", state=BRIDGE),
    "unseen-full-llama-1b-tied": _job("llama-3.2-1b", 8, 3, WHOLE, REUSE, state=BRIDGE),
    "unseen-full-phi-mini-kept": _job("phi-4-mini", 4, 3, WHOLE, **_side),
    "unseen-full-fp8-delayed": _job(LLAMA, 2, 3, WHOLE, f"{EXPAND},{REUSE}", state=_delayed),
    "unseen-full-qwen-mlp-recompute": _job("qwen2.5-7b", 3, 2, WHOLE, f"{EXPAND},{REUSE}", state=BRIDGE, settings=MLP),
    "unseen-full-low-precision": _job(LLAMA, 4, 2, WHOLE, f"{EXPAND},{REUSE}", state=BRIDGE | LOW),
    "te-mlp-1": _job(LLAMA, 3, 1, _by_engine("mlp")),
    "te-mlp-2-frozen": _job(LLAMA, 3, 2, _by_engine("mlp"), frozen_mlp=True),
    "te-attn-2": _job(LLAMA, 3, 2, _by_engine("attn")),
    "te-layer-1": _job(LLAMA, 3, 1, _by_engine()),
    "te-moe-1": _job(EXPERTS, 2, 1, _by_engine(*ROUTED)),
    "te-moe-2-bridge": _job(
        *(EXPERTS, 2, 2, _by_engine(*ROUTED), EXPAND),
        state={"gradient_accumulation_fusion": True},
        settings=ACTIVATION,
    ),
    "unseen-te-qwen3-8b": _job(QWEN, 4, 2, _by_engine("attn", "mlp"), EXPAND, state=BRIDGE),
    "unseen-te-mlp-fused": _job("llama-3.2-1b", 6, 2, _by_engine("mlp"), state=BRIDGE),
    "unseen-te-moe-router": _job(EXPERTS, 3, 1, _by_engine("attn", "moe_router")),
    "local-1": _job(LLAMA, 3, 1, LOCAL),
    "local-2": _job(LLAMA, 2, 2, LOCAL),
    "local-moe-router": _job(EXPERTS, 2, 1, LOCAL | {"cuda_graph_scope": ["moe_router"]}),
}


def measure(folder: Path, names: list[str]) -> int:
    """Takes the jobs, each in a process of its own; returns how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or JOBS:
        command = [sys.executable, "-m", "benchmarks.cuda_graphs", "take", str(folder), name]
        variables = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FRAMEWORK": "pytorch"}
        variables |= {"NVTE_CPU_OFFLOAD_V1": "1", **JOBS[name]["environment_variables"]}
        done = subprocess.run(command, env={**os.environ, **variables}, check=False, timeout=300)
        print(f"{name}: {'ok' if done.returncode == 0 else 'failed'}", flush=True)
        failed += done.returncode != 0
    return failed


def take(folder: Path, name: str) -> None:
    """Takes one job on this process's GPU, and writes its line."""
    import torch
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    from benchmarks import megatron_rank
    from benchmarks.megatron_jobs import EMBEDDINGS, Job
    from benchmarks.megatron_passes import forward_of

    row = JOBS[name]
    graphs = row["graphs"]
    fields = ("model", "num_layers", "num_microbatches", "state", "settings")
    job = Job(
        **{field: row[field] for field in fields},
        layout="one rank",
        vocab_size=EMBEDDINGS[row["model"]]["vocab_size"],
        seq_length=SEQUENCE,
        config=graphs,
    )
    seeding = partial(megatron_rank.model_parallel_cuda_manual_seed, te_rng_tracker=True, use_cudagraphable_rng=True)
    phases: list[dict[str, Any]] = []
    with ExitStack() as entered:
        entered.enter_context(megatron_rank.on_device(0))
        if graphs["cuda_graph_impl"] == "transformer_engine":
            torch.cuda.set_stream(torch.cuda.Stream())  # as training/initialize.py of Megatron-Bridge does
        store = torch.distributed.HashStore()
        megatron_rank.join(store, 0, 1, job)
        init_num_microbatches_calculator(0, None, job.num_microbatches, 1, 1)
        entered.enter_context(patch.object(megatron_rank, "model_parallel_cuda_manual_seed", seeding))
        if row["ddp_on_side_stream"]:
            build = partial(_on_side_stream, megatron_rank.DistributedDataParallel)
            entered.enter_context(patch.object(megatron_rank, "DistributedDataParallel", build))
        if row["frozen_mlp"]:
            frozen = partial(_with_frozen_mlp, megatron_rank.gpt_model)
            entered.enter_context(patch.object(megatron_rank, "gpt_model", frozen))
        config = megatron_rank.transformer_config(job)
        with _phase("build", phases):
            chunks, optimizer, reference = megatron_rank.build(job, config)
        forward, schedule = forward_of(job.state, reference, chunks), get_forward_backward_func()
        if "full_iteration" in graphs["cuda_graph_scope"]:
            schedule = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=graphs["cuda_graph_warmup_steps"])
        helper = None
        if graphs["cuda_graph_impl"] == "transformer_engine":
            helper = TECudaGraphHelper(chunks, config, SEQUENCE, 1, [optimizer])
        routes = entered.enter_context(megatron_rank.noting_routes(chunks)) if row["model"] == EXPERTS else {}
        entered.enter_context(patch.object(megatron_rank, "get_forward_backward_func", lambda: schedule))
        for number in range(graphs["cuda_graph_warmup_steps"] + STEPS_AFTER):
            if helper is not None and number == graphs["cuda_graph_warmup_steps"]:
                with _phase("capture", phases):
                    helper.create_cudagraphs()
            with _phase(f"step {number}", phases):
                megatron_rank.take_step(job, chunks, optimizer, forward)
        line = {"name": name, **row, "phases": phases, "routes": routes, "environment": megatron_rank.environment()}
        (folder / f"{name}.json").write_text(json.dumps(line) + "\n")
    os._exit(0)  # graphs that are freed after CUDA's context end in an error


def _on_side_stream(build: Any, *given: Any, **named: Any) -> Any:
    """Builds DDP as ``get_model`` of Megatron-LM does, so that autograd adds gradients on a stream of its own."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = build(*given, **named)
    torch.cuda.current_stream().wait_stream(stream)
    return model


def _with_frozen_mlp(build: Any, *given: Any, **named: Any) -> Any:
    model = build(*given, **named)
    for layer in model.decoder.layers:
        layer.mlp.requires_grad_(False)
    return model


@contextmanager
def _phase(name: str, phases: list[dict[str, Any]]) -> Iterator[None]:
    """Notes what torch had allocated and reserved in the block, and in pools of graphs after it."""
    import torch

    torch.cuda.synchronize()
    row: dict[str, Any] = {"phase": name, "start": torch.cuda.memory_allocated()}
    row["reserved_start"] = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    pools: dict[str, dict[str, int]] = {}
    for segment in torch.cuda.memory_snapshot():
        kind = "default" if tuple(segment["segment_pool_id"]) == (0, 0) else "private"
        pool = pools.setdefault(kind, {"reserved_bytes": 0, "allocated_bytes": 0})
        pool["reserved_bytes"] += segment["total_size"]
        pool["allocated_bytes"] += segment["allocated_size"]
    row |= {"peak": torch.cuda.max_memory_allocated(), "reserved_peak": torch.cuda.max_memory_reserved()}
    row |= {"end": torch.cuda.memory_allocated(), "reserved_end": torch.cuda.memory_reserved(), "pools": pools}
    phases.append(row)


def main() -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "collect", "take"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        return measure(arguments.folder, arguments.names)
    if arguments.command == "take":
        take(arguments.folder, arguments.names[0])
    for file in sorted(arguments.folder.glob("*.json")):
        print(file.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
