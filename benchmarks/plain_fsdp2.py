"""Steps of transformers' models under torch's FSDP2, measured without memlab; and how near memlab's predictions come.

    python -m benchmarks.plain_fsdp2 measure FOLDER [--seconds 480]    a machine with 1, 2 or 4 GPUs
    python -m benchmarks.plain_fsdp2 measure FOLDER                    without GPUs: a rehearsal at tiny sizes
    python -m benchmarks.plain_fsdp2 predict FOLDER/steps.jsonl        anywhere

The same command takes the jobs that the file does not have yet (`benchmarks.forked_jobs`).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.forked_jobs import GIB, NoMemory, about_gpu, prepare
from benchmarks.forked_jobs import measure as measure_jobs
from benchmarks.plain_fsdp2_parts import (
    adapt,
    checkpoint_selectively,
    divide,
    of_version_1,
    sharded_sequences,
    varlen_of_torch,
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-4": ("phi3", {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
                       "num_key_value_heads": 10, "vocab_size": 100352, "rope_theta": 250000.0, "rms_norm_eps": 1e-5}),
    "llama-3.1-8b": ("llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                               "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
                               "rms_norm_eps": 1e-5}),
    "qwen3-8b": ("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                           "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
                           "head_dim": 128}),
    "qwen2.5-7b": ("qwen2", {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                             "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6}),
    "mistral-7b-v0.3": ("mistral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                    "num_key_value_heads": 8, "vocab_size": 32768, "rope_theta": 1e6,
                                    "rms_norm_eps": 1e-5, "sliding_window": None}),
    "qwen3-30b-a3b": ("qwen3_moe", {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                                    "num_key_value_heads": 4, "vocab_size": 151936, "rope_theta": 1e6,
                                    "rms_norm_eps": 1e-6, "head_dim": 128, "num_experts": 128,
                                    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}),
    "gemma-2-9b": ("gemma2", {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
                              "num_key_value_heads": 8, "vocab_size": 256000, "head_dim": 256,
                              "query_pre_attn_scalar": 256, "sliding_window": 4096}),
    "gemma-3-12b": ("gemma3_text", {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
                                    "num_key_value_heads": 8, "vocab_size": 262208, "head_dim": 256,
                                    "query_pre_attn_scalar": 256, "sliding_window": 1024}),
    "gemma-7b": ("gemma", {"hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16,
                           "num_key_value_heads": 16, "vocab_size": 256000, "head_dim": 256, "rms_norm_eps": 1e-6}),
    "granite-3.3-2b": ("granite", {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
                                   "num_key_value_heads": 8, "vocab_size": 49159, "rms_norm_eps": 1e-5,
                                   "tie_word_embeddings": True}),
    "olmo-2-1b": ("olmo2", {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
                            "num_key_value_heads": 16, "vocab_size": 100352, "rms_norm_eps": 1e-6}),
    "glm-4-9b": ("glm", {"hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
                         "num_key_value_heads": 2, "vocab_size": 151552, "head_dim": 128, "attention_bias": True,
                         "rms_norm_eps": 1.5625e-07}),
    "mixtral-8x7b": ("mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                 "num_key_value_heads": 8, "vocab_size": 32000, "rope_theta": 1e6,
                                 "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
                                 "sliding_window": None}),
    "mistral-7b-v0.1": ("mistral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                    "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
                                    "sliding_window": 4096}),
    "command-r7b": ("cohere2", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                "num_key_value_heads": 8, "vocab_size": 256000, "layer_norm_eps": 1e-5,
                                "rope_theta": 50000.0, "sliding_window": 4096, "logit_scale": 0.25}),
    "phi-2": ("phi", {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32,
                      "num_key_value_heads": 32, "vocab_size": 51200, "partial_rotary_factor": 0.4,
                      "resid_pdrop": 0.1}),
    "seed-oss-36b": ("seed_oss", {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 80,
                                  "num_key_value_heads": 8, "vocab_size": 155136, "rope_theta": 1e7,
                                  "head_dim": 128, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    "phi-3-mini-4k": ("phi3", {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
                               "num_key_value_heads": 32, "vocab_size": 32064, "rms_norm_eps": 1e-5,
                               "sliding_window": 2047}),
}  # fmt: skip
"""From the models' config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A step; from `grad_reduce_in_bf16` on, the fields are memlab's options of the same names."""

    model: str
    num_layers: int
    seq_length: int = 2048
    micro_batch_size: int = 1
    num_microbatches: int = 1
    num_ranks: int = 1
    checkpointing: bool = False
    fp32: bool = False
    """Whether layers compute in fp32."""
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    one_process: bool = False
    """Whether one process on one GPU steps for all ranks: torch's ``fake`` process group answers for the others, so
    that memory is what it is, and values are not."""
    packed_sequences: int | None = None
    selective_ac: bool = False
    checkpoint_every: int | None = None
    grad_reduce_in_bf16: bool = False
    fp32_sharded_params: bool = False
    reshard_after_forward: str = "all_but_last"
    defer_fsdp_grad_sync: bool = False
    adam_implementation: str = "foreach"
    reshard_after_forward_ranks: int | None = None
    dp_replicate_size: int = 1
    fsdp_cpu_offload: bool = False
    fsdp2_forward_prefetch_depth: int = 0
    fsdp2_backward_prefetch_depth: int = 0
    master_weights: bool = False
    store_param_remainders: bool = False
    fsdp_version: int = 2
    use_orig_params: bool = False
    attn_implementation: str = "sdpa"
    """With ``flash_attention_2``, torch's own copy of flash-attn 2 takes the place of the package."""
    cp_comm_type: str = "p2p"
    loss_of_transformers: str = "cross_entropy"
    lora_rank: int | None = None
    """Of PEFT's adapters, beside all linears of the layers; they are written here as PEFT 0.21.2 computes them."""
    lora_fused_experts: bool = False
    """Whether PEFT itself adds them, to experts and routers too; needs the package peft."""

    @property
    def num_processes(self) -> int:
        """How many processes take it."""
        return 1 if self.one_process else self.num_ranks

    @property
    def name(self) -> str:
        """Its fields that are not the default."""
        default = Job(model="", num_layers=0)
        values = asdict(self)
        changed = {key: value for key, value in values.items() if value != getattr(default, key)}
        return " ".join(key if value is True else f"{key}={value}" for key, value in changed.items())


def jobs() -> list[Job]:
    """Returns the jobs, the most telling first."""
    found = []
    for num_ranks in (1, 2, 4):
        phi = Job(model="phi-4", num_layers=8, num_ranks=num_ranks)
        qwen = Job(model="qwen3-8b", num_layers=8, num_ranks=num_ranks)
        llama = Job(model="llama-3.1-8b", num_layers=8, num_ranks=num_ranks)
        found += [
            phi,
            replace(phi, checkpointing=True),
            replace(qwen, seq_length=4096),
            replace(llama, seq_length=4096, checkpointing=True),
            replace(phi, fp32_sharded_params=True),
            replace(phi, adam_implementation="fused"),
            replace(phi, grad_reduce_in_bf16=True),
            replace(phi, reshard_after_forward="none"),
            replace(qwen, num_microbatches=3),
            replace(qwen, num_microbatches=3, defer_fsdp_grad_sync=True),
            replace(llama, seq_length=8192, checkpointing=True, adam_implementation="fused"),
            replace(llama, micro_batch_size=2, reshard_after_forward="all"),
            replace(qwen, checkpointing=True, fp32_sharded_params=True, adam_implementation="fused"),
            replace(llama, adam_implementation="for_loop"),
            replace(phi, seq_length=4096, checkpointing=True, reshard_after_forward="none"),
            replace(llama, fp32=True, num_layers=4),
            replace(qwen, model="qwen2.5-7b"),
            replace(llama, model="mistral-7b-v0.3", seq_length=4096),
            replace(phi, seq_length=1024, micro_batch_size=4),
            replace(phi, seq_length=8192, checkpointing=True),
            replace(phi, seq_length=4096, fp32_sharded_params=True, grad_reduce_in_bf16=True),
            replace(qwen, seq_length=8192),
            replace(qwen, checkpointing=True, grad_reduce_in_bf16=True),
            replace(qwen, num_microbatches=2, fp32_sharded_params=True),
            replace(llama, num_microbatches=4, defer_fsdp_grad_sync=True, checkpointing=True),
            replace(llama, seq_length=4096, adam_implementation="fused"),
            replace(llama, reshard_after_forward="none", adam_implementation="fused"),
            replace(llama, fp32_sharded_params=True, adam_implementation="for_loop"),
            replace(qwen, model="qwen2.5-7b", seq_length=4096, checkpointing=True),
            replace(llama, model="mistral-7b-v0.3", fp32_sharded_params=True, adam_implementation="fused"),
        ]
        found += [replace(phi, fsdp_cpu_offload=True), replace(llama, fsdp_cpu_offload=True, checkpointing=True)]
        if num_ranks > 1:
            found += [replace(phi, dp_replicate_size=2), replace(qwen, dp_replicate_size=2, grad_reduce_in_bf16=True)]
            two = {"tensor_model_parallel_size": 2}
            found += [replace(llama, **two), replace(qwen, seq_length=4096, checkpointing=True, **two)]
            found += [replace(llama, model="qwen2.5-7b", adam_implementation="fused", **two)]
        if num_ranks > 2:
            found += [replace(phi, reshard_after_forward_ranks=2), replace(llama, reshard_after_forward_ranks=2)]
        found += [
            replace(phi, fsdp2_forward_prefetch_depth=1, fsdp2_backward_prefetch_depth=2),
            replace(llama, fsdp2_forward_prefetch_depth=3, fsdp2_backward_prefetch_depth=3, checkpointing=True),
            replace(phi, adam_implementation="te_fused", master_weights=True),
            replace(qwen, adam_implementation="te_fused", master_weights=True, store_param_remainders=True),
            replace(phi, lora_rank=16),
            replace(phi, lora_rank=16, checkpointing=True, seq_length=8192),
            replace(llama, lora_rank=8, seq_length=4096),
            replace(qwen, lora_rank=64, num_microbatches=2, adam_implementation="fused"),
        ]
        moe = Job(model="qwen3-30b-a3b", num_layers=4, num_ranks=num_ranks)
        found += [
            moe,
            replace(moe, checkpointing=True),
            replace(moe, seq_length=4096, adam_implementation="fused"),
            replace(moe, seq_length=8192, checkpointing=True, adam_implementation="fused"),
            replace(moe, num_microbatches=2, defer_fsdp_grad_sync=True, adam_implementation="fused"),
            replace(moe, num_layers=2, fp32_sharded_params=True),
            replace(moe, micro_batch_size=2, reshard_after_forward="none", grad_reduce_in_bf16=True),
        ]
        if num_ranks > 1:
            found += [replace(phi, num_layers=40), replace(phi, num_layers=40, checkpointing=True)]
    return found + _wider_jobs()


def _wider_jobs() -> list[Job]:
    """Returns jobs of attention, packing, selective checkpoints, Gemma, FSDP1 and sharded sequences.

    Those of two ranks are taken by one process, and by two where there are two GPUs.
    """
    llama = Job(model="llama-3.1-8b", num_layers=8, seq_length=4096)
    phi, qwen = replace(llama, model="phi-4"), replace(llama, model="qwen3-8b")
    flash: dict[str, Any] = {"attn_implementation": "flash_attention_2"}
    gemma2, gemma3 = replace(llama, model="gemma-2-9b", num_layers=4), replace(llama, model="gemma-3-12b", num_layers=6)
    first = [
        replace(llama, packed_sequences=4),
        replace(llama, packed_sequences=8, **flash),
        replace(llama, selective_ac=True),
        replace(gemma3),
        replace(gemma2, seq_length=2048),
        replace(qwen, seq_length=8192, packed_sequences=4, checkpointing=True),
        replace(qwen, seq_length=8192, packed_sequences=4, checkpointing=True, **flash),
        replace(phi, selective_ac=True, adam_implementation="fused"),
        replace(phi, checkpoint_every=2, adam_implementation="fused"),
        replace(gemma3, checkpointing=True, adam_implementation="fused"),
        replace(gemma2, checkpointing=True),
        replace(gemma2, **flash),
        replace(phi, **flash),
        replace(phi, packed_sequences=3),
    ]
    one = {"fsdp_version": 1, "fp32_sharded_params": True}
    llama = replace(llama, num_layers=4)
    of_two = [
        replace(llama, **one),
        replace(phi, num_layers=4, seq_length=2048, checkpointing=True, **one),
        replace(llama, use_orig_params=True, fsdp2_forward_prefetch_depth=1, **one),
        replace(llama, reshard_after_forward="none", num_microbatches=2, **one),
        replace(llama, fsdp_version=1, adam_implementation="fused"),
        replace(qwen, num_layers=4, num_microbatches=2, defer_fsdp_grad_sync=True, **one),
        replace(llama, context_parallel_size=2),
        replace(llama, tensor_model_parallel_size=2, sequence_parallel=True),
        replace(phi, num_layers=4, tensor_model_parallel_size=2),
        replace(llama, context_parallel_size=2, checkpointing=True),
        replace(qwen, num_layers=4, tensor_model_parallel_size=2, sequence_parallel=True, checkpointing=True),
    ]
    alone = [replace(each, num_ranks=2, one_process=True) for each in of_two]
    return [
        *first,
        *alone,
        *(replace(each, num_ranks=2) for each in of_two),
        replace(llama, **one),
        *_combined_jobs(),
        *_latest_jobs(),
        *_jobs_of_ulysses(),
    ]


def _combined_jobs() -> list[Job]:
    """Returns jobs with several of these options, as verl, NeMo Automodel and torchtitan combine them."""
    one: dict[str, Any] = {"fsdp_version": 1, "fp32_sharded_params": True, "num_ranks": 8, "one_process": True}
    packed: dict[str, Any] = {"packed_sequences": 16, "attn_implementation": "flash_attention_2", "checkpointing": True}
    eight: dict[str, Any] = {"num_ranks": 8, "one_process": True}
    llama = Job(model="llama-3.1-8b", num_layers=8, seq_length=8192)
    qwen, phi, gemma = (replace(llama, model=name) for name in ("qwen3-8b", "phi-4", "gemma-3-12b"))
    return [
        replace(qwen, num_microbatches=2, **packed, **one),
        replace(llama, model="qwen2.5-7b", **packed, **eight, fp32_sharded_params=True),
        replace(llama, dp_replicate_size=2, checkpointing=True, **one),
        replace(llama, model="qwen3-30b-a3b", num_layers=4, seq_length=4096, checkpointing=True, **one),
        replace(llama, context_parallel_size=4, micro_batch_size=2, checkpointing=True, **eight),
        replace(qwen, context_parallel_size=2, fp32_sharded_params=True, adam_implementation="fused", **eight),
        replace(llama, tensor_model_parallel_size=4, sequence_parallel=True, fp32_sharded_params=True, **eight),
        replace(phi, tensor_model_parallel_size=2, checkpointing=True, adam_implementation="fused", **eight),
        replace(phi, selective_ac=True, fp32_sharded_params=True, num_microbatches=2, **eight),
        replace(qwen, selective_ac=True, packed_sequences=8, reshard_after_forward="none", **eight),
        replace(llama, lora_rank=16, packed_sequences=8, selective_ac=True, **eight),
        replace(gemma, num_layers=12, selective_ac=True, fp32_sharded_params=True, **eight),
        replace(gemma, num_layers=12, seq_length=4096, packed_sequences=4, checkpointing=True, **one),
        replace(gemma, model="gemma-2-9b", seq_length=4096, checkpoint_every=2, **eight),
        replace(llama, seq_length=4096, fsdp_cpu_offload=True, packed_sequences=4, checkpoint_every=3, **eight),
    ]


def _latest_jobs() -> list[Job]:
    """Returns jobs of FSDP1 with adapters, and of further families."""
    eight: dict[str, Any] = {"num_ranks": 8, "one_process": True}
    llama = Job(model="llama-3.1-8b", num_layers=8, seq_length=4096, **eight)
    adapted = replace(llama, fsdp_version=1, fp32_sharded_params=True, lora_rank=32)
    found = [
        adapted,
        replace(adapted, model="qwen3-8b", seq_length=8192, checkpointing=True),
        replace(adapted, model="qwen2.5-7b", num_microbatches=2, checkpointing=True, adam_implementation="fused"),
    ]
    for name in ("granite-3.3-2b", "olmo-2-1b", "glm-4-9b", "gemma-7b", "phi-3-mini-4k", "mistral-7b-v0.1"):
        one = replace(llama, model=name)
        found += [one, replace(one, seq_length=8192, checkpointing=True, fp32_sharded_params=True)]
    mixtral = replace(llama, model="mixtral-8x7b", num_layers=2)
    found += [mixtral, replace(mixtral, checkpointing=True, seq_length=8192, adam_implementation="fused")]
    found += [replace(llama, model="phi-3-mini-4k", seq_length=2048, selective_ac=True)]
    cohere, phi, seed = (replace(llama, model=name) for name in ("command-r7b", "phi-2", "seed-oss-36b"))
    return [
        *found,
        cohere,
        replace(seed, num_layers=4),
        replace(phi, num_layers=32, seq_length=2048, micro_batch_size=2, attn_implementation="eager"),
        replace(cohere, seq_length=8192, checkpointing=True, fp32_sharded_params=True),
        replace(seed, num_layers=6, seq_length=8192, checkpointing=True, fp32_sharded_params=True),
        replace(phi, num_layers=32, seq_length=2048, micro_batch_size=4, adam_implementation="fused"),
        *_masked_jobs(),
        *_jobs_of_partly_resharded_layers(),
        *_jobs_with_adapted_experts(),
    ]


def _masked_jobs() -> list[Job]:
    """Returns jobs whose masks, checkpoints and types were combined otherwise than in those above."""
    eight: dict[str, Any] = {"num_ranks": 8, "one_process": True}
    llama = Job(model="llama-3.1-8b", num_layers=6, seq_length=4096, **eight)
    mistral, phi, mixtral = (
        replace(llama, model=name) for name in ("mistral-7b-v0.1", "phi-3-mini-4k", "mixtral-8x7b")
    )
    qwen, fully = replace(llama, model="qwen2.5-7b"), {"checkpointing": True, "fp32_sharded_params": True}
    one: dict[str, Any] = {"num_ranks": 1, "one_process": False, "seq_length": 2048, "fsdp_version": 1}
    return [
        replace(llama, num_layers=7, seq_length=6144, packed_sequences=5, selective_ac=True),
        replace(qwen, packed_sequences=3, selective_ac=True, fp32_sharded_params=True),
        replace(mistral, seq_length=6144, selective_ac=True),
        replace(mistral, seq_length=12288, packed_sequences=2, **fully),
        replace(llama, model="gemma-3-12b", packed_sequences=3, selective_ac=True),
        replace(phi, num_layers=10, seq_length=6144, selective_ac=True),
        replace(phi, seq_length=1024, micro_batch_size=2, selective_ac=True, fp32_sharded_params=True),
        Job(model="qwen3-8b", num_layers=3, seq_length=1536, fp32=True),
        replace(mixtral, num_layers=2, packed_sequences=4, checkpointing=True),
        replace(llama, model="qwen3-30b-a3b", num_layers=4, packed_sequences=2, fp32_sharded_params=True),
        replace(llama, model="olmo-2-1b", seq_length=6144, micro_batch_size=2, selective_ac=True),
        replace(llama, model="granite-3.3-2b", seq_length=6144, packed_sequences=4, **fully),
        replace(qwen, num_layers=3, **fully, **one),
    ]


def _jobs_of_partly_resharded_layers() -> list[Job]:
    """Returns jobs whose layers are resharded to fewer ranks after forward."""
    llama = Job(model="llama-3.1-8b", num_layers=8, num_ranks=8, one_process=True, reshard_after_forward_ranks=2)
    phi, qwen = replace(llama, model="phi-4"), replace(llama, model="qwen3-8b", reshard_after_forward_ranks=4)
    return [
        phi,
        replace(llama, seq_length=4096, checkpointing=True, reshard_after_forward_ranks=4),
        replace(qwen, fp32_sharded_params=True, adam_implementation="fused"),
        replace(qwen, num_microbatches=3, defer_fsdp_grad_sync=True, reshard_after_forward_ranks=2),
        replace(phi, seq_length=4096, reshard_after_forward="all", grad_reduce_in_bf16=True),
        replace(llama, model="qwen3-30b-a3b", num_layers=4, checkpointing=True, fsdp2_forward_prefetch_depth=1),
    ]


def _jobs_with_adapted_experts() -> list[Job]:
    """Returns jobs whose experts have adapters of PEFT."""
    adapted: dict[str, Any] = {"lora_rank": 8, "lora_fused_experts": True, "fp32_sharded_params": True}
    qwen = Job(model="qwen3-30b-a3b", num_layers=4, seq_length=4096, num_ranks=8, one_process=True, **adapted)
    return [
        qwen,
        replace(qwen, checkpointing=True),
        replace(qwen, num_layers=2, seq_length=1024, lora_rank=64, num_microbatches=2),
        replace(qwen, model="mixtral-8x7b", num_layers=2, seq_length=2048, checkpointing=True),
    ]


def _jobs_of_ulysses() -> list[Job]:
    """Returns jobs whose two ranks share each row."""
    llama = Job(
        model="llama-3.1-8b",
        num_layers=8,
        seq_length=8192,
        num_ranks=2,
        context_parallel_size=2,
        cp_comm_type="a2a",
        attn_implementation="flash_attention_2",
        loss_of_transformers="logprobs_flash_attn",
    )
    qwen, by_row = replace(llama, model="qwen3-8b"), {"loss_of_transformers": "logprobs_by_row"}
    return [
        replace(llama, checkpointing=True, fp32_sharded_params=True),
        replace(qwen, packed_sequences=4, **by_row),
        replace(llama, model="qwen2.5-7b", seq_length=16384, packed_sequences=8, checkpointing=True, fsdp_version=1),
    ]


def measure(folder: Path, only: str, seconds: float) -> int:
    """Takes the jobs of as many ranks as there are GPUs; returns how many failed."""
    chosen = [job for job in jobs() if re.search(only, job.name)]
    num_gpus = prepare({MODELS[job.model][0].removesuffix("_text") for job in chosen})
    wanted = [job for job in chosen if job.num_processes in ({num_gpus} if num_gpus else {1, 2})]
    rehearsed = wanted if num_gpus else [replace(each, num_layers=2, seq_length=64) for each in wanted]
    return measure_jobs(rehearsed, take_steps, folder, seconds)


def model_of(job: Job, *, on_gpu: bool) -> Any:
    """Returns a model without memory, before it is sharded, with its adapters and checkpoints."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    family, values = MODELS[job.model]
    if not on_gpu:
        values = values | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
                           "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 32}  # fmt: skip
        if family.startswith("gemma"):
            values |= {"sliding_window": 16}
        if family == "phi":
            values |= {"num_key_value_heads": 4}
        if family in ("qwen3_moe", "mixtral"):
            values |= {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    without = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(family, num_hidden_layers=job.num_layers, use_cache=False, **without, **values)
    with torch.device("meta"):
        stored = torch.float32 if job.fp32_sharded_params or job.fp32 else torch.bfloat16
        attention = "eager" if family == "gemma2" else "sdpa"  # sdpa has no soft cap of scores
        if job.attn_implementation == "eager":
            attention = "eager"
        elif job.attn_implementation != "sdpa":
            AttentionInterface.register(attention := "varlen_of_torch", varlen_of_torch)
        model = AutoModelForCausalLM.from_config(config, dtype=stored, attn_implementation=attention).train()
        if job.lora_rank is not None:
            adapt(model, job.lora_rank, by_peft=job.lora_fused_experts)
    for number, layer in enumerate(model.model.layers):
        is_one = (number + 1) % job.checkpoint_every == 0 if job.checkpoint_every else job.checkpointing
        layer.gradient_checkpointing = is_one
        layer._gradient_checkpointing_func = lambda function, *inputs: checkpoint(
            function, *inputs, use_reentrant=False
        )
        if job.selective_ac:
            layer.forward = checkpoint_selectively(layer.forward)
    return model


def build(job: Job, *, on_gpu: bool) -> Any:
    """Builds and shards a model as NeMo Automodel does."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    kind, model = "cuda" if on_gpu else "cpu", model_of(job, on_gpu=on_gpu)
    dtype = torch.float32 if job.fp32 else torch.bfloat16
    reduced = torch.bfloat16 if job.grad_reduce_in_bf16 else torch.float32
    if job.fsdp_version == 1:
        return of_version_1(job, model, dtype, reduced, kind)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    tensor, layers = job.tensor_model_parallel_size, model.model.layers
    shape, names = (job.dp_replicate_size, job.num_ranks // job.dp_replicate_size // tensor, tensor), ("r", "s", "tp")
    first = job.dp_replicate_size == 1
    whole = init_device_mesh(kind, shape[first:], mesh_dim_names=names[first:])
    mesh = whole[names[first:2]]
    if tensor > 1:
        divide(model, whole["tp"], sequences=job.sequence_parallel)
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if job.fsdp_cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for layer in layers:
        resharded = {"all": True, "none": False}.get(job.reshard_after_forward, layer is not layers[-1])
        fully_shard(layer, reshard_after_forward=resharded and (job.reshard_after_forward_ranks or True), **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for number, layer in enumerate(layers):
        after, before = job.fsdp2_forward_prefetch_depth, job.fsdp2_backward_prefetch_depth
        layer.set_modules_to_forward_prefetch([*layers[number + 1 : number + 1 + after]])
        layer.set_modules_to_backward_prefetch([*layers[max(0, number - before) : number]][::-1])
    if not on_gpu:
        model.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu" if job.fsdp_cpu_offload else kind)
    for parameter in model.parameters():
        parameter.to_local().detach().normal_(0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(kind)  # its angles have been on meta
    return model


def optimizer_of(job: Job, model: Any) -> Any:
    """Returns an optimizer of what is trained."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = job.adam_implementation
    if kind != "te_fused":
        return torch.optim.AdamW(trained, lr=1e-5, foreach=kind == "foreach", fused=kind == "fused")
    from transformer_engine.pytorch.optimizers import FusedAdam

    kept = {"master_weights": job.master_weights, "store_param_remainders": job.store_param_remainders}
    return FusedAdam(trained, lr=1e-5, **kept)


def take_steps(job: Job, rank: int, shared: str, *, on_gpu: bool, num_steps: int = 3) -> dict[str, Any]:
    """Takes steps, and returns what the last one needed."""
    import torch

    memory = torch.cuda if on_gpu else NoMemory()
    memory.set_device(rank)
    join(job, rank, shared, on_gpu=on_gpu)
    model = build(job, on_gpu=on_gpu)
    built = memory.memory_allocated()
    optimizer = optimizer_of(job, model)
    device = "cuda" if on_gpu else "cpu"
    inputs = inputs_of(job, model.config.vocab_size, device)
    row: dict[str, Any] = {}
    for _ in range(num_steps):
        gc.collect()
        memory.empty_cache() if not row else None  # as the first step of a lab; the last one reuses what is cached
        memory.synchronize()
        memory.reset_peak_memory_stats()
        row = {"built": built, "start": memory.memory_allocated(), "phases": {}}

        def ends(phase: str, row: dict[str, Any] = row) -> None:
            memory.synchronize()
            row["phases"][phase] = max(row["phases"].get(phase, 0), memory.max_memory_allocated())
            memory.reset_peak_memory_stats()

        for number in range(1, job.num_microbatches + 1):
            waits = job.defer_fsdp_grad_sync and number < job.num_microbatches
            if job.defer_fsdp_grad_sync and job.fsdp_version == 2:
                model.set_requires_gradient_sync(not waits)
            without = model.no_sync() if waits and job.fsdp_version == 1 else nullcontext()
            with without, sharded_sequences(job, model, inputs, device) as own:
                output, mean = forward(job, model, own)
                ends("forward")
                (mean / job.num_microbatches).backward()
                ends("backward")
            loss = mean.item()
            del output, mean
        clip(job, model)
        optimizer.step()
        ends("optimizer")
        optimizer.zero_grad()
        row |= {"peak": max(row["phases"].values()), "reserved": memory.max_memory_reserved(), "loss": loss}
    if on_gpu:
        row |= about_gpu()
    return row


def join(job: Job, rank: int, shared: str, *, on_gpu: bool) -> None:
    """Joins the other ranks, or what answers for them."""
    import torch

    if job.one_process:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.num_ranks)
    else:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{shared}/store",
            rank=rank,
            world_size=job.num_ranks,
        )


def inputs_of(job: Job, vocab_size: int, device: str) -> dict[str, Any]:
    """Returns a batch, which is the same in each step."""
    import torch

    tokens = torch.randint(vocab_size, (job.micro_batch_size, job.seq_length), device=device)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if job.packed_sequences is not None:
        length, longer = divmod(job.seq_length, job.packed_sequences)
        lengths = [length + (number < longer) for number in range(job.packed_sequences)]
        inputs["position_ids"] = torch.cat([torch.arange(each, device=device) for each in lengths]).unsqueeze(0)
    return inputs


def forward(job: Job, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the output with the logits, and the loss."""
    if job.loss_of_transformers.startswith("logprobs"):
        from benchmarks.plain_fsdp2_ulysses import loss_of_logprobs

        tokens = inputs.pop("labels")
        by_row = job.loss_of_transformers == "logprobs_by_row"
        return None, loss_of_logprobs(model(**inputs).logits, tokens, by_row=by_row)
    if job.tensor_model_parallel_size == 1:
        import torch

        casts = job.lora_rank is not None and job.fsdp_version == 1
        # verl's autocast, without which FSDP1's adapters get rows in fp32 and have matrices in bf16.
        with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, casts):
            output = model(**inputs)
        return output, output.loss
    output = model(input_ids=inputs["input_ids"])
    logits = output.logits.float().full_tensor()
    return output, model.loss_function(logits=logits, labels=inputs["labels"], vocab_size=model.config.vocab_size)


def clip(job: Job, model: Any) -> None:
    """Clips the gradients."""
    import torch

    if job.fsdp_version == 1:
        model.clip_grad_norm_(1.0)
        return
    grouped: dict[int, Any] = {}
    for parameter in model.parameters():
        grouped.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    for group in grouped.values():  # torch's function takes one mesh at a time, which clips otherwise, and as much
        torch.nn.utils.clip_grad_norm_(group, 1.0, foreach=True)


def settings_of(job: Job) -> Any:
    """Returns memlab's memory settings of a job."""
    from memlab import MemorySettings

    if not (job.checkpointing or job.selective_ac or job.checkpoint_every):
        return MemorySettings()
    return MemorySettings(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        selective_ac=job.selective_ac,
        checkpoint_every=job.checkpoint_every,
    )


def scenario_of(job: Job, layout: Any = None) -> Any:
    """Returns memlab's scenario of a job; with a layout, that of the layout's rank."""
    from memlab import Layout, Scenario, TrainingState
    from memlab.config.architectures import Architecture
    from memlab.config.hugging_face import architecture_fields
    from memlab.config.option import options_of

    names = [field.name for field in fields(job) if field.name in options_of(TrainingState)]
    options = {name: getattr(job, name) for name in names}
    if job.lora_fused_experts:
        options |= {"lora_target_modules": (), "lora_exclude_modules": ("lm_head",)}
    state = TrainingState.of_options({name: value for name, value in options.items() if value is not None})
    names = ["num_layers", "seq_length", "micro_batch_size", "packed_sequences", "num_microbatches"]
    sizes = {name: getattr(job, name) for name in names}
    family, values = MODELS[job.model]
    model: Any = job.model
    if family.startswith("gemma"):
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if family == "gemma2" else {}
        values = {"model_type": family, "num_hidden_layers": 48, "rms_norm_eps": 1e-6} | caps | values
        model = Architecture(name=job.model, **architecture_fields(values))
    layout = layout or Layout(
        data_parallel_size=job.num_ranks // job.tensor_model_parallel_size // job.context_parallel_size,
        tensor_model_parallel_size=job.tensor_model_parallel_size,
        context_parallel_size=job.context_parallel_size,
        sequence_parallel=job.sequence_parallel or job.tensor_model_parallel_size == 1,
    )
    return Scenario.of(model, **sizes, dtype="fp32" if job.fp32 else "bf16", engine="fsdp2", layout=layout, state=state)


def predicted_of(job: Job, layout: Any = None) -> dict[str, int]:
    """Returns what memlab predicts of a job: bytes at the start of its third step, at its peak, and reserved.

    With a layout, what it predicts of the layout's rank.

    Between the second and the third step, torch still reserves more, up to 10 % for AdamW one tensor at a time.
    """
    from memlab import Lab

    with Lab(scenario_of(job, layout), backend="simulated") as lab:
        lab.step(settings_of(job))  # after a warm-up step
        record = lab.step(settings_of(job))
    return {
        "start": record.static_bytes + (0 if layout else _batch_bytes(job)),
        "peak": record.peak_allocated_bytes,
        "reserved": record.peak_reserved_bytes or 0,
        "reserved_at_most": (record.peak_reserved_bytes or 0) + record.late_free_bytes,
    }


def _batch_bytes(job: Job) -> int:
    """Returns what the batch takes, which `take_steps` has from its first step on, and a lab only within each step."""
    batch = {id(each): each.nbytes for each in inputs_of(job, 2, "meta").values()}
    return sum(512 * -(-num_bytes // 512) for num_bytes in batch.values())


def predict(file: Path) -> int:
    """Prints the errors of memlab's predictions; returns how many are not there, or have a peak more than 1 % off."""
    not_predicted = 0
    errors: dict[str, list[float]] = {"start": [], "peak": [], "reserved": []}
    for row in map(json.loads, file.read_text().splitlines()):
        if "error" in row:
            print(f"{row['name']}: not measured: {row['error']}")
            continue
        job = Job(**row["job"])
        measured = row["ranks"][0]
        try:
            predicted = predicted_of(job)
        except ValueError as error:
            print(f"{row['name']}: not predicted: {error}")
            not_predicted += 1
            continue
        words = compared(predicted, measured, errors)
        print(f"{job.name}: {words or predicted}", flush=True)
    print_summary(errors)
    return not_predicted + sum(abs(percent) > 1 for percent in errors["peak"])


def compared(predicted: dict[str, int], measured: dict[str, int], errors: dict[str, list[float]]) -> str:
    """Adds the errors of a prediction in percent, by the names of `errors`, and returns them in words."""
    off = {name: 100 * (predicted[name] / measured[name] - 1) for name in errors if measured.get(name)}
    for name, percent in off.items():
        errors[name].append(percent)
    return ", ".join(f"{name} {measured[name] / GIB:.3f} GiB {percent:+.3f} %" for name, percent in off.items())


def print_summary(errors: dict[str, list[float]]) -> None:
    """Prints the median and the worst of errors in percent."""
    for name, percents in errors.items():
        if percents:
            median = statistics.median(map(abs, percents))
            print(f"{name}: median {median:.3f} %, worst {max(percents, key=abs):+.3f} % of {len(percents)}")


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--only", default="", help="a regular expression for the names of jobs")
    measuring.add_argument("--seconds", type=float, default=480)
    commands.add_parser("predict").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "predict":
        return predict(arguments.file)
    return measure(arguments.folder, arguments.only, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
