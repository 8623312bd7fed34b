"""SkyRL with FSDP2, which is its default: the keys of its trainer are those of `skyrl`.

Names and defaults: ``skyrl/train/config/config.py``, and what they do
``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`` (a9564572, main of August 2026). ``fsdp`` and ``fsdp2``
are the same there.
"""

from __future__ import annotations

from typing import Any

from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    RESHARDING,
    check_family,
    check_shards,
    peft_keys,
    take_attention,
    take_checkpointed_layers,
    take_kept,
    take_logprobs,
    take_peft,
    take_resharding,
    take_shards,
    take_types,
    take_ulysses,
    take_units,
)
from memlab.jobs.frameworks.keys import COUNT, LONG_DTYPE, NUMBER, SWITCH, WHOLE, Key, Missing, is_false, is_given
from memlab.jobs.frameworks.reinforcement import note_replaced_values, note_segments, take_rows, take_sequences
from memlab.jobs.frameworks.skyrl import SKYRL

_POLICY = "trainer.policy"
_FSDP = f"{_POLICY}.fsdp_config"
_OF_MEGATRON_ONLY = ("trainer.fused_lm_head_logprob", f"{_POLICY}.model.fake_int4_qat.enabled")
_TRAINER = (
    "architecture",
    "nodes",
    "ranks_per_node",
    "is_checkpointing",
    "expandable_segments",
    "is_colocated",
    "micro_batch_size",
    "tokens_per_rank",
    "removes_padding",
    "prompts",
    "responses_per_prompt",
    "prompt_length",
    "input_length",
    "response_length",
    "strategy",
)

KEYS = (
    *(key for key in SKYRL.keys if key.field in _TRAINER),
    Key(f"{_FSDP}.cpu_offload", "fsdp_cpu_offload", SWITCH, False),
    Key(f"{_FSDP}.reshard_after_forward", "reshard_after_forward", RESHARDING, "all"),
    Key(f"{_FSDP}.fsdp_size", "ranks_of_shards", WHOLE, -1),
    Key(f"{_FSDP}.mixed_precision.param_dtype", "compute", LONG_DTYPE, "bf16"),
    Key(f"{_FSDP}.mixed_precision.reduce_dtype", "reduced", LONG_DTYPE, "fp32"),
    Key(f"{_POLICY}.sequence_parallel_size", "ulysses", COUNT, 1),
    Key(f"{_POLICY}.optimizer_config.offload_after_step", "leaves_after_step", SWITCH, True),
    *peft_keys(f"{_POLICY}.model.lora"),
    Key(f"{_POLICY}.model.lora.dropout", "lora_dropout", NUMBER, 0.0),
)
FRAMEWORK_MISSING = (
    Missing("trainer.algorithm.use_entropy_loss", "more", "the entropy's gradient keeps the probabilities"),
    Missing("trainer.critic.model.path", "more", "a critic is trained too, with an optimizer of its own", is_given),
    Missing("trainer.flash_attn", "either", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.remove_microbatch_padding", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.use_sample_packing", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.gradient_checkpointing_use_reentrant", "either", "reentrant checkpoints free in another order"),
    Missing(f"{_POLICY}.use_torch_compile", "either", "the entropy's functions are compiled"),
    Missing(f"{_POLICY}.language_model_only", "less", "the part for images is left out"),
    Missing(f"{_POLICY}.inference_only_init", "less", "the policy is not trained"),
)


def chooses_fsdp(values: dict[str, Any]) -> bool:
    """Whether a job trains with FSDP2, which SkyRL does unless told otherwise."""
    return (values.get("trainer.strategy") or "fsdp") in ("fsdp", "fsdp2")


def complete(reading: Reading) -> None:
    """Derives ranks, types, shards, what leaves the device, and rows."""
    values = reading.values
    del values["strategy"]
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    del values["nodes"], values["ranks_per_node"]
    note_replaced_values(reading, f"{_POLICY}.model_config_kwargs")
    # ``HFModelWrapper`` has fp32 parameters, unless the policy only generates.
    take_types(reading, shards="fp32", compute=values.pop("compute"), reduced=values.pop("reduced"))
    if not values["fsdp_cpu_offload"]:
        take_kept(reading, trains_all=values["lora_rank"] is None, is_torch_adam=True)
    take_peft(reading, f"{_POLICY}.model.lora.rank")
    take_shards(reading, f"{_FSDP}.fsdp_size")
    take_resharding(reading)
    take_ulysses(reading)
    moves = values.pop("is_colocated") and not values["fsdp_cpu_offload"]
    values["offload_parameters"] = values["offload_gradients"] = moves
    values["offload_optimizer"] = values.pop("leaves_after_step") and moves
    if values["expandable_segments"]:
        note_segments(reading, "trainer.use_expandable_segments")
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)
    take_attention(reading, f"{_POLICY}.model_config_kwargs.attn_implementation")
    take_logprobs(reading, "trainer.algorithm.policy_loss_type", "cross_entropy")  # of whole rows of the batch
    take_units(reading, "input")
    _take_rows(reading)
    reading.warnings.append(
        "memlab predicts the training step of this job, and neither its weight sync nor its log-probabilities"
    )


def check(reading: Reading) -> None:
    """Checks the groups of shards, and that the job asks for nothing that SkyRL has with Megatron only.

    See ``TrainerConfig.__post_init__`` in ``skyrl/train/config/config.py``.

    Raises:
        CannotStartError: If SkyRL or torch refuses the job.
    """
    check_shards(reading)
    for key in _OF_MEGATRON_ONLY:
        if reading.get(key):
            raise CannotStartError(
                f"{key} is true, must be false unless trainer.strategy is megatron, by a rule of SkyRL: change one of "
                "them",
                "strategy",
            )


def _take_rows(reading: Reading) -> None:
    values = reading.values
    prompt = values.pop("prompt_length")
    longest = (values.pop("input_length") or prompt) + values.pop("response_length")
    sequences = values.pop("prompts") * values.pop("responses_per_prompt")
    tokens, removes_padding = values.pop("tokens_per_rank"), values.pop("removes_padding")
    if tokens > 0:
        take_rows(reading, "trainer.max_tokens_per_microbatch", tokens, longest, sequences)
    else:
        key = "trainer.micro_train_batch_size_per_gpu" if removes_padding else None
        take_sequences(reading, longest, sequences, packed_by=key)


SKYRL_FSDP = Framework(
    name="skyrl-fsdp",
    title="SkyRL with FSDP2",
    source="main of August 2026",
    signs=Signs(looked_for="trainer.strategy=fsdp"),
    style="overrides",
    keys=KEYS,
    missing=FRAMEWORK_MISSING,
    without_effect=SKYRL.without_effect | SKYRL.names(),
    complete=complete,
    complete_of_model=check_family,
    check=check,
    fixed={"engine": "fsdp2", "loss": "cross_entropy"},
)
"""Read only: `memlab.jobs.frameworks.registry` says when."""
