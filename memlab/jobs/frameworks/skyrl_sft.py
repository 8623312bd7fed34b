"""SkyRL's trainer for supervised fine-tuning with Megatron: the overrides of ``skyrl.train.main_sft``.

Names and defaults: ``skyrl/train/config/sft_config.py`` (0.3.0); `skyrl_megatron` has those of its ``MegatronConfig``.
"""

from __future__ import annotations

from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.adapters import adapter_keys
from memlab.jobs.frameworks.bridge_keys import complete_provider
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.keys import COUNT, SWITCH, TEXT, WHOLE, Key, Missing
from memlab.jobs.frameworks.lines import plain_lines
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_segments,
    of_any_length,
    only_segments,
    take_rows,
    take_sequences,
)
from memlab.jobs.frameworks.skyrl_checkout import note_checkout
from memlab.jobs.frameworks.skyrl_megatron import (
    ADAPTERS,
    CANNOT_WRITE,
    FIXED,
    cannot_write_of_rows,
    complete_skyrl_adapters,
    drop_single_chunk,
    is_without_padding,
    megatron_keys,
    megatron_missing,
    megatron_without_effect,
    padding_in_fp8,
    padding_missing,
)
from memlab.jobs.frameworks.skyrl_rules import check_sft
from memlab.jobs.frameworks.without_effect import keys_without_effect

_MEGATRON = "megatron_config"
ASK_LENGTH = (
    "max_length is not in the file, so sequences are as long as the data has them: give --set max_length=TOKENS"
)
_CHUNK = 1024
"""``TrainerConfig.logprobs_chunk_size``, which SFT leaves as it is."""
KEYS = (
    Key("strategy", "strategy", TEXT, "megatron"),
    Key("model.path", "architecture", TEXT),
    Key("placement.num_nodes", "nodes", WHOLE, 1),
    Key("placement.num_gpus_per_node", "ranks_per_node", WHOLE, 4),
    *megatron_keys(_MEGATRON),
    Key("max_length", "longest", COUNT, None),
    Key("batch_size", "sequences", COUNT, 4),
    Key("micro_train_batch_size_per_gpu", "micro_batch_size", COUNT, 2),
    Key("remove_microbatch_padding", "removes_padding", SWITCH, True),
    Key("use_sample_packing", "removes_padding", SWITCH),
    Key("use_sequence_packing", "is_packed", SWITCH, False),
    Key("max_tokens_per_microbatch", "tokens", COUNT, None),
    *adapter_keys("model.lora", **ADAPTERS),
    Key(f"{_MEGATRON}.lora_config.lora_type", "kind_of_adapters", TEXT, "lora"),
)
FRAMEWORK_MISSING = (
    Missing("model.fake_int4_qat.enabled", "either", "weights are quantized in forward"),
    *megatron_missing(_MEGATRON),
    *padding_missing(),
)


def complete(reading: Reading) -> None:
    """Derives ranks, workload, recompute and attention, as ``build_skyrl_config_for_sft`` does."""
    values = reading.values
    complete_skyrl_adapters(reading, "model.lora", _MEGATRON)
    strategy = values.pop("strategy")
    if strategy != "megatron":
        reading.blocked["job"].append(f"strategy {strategy}: this framework has megatron and fsdp")
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    if not any(key.startswith(f"{_MEGATRON}.") for key in reading.entries.by_key):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            reading.take(f"{_MEGATRON}.{name}", name, 2)  # as SFTConfig has it where no key of the section is given
    values["attention_backend"] = values.get("attention_backend") or "flash"
    values["expandable_segments"] = True  # TrainerConfig.use_expandable_segments, which SFT leaves as it is
    note_checkout(reading)
    if values["expandable_segments"]:
        note_segments(reading, "use_expandable_segments")
    longest, sequences, tokens = (values.pop(name) for name in ("longest", "sequences", "tokens"))
    if longest is None:
        reading.questions.append(ASK_LENGTH)
    removes_padding = values.pop("removes_padding")
    if values.pop("is_packed") and longest:
        keys = "remove_microbatch_padding", "use_sample_packing"
        reading.model(lambda key: key in keys, "use_sequence_packing switches it on")
        key = "max_tokens_per_microbatch" if tokens else "max_length"
        take_rows(reading, key, (tokens or longest) // (values.get("context_parallel_size") or 1), longest, sequences)
    else:
        packed_by = "micro_train_batch_size_per_gpu" if removes_padding else None
        take_sequences(reading, longest, sequences, packed_by=packed_by)
    values["logprobs_chunk_size"] = _CHUNK
    drop_single_chunk(values)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    return of_any_length(composed(scenario, settings)) | {
        "strategy": "megatron",
        "removes_padding": is_without_padding(scenario),
        "tokens": scenario.seq_length if is_row else None,
        "micro_batch_size": 2 if is_row else scenario.micro_batch_size,
    }


def cannot_write(scenario: Scenario, _: MemorySettings) -> dict[str, str]:
    """Names what SkyRL's SFT trainer cannot express of this job."""
    reasons = only_segments(scenario, "SkyRL's SFT trainer") | cannot_write_of_rows(scenario)
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    if scenario.state.logprobs_chunk_size != (_CHUNK if tokens > _CHUNK else None):
        reasons["logprobs_chunk_size"] = f"SkyRL's SFT trainer takes {_CHUNK} tokens, or all of a shorter row"
    return reasons


_KEEPS = "SkyRL's SFT trainer keeps the model on the device between steps"
SKYRL_SFT = Framework(
    name="skyrl-sft",
    title="SkyRL's SFT trainer",
    source="0.3.0",
    signs=Signs(
        looked_for="main_sft",
        programs=("skyrl.train.main_sft",),
        of_command=lambda words: any(word.lstrip("+~").startswith("micro_train_batch_size_per_gpu=") for word in words),
        of_tree=lambda begins: begins("megatron_config."),
    ),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("skyrl_sft") | megatron_without_effect(_MEGATRON),
    complete=complete,
    check=check_sft,
    complete_of_model=complete_provider,
    compose=compose,
    fixed=FIXED,
    packs=is_packed,
    padding_in_fp8=padding_in_fp8,
    cannot_write=CANNOT_WRITE
    | {
        "offload_parameters": _KEEPS,
        "offload_gradients": _KEEPS,
        "offload_optimizer": _KEEPS,
    },
    without_own_key=frozenset(("allocator", "logprobs_chunk_size")),
    cannot_write_of=cannot_write,
    render=plain_lines,
)
