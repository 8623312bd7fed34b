"""verl's trainer for supervised fine-tuning with Megatron: overrides of ``verl.trainer.sft_trainer``, or ``.hydra/``.

Names and defaults: ``verl/trainer/config/sft_trainer_engine.yaml`` (0.9.1); `verl_engine` has those of the engine.
"""

from __future__ import annotations

from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.jobs.frameworks.balanced_rows import take_rows_of_verl
from memlab.jobs.frameworks.bridge_keys import complete_provider
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.keys import COUNT, SWITCH, TEXT, WHOLE, Key, Missing
from memlab.jobs.frameworks.lines import hydra_lines
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_padded_rows,
    of_any_length,
    take_sequences,
)
from memlab.jobs.frameworks.verl_checkout import VERSIONS, has_earlier_configurations, version_around
from memlab.jobs.frameworks.verl_engine import (
    CANNOT_WRITE,
    FIXED,
    cannot_write,
    complete_engine,
    engine_keys,
    engine_missing,
    engine_without_effect,
    padding_in_fp8,
)
from memlab.jobs.frameworks.verl_rules import check_megatron
from memlab.jobs.frameworks.without_effect import keys_without_effect

_PREFIXES = ("engine", "optim", "model")
KEYS = (
    *engine_keys(*_PREFIXES),
    Key("engine.strategy", "engine", TEXT, "fsdp"),
    Key("trainer.nnodes", "nodes", WHOLE, 1),
    Key("trainer.n_gpus_per_node", "ranks_per_node", WHOLE, 1),
    # torchrun starts the ranks; trainer's own sizes are read under Ray.
    Key("nnodes", "nodes", COUNT),
    Key("nproc_per_node", "ranks_per_node", COUNT),
    Key("data.use_dynamic_bsz", "is_dynamic", SWITCH, True),
    Key("data.max_token_len_per_gpu", "tokens_per_rank", COUNT, 8192),
    Key("data.micro_batch_size_per_gpu", "micro_batch_size", COUNT, 4),
    Key("data.train_batch_size", "sequences", COUNT, 256),
    Key("data.max_length", "longest", COUNT, 1024),
)
FRAMEWORK_MISSING = (
    *engine_missing(*_PREFIXES),
    Missing(
        "data.pad_mode", "more", "rows are padded to data.max_length", lambda value: value not in (None, "no_padding")
    ),
)

OF_OLD_TRAINER = ("model.partial_pretrain", "use_remove_padding", "ulysses_sequence_parallel_size")
"""Keys that only the earlier trainer reads, ``verl.trainer.fsdp_sft_trainer``."""


def chooses_old_trainer(values: dict[str, Any]) -> bool:
    """Whether a job has keys of the earlier trainer."""
    return not values.keys().isdisjoint(OF_OLD_TRAINER)


def complete(reading: Reading) -> None:
    """Derives ranks, workload and gradients."""
    values = reading.values
    reading.known.add("config_name")
    engine = values.pop("engine")
    if engine != "megatron":
        reading.blocked["job"].append(
            f"engine {engine}: memlab predicts this framework's jobs with Megatron only (engine=megatron)"
        )
    values.setdefault("world_size", values.pop("nodes") * values.pop("ranks_per_node"))
    complete_engine(reading, *_PREFIXES)
    if values["is_dynamic"] and not values["removes_padding"]:
        note_padded_rows(reading, "model.use_remove_padding")
    take_rows_of_trainer(reading)


def take_rows_of_trainer(reading: Reading) -> None:
    """Takes rows on a budget of tokens, or so many sequences, of a job with its ranks and what its engine does."""
    values = reading.values
    longest, sequences, tokens = values.pop("longest"), values.pop("sequences"), values.pop("tokens_per_rank")
    removes_padding = values.pop("removes_padding")
    if values.pop("is_dynamic"):
        take_rows_of_verl(reading, "data.max_token_len_per_gpu", tokens, longest, sequences)
    else:
        key = "data.micro_batch_size_per_gpu" if removes_padding else None
        take_sequences(reading, longest, sequences, packed_by=key)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_row = is_packed(scenario)
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    return of_any_length(composed(scenario, settings)) | {
        "engine": "megatron",
        "tokens_per_rank": tokens if is_row else 8192,
        "micro_batch_size": 4 if is_row else scenario.micro_batch_size,
    }


VERL_SFT = Framework(
    name="verl-sft",
    title="verl's SFT trainer",
    source="0.9.1",
    signs=Signs(
        looked_for="sft_trainer",
        programs=("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray", "verl.trainer.fsdp_sft_trainer"),
        of_tree=lambda begins: begins("engine.") and begins("optim."),
    ),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=keys_without_effect("verl_sft") | engine_without_effect(*_PREFIXES),
    complete=complete,
    check=lambda reading: check_megatron(reading, *_PREFIXES[:2]),
    complete_of_model=complete_provider,
    compose=compose,
    fixed=FIXED,
    packs=is_packed,
    padding_in_fp8=padding_in_fp8,
    cannot_write=CANNOT_WRITE | {"allocator": "set the environment variable PYTORCH_CUDA_ALLOC_CONF"},
    without_own_key=frozenset(("offload_gradients",)),
    cannot_write_of=cannot_write,
    render=hydra_lines,
    configurations={"sft_trainer_engine": {}},
    folder_of_configurations="verl/trainer/config",
    has_earlier_configurations=has_earlier_configurations,
    versions=VERSIONS,
    version_around=version_around,
)
