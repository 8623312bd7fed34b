"""torchtitan's TOML files: FSDP2 over models of its own, of which memlab knows what a rank keeps, and predicts no step.

Names and defaults: ``torchtitan/config/job_config.py`` (0.2.2). Later versions have Python functions in place of TOML
(``config_registry.py``, main of August 2026), which memlab does not read.
"""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.jobs.frameworks.framework import Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import block, take_kept, take_types
from memlab.jobs.frameworks.keys import COUNT, LONG_DTYPE, SWITCH, TEXT, WHOLE, Key
from memlab.jobs.frameworks.without_effect import keys_without_effect

_SIZES_OF_QWEN3 = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
_MODELS = {
    "llama3": {size: f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")},
    "qwen3": {size: f"Qwen/Qwen3-{size}" for size in _SIZES_OF_QWEN3},
}
"""The flavors of models of which Hugging Face has one of the same sizes (``models/*/__init__.py``, 0.2.2)."""
_RANKS = 8
"""Those of ``run_train.sh``."""
_SIZES = (
    "dp_replicate_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)
KEYS = (
    Key("model.name", "model", TEXT, "llama3"),
    Key("model.flavor", "flavor", TEXT, "debugmodel"),
    Key("training.local_batch_size", "micro_batch_size", COUNT, 8),
    Key("training.global_batch_size", "global_batch_size", WHOLE, -1),
    Key("training.seq_len", "seq_length", COUNT, 2048),
    Key("training.dtype", "shards", LONG_DTYPE, "fp32"),
    Key("training.mixed_precision_param", "compute", LONG_DTYPE, "bf16"),
    Key("training.mixed_precision_reduce", "reduced", LONG_DTYPE, "fp32"),
    Key("training.enable_cpu_offload", "fsdp_cpu_offload", SWITCH, False),
    Key("parallelism.data_parallel_replicate_degree", "dp_replicate_size", COUNT, 1),
    Key("parallelism.data_parallel_shard_degree", "ranks_of_shards", WHOLE, -1),
    Key("parallelism.fsdp_reshard_after_forward", "reshard_after_forward", TEXT, "default"),
    Key("parallelism.tensor_parallel_degree", "tensor_model_parallel_size", COUNT, 1),
    Key("parallelism.context_parallel_degree", "context_parallel_size", COUNT, 1),
    Key("parallelism.pipeline_parallel_degree", "pipeline_model_parallel_size", COUNT, 1),
    Key("parallelism.expert_parallel_degree", "expert_model_parallel_size", COUNT, 1),
    Key("activation_checkpoint.mode", "checkpointing", TEXT, "selective"),
    Key("activation_checkpoint.selective_ac_option", "selected", TEXT, "2"),
    Key("optimizer.name", "optimizer", TEXT, "AdamW"),
    Key("optimizer.implementation", "adam_implementation", TEXT, "fused"),
    Key("compile.enable", "is_compiled", SWITCH, False),
)


_OWN = "torchtitan's own {}, whose layers keep other tensors than transformers'"


def complete(reading: Reading) -> None:
    """Notes that the model is torchtitan's own, and takes what a rank keeps of it."""
    values = reading.values
    model, flavor = values.pop("model"), values.pop("flavor")
    block(reading, "model.name", _OWN.format(model), of="model")
    name = _MODELS.get(model, {}).get(flavor)
    if name is not None:
        reading.take("model.flavor", "architecture", name)
    take_types(reading, shards=values.pop("shards"), compute=values.pop("compute"), reduced=values.pop("reduced"))
    if values.get("world_size") is None:
        _take_ranks(reading)
    take_kept(reading, trains_all=True, is_torch_adam=values["optimizer"] in ("Adam", "AdamW"))
    if reading.get("optimizer.early_step_in_backward"):  # each parameter's gradient is freed when it is updated
        reading.kept_of_parameter.pop("gradients", None)


def complete_of_model(_: Reading, architecture: Architecture) -> None:
    """Refuses every model, also one that is given in place of the job's: its layers are torchtitan's own.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"memlab does not have what the job asks for: {_OWN.format(architecture.name)}")


def _take_ranks(reading: Reading) -> None:
    values, shards = reading.values, reading.values["ranks_of_shards"]
    ranks = 1
    for name in _SIZES:
        ranks *= values[name]
    if shards > 0:
        values["world_size"] = ranks * shards
        return
    values["world_size"] = max(ranks, _RANKS)
    reading.assumed.append("the number of ranks")
    reading.warnings.append(
        f"the number of ranks is the launcher's and not in the file, so memlab takes {values['world_size']}: give "
        "--world-size"
    )


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    source="0.2.2",
    signs=Signs(looked_for="training and parallelism in a TOML file"),
    style="overrides",
    keys=KEYS,
    missing=(),
    without_effect=keys_without_effect("torchtitan"),
    complete=complete,
    complete_of_model=complete_of_model,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
)
"""Read only: `memlab.jobs.formats` recognizes it."""
