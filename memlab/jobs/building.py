"""From the values of a job's file to a scenario and settings, the same for all frameworks."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.config.training_state import TrainingState
from memlab.jobs.framework import NotModelled, Reading

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout) if field.name not in ("rank", "data_parallel_size"))
STATE_FIELDS = tuple(field.name for field in fields(TrainingState))
SETTINGS_FIELDS = tuple(field.name for field in fields(MemorySettings))
WORKLOAD_FIELDS = ("num_layers", "seq_length", "micro_batch_size", "num_microbatches", "dtype")


class CannotStartError(ValueError):
    """The framework itself would refuse the job; the text says by which rule."""


def layout_of(reading: Reading, architecture: Architecture) -> Layout:
    """Returns the job's layout, with as many copies of the model as its ranks make.

    Raises:
        CannotStartError: If the ranks cannot be divided so.
        ValueError: If memlab does not model how layers are split over stages.
    """
    _count_ends_as_layers(reading, reading.values.get("num_layers") or architecture.num_layers)
    values = {name: reading.values.get(name) for name in LAYOUT_FIELDS}
    values["virtual_pipeline_model_parallel_size"] = values["virtual_pipeline_model_parallel_size"] or 1
    tensor = values["tensor_model_parallel_size"] or 1
    if not architecture.is_moe or values["expert_tensor_parallel_size"] == tensor:
        values["expert_tensor_parallel_size"] = None
    if not architecture.is_moe and (values["expert_model_parallel_size"] or 1) > 1:
        reading.without_effect["expert_model_parallel_size"] = "the model has no experts"
        values["expert_model_parallel_size"] = 1
    sizes = {name: size for name, size in values.items() if size is not None}
    context, pipeline = sizes.get("context_parallel_size", 1), sizes.get("pipeline_model_parallel_size", 1)
    per_copy = tensor * context * pipeline
    world_size = reading.values.get("world_size")
    if min(tensor, context, pipeline, world_size or 1) < 1:
        raise CannotStartError(f"a size of the layout is below 1: {sizes}")
    if world_size is None:
        experts = sizes.get("expert_model_parallel_size", 1) * (sizes.get("expert_tensor_parallel_size") or tensor)
        world_size = math.lcm(per_copy, experts * pipeline) if architecture.is_moe else per_copy
        reading.warnings.append(
            f"the number of ranks is not in the file, so memlab takes the smallest, {world_size}: give --world-size"
        )
    if world_size % per_copy:
        raise CannotStartError(
            f"the job has {world_size} ranks, must have a multiple of {per_copy} (tensor {tensor} x context {context} "
            f"x pipeline {pipeline}): change a size, or the number of ranks"
        )
    try:
        return Layout(**sizes, data_parallel_size=world_size // per_copy)
    except ValueError as error:
        raise CannotStartError(str(error)) from error


_COUNTED = {
    "account_for_embedding_in_pipeline_split": "num_layers_in_first_pipeline_stage",
    "account_for_loss_in_pipeline_split": "num_layers_in_last_pipeline_stage",
}
"""Megatron's options by which a stage with the embedding, or with the loss, has one layer fewer than the others."""


def _count_ends_as_layers(reading: Reading, num_layers: int) -> None:
    """Takes the layers of the first and the last stage where embedding or loss counts as a layer of them.

    The rule is that of ``get_num_layers_to_build`` (megatron/core/transformer/transformer_block.py, 0.16.1).
    """
    values = reading.values
    stages, chunks = (values.get(f"{name}pipeline_model_parallel_size") or 1 for name in ("", "virtual_"))
    counted = [one for one in reading.not_modelled if one.key.rpartition(".")[2] in _COUNTED]
    layout = [one for one in reading.not_modelled if one.key.rpartition(".")[2] == "pipeline_model_parallel_layout"]
    if stages > 1 and layout:
        raise ValueError(
            f"{layout[0].key} ({layout[0].place}) gives stages layers one by one, which memlab does not model"
        )
    if stages <= 1 or not counted:
        return
    keys = ", ".join(one.key for one in counted)
    if any(values.get(field) is not None for field in _COUNTED.values()):
        raise CannotStartError(
            f"{keys} cannot be combined with layers of the first or last stage: leave one of the two out"
        )
    together = num_layers + len(counted)
    if together % (stages * chunks):
        raise CannotStartError(
            f"{num_layers} layers and {len(counted)} more that {keys} counts are {together}, must be a multiple of "
            f"{stages * chunks} stages and chunks: change one of them"
        )
    if chunks > 1:
        raise ValueError(
            f"{keys} with {chunks} chunks per stage makes chunks of different sizes, which memlab does not model"
        )
    for one in counted:
        reading.take(one.key, _COUNTED[one.key.rpartition(".")[2]], together // stages - 1)
        reading.not_modelled.remove(one)


def scenario_of(reading: Reading, architecture: Architecture) -> Scenario:
    """Builds the scenario that the values of a job's file describe.

    Raises:
        CannotStartError: If Megatron's own rules refuse the layout.
        ValueError: If memlab refuses a value.
    """
    layout = layout_of(reading, architecture)
    values = reading.values
    num_layers = values.get("num_layers") or architecture.num_layers
    seq_length = values.get("seq_length") or architecture.default_seq_length
    num_microbatches = _num_microbatches(reading, layout)
    try:
        layout.check(architecture, num_layers, seq_length, num_microbatches)
    except ValueError as error:
        raise CannotStartError(str(error)) from error
    _normalise_state(reading, layout)
    state = {name: values[name] for name in STATE_FIELDS if values.get(name) is not None}
    return Scenario(
        architecture=architecture,
        num_layers=num_layers,
        seq_length=seq_length,
        micro_batch_size=values.get("micro_batch_size") or 1,
        num_microbatches=num_microbatches,
        packed_sequences=values.get("packed_sequences"),
        dtype=values.get("dtype") or "bf16",
        layout=layout,
        state=TrainingState(**state),
        allocator=_allocator(reading),
    )


def _num_microbatches(reading: Reading, layout: Layout) -> int:
    """Returns the passes of a step: given, or from the global batch, as Megatron divides it."""
    values = reading.values
    given, global_batch = values.get("num_microbatches"), values.get("global_batch_size")
    if given is not None or global_batch is None:
        return given or 1
    per_pass = (values.get("micro_batch_size") or 1) * layout.data_parallel_size
    if global_batch % per_pass:
        raise CannotStartError(
            f"the global batch has {global_batch} sequences, must be a multiple of {per_pass} (micro-batch "
            f"{values.get('micro_batch_size') or 1} x data parallel {layout.data_parallel_size}): change one of them"
        )
    return int(global_batch // per_pass)


def _normalise_state(reading: Reading, layout: Layout) -> None:
    """Drops what the framework would not read, and what memlab does not predict."""
    values, default = reading.values, TrainingState()
    if not values.get("optimizer_cpu_offload"):
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"):
            values[name] = getattr(default, name)
    if not values.get("cross_entropy_loss_fusion") or values.get("loss") == "logprobs":
        values["cross_entropy_loss_fusion"], values["cross_entropy_fusion_impl"] = False, "native"
    if values.get("fp8_format") is None:
        values["fp8_recipe"], values["fp8_param_gather"] = "delayed", False
    backend = values.get("attention_backend")
    if backend == "flash" and layout.context_parallel_size > 1:
        reading.miss(
            "attention_backend", "either", "memlab predicts context parallel attention for cuDNN's kernels only"
        )
        values["attention_backend"] = "auto"
    if backend == "local":
        reading.miss("attention_backend", "more", "Megatron's own attention keeps the scores of every head")
        values["attention_backend"] = "unfused"


def settings_of(reading: Reading) -> MemorySettings:
    """Builds the memory settings that the values of a job's file describe.

    Raises:
        ValueError: If Megatron or memlab refuses a combination.
    """
    values = dict(reading.values)
    granularity = values.get("recompute_granularity")
    if granularity is None:
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            values[name] = None
    elif granularity == "full":
        values["recompute_modules"] = None
    else:
        values["recompute_modules"] = _known(
            reading, "recompute_modules", values.get("recompute_modules") or ("core_attn",), RECOMPUTE_MODULES
        )
        if values["recompute_modules"] is None:
            values["recompute_granularity"] = None
    if not values.get("fine_grained_activation_offloading", True):
        values["offload_modules"] = None
    if values.get("offload_modules"):
        values["offload_modules"] = _known(reading, "offload_modules", values["offload_modules"], OFFLOAD_MODULES)
    if not values.get("offload_modules"):
        for name in SETTINGS_FIELDS:
            if name.startswith(("min_offloaded", "activation_offload", "delta_offload", "fine_grained_offloading")):
                values.pop(name, None)
    given = {name: values[name] for name in SETTINGS_FIELDS if values.get(name) is not None}
    return MemorySettings(**given)


def _known(reading: Reading, name: str, modules: tuple[str, ...], choices: tuple[str, ...]) -> tuple[str, ...] | None:
    unknown = [module for module in modules if module not in choices]
    if unknown:
        taken = [one for one in reading.taken if one.field == name and one.value is not None]
        key, place = (taken[-1].key, taken[-1].place) if taken else (name, "default")
        reason = f"memlab does not have the modules {', '.join(unknown)}"
        reading.not_modelled.append(NotModelled(key, list(modules), "less", reason, place))
    return tuple(module for module in modules if module in choices) or None


def _allocator(reading: Reading) -> AllocatorSettings:
    """Reads ``PYTORCH_CUDA_ALLOC_CONF`` of a script or of a configuration's environment."""
    text = reading.values.get("allocator")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        text = reading.entries.environment.get(name, text)
    if not text or "\0" in text:
        return AllocatorSettings()
    values: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+)\s*:\s*([\w.]+)", text):
        if name == "expandable_segments":
            values[name] = value.lower() == "true"
        elif name == "garbage_collection_threshold" and re.fullmatch(r"\d?\.\d{1,9}", value):
            values[name] = float(value)
        elif name == "max_split_size_mb" and re.fullmatch(r"\d{1,9}", value):
            values[name] = int(value)
    return AllocatorSettings(**values)
