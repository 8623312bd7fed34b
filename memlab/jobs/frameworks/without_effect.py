"""Keys that do not change the memory of a training step: every one was read, in the version that its list names.

A list is a text in ``keys_without_effect/``. Its first line names the version and the files that the keys are from.
After it, each line has one key; a line that starts with ``#`` is a heading, and says why the keys below it have no
effect where this is not plain. A key of which the framework itself does not read the parts, such as the arguments of
an inference engine, is an open mapping: ``key.*``, or ``prefix_*`` of a flag, under a heading that says who reads them.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

_MARKS_OF_AN_OBJECT = ("_target_", "_call_", "_partial_", "_args_")
"""Beside the fields of an object, Hydra and Megatron-Bridge write by which class it is made, and how."""
_LISTS = Path(__file__).with_name("keys_without_effect")


def keys_without_effect(name: str, prefix: str = "") -> frozenset[str]:
    """Returns the keys of a list.

    Args:
        name: Of the list's file, without its suffix.
        prefix: Under which the framework passes the keys on, such as ``model``.
    """
    lines = (_LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    keys = (line for line in lines if line and not line.startswith("#"))
    return frozenset(f"{prefix}.{key}" if prefix else key for key in keys)


def has_no_effect(key: str, keys: frozenset[str] | tuple[str, ...]) -> bool:
    """Whether a key is in a list, or in an open mapping of it."""
    if isinstance(keys, tuple):  # patterns of the frameworks whose keys are not listed yet
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in keys)
    starts = [key[: index + 1] for index, letter in enumerate(key) if letter in "._"]
    if key.rpartition(".")[2] in _MARKS_OF_AN_OBJECT:
        return True
    return key in keys or any(f"{start}*" in keys for start in starts)


NEMO_RL = (
    "grpo.*", "sft.*", "dpo.*", "rm.*", "distillation.*", "loss_fn.*", "checkpointing.*", "data.*", "env.*",
    "logger.*", "value.*", "teacher.*", "ppo.*", "policy.tokenizer*", "policy.generation*", "policy.dtensor_cfg*",
    "policy.optimizer*", "policy.scheduler*", "policy.logprob*", "policy.max_grad_norm", "policy.make_sequence*",
    "policy.*.logprob_mb_tokens", "policy.*.algorithm", "policy.*.sequence_length_round",
    "policy.hf_config_overrides*", "policy.refit*", "policy.offload_optimizer_for_logprob", "policy.reward_model*",
    "policy.draft*", "policy.router_replay*", "policy.worker_extension*", "cluster.*",
    "policy.megatron_cfg.empty_unused*", "policy.megatron_cfg.clear_memory*", "policy.megatron_cfg.force_*",
    "policy.megatron_cfg.converter_type", "policy.megatron_cfg.pipeline_dtype",
    "policy.megatron_cfg.sequence_parallel", "policy.megatron_cfg.moe_*", "policy.megatron_cfg.mtp_*",
    "policy.megatron_cfg.bias_*", "policy.megatron_cfg.layernorm_*", "policy.megatron_cfg.track_*",
    "policy.megatron_cfg.scheduler*", "policy.megatron_cfg.optimizer.*",
    "policy.megatron_cfg.distributed_data_parallel_config.*", "policy.megatron_cfg.env_vars*",
    "policy.megatron_cfg.fp8_cfg*", "policy.megatron_cfg.peft*", "policy.megatron_cfg.checkpoint*",
    "policy.megatron_cfg.train_iters", "policy.megatron_cfg.linear_ce*", "policy.megatron_cfg.fused_linear*",
    "policy.megatron_cfg.gradient_accumulation_fusion", "policy.megatron_cfg.use_*",
    "policy.megatron_cfg.cuda_graph_*", "_override_*", "*_target_",
)  # fmt: skip
