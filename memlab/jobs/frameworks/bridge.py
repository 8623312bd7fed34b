"""Megatron-Bridge: the ``run_config.yaml`` that it writes into each checkpoint, or another dump of its ConfigContainer.

Names: ``src/megatron/bridge/training/config.py`` and Megatron-Core's own configs (0.6.2).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from memlab.config.architectures import Architecture, published_architecture
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import shortened
from memlab.jobs.frameworks.adapters import (
    LORA,
    OF_BRIDGE,
    adapter_keys,
    complete_adapters,
    kind_of,
    lacks_of_kind,
    lacks_of_section,
)
from memlab.jobs.frameworks.batch_schedule import take_batch
from memlab.jobs.frameworks.bridge_keys import (
    PROVIDER_DEFAULTS,
    PROVIDER_MISSING,
    complete_trained_provider,
)
from memlab.jobs.frameworks.framework import Framework, NotModelled, Reading, Signs
from memlab.jobs.frameworks.keys import (
    ABSENT,
    ALLOCATOR,
    COUNT,
    POSITIONS,
    SWITCH,
    TEXT,
    WHOLE,
    Conversion,
    Key,
    Missing,
    frozen_parts,
    is_false,
    is_given,
    missing_under,
    under,
)
from memlab.jobs.frameworks.kinds_of_layers import take_kinds_of_layers
from memlab.jobs.frameworks.lines import yaml_lines
from memlab.jobs.frameworks.megatron_keys import (
    ARCHITECTURE,
    BUCKETS,
    CHUNKS,
    COMPUTE,
    LAYERS,
    MISSING,
    MISSING_DDP,
    MISSING_OPTIMIZER,
    OPTIMIZER,
    SIZES,
    TRANSFORMER,
    USER_BUFFERS,
    fields_of,
)
from memlab.jobs.frameworks.megatron_lm import OF_OTHER_FRAMEWORKS, common, take_sequence_parallel, warn_of_offload
from memlab.jobs.frameworks.refused_options import check_bridge
from memlab.jobs.frameworks.reinforcement import copies, pack
from memlab.jobs.frameworks.user_buffers import METHODS_NOT_WRITTEN, NOT_WRITTEN, OPTION
from memlab.jobs.frameworks.without_effect import keys_without_effect

_BUCKETS = tuple(replace(key, default=ABSENT) if key.field == "grad_reduce_in_bf16" else key for key in BUCKETS)
_FUNCTIONS = {
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
}
_GATES = ("silu", "swiglu", "swish", "quick_gelu")
"""Names of functions, of which MLPs with a gate have the first by any of its names, and experts the last too."""


def _function(name: str | None) -> dict[str, Any] | None:
    # The config holds the function, and its result only without `_call_`.
    return None if name is None else {"_target_": _FUNCTIONS[name], "_call_": False}


_OF_LAYERS = (
    Key("model.activation_func", "activation", Conversion(lambda value: str(value).rpartition(".")[2], _function)),
    Key("model.gated_linear_unit", "gated_linear_unit", SWITCH),
    Key("model.position_embedding_type", "position_embedding_type", POSITIONS),
    Key("model.normalization", "normalization", TEXT),
    Key("model.add_bias_linear", "add_bias_linear", SWITCH),
    Key("model.hybrid_layer_pattern", "hybrid_override_pattern", TEXT),
)
"""What `_take_layers` reads."""
_READ = {key.name for key in _OF_LAYERS}
_FP8 = tuple(key for key in COMPUTE if key.name.startswith("fp8"))

KEYS = (
    Key("model.hf_model_id", "architecture", TEXT),
    Key("recipe", "recipe", TEXT, None),
    Key("world_size", "world_size", WHOLE),
    Key("nnodes", "nodes", COUNT, 1),
    Key("nproc_per_node", "ranks_per_node", COUNT, None),
    *under("model", (*SIZES, CHUNKS, *TRANSFORMER), cross_entropy_loss_fusion=True, **PROVIDER_DEFAULTS),
    *under("model", (*ARCHITECTURE, *LAYERS)),
    *under("model", USER_BUFFERS),
    Key("comm_overlap.tp_comm_overlap", OPTION, SWITCH),
    *_OF_LAYERS,
    Key("model.make_vocab_size_divisible_by", "make_vocab_size_divisible_by", COUNT, 128),
    Key("model.should_pad_vocab", "should_pad_vocab", SWITCH, False),
    Key("model.seq_length", "seq_length", COUNT),
    # The rows that are trained on; the model's own length may be what it was published with.
    Key("dataset.seq_length", "seq_length", COUNT),
    Key("dataset.sequence_length", "seq_length", COUNT),
    Key("model.bf16", "is_bf16", SWITCH, True),
    Key("train.micro_batch_size", "micro_batch_size", COUNT, 1),
    Key("train.global_batch_size", "global_batch_size", COUNT, None),
    Key("train.manual_gc", "manual_gc", SWITCH, False),
    *under("optimizer", OPTIMIZER),
    Key("optimizer.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    Key("optimizer.overlap_param_gather", "overlap_param_gather", SWITCH),
    *under("ddp", _BUCKETS),
    Key("ddp.use_distributed_optimizer", "use_distributed_optimizer", SWITCH, True),
    # What mixed_precision sets replaces what the other sections set (update_config_with_precision_overrides).
    *under("mixed_precision", (replace(key, default=ABSENT) for key in (*_FP8, *_BUCKETS[:1]))),
    Key("mixed_precision.fp8_param_gather", "fp8_param_gather", SWITCH),
    Key("optimizer.reuse_grad_buf_for_mxfp8_param_ag", "reuse_grad_buf_for_mxfp8_param_ag", SWITCH),
    Key("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag", "reuse_grad_buf_for_mxfp8_param_ag", SWITCH),
    Key("mixed_precision.bf16", "is_bf16", SWITCH),
    Key("mixed_precision", "mixed_precision", TEXT),
    Key("peft._target_", "class_of_adapters", TEXT),
    *adapter_keys(
        "peft",
        "dim",
        rank=ABSENT,
        alpha=ABSENT,
        dropout=ABSENT,
        dropout_position=ABSENT,
        target_modules=ABSENT,
        exclude_modules=ABSENT,
        share_expert_adapters=ABSENT,
        normalize_moe_lora=ABSENT,
    ),
    *under("env_vars", ALLOCATOR),
    *under("ENV_VARS", ALLOCATOR),
)
_PRECISIONS = (
    "fp16", "fp4", "first_last_layers_bf16", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention",
    "fp8_amax_history_len", "fp4_param_gather",
)  # fmt: skip
_OVERLAPS = (
    "overlap_p2p_comm", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
    "defer_embedding_wgrad_compute",
)  # fmt: skip
_OTHER_MODELS = (
    Missing(
        "model.teacher",
        "more",
        "a teacher on the same ranks, which the job's program builds: --loss logits_kl "
        "--reference-model copy --teacher-model NAME predict it",
        is_given,
    ),
)
"""Sections whose presence says that another model, or a part of the model, is trained or present."""
_DATASET = (
    *(
        Missing(name, "either", "the sequences of a micro-batch are packed into one row, without their padding")
        for name in ("enable_in_batch_packing", "defer_in_batch_packing_to_step", "pack_sequences_in_batch")
    ),
    Missing("packing_buffer_size", "either", "the reader of the data packs sequences into rows", is_given),
    Missing("hybrid_context_parallel", "either", "the context parallel size changes from row to row"),
    Missing("inter_document_masking", "either", "documents of a row are computed as packed sequences"),
    *(
        Missing(f"{name}_mock_dataset_config_json", "either", "rows have different lengths", is_given)
        for name in ("sft", "varlen")
    ),
    Missing("varlen_sbhd_validation", "either", "rows have different lengths"),
    *(
        Missing(name, "more", "batches have the attention masks of whole sequences", is_false)
        for name in ("skip_getting_attention_mask_from_dataset", "dataset_kwargs.get_attention_mask_from_fusion")
    ),
)
"""What datasets decide (megatron/bridge/data/builders and GPTDatasetConfig of Megatron-Core, main of August 2026)."""
_OF_TEXT = ("gpt_step", "llm_step", "dsv4_step")
"""Names of steps that train on text (``scripts/training/recipe_runner.py``, main of August 2026)."""
_OF_THE_COMMAND = (
    Missing("step_func", "more", "it is a step of models of images, video or sound, which memlab does not have",
            lambda value: value not in (None, *_OF_TEXT), blocks=True, of="towers"),
    Missing("deterministic", "either", "deterministic kernels have other temporaries, and the loss is not fused"),
    Missing("packed_sequence", "either", "rows are packed sequences of a length that the recipe decides"),
)  # fmt: skip
"""Options of ``run_recipe.py``."""
_DISTILLATION = (
    Missing("model.kd_config.intermediate_layer_pairs", "more", "both models keep these layers' outputs", is_given),
    Missing("model.kd_config.skip_lm_loss", "more", "the language model's loss is computed beside the distillation's",
            is_false),
)  # fmt: skip
"""Fields of ModelOpt's DistillationConfig (modelopt/torch/distill/plugins/megatron.py, 0.47.0)."""
FRAMEWORK_MISSING = (
    *(Missing(f"{section}.skip_train", "less", "the job evaluates and does not train", blocks=True, of="job")
      for section in ("train", "validation")),
    *_OTHER_MODELS,
    Missing("model.class", "either", "models of this class of Megatron-Bridge", is_given, blocks=True),
    *frozen_parts("model."),
    *missing_under("dataset", _DATASET),
    *_DISTILLATION,
    *_OF_THE_COMMAND,
    *missing_under(
        "model",
        (row for row in (*MISSING, *PROVIDER_MISSING) if f"model.{row.name}" not in {*_READ, f"model.{OPTION}"}),
    ),
    *missing_under("ddp", MISSING_DDP),
    *missing_under("optimizer", MISSING_OPTIMIZER),
    *missing_under("mixed_precision", (row for row in (*MISSING, *MISSING_DDP) if row.name in _PRECISIONS)),
    Missing("mixed_precision.autocast_enabled", "more", "weights and activations are cast in each layer"),
    *missing_under("comm_overlap", (row for row in (*MISSING, *MISSING_OPTIMIZER) if row.name in _OVERLAPS)),
    Missing("dist.use_megatron_fsdp", "less", "Megatron-FSDP shards parameters and gradients too"),
    Missing("dist.use_torch_fsdp2", "less", "torch's FSDP shards parameters and gradients too"),
    Missing("train.empty_unused_memory_level", "less",
            "each step frees torch's cached memory, so fewer bytes stay reserved"),
    Missing("dist.disable_jit_fuser", "more", "fused kernels run one by one, each with temporaries"),
    Missing("tensor_inspect.enabled", "more", "Transformer Engine computes statistics of tensors"),
    Missing("logger.log_max_attention_logit", "more", "the largest attention logit of each head is kept"),
    Missing("logger.log_params_norm", "more", "parameters are copied to fp32 for their norm"),
    Missing("logger.moe_routing_trace_path", "more", "routing is recorded", is_given),
    *(
        Missing(f"checkpoint.save_{what}_interval", "more", "tensors of a step are kept until they are saved", is_given)
        for what in ("activations", "wgrads", "dgrads")
    ),
    *(
        Missing(f"{section}.NVTE_{kernel}_ATTN", "either",
                "it chooses the attention's kernel; memlab chooses it by attention_backend",
                lambda value: value not in (None, 1, "1"))
        for section in ("env_vars", "ENV_VARS")
        for kernel in ("FLASH", "FUSED", "UNFUSED")
    ),
)  # fmt: skip


_BLACKWELL = re.compile(r"_(g?b[123]00|vr?200|r100)_")
"""GPUs, by the names of recipes, whose matrix products take FP8 in any layout (``is_non_tn_fp8_gemm_supported`` in
``transformer_engine/pytorch/utils.py``, 2.16.1: compute capability 10 and 11, and from 13.0 on)."""
_PACKED = ("dataset.packed_sequence_specs.packed_sequence_size", "dataset.offline_packing_specs.packed_sequence_size")
"""The tokens of a row of packed sequences, in 0.6.2 and in main of August 2026."""


def complete(reading: Reading) -> None:
    """Derives gradients, the padded vocabulary and the type of parameters."""
    values = reading.values
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    own = reading.entries.by_key.get("world_size")  # of a recipe, the number that it is named by
    if per_node is not None and (own is None or own.line is not None):
        values["world_size"] = nodes * per_node
        reading.take_back("world_size")
    recipe = values.pop("recipe")
    known = reading.entries.recipe
    if known:
        reading.warnings.append(f"recipe {recipe}: memlab has its values of {known}")
    elif recipe is not None:
        reading.unread = f"the recipe {shortened(recipe)}"
        reading.warnings.append(
            f"memlab does not know the recipe {shortened(recipe)}, so it takes Megatron-Bridge's defaults for what the "
            "command does not give: give the run_config.yaml of a checkpoint, or the recipe's values with --set"
        )
    elif values.get("hidden_size") is None:  # Megatron-Bridge writes all sizes of the model into a whole configuration
        reading.unread = "the recipe below the file"
        reading.warnings.append(
            "model.hidden_size is not in the file, so the file overrides a recipe that memlab cannot read: memlab "
            "takes Megatron's defaults for all keys that the file does not have: give the run_config.yaml of a "
            "checkpoint"
        )
    values["dtype"] = "bf16" if values.pop("is_bf16") else "fp32"
    _complete_gradients(reading)
    if values.get("fp8_format") and _BLACKWELL.search(recipe or ""):
        if values.get("fp8_recipe", TrainingState().fp8_recipe) in ("delayed", "tensorwise"):
            reading.take("recipe", "non_tn_fp8_gemm", True)
        elif values["fp8_recipe"] == "blockwise":
            reason = "memlab knows the recipe blockwise on Hopper only, not on the GPU that the job names"
            reading.miss("mixed_precision.fp8_recipe", "either", reason)
    _note_replaced_by_recipe(reading)
    _take_layers(reading)
    _complete_rows(reading)
    take_batch(reading, "train.", has_schedule=False)
    _note_missing_sizes(reading)
    rows = reading.get("dataset.micro_batch_size")
    if rows is not None and rows != values["micro_batch_size"]:
        reading.miss("dataset.micro_batch_size", "either", "the data come in micro-batches of this size")
    _complete_vocabulary(reading)
    take_sequence_parallel(reading, "model.sequence_parallel")
    _complete_experts(reading)
    _note_other_models(reading)
    _complete_adapters(reading, knows_recipe=recipe is None or bool(known))
    warn_of_offload(reading, "Megatron-Bridge")


def _take_layers(reading: Reading) -> None:
    """Takes what the layers of a model consist of whose sizes the job gives.

    Where a recipe leaves them out, hybrid models have MLPs without a gate and no positions
    (``models/hybrid/hybrid_provider.py``, 067f987d).
    """
    values = reading.values
    if values.get("hybrid_override_pattern"):
        take_kinds_of_layers(reading, "model.")
    is_hybrid = bool(values.get("hybrid_override_pattern"))
    is_gated = values.setdefault("gated_linear_unit", not is_hybrid)
    activation = values.pop("activation", None)
    if activation == "squared_relu" and not is_gated:
        values["squared_relu"] = True
    elif activation == "quick_gelu" and is_gated:
        values["quick_geglu"] = True
    elif activation not in (None, *(_GATES if is_gated else ("gelu",))):
        reason = "memlab's MLPs have SwiGLU, or without a gate GELU or squared ReLU"
        reading.miss("model.activation_func", "either", reason)
    positions = values.setdefault("position_embedding_type", "none" if is_hybrid else "rope")
    if positions == "yarn":
        values["position_embedding_type"] = "rope"
    elif positions == "learned_absolute":  # as many as tokens (``provide`` in models/gpt_provider.py)
        values["max_position_embeddings"] = reading.get("model.seq_length")
    elif positions not in ("rope", "none"):
        reading.blocked["model"].append(f"positions {positions}: memlab has rope, learned_absolute and none")
    norm = values.setdefault("normalization", "RMSNorm")
    if norm not in ("RMSNorm", "LayerNorm"):
        reading.blocked["model"].append(f"normalization {norm}: memlab has RMSNorm and LayerNorm")
    if values.get("num_moe_experts") and not is_gated and activation != "squared_relu":
        reading.blocked["model"].append("gated_linear_unit false: memlab's experts have a gate, or squared ReLU")


def _complete_experts(reading: Reading) -> None:
    """Takes one tensor parallel rank for each expert, where experts are spread over ranks.

    See ``_set_moe_expert_tensor_parallel_default`` in models/transformer_config.py of 0.6.2; 0.5.0 leaves it to
    Megatron-Core, which takes the model's tensor parallel ranks.
    """
    name = "expert_tensor_parallel_size"
    if reading.values.get(name) is None and (reading.values.get("expert_model_parallel_size") or 1) > 1:
        reading.take(f"model.{name}", name, 1)


def _complete_rows(reading: Reading) -> None:
    """Takes the rows of packed sequences, which are as long as the longest sequence (`_PACKED`)."""
    for packed in _PACKED:
        tokens = reading.get(packed)
        if isinstance(tokens, int) and tokens > 0:
            reading.take(packed, "seq_length", tokens)
            if reading.get("dataset.enable_offline_packing", default=True):
                pack(reading, packed, 1)


def _note_missing_sizes(reading: Reading) -> None:
    """Says which sizes of a step the job does not give: ``TrainingConfig`` has none by itself (0.6.2 and 067f987d)."""
    for key, what in (("train.micro_batch_size", "a micro-batch"), ("train.global_batch_size", "a step")):
        is_unknown = key in reading.entries.by_key and reading.entries.by_key[key].is_unknown
        if reading.entries.get(key) is None and not is_unknown and not reading.unread:
            reading.assumed.append(f"the size of {what}")
            taken = "one sequence" if what == "a micro-batch" else "one micro-batch"
            reading.warnings.append(
                f"{key} is not given, and Megatron-Bridge refuses the job without it: memlab takes {taken}; give "
                f"--set {key}=NUMBER"
            )


def _complete_vocabulary(reading: Reading) -> None:
    """Takes the number of tokens, padded as ``_validate_and_set_vocab_size`` in training/setup.py has it (0.6.2).

    A model that Megatron-Bridge makes of a ``config.json`` keeps its own vocabulary, without padding, unless the
    tokenizer's replaces it; a whole configuration has what the job's start made of it.
    """
    values = reading.values
    published = published_architecture(str(values.get("architecture")))
    divisor, is_padded = values.pop("make_vocab_size_divisible_by"), values.pop("should_pad_vocab")
    if values.get("hidden_size") is None:
        is_padded = bool(reading.get("tokenizer.use_tokenizer_vocab_size"))
        if is_padded:
            _take_tokenizer(reading, published)
            # `make_vocab_size_divisible_by` in models/conversion/model_bridge.py.
            own = math.gcd(128, published.vocab_size) if published is not None else divisor
            divisor = reading.get("model.make_vocab_size_divisible_by", own) or own
    elif values.get("vocab_size") is None:  # the tokenizer's number, padded
        is_padded = True
        tokenizer = published_architecture(str(reading.get("tokenizer.tokenizer_model", "")))
        if tokenizer is not None:
            tokens = _TOKENS.get((tokenizer.family, tokenizer.vocab_size), tokenizer.vocab_size)
            reading.take("tokenizer.tokenizer_model", "vocab_size", tokens)
        else:
            _take_null_tokenizer(reading)
    if is_padded and values.get("vocab_size"):
        divisor *= values.get("tensor_model_parallel_size") or 1
        values["vocab_size"] = -(-values["vocab_size"] // divisor) * divisor


_TOKENS = {
    ("llama", 128_256): 128_256,
    ("qwen3", 151_936): 151_669,
    ("qwen3_moe", 151_936): 151_669,
}
"""How many tokens the tokenizers of families with such a vocabulary have: the last one of Qwen3's, ``</think>``, is
151668 (https://huggingface.co/Qwen/Qwen3-8B, Quickstart); Llama 3's fill its vocabulary."""


def _take_null_tokenizer(reading: Reading) -> bool:
    """Takes the number of tokens that a tokenizer without words is given; returns whether it is one."""
    tokens = reading.get("tokenizer.vocab_size")
    if reading.get("tokenizer.tokenizer_type") != "NullTokenizer" or not isinstance(tokens, int):
        return False
    reading.take("tokenizer.vocab_size", "vocab_size", tokens)
    return True


def _take_tokenizer(reading: Reading, published: Architecture | None) -> None:
    """Takes the vocabulary of the tokenizer in place of the model's own."""
    model = reading.get("tokenizer.tokenizer_model")
    if _take_null_tokenizer(reading):
        return
    known = published_architecture(str(model)) or published
    if known is not None:
        tokens = _TOKENS.get((known.family, known.vocab_size))
        reading.take("tokenizer.use_tokenizer_vocab_size", "vocab_size", tokens or known.vocab_size)
        if tokens is not None:
            return
    reading.assumed.append("how many tokens the tokenizer has")
    reading.warnings.append(
        "tokenizer.use_tokenizer_vocab_size is on, so Megatron-Bridge takes the tokenizer's own number of tokens, and "
        "memlab the published model's, which may be larger: give --set tokenizer.use_tokenizer_vocab_size=false "
        "and --set model.vocab_size=TOKENS"
    )


def _complete_adapters(reading: Reading, *, knows_recipe: bool) -> None:
    """Takes the adapters of the section ``peft``, with the defaults of Megatron-Bridge's ``LoRA``.

    Args:
        knows_recipe: Whether memlab knows what the recipe says of them: most recipes have other values than the class.
    """
    kind, values = reading.get("peft"), reading.values
    target = values.pop("class_of_adapters", None)
    section = [key for key in reading.entries.by_key if key == "peft" or key.startswith("peft.")]
    if not any(reading.get(key) not in (None, False) for key in section):
        values["lora_rank"] = None
        return
    if values.get("lora_rank") is None:
        values["lora_rank"] = 32
        if not knows_recipe:
            reading.miss("peft", "less", f"{LORA} (their rank is the recipe's)")
            values["lora_rank"] = None
    kinds = [str(each).rpartition(".")[2] for each in (target, kind) if is_given(each) and each is not True]
    has_targets = values.get("lora_target_modules") is not None
    lacks = lacks_of_kind(reading, kinds[0] if kinds else None, has_targets=has_targets)
    complete_adapters(reading, "peft", [*lacks, *lacks_of_section(reading, "peft")])


def _note_other_models(reading: Reading) -> None:
    """Notes a teacher, whichever of its keys the file has."""
    for row in _OTHER_MODELS:
        keys = [key for key in reading.entries.by_key if key.startswith(f"{row.name}.")]
        given = [key for key in keys if is_given(reading.get(key))]
        if given and row.name not in {one.key for one in reading.not_modelled}:
            entry = reading.entries.by_key[given[0]]
            reading.not_modelled.append(NotModelled(row.name, entry.value, row.effect, row.reason, entry.place))


def _note_replaced_by_recipe(reading: Reading) -> None:
    """Says which values of a command another value replaces, which a recipe that memlab does not know may set.

    See ``mixed_precision.setup`` in src/megatron/bridge/training/config.py, and ``sync_model_dataset_sequence_length``
    in scripts/training/recipe_runner.py (main of August 2026).
    """
    entries, given = reading.entries, reading.entries.by_key.keys()
    if not reading.unread:
        return
    key, own = "ddp.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32"
    if entries.get(key) is False and given.isdisjoint(("mixed_precision", own)):
        reading.take(key, "grad_reduce_in_bf16", value=False)
        reading.warnings.append(
            f"{key}: the recipe's mixed_precision replaces it when the job starts, so memlab takes true, as bf16_mixed "
            f"does: give --set {own}=false if the recipe has no mixed_precision, or one with this value"
        )
    if "model.seq_length" in given and given.isdisjoint(("dataset.seq_length", "dataset.sequence_length")):
        reading.warnings.append(
            "model.seq_length: run_recipe.py replaces it by the length of the recipe's dataset, which memlab does not "
            "know: give --set dataset.seq_length=TOKENS"
        )


def _complete_gradients(reading: Reading) -> None:
    values = reading.values
    if values.get("mixed_precision") is not None:
        _take_mixed_precision(reading, values["mixed_precision"])
    elif reading.entries.get("mixed_precision.fp8") and "mixed_precision.fp8_recipe" not in reading.entries.by_key:
        reading.take("mixed_precision.fp8", "fp8_recipe", "tensorwise")  # the default there, unlike the model's
    _drop_replaced_fp8(reading)
    _drop_replaced_reuse(reading)
    if "grad_reduce_in_bf16" not in values:
        reading.warnings.append(
            "ddp.grad_reduce_in_fp32 is not in the file: memlab takes true, as the recipe bf16_mixed does"
        )
        values["grad_reduce_in_bf16"] = False
    _complete_overlap(reading)
    is_muon = "muon" in str(reading.entries.get("optimizer.optimizer"))
    _switch_on_in_both(reading, "use_distributed_optimizer", default=not is_muon)
    _switch_on_in_both(reading, "overlap_param_gather", default=False)


def _switch_on_in_both(reading: Reading, option: str, *, default: bool) -> None:
    """Takes an option as on where one of the sections ``ddp`` and ``optimizer`` has it on.

    See ``_validate_and_sync_distributed_optimizer_settings`` in training/config.py (0.6.2). The
    optimizer of a recipe has the distributed optimizer on, unless it is Muon (recipes/utils/optimizer_utils.py), and a
    file that changes ``ddp`` keeps that. It comes after ``comm_overlap``, which asks ``ddp`` alone
    (``runtime_config_update``).
    """
    sections = {f"{section}.{option}": reading.get(f"{section}.{option}", default) for section in ("ddp", "optimizer")}
    off = [key for key, value in sections.items() if value is False and key in reading.entries.by_key]
    if not reading.values.get(option) and True in sections.values():
        reading.values[option] = True
    if reading.values.get(option) and off:
        reading.taken = [one for one in reading.taken if one.key not in off]
        reading.without_effect |= dict.fromkeys(
            off, f"the other of {' and '.join(sections)} is on, which is on for both"
        )


_REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
_OF_PRECISION: dict[str, tuple[tuple[str, ...], Any]] = {
    "fp8_format": (("fp8",), None),
    "fp8_recipe": (("fp8_recipe",), "tensorwise"),
    "fp8_param_gather": (("fp8_param", "fp8_param_gather"), False),
}
"""Names and defaults of ``MixedPrecisionConfig`` (training/mixed_precision.py, 0.6.2)."""


def _drop_replaced_fp8(reading: Reading) -> None:
    """Drops what the model's section sets of FP8 beside ``mixed_precision``, a name or a section.

    ``update_config_with_precision_overrides`` in training/mixed_precision.py (0.6.2 and 067f987d) replaces each of its
    fields in the model, the optimizer and ``ddp`` when the job starts, also by a default.
    """
    given = [key for key in reading.entries.by_key if key.partition(".")[0] == "mixed_precision"]
    taken = {one.field: one.memlab_value for one in reading.taken if one.key in given}
    if not given or (given == ["mixed_precision"] and not taken):  # a name that memlab does not know
        return
    for field, (names, default) in _OF_PRECISION.items():
        value = taken.get(field, default)
        reading.values[field] = value
        said = [one for one in reading.taken if one.field == field and one.key not in given and one.place != "default"]
        for one in (one for one in said if one.memlab_value != value):
            reading.taken.remove(one)
            reading.without_effect[one.key] = "Megatron-Bridge replaces it by that of mixed_precision"
            advice = (
                "choose another mixed_precision" if given == ["mixed_precision"] else f"give mixed_precision.{names[0]}"
            )
            reading.warnings.append(
                f"{one.key} {one.value} ({one.place}): mixed_precision replaces it by {value} when the job starts: "
                f"{advice} for the job that was meant"
            )


def _drop_replaced_reuse(reading: Reading) -> None:
    """Drops what other sections set of it, where mixed_precision has its own value, False unless it is given.

    See ``update_config_with_precision_overrides`` in training/mixed_precision.py (0.6.2).
    """
    values, name = reading.values, reading.values.get("mixed_precision")
    precision = [key for key in reading.entries.by_key if key.partition(".")[0] == "mixed_precision"]
    is_mxfp8 = values.get("fp8_format") and values.get("fp8_recipe") == "mxfp8"
    if is_mxfp8 or not precision or (name is not None and name.replace("-", "_") not in _RECIPES):
        return
    values[_REUSE] = bool(reading.get(f"mixed_precision.{_REUSE}"))
    replaced = {one.key for one in reading.taken if one.field == _REUSE and one.key not in precision}
    reading.taken = [one for one in reading.taken if one.key not in replaced]
    reading.without_effect |= dict.fromkeys(replaced, "Megatron-Bridge replaces it by that of mixed_precision")


_WITH_STEP = next(key for key in OPTIMIZER if key.field == "overlap_param_gather_with_optimizer_step")


def _complete_overlap(reading: Reading) -> None:
    """Takes what ``comm_overlap`` sets when the job starts: ``setup`` in training/comm_overlap.py (0.6.2).

    A whole configuration has in ``ddp`` what the job's start made of it; below a recipe, ``comm_overlap`` replaces that
    by its own values, or by those for the number of copies of the model.
    """
    of_section = [one for key, one in reading.entries.by_key.items() if key.startswith("comm_overlap.")]
    read = (OPTION, _WITH_STEP.name, *(key.name for key in BUCKETS[1:]))
    given = {one.key: reading.get(one.key) for one in of_section if one.key.partition(".")[2] in read}
    is_whole = reading.values.get("hidden_size") is not None
    is_set = any(is_given(one.value) or one.value is False for one in of_section if not one.is_unknown)
    has_copies = copies(reading) > 1
    own: dict[str, Any] = {"overlap_grad_reduce": has_copies, "overlap_param_gather": has_copies}
    own |= {"bucket_size": 128 * 2**20 if has_copies else None, _WITH_STEP.name: False}
    for section, key in (*(("ddp", key) for key in BUCKETS[1:]), ("optimizer", _WITH_STEP)):
        value = given.get(f"comm_overlap.{key.name}")
        if is_whole and (not isinstance(value, int) or f"{section}.{key.name}" in reading.entries.by_key):
            continue
        if is_whole or (is_set and key.name in own and reading.values.get("use_distributed_optimizer")):
            reading.take(f"comm_overlap.{key.name}", key.field, own[key.name] if value is None else value)
    if isinstance(given.get(f"comm_overlap.{OPTION}"), bool):  # whatever the model's section says
        reading.values[OPTION] = given[f"comm_overlap.{OPTION}"]
    tensor, name = reading.values.get("tensor_model_parallel_size") or 1, f"comm_overlap.{OPTION}"
    if reading.values.get(OPTION) and given.get(name) and (tensor < 2 or not reading.get("model.sequence_parallel")):
        reading.values[OPTION] = False
        reading.take_back(OPTION)
        reading.without_effect[name] = "Megatron-Bridge switches it off without sequence parallelism"


_RECIPES: dict[str, dict[str, Any]] = {
    "bf16_mixed": {"fp8_format": None},
    "bf16_with_fp8_delayed_scaling_mixed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "bf16_with_fp8_current_scaling_mixed": {
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {
        "fp8_format": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "bf16_with_nvfp4_mixed": {"fp8_format": None},
}
_RECIPES |= {
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": _RECIPES["bf16_with_fp8_current_scaling_mixed"],
    "nanov2_bf16_with_fp8_current_scaling_mixed": {
        "fp8_format": "hybrid",
        "fp8_recipe": "blockwise",
        "fp8_param_gather": True,
    },
    "nemotron_3_super_bf16_with_nvfp4_mixed": _RECIPES["bf16_with_nvfp4_mixed"],
}
"""Names of ``src/megatron/bridge/training/mixed_precision.py``; their gradients are fp32. Each has a twin in fp16."""


def _take_mixed_precision(reading: Reading, name: str) -> None:
    """Takes what the name of a recipe stands for."""
    plain = name.replace("-", "_")
    place = reading.entries.by_key["mixed_precision"].place
    if plain.startswith("fp16_"):
        reading.blocked["precision"].append(f"mixed_precision {name} ({place}): memlab computes in bf16 or fp32")
    elif plain not in _RECIPES:
        reading.warnings.append(
            f"{place}: memlab does not know the mixed_precision {shortened(name)} and takes what the other keys say: "
            "give its fields, such as --set model.fp8=hybrid and --set model.fp8_recipe=tensorwise"
        )
    else:
        for field_name, value in (_RECIPES[plain] | {"grad_reduce_in_bf16": False}).items():
            reading.take("mixed_precision", field_name, value)
    if "nvfp4" in plain:
        reading.miss("mixed_precision", "either", "matrices are multiplied in FP4, and parameters are gathered in FP4")
    if "current_scaling" in plain:
        reading.miss("mixed_precision", "more", "the first and last layers stay in bf16")


_CLASSES = {"lora": "lora.LoRA", "canonical_lora": "canonical_lora.CanonicalLoRA"}
"""Of Megatron-Bridge's package of adapters."""


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    layout, model = scenario.layout, scenario.architecture
    functions = {"quick_gelu": model.quick_geglu, "squared_relu": model.squared_relu}
    positions = model.position_embedding_type
    spread = {"expert_tensor_parallel_size": layout.expert_tensor_size} if layout.expert_model_parallel_size > 1 else {}
    return (
        common(scenario, settings)
        | fields_of(model)
        | spread
        | {
            "num_layers": scenario.num_layers,
            "add_bias_linear": model.add_bias_linear or None,
            "activation": next((name for name, has in functions.items() if has), None),
            "gated_linear_unit": None if model.gated_linear_unit else False,
            "position_embedding_type": None if positions == "rope" else positions,
            "normalization": None if model.normalization == "RMSNorm" else model.normalization,
            "is_bf16": scenario.dtype == "bf16",
            "should_pad_vocab": False,
            "class_of_adapters": scenario.state.lora and f"megatron.bridge.peft.{_CLASSES[kind_of(scenario)]}",
            "make_vocab_size_divisible_by": 128,
        }
    )


def cannot_write(scenario: Scenario, _: MemorySettings) -> dict[str, str]:
    """Names learned positions of another number than a sequence's tokens, which is the number that providers take."""
    positions = scenario.architecture.max_position_embeddings
    if positions in (None, scenario.seq_length):
        return {}
    return {"max_position_embeddings": "Megatron-Bridge makes as many learned positions as a sequence has tokens"}


def _render(values: dict[str, Any]) -> list[str]:
    """Writes YAML; a tensor parallel size has sequence parallelism beside it, which providers leave off by default.

    The distributed optimizer, and the overlap of its gathers, are on where one section has them on, so they are written
    into both. The precision-aware optimizer needs the first in its own section, which is validated before the sections
    are compared (training/config.py).
    """
    is_split = (values.get("model.tensor_model_parallel_size") or 1) > 1
    beside: dict[str, Any] = {"model.sequence_parallel": True} if is_split else {}
    sections = ("ddp", "optimizer")
    for option in ("use_distributed_optimizer", "overlap_param_gather"):
        written = [values[f"{one}.{option}"] for one in sections if f"{one}.{option}" in values]
        beside |= {f"{one}.{option}": value for one in sections for value in written}
    if values.get("optimizer.use_precision_aware_optimizer"):
        beside["optimizer.use_distributed_optimizer"] = True
    return yaml_lines(values | beside)


BRIDGE = Framework(
    name="bridge",
    title="Megatron-Bridge",
    source="0.6.2",
    signs=Signs(
        looked_for="run_recipe.py, or the key model with ddp or train",
        programs=("run_recipe",),
        of_tree=lambda begins: begins("model.") and (begins("ddp.") or begins("train.")),
    ),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=(
        keys_without_effect("bridge")
        | keys_without_effect("environment", "env_vars")
        | keys_without_effect("environment", "ENV_VARS")
        | keys_without_effect("bridge_dataset", "dataset")
        | keys_without_effect("bridge_provider", "model")
        | keys_without_effect("megatron_core_model", "model")
        | keys_without_effect("megatron_core_ddp", "ddp")
        | keys_without_effect("megatron_core_optimizer", "optimizer")
    )
    - {key.name for key in KEYS},
    complete=complete,
    complete_of_model=complete_trained_provider,
    check=check_bridge,
    compose=compose,
    fixed={"loss": "cross_entropy"},
    writes_sizes=True,
    without_own_key=frozenset(("dtype",)),
    cannot_write=OF_BRIDGE
    | {name: reason for name, reason in OF_OTHER_FRAMEWORKS.items() if name not in NOT_WRITTEN}
    | METHODS_NOT_WRITTEN
    | {
        "freeze_moe_router": "no key freezes routers: freeze their weights in a pre-wrap hook",
        "checkpoint_input_remedy": "Megatron-Bridge has no remedy for the inputs that checkpoints of MoE layers keep",
        "offload_parameters": "Megatron-Bridge keeps its parameters on the device between steps",
        "offload_gradients": "Megatron-Bridge keeps its gradient buffers between steps",
        "offload_optimizer": "Megatron-Bridge keeps its optimizer state where it is between steps",
        "offload_optimizer_except_update": "Megatron-Bridge keeps its optimizer state where it is between steps",
        "loss": "Megatron-Bridge trains with the language-model loss, unless a program adds a teacher",
        "fp32_output": "Megatron-Bridge trains with the language-model loss",
        "logprobs_chunk_size": "Megatron-Bridge trains with the language-model loss",
    },
    cannot_write_of=cannot_write,
    render=_render,
)
