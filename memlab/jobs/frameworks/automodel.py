"""NeMo Automodel's recipes: FSDP2 over models of transformers, or over Automodel's own classes of them.

Names and defaults: ``nemo_automodel/components/distributed/config.py`` and ``parallelizer.py``,
``recipes/llm/train_ft.py``, ``_transformers/auto_model.py`` and ``model_init.py`` (36044ad3, main of August 2026). The
release 0.7.0 has the same names and defaults but for the output type of `MixedPrecisionPolicy`, which changes no bytes
where layers compute in bf16; `_take_release` has what it does otherwise.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.config.hugging_face import model_type_of
from memlab.config.pipeline_layout import FIELD
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.automodel_experts import take_experts
from memlab.jobs.frameworks.automodel_images import IMAGES, RECIPE, has_tower, take_tower
from memlab.jobs.frameworks.automodel_pipeline import (
    composed_of_pipeline,
    layout_of_parts,
    refuse_schedules,
    take_chunks,
    take_microbatches,
)
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    EXCHANGE,
    FOREACH,
    FROZEN,
    OF_OWN_EXPERTS,
    OF_SEVERAL_KEYS,
    OF_TOWERS,
    OWN_PLAN,
    PARTS_OF_AUTOMODEL,
    Own,
    automodel_keys,
    block,
    check_family,
    composed_of_fsdp2,
    freezes_language,
    of_other_values,
    own_automodel,
    own_checkpoints,
    take_adam,
    take_automodel_adapters,
    take_checkpointed_layers,
    take_kept,
    take_types,
)
from memlab.jobs.frameworks.keys import (
    ABSENT,
    COUNT,
    LONG_DTYPE,
    SWITCH,
    TEXT,
    WHOLE,
    Conversion,
    Key,
    Missing,
    is_given,
)
from memlab.jobs.frameworks.lines import yaml_lines
from memlab.jobs.frameworks.megatron_lm import named
from memlab.jobs.frameworks.towers import drop_images
from memlab.jobs.frameworks.without_effect import keys_without_effect
from memlab.jobs.model import architecture_written_out

_RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction")
_CAUSAL = "NeMoAutoModelForCausalLM"
_POLICY = "distributed.mp_policy"
_CHECKPOINTING = "distributed.activation_checkpointing"
_ATTENTION = "model.attn_implementation"
_NORM = "torch_fp32"
"""The kind of norms that Automodel's own classes have by default: compiled, and computed in fp32."""
_LONGEST = ("dataset.seq_length", "dataset.seq_len", "dataloader.collate_fn.max_length")
_MULTIPLE = "dataloader.collate_fn.pad_seq_len_divisible"
_OF_CLASSES = ("model.backend.rms_norm", "model.backend.rope", "model.use_liger_kernel")
_SECTIONS = {
    "teacher_model": ("teacher_", "offload_teacher_model", "separate_meshes", "kd_"),
    "recipe_args": ("recipe_args.",),
    "quantization": ("quantization.",),
    "flow_matching": (),
}
"""Sections of what memlab does not have, with how the keys begin that only such a recipe reads, and memlab knows."""
_OF_RANKS = {
    "sequence_parallel": ("tensor_model_parallel_size", "one tensor parallel rank has no other to share norms with"),
    **dict.fromkeys(
        ("schedule", "layers_of_chunk", "rounding_of_chunks", "rows_of_stage"),
        ("pipeline_model_parallel_size", "the model has one pipeline stage"),
    ),
}
"""Fields that only ranks read which share a model otherwise than FSDP2 does, each with their number."""
_OF_OWN_CLASSES = (
    "distributed.moe.",
    "distributed.multimodal.",
    "peft.moe_rank_scaling",
    "model.backend.",
    "model.attn_implementation",
)
"""How the keys begin that decide what Automodel's class of a model computes, keeps and gathers."""
_SWITCHES_OF_CLASSES = ("model.use_liger_kernel", "model.config.use_cache", "model.text_config.use_cache")
"""Keys that decide it too, where they are on."""
_NOT_OF_CLASSES = ("_target_", "enable_hf_state_dict_adapter", "rope_fusion", "enable_deepep")
"""How those of them end that change no memory: 36044ad3 switches the fused rotation off."""
_PACKING_STRATEGY = "packed_sequence.packing_strategy"
_RELEASE = "0.7.0"
_STAYS = "Automodel keeps it on the device between steps"
_RANKS_OF_A_NODE = 8
"""Of the machines on which Automodel's own tests run its recipes."""


def _read_checkpointing(value: Any) -> str | None:
    # ``_normalize_activation_checkpointing`` in recipes/_dist_utils.py
    word = str(value).lower().replace("-", "_")
    if word in ("none", "false", "off", "disabled", "no"):
        return None
    if word in ("true", "on", "full", "enabled", "yes"):
        return "full"
    if word != "selective":
        raise ValueError("must be true, false, full or selective")
    return word


_SIZE = Conversion(lambda value: None if value in (None, "none", "None") else COUNT.read(value), lambda value: value)
_MODE = Conversion(_read_checkpointing, lambda value: value == "full" if value in (None, "full") else value)
_STORAGE = Conversion(
    lambda value: "auto" if value in (None, "auto") else LONG_DTYPE.read(value),
    lambda value: value if value == "auto" else LONG_DTYPE.write(value),
)
_RESHARDED = {None: "all_but_last", True: "all", False: "none"}
_RESHARD = Conversion(
    lambda value: _RESHARDED[None if value is None else SWITCH.read(value)],
    lambda value: {name: given for given, name in _RESHARDED.items()}[value],
)

_SECTION = Conversion(lambda value: value is None, lambda _: None)
"""A section that a recipe does not have any more: Automodel trains adapters wherever there is one."""
_CLASS_OF_ADAPTERS = "nemo_automodel.components._peft.lora.PeftConfig"
_FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
_POLICY_ON_HOST = "torch.distributed.fsdp.CPUOffloadPolicy"
_OFFLOAD = Conversion(
    lambda value: str(value).endswith("CPUOffloadPolicy"), lambda value: _POLICY_ON_HOST if value else None
)

_DISTRIBUTED = (
    Key("distributed.strategy", "strategy", TEXT, "fsdp2"),
    Key("distributed.dp_size", "data_ranks", _SIZE, None),
    Key("distributed.dp_replicate_size", "dp_replicate_size", _SIZE, None),
    Key("distributed.offload_policy._target_", "fsdp_cpu_offload", _OFFLOAD, False),
    Key("distributed.tp_size", "tensor_model_parallel_size", COUNT, 1),
    Key("distributed.cp_size", "context_parallel_size", COUNT, 1),
    Key("distributed.pp_size", "pipeline_model_parallel_size", COUNT, 1),
    Key("distributed.ep_size", "expert_model_parallel_size", COUNT, 1),
    Key(_CHECKPOINTING, "checkpointing", _MODE, None),
    Key("distributed.reshard_after_forward", "reshard_after_forward", _RESHARD, "all_but_last"),
    Key("distributed.defer_fsdp_grad_sync", "defer_fsdp_grad_sync", SWITCH, True),
    Key("distributed.enable_fsdp2_prefetch", "gathers_ahead", SWITCH, False),
    Key("distributed.fsdp2_forward_prefetch_depth", "fsdp2_forward_prefetch_depth", WHOLE, 1),
    Key("distributed.fsdp2_backward_prefetch_depth", "fsdp2_backward_prefetch_depth", WHOLE, 2),
    Key(f"{_POLICY}.param_dtype", "compute", LONG_DTYPE, "bf16"),
    Key(f"{_POLICY}.reduce_dtype", "reduced", LONG_DTYPE, "fp32"),
)
_OF_DIFFUSION = (
    *(
        replace(key, name=f"fsdp{key.name.removeprefix('distributed')}", default=ABSENT)
        for key in _DISTRIBUTED
        if "policy" not in key.name
    ),
    Key("fsdp.cpu_offload", "fsdp_cpu_offload", SWITCH),
    Key("fsdp.reduce_dtype", "reduced", LONG_DTYPE),
)
"""The section of a recipe for diffusion that the parser of ``distributed`` reads too, with defaults of its own
(``_build_diffusion_parallel_manager_args`` in recipes/diffusion/train.py)."""
KEYS = (
    Key("model.pretrained_model_name_or_path", "architecture", TEXT),
    Key("model.config", "architecture", TEXT),
    Key("model.config.pretrained_model_name_or_path", "architecture", TEXT),
    Key("model.config.name_or_path", "architecture", TEXT),
    Key("model.num_hidden_layers", "num_layers", WHOLE),
    Key("model.config.num_hidden_layers", "num_layers", WHOLE),
    Key("model.torch_dtype", "shards", _STORAGE, "auto"),
    Key("model.dtype", "shards", _STORAGE),
    Key("model.force_hf", "is_of_transformers", SWITCH, False),
    *_DISTRIBUTED,
    *_OF_DIFFUSION,
    Key("step_scheduler.local_batch_size", "micro_batch_size", COUNT, 1),
    Key("step_scheduler.global_batch_size", "global_batch_size", COUNT, 32),
    Key("packed_sequence.packed_sequence_size", "packed_tokens", WHOLE, 0),
    Key("packed_sequence.pack_size", "packed_tokens", WHOLE),
    *(Key(name, "longest", COUNT) for name in _LONGEST),
    Key(_MULTIPLE, "sequence_multiple", WHOLE, None),
    Key(IMAGES, "images_per_sequence", COUNT),
    Key("distributed.sequence_parallel", "sequence_parallel", SWITCH),
    Key("distributed.pipeline.pp_schedule", "schedule", TEXT),
    Key("distributed.pipeline.layers_per_stage", "layers_of_chunk", COUNT),
    Key("distributed.pipeline.round_virtual_stages_to_pp_multiple", "rounding_of_chunks", TEXT),
    Key("distributed.pipeline.pp_microbatch_size", "rows_of_stage", COUNT),
    Key("peft", "has_no_adapters", _SECTION, False),
    Key("peft._target_", "class_of_adapters", TEXT),
    *automodel_keys("peft"),
    Key("optimizer._target_", "optimizer", TEXT, "torch.optim.AdamW"),
    Key("optimizer.master_weights", "master_weights", SWITCH, False),
    Key("optimizer.store_param_remainders", "store_param_remainders", SWITCH, False),
    Key("optimizer.foreach", "is_foreach", FOREACH),
    Key("optimizer.fused", "is_fused", SWITCH),
)

_WHOLE_LOGITS = "the loss does not make all logits at once, or not in fp32"
FRAMEWORK_MISSING = (
    Missing("loss_fn.fp32_upcast", "less", _WHOLE_LOGITS, lambda value: value is False),
    Missing("loss_fn.logit_softcapping", "more", "capped logits, and what their backward needs", is_given),
    Missing("model.output_hidden_states", "more", "the hidden states of all layers stay until backward ends"),
    Missing(_ATTENTION, "more", "attention keeps the scores of all heads",
            lambda value: value == "eager"),
    Missing(f"{_POLICY}.output_dtype", "more", "each layer returns its hidden states in fp32",
            lambda value: "32" in str(value)),
    Missing("distributed.autocast_dtype", "either", "autocast chooses types operation by operation", is_given),
    Missing("distributed.enable_compile", "either", "compiled layers keep other tensors"),
    Missing("distributed.enable_async_tensor_parallel", "either", "products and collectives become one kernel, which "
            "has buffers of its own"),
    Missing(_PACKING_STRATEGY, "more", "attention has a mask of packed sequences",
            lambda value: value != "thd"),
    Missing("fsdp.enable_compile", "either", "compiled layers keep other tensors"),
    Missing("compile.enabled", "either", "compiled layers keep other tensors"),
    Missing("fp8.enabled", "either", "matrices are multiplied in FP8"),
    Missing("qat.enabled", "more", "fake quantization adds tensors to each matrix"),
    Missing("model.backend.attn", "either", "memlab has no attention of this kind",
            lambda value: value not in ("te", "sdpa")),
    Missing("model.backend.te_fp8.recipe", "either", "matrices are multiplied in FP8", is_given),
    Missing("model.backend.compile_attn", "either", "compiled attention keeps other tensors"),
    Missing("model.backend.compile_norm", "either", "compiled norms keep other tensors"),
    Missing("model.backend.compile_situ", "either", "compiled activations keep other tensors"),
    Missing("model.backend.cuda_graph.modules", "more", "CUDA graphs have pools of their own", is_given),
    Missing("optimizer.amsgrad", "more", "a third moment"),
    *(
        Missing(f"freeze_config.freeze_{part}", "less", FROZEN)
        for part in PARTS_OF_AUTOMODEL
    ),
    Missing("neftune.noise_alpha", "more", "noise on the embeddings", is_given),
    Missing("tool_call_eval._target_", "more", "the model generates texts between steps", is_given),
)  # fmt: skip


def complete(reading: Reading) -> None:
    """Derives what trains, ranks, types, lengths, checkpoints and the optimizer."""
    values = reading.values
    _take_written_sizes(reading)
    _refuse(reading)
    if has_tower(reading):
        take_tower(reading)
    else:
        drop_images(reading)
    _drop_keys_of_other_ranks(reading)
    _take_ranks(reading)
    _take_types(reading)
    if values["world_size"] == 1:
        # In the shards' type alone it then computes and reduces (``FSDP2Manager.parallelize`` in distributed/fsdp2.py).
        key, effect = ("distributed", "either") if values["fp32_sharded_params"] else ("distributed.dp_size", "less")
        reading.miss(key, effect, "Automodel does not shard a model on a single rank")  # type: ignore[arg-type]
    _take_rows(reading)
    take_microbatches(reading)
    _take_prefetch(reading)
    _take_optimizer(reading)
    checkpointing = values.pop("checkpointing")
    if checkpointing == "full":
        take_checkpointed_layers(reading)
    elif checkpointing:
        take_checkpointed_layers(reading)
        values["selective_ac"] = True
    for key, entry in reading.entries.by_key.items():
        is_known = key in reading.known or AUTOMODEL.ignores(key)
        if key.startswith("model.") and entry.value not in (None, {}) and not is_known:
            reading.miss(key, "either", "it replaces a value of the published model")
    loss = str(reading.get("loss_fn._target_", default="MaskedCrossEntropy")).rpartition(".")[2]
    if loss != "MaskedCrossEntropy":
        reading.miss("loss_fn._target_", "less", _WHOLE_LOGITS)
    del values["has_no_adapters"]
    values.pop("class_of_adapters", None)
    reading.take_back("has_no_adapters")
    take_automodel_adapters(reading, "peft", is_on=_trains_adapters(reading))
    _take_release(reading)


def _take_written_sizes(reading: Reading) -> None:
    """Takes the model of which a recipe writes out the configuration, for a class of transformers."""
    start = "model.config."
    kind = model_type_of(str(reading.get(f"{start}_target_", default="")))
    if kind is None:
        return
    config: dict[str, Any] = {}
    for key, entry in reading.entries.by_key.items():
        name, _, part = key.removeprefix(start).partition(".")
        if not key.startswith(start):
            continue
        reading.known.add(key)
        reading.without_effect[key] = "memlab took the model from its configuration as a whole"
        if entry.is_unknown:
            reading.blocked["model"].append(f"{key}: a size of the model that is known only when the job runs")
            return
        if part:
            config.setdefault(name, {})[part] = entry.value
        else:
            config[name] = entry.value
    try:
        reading.architecture = architecture_written_out(config | {"model_type": kind}, reading.path.stem)
    except ValueError as error:
        reading.blocked["model"].append(f"{start}_target_: {error}")
        return
    reading.take(f"{start}_target_", "architecture", reading.architecture.name)


def _take_release(reading: Reading) -> None:
    """Takes what the release does otherwise than main of August.

    It releases the output before backward (``_forward_backward_step`` in recipes/llm/train_ft.py), and shards
    embeddings that it trains by themselves (``_fully_shard_untied_input_output_embeddings`` in parallelizer.py).
    """
    if reading.version is None:
        reading.warnings.append(
            "memlab takes Automodel's main of August 2026, which holds the logits until backward has ended and shards "
            f"both embeddings together: give --framework-version {_RELEASE} for the release"
        )
    if reading.version == _RELEASE:
        frozen = _trains_adapters(reading) or freezes_language(reading, "freeze_config")
        embeddings = "none" if frozen else "both"
        reading.values |= {"loss_of_transformers": "masked_cross_entropy", "separate_embeddings": embeddings}


def _take_prefetch(reading: Reading) -> None:
    """Takes what is gathered ahead, which needs the switch and layers that are sharded again."""
    values = reading.values
    if not values.pop("gathers_ahead") or values["reshard_after_forward"] == "none":
        values |= {"fsdp2_forward_prefetch_depth": 0, "fsdp2_backward_prefetch_depth": 0}


def _trains_adapters(reading: Reading) -> bool:
    return any(key.startswith("peft.") for key in reading.entries.by_key)


def _take_least(reading: Reading, optimizer: str) -> None:
    """Takes what FSDP2 keeps of each parameter, unless its weights are elsewhere, or others than memlab counts."""
    is_quantized = any(key.startswith("quantization.") for key in reading.entries.by_key)
    if not (reading.values["fsdp_cpu_offload"] or is_quantized or _class_of_model(reading) != _CAUSAL):
        is_torch_adam = optimizer in ("torch.optim.Adam", "torch.optim.AdamW")
        trains_all = not (_trains_adapters(reading) or freezes_language(reading, "freeze_config"))
        take_kept(reading, trains_all=trains_all, is_torch_adam=is_torch_adam)
        if optimizer.endswith("FlashAdamW"):  # it may keep parameters of fp32 shards in fewer bytes
            reading.kept_of_parameter = dict.fromkeys(reading.kept_of_parameter, 2)


def _refuse(reading: Reading) -> None:
    """Notes what the engine does not have: of these, no number would be near."""
    values, by_key = reading.values, reading.entries.by_key
    if any(key.startswith("flow_matching.") for key in by_key):
        _take_defaults_of_diffusion(reading)
    has_images = has_tower(reading)
    for key in ("recipe", "recipe._target_"):
        name = str(reading.get(key, default=_RECIPES[0])).rpartition(".")[2]
        if name not in (*_RECIPES, *(RECIPE,) * has_images):
            block(reading, key, f"the recipe {name}")
    if _class_of_model(reading) != _CAUSAL and not has_images:
        block(reading, "model._target_", f"models of {_class_of_model(reading)}", of="model")
    for section, begins in _SECTIONS.items():
        keys = [key for key in by_key if key.startswith(f"{section}.")]
        if keys:
            block(reading, keys[0], f"a recipe with {section}")
            reading.known |= {key for key in by_key if key.startswith(begins)}
    if is_given(reading.get("distributed.offload_policy")):
        block(reading, "distributed.offload_policy", "an offload policy without a _target_")
    values["dp_replicate_size"] = values["dp_replicate_size"] or 1
    reading.known.add("distributed.offload_policy.pin_memory")
    if values.pop("strategy") not in (None, "fsdp2"):
        block(reading, "distributed.strategy", "strategies other than fsdp2")
    refuse_schedules(reading)


def _take_defaults_of_diffusion(reading: Reading) -> None:
    given = {one.field for one in reading.taken if one.place != "default"}
    for key, field, value in (
        ("fsdp.activation_checkpointing", "checkpointing", "full"),
        ("fsdp.enable_fsdp2_prefetch", "gathers_ahead", True),
    ):
        if field not in given:
            reading.take_back(field)
            reading.take(key, field, value)


def _drop_keys_of_other_ranks(reading: Reading) -> None:
    """Moves keys that only ranks read which a recipe does not have to those without effect."""
    values = reading.values
    shares_sequence = values.get("sequence_parallel") or False
    for field, (size, reason) in _OF_RANKS.items():
        values.pop(field, None)
        if values[size] in (None, 1):
            reading.take_back(field, reason)
    if values["tensor_model_parallel_size"] not in (None, 1):
        values["sequence_parallel"] = shares_sequence
        if is_given(reading.get("distributed.tp_plan")):
            reading.miss("distributed.tp_plan", "either", OWN_PLAN)


def _class_of_model(reading: Reading) -> str:
    return str(reading.get("model._target_", default="")).rpartition(".")[0].rpartition(".")[2] or _CAUSAL


def _take_ranks(reading: Reading) -> None:
    """Takes the number of ranks, which the launcher decides: from the data parallel size, else a node or more."""
    values, data = reading.values, reading.values.pop("data_ranks")
    reading.known |= {"benchmark.num_nodes", *_OF_CLASSES}
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    copy = values[names[0]] * values[names[1]] * values[names[2]]
    if values.get("world_size") is None and data is not None:
        values["world_size"] = data * copy
    if values.get("world_size") is None:
        nodes = reading.get("ci.nodes") or reading.get("benchmark.num_nodes") or 1
        of_node = reading.get("ci.nproc_per_node", default=_RANKS_OF_A_NODE)
        ranks = COUNT.read(nodes) * COUNT.read(of_node)
        rows = values["global_batch_size"] // values["micro_batch_size"]
        unit = math.lcm(copy, (values["expert_model_parallel_size"] or 1) * values[names[2]])
        ranks = max(ranks - ranks % unit, unit)
        while ranks > unit and rows % (ranks // copy):
            ranks -= unit
        values["world_size"] = ranks
        reading.assumed.append("the number of ranks")
        reading.warnings.append(
            f"the number of ranks is the launcher's and not in the file, so memlab takes {ranks}: give --world-size"
        )


def _take_types(reading: Reading) -> None:
    """Takes the types of shards, of what layers compute in, and of the gradients' reduction."""
    values = reading.values
    storage, compute, reduced = values.pop("shards"), values.pop("compute"), values.pop("reduced")
    given = {key for key in reading.entries.by_key if key.startswith(f"{_POLICY}.")}
    if storage == "auto":
        reading.warnings.append(
            "model.torch_dtype is auto, the type of the checkpoint, and memlab takes bf16: give --set "
            "model.torch_dtype=float32 for another"
        )
        storage = "bf16"
    if given and f"{_POLICY}.param_dtype" not in given:  # torch's `MixedPrecisionPolicy` changes no type by itself
        compute = storage
    if given and f"{_POLICY}.reduce_dtype" not in given:
        reduced = compute
    if compute == "fp32" and storage != "fp32":
        reading.miss(f"{_POLICY}.param_dtype", "less", "layers compute in fp32 on bf16 shards; memlab's are fp32 too")
    take_types(reading, shards=storage, compute=compute, reduced=reduced)


def _take_rows(reading: Reading) -> None:
    """Takes the tokens of a row: a packed row's, or those of the longest sequence."""
    values = reading.values
    packed, longest = values.pop("packed_tokens") or 0, values.pop("longest", None)
    multiple = max(1, values.pop("sequence_multiple") or 1)  # 0 is none (``pad_within_micro``)
    if packed <= 0:
        reading.not_modelled = [one for one in reading.not_modelled if one.key != _PACKING_STRATEGY]
        reading.known.add(_PACKING_STRATEGY)
    if packed > 0:
        reading.take("packed_sequence.packed_sequence_size", "seq_length", packed)
        reading.miss("packed_sequence.packed_sequence_size", "more", "attention copies and counts packed sequences")
    elif longest:
        values["seq_length"] = -(-longest // multiple) * multiple
    else:
        reading.assumed.append("the length of its sequences")
        reading.warnings.append(
            "the length of sequences is the data's and not in the file, so memlab takes the model's usual one: give "
            "--set dataset.seq_length=TOKENS"
        )
    is_of_one_length = "mock" in str(reading.get("dataset._target_"))
    pads = "step_scheduler.local_batch_size" if values["micro_batch_size"] > 1 else _MULTIPLE if multiple > 1 else None
    if pads and not packed and not is_of_one_length:
        reading.miss(pads, "more", "rows are padded, and attention then has a mask")


def _take_optimizer(reading: Reading) -> None:
    values = reading.values
    kind = str(values.pop("optimizer"))
    take_adam(reading)
    name = kind.rpartition(".")[2]
    _take_least(reading, kind)
    decay = reading.get("optimizer.weight_decay")
    if kind.startswith("torch.optim.") and name in ("Adam", "AdamW"):
        values |= {"master_weights": False, "store_param_remainders": False}
        if name == "Adam" and decay and values["adam_implementation"] != "fused":
            # ``_multi_tensor_adam`` and ``_single_tensor_adam`` of torch 2.13 add it to a copy of the gradients.
            reading.miss("optimizer.weight_decay", "more", "Adam adds it to a copy of the gradients")
        return
    types = {str(reading.get(f"optimizer.{moment}_dtype", default="float32")) for moment in ("exp_avg", "exp_avg_sq")}
    if name == "FusedAdam" and all(one.endswith("float32") for one in types) and not values["fsdp_cpu_offload"]:
        values["adam_implementation"] = "te_fused"
        return
    values |= {"master_weights": False, "store_param_remainders": False}
    # Of Adam with other types the state is bounded; Muon gathers whole matrices for its update.
    key = "optimizer._target_" if name in ("FusedAdam", "FlashAdamW") else "optimizer"
    reading.known.add("optimizer._target_")
    reading.miss(key, "either", f"memlab predicts torch's Adam and AdamW under FSDP2, not {name}")


def complete_refused(reading: Reading) -> None:
    """Names what decides how Automodel's class of a model computes, of a recipe whose class memlab does not have."""
    noted = {one.key for one in reading.not_modelled} | {one.key for one in reading.taken}
    for key, entry in reading.entries.by_key.items():
        is_of_class = key.startswith(_OF_OWN_CLASSES) and not key.endswith(_NOT_OF_CLASSES)
        is_on = entry.value if key in _SWITCHES_OF_CLASSES else is_of_class and entry.value not in (None, {})
        if is_on and key not in noted:
            reading.miss(key, "either", "it decides what the class of this model computes and keeps")


def complete_of_model(reading: Reading, architecture: Architecture) -> None:
    """Notes in what the class that Automodel builds of this model differs from that of transformers."""
    is_of_transformers = reading.values.pop("is_of_transformers")
    take_chunks(reading, architecture)
    if is_of_transformers or not _has_own_class(architecture):
        check_family(reading, architecture)
        if reading.get(_ATTENTION) == "eager" and not FAMILIES[architecture.family].dropout.get("attention_dropout"):
            reading.take(_ATTENTION, "attn_implementation", "eager")
            reading.not_modelled = [one for one in reading.not_modelled if one.key != _ATTENTION]
        if reading.get("model.use_liger_kernel", default=True):
            reading.miss("model.use_liger_kernel", "less", "where it is installed, Liger's norms and MLPs keep less")
        return
    _take_own_classes(reading, architecture)


def _take_own_classes(reading: Reading, architecture: Architecture) -> None:
    """Takes Automodel's own class of a model, and notes what of it memlab does not have."""
    if architecture.routes:
        reading.values["model_classes"] = "automodel_0.7.0" if reading.version == _RELEASE else "automodel"
        take_experts(reading, architecture)
        return
    has_own_norms = not FAMILIES[architecture.family].norms_of_transformers
    norm = reading.get("model.backend.rms_norm", default=_NORM)
    rotates_in_place = reading.get("model.backend.rope", default="torch") != "torch"
    if has_own_norms and reading.values.get("sequence_parallel"):
        reading.miss(
            "model.backend.rope",
            "either" if rotates_in_place else "more",
            "Automodel keeps cosines and sines of all positions, and its release rotates in fp32",
        )
        reading.miss("model.backend.rms_norm", "less", "Automodel's norms keep no copies of their inputs in fp32")
        if reading.values.get("recompute_granularity") == "full":
            reading.miss(
                _CHECKPOINTING, "either", "Automodel checkpoints the parts of a layer of its own classes, each"
            )
        return
    if rotates_in_place:
        reading.miss("model.backend.rope", "less", "QuACK rotates queries and keys in place")
    reading.values["model_classes"] = "automodel_0.7.0" if reading.version == _RELEASE else "automodel"
    if has_own_norms and norm != _NORM:
        reading.miss(
            "model.backend.rms_norm", "either", f"memlab has Automodel's norms of the kind {_NORM}, not {norm}"
        )


def _has_own_class(architecture: Architecture) -> bool:
    return FAMILIES[architecture.family].automodel


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    state = scenario.state
    shares_sequence = scenario.layout.sequence_parallel if scenario.layout.tensor_model_parallel_size > 1 else None
    values = composed_of_fsdp2(scenario, settings, "automodel") | named(scenario)
    has_adapters = values.pop("has_adapters")
    return (
        {name: value for name, value in values.items() if has_adapters or not name.startswith("lora_")}
        | ({"class_of_adapters": _CLASS_OF_ADAPTERS} if has_adapters else {"has_no_adapters": False})
        | {
            "gathers_ahead": bool(state.fsdp2_forward_prefetch_depth or state.fsdp2_backward_prefetch_depth),
            "data_ranks": scenario.layout.data_parallel_size,
            "checkpointing": "selective" if settings.selective_ac else settings.recompute_granularity,
            "reshard_after_forward": state.reshard_after_forward,
            "longest": scenario.seq_length,
            "is_of_transformers": state.model_classes == "transformers" and _has_own_class(scenario.architecture),
            "sequence_parallel": shares_sequence,
            "optimizer": _FUSED_ADAM if state.adam_implementation == "te_fused" else "torch.optim.AdamW",
        }
        | composed_of_pipeline(scenario)
    )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what a recipe cannot express of a job."""
    state, checkpoints = scenario.state, own_checkpoints(settings, "Automodel")
    del checkpoints["selective_ac"]
    ahead = "Automodel gathers ahead only layers that are sharded again"
    own: Own = {
        name: (getattr(state, name) if state.reshard_after_forward != "none" else 0, ahead)
        for name in ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")
    }
    own["offload_gradients"] = (False, _STAYS)
    if scenario.layout.pipeline_model_parallel_size > 1:
        own[FIELD] = (layout_of_parts(scenario), "Automodel gives each part as many layers, the first ones one more")
    if state.model_classes != "transformers":
        own["model_classes"] = ("automodel", "Automodel's version decides it, not a key")
    return of_other_values(scenario, settings, own | checkpoints | own_automodel(scenario, "Automodel"))


_SHARDS = "Automodel shards with torch's fully_shard"


def _translated(value: Any) -> Any:
    """Returns the number that a text is, as ``translate_value`` in components/config/loader.py (36044ad3)."""
    if not isinstance(value, str) or re.fullmatch(r"[-+.\deE]+", value, re.ASCII) is None:
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):  # such as 08
        return value


AUTOMODEL = Framework(
    name="automodel",
    title="NeMo Automodel",
    source="36044ad3, and 0.7.0",
    signs=Signs(
        looked_for="step_scheduler or dist_env with model",
        of_tree=lambda begins: begins("model.") and (begins("step_scheduler.") or begins("dist_env.")),
    ),
    style="overrides",
    flags_are_overrides=True,  # ``parse_cli_argv``, 0.7.0
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("automodel"),
    value_of=_translated,
    complete=complete,
    complete_of_model=complete_of_model,
    complete_refused=complete_refused,
    compose=compose,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
    versions=(_RELEASE, "36044ad3"),
    cannot_write={
        "reshard_after_forward_ranks": "Automodel's reshard_after_forward is true, false or null",
        "cp_comm_type": "torch's context_parallel, which Automodel calls, exchanges keys and values",
        "fsdp_version": _SHARDS,
        "use_orig_params": _SHARDS,
        "attn_implementation": "memlab's writer of Automodel's recipes has no key for it",
        "reshard_root_after_forward": "Automodel keeps them until backward",
        "return_outputs": "Automodel has torch's schedules keep the logits",
    }
    | dict.fromkeys((*EXCHANGE, *OF_OWN_EXPERTS), "memlab's writer of Automodel's recipes has no key for it")
    | dict.fromkeys(OF_TOWERS, "memlab's writer of Automodel's recipes has no recipe for images")
    | dict.fromkeys(("separate_embeddings", "loss_of_transformers"), "Automodel's version decides it, not a key")
    | dict.fromkeys(("offload_parameters", "offload_gradients", "offload_optimizer"), _STAYS)
    | {"offload_optimizer_except_update": _STAYS, "allocator": "set the environment variable PYTORCH_CUDA_ALLOC_CONF"},
    cannot_write_of=cannot_write,
    without_own_key=OF_SEVERAL_KEYS.union(
        ("model_classes", "grad_reduce_in_bf16", "adam_implementation"),
        ("schedule_runs", FIELD, "virtual_pipeline_model_parallel_size"),
    ),
    render=yaml_lines,
    written_with={"reduced": "compute", "compute": "reduced"},
)
