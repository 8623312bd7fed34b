"""Steps of NeMo Automodel's and verl's own trainers, measured without memlab; and how near its predictions come.

    python -m benchmarks.framework_steps measure FOLDER [--seconds 120]    a machine with a GPU, and the frameworks
    python -m benchmarks.framework_steps measure FOLDER                    without a GPU: a rehearsal at tiny sizes
    python -m benchmarks.framework_steps predict FOLDER/steps.jsonl        anywhere with memlab

Each job is a recipe or a launch script that its framework reads, with random weights and tokens. Automodel runs
``TrainFinetuneRecipeForNextTokenPrediction``, and verl the ``TrainingWorker`` of its SFT trainer, or all phases of its
actor and reference model (`benchmarks.verl_actor`). One GPU takes the steps of the first of many ranks: the process
group is torch's fake one, whose collectives allocate nothing; here a reduce-scatter and an all-gather also copy this
rank's part, and a sum is that of equal ranks. Modules that a step does not call are absent: data sets, loggers, readers
of images.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import verl_actor
from benchmarks.verl_actor import ACTOR

GIB = 2**30
JOB_SECONDS = 90
NUM_STEPS = 3
_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False},
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {  # with a small vocabulary, so that layers have the peak
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 8192, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
        "attention_bias": False},
    **{
        name: {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden,
            "intermediate_size": ffn, "moe_intermediate_size": of_expert, "num_attention_heads": heads,
            "num_key_value_heads": heads, "vocab_size": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960, "tie_word_embeddings": False, "n_routed_experts": experts,
            "n_shared_experts": shared, "num_experts_per_tok": chosen, "first_k_dense_replace": dense,
            "n_group": groups, "topk_group": of_groups, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
            "q_lora_rank": of_query, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
        for name, hidden, ffn, of_expert, heads, experts, shared, chosen, dense, groups, of_groups, of_query in (
            ("moonlight-16b-a3b", 2048, 11264, 1408, 16, 64, 2, 6, 1, 1, 1, None),
            ("deepseek-v3", 7168, 18432, 2048, 128, 256, 1, 8, 3, 8, 4, 1536))
    },
    **{
        name: {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
            "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": 151936,
            "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True}
        for name, hidden, ffn, heads in (
            ("qwen2.5-0.5b", 896, 4864, 14), ("qwen2.5-1.5b", 1536, 8960, 12), ("qwen2.5-3b", 2048, 11008, 16))
    },
}  # fmt: skip
"""From the models' config.json."""
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 512, "head_dim": 32, "num_experts": 16, "moe_intermediate_size": 64, "n_routed_experts": 16,
         "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}  # fmt: skip
_BACKEND = {
    "_target_": "nemo_automodel.components.models.common.BackendConfig", "linear": "torch", "rms_norm": "torch_fp32",
    "enable_hf_state_dict_adapter": False, "dispatcher": "torch", "experts": "torch_mm",
}  # fmt: skip
"""Of models with experts, of which Automodel has classes of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of a framework."""

    framework: str
    model: str
    num_layers: int = 4
    seq_length: int = 4096
    num_ranks: int = 8
    sequences: tuple[int, ...] = ()
    """Lengths of the sequences that verl packs into a row; none is one of `seq_length` tokens."""
    num_microbatches: int = 1
    options: tuple[str, ...] = ()
    """Of the recipe, as ``key=value``."""
    is_tiny: bool = False

    @property
    def name(self) -> str:
        """What tells it from the others."""
        number = f"{self.num_layers} layers, {self.seq_length} tokens, {self.num_ranks} ranks"
        more = [f"rows of {self.sequences}"] * bool(self.sequences)
        more += [f"{self.num_microbatches} micro-batches"] * (self.num_microbatches > 1)
        return ", ".join([f"{self.framework}: {self.model}", number, *more, *self.options])


def jobs() -> list[Job]:
    """Returns the jobs, the most telling first."""
    auto = Job(framework="automodel", model="llama-3.1-8b", options=("model.force_hf=true",))
    verl = Job(framework="verl", model="qwen3-8b")
    checkpoints, frozen = "distributed.activation_checkpointing=true", "peft.dim=16"
    no_checkpoints = "model.enable_gradient_checkpointing=false"

    def of_auto(model: str, *options: str, **fields: Any) -> Job:
        return replace(auto, model=model, options=(*auto.options, *options), **fields)

    def of_verl(model: str, *options: str, **fields: Any) -> Job:
        return replace(verl, model=model, options=options, **fields)

    own = replace(auto, model="qwen3-30b-a3b", num_layers=2, seq_length=8192)
    sdpa, te, balanced = "backend.attn=sdpa", "backend.attn=te", "backend.fake_balanced_gate=true"
    shared, of_four = "distributed.ep_size=8", "distributed.ep_size=4"
    of_te = ("backend.linear=te", "backend.rms_norm=te")

    def of_experts(*options: str, **fields: Any) -> Job:
        return replace(own, options=options, **fields)

    return [
        of_auto("llama-3.1-8b"),
        of_verl("qwen3-8b"),
        of_auto("llama-3.1-8b", checkpoints),
        of_verl("qwen3-8b", no_checkpoints),
        of_auto("qwen3-8b", frozen),
        of_verl("llama-3.1-8b", "model.lora_rank=16"),
        of_verl("llama-3.1-8b", num_ranks=1),
        of_auto("qwen3-8b", checkpoints, "model.torch_dtype=float32"),
        of_verl("qwen3-8b", sequences=(2048, 2048)),
        of_auto("llama-3.1-8b", num_microbatches=2),
        of_verl("qwen3-8b", "engine.model_dtype=bfloat16", num_microbatches=2),
        of_auto("llama-3.1-8b", checkpoints, frozen, seq_length=8192),
        of_verl("llama-3.1-8b", "engine.optimizer_offload=true", "engine.param_offload=true"),
        of_auto("qwen3-8b", "distributed.defer_fsdp_grad_sync=false", num_microbatches=2),
        of_verl("qwen3-8b", "engine.strategy=fsdp"),
        replace(auto, options=()),
        replace(auto, options=(checkpoints,)),
        of_auto("llama-3.1-8b", "distributed.tp_size=2"),
        of_auto("llama-3.1-8b", "distributed.cp_size=2"),
        of_auto("qwen3-8b", "distributed.activation_checkpointing=selective"),
        replace(auto, model="qwen3-8b", options=()),
        of_auto("llama-3.1-8b", checkpoints, "optimizer.fused=true"),
        of_auto("llama-3.1-8b", checkpoints, "optimizer.foreach=false"),
        of_auto("qwen3-8b", checkpoints, "optimizer._target_=torch.optim.Adam"),
        of_auto("qwen3-8b", checkpoints, "distributed.reshard_after_forward=false"),
        of_auto("qwen3-8b", "distributed.tp_size=2", "distributed.sequence_parallel=true", checkpoints),
        of_auto("llama-3.1-8b", checkpoints, "distributed.cp_size=2", seq_length=8192),
        of_verl("llama-3.1-8b", "engine.strategy=fsdp", "engine.use_orig_params=true"),
        of_verl("llama-3.1-8b", "engine.reshard_after_forward=false"),
        of_verl("qwen3-8b", "engine.forward_prefetch=true", num_microbatches=2),
        of_verl("llama-3.1-8b", "engine.fsdp_size=4"),
        of_experts(sdpa),
        of_experts(sdpa, shared, balanced),
        of_experts(sdpa, shared, checkpoints, balanced, num_layers=4),
        of_experts(te, shared, checkpoints, num_layers=4, seq_length=16384),
        of_experts(te, checkpoints),
        of_experts(te, of_four, checkpoints, balanced),
        of_experts(te, shared, "model.torch_dtype=float32", balanced, seq_length=4096),
        of_experts(te, shared, checkpoints, *of_te, balanced, num_layers=4),
        of_experts(sdpa, shared, checkpoints, num_microbatches=2),
        *latent_jobs(replace(own, model="moonlight-16b-a3b", num_layers=4, seq_length=8192)),
    ]


def latent_jobs(own: Job) -> list[Job]:
    """Returns jobs of Automodel's class of DeepSeek-V3.

    Args:
        own: Of a model of it, without options.
    """
    te, fake, checkpoints = (
        "backend.attn=te",
        "backend.fake_balanced_gate=true",
        "distributed.activation_checkpointing=true",
    )
    shared, of_four = "distributed.ep_size=8", "distributed.ep_size=4"
    large = replace(own, model="deepseek-v3", seq_length=4096)
    return [
        replace(own, options=(te, shared, checkpoints)),
        replace(own, options=(te, shared, fake)),
        replace(own, options=(te, checkpoints), num_layers=2),
        replace(large, options=(te, shared, fake, checkpoints)),
        replace(own, options=(te, of_four, fake, "model.torch_dtype=float32")),
        replace(own, options=(te, shared, fake, checkpoints, "backend.linear=te", "backend.rms_norm=te")),
        replace(large, options=(te, shared, fake), num_layers=5),
    ]


def actor_jobs() -> list[Job]:
    """Returns the jobs whose phases are measured, the most telling first."""
    fsdp, reference, model = f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref", "actor_rollout_ref.model"
    actor = Job(framework="verl-actor", model="qwen3-8b", num_layers=2)
    offload = (f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true")
    first = f"{ACTOR}.strategy=fsdp"
    compiled, chunks = f"{fsdp}.use_torch_compile=true", f"{ACTOR}.entropy_from_logits_with_chunking=true"
    bf16 = (f"{fsdp}.model_dtype=bf16", f"{reference}.fsdp_config.model_dtype=bf16")

    def of(name: str, *options: str, **fields: Any) -> Job:
        return replace(actor, model=name, options=options, **fields)

    return [
        of("qwen3-8b"),
        of("qwen3-8b", first, *offload),
        of("qwen2.5-1.5b", *offload, num_layers=28),
        of("llama-3.1-8b", compiled),
        of("llama-3.1-8b", first, f"{model}.lora_rank=16"),
        of("qwen2.5-0.5b", num_layers=24),
        of("llama-3.1-8b", chunks, f"{ACTOR}.entropy_from_logits_chunk_size=1024"),
        of("qwen3-8b", f"{model}.lora_rank=16"),
        of("qwen2.5-3b", *offload, *bf16, num_layers=36, num_microbatches=2),
        of("qwen2.5-0.5b", num_layers=24, num_ranks=1),
        of("llama-3.1-8b", f"{fsdp}.offload_policy=true"),
        of("qwen2.5-1.5b", first, num_layers=28, sequences=(2048, 2048)),
        of("qwen3-8b", f"{fsdp}.reshard_after_forward=false"),
    ]


def write_job(job: Job, folder: Path) -> Path:
    """Writes a job file that both its framework and memlab read, and the model's config.json; returns its path."""
    folder = folder.resolve()
    of_model = folder / "models" / f"{job.model}-{job.num_layers}{'-tiny' * job.is_tiny}"
    of_model.mkdir(parents=True, exist_ok=True)
    values = _MODELS[job.model] | (_TINY if job.is_tiny else {}) | {"num_hidden_layers": job.num_layers}
    (of_model / "config.json").write_text(json.dumps(values | {"torch_dtype": "bfloat16"}))
    files = folder / "jobs"
    files.mkdir(exist_ok=True)
    name = f"{zlib.crc32(job.name.encode()):08x}"
    if job.framework != "automodel":
        file = files / f"{name}.sh"
        is_actor = job.framework == "verl-actor"
        words = " \\\n  ".join((overrides_of_actor if is_actor else overrides_of_verl)(job, of_model))
        started = f"torchrun --nnodes=1 --nproc_per_node={job.num_ranks} -m verl.trainer.sft_trainer"
        file.write_text(f"{'python3 -m verl.trainer.main_ppo' if is_actor else started} \\\n  {words}\n")
    else:
        import yaml

        file = files / f"{name}.yaml"
        file.write_text(yaml.safe_dump(recipe_of_automodel(job, of_model), sort_keys=False))
    return file


def overrides_of_verl(job: Job, of_model: Path) -> list[str]:
    """Returns the overrides of verl's SFT trainer; FSDP2 unless the job says else."""
    longest = max(job.sequences or (job.seq_length,))
    rows = len(job.sequences) or 1
    values = {
        "model.path": str(of_model),
        "engine": "fsdp",
        "engine.strategy": "fsdp2",
        "+model.override_config.attn_implementation": "sdpa",  # flash-attn is not needed then
        "data.train_batch_size": str(rows * job.num_microbatches * job.num_ranks),
        "data.use_dynamic_bsz": "false",
        "data.micro_batch_size_per_gpu": str(rows),
        "data.max_length": str(longest),
        "optim.lr": "1e-5",
    }
    values |= dict(option.split("=", 1) for option in job.options)
    return [f"{key}={value}" for key, value in values.items()]


def overrides_of_actor(job: Job, of_model: Path) -> list[str]:
    """Returns the overrides of verl's trainer for reinforcement learning."""
    longest, rows = max(job.sequences or (job.seq_length,)), len(job.sequences) or 1
    values = verl_actor.overrides(of_model, rows, job.num_microbatches, job.num_ranks, longest)
    values |= dict(option.split("=", 1) for option in job.options)
    return [f"{key}={value}" for key, value in values.items()]


def recipe_of_automodel(job: Job, of_model: Path) -> dict[str, Any]:
    """Returns a recipe as Automodel's benchmarks are."""
    sizes = [int(option[-1]) for option in job.options if option.startswith(("distributed.tp_", "distributed.cp_"))]
    data_ranks = job.num_ranks // math.prod(sizes)
    recipe: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "seed": 1111,
        "step_scheduler": {
            "global_batch_size": job.num_microbatches * data_ranks,
            "local_batch_size": 1,
            "ckpt_every_steps": 1000,
            "val_every_steps": 1000,
            "max_steps": NUM_STEPS,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 1},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {
                "_target_": "transformers.AutoConfig.from_pretrained",
                "pretrained_model_name_or_path": str(of_model),
            },
            "torch_dtype": "bf16",
            "use_liger_kernel": False,
        },
        "distributed": {"strategy": "fsdp2", "dp_size": data_ranks, "tp_size": 1, "cp_size": 1},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
            "vocab_size": 512,
            "seq_len": job.seq_length,
            "num_samples": 1000,
            "batch_size": 1,
            "tokenizer": None,
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "checkpoint": {"enabled": False, "checkpoint_dir": str(of_model / "checkpoints")},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5, "weight_decay": 0.01},
    }
    if any(option.startswith("peft.") for option in job.options):
        recipe["peft"] = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "target_modules": "*_proj"}
    if {"num_experts", "n_routed_experts"} & _MODELS[job.model].keys():
        del recipe["model"]["use_liger_kernel"]
        recipe["backend"] = recipe["model"]["backend"] = dict(_BACKEND)
    for option in job.options:
        key, value = option.split("=", 1)
        section, name = key.split(".")
        recipe[section][name] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    recipe.pop("backend", None)
    return recipe


def measure(folder: Path, only: str, seconds: float) -> int:
    """Takes the jobs' steps, one process for each job, which is forked from one that has imported the frameworks."""
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    os.environ.setdefault("MASTER_PORT", "29555")
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    on_gpu = torch.cuda.is_available()
    file, failed = folder / "steps.jsonl", 0
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {row["name"] for row in rows if "error" not in row}
    wanted = [job for job in (*jobs(), *actor_jobs()) if only in job.name and job.name not in done]
    _import_frameworks({job.framework for job in wanted})
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    for job in wanted:
        if time.monotonic() - started > seconds:
            break
        taken = job if on_gpu else _tiny(job)
        path, written = write_job(taken, folder), folder / "row.json"
        written.unlink(missing_ok=True)
        process = context.Process(target=run, args=(taken, path, written, on_gpu))
        process.start()
        process.join(JOB_SECONDS)
        process.kill()
        row = json.loads(written.read_text()) if written.exists() else {"error": "ended"}
        failed += "error" in row
        with file.open("a") as lines:
            lines.write(json.dumps({"name": job.name, "job": asdict(taken), **row}) + "\n")
        steps = row.get("phases") or dict(enumerate(row.get("steps", ())))
        said = row.get("error") or {
            name: {key: round(step[key] / GIB, 3) for key in step} for name, step in steps.items()
        }
        print(f"{time.monotonic() - started:.0f} s: {job.name}: {said}", flush=True)
    return failed


def _tiny(job: Job) -> Job:
    return replace(job, is_tiny=True, seq_length=64, sequences=(32, 32) if job.sequences else ())


def run(job: Job, path: Path, written: Path, on_gpu: bool) -> None:
    """Takes the steps of a job, and writes what they needed."""
    log = path.with_suffix(".log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        _import_frameworks({job.framework})
        _start_ranks(job.num_ranks, on_gpu)
        meter = _Meter(on_gpu)
        {"automodel": take_automodel, "verl": take_verl, "verl-actor": take_actor}[job.framework](job, path, meter)
        row: dict[str, Any] = {"steps": meter.steps, "phases": meter.phases, **meter.where()}
    except BaseException as error:  # noqa: BLE001 - the other jobs go on
        traceback.print_exc()
        row = {"error": f"{traceback.format_exc().splitlines()[-1]} ({type(error).__name__})"}
    whole = written.with_suffix(".writing")
    whole.write_text(json.dumps(row))
    whole.rename(written)
    os._exit(0)


class _Meter:
    """Reads what torch's allocator has in use at the start of a step, at its peak, and reserves."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.steps = on_gpu, list[dict[str, int]]()
        self.phases: dict[str, dict[str, int]] = {}
        """The last time of each."""

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step that is measured; before the first, unused segments are freed."""
        import torch

        def measured(*args: Any, **named: Any) -> Any:
            if self.on_gpu:
                gc.collect()
                if not self.steps:
                    torch.cuda.empty_cache()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                row = {"start": torch.cuda.memory_allocated()}
            result = step(*args, **named)
            if self.on_gpu:
                torch.cuda.synchronize()
                row |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
                self.steps.append(row)
            else:
                self.steps.append({})
            return result

        return measured

    def phase(self, name: str, function: Callable[[], object]) -> None:
        """Runs a phase, and reads the same of it, with what is in use at its end."""
        import torch

        self.phases[name] = {}
        if not self.on_gpu:
            function()
            return
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        row = {"start": torch.cuda.memory_allocated()}
        function()
        torch.cuda.synchronize()
        row |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        self.phases[name] = row | {"end": torch.cuda.memory_allocated()}

    def where(self) -> dict[str, Any]:
        """Returns the GPU and the versions, and whether the package flash-attn (or its loss) is there."""
        import torch
        import transformers

        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        found["flash_attn"] = importlib.util.find_spec("flash_attn") is not None
        return found | {"gpu": torch.cuda.get_device_name()} if self.on_gpu else found


def _start_ranks(num_ranks: int, on_gpu: bool) -> None:
    """Makes this process the first of many ranks, by torch's fake process group; a single rank starts itself."""
    import torch
    import torch.distributed as dist

    if not on_gpu:
        _pretend_cuda()
    if num_ranks == 1 and not on_gpu:
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["WORLD_SIZE"] = str(num_ranks)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    new_group, scatter, gather = dist.new_group, dist.reduce_scatter_tensor, dist.all_gather_into_tensor
    reduce, gather_list = dist.all_reduce, dist.all_gather

    def copied_scatter(output: Any, input: Any, *args: Any, **named: Any) -> Any:  # noqa: A002 - torch's name
        work = scatter(output, input, *args, **named)
        output.copy_(input.flatten()[: output.numel()].view_as(output))
        return work

    def copied_gather(output_tensor: Any, input_tensor: Any, *args: Any, **named: Any) -> Any:
        work = gather(output_tensor, input_tensor, *args, **named)
        for part in output_tensor.flatten().chunk(output_tensor.numel() // input_tensor.numel()):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.flatten())
        return work

    def summed_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return reduce(tensor, op, group, async_op)

    def gathered(parts: Any, own: Any, *args: Any, **named: Any) -> Any:
        work = gather_list(parts, own, *args, **named)
        torch._foreach_copy_(parts, [own] * len(parts))
        return work

    dist.all_gather = gathered
    dist.new_group = lambda *args, **named: new_group(*args, **(named | {"backend": "fake"}))
    dist.reduce_scatter_tensor, dist.all_gather_into_tensor = copied_scatter, copied_gather
    dist.all_reduce = summed_reduce
    torch.cuda.set_device(0)


def _pretend_cuda() -> None:
    """Lets a rehearsal without a GPU call what frameworks call."""
    import torch
    from torch.distributed.fsdp import _init_utils

    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize", "set_device", "ipc_collect"):
        setattr(torch.cuda, name, lambda *_: None)
    _init_utils._check_module_states_for_sync_module_states = lambda *_: None  # it wants modules on a GPU
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.max_memory_allocated = torch.cuda.max_memory_reserved = torch.cuda.memory_reserved = lambda *_: 0
    torch.cuda.memory_allocated, torch.cuda.mem_get_info = lambda *_: 0, lambda *_: (0, 1)
    torch.cuda.get_device_name = lambda *_: "H200"


def take_automodel(job: Job, path: Path, meter: _Meter) -> None:
    """Runs a recipe of NeMo Automodel."""
    import torch
    from nemo_automodel._transformers import auto_model
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.components.distributed import mesh_utils
    from nemo_automodel.components.training import signal_handler
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    device = torch.device("cuda" if meter.on_gpu else "cpu")
    signal_handler.get_device = lambda *_: device  # both know NCCL and gloo only
    mesh_utils._mesh_device_type = lambda: device.type
    mesh_utils._nccl_backend_override = lambda *_, **__: None  # meshes would have NCCL's groups beside the fake one
    mesh_utils._can_reuse_default_group = lambda *_: True
    if not meter.on_gpu:
        auto_model.torch = types.SimpleNamespace(**vars(torch) | {"device": lambda *_: device})
    from nemo_automodel.recipes._typed_config import RecipeConfig  # noqa: F401 - the recipe makes one

    recipe = TrainFinetuneRecipeForNextTokenPrediction(load_yaml_config(path))
    recipe.setup()
    recipe._run_train_optim_step = meter.around(recipe._run_train_optim_step)
    recipe.run_train_validation_loop()
    del job


def take_verl(job: Job, path: Path, meter: _Meter) -> None:
    """Runs the worker of verl's SFT trainer, as its ``fit`` does."""
    from functools import partial

    import torch
    from hydra import compose, initialize_config_module
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import sft_loss

    of_model = Path(next(word for word in path.read_text().split() if word.startswith("model.path="))[11:])
    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = [*overrides_of_verl(job, of_model), "+model.load_tokenizer=false", "optim.total_training_steps=3"]
        config = compose("sft_trainer_engine", overrides=overrides)
    _build_empty_models()
    if not meter.on_gpu:
        _pretend_verl_has_cpus()
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(config.model),
            engine_config=omega_conf_to_dataclass(config.engine),
            optimizer_config=omega_conf_to_dataclass(config.optim),
            checkpoint_config=omega_conf_to_dataclass(config.checkpoint),
        )
    )
    worker.set_loss_fn(loss_fn=partial(sft_loss, config=None))
    worker.reset()
    step = meter.around(worker.train_batch)
    collate = SFTTensorCollator(DatasetPadMode.NO_PADDING)
    lengths = (job.sequences or (job.seq_length,)) * job.num_microbatches
    for _ in range(NUM_STEPS):
        rows = [
            {"input_ids": torch.randint(512, (length,)), "position_ids": torch.arange(length),
             "loss_mask": torch.ones(length, dtype=torch.long)}
            for length in lengths
        ]  # fmt: skip
        named = {
            "use_remove_padding": config.model.use_remove_padding,
            "use_dynamic_bsz": config.data.use_dynamic_bsz,
            "max_token_len_per_gpu": config.data.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": config.data.micro_batch_size_per_gpu,
            "temperature": 1.0,
            "global_batch_size": config.data.train_batch_size,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "pad_token_id": 0,
        }
        data = tu.get_tensordict(tensor_dict=collate(rows), non_tensor_dict=named)
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=NonTensorData(list(lengths)))
        print(step(data=data))


def take_actor(job: Job, path: Path, meter: _Meter) -> None:
    """Runs the phases of verl's actor and reference model."""
    key = f"{verl_actor.MODEL}.path="
    of_model = Path(next(word for word in path.read_text().split() if word.startswith(key)).removeprefix(key))
    _build_empty_models()
    if not meter.on_gpu:
        _pretend_verl_has_cpus()
    lengths = [*(job.sequences or (job.seq_length,))] * job.num_microbatches
    verl_actor.take(overrides_of_actor(job, of_model), lengths, meter.phase, on_gpu=meter.on_gpu)


def _pretend_verl_has_cpus() -> None:
    import torch
    from verl.plugin.platform import get_platform
    from verl.utils import fsdp_utils

    kind: Any = type(get_platform())
    kind.set_allocator_settings = lambda *_: None
    fsdp_utils.torch = types.SimpleNamespace(**vars(torch) | {"device": lambda _: torch.device("cpu")})
    kind.device_name, kind.current_device = "cpu", lambda *_: torch.device("cpu")
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"


def _build_empty_models() -> None:
    """Lets verl, which loads a checkpoint, take zeros: a config.json is all that there is."""
    import torch
    from transformers import AutoModelForCausalLM

    def from_pretrained(*_: Any, config: Any, torch_dtype: Any, **__: Any) -> Any:
        device = torch.empty(0).device
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
        if device.type != "meta":
            model = model._apply(lambda tensor: torch.zeros_like(tensor, device=device))
            model.tie_weights()
            for module in model.modules():
                if hasattr(module, "inv_freq"):
                    module.__init__(config)  # its frequencies have been on meta
        return model

    AutoModelForCausalLM.from_pretrained = from_pretrained


_ABSENT_TOO = ("httpx",)
"""Those of transformers itself."""
_ABSENT = (
    "PIL", "aiohttp", "cachetools", "datasets", "fastapi", "flashoptim", "liger_kernel", "megatron_fsdp",
    "mistral_common", "msgspec", "orjson", "pandas", "pyarrow", "pygments", "pylatexenc", "quack", "ray", "rich",
    "starlette", "tensorboard", "tiktoken", "torchao", "torchvision", "uvicorn", "uvloop", "wandb", "zmq",
)  # fmt: skip


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are not installed, and whose names are only mentioned."""

    names: tuple[str, ...] = _ABSENT_TOO

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        del path, target
        is_one = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: Any) -> Any:
        return _AbsentModule(spec.name)

    def exec_module(self, module: Any) -> None:
        del module


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__init__": lambda *_, **__: None, "is_initialized": lambda *_: False})


def _import_frameworks(names: set[str]) -> None:
    """Imports frameworks; transformers looks what is installed before anything stands in for what is not."""
    checks: Any = types.ModuleType("transformers.dependency_versions_check")
    checks.dep_version_check = lambda *_: None  # of tokenizers, of which there are none here
    sys.modules.setdefault(checks.__name__, checks)
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent())
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

    _Absent.names = (*_ABSENT_TOO, *_ABSENT, *(("pydantic",) if names - {"automodel"} else ()))
    if "automodel" in names:
        from nemo_automodel.recipes.llm import train_ft  # noqa: F401
    if names - {"automodel"}:
        from verl.workers import engine_workers  # noqa: F401


def predict(file: Path) -> int:
    """Prints the errors of memlab's predictions of the same job files.

    Returns:
        How many peaks are more than 1 % off, and how many measured jobs memlab cannot predict.
    """
    from benchmarks.plain_fsdp2 import compared, print_summary

    errors: dict[str, list[float]] = {"start": [], "peak": [], "reserved": []}
    of_phases: dict[str, list[float]] = {}
    tries = [json.loads(line) for line in file.read_text().splitlines()]
    rows = {(row["name"], row.get("flash_attn")): row for row in tries}  # the last try of each
    not_predicted = 0
    for row in rows.values():
        if "error" in row:
            print(f"{row['name']}: not measured: {row['error']}")
            continue
        job = Job(**row["job"] | {key: tuple(row["job"][key]) for key in ("sequences", "options")})
        if job.framework == "verl-actor":
            phases = predicted_phases(job, write_job(job, file.parent / "predicted"), has_flash_attn=row["flash_attn"])
            words = compared_phases(phases, row["phases"], of_phases)
            print(f"{row['name']}:\n{words}", flush=True)
            continue
        try:
            predicted = predicted_of(job, write_job(job, file.parent / "predicted"), has_flash_attn=row["flash_attn"])
        except ValueError as error:
            not_predicted += 1
            print(f"{row['name']}: not predicted: {error}")
            continue
        words = compared(predicted, row["steps"][-1], errors)
        print(f"{row['name']}: {words or predicted}", flush=True)
    if errors["peak"]:
        print_summary(errors)
    for name, percents in of_phases.items():
        print(f"{name}: {len(percents)} phases, from {min(percents):+.2f} to {max(percents):+.2f} %")
    wrong = sum(abs(percent) > 1 for percents in (errors["peak"], *of_phases.values()) for percent in percents)
    return not_predicted + wrong


def predicted_phases(job: Job, path: Path, *, has_flash_attn: bool) -> dict[str, int]:
    """Returns what memlab predicts of each phase of a job file: allocated bytes at its peak.

    Args:
        job: Which was measured.
        path: Its file.
        has_flash_attn: As for `predicted_of`.
    """
    from memlab.jobs.job import Job as JobFile
    from memlab.lab.job_phases import predict_phases

    read = JobFile.read(path, world_size=job.num_ranks)
    scenario, settings = read.required()
    assert read.rollout is not None
    if has_flash_attn:
        scenario = replace(scenario, state=replace(scenario.state, loss_of_transformers="logprobs_flash_attn"))
    job_phases = predict_phases(scenario, settings, read.rollout)
    found = {}
    for phase in job_phases.phases:
        beside = phase.training_bytes - (phase.reserved_bytes or phase.training_bytes)
        found[phase.name] = phase.training_bytes if phase.allocated_bytes is None else phase.allocated_bytes + beside
    return found


def compared_phases(
    predicted: dict[str, int], measured: dict[str, dict[str, int]], errors: dict[str, list[float]]
) -> str:
    """Returns a line for each phase, and adds the errors of the allocated peaks."""
    lines = []
    for name, num_bytes in predicted.items():
        row = measured.get(name)
        if not row:
            lines.append(f"  {name:18} {num_bytes / GIB:8.3f} GiB predicted")
            continue
        percent = 100 * (num_bytes / row["peak"] - 1)
        errors.setdefault(name, []).append(percent)
        lines.append(
            f"  {name:18} {num_bytes / GIB:8.3f} GiB predicted, {row['peak'] / GIB:8.3f} measured, {percent:+.3f} %; "
            f"start {row['start'] / GIB:.3f}, reserved {row['reserved'] / GIB:.3f}, end {row['end'] / GIB:.3f}"
        )
    return "\n".join(lines)


def predicted_of(job: Job, path: Path, *, has_flash_attn: bool) -> dict[str, int]:
    """Returns what memlab predicts of a job file: bytes at the start of its second step, at its peak, and reserved.

    Args:
        job: Which was measured.
        path: Its file.
        has_flash_attn: Whether verl had flash-attn's loss, of which its job file says nothing.
    """
    from memlab import Lab
    from memlab.jobs.job import Job as JobFile

    version = {"automodel": "0.7.0"}.get(job.framework)
    scenario, settings = JobFile.read(path, world_size=job.num_ranks, version=version).required()
    if has_flash_attn and job.framework == "verl":
        scenario = replace(scenario, state=replace(scenario.state, loss_of_transformers="logprobs_flash_attn"))
    with Lab(scenario, backend="simulated") as lab:
        lab.step(settings)  # after a warm-up step
        record = lab.step(settings)
    return {
        "start": record.static_bytes,
        "peak": record.peak_allocated_bytes,
        "reserved": record.peak_reserved_bytes or 0,
    }


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--only", default="")
    measuring.add_argument("--seconds", type=float, default=120)
    commands.add_parser("predict").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "predict":
        return predict(arguments.file)
    return measure(arguments.folder, arguments.only, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
