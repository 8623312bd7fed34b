"""SkyRL's ``MegatronConfig``: its keys, below the prefix that a program of SkyRL gives them.

Names and defaults: ``skyrl/train/config/config.py`` and ``backends/skyrl_train/workers/megatron/megatron_worker.py``
(0.3.0).
"""

from __future__ import annotations

import math
from typing import Any

from memlab.config.lora import LINEARS
from memlab.config.scenario import Scenario
from memlab.jobs.frameworks.adapters import ALL_LINEAR, OF_BRIDGE, complete_adapters, lacks_of_kind, of_one_kind
from memlab.jobs.frameworks.bridge_keys import PROVIDER_MISSING, REPLACED, model_without_effect
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import (
    DISPATCHER,
    LOAD_BALANCING,
    ROUTER_DTYPE,
    SWITCH,
    WHOLE,
    Key,
    Missing,
    is_false,
    missing_under,
    under,
)
from memlab.jobs.frameworks.megatron_keys import (
    BUCKETS,
    CHUNKS,
    COMPUTE,
    EXTRA,
    LAYERS,
    MISSING,
    MISSING_OPTIMIZER,
    OPTIMIZER,
    SIZES,
    TRANSFORMER,
)
from memlab.jobs.frameworks.megatron_lm import OF_OTHER_FRAMEWORKS
from memlab.jobs.frameworks.reinforcement import is_packed, names_dispatcher
from memlab.jobs.frameworks.without_effect import keys_without_effect


def megatron_keys(prefix: str) -> tuple[Key, ...]:
    """Returns the keys of the config, below its prefix."""
    transformer = f"{prefix}.transformer_config_kwargs"
    return (
        *under(prefix, SIZES),
        Key(f"{prefix}.moe_router_dtype", "moe_router_dtype", ROUTER_DTYPE, "fp32"),
        Key(f"{prefix}.moe_token_dispatcher_type", "moe_token_dispatcher_type", DISPATCHER, "alltoall"),
        Key(f"{prefix}.freeze_moe_router", "freeze_moe_router", SWITCH, False),
        Key(f"{prefix}.moe_router_load_balancing_type", "moe_router_load_balancing_type", LOAD_BALANCING, "none"),
        *under(
            prefix,
            (key for key in LAYERS if key.field in ("moe_router_score_function", "moe_router_enable_expert_bias")),
        ),
        *under(prefix, EXTRA),
        *under(
            transformer,
            (*LAYERS, *TRANSFORMER),
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            attention_backend=None,
            moe_permute_fusion=True,
        ),
        *under(prefix, (key for key in COMPUTE if key.name.startswith("fp8"))),  # of a branch of August 2026
        Key(f"{transformer}.num_layers", "num_layers", WHOLE),
        *under(f"{prefix}.optimizer_config_kwargs", OPTIMIZER),
        *under(f"{prefix}.ddp_config", BUCKETS[:3], grad_reduce_in_bf16=False),
    )


ADAPTERS: dict[str, Any] = {"rank": None, "alpha": 16, "dropout": 0.0, "target_modules": LINEARS, "exclude_modules": ()}
"""SkyRL's defaults of adapters (``SkyRLLoraConfig`` in skyrl/train/config/config.py, 0.3.0)."""


def complete_skyrl_adapters(reading: Reading, section: str, megatron: str) -> None:
    """Names adapters that memlab has none of.

    Args:
        section: The prefix of the adapters' keys.
        megatron: That of the config of Megatron.
    """
    has_targets = reading.get(f"{section}.target_modules") not in (None, ALL_LINEAR)
    kind = lacks_of_kind(reading, reading.values.pop("kind_of_adapters"), has_targets=has_targets)
    complete_adapters(reading, f"{section}.rank", kind)


_BESIDE = (
    "moe_token_dispatcher_type", "moe_grouped_gemm",
    "moe_enable_routing_replay",
)  # fmt: skip
"""Keys of `MISSING` that SkyRL has beside its ``transformer_config_kwargs``, and that these replace."""


def megatron_missing(prefix: str) -> tuple[Missing, ...]:
    """Returns what of the config changes memory and is not modelled, below its prefix."""
    return (
        *missing_under(
            f"{prefix}.transformer_config_kwargs",
            (*MISSING, *PROVIDER_MISSING, *REPLACED),
            overlap_p2p_comm=False,
        ),
        *missing_under(prefix, (row for row in MISSING if row.name in _BESIDE)),
        *missing_under(f"{prefix}.optimizer_config_kwargs", MISSING_OPTIMIZER),
    )


def megatron_without_effect(prefix: str) -> frozenset[str]:
    """Returns the keys of the config that change no memory, below its prefix."""
    transformer = f"{prefix}.transformer_config_kwargs"
    return (
        keys_without_effect("skyrl_megatron", prefix)
        | model_without_effect(transformer)
        | keys_without_effect("bridge_provider", transformer)
        | keys_without_effect("megatron_core_optimizer", f"{prefix}.optimizer_config_kwargs")
        | {f"{transformer}.{CHUNKS.name}"}
    )


def drop_single_chunk(values: dict[str, Any]) -> None:
    """Drops a size of chunks of which a row has only one.

    SkyRL computes log-probabilities all at once then (``from_parallel_logits_to_logprobs`` in
    skyrl/backends/skyrl_train/distributed/megatron/model_utils.py).
    """
    tokens = (values.get("seq_length") or 0) // (values.get("context_parallel_size") or 1)
    if values.get("logprobs_chunk_size") and tokens and values["logprobs_chunk_size"] >= tokens:
        values["logprobs_chunk_size"] = None


def padding_missing(prefix: str = "") -> tuple[Missing, ...]:
    """Returns the rows of both names of the key that leaves sequences padded, below a program's prefix.

    Their logits are copied to the places of the tokens, with autograd (``recover_left_padding`` in
    skyrl/backends/skyrl_train/distributed/megatron/megatron_utils.py, 0.3.0).
    """
    reason = "rows with padding have one more copy of the logits in fp32, and its gradients"
    names = "remove_microbatch_padding", "use_sample_packing"
    return tuple(Missing(f"{prefix}{name}", "more", reason, is_false) for name in names)


def padding_in_fp8(unit: int, context: int, _: str) -> tuple[int, int]:
    """Returns what sequences and rows are padded to (``get_packed_seq_align_size`` in megatron/packing_utils.py)."""
    multiple = math.lcm(unit, 16 * context)
    return multiple, multiple


def is_without_padding(scenario: Scenario) -> bool:
    """Whether a job's micro-batches are written without padding; with context parallelism SkyRL takes no others."""
    has_context = scenario.layout.context_parallel_size > 1
    return is_packed(scenario) or scenario.micro_batch_size == 1 or has_context


def cannot_write_of_rows(scenario: Scenario) -> dict[str, str]:
    """Names what no program of SkyRL expresses of the rows of a job and of their dispatcher."""
    reasons = names_dispatcher(scenario, "SkyRL")
    if scenario.micro_batch_size > 1 and scenario.layout.context_parallel_size > 1:
        reasons["micro_batch_size"] = "SkyRL packs a micro-batch's sequences into one row with context parallelism"
    return reasons


FIXED: dict[str, Any] = {"loss": "logprobs", "fp32_output": True, "use_distributed_optimizer": True}
CANNOT_WRITE = (
    OF_BRIDGE
    | of_one_kind("SkyRL")
    | OF_OTHER_FRAMEWORKS
    | {
        "lora_dropout_position": "SkyRL's adapters drop their inputs",
        "checkpoint_input_remedy": "SkyRL has no remedy for the inputs that checkpoints of MoE layers keep",
        "offload_optimizer_except_update": "SkyRL loads the optimizer state before the step",
        "use_distributed_optimizer": "SkyRL always uses the distributed optimizer",
        "manual_gc": "SkyRL has no such key",
        CHUNKS.field: "SkyRL does not tell Megatron's schedule of chunks",
        "ddp_bucket_size": "SkyRL has no such key",
        "reuse_grad_buf_for_mxfp8_param_ag": "SkyRL has no such key",
        "loss": "SkyRL computes the loss logprobs",
        "fp32_output": "SkyRL's logits are fp32",
        "dtype": "SkyRL's Megatron jobs are bf16",
    }
)
"""Fields that no program of SkyRL expresses, each with the reason."""
