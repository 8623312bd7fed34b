"""Keys that do not change the memory of a training step: every one was read, in the version that its list names.

A list is a text in ``keys_without_effect/``. Its first line names the version and the files that the keys are from.
After it, each line has one key; a line that starts with ``#`` is a heading, and says why the keys below it have no
effect where this is not plain. A key of which the framework itself does not read the parts, such as the arguments of
an inference engine, is an open mapping: ``key.*``, under a heading that says who reads them.
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
    parents = [key[:index] for index, letter in enumerate(key) if letter == "."]
    if key.rpartition(".")[2] in _MARKS_OF_AN_OBJECT:
        return True
    return key in keys or any(f"{parent}.*" in keys for parent in parents)


MEGATRON_LM = (
    "lr*", "min_lr", "weight_decay*", "start_weight_decay", "end_weight_decay", "adam_*", "sgd_*", "clip_grad",
    "train_*", "eval_*", "log_*", "save*", "load*", "exit_*", "tensorboard*", "wandb*", "one_logger*", "data_*",
    "*_data_path", "split", "tokenizer*", "vocab_file", "merge_file", "mock_data", "num_workers", "seed", "init_*",
    "no_save_*", "no_load_*", "no_initialization", "finetune", "ckpt_*", "dist_ckpt_*", "async_save",
    "use_mcore_models", "use_flash_attn", "nproc_per_node", "nnodes", "node_rank", "master_*", "rdzv_*",
    "distributed_backend", "distributed_timeout_minutes", "timing_*", "swiglu", "sequence_parallel",
    "group_query_attention", "disable_bias_linear", "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32",
    "rotary_*", "use_rotary_position_embeddings", "max_position_embeddings", "encoder_*", "norm_epsilon",
    "no_masked_softmax_fusion", "no_bias_*_fusion", "masked_softmax_fusion", "bias_*_fusion", "apply_*layer*",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_score_function",
    "moe_router_*", "moe_per_layer_logging", "no_gradient_accumulation_fusion", "ddp_average_in_collective",
    "use_checkpoint_*", "override_opt*", "reset_*", "eod_*", "*create_attention_mask*", "no_mmap*",
    "enable_experimental", "profile*", "use_pytorch_profiler", "record_memory_history", "memory_snapshot_path",
    "manual_gc_*", "te_rng_tracker", "tee", "redirects", "no_check_for_nan*", "check_for_*", "rampup_*",
    "auto_detect*", "non_persistent*", "overlap_p2p*", "no_overlap_p2p*", "align_*", "no_align*", "rank", "local_rank",
    "data_parallel_size", "consumed_*", "iteration", "start_time", "use_dist_ckpt*", "perform_initialization",
    "app_tag*", "inprocess*", "no_async*", "vocab_extra_ids", "ffn_hidden_size", "no_ckpt_*",
    "use_persistent_ckpt_worker", "logging_level",
)  # fmt: skip
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
SLIME = (
    "rollout_*", "sglang_*", "router_*", "n_samples*", "num_rollout", "num_epoch", "prompt_data", "input_key",
    "label_key", "metadata_key", "apply_chat_template*", "rm_*", "custom_*", "reward_*", "group_rm", "balance_data",
    "over_sampling*", "dynamic_sampling*", "advantage_*", "use_kl_loss", "kl_*", "entropy_*", "eps_*", "use_tis",
    "tis_*", "ref_*", "loss_*", "loss_type", "use_wandb", "use_*routing*", "debug_*", "update_weight*", "use_fault*",
    "hf_*", "critic_*", "num_critic*", "log_probs_max*", "max_seq_len", "use_rollout*", "calculate_*", "normalize_*",
    "gamma", "lambd", "keep_*", "buffer_*", "partial_*", "mask_*", "use_slime*", "num_steps_per_rollout", "tool_key",
    "multimodal*", "no_offload*", "offload_rollout", "num_gpus_per_node", "runtime_env*", "working_dir", "address",
    "agent_*", "colocate*", "train_env_vars", "megatron_to_hf_mode", "allgather_cp", "qkv_format", "spec", "lr_*",
)  # fmt: skip
MS_SWIFT = (
    "dataset*", "val_dataset*", "load_from_cache*", "split_dataset*", "max_epochs", "num_train_epochs", "output_dir",
    "packing", "streaming", "lora_*", "target_*", "modules_to_save", "adapter*", "mcore_*", "vllm_*", "reward_*",
    "num_generations*", "generation_*", "steps_per_*", "temperature", "top_*", "beta", "epsilon*", "loss_type",
    "system", "template*", "truncation*", "report_to", "logging_*", "dataloader_*", "use_hf", "hub_*", "save_*",
    "ref_*", "sleep_level", "offload_bridge", "importance_*", "dynamic_sample", "max_resample*", "overlong*",
    "ddp_timeout", "model_*", "torch_dtype", "max_shard*", "add_version", "use_vllm", "router_replay*", "padding_*",
    "agent_template", "loss_scale", "enable_*", "check_model", "task_type", "num_labels", "cached_*", "custom_*",
    "external_*", "lazy_*", "strict", "shuffle*", "columns", "moe_shared_expert_overlap", "cp_partition*", "vit_*",
    "aligner_*", "muon_*", "fp8_*", "exist_ok", "max_pixels", "desirable*", "undesirable*", "rpo_*", "label_smoothing",
    "f_div*", "calculate_*", "tau_*", "kl_*", "soft_*", "cosine_*", "scale_rewards", "completion*", "multi_turn*",
    "max_turns", "group_by_length", "response_prefix",
)  # fmt: skip
