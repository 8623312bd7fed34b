"""From the values of a job's file to a scenario and settings, the same for all frameworks."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.config.layout import Layout
from memlab.config.lora import OF_ROUTED_LAYERS, ROUTER
from memlab.config.model_restrictions import not_in_megatron
from memlab.config.option import options_of, unread
from memlab.config.pipeline_layout import without_extra_layers
from memlab.config.scenario import Scenario
from memlab.config.settings import OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.config.training_state import LOSS_OPTIONS, TrainingState
from memlab.config.validation import RuleError, shortened
from memlab.config.versions import Versions
from memlab.jobs.entries import UNKNOWN, parse_scalar
from memlab.jobs.frameworks.adapters import LORA, PASS_WITHOUT_ADAPTERS
from memlab.jobs.frameworks.batch_schedule import largest_batch
from memlab.jobs.frameworks.framework import CannotStartError, NotModelled, Reading
from memlab.jobs.frameworks.fsdp2 import take_adapters
from memlab.jobs.frameworks.keys import CONVERSIONS, SWITCH, Effect, Missing
from memlab.jobs.frameworks.user_buffers import complete_user_buffers

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout) if field.name not in ("rank", "data_parallel_size"))
STATE_FIELDS = tuple(options_of(TrainingState))
SETTINGS_FIELDS = tuple(field.name for field in fields(MemorySettings))


def layout_of(reading: Reading, architecture: Architecture) -> Layout:
    """Returns the job's layout, with as many copies of the model as its ranks make.

    Raises:
        CannotStartError: If the ranks cannot be divided so.
        ValueError: If memlab does not model how layers are split over stages.
    """
    num_layers = reading.values.get("num_layers") or architecture.num_layers
    _count_chunks_in_layers(reading, num_layers + len(_counted_ends(reading)))
    _count_ends_as_layers(reading, num_layers)
    if not architecture.routes:  # a model with experts cannot start so
        _split_fp8(reading)
    values = {name: reading.values.get(name) for name in LAYOUT_FIELDS}
    values["virtual_pipeline_model_parallel_size"] = values["virtual_pipeline_model_parallel_size"] or 1
    tensor = values["tensor_model_parallel_size"] or 1
    shared = {size.ranks for size in architecture.shared_sizes}
    if "expert_tensor_parallel_size" not in shared or values["expert_tensor_parallel_size"] == tensor:
        values["expert_tensor_parallel_size"] = None
    if "expert_model_parallel_size" not in shared and (values["expert_model_parallel_size"] or 1) > 1:
        reading.without_effect["expert_model_parallel_size"] = "the model has no experts"
        values["expert_model_parallel_size"] = 1
    sizes = {name: size for name, size in values.items() if size is not None}
    context, pipeline = sizes.get("context_parallel_size", 1), sizes.get("pipeline_model_parallel_size", 1)
    per_copy = tensor * context * pipeline
    world_size = reading.values.get("world_size")
    if min(tensor, context, pipeline, world_size or 1) < 1:
        given = {**sizes, "world_size": world_size or 1}
        small = {name: f"{name} {size}" for name, size in given.items() if size < 1}
        raise CannotStartError(
            f"the layout has {', '.join(small.values())}, must have sizes of at least 1: give larger ones", *small
        )
    if world_size is None:
        experts = sizes.get("expert_model_parallel_size", 1) * (sizes.get("expert_tensor_parallel_size") or tensor)
        world_size = math.lcm(per_copy, experts * pipeline)
        reading.assumed.append("the number of ranks")
        reading.warnings.append(
            f"the number of ranks is not in the file, so memlab takes the smallest, {world_size}: give --world-size"
        )
    if world_size % per_copy:
        raise CannotStartError(
            f"the job has {world_size} ranks, must have a multiple of {per_copy} (tensor {tensor} x context {context} "
            f"x pipeline {pipeline}): change a size, or the number of ranks",
            *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
        )
    try:
        return Layout(**sizes, data_parallel_size=world_size // per_copy)
    except RuleError as error:
        raise CannotStartError(str(error), *error.fields) from error


def check_expert_ranks(reading: Reading, architecture: Architecture) -> None:
    """Checks that a model whose experts shall be spread over ranks has experts.

    Raises:
        CannotStartError: If it has none (``TransformerConfig.__post_init__``, megatron-core 0.16.1 and 0.19.2).
    """
    size = reading.values.get("expert_model_parallel_size") or 1
    if size > 1 and not architecture.routes and reading.values.get("engine") in (None, "megatron"):
        raise CannotStartError(
            f"expert_model_parallel_size is {size}, must be 1 for {architecture.name}, which has no experts, by a rule "
            "of Megatron-Core: set it to 1",
            "expert_model_parallel_size",
        )


def _split_fp8(reading: Reading) -> None:
    """Notes that a job in FP8 keeps whole sequences between matrices, which memlab splits there."""
    tensor = reading.values.get("tensor_model_parallel_size") or 1
    if reading.values.get("sequence_parallel") is False and tensor > 1 and reading.values.get("fp8_format"):
        one = next(one for one in reading.taken if one.field == "sequence_parallel")
        reading.miss(
            one.key,
            "more",
            f"without it, norms and residuals keep whole sequences on each of the {tensor} tensor parallel ranks; "
            "memlab splits them in FP8",
        )
        reading.values["sequence_parallel"] = True


def _count_chunks_in_layers(reading: Reading, num_layers: int) -> None:
    """Takes the model chunks of a stage from the layers of a chunk, by the rule of Megatron-LM's `validate_args`.

    Args:
        num_layers: Of the model, with what counts as a layer (`_COUNTED`).
    """
    key = "num_layers_per_virtual_pipeline_stage"
    layers, stages = reading.values.pop(key, None), reading.values.get("pipeline_model_parallel_size") or 1
    if layers is None or stages < 2:
        return
    of_stage, remainder = divmod(num_layers, stages)
    if remainder or layers < 1 or of_stage % layers:
        raise CannotStartError(
            f"{key} is {layers}, must divide the layers of a stage, {num_layers} / {stages}, by a rule of "
            "Megatron-LM's arguments: change one of the three",
            key,
        )
    field = "num_virtual_stages_per_pipeline_rank"
    reading.take(key, field, of_stage // layers)
    reading.values["virtual_pipeline_model_parallel_size"] = reading.values.pop(field)


_COUNTED = {
    "account_for_embedding_in_pipeline_split": "num_layers_in_first_pipeline_stage",
    "account_for_loss_in_pipeline_split": "num_layers_in_last_pipeline_stage",
}
"""Megatron's options by which a stage with the embedding, or with the loss, has one layer fewer than the others."""


def _counted_ends(reading: Reading) -> list[NotModelled]:
    return [one for one in reading.not_modelled if one.key.rpartition(".")[2] in _COUNTED]


def _count_ends_as_layers(reading: Reading, num_layers: int) -> None:
    """Takes the layers of the first and the last stage where embedding or loss counts as a layer of them.

    The rule is that of ``get_num_layers_to_build`` (megatron/core/transformer/transformer_block.py, 0.16.1).
    """
    values = reading.values
    stages, chunks = (values.get(f"{name}pipeline_model_parallel_size") or 1 for name in ("", "virtual_"))
    counted = _counted_ends(reading)
    if not counted:
        return
    if stages <= 1:
        reading.model(lambda key: key.rpartition(".")[2] in _COUNTED, "the model has one pipeline stage")
        return
    keys = ", ".join(one.key for one in counted)
    if any(values.get(field) is not None for field in (*_COUNTED.values(), "pipeline_model_parallel_layout")):
        raise CannotStartError(
            f"{keys} cannot be combined with a layout of the pipeline, or a number of layers for the first or last "
            "stage, by a rule of Megatron-Core: leave one of the two out"
        )
    together = num_layers + len(counted)
    if together % (stages * chunks):
        raise CannotStartError(
            f"the pipeline has {together} layers ({num_layers} of the model, and {len(counted)} for {keys}), must have "
            f"a multiple of {stages * chunks} (stages {stages} x chunks {chunks}): change one of them",
            *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        )
    ends = {_COUNTED[one.key.rpartition(".")[2]]: one.key for one in counted}
    reading.not_modelled = [one for one in reading.not_modelled if one not in counted]
    if chunks == 1:
        for field, key in ends.items():
            reading.take(key, field, together // stages - 1)
    else:
        layers = [together // (stages * chunks)] * stages * chunks
        for field, chunk in zip(_COUNTED.values(), (0, -1), strict=True):
            layers[chunk] -= field in ends
        text = "|".join("t" * number for number in layers)
        text = f"E{text}{'m' * (values.get('mtp_num_layers') or 0)}L"
        for key in ends.values():
            reading.take(key, "pipeline_model_parallel_layout", text)


def with_layer_pattern(reading: Reading, architecture: Architecture) -> Architecture:
    """Returns the model with experts in the layers that the job names, if it names any.

    Raises:
        CannotStartError: If the pattern is not as long as the model is deep (``get_gpt_decoder_layer_specs`` in
            megatron/core/models/gpt/gpt_layer_specs.py, 0.16.1).
    """
    taken = [one for one in reading.taken if one.field == "moe_layer_freq"]
    if not taken:
        return architecture
    last, pattern = taken[-1], reading.values["moe_layer_freq"]
    if not architecture.routes:
        reading.without_effect |= {one.key: "the model has no experts" for one in taken}
    num_layers = reading.values.get("num_layers") or architecture.num_layers
    if isinstance(pattern, int):
        pattern = tuple(int(layer % pattern == 0) for layer in range(num_layers))
    if architecture.routes and len(pattern) != num_layers:
        raise CannotStartError(
            f"{last.key} is {shortened(last.value)} ({last.place}), a list for {len(pattern)} layers, must be as long "
            f"as the model, {num_layers} layers, by a rule of Megatron-Core: correct one of them"
        )
    if architecture.routes and 0 in pattern:
        return replace(architecture, num_layers=num_layers, moe_layer_freq=pattern)
    reading.taken = [one for one in reading.taken if one not in taken]  # it changes nothing
    return architecture


def scenario_of(reading: Reading, architecture: Architecture, versions: Versions) -> Scenario:
    """Builds the scenario that the values of a job's file describe, with the versions that its framework installs.

    Raises:
        CannotStartError: If Megatron's own rules refuse the layout.
        ValueError: If memlab refuses a value.
    """
    _drop_extra_layers(reading)
    versions = _of_hybrid(reading, architecture, versions)
    complete_user_buffers(reading, architecture)
    layout = layout_of(reading, architecture)
    values = reading.values
    _complete_exchange(reading, layout)
    num_layers = values.get("num_layers") or architecture.num_layers
    seq_length = values.get("seq_length") or architecture.default_seq_length
    num_microbatches = _num_microbatches(reading, layout)
    _note_turns_of_chunks(reading, layout, num_microbatches)
    _check_whole_sequences(reading, layout, seq_length)
    is_megatron = values.get("engine") in (None, "megatron")
    if is_megatron:
        _note_latent_attention(reading, architecture)
        if architecture.experimental_attention_variant is not None:
            _note_gated_delta_net(reading)
    if architecture.add_bias_linear and is_megatron:
        _drop_beside_biases(reading, architecture)
    if values.get("lora_fused_experts"):
        _take_adapters_of_experts(reading, architecture)
    if is_megatron and architecture.only_in_transformers:
        raise ValueError(
            f"the job's model is {architecture.name}, whose {architecture.only_in_transformers} memlab does not have "
            "in Megatron's layers: give --architecture with a similar model for an estimate, or see this model under "
            f"FSDP2 by memlab predict {architecture.name} --engine fsdp2"
        )
    try:
        layout.check(architecture, num_layers, seq_length, num_microbatches)
    except RuleError as error:
        if is_megatron:  # whose rules these are
            raise CannotStartError(str(error), *error.fields) from error
        reading.lacks.append(_together(error))
        raise
    try:
        scenario = Scenario(
            architecture=architecture,
            num_layers=num_layers,
            seq_length=seq_length,
            micro_batch_size=values.get("micro_batch_size") or 1,
            num_microbatches=num_microbatches,
            packed_sequences=values.get("packed_sequences"),
            dtype=values.get("dtype") or "bf16",
            engine=values.get("engine") or "megatron",
            layout=layout,
            state=state_of(reading, layout),
            allocator=_allocator(reading),
            versions=versions,
        )
    except RuleError as error:
        if not is_megatron:
            reading.lacks.append(_together(error))
        raise
    _drop_overlap(reading, scenario)
    _drop_what_fp8_reads(reading, scenario.state)
    return scenario


def _together(error: RuleError) -> str:
    """Names what the engine fsdp2 does not have together."""
    return f"{' beside '.join(name for name in error.fields[:2] if name != 'engine')} under FSDP2"


_OF_EXTRA_LAYERS: dict[str, tuple[Effect, str]] = {
    "mtp_detach_heads": ("either", "the heads' gradients end at the model's layers, and the last one stays"),
    "mtp_decoder_input_detach": ("less", "the heads' gradients end at the embeddings"),
    "mtp_use_repeated_layer": ("less", "all further tokens are predicted by one layer"),
    "mtp_shared_weights": ("less", "all further tokens are predicted by one layer"),
    "mtp_hybrid_override_pattern": ("either", "the layers of multi-token prediction are of another kind"),
}
"""Options of Megatron-Core since 0.17 and of ms-swift 4.6.0 that only multi-token prediction reads."""


def _drop_extra_layers(reading: Reading) -> None:
    """Names the layers of multi-token prediction that memlab does not have beside something else of the job."""
    values = reading.values
    text = values.get("pipeline_model_parallel_layout")
    beside = {
        "a loss that the framework computes from the logits": values.get("loss", "cross_entropy") != "cross_entropy",
        "full recompute in FP8 by the delayed recipe": (
            values.get("fp8_format") is not None
            and values.get("fp8_recipe", TrainingState().fp8_recipe) == "delayed"
            and values.get("recompute_granularity") == "full"
        ),
        "a pipeline layout that has them on another stage than the loss": bool(re.search("m.*[|]", text or "")),
    }
    found = next((what for what, is_there in beside.items() if is_there), "")
    if values.get("mtp_num_layers") and found:
        taken = [one for one in reading.taken if one.field == "mtp_num_layers" and one.memlab_value]
        reading.taken = [one for one in reading.taken if one not in taken]
        reason = f"multi-token prediction: a layer and a set of logits more, which memlab does not have beside {found}"
        for one in taken:
            reading.miss(one.key, "more", reason)
        values["mtp_num_layers"] = None
    if text and not values.get("mtp_num_layers"):
        values["pipeline_model_parallel_layout"] = without_extra_layers(text)
    if values.get("mtp_num_layers"):
        for key in [key for key in reading.entries.by_key if key.rpartition(".")[2] in _OF_EXTRA_LAYERS]:
            name = key.rpartition(".")[2]
            if reading.get(key) in (None, False, ""):
                continue
            option = options_of(TrainingState).get(name)
            if option is None or not_in_megatron(option):
                reading.miss(key, *_OF_EXTRA_LAYERS[name])
            else:
                reading.take(key, name, SWITCH.read(reading.get(key)))


def _of_hybrid(reading: Reading, architecture: Architecture, versions: Versions) -> Versions:
    """Returns the versions of a job, and names packed rows of layers of Mamba: each is predicted as one sequence.

    Megatron-Bridge trains such models as `HybridModel`, which is new in megatron-core 0.18.
    """
    if architecture.hybrid_override_pattern is None:
        return versions
    if versions.megatron_core is None:
        versions = replace(versions, megatron_core="0.19")
        reading.warnings.append(
            "layers of Mamba are predicted as of megatron-core 0.19, since no version is given: 0.16 and 0.17 ignore "
            "full recompute in such models"
        )
    if reading.values.get("packed_sequences") is None:
        return versions
    keys = reading.take_back("packed_sequences")
    reason = "a row has several sequences, which memlab predicts as one where layers are Mamba"
    reading.miss(keys[0] if keys else "packed_sequences", "either", reason)
    reading.values["packed_sequences"] = None
    return versions


def _drop_beside_biases(reading: Reading, architecture: Architecture) -> None:
    """Names ms-swift's adapters and FP8 of a model whose matrices have biases, and predicts the model without them.

    FP8 of experts with biases is predicted, but not beside adapters.
    """
    values = reading.values
    what: dict[str, tuple[Effect, str]] = {}
    if not architecture.routes or values.get("lora_rank") is not None:
        what["fp8_format"] = ("either", "memlab does not predict these matrices with biases in FP8, and takes bf16")
    if values.get("lora_library") == "mcore_bridge":
        what["lora_rank"] = ("less", f"{LORA} (memlab has none of ms-swift's beside biases)")
        if values.get("reference_model") == "without_adapters" and values.get("lora_rank") is not None:
            what["reference_model"] = ("more", PASS_WITHOUT_ADAPTERS)
    for field, (effect, reason) in what.items():
        if values.get(field) is None:
            continue
        # Megatron-Bridge's and NeMo-RL's section of adapters is their key, and has a default rank.
        keys = [key.removesuffix(".dim") for key in reading.take_back(field)]
        reading.miss(keys[0] if keys else "peft", effect, reason)
        values[field] = None


def _take_adapters_of_experts(reading: Reading, architecture: Architecture) -> None:
    """Takes PEFT's adapters of experts and routers where the job's targets name some of the model's, and says so.

    With FSDP1, a step fails in PEFT's first forward (0.21.2 under verl's ``get_fsdp_wrap_policy``, which wraps each
    matrix by itself, while PEFT reads it outside of its unit's forward).
    """
    values, names = reading.values, FAMILIES[architecture.family].linears_of_expert
    targets = values.get("lora_target_modules")
    has_some = architecture.routes and bool(names) and (not targets or not {*names, ROUTER}.isdisjoint(targets))
    is_first = values.get("fsdp_version") == 1
    values["lora_fused_experts"] = has_some and not is_first
    if not values["lora_fused_experts"]:
        _leave_routed_layers_out(reading, architecture)
    if has_some and is_first and values.get("lora_rank") is not None:
        reading.warnings.append(
            "the job asks for no version of PEFT, so memlab takes 0.18, which leaves experts out: 0.20 and newer adapt "
            "experts too and then fail under FSDP1 in the first step: take FSDP2, or name linears of attention only"
        )
    elif has_some and not is_first:
        reading.warnings.append(
            "the job asks for no version of PEFT, so memlab takes 0.20 or newer, which adapts experts too and copies "
            "all experts of a layer in forward and backward: PEFT 0.18 leaves experts out, and 0.19 refuses all-linear"
        )


def _leave_routed_layers_out(reading: Reading, architecture: Architecture) -> None:
    """Leaves target modules out that only routers and experts have, where memlab predicts no adapters of these.

    Of a dense model, PEFT passes over them; of another one, whether it adapts them depends on the version of
    transformers, so the adapters are named and the whole model is trained, which is an upper bound.
    """
    targets = tuple(reading.values.get("lora_target_modules") or ())
    others = tuple(name for name in targets if name in OF_ROUTED_LAYERS)
    if not others:
        return
    if not architecture.routes and len(others) < len(targets):
        reading.values["lora_target_modules"] = tuple(name for name in targets if name not in others)
        named = " or ".join(others)
        reading.warnings.append(f"no linear of {architecture.name} is named {named}, and PEFT adapts the other ones")
        return
    key = next((one.key for one in reading.taken if one.field == "lora_rank"), "lora_rank")
    take_adapters(reading, key, targets, tuple(reading.values.get("lora_exclude_modules") or ()))


def _complete_exchange(reading: Reading, layout: Layout) -> None:
    """Names HybridEP where a rank exchanges tokens with itself, which Megatron-Core refuses before 0.19.

    Megatron-Bridge takes alltoall where a job names no library (``_fallback_to_alltoall`` in
    training/flex_dispatcher_backend.py, 067f987d).

    Raises:
        CannotStartError: If ``moe_enable_deepep`` is beside another dispatcher or library (transformer_config.py).
    """
    values, option = reading.values, "moe_token_dispatcher_type"
    asks = any(
        SWITCH.read(entry.value)
        for key, entry in reading.entries.by_key.items()
        if key.rpartition(".")[2] == "moe_enable_deepep" and not entry.is_unknown
    )
    for name, default, needed in ((option, "alltoall", "flex"), ("moe_flex_dispatcher_backend", "deepep", "deepep")):
        if asks and values.get(name, default) != needed:
            raise CannotStartError(
                f"moe_enable_deepep is true with {name} {values.get(name, default)}, must have {needed} by a rule of "
                f"Megatron-Core: choose {needed}, or leave moe_enable_deepep out",
                name,
            )
    if values.get(option) != "flex" or values.get("moe_flex_dispatcher_backend") == "hybridep":
        of_deep_ep = "moe_flex_dispatcher_num_sms"
        reading.model(lambda key: key.endswith(of_deep_ep), "only DeepEP's buffers grow with it")
    if values.get(option) != "flex":
        return
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_size
    library = "model.moe_flex_dispatcher_backend"
    has_none = library in reading.entries.by_key and reading.get(library) is None
    if ranks > 1 and not has_none:
        return
    key = next(iter(reading.take_back(option)), option)
    values[option] = "alltoall"
    if has_none:
        reading.take(key, option, "alltoall")
    else:
        reading.miss(key, "either", "memlab exchanges tokens with alltoall where one rank has all experts")


def _note_gated_delta_net(reading: Reading) -> None:
    """Names what Megatron-Core does since 0.18 (``ssm/gated_delta_net.py``), where memlab has 0.16's code."""
    values = reading.values
    reading.miss(
        "experimental_attention_variant",
        "less",
        "gated delta net is predicted as Megatron-Core 0.16 and 0.17 compute it; since 0.18 its convolution and gates "
        "are kernels that keep less",
    )
    if values.get("packed_sequences") is not None:
        values["packed_sequences"] = None
        reading.miss(
            "linear_attention_freq",
            "more",
            "the sequences of a packed row are predicted as one, since Megatron-Core 0.16 packs none with gated delta "
            "net; each sequence has states of its own",
        )


def _note_latent_attention(reading: Reading, architecture: Architecture) -> None:
    """Names what frameworks do so that flash-attn 2 takes latent attention (`Architecture.has_kernel_of_flash_attn_2`).

    Packed rows are padded by Megatron-Core since 0.18, by mcore-bridge 1.6.5 for ms-swift, and by verl for the releases
    before 0.16.2 (``apply_patch`` in verl/models/mcore/patch.py). slime's Megatron (1dcf0daf, 0.16.0) pads nothing.
    """
    values = reading.values
    pads_nothing = values.pop("pads_nothing", False)
    has_no_batch = values.pop("is_thd", False) or values.get("packed_sequences") is not None
    if architecture.has_kernel_of_flash_attn_2:
        return
    if has_no_batch and not pads_nothing and values.get("micro_batch_size") in (None, 1):
        # How many sequences share a row, the data decide; attention of one has no other bytes.
        values |= {"pad_packed_values": True, "packed_sequences": values.get("packed_sequences") or 1}
        return
    if has_no_batch and not pads_nothing:
        reading.miss(
            "multi_latent_attention",
            "more",
            "Megatron-Core since 0.18, mcore-bridge and verl pad the values of packed rows to the size of keys, and "
            "memlab predicts them as 0.16 has them",
        )
    if values.get("attention_backend") != "flash":
        return
    keys = [one.key for one in reading.taken if one.field == "attention_backend"]
    reading.miss(
        (keys or ["attention_backend"])[-1],
        "either",
        "Transformer Engine has flash-attn 2 for latent attention with padded values only, and memlab predicts cuDNN",
    )
    values["attention_backend"] = "auto"


def _drop_overlap(reading: Reading, scenario: Scenario) -> None:
    """Moves what concerns an interleaved pipeline, where a job has none, to what has no effect."""
    if scenario.layout.virtual_pipeline_model_parallel_size == 1:
        reading.model(lambda key: key.rpartition(".")[2] == "overlap_p2p_comm", "the pipeline is not interleaved")


_READ_IN_FP8 = (
    "disable_parameter_transpose_cache", "first_last_layers_bf16", "fp8_amax_history_len", "fp8_dot_product_attention",
    "fp8_multi_head_attention", "fp8_wgrad",
)  # fmt: skip
"""Options that say how FP8 is computed. The first one lets Transformer Engine quantize weights in each micro-batch: in
bf16 it keeps no copy of a weight at all (``quantize_weight`` in ``pytorch/module``, 2.16.1)."""


def _drop_what_fp8_reads(reading: Reading, state: TrainingState) -> None:
    """Moves what says how FP8 is computed, where a job computes in neither FP8 nor FP4, to what has no effect."""
    if any(
        one.key.rpartition(".")[2] in ("fp4", "fp4_format") or "nvfp4" in str(one.value) for one in reading.not_modelled
    ):
        return
    unread: tuple[str, ...] = _READ_IN_FP8
    reason = "nothing is computed in FP8"
    if state.fp8_format is not None:
        # A weight that is FP8 is not quantized in any micro-batch.
        unread, reason = _READ_IN_FP8[:1] * state.fp8_param_gather, "the weights themselves are FP8"
    reading.model(lambda key: key.rpartition(".")[2] in unread, reason)


def _check_whole_sequences(reading: Reading, layout: Layout, seq_length: int) -> None:
    """Refuses whole sequences on tensor parallel ranks where memlab, which splits them in such a job, cannot.

    Raises:
        ValueError: If the job has no sequence parallelism, and the sequences do not divide; Megatron-Core takes them.
    """
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    keys = [one.key for one in reading.not_modelled if one.key.rpartition(".")[2] == "sequence_parallel"]
    if keys and seq_length % context == 0 and seq_length // context % tensor:
        raise ValueError(
            f"{keys[0]} is off, so each of the {tensor} tensor parallel ranks has whole sequences; memlab splits them, "
            f"and {seq_length // context} tokens do not divide by {tensor}: give a length that is a multiple of "
            f"{tensor * context}"
        )


_TURNS = ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage")


def _note_turns_of_chunks(reading: Reading, layout: Layout, num_microbatches: int) -> None:
    """Notes that a stage changes to its next chunk after another number of micro-batches than in memlab.

    Raises:
        CannotStartError: If the micro-batches do not divide into such turns
            (``forward_backward_pipelining_with_interleaving`` in megatron/core/pipeline_parallel/schedules.py, 0.16.1).
        ValueError: If only turns of another number than the stages divide them.
    """
    stages = layout.pipeline_model_parallel_size
    for key in [key for key in reading.entries.by_key if key.rpartition(".")[2] in _TURNS]:
        given = reading.get(key)
        if layout.virtual_pipeline_model_parallel_size > 1 and given not in (None, stages):
            reason = f"in memlab, a stage changes to its next chunk after {stages} micro-batches, one per stage"
            reading.miss(key, "either", reason)
            if not isinstance(given, int) or not stages <= given <= num_microbatches:
                raise CannotStartError(
                    f"{key} is {shortened(given)}, must be from {stages} (stages) to {num_microbatches} "
                    "(micro-batches), by a rule of Megatron-Core: change one of the three"
                )
            if 0 < num_microbatches % given < stages:
                raise CannotStartError(
                    f"{key} is {given}, which leaves {num_microbatches % given} of {num_microbatches} micro-batches, "
                    f"must leave none or at least {stages}, one per stage, by a rule of Megatron-Core: change one of "
                    "the three"
                )
            if num_microbatches % stages:
                raise ValueError(
                    f"{key} is {given} with {num_microbatches} micro-batches, and {reason}: give a number of "
                    f"micro-batches that is a multiple of {stages}"
                )


def _num_microbatches(reading: Reading, layout: Layout) -> int:
    """Returns the passes of a step: given, or from the global batch, as Megatron divides it."""
    values = reading.values
    given, global_batch = values.get("num_microbatches"), values.get("global_batch_size")
    if given is not None or global_batch is None:
        return given or 1
    per_pass = (values.get("micro_batch_size") or 1) * layout.data_parallel_size
    global_batch = largest_batch(reading, per_pass) or global_batch
    if values.get("decreases_batch") and global_batch > per_pass:
        global_batch -= global_batch % per_pass
    if global_batch % per_pass:
        raise CannotStartError(
            f"the global batch has {global_batch} sequences, must be a multiple of {per_pass} (micro-batch "
            f"{values.get('micro_batch_size') or 1} x data parallel {layout.data_parallel_size}): change one of them",
            *("global_batch_size", "micro_batch_size"),
        )
    return int(global_batch // per_pass)


def state_of(reading: Reading, layout: Layout) -> TrainingState:
    """Builds the training state that the values of a job's file describe.

    What the framework would not read, and what memlab does not predict, is dropped.

    Raises:
        ValueError: If memlab refuses a value.
    """
    values = reading.values
    if layout.pipeline_model_parallel_size == 1:
        values["deallocate_pipeline_outputs"] = False
    if values.get("num_labels") is not None:  # no logits
        values |= {name: options_of(TrainingState)[name].default for name in LOSS_OPTIONS}
    if values.get("loss", "cross_entropy") != "cross_entropy":
        values["cross_entropy_loss_fusion"] = False
    for name in unread(TrainingState, values):
        values[name] = options_of(TrainingState)[name].default
    backend = values.get("attention_backend")
    if backend == "local":
        reading.miss("attention_backend", "more", "Megatron's own attention keeps the scores of every head")
        values["attention_backend"] = "unfused"
    return TrainingState.of_options({name: values[name] for name in STATE_FIELDS if values.get(name) is not None})


def settings_of(reading: Reading) -> MemorySettings:
    """Builds the memory settings that the values of a job's file describe.

    Raises:
        ValueError: If Megatron or memlab refuses a combination.
    """
    values = dict(reading.values)
    _complete_recompute(reading, values)
    if not values.get("fine_grained_activation_offloading", True):
        values["offload_modules"] = None
    if values.get("offload_modules"):
        values["offload_modules"] = _known(reading, "offload_modules", values["offload_modules"], OFFLOAD_MODULES)
    for name in unread(MemorySettings, values):
        values.pop(name, None)
    given = {name: values[name] for name in SETTINGS_FIELDS if values.get(name) is not None}
    return MemorySettings(**given)


def recompute_of_all_layers(reading: Reading, settings: MemorySettings, scenario: Scenario) -> MemorySettings:
    """Returns the settings with as many layers as a model chunk has, where full recompute names more.

    Under ``block``, Megatron-Core then recomputes all of them (``_checkpointed_forward`` in transformer_block.py,
    0.16.1). Under ``uniform``, they are a single checkpoint from 0.17.0 on, and 0.16.1 reads past the last one.
    """
    named, layers = settings.recompute_num_layers, set(scenario.layers_of_chunks)
    most, is_block = max(layers), settings.recompute_method == "block"
    if named is None or named <= most or not (is_block or len(layers) == 1):
        return settings
    done = "all of them are recomputed"
    if not is_block:
        done = "all of them are a checkpoint from megatron-core 0.17 on, and 0.16 fails"
    reading.warnings.append(f"recompute_num_layers is {named}, and a model chunk has {most} layers: {done}")
    return replace(settings, recompute_num_layers=most)


def _complete_recompute(reading: Reading, values: dict[str, Any]) -> None:
    """Drops what the granularity does not read, and adds what it implies."""
    granularity = values.get("recompute_granularity")
    if values.get("moe_layer_recompute"):  # as `TransformerConfig.__post_init__` has it, megatron-core 0.16.1
        if granularity == "full":
            raise CannotStartError(
                "moe_layer_recompute is true with full recompute, which Megatron-Core refuses: leave one of the two "
                "out",
                *("moe_layer_recompute", "recompute_granularity"),
            )
        if granularity is None:
            values["recompute_method"] = values["recompute_num_layers"] = None
        granularity, modules = "selective", _modules_or_default(values)
        implied = {"recompute_granularity": granularity, "recompute_modules": tuple(dict.fromkeys((*modules, "moe")))}
        key = next(one.key for one in reversed(reading.taken) if one.field == "moe_layer_recompute")
        for name, value in implied.items():
            reading.take(key, name, value)
        values |= implied
    if granularity is None:
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            values[name] = None
    elif granularity == "full":
        values["recompute_modules"] = None
    else:
        if granularity == "selective":
            _drop_method(reading, values)
        values["recompute_modules"] = _known(
            reading, "recompute_modules", _modules_or_default(values), RECOMPUTE_MODULES
        )
        if values["recompute_modules"] is None:
            values["recompute_granularity"] = None


def _drop_method(reading: Reading, values: dict[str, Any]) -> None:
    """Drops the method, which selective recompute does not read; a number of layers is refused there.

    As ``TransformerConfig.__post_init__`` has it (megatron-core 0.16.1 and 0.19.2).
    """
    if values.get("recompute_num_layers") is not None:
        one = next(one for one in reversed(reading.taken) if one.field == "recompute_num_layers")
        raise CannotStartError(
            f"{one.key} is {one.memlab_value} ({one.place}) with selective recompute, must be null there by a rule of "
            "Megatron-Core: set it to null, or choose full recompute",
            *("recompute_num_layers", "recompute_granularity"),
        )
    values["recompute_method"] = None


def _modules_or_default(values: dict[str, Any]) -> tuple[str, ...]:
    """Returns the modules to recompute: Megatron-Core takes ``core_attn`` for none given, and keeps an empty list."""
    modules: tuple[str, ...] | None = values.get("recompute_modules")
    return ("core_attn",) if modules is None else modules


def _known(reading: Reading, name: str, modules: tuple[str, ...], choices: tuple[str, ...]) -> tuple[str, ...] | None:
    unknown = [module for module in modules if module not in choices]
    if unknown:
        taken = [one for one in reading.taken if one.field == name and one.value is not None]
        key, place = (taken[-1].key, taken[-1].place) if taken else (name, "default")
        reason = f"memlab does not have the modules {', '.join(unknown)}"
        reading.not_modelled.append(NotModelled(key, list(modules), "less", reason, place))
    return tuple(module for module in modules if module in choices) or None


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the environment that torch reads, in any job. The older name, here the first, counts as a whole wherever
it is set, even to nothing (run with torch 2.13 to 2.15; ``c10/core/AllocatorConfig.h`` of 2.13)."""
_ALLOCATOR_OPTIONS = {name: CONVERSIONS[one.kind] for name, one in options_of(AllocatorSettings).items()}


def _is_not_20(value: str) -> bool:
    """Whether an option in MiB is not what torch takes by itself."""
    return value != "20"


def _is_whole_device(share: str) -> bool:
    """Whether an option gives a share of the GPU's memory, and that is all of it; ``40G`` is a number of GiB."""
    return re.fullmatch(r"[0-9]+(\.[0-9]*)?", share) is not None and float(share) >= 1


_RESERVE = "a request larger than this range of addresses fails, and free memory does not merge across two of them"
_ALLOCATOR_MISSING = {
    "backend": Missing(
        *("", "either", "CUDA's own pool in place of torch's (before torch 2.14, memory_reserved() lacks its graphs)"),
        lambda value: value != "native",
    ),
    "expandable_segments_reserve": Missing("", "more", _RESERVE, lambda value: not _is_whole_device(value)),
    "expandable_segments_reserve_by_class": Missing("", "more", _RESERVE),
    "large_segment_size_mb": Missing("", "either", "torch shares and maps memory in other pieces", _is_not_20),
    "max_non_split_rounding_mb": Missing("", "either", "unsplit blocks serve smaller requests, or fewer", _is_not_20),
    "per_process_memory_fraction": Missing(
        *("", "more", "torch gets this share of the GPU only: give it as --gpu-memory"),
        lambda value: not _is_whole_device(value),
    ),
    "roundup_power2_divisions": Missing("", "more", "torch rounds sizes up to a part of a power of two"),
}
"""The rest of the options of ``c10/cuda/CUDAAllocatorConfig.cpp`` and ``c10/core/AllocatorConfig.cpp``, torch 2.15."""
_UNKNOWN_OPTION = Missing("", "unknown", "memlab does not know this option of torch's allocator", lambda _: True)
_LONGEST_ALLOCATOR = 2000
"""Characters; real texts have some dozens."""
_NOT_OF_DEVICE_MEMORY = ("pinned_", "release_lock_", "throw_on_", "graph_capture_")


def _allocator_variable(reading: Reading) -> tuple[str, str]:
    """Returns the variable that counts and its text; the text is empty where it is not set, or not known."""
    given: dict[str, Any] = {key.rpartition(".")[2]: entry.value for key, entry in reading.entries.by_key.items()}
    given |= reading.entries.environment
    variable = next((name for name in ALLOCATOR_VARIABLES if name in given), ALLOCATOR_VARIABLES[0])
    text = str(given.get(variable, reading.values.get("allocator")) or "")
    if UNKNOWN not in text:
        return variable, text
    reading.warnings.append(
        f"{variable} is known only when the job runs, so memlab takes the default allocator: give it with "
        f"--set {variable}=VALUE"
    )
    return variable, ""


def _allocator(reading: Reading) -> AllocatorSettings:
    """Reads ``PYTORCH_CUDA_ALLOC_CONF`` of a script or of a configuration's environment, and a framework's own switch.

    Raises:
        ValueError: If an option's value is none that torch reads.
    """
    values: dict[str, Any] = {}
    variable, text = _allocator_variable(reading)
    for option in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text[:_LONGEST_ALLOCATOR]):
        name, _, value = (part.strip() for part in option.partition(":"))
        if name in _ALLOCATOR_OPTIONS:
            values[name] = _ALLOCATOR_OPTIONS[name].checked(variable, name, parse_scalar(value))
        elif name and not name.startswith(_NOT_OF_DEVICE_MEMORY):
            missing = _ALLOCATOR_MISSING.get(name, _UNKNOWN_OPTION)
            if missing.is_on(value):
                reading.not_modelled.append(
                    NotModelled(f"{variable}.{name}", value, missing.effect, missing.reason, "environment")
                )
    if reading.values.get("expandable_segments"):  # a framework's own switch, which it turns after the start
        dropped = [name for name in values if name != "expandable_segments"]
        if dropped:
            # Each setting made by code resets these options (parseArgs in c10/core/AllocatorConfig.cpp, torch 2.13).
            reading.warnings.append(
                f"{variable}: the framework sets expandable_segments:True after the start, with which torch drops "
                f"{' and '.join(dropped)}; memlab predicts the job without"
            )
        values = {"expandable_segments": True}
    return AllocatorSettings(**values)
