"""What the readers of jobs with FSDP have in common: what FSDP2 keeps of a model, and what memlab has of it."""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.config.scenario import FAMILIES_OF_FSDP2
from memlab.jobs.frameworks.framework import Reading


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
