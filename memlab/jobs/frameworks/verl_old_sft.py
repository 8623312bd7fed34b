"""verl's earlier trainer for fine-tuning, ``verl.trainer.fsdp_sft_trainer``: read, and not predicted.

Its loss is its own. Names and defaults: ``verl/trainer/config/sft_trainer.yaml`` (0.6.1); verl 0.9 has no such trainer.
"""

from __future__ import annotations

from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import block, check_family, check_shards
from memlab.jobs.frameworks.keys import COUNT, SWITCH, TEXT, Key, Missing
from memlab.jobs.frameworks.reinforcement import take_sequences
from memlab.jobs.frameworks.verl_checkout import release_around, trains_without_fsdp2
from memlab.jobs.frameworks.verl_fsdp import complete_engine, engine_keys
from memlab.jobs.frameworks.verl_sft import VERL_SFT
from memlab.jobs.frameworks.without_effect import keys_without_effect

_PREFIXES = ("model.fsdp_config", "optim", "model")
_PADDING, _STRATEGY = "use_remove_padding", "model.strategy"
_OF_ROWS = ("micro_batch_size", "sequences", "longest")
KEYS = (
    *(key for key in VERL_SFT.keys if key.field in ("nodes", "ranks_per_node", *_OF_ROWS)),
    Key("model.partial_pretrain", "architecture", TEXT),
    Key(_STRATEGY, "strategy", TEXT, "fsdp2"),
    Key("model.fsdp_config.cpu_offload", "fsdp_cpu_offload", SWITCH, False),
    Key(_PADDING, "removes_padding", SWITCH, False),
    Key("ulysses_sequence_parallel_size", "ulysses", COUNT, 1),
    *engine_keys(*_PREFIXES),
)


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards, what leaves the device, and rows."""
    values = reading.values
    values.setdefault("world_size", values.pop("nodes") * values.pop("ranks_per_node"))
    reading.known.add("config_name")
    if _STRATEGY not in reading.entries.by_key and trains_without_fsdp2(reading.started):
        reading.take(_STRATEGY, "strategy", "fsdp")
    if (release := release_around(reading.started)) is not None:
        reading.warnings.append(
            f"{release[1]}: memlab takes the values of its configuration, and does not see what its trainer does "
            "otherwise than that of 0.6.1"
        )
    complete_engine(reading, *_PREFIXES, strategy=_STRATEGY, loss="loss_fn")
    block(reading, "model.partial_pretrain", "the trainer fsdp_sft_trainer, with a loss of its own", of="engine")
    # Padding leaves only beside Ulysses: ``use_sp`` in _compute_loss_and_backward.
    is_packed = bool(values.pop("removes_padding") and (values.get("context_parallel_size") or 1) > 1)
    key = "data.micro_batch_size_per_gpu" if is_packed else None
    take_sequences(reading, values.pop("longest"), values.pop("sequences"), packed_by=key)
    if not is_packed:
        reading.miss(_PADDING, "more", "rows are padded to data.max_length, and attention then has a mask")


VERL_OLD_SFT = Framework(
    name="verl-sft-old",
    title="verl's earlier SFT trainer",
    source="0.6.1",
    signs=Signs(looked_for="fsdp_sft_trainer"),
    style="overrides",
    keys=KEYS,
    missing=(Missing("model.use_liger", "less", "Liger's norms and MLPs keep less"),),
    without_effect=VERL_SFT.without_effect | keys_without_effect("verl_old_sft"),
    complete=complete,
    complete_of_model=check_family,
    check=check_shards,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
)
