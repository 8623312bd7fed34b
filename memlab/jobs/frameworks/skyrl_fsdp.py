"""SkyRL with FSDP2, which is its default: the keys of its trainer are those of `skyrl`.

Names and defaults: ``skyrl/train/config/config.py``, and what they do
``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`` (a9564572, main of August 2026). ``fsdp`` and ``fsdp2``
are the same there.
"""

from __future__ import annotations

from typing import Any

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.rollout import ReferencePass
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.validation import is_whole_number, shortened
from memlab.jobs.frameworks.framework import CannotStartError, Framework, Reading, Signs
from memlab.jobs.frameworks.fsdp2 import (
    FLASH,
    OF_SEVERAL_KEYS,
    ONLY_OF_AUTOMODEL,
    RESHARDING,
    Own,
    attention_key,
    check_family,
    check_shards,
    composed_of_fsdp2,
    of_other_values,
    own_checkpoints,
    own_transformers,
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
from memlab.jobs.frameworks.lines import plain_lines
from memlab.jobs.frameworks.reinforcement import (
    composed,
    is_packed,
    note_other_reference,
    note_replaced_values,
    note_segments,
    refuse_program,
    take_rollout,
    take_sequences,
)
from memlab.jobs.frameworks.skyrl import (
    SKYRL,
    WITHOUT_TRAINING,
    compares,
    engine_of,
    freed_by_reference_model,
    longest_row,
    note_program,
    note_reference,
    note_skipped_passes,
    note_steps,
    row_of_pass,
    take_rows_of_budget,
)
from memlab.jobs.frameworks.skyrl import (
    check as check_batches,
)
from memlab.jobs.frameworks.skyrl_checkout import note_checkout

_POLICY = "trainer.policy"
_FSDP = f"{_POLICY}.fsdp_config"
_ENGINE = "generator.inference_engine"
_REFERENCE = {
    "trainer.ref.model.path": (f"{_POLICY}.model.path", "the model", None, None),
    "trainer.ref.sequence_parallel_size": (f"{_POLICY}.sequence_parallel_size", "the parts of a sequence", 1, 1),
    "trainer.ref.fsdp_config.fsdp_size": (f"{_FSDP}.fsdp_size", "the groups of shards", -1, -1),
}
"""What a reference model has of its own (``FSDPRefWorkerBase`` in workers/fsdp/fsdp_worker.py)."""
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
    "log_prob_micro_batch_size",
    *("engine_share", "engine_ranks", "engine_stages", "engine_data_ranks", "bucket"),
)


def engine_keys(policy: str) -> tuple[Key, ...]:
    """Returns the keys of a worker of FSDP2; `policy` is how they begin, with the dot."""
    fsdp, kwargs = f"{policy}fsdp_config", f"{policy}model_config_kwargs"
    return (
        Key(f"{kwargs}.num_hidden_layers", "num_layers", WHOLE),
        attention_key(f"{kwargs}.attn_implementation"),
        Key(f"{fsdp}.cpu_offload", "fsdp_cpu_offload", SWITCH, False),
        Key(f"{fsdp}.reshard_after_forward", "reshard_after_forward", RESHARDING, "all"),
        Key(f"{fsdp}.fsdp_size", "ranks_of_shards", WHOLE, -1),
        Key(f"{fsdp}.mixed_precision.param_dtype", "compute", LONG_DTYPE, "bf16"),
        Key(f"{fsdp}.mixed_precision.reduce_dtype", "reduced", LONG_DTYPE, "fp32"),
        Key(f"{policy}sequence_parallel_size", "ulysses", COUNT, 1),
        *peft_keys(f"{policy}model.lora"),
        Key(f"{policy}model.lora.dropout", "lora_dropout", NUMBER, 0.0),
    )


KEYS = (
    *(key for key in SKYRL.keys if key.field in _TRAINER),
    *engine_keys(f"{_POLICY}."),
    Key(f"{_POLICY}.optimizer_config.offload_after_step", "leaves_after_step", SWITCH, True),
)
_OF_FORKS_WITH_LIGER = "Liger's norms and MLPs keep less, where a fork loads the model with them"
WRAPPED = "classes of the job's own choice are sharded by themselves"


def wraps_others(value: Any) -> bool:
    """Whether the classes that a job shards by themselves are others than layers (``apply_fsdp2``, a9564572)."""
    names = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return bool(value) and any(not str(name).strip(" '\"").endswith("DecoderLayer") for name in names)


FRAMEWORK_MISSING = (
    *(row for row in SKYRL.missing if row.name.startswith(("generator.", "trainer.fully_async.", "trainer.override_"))),
    Missing("trainer.mtp.enabled", "more", "the inference engine has a draft model too"),
    Missing("trainer.algorithm.use_entropy_loss", "more", "the entropy's gradient keeps the probabilities"),
    *(Missing(f"trainer.{of}use_liger_kernel", "less", _OF_FORKS_WITH_LIGER) for of in ("", "policy.")),
    Missing("trainer.critic.model.path", "more", "a critic is trained too, with an optimizer of its own", is_given),
    Missing("trainer.flash_attn", "either", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.remove_microbatch_padding", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.use_sample_packing", "more", "rows are padded, and attention then has a mask", is_false),
    Missing("trainer.gradient_checkpointing_use_reentrant", "either", "reentrant checkpoints free in another order"),
    Missing(f"{_FSDP}.wrap_policy.transformer_layer_cls_to_wrap", "either", WRAPPED, wraps_others),
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
    refuse_program(reading, WITHOUT_TRAINING)
    note_program(reading)
    note_checkout(reading)
    note_reference(reading)
    del values["strategy"]
    values.setdefault("world_size", values["nodes"] * values["ranks_per_node"])
    per_node = values.pop("ranks_per_node")
    del values["nodes"]
    complete_engine(reading, f"{_POLICY}.", "trainer.algorithm.policy_loss_type", "trainer.logprobs_chunk_size")
    is_colocated = values.pop("is_colocated")
    moves = is_colocated and not values["fsdp_cpu_offload"]
    values["offload_parameters"] = values["offload_gradients"] = moves
    values["offload_optimizer"] = values.pop("leaves_after_step") and moves
    if values["expandable_segments"]:
        note_segments(reading, "trainer.use_expandable_segments")
    if values.pop("is_checkpointing"):
        take_checkpointed_layers(reading)
    longest = longest_row(reading)
    _take_phases(reading, per_node, longest, is_colocated=is_colocated)
    _take_rows(reading, longest)
    note_steps(reading)
    if reading.get("trainer.override_entrypoint"):
        reading.kept_of_parameter.clear()  # by another engine


def complete_engine(reading: Reading, policy: str, loss: str, chunk: str) -> None:
    """Derives types, shards, adapters, attention and what log-probabilities need, from the keys of `engine_keys`.

    Args:
        policy: How the keys begin.
        loss: By which key a difference of the loss is named.
        chunk: The key of how many tokens an entropy has at a time, by which it is named.
    """
    values, kwargs = reading.values, f"{policy}model_config_kwargs"
    note_replaced_values(reading, kwargs)
    # ``HFModelWrapper`` has fp32 parameters, unless the policy only generates.
    take_types(reading, shards="fp32", compute=values.pop("compute"), reduced=values.pop("reduced"))
    take_kept(reading, trains_all=values["lora_rank"] is None, is_torch_adam=True)
    take_peft(reading, f"{policy}model.lora.rank", adapts_experts=False)  # SkyRL 0.3.0 and a9564572 ask for PEFT 0.18.1
    take_shards(reading, f"{policy}fsdp_config.fsdp_size")
    take_resharding(reading)
    take_ulysses(reading)
    take_attention(reading, f"{kwargs}.attn_implementation")
    take_logprobs(reading, loss, "cross_entropy")  # of whole rows of the batch
    # ``_forward_backward_micro`` in workers/worker.py, whatever the loss is.
    reading.miss(chunk, "more", "the entropy of each micro-batch is computed too, a chunk of tokens at a time")
    take_units(reading, "input")


def check(reading: Reading) -> None:
    """Checks the groups of shards, and that the job asks for nothing that SkyRL has with Megatron only.

    See ``TrainerConfig.__post_init__`` in ``skyrl/train/config/config.py``.

    Raises:
        CannotStartError: If SkyRL or torch refuses the job.
    """
    check_shards(reading)
    check_batches(reading)
    for key in _OF_MEGATRON_ONLY:
        if reading.get(key):
            raise CannotStartError(
                f"{key} is true, must be false unless trainer.strategy is megatron, by a rule of SkyRL: change one of "
                "them",
                "strategy",
            )
    chunk = reading.get("trainer.logprobs_chunk_size", default=1024)
    if not is_whole_number(chunk):
        raise CannotStartError(
            f"trainer.logprobs_chunk_size is {shortened(chunk)}, must be a whole number of tokens of at least 1 unless "
            "trainer.strategy is megatron, by a rule of SkyRL: change one of them",
            "strategy",
        )


def _take_phases(reading: Reading, per_node: int, longest: int, *, is_colocated: bool) -> None:
    """Takes what the job does between training steps.

    A reference model has shards of its own in bf16 (``FSDPRefWorkerBase`` in workers/fsdp/fsdp_worker.py), and trades
    places with the policy where both have the same GPUs (``_ensure_on_gpu`` in workers/worker_dispatch.py). Adapters
    are sent as files.
    """
    values, has_adapters = reading.values, reading.values.get("lora_rank") is not None
    tokens, rows, bucket = values["tokens_per_rank"], values.pop("log_prob_micro_batch_size"), values.pop("bucket") or 0
    row, rows = (longest * rows, 1) if values["removes_padding"] else (longest, rows)
    if tokens > 0:
        row, rows = row_of_pass(reading, tokens, longest, values["responses_per_prompt"]), 1
    note_skipped_passes(reading)
    is_together = is_colocated or reading.get("trainer.placement.colocate_policy_ref", default=True)
    has_reference = compares(reading) and is_together
    if has_reference:
        note_other_reference(reading, _REFERENCE)
    values["sends_adapters"] = has_adapters
    of_reference = ReferencePass(
        seq_length=row,
        micro_batch_size=rows,
        is_on_host=reading.get("trainer.ref.fsdp_config.cpu_offload") is True,
        fp32_shards=reading.get("trainer.bf16") is False,
        reshards=reading.get("trainer.ref.fsdp_config.reshard_after_forward") is not False,
        policy_is_away=True,
    )
    take_rollout(
        reading,
        is_colocated=is_colocated,
        ranks_per_node=per_node,
        seq_length=row,
        micro_batch_size=rows,
        bucket_bytes=int(bucket * 2**30) if is_colocated and not has_adapters else 0,
        reference_pass=of_reference if has_reference else None,
        sender="skyrl" if is_colocated else "skyrl_broadcast",
        freed_for_log_probabilities=() if is_colocated else freed_by_reference_model(reading),
        engine=engine_of(reading),
        quantization=f"{_ENGINE}.engine_init_kwargs.quantization",
    )


def _take_rows(reading: Reading, longest: int) -> None:
    values = reading.values
    sequences = values.pop("prompts") * values.pop("responses_per_prompt")
    tokens, removes_padding = values.pop("tokens_per_rank"), values.pop("removes_padding")
    if tokens > 0:
        take_rows_of_budget(reading, tokens, longest, sequences)
    else:
        key = "trainer.micro_train_batch_size_per_gpu" if removes_padding else None
        take_sequences(reading, longest, sequences, packed_by=key)


def compose(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns values by the table's fields, from which `complete` makes the same job."""
    is_away = settings.offload_parameters
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    return (
        composed(scenario, settings)
        | composed_of_fsdp2(scenario, settings, "peft")
        | {
            "strategy": "fsdp",
            "is_colocated": is_away or scenario.state.fsdp_cpu_offload,
            "leaves_after_step": settings.offload_optimizer or not is_away,
            "expandable_segments": scenario.allocator.expandable_segments,
            "tokens_per_rank": tokens if is_packed(scenario) else -1,
            "input_length": None,
        }
    )


def cannot_write(scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
    """Names what SkyRL cannot express of a job."""
    moves = settings.offload_parameters and not scenario.state.fsdp_cpu_offload
    segments = AllocatorSettings(expandable_segments=scenario.allocator.expandable_segments)
    own: Own = {
        "offload_parameters": (moves, "its cpu_offload keeps parameters and optimizer state on the host in any case"),
        "offload_gradients": (moves, "SkyRL offloads gradients where it offloads parameters"),
        "offload_optimizer": (
            settings.offload_optimizer and moves,
            "SkyRL offloads the optimizer state only where it offloads parameters",
        ),
        "allocator": (segments, "set the environment variable PYTORCH_CUDA_ALLOC_CONF"),
    }
    return of_other_values(scenario, settings, own | own_checkpoints(settings, "SkyRL") | own_engine(scenario))


def own_engine(scenario: Scenario) -> Own:
    """Returns what a worker of FSDP2 can have of a job."""
    state = scenario.state
    frees = state.reshard_after_forward != "none"
    loss = "logprobs_flash_attn" if state.attn_implementation == FLASH else "cross_entropy"
    own: Own = {
        "fp32_sharded_params": (scenario.dtype != "fp32", "SkyRL's shards are fp32"),
        "separate_embeddings": ("input", "SkyRL shards the embedding by itself"),
        "reshard_root_after_forward": (frees, "SkyRL's reshard_after_forward decides it"),
        "loss_of_transformers": (loss, "SkyRL computes log-probabilities, with flash-attn's kernel where it attends"),
    }
    return own | own_transformers(scenario, "SkyRL", adapts_experts=False)


_NO_KEY = ("fsdp_version", "use_orig_params", "defer_fsdp_grad_sync", "adam_implementation")
_NONE_AHEAD = ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")
CANNOT_WRITE = (
    ONLY_OF_AUTOMODEL
    | {"model_classes": "SkyRL builds transformers' classes"}
    | dict.fromkeys(_NO_KEY, "SkyRL has no such key")
    | dict.fromkeys(_NONE_AHEAD, "SkyRL gathers no layer ahead")
)
WITHOUT_OWN_KEY = OF_SEVERAL_KEYS.union(
    ("grad_reduce_in_bf16", "cp_comm_type", "allocator", "lora_dropout_position"),
    ("reshard_after_forward_ranks", "dp_replicate_size", "separate_embeddings"),
    ("reshard_root_after_forward", "loss_of_transformers"),
    ("offload_parameters", "offload_gradients", "offload_optimizer"),
)
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
    compose=compose,
    packs=is_packed,
    cannot_write=CANNOT_WRITE | {"offload_optimizer_except_update": "SkyRL loads the optimizer state before the step"},
    cannot_write_of=cannot_write,
    without_own_key=WITHOUT_OWN_KEY,
    render=plain_lines,
)
"""`memlab.jobs.frameworks.registry` says which jobs are its."""
