"""What the readers of jobs with FSDP have in common: what FSDP2 keeps of a model, and what memlab has of it."""

from __future__ import annotations

from typing import Any

from memlab.config.architectures import Architecture
from memlab.config.scenario import FAMILIES_OF_FSDP2
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import COUNT, SWITCH, Conversion


def _read_resharding(value: Any) -> Any:
    if isinstance(value, int) and value not in (True, False):
        return COUNT.read(value)
    return "all" if SWITCH.read(value) else "none"


RESHARDING = Conversion(_read_resharding, lambda value: {"all": True, "none": False}.get(value, value))
"""``reshard_after_forward`` of torch's `fully_shard`: whether layers are sharded again, or over how many ranks."""


def take_resharding(reading: Reading) -> None:
    """Takes the number of ranks over which layers are sharded again, where the key has one."""
    value = reading.values["reshard_after_forward"]
    if isinstance(value, int):
        reading.values |= {"reshard_after_forward": "all", "reshard_after_forward_ranks": value}


def take_shards(reading: Reading, key: str) -> None:
    """Takes groups of ranks that each have all shards (HSDP), from the number of ranks in a group; -1 is all."""
    ranks, shards = reading.values["world_size"], reading.values.pop("ranks_of_shards")
    if 0 < shards < ranks:
        reading.take(key, "dp_replicate_size", ranks // shards)


def note_packing(reading: Reading, key: str) -> None:
    """Notes what attention needs where sequences without padding share a row, as `take_rows` and others pack them."""
    if reading.values.pop("packed_sequences", None):
        reading.miss(key, "more", "attention copies and counts the sequences of a row")


def block(reading: Reading, key: str, what: str) -> None:
    """Notes that memlab does not have what a key asks for."""
    entry = reading.entries.by_key.get(key)
    reading.known.add(key)
    place = "" if entry is None else f" {entry.value} ({entry.place})"
    reading.blocked.append(f"{key}{place}: {what}")


def lacks_family(reading: Reading, architecture: Architecture) -> bool:
    """Whether the engine does not build a model's family, which is then noted."""
    if architecture.family in FAMILIES_OF_FSDP2:
        return False
    reading.lacks.append(f"the family {architecture.family} under FSDP2")
    return True


def take_types(reading: Reading, *, shards: str, compute: str, reduced: str) -> None:
    """Takes the types of shards, of what layers compute in, and of the gradients' reduction."""
    values = reading.values
    values["dtype"] = "fp32" if compute == "fp32" else "bf16"
    values["fp32_sharded_params"] = shards == "fp32" and compute != "fp32"
    values["grad_reduce_in_bf16"] = reduced != "fp32"


def take_kept(reading: Reading, *, trains_all: bool, is_torch_adam: bool) -> None:
    """Takes what FSDP2 keeps of each parameter: its shard, and of what torch's Adam trains three more in its type."""
    shard = 4 if reading.values["fp32_sharded_params"] or reading.values["dtype"] == "fp32" else 2
    reading.kept_of_parameter["parameters"] = shard
    if trains_all:
        reading.kept_of_parameter["gradients"] = shard
        if is_torch_adam:
            reading.kept_of_parameter["optimizer state"] = 2 * shard


def take_checkpointed_layers(reading: Reading) -> None:
    """Takes checkpoints of whole layers, each by itself, as transformers makes them."""
    reading.values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
