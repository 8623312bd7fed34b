"""verl's trainer for supervised fine-tuning with FSDP, its default: keys of `verl_sft` and of `verl_fsdp`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.framework import Reading, Signs
from memlab.jobs.frameworks.fsdp2 import check_shards
from memlab.jobs.frameworks.keys import TEXT, Key
from memlab.jobs.frameworks.reinforcement import is_packed
from memlab.jobs.frameworks.verl_fsdp import (
    CANNOT_WRITE,
    VERL_FSDP,
    cannot_write,
    complete_engine,
    composed_of_engine,
    engine_keys,
    engine_missing,
    take_sync_of_gradients,
)
from memlab.jobs.frameworks.verl_sft import VERL_SFT, chooses_old_trainer, take_rows_of_trainer
from memlab.jobs.frameworks.without_effect import keys_without_effect

_PREFIXES = ("engine", "optim", "model")
_TRAINER = (
    *("nodes", "ranks_per_node", "is_dynamic", "tokens_per_rank", "micro_batch_size", "sequences", "longest"),
    "allocator",
)
KEYS = (
    *(key for key in VERL_SFT.keys if key.field in _TRAINER),
    Key("engine.strategy", "strategy", TEXT, "fsdp"),
    *engine_keys(*_PREFIXES),
)


def chooses_fsdp(values: dict[str, Any]) -> bool:
    """Whether a job trains with FSDP, as verl does where no key says else."""
    engine = values.get("engine.strategy") or values.get("engine")
    return (engine or "fsdp") in ("fsdp", "fsdp2", "fsdp_turbo") and not chooses_old_trainer(values)


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards, what leaves the device, and rows."""
    values = reading.values
    reading.known |= {"engine", "config_name"}
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    complete_engine(reading, *_PREFIXES, strategy="engine.strategy", loss="loss_fn")
    complete_trainer(reading)
    take_sync_of_gradients(reading, "engine")


def complete_trainer(reading: Reading) -> None:
    """Derives rows, of a job with its ranks and what its engine does."""
    del reading.values["nodes"], reading.values["ranks_per_node"]
    take_rows_of_trainer(reading)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    return composed_of_engine(scenario, settings) | {
        "tokens_per_rank": scenario.seq_length // scenario.layout.context_parallel_size if is_row else 8192,
        "micro_batch_size": 4 if is_row else scenario.micro_batch_size,
    }


VERL_SFT_FSDP = replace(
    VERL_FSDP,
    name="verl-sft-fsdp",
    title="verl's SFT trainer with FSDP",
    signs=Signs(looked_for="engine=fsdp"),
    keys=KEYS,
    missing=(*engine_missing("engine", "model"), *(row for row in VERL_SFT.missing if row.name.startswith("data."))),
    without_effect=VERL_SFT.without_effect | keys_without_effect("verl_fsdp"),
    complete=complete,
    check=check_shards,
    compose=compose,
    cannot_write=CANNOT_WRITE | {"allocator": "set the environment variable PYTORCH_CUDA_ALLOC_CONF"},
    cannot_write_of=cannot_write,
)
"""`memlab.jobs.frameworks.registry` says which jobs are its."""
