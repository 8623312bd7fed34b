"""Steps of transformers' models with a vision tower under torch's FSDP2, measured without memlab; and predictions.

    python -m benchmarks.plain_fsdp2_images measure FOLDER [--seconds 480]    a machine with a GPU
    python -m benchmarks.plain_fsdp2_images measure FOLDER                    without a GPU: a rehearsal at tiny sizes
    python -m benchmarks.plain_fsdp2_images predict FOLDER/steps.jsonl        anywhere
    python -m benchmarks.plain_fsdp2_images predict-jobs FILE                 before a measurement

Each job is the first of several ranks, with torch's ``fake`` process group in the place of the others. Towers are
frozen and sharded, and parts of layers checkpointed, as NeMo Automodel 36044ad3 does it.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import isqrt
from pathlib import Path
from typing import Any

from benchmarks.forked_jobs import GIB, NoMemory, about_gpu, prepare
from benchmarks.forked_jobs import measure as measure_jobs
from benchmarks.plain_fsdp2 import Job, compared, join, optimizer_of, print_summary

SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
          "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}  # fmt: skip
GEMMA = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024}  # fmt: skip
TINY = {"hidden_size": 640, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 1024, "sliding_window": 64}  # fmt: skip
QWEN_TOWER = {"num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2}
QWEN_2_5_TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
QWEN = {
    "qwen2.5-vl-7b": (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
         "vocab_size": 152064, "tie_word_embeddings": False},
        {"out_hidden_size": 3584},
    ),
    "qwen2.5-vl-3b": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
         "vocab_size": 151936, "tie_word_embeddings": True},
        {"out_hidden_size": 2048},
    ),
    "qwen3-vl-2b": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "qwen3-vl-8b": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
         "deepstack_visual_indexes": [8, 16, 24]},
    ),
    "qwen3-vl-4b": (
        {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
         "deepstack_visual_indexes": [5, 11, 17]},
    ),
}  # fmt: skip
CHECKPOINTED = ("self_attn", "attn", "mlp", "input_layernorm", "post_attention_layernorm", "layer_norm1", "layer_norm2",
                "norm1", "norm2")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageJob(Job):
    """A step of a model with all layers of its tower."""

    model: str = "gemma-3-4b"
    num_layers: int = 8
    num_ranks: int = 8
    one_process: bool = True
    images: int = 1
    """In each sequence."""
    freeze: bool = True
    patches: int | None = None
    """Of each image of Qwen's models."""

    @property
    def image_tokens(self) -> int:
        """How many tokens of the sequence an image takes."""
        return self.patches // 4 if self.patches else 256

    @property
    def name(self) -> str:
        """Its fields that are not the default."""
        default = asdict(ImageJob())
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != default[key]) or "default"


def jobs() -> list[ImageJob]:
    """Returns the jobs, the most telling first."""
    frozen = ImageJob()
    trained = replace(frozen, freeze=False)
    return [
        frozen,
        replace(trained, images=2),
        replace(frozen, attn_implementation="eager", images=2, micro_batch_size=2, seq_length=1024),
        replace(trained, checkpointing=True, micro_batch_size=2),
        replace(frozen, fp32_sharded_params=True, images=4, seq_length=4096),
        replace(trained, attn_implementation="eager", fp32_sharded_params=True, seq_length=512),
        replace(frozen, checkpointing=True, attn_implementation="eager", adam_implementation="fused"),
        replace(frozen, num_layers=34, attn_implementation="eager", seq_length=512),
        qwen := replace(frozen, model="qwen3-vl-8b", patches=3920),
        replace(qwen, freeze=False, images=2, patches=2048),
        replace(qwen, model="qwen3-vl-4b", num_layers=36, fp32_sharded_params=True),
        replace(qwen, model="qwen3-vl-4b", freeze=False, attn_implementation="eager", patches=1024, seq_length=1024),
        replace(qwen, freeze=False, checkpointing=True, micro_batch_size=2, images=4, patches=1024),
        windows := replace(qwen, model="qwen2.5-vl-7b", patches=3136),
        replace(windows, freeze=False, images=2, patches=2048),
        replace(windows, model="qwen2.5-vl-3b", num_layers=36, freeze=False, fp32_sharded_params=True, patches=1024),
        replace(windows, freeze=False, checkpointing=True, micro_batch_size=2, images=4, patches=1024),
        replace(qwen, model="qwen3-vl-2b", num_layers=28, freeze=False, micro_batch_size=2, patches=1024),
    ]


def config_of(job: ImageJob, *, on_gpu: bool) -> Any:
    """Returns transformers' config of a job's model."""
    from transformers import AutoConfig

    without = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | {"use_cache": False}
    of_text: dict[str, Any] = {"num_hidden_layers": job.num_layers, **without}
    if job.model == "gemma-3-4b":
        sizes = GEMMA if on_gpu else TINY
        others = {} if on_gpu else {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        of_text |= {"model_type": "gemma3_text", **sizes}
        of_tower, kind, more = SIGLIP | others, "gemma3", {"mm_tokens_per_image": 256}
    else:
        sizes, own = QWEN[job.model]
        if not on_gpu:
            sizes = sizes | {"vocab_size": 1024, "intermediate_size": 256, "hidden_size": 128}
            own = own | {"hidden_size": 64, "intermediate_size": 64, "depth": 3, "deepstack_visual_indexes": [0, 1]}
            own |= {"out_hidden_size": 128}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        }
        of_text |= {"model_type": "qwen3_vl_text", "rope_parameters": rope, **sizes}
        of_tower, kind, more = QWEN_TOWER | own, "qwen3_vl", {"tie_word_embeddings": sizes["tie_word_embeddings"]}
        if job.model.startswith("qwen2.5"):
            head = sizes["hidden_size"] // sizes["num_attention_heads"]
            rope = {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
            }
            of_text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
            of_tower, kind = QWEN_2_5_TOWER | own, "qwen2_5_vl"
    token = of_text["vocab_size"] - 1
    return AutoConfig.for_model(kind, text_config=of_text, vision_config=of_tower, image_token_id=token, **more)


def build(job: ImageJob, *, on_gpu: bool) -> Any:
    """Builds and shards a model as NeMo Automodel does."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForImageTextToText

    kind, config = "cuda" if on_gpu else "cpu", config_of(job, on_gpu=on_gpu)
    stored = torch.float32 if job.fp32_sharded_params else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=stored, attn_implementation=job.attn_implementation
        ).train()
    inner = model.model
    tower = inner.vision_tower if hasattr(inner, "vision_tower") else inner.visual
    if job.freeze:
        tower.requires_grad_(requires_grad=False)
    of_language = inner.language_model.layers
    of_tower = [] if job.freeze else [each for each in tower.modules() if isinstance(each, torch.nn.ModuleList)]
    for layer in (*of_language, *chain(*of_tower[:1])) if job.checkpointing else ():
        for name in CHECKPOINTED:
            if hasattr(layer, name):
                wrapped = checkpoint_wrapper(getattr(layer, name), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
                setattr(layer, name, wrapped)
    mesh = init_device_mesh(kind, (job.num_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layers in (*of_tower, of_language):
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if not on_gpu:
        model.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=kind)
    for parameter in model.parameters():
        parameter.to_local().detach().normal_(0, 0.02)
    rotary = inner.language_model.rotary_emb  # its angles have been on meta
    inner.language_model.rotary_emb = type(rotary)(config.text_config).to(kind)
    embedding = inner.language_model.embed_tokens
    if job.patches:
        rotary = tower.rotary_pos_emb
        tower.rotary_pos_emb = type(rotary)(config.vision_config).to(kind)
    else:
        embedded = tower.embeddings
        embedded.position_ids = torch.arange(embedded.num_positions, device=kind).expand((1, -1))
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=kind)
    return model


def inputs_of(job: ImageJob, config: Any, device: str) -> dict[str, Any]:
    """Returns what a processor makes of texts and images, the same in each step: each row begins with its images."""
    import torch

    vocabulary, rows = config.text_config.vocab_size, job.micro_batch_size
    tokens = torch.randint(vocabulary - 2, (rows, job.seq_length), device=device)
    is_image = torch.zeros_like(tokens)
    for number in range(job.images):
        is_image[:, number * (job.image_tokens + 1) : (number + 1) * (job.image_tokens + 1) - 1] = 1
    tokens[is_image == 1] = vocabulary - 1
    images, size = rows * job.images, config.vision_config
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    if job.patches:
        pixels = torch.rand(images * job.patches, 3 * 2 * size.patch_size**2, device=device)
        rows = next(each for each in range(isqrt(job.patches), 0, -1) if each % 2 == job.patches % (2 * each) == 0)
        grid = torch.tensor([[1, rows, job.patches // rows]] * images, device=device)
        return inputs | {"mm_token_type_ids": is_image, "pixel_values": pixels, "image_grid_thw": grid}
    pixels = torch.rand(images, 3, size.image_size, size.image_size, device=device).to(torch.bfloat16)
    return inputs | {"token_type_ids": is_image, "pixel_values": pixels}


def take_steps(job: ImageJob, rank: int, shared: str, *, on_gpu: bool) -> dict[str, Any]:
    """Takes three steps, and returns what the last one needed."""
    import torch

    memory: Any = torch.cuda if on_gpu else NoMemory()
    join(job, rank, shared, on_gpu=on_gpu)
    model = build(job, on_gpu=on_gpu)
    optimizer = optimizer_of(job, model)
    row: dict[str, Any] = {}
    for _ in range(3):
        gc.collect()
        memory.empty_cache() if not row else None
        memory.synchronize()
        memory.reset_peak_memory_stats()
        row = {"start": memory.memory_allocated(), "phases": {}}

        def ends(phase: str, row: dict[str, Any] = row) -> None:
            memory.synchronize()
            row["phases"][phase] = max(row["phases"].get(phase, 0), memory.max_memory_allocated())
            memory.reset_peak_memory_stats()

        for number in range(1, job.num_microbatches + 1):
            model.set_requires_gradient_sync(number == job.num_microbatches)
            batch = inputs_of(job, model.config, "cuda" if on_gpu else "cpu")
            labels = batch.pop("labels")
            output = model(**batch)
            mean = model.loss_function(
                logits=output.logits, labels=labels, vocab_size=model.config.text_config.vocab_size
            )
            ends("forward")
            (mean / job.num_microbatches).backward()
            ends("backward")
            loss = mean.item()
            del output, mean, batch, labels
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        ends("optimizer")
        optimizer.zero_grad()
        row |= {"peak": max(row["phases"].values()), "reserved": memory.max_memory_reserved(), "loss": loss}
    if on_gpu:
        row |= about_gpu()
    return row


def measure(folder: Path, only: str, seconds: float) -> int:
    """Takes the jobs; returns how many failed."""
    wanted = [job for job in jobs() if re.search(only, job.name)]
    kinds = {"gemma": ("gemma3", "siglip"), "qwen2": ("qwen2_5_vl",), "qwen3": ("qwen3_vl",)}
    num_gpus = prepare({family for job in wanted for family in kinds[job.model[:5]]})
    rehearsed = (
        wanted
        if num_gpus
        else [replace(job, num_ranks=1, one_process=False, num_layers=2, patches=job.patches and 64) for job in wanted]
    )
    return measure_jobs(rehearsed, take_steps, folder, seconds)


def predicted_of(job: ImageJob) -> dict[str, int]:
    """Returns what memlab predicts of a job: bytes at the start of its third step, at its peak, and reserved."""
    from memlab import Lab, Layout, MemorySettings, TrainingState
    from memlab.config.vision import VISION_TOWERS

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings = MemorySettings(**full) if job.checkpointing else None  # type: ignore[arg-type]
    state = TrainingState(
        vision_tower=job.model,  # type: ignore[arg-type]
        patches_per_image=job.patches,
        images_per_sequence=job.images,
        freeze_vision_tower=job.freeze,
        fp32_sharded_params=job.fp32_sharded_params,
        attn_implementation=job.attn_implementation,  # type: ignore[arg-type]
        adam_implementation=job.adam_implementation,  # type: ignore[arg-type]
    )
    sizes = {name: getattr(job, name) for name in ("num_layers", "seq_length", "micro_batch_size", "num_microbatches")}
    layout = Layout(data_parallel_size=job.num_ranks)
    language_model = VISION_TOWERS[job.model].language_model
    with Lab(language_model, **sizes, engine="fsdp2", layout=layout, state=state, backend="simulated") as lab:
        lab.step(settings)  # after a warm-up step
        record = lab.step(settings)
    return {
        "start": record.static_bytes,
        "peak": record.peak_allocated_bytes,
        "reserved": record.peak_reserved_bytes or 0,
        "reserved_at_most": (record.peak_reserved_bytes or 0) + record.late_free_bytes,
    }


def predict_jobs(file: Path) -> None:
    """Writes what memlab predicts of each job, before it is measured."""
    for job in jobs():
        predicted = predicted_of(job)
        with file.open("a") as lines:
            lines.write(json.dumps({"name": job.name, "predicted": predicted}) + "\n")
        print(job.name, {key: round(value / GIB, 3) for key, value in predicted.items()}, flush=True)


def predict(file: Path) -> int:
    """Prints the errors of memlab's predictions; returns how many peaks are more than 1 % off."""
    errors: dict[str, list[float]] = {"start": [], "peak": [], "reserved": []}
    for row in map(json.loads, file.read_text().splitlines()):
        if "error" in row:
            print(f"{row['name']}: not measured: {row['error']}")
            continue
        job = ImageJob(**row["job"])
        (measured,) = row["ranks"]
        print(f"{job.name}: {compared(predicted_of(job), measured, errors)}", flush=True)
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
    return (
        predict(arguments.file)
        if arguments.command == "predict"
        else measure(arguments.folder, arguments.only, arguments.seconds)
    )


if __name__ == "__main__":
    sys.exit(main())
