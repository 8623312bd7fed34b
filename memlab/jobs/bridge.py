"""Megatron-Bridge: the ``run_config.yaml`` that it writes into each checkpoint, or another dump of its ConfigContainer.

Names: ``src/megatron/bridge/training/config.py`` and Megatron-Core's own configs (main, August 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs import without_effect
from memlab.jobs.framework import Framework, Reading
from memlab.jobs.keys import ABSENT, SWITCH, TEXT, WHOLE, Key, Missing, missing_under, under
from memlab.jobs.lines import yaml_lines
from memlab.jobs.megatron_keys import (
    ARCHITECTURE,
    BUCKETS,
    CHUNKS,
    COMPUTE,
    ENDS,
    MISSING,
    MISSING_DDP,
    MISSING_OPTIMIZER,
    OFFLOAD,
    OPTIMIZER,
    RECOMPUTE,
    SIZES,
)
from memlab.jobs.megatron_lm import common
from memlab.jobs.model import published_architecture
from memlab.jobs.reinforcement import LORA

_BUCKETS = tuple(replace(key, default=ABSENT) if key.field == "grad_reduce_in_bf16" else key for key in BUCKETS)

KEYS = (
    Key("model.hf_model_id", "architecture", TEXT),
    Key("world_size", "world_size", WHOLE),
    *under("model", (*SIZES, CHUNKS, *ENDS, *RECOMPUTE, *OFFLOAD, *COMPUTE)),
    *under("model", ARCHITECTURE),
    Key("model.make_vocab_size_divisible_by", "make_vocab_size_divisible_by", WHOLE, 128),
    Key("model.should_pad_vocab", "should_pad_vocab", SWITCH, False),
    Key("model.seq_length", "seq_length", WHOLE),
    # The rows that are trained on; the model's own length may be what it was published with.
    Key("dataset.seq_length", "seq_length", WHOLE),
    Key("dataset.sequence_length", "seq_length", WHOLE),
    Key("model.bf16", "is_bf16", SWITCH, True),
    Key("train.micro_batch_size", "micro_batch_size", WHOLE, 1),
    Key("train.global_batch_size", "global_batch_size", WHOLE, None),
    Key("train.manual_gc", "manual_gc", SWITCH, False),
    *under("optimizer", OPTIMIZER),
    Key("optimizer.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    *under("ddp", _BUCKETS),
    Key("ddp.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    Key("mixed_precision.grad_reduce_in_fp32", "mixed_precision_fp32", SWITCH),
    Key("mixed_precision", "mixed_precision", TEXT),
    Key("env_vars.PYTORCH_CUDA_ALLOC_CONF", "allocator", TEXT),
    Key("ENV_VARS.PYTORCH_CUDA_ALLOC_CONF", "allocator", TEXT),
)
FRAMEWORK_MISSING = (
    Missing("peft.*", "less", LORA, lambda value: value not in (None, "", {})),
    *missing_under("model", MISSING),
    *missing_under("ddp", MISSING_DDP),
    *missing_under("optimizer", MISSING_OPTIMIZER),
    Missing("comm_overlap.tp_comm_overlap", "more", "user buffers of the overlap of tensor parallel communication"),
    Missing(
        "comm_overlap.overlap_moe_expert_parallel_comm", "more", "two micro-batches are in flight at once"
    ),
)  # fmt: skip


def complete(reading: Reading) -> None:
    """Derives gradients, the padded vocabulary and the type of parameters."""
    values = reading.values
    if values.get("hidden_size") is None:  # Megatron-Bridge writes all sizes of the model into a whole configuration
        reading.warnings.append(
            "model.hidden_size is not in the file, so it overrides a recipe that memlab does not see: memlab takes "
            "Megatron's defaults for all keys that the file does not have; give the run_config.yaml of a checkpoint"
        )
    values["dtype"] = "bf16" if values.pop("is_bf16") else "fp32"
    mixed, is_fp32 = values.pop("mixed_precision", None), values.pop("mixed_precision_fp32", None)
    if "grad_reduce_in_bf16" not in values:
        if is_fp32 is None and mixed is None:
            reading.warnings.append(
                "ddp.grad_reduce_in_fp32 is not in the file: memlab takes true, as bf16_mixed has it"
            )
        values["grad_reduce_in_bf16"] = is_fp32 is False
    tokenizer = published_architecture(str(reading.get("tokenizer.tokenizer_model", "")))
    if tokenizer is not None and values.get("hidden_size") and values.get("vocab_size") is None:
        reading.take("tokenizer.tokenizer_model", "vocab_size", tokenizer.vocab_size)
    divisor = values.pop("make_vocab_size_divisible_by") * (values.get("tensor_model_parallel_size") or 1)
    if values.pop("should_pad_vocab") and values.get("vocab_size"):
        values["vocab_size"] = -(-values["vocab_size"] // divisor) * divisor
    if (values.get("tensor_model_parallel_size") or 1) > 1 and reading.get("model.sequence_parallel") is False:
        reading.miss("model.sequence_parallel", "more", "norms and residuals keep whole sequences on each rank")


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    architecture = scenario.architecture
    sizes = {key.field: getattr(architecture, key.field, None) for key in ARCHITECTURE}
    if not architecture.is_moe:
        sizes |= dict.fromkeys(name for name in sizes if "moe" in name)
    return (
        common(scenario, settings)
        | sizes
        | {
            "num_layers": scenario.num_layers,
            "is_bf16": scenario.dtype == "bf16",
            "should_pad_vocab": False,
            "make_vocab_size_divisible_by": 128,
        }
    )


BRIDGE = Framework(
    name="bridge",
    title="Megatron-Bridge",
    source="main of August 2026",
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=without_effect.BRIDGE,
    complete=complete,
    compose=compose,
    complete_loss="cross_entropy",
    writes_sizes=True,
    cannot_write={
        "checkpoint_input_remedy": "Megatron-Bridge has no remedy for the inputs that checkpoints of MoE layers keep",
        "offload_parameters": "Megatron-Bridge keeps its parameters on the device between steps",
        "offload_gradients": "Megatron-Bridge keeps its gradient buffers between steps",
        "offload_optimizer": "Megatron-Bridge keeps its optimizer state where it is between steps",
        "offload_optimizer_except_update": "Megatron-Bridge keeps its optimizer state where it is between steps",
        "loss": "Megatron-Bridge trains with the language-model loss",
        "logprobs_chunk_size": "Megatron-Bridge trains with the language-model loss",
    },
    render=yaml_lines,
)
