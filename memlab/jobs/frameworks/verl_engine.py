"""The engine of verl that runs Megatron: its keys, below the prefixes that a trainer of verl gives them.

Names and defaults: ``verl/workers/config/{engine,optimizer,model}.py`` and ``verl/workers/engine/megatron/`` (0.9.1).
On 2026-08-20 the gradients became fp32 (verl PR 7485); before, Megatron-Core's default was used, bf16.
"""

from __future__ import annotations

import math
from typing import Any

from memlab.config.lora import LINEARS
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.adapters import (
    LORA,
    OF_BRIDGE,
    adapter_keys,
    complete_adapters,
    lacks_of_kind,
    lacks_of_section,
)
from memlab.jobs.frameworks.bridge_keys import (
    PROVIDER_DEFAULTS,
    PROVIDER_MISSING,
    REPLACED,
    model_without_effect,
)
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import (
    ABSENT,
    LONG_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    Key,
    Missing,
    is_false,
    is_given,
    missing_under,
    under,
)
from memlab.jobs.frameworks.megatron_keys import (
    BUCKETS,
    CHUNKS,
    LAYERS,
    MISSING,
    MISSING_DDP,
    MISSING_OPTIMIZER,
    OPTIMIZER,
    SIZES,
    TRANSFORMER,
)
from memlab.jobs.frameworks.megatron_lm import OF_OTHER_FRAMEWORKS, take_sequence_parallel
from memlab.jobs.frameworks.reinforcement import names_dispatcher, note_replaced_values
from memlab.jobs.frameworks.verl_checkout import BEFORE, FP32_SINCE, RELEASE, release_around
from memlab.jobs.frameworks.without_effect import keys_without_effect

_OWN_OPTIMIZER = (
    "use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer",
    "use_layer_wise_distributed_optimizer",
)  # fmt: skip
"""What verl's own optimizer config has of Megatron-Core's (``workers/config/optimizer.py``, 0.9.1)."""

AWAY = ("cpu", "disk")
"""Targets of ``offload.param`` and ``offload.optimizer`` that are not the device."""


def engine_keys(engine: str, optim: str, model: str) -> tuple[Key, ...]:
    """Returns the keys of an engine, its optimizer and its model, below their prefixes."""
    transformer, ddp = f"{engine}.override_transformer_config", f"{engine}.override_ddp_config"
    return (
        Key(f"{model}.path", "architecture", TEXT),
        *under(engine, (*SIZES, CHUNKS)),
        *under(
            transformer,
            (*LAYERS, *TRANSFORMER),
            attention_backend="flash",
            moe_router_load_balancing_type="none",
            **PROVIDER_DEFAULTS,
        ),
        Key(f"{model}.use_remove_padding", "removes_padding", SWITCH, True),
        Key(f"{transformer}.num_layers", "num_layers", WHOLE),
        *under(ddp, BUCKETS, grad_reduce_in_bf16=ABSENT),
        *under(f"{optim}.override_optimizer_config", OPTIMIZER),
        *under(optim, (key for key in OPTIMIZER if key.name in _OWN_OPTIMIZER)),
        Key(f"{engine}.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
        Key(f"{ddp}.use_distributed_optimizer", "use_distributed_optimizer", SWITCH),
        Key(f"{engine}.dtype", "dtype", LONG_DTYPE, "bf16"),
        Key(f"{engine}.param_offload", "offload_parameters", SWITCH, False),
        Key(f"{engine}.optimizer_offload", "offload_optimizer", SWITCH, False),
        *(Key(f"{engine}.offload.{part}.target", f"{part}_target", TEXT, None) for part in ("param", "optimizer")),
        *adapter_keys(
            f"{model}.lora",
            rank=None,
            alpha=32,
            dropout=0.0,
            dropout_position="pre",
            target_modules=LINEARS,
            exclude_modules=(),
            share_expert_adapters=True,
            normalize_moe_lora=False,
        ),
        Key(f"{model}.lora.type", "kind_of_adapters", TEXT, "lora"),
    )


_CHUNKS = Missing(CHUNKS.name, "either", "verl has a key of its own for it", is_given)
_ENGINE_MISSING = (
    Missing("entropy_from_logits_with_chunking", "less", "the entropy is computed in chunks of tokens"),
    Missing("dynamic_context_parallel", "either", "the context parallel size changes from row to row"),
    Missing("use_megatron_fsdp", "less", "Megatron-FSDP shards parameters and gradients too"),
    Missing("pad_to_length", "more", "rows are padded to a multiple of pad_to_length_bucket"),
    Missing("qat.enable", "either", "weights are quantized in forward"),
    Missing("router_replay.mode", "more", "the chosen experts of each token are kept, of all micro-batches",
            lambda value: value not in (None, "disabled")),
    *(
        Missing(f"offload.{part}.target", "either", "memlab predicts it as offload to host memory",
                lambda value: value == "disk")
        for part in ("param", "optimizer")
    ),
)  # fmt: skip
_MODEL_MISSING = (
    Missing("lora_rank", "less", LORA),
    Missing("use_fused_kernels", "less",
            "a fused linear cross entropy computes log-probabilities without whole logits, which saves at most the "
            "logits and their fp32 copies"),
    # It replaces the engine's own key (``TrainingWorker`` in verl/workers/engine_workers.py, 0.9.1).
    Missing("use_remove_padding", "more", "rows are padded to the longest sequence", is_false),
    Missing("mtp.enable", "more", "multi-token prediction: one more layer and set of logits"),
)  # fmt: skip


def engine_missing(engine: str, optim: str, model: str) -> tuple[Missing, ...]:
    """Returns what of an engine changes memory and is not modelled, below the prefixes."""
    return (
        *missing_under(engine, _ENGINE_MISSING),
        *missing_under(model, _MODEL_MISSING),
        *missing_under(
            f"{engine}.override_transformer_config",
            (*MISSING, *PROVIDER_MISSING, *REPLACED, _CHUNKS),
        ),
        *missing_under(f"{engine}.override_ddp_config", MISSING_DDP),
        *missing_under(f"{optim}.override_optimizer_config", MISSING_OPTIMIZER),
        *missing_under(optim, (row for row in MISSING_OPTIMIZER if row.name in _OWN_OPTIMIZER)),
    )


def engine_without_effect(engine: str, optim: str, model: str) -> frozenset[str]:
    """Returns the keys of an engine that change no memory, below the prefixes."""
    transformer = f"{engine}.override_transformer_config"
    return (
        keys_without_effect("verl_engine", engine)
        | keys_without_effect("verl_optimizer", optim)
        | keys_without_effect("verl_model", model)
        | model_without_effect(transformer)
        | keys_without_effect("megatron_core_ddp", f"{engine}.override_ddp_config")
        | keys_without_effect("megatron_core_optimizer", f"{optim}.override_optimizer_config")
        | keys_without_effect("bridge_provider", transformer)
    )


def padding_in_fp8(unit: int, _: int, __: str) -> tuple[int, int]:
    """Returns what sequences and rows are padded to (``_compute_fp8_thd_align_size`` in verl/models/mcore/util.py)."""
    return math.lcm(16, unit), 128 * unit


def complete_engine(reading: Reading, engine: str, optim: str, model: str) -> None:
    """Derives gradients, and what leaves the device."""
    note_replaced_values(reading, f"{model}.override_config")
    if reading.values["dtype"] == "fp16":
        reading.values["dtype"] = "bf16"
        reading.blocked["precision"].append(f"{engine}.dtype {reading.get(f'{engine}.dtype')}: memlab computes in bf16")
    take_sequence_parallel(reading, f"{engine}.sequence_parallel", default=True)
    _complete_optimizer(reading, optim)
    _complete_gradients(reading, engine, optim)
    _complete_offload(reading, engine)
    _take_defaults_of_mbridge(reading, engine)
    kind = lacks_of_kind(reading, reading.values.pop("kind_of_adapters"), has_targets=True)
    complete_adapters(reading, f"{model}.lora.rank", [*kind, *lacks_of_section(reading, f"{model}.lora")])


def _complete_optimizer(reading: Reading, optim: str) -> None:
    """Takes types by verl's own keys, which it reads with the precision-aware optimizer only.

    What ``override_optimizer_config`` has replaces them (``init_megatron_optim_config``, utils/megatron/optimizer.py).
    """
    is_on = reading.get(f"{optim}.use_precision_aware_optimizer")
    for key in OPTIMIZER:
        own, override = f"{optim}.{key.name}", f"{optim}.override_optimizer_config.{key.name}"
        if (given := reading.entries.by_key.get(override)) is not None:
            if not given.is_unknown:
                reading.values[key.field] = key.conversion.checked(given.place, override, reading.get(override))
        elif key.name.endswith("_dtype") and own in reading.entries.by_key and not is_on:
            reading.values[key.field] = key.default
            reading.taken = [one for one in reading.taken if one.key != own]
            reading.without_effect[own] = "verl reads it with use_precision_aware_optimizer only"


def _complete_gradients(reading: Reading, engine: str, optim: str) -> None:
    """Takes the type of the gradients, as ``_resolve_override_ddp_config`` of verl's engine does since June 2026."""
    key = f"{engine}.override_ddp_config.grad_reduce_in_fp32"
    if key in reading.entries.by_key:
        return
    own = f"{optim}.main_grads_dtype"
    if reading.get(f"{optim}.use_precision_aware_optimizer") and reading.get(own) not in (None, "fp32", "float32"):
        reading.take(own, "grad_reduce_in_bf16", True)
        return
    if reading.version is None:
        reading.questions.append(
            f"{key} is not in the file, and its default depends on the version: fp32 since {FP32_SINCE}, "
            f"bf16 before: give --framework-version {RELEASE} or {BEFORE}, or --set {key}=true or false"
        )
    reading.values["grad_reduce_in_bf16"] = reading.version == BEFORE


def _complete_offload(reading: Reading, engine: str) -> None:
    """Takes what leaves the device: gradients with the parameters (``offload_megatron_model_to_cpu``)."""
    values = reading.values
    for name, component in (("parameters", "param"), ("optimizer", "optimizer")):
        if values.pop(f"{component}_target") in AWAY:
            reading.take(f"{engine}.offload.{component}.target", f"offload_{name}", value=True)
    values["offload_gradients"] = values.get("offload_parameters")
    for key in (f"{engine}.grad_offload", f"{engine}.offload.grad.target"):
        if reading.get(key) is not None:
            reading.without_effect[key] = (
                "verl frees the gradients where it offloads the parameters; 0.9.1 refuses the key"
            )


def _take_defaults_of_mbridge(reading: Reading, engine: str) -> None:
    """Takes the fusions of mbridge (0.15.1), where verl builds the model by it, and no key says them."""
    # models/qwen3moe.py sets the one; Megatron-Core's default of the other is false.
    of_mbridge = {"bias_activation_fusion": True, "gradient_accumulation_fusion": False, "moe_permute_fusion": False}
    given = {one.field for one in reading.taken if one.place != "default"}
    key, release = f"{engine}.vanilla_mbridge", release_around(reading.started)
    is_default = release is not None and _OF_MBRIDGE[0] <= release[0][:2] <= _OF_MBRIDGE[1]
    if reading.get(key, is_default):
        for name in of_mbridge.keys() - given:
            reading.take_back(name)
            reading.take(key, name, of_mbridge[name])


_OF_MBRIDGE = (0, 7), (0, 8)
"""The first and the last release that build models by mbridge unless the job says otherwise."""


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what verl cannot express of a job."""
    reasons = names_dispatcher(scenario, "verl")
    if settings.offload_gradients != settings.offload_parameters:
        reasons["offload_gradients"] = "verl frees the gradients where it offloads the parameters"
    return reasons


# verl patches Megatron's checkpoints on every GPU (apply_patch_megatron_recomputation_backward, models/mcore/patch.py).
FIXED: dict[str, Any] = {
    "loss": "vocab_parallel_cross_entropy", "fp32_output": True, "checkpoint_input_remedy": "release_storage",
}  # fmt: skip
CANNOT_WRITE = (
    OF_BRIDGE
    | OF_OTHER_FRAMEWORKS
    | {
        "freeze_moe_router": "verl has no such key",
        "checkpoint_input_remedy": "verl always applies release_storage",
        "offload_optimizer_except_update": "verl loads the optimizer state before the step",
        "manual_gc": "verl has no such key",
        "loss": "verl computes the loss vocab_parallel_cross_entropy",
        "fp32_output": "verl's logits are fp32",
        "logprobs_chunk_size": "verl computes log-probabilities of a whole micro-batch at once",
    }
)
"""Fields that no trainer of verl expresses, each with the reason."""
