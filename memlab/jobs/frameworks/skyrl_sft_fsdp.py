"""SkyRL's trainer for supervised fine-tuning with FSDP2: keys of `skyrl_sft` and of `skyrl_fsdp`.

Names and defaults: ``skyrl/train/config/sft_config.py`` (a9564572, main of August 2026). ``build_skyrl_config_for_sft``
leaves checkpoints of all layers and expandable segments as the trainer has them, and no engine shares the GPUs, so that
nothing leaves the device between steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.framework import CannotStartError, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    Own,
    check_shards,
    composed_of_fsdp2,
    of_other_values,
    take_checkpointed_layers,
)
from memlab.jobs.frameworks.keys import Missing, is_false
from memlab.jobs.frameworks.reinforcement import composed, longest_sequence, note_segments, take_sequences
from memlab.jobs.frameworks.skyrl_checkout import note_checkout
from memlab.jobs.frameworks.skyrl_fsdp import (
    CANNOT_WRITE,
    SKYRL_FSDP,
    WRAPPED,
    complete_engine,
    engine_keys,
    own_engine,
    wraps_others,
)
from memlab.jobs.frameworks.skyrl_sft import ASK_LENGTH, SKYRL_SFT

_TRAINER = (
    *("strategy", "architecture", "nodes", "ranks_per_node"),
    *("longest", "sequences", "micro_batch_size", "removes_padding"),
)
_ROWS = "micro_train_batch_size_per_gpu"
KEYS = (*(key for key in SKYRL_SFT.keys if key.field in _TRAINER), *engine_keys(""))
MISSING = (
    Missing("remove_microbatch_padding", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("use_sample_packing", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", "either", WRAPPED, wraps_others),
    Missing("use_torch_compile", "either", "the entropy's functions are compiled"),
)


def chooses_fsdp(values: dict[str, Any]) -> bool:
    """Whether a job trains with FSDP2, which this trainer does only if told."""
    return values.get("strategy") == "fsdp"


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards and rows."""
    values = reading.values
    del values["strategy"]
    nodes, per_node = values.pop("nodes"), values.pop("ranks_per_node")
    values.setdefault("world_size", nodes * per_node)
    complete_engine(reading, "", "loss_fn", "logprobs_chunk_size")
    take_checkpointed_layers(reading)
    values["expandable_segments"] = True
    note_checkout(reading)
    if values["expandable_segments"]:
        note_segments(reading, "use_expandable_segments")
    longest, sequences = values.pop("longest"), values.pop("sequences")
    if longest is None:
        reading.questions.append(ASK_LENGTH)
    take_sequences(reading, longest, sequences, packed_by=_ROWS if values.pop("removes_padding") else None)


def check(reading: Reading) -> None:
    """Checks the groups of shards, and that the job does not pack rows of a budget (``_validate_packing_cfg``).

    Raises:
        CannotStartError: If SkyRL or torch refuses the job.
    """
    check_shards(reading)
    if reading.get("use_sequence_packing"):
        raise CannotStartError(
            "use_sequence_packing is true, must be false unless strategy is megatron, by a rule of SkyRL: change one "
            "of them",
            "strategy",
        )


def packs(scenario: Scenario) -> bool:
    """Whether a micro-batch of sequences of one length makes the scenario's row."""
    return scenario.packed_sequences != 1 and len({*(scenario.sequence_lengths or (1,))}) == 1


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    rows = scenario.packed_sequences or scenario.micro_batch_size
    return (
        composed(scenario, settings)
        | composed_of_fsdp2(scenario, settings, "peft")
        | {
            "strategy": "fsdp",
            "micro_batch_size": rows,
            "sequences": rows * scenario.num_microbatches * scenario.layout.data_parallel_size,
            "longest": longest_sequence(scenario),
            "removes_padding": scenario.packed_sequences is not None or rows == 1,
        }
    )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what this trainer cannot express of a job."""
    whole = "SkyRL's SFT trainer checkpoints all layers, each by itself"
    keeps = "SkyRL's SFT trainer keeps the model on the device between steps"
    own: Own = {
        "recompute_granularity": ("full", whole),
        "recompute_method": ("uniform", whole),
        "recompute_num_layers": (1, whole),
        "selective_ac": (False, whole),
        "checkpoint_every": (None, whole),
        "allocator": (AllocatorSettings(expandable_segments=True), "SkyRL's SFT trainer has expandable segments"),
        **{f"offload_{group}": (False, keeps) for group in ("parameters", "gradients", "optimizer")},
    }
    return of_other_values(scenario, settings, own | own_engine(scenario))


SKYRL_SFT_FSDP = replace(
    SKYRL_FSDP,
    name="skyrl-sft-fsdp",
    title="SkyRL's SFT trainer with FSDP2",
    signs=Signs(looked_for="strategy=fsdp"),
    keys=KEYS,
    missing=MISSING,
    without_effect=SKYRL_SFT.without_effect | SKYRL_SFT.names(),
    complete=complete,
    check=check,
    compose=compose,
    packs=packs,
    cannot_write=CANNOT_WRITE
    | {"offload_optimizer_except_update": "SkyRL's SFT trainer keeps the model on the device between steps"},
    cannot_write_of=cannot_write,
)
"""`memlab.jobs.frameworks.registry` says which jobs are its."""
