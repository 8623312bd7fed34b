"""Small jobs of every framework, written by hand: each field that memlab reads from them is the one that they mean."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from memlab.cli import build_parser, main
from memlab.commands.shared.asked_step import asked_step
from memlab.config.layout import Layout
from memlab.config.model_restrictions import checkpoints_moe_layers
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import candidates
from memlab.jobs import yaml_tree
from memlab.jobs.bounds import BOUNDS
from memlab.jobs.frameworks.keys import BACKEND
from memlab.jobs.frameworks.lines import hydra_lines, plain_lines, yaml_lines
from memlab.jobs.frameworks.registry import TABLES
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.units import format_bytes
from memlab.views.text.job import job_table

QWEN = """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention
--num-query-groups 4 --kv-channels 128 --vocab-size 151936 --make-vocab-size-divisible-by 64 --normalization RMSNorm
--swiglu --disable-bias-linear --position-embedding-type rope --qk-layernorm --untie-embeddings-and-output-weights
--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall
--moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32
--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion
--no-create-attention-mask-in-dataloader --bf16""".replace("\n", " ")
PHI = """--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17920 --num-attention-heads 40 --group-query-attention
--num-query-groups 10 --kv-channels 128 --vocab-size 100352 --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--no-gradient-accumulation-fusion
--no-create-attention-mask-in-dataloader --bf16""".replace("\n", " ")
ACTOR = "actor_rollout_ref.actor"
VERL = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B {ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=True "
MEGATRON = "trainer.policy.megatron_config"
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B "
SLIME = "python3 train.py --hf-checkpoint /root/Qwen3-30B-A3B --attention-dropout 0.0 --hidden-dropout 0.0 "
NEMO = """
policy:
  model_name: Qwen/Qwen3-30B-A3B
  megatron_cfg:
    enabled: true
"""
BRIDGE = """
model:
  _target_: megatron.bridge.models.qwen.Qwen3MoEModelProvider
  num_layers: 48
  hidden_size: 2048
  ffn_hidden_size: 6144
  num_attention_heads: 32
  num_query_groups: 4
  kv_channels: 128
  vocab_size: 151936
  num_moe_experts: 128
  moe_router_topk: 8
  moe_ffn_hidden_size: 768
  qk_layernorm: true
  moe_router_dtype: fp32
  seq_length: 4096
"""
REMEDY = {"checkpoint_input_remedy": "release_storage"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOVED = {"offload_parameters": True, "offload_gradients": True, "offload_optimizer": True}

# Framework, name of the file, its text, what differs from the default: of the scenario, the layout, the state, settings.
JOBS: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "megatron-lm", "run.sh", f"torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py {QWEN} --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --no-rope-fusion",
        {"gradient_accumulation_fusion": False, "architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "data_parallel_size": 8, "num_microbatches": 8, **FULL},
    ),
    (
        "megatron-lm", "run.sh", f"GPUS=${{GPUS:-4}}\nARGS=(\n  {PHI}\n  --tensor-model-parallel-size $((GPUS / 2)) --sequence-parallel # both\n)\ntorchrun --nproc_per_node=$GPUS pretrain_gpt.py ${{ARGS[@]}} --seq-length 2048 --micro-batch-size 2 --global-batch-size 8 --grad-reduce-in-bf16 --use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16 --overlap-grad-reduce --overlap-param-gather --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --no-pin-cpu-grads",
        {"gradient_accumulation_fusion": False, "architecture": "phi-4", "tensor_model_parallel_size": 2, "data_parallel_size": 2, "seq_length": 2048, "micro_batch_size": 2, "num_microbatches": 2, "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "overlap_grad_reduce": True, "overlap_param_gather": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "pin_cpu_grads": False, "apply_rope_fusion": True},
    ),
    (
        "megatron-lm", "model_config.yaml", "ENV_VARS:\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True\nMODEL_ARGS:\n" + "".join(f"  {flag}\n" for flag in ("--num-layers: 40", "--hidden-size: 5120", "--ffn-hidden-size: 17920", "--num-attention-heads: 40", "--group-query-attention: true", "--num-query-groups: 10", "--vocab-size: 100352", "--normalization: RMSNorm", "--swiglu: true", "--disable-bias-linear: true", "--position-embedding-type: rope", "--untie-embeddings-and-output-weights: true", "--bf16: true", "--pipeline-model-parallel-size: 4", "--num-layers-per-virtual-pipeline-stage: 5", "--seq-length: 1024", "--micro-batch-size: 1", "--global-batch-size: 8", "--recompute-granularity: selective", "--recompute-modules: mlp core_attn", "--use-distributed-optimizer: true", "--no-rope-fusion: true")),
        {"architecture": "phi-4", "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "seq_length": 1024, "num_microbatches": 8, "recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp"), "expandable_segments": True},
    ),
    (
        "megatron-lm", "train.log", "start\n[rank0] ------------------------ arguments ------------------------\n" + "".join(f"[rank0]   {name} {'.' * (48 - len(name))} {value}\n" for name, value in {"world_size": 8, "num_layers": 48, "encoder_num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "padded_vocab_size": 151936, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "bf16": True, "expert_model_parallel_size": 8, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 8, "use_distributed_optimizer": True, "attention_backend": "AttnBackend.fused", "apply_rope_fusion": True, "gradient_accumulation_fusion": False, "fine_grained_activation_offloading": True, "offload_modules": "['expert_fc1', 'moe_act']", "main_grads_dtype": "torch.float32", "virtual_pipeline_model_parallel_size": "None", "fp8_format": "None"}.items()) + "[rank0] -------------------- end of arguments ---------------------\nrest",
        {"gradient_accumulation_fusion": False, "architecture": "qwen3-30b-a3b", "expert_model_parallel_size": 8, "data_parallel_size": 8, "attention_backend": "fused", "apply_rope_fusion": True, "offload_modules": ("expert_fc1", "moe_act")},
    ),
    (
        "megatron-lm", "run.sh", f"torchrun --nproc-per-node 8 pretrain_gpt.py {PHI} --num-layers 4 --context-parallel-size 2 --seq-length 8192 --micro-batch-size 1 --global-batch-size 4 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --fp8-format hybrid --fp8-recipe blockwise --no-rope-fusion",
        {"gradient_accumulation_fusion": False, "architecture": "phi-4", "num_layers": 4, "context_parallel_size": 2, "data_parallel_size": 4, "seq_length": 8192, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "fp8_format": "hybrid", "fp8_recipe": "blockwise", "use_distributed_optimizer": False},
    ),
    (
        "bridge", "run_config.yaml", BRIDGE + "  expert_model_parallel_size: 8\ntrain:\n  micro_batch_size: 1\n  global_batch_size: 16\nddp:\n  grad_reduce_in_fp32: true\n  overlap_grad_reduce: true\nworld_size: 8\n",
        {"architecture": "qwen3-30b-a3b", "expert_model_parallel_size": 8, "data_parallel_size": 8, "num_microbatches": 2, "overlap_grad_reduce": True, "cross_entropy_loss_fusion": True},
    ),
    (
        "bridge", "run_config.yaml", BRIDGE + "  tensor_model_parallel_size: 2\n  sequence_parallel: true\n  expert_tensor_parallel_size: 1\n  recompute_granularity: selective\n  recompute_modules: [moe_act, layernorm]\n  params_dtype:\n    _call_: false\n    _target_: torch.bfloat16\n  attention_backend:\n    _target_: megatron.core.transformer.enums.AttnBackend\n    _call_: true\n    _args_: [2]\ntrain:\n  global_batch_size: 4\nddp:\n  grad_reduce_in_fp32: false\noptimizer:\n  use_precision_aware_optimizer: true\n  exp_avg_dtype:\n    _call_: false\n    _target_: torch.bfloat16\nworld_size: 8\n",
        {"architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "data_parallel_size": 4, "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "attention_backend": "fused", "recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act"), "cross_entropy_loss_fusion": True},
    ),
    (
        "bridge", "run_config.yaml", BRIDGE + "  pipeline_model_parallel_size: 4\n  virtual_pipeline_model_parallel_size: 3\ntrain:\n  micro_batch_size: 2\n  global_batch_size: 16\nmixed_precision: bf16_mixed\nddp: {}\nworld_size: 4\n",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 3, "micro_batch_size": 2, "num_microbatches": 8, "cross_entropy_loss_fusion": True},
    ),
    (
        "bridge", "run_config.yaml", BRIDGE.replace("num_layers: 48", "num_layers: 4") + "  cross_entropy_loss_fusion: true\n  cross_entropy_fusion_impl: te\ntrain:\n  manual_gc: true\nmixed_precision:\n  grad_reduce_in_fp32: false\n  fp8: e4m3\n  fp8_recipe: tensorwise\noptimizer:\n  optimizer_cpu_offload: true\n  optimizer_offload_fraction: 1.0\nddp: {bucket_size: 40000000, overlap_grad_reduce: true}\nworld_size: 1\n",
        {"architecture": "qwen3-30b-a3b", "num_layers": 4, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "fp8_format": "e4m3", "fp8_recipe": "tensorwise", "manual_gc": True, "grad_reduce_in_bf16": True, "optimizer_cpu_offload": True, "ddp_bucket_size": 40000000, "overlap_grad_reduce": True},
    ),
    (
        "bridge", "run_config.yaml", "dataset: &parallel\n  context_parallel_size: 2\nmodel:\n  <<: *parallel\n  hf_model_id: microsoft/phi-4\n  seq_length: 8192\n  recompute_granularity: full\n  recompute_method: block\n  recompute_num_layers: 12\ntrain:\n  global_batch_size: 1\nddp:\n  grad_reduce_in_fp32: true\nenv_vars:\n  PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'\nworld_size: 2\n",
        {"architecture": "phi-4", "context_parallel_size": 2, "seq_length": 8192, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 12, "expandable_segments": True, "cross_entropy_loss_fusion": True},
    ),
    (
        "verl", "run.sh", VERL + f"trainer.nnodes=1 trainer.n_gpus_per_node=8 {ACTOR}.megatron.tensor_model_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=8 {ACTOR}.megatron.expert_tensor_parallel_size=1 {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=8192 data.max_prompt_length=1024 data.max_response_length=7168 {ACTOR}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8",
        {"architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "data_parallel_size": 4, "seq_length": 8192, "num_microbatches": 2, "loss": "vocab_parallel_cross_entropy", "fp32_output": True, "attention_backend": "flash"},
    ),
    (
        "verl", "run.sh", "offload=${OFFLOAD:-True}\nACTOR=(\n" + "\n".join(f"  {ACTOR}.megatron.{name}_offload=${{offload}}" for name in ("param", "grad", "optimizer")) + f"\n  +{ACTOR}.megatron.override_transformer_config.recompute_granularity=full\n  ++{ACTOR}.megatron.override_transformer_config.recompute_method=uniform\n  {ACTOR}.megatron.override_transformer_config.recompute_num_layers=1\n  {ACTOR}.ppo_micro_batch_size_per_gpu=2 {ACTOR}.ppo_mini_batch_size=16\n)\n" + VERL + '"${ACTOR[@]}" $@',
        {"architecture": "qwen3-30b-a3b", "data_parallel_size": 8, "seq_length": 2048, "micro_batch_size": 1, "loss": "vocab_parallel_cross_entropy", "fp32_output": True, "attention_backend": "flash", **MOVED, **FULL},
    ),
    (
        "verl", "config.yaml", "actor_rollout_ref:\n  model:\n    path: microsoft/phi-4\n  actor:\n    ppo_mini_batch_size: 8\n    ppo_micro_batch_size_per_gpu: 1\n    use_dynamic_bsz: false\n    megatron:\n      context_parallel_size: 2\n      override_ddp_config:\n        grad_reduce_in_fp32: false\n        overlap_grad_reduce: true\n      override_transformer_config:\n        attention_backend: fused\n        recompute_granularity: selective\n        recompute_modules: [mlp]\n    optim:\n      override_optimizer_config:\n        optimizer_cpu_offload: true\n        optimizer_offload_fraction: 1\n        use_precision_aware_optimizer: true\n  rollout:\n    n: 4\ndata:\n  max_prompt_length: 2048\n  max_response_length: ${.max_prompt_length}\ntrainer:\n  nnodes: 2\n  n_gpus_per_node: 8\n",
        {"architecture": "phi-4", "context_parallel_size": 2, "data_parallel_size": 8, "num_microbatches": 4, "grad_reduce_in_bf16": True, "overlap_grad_reduce": True, "attention_backend": "fused", "recompute_granularity": "selective", "recompute_modules": ("mlp",), "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1, "use_precision_aware_optimizer": True, "loss": "vocab_parallel_cross_entropy", "fp32_output": True},
    ),
    (
        "verl", "run.sh", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + VERL + f"trainer.nnodes=4 {ACTOR}.megatron.pipeline_model_parallel_size=4 {ACTOR}.megatron.virtual_pipeline_model_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=8 {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=$((4 * 1024)) {ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=12 {ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=12",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "data_parallel_size": 8, "num_layers_in_first_pipeline_stage": 12, "num_layers_in_last_pipeline_stage": 12, "num_microbatches": 8, "loss": "vocab_parallel_cross_entropy", "fp32_output": True, "attention_backend": "flash", "expandable_segments": True},
    ),
    (
        "verl", "run.sh", VERL + f"'{ACTOR}.megatron.override_transformer_config.recompute_modules=[\"moe_act\", \"layernorm\"]' {ACTOR}.megatron.override_transformer_config.recompute_granularity=selective {ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True {ACTOR}.ppo_micro_batch_size_per_gpu=1 {ACTOR}.ppo_mini_batch_size=8",
        {"architecture": "qwen3-30b-a3b", "data_parallel_size": 8, "seq_length": 1024, "recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act"), "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0, "loss": "vocab_parallel_cross_entropy", "fp32_output": True, "attention_backend": "flash"},
    ),
    (
        "nemo-rl", "config.yaml", NEMO + "    expert_model_parallel_size: 8\n    activation_checkpointing: true\n  train_micro_batch_size: 1\n  max_total_sequence_length: 4096\n  train_global_batch_size: 64\ncluster:\n  num_nodes: 4\n  gpus_per_node: 8\n",
        {"architecture": "qwen3-30b-a3b", "expert_model_parallel_size": 8, "data_parallel_size": 32, "num_microbatches": 2, "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "apply_rope_fusion": True, "loss": "logprobs_by_sequence", "fp32_output": True, **FULL, **MOVED},
    ),
    (
        "nemo-rl", "config.yaml", NEMO + "    tensor_model_parallel_size: 2\n    distributed_data_parallel_config: {grad_reduce_in_fp32: true, overlap_grad_reduce: false, overlap_param_gather: false}\n    optimizer: {use_precision_aware_optimizer: false, use_distributed_optimizer: true}\n    apply_rope_fusion: false\n  sequence_packing: {enabled: false}\n  generation: {colocated: {enabled: false, resources: {num_nodes: 2}}}\n  train_micro_batch_size: 2\n  max_total_sequence_length: 2048\n  train_global_batch_size: 64\ncluster: {num_nodes: 4, gpus_per_node: 8}\n",
        {"create_attention_mask": True, "architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "data_parallel_size": 8, "micro_batch_size": 2, "seq_length": 2048, "num_microbatches": 4, "loss": "logprobs_one_hot", "fp32_output": True},
    ),
    (
        "nemo-rl", "config.yaml", NEMO + "    context_parallel_size: 2\n    activation_checkpointing: true\n    recompute_granularity: selective\n    recompute_modules: [moe, layernorm]\n    env_vars: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:False'}\n  train_micro_batch_size: 1\n  max_total_sequence_length: 8192\n  train_global_batch_size: 4\n  sequence_packing:\n    enabled: true\n    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n",
        {"architecture": "qwen3-30b-a3b", "context_parallel_size": 2, "data_parallel_size": 4, "seq_length": 8192, "recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe"), "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "apply_rope_fusion": True, "loss": "logprobs_by_sequence", "fp32_output": True, **MOVED},
    ),
    (
        "nemo-rl", "config.yaml", NEMO + "    fp8_cfg: {enabled: true, fp8: hybrid, fp8_recipe: blockwise, fp8_param: false}\n    fine_grained_activation_offloading: true\n    offload_modules: [expert_fc1]\n    pipeline_model_parallel_size: 2\n    num_layers_in_first_pipeline_stage: 23\n    num_layers_in_last_pipeline_stage: 25\n  train_micro_batch_size: 1\n  max_total_sequence_length: 4096\n  sequence_packing: {enabled: false}\n  train_global_batch_size: 2\ncluster: {num_nodes: 1, gpus_per_node: 2}\n",
        {"create_attention_mask": True, "architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 23, "num_layers_in_last_pipeline_stage": 25, "num_microbatches": 2, "fp8_format": "hybrid", "fp8_recipe": "blockwise", "offload_modules": ("expert_fc1",), "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "apply_rope_fusion": True, "loss": "logprobs_one_hot", "fp32_output": True, **MOVED},
    ),
    (
        "nemo-rl", "config.yaml", NEMO.replace("Qwen/Qwen3-30B-A3B", "microsoft/phi-4") + "    tensor_model_parallel_size: 2\n    optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5, use_precision_aware_optimizer: true}\n  dynamic_batching: {enabled: true, train_mb_tokens: 6144}\n  sequence_packing: {enabled: false}\n  train_global_batch_size: 512\n  max_total_sequence_length: 4096\ncluster: {num_nodes: 1, gpus_per_node: 8}\n",
        {"architecture": "phi-4", "tensor_model_parallel_size": 2, "data_parallel_size": 4, "seq_length": 6144, "num_microbatches": 2, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "apply_rope_fusion": True, "loss": "logprobs_one_hot", "fp32_output": True, **MOVED, "offload_optimizer": False},
    ),
    (
        "skyrl", "run.sh", f"NODES=2\nGPUS=8\n{SKYRL} trainer.placement.policy_num_nodes=$NODES trainer.placement.policy_num_gpus_per_node=$GPUS {MEGATRON}.tensor_model_parallel_size=4 {MEGATRON}.pipeline_model_parallel_size=2 {MEGATRON}.expert_model_parallel_size=8 {MEGATRON}.expert_tensor_parallel_size=1 trainer.micro_train_batch_size_per_gpu=4 trainer.policy_mini_batch_size=64 generator.n_samples_per_prompt=5 trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024",
        {"architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "data_parallel_size": 2, "seq_length": 6144, "micro_batch_size": 1, "num_microbatches": 40, "loss": "logprobs", "fp32_output": True, "logprobs_chunk_size": 1024, "attention_backend": "flash", **FULL, **MOVED, "expandable_segments": True},
    ),
    (
        "skyrl", "run.sh", SKYRL + f"trainer.gradient_checkpointing=false trainer.flash_attn=false trainer.placement.colocate_all=false trainer.logprobs_chunk_size=null trainer.placement.policy_num_gpus_per_node=8 {MEGATRON}.ddp_config.grad_reduce_in_fp32=false {MEGATRON}.optimizer_config_kwargs.use_precision_aware_optimizer=true trainer.policy_mini_batch_size=8 generator.n_samples_per_prompt=1",
        {"architecture": "qwen3-30b-a3b", "data_parallel_size": 8, "seq_length": 1536, "loss": "logprobs", "fp32_output": True, "attention_backend": "fused", "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, "expandable_segments": True},
    ),
    (
        "skyrl", "run.sh", SKYRL + f"trainer.placement.policy_num_gpus_per_node=8 {MEGATRON}.context_parallel_size=2 {MEGATRON}.transformer_config_kwargs.attention_backend=fused trainer.max_tokens_per_microbatch=8192 {MEGATRON}.transformer_config_kwargs.recompute_granularity=selective {MEGATRON}.transformer_config_kwargs.recompute_method=null {MEGATRON}.transformer_config_kwargs.recompute_num_layers=null",
        {"architecture": "qwen3-30b-a3b", "context_parallel_size": 2, "data_parallel_size": 4, "seq_length": 16384, "num_microbatches": 2, "loss": "logprobs", "fp32_output": True, "logprobs_chunk_size": 1024, "attention_backend": "fused", "recompute_granularity": "selective", "recompute_modules": ("core_attn",), **MOVED, "expandable_segments": True},
    ),
    (
        "skyrl", "config.yaml", "trainer:\n  strategy: megatron\n  placement:\n    policy_num_gpus_per_node: 4\n  policy:\n    model:\n      path: microsoft/phi-4\n    megatron_config:\n      tensor_model_parallel_size: 2\n      fp8: hybrid\n      fp8_recipe: blockwise\n      optimizer_config_kwargs:\n        optimizer_cpu_offload: true\n        optimizer_offload_fraction: 1.0\n        overlap_cpu_optimizer_d2h_h2d: true\n  policy_mini_batch_size: 4\ngenerator:\n  n_samples_per_prompt: 1\n",
        {"architecture": "phi-4", "tensor_model_parallel_size": 2, "data_parallel_size": 2, "seq_length": 1536, "num_microbatches": 2, "fp8_format": "hybrid", "fp8_recipe": "blockwise", "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, "loss": "logprobs", "fp32_output": True, "logprobs_chunk_size": 1024, "attention_backend": "flash", **FULL, **MOVED, "expandable_segments": True},
    ),
    (
        "skyrl", "run.sh", SKYRL + f"trainer.placement.policy_num_gpus_per_node=4 {MEGATRON}.pipeline_model_parallel_size=4 {MEGATRON}.transformer_config_kwargs.recompute_num_layers=2 trainer.policy_mini_batch_size=8 generator.n_samples_per_prompt=1",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 4, "seq_length": 1536, "num_microbatches": 8, "loss": "logprobs", "fp32_output": True, "logprobs_chunk_size": 1024, "attention_backend": "flash", **FULL, **MOVED, "recompute_num_layers": 2, "expandable_segments": True},
    ),
    (
        "slime", "run.sh", "PERF=(\n  --tensor-model-parallel-size 4\n  --sequence-parallel\n  --expert-model-parallel-size 8\n  --expert-tensor-parallel-size 1\n  --recompute-granularity full\n  --recompute-method uniform\n  --recompute-num-layers 1\n  # --micro-batch-size 1\n  --use-dynamic-batch-size\n  --max-tokens-per-gpu 20480\n)\nOPT=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)\nray job submit -- " + SLIME + "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${PERF[@]} ${OPT[@]} --attention-backend flash --no-rope-fusion",
        {"architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "data_parallel_size": 2, "seq_length": 20480, "num_microbatches": 2, "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True, "loss": "softmax", "fp32_output": True, "attention_backend": "flash", **FULL, **MOVED},
    ),
    (
        "slime", "run.sh", SLIME + "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-max-response-len 4096 --micro-batch-size 2 --global-batch-size 64 --log-probs-chunk-size 512 --no-rope-fusion",
        {"architecture": "qwen3-30b-a3b", "data_parallel_size": 16, "seq_length": 8192, "micro_batch_size": 1, "num_microbatches": 2, "loss": "softmax", "fp32_output": True, "logprobs_chunk_size": 512},
    ),
    (
        "slime", "run.sh", f"python3 train.py {PHI} --actor-num-nodes 1 --actor-num-gpus-per-node 4 --offload-train --context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --grad-reduce-in-bf16 --no-rope-fusion",
        {"gradient_accumulation_fusion": False, "architecture": "phi-4", "context_parallel_size": 2, "data_parallel_size": 2, "seq_length": 8192, "num_microbatches": 2, "grad_reduce_in_bf16": True, "loss": "softmax", "fp32_output": True, **MOVED},
    ),
    (
        "slime", "train.log", "------------------------ arguments ------------------------\n" + "".join(f"  {name} {'.' * 20} {value}\n" for name, value in {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "hf_checkpoint": "/data/Qwen3-30B-A3B-Base", "expert_model_parallel_size": 8, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 9216, "colocate": False, "apply_rope_fusion": False, "log_probs_chunk_size": -1, "attention_dropout": 0.0, "hidden_dropout": 0.0}.items()) + "-------------------- end of arguments ---------------------\n",
        {"architecture": "qwen3-30b-a3b", "expert_model_parallel_size": 8, "data_parallel_size": 8, "seq_length": 9216, "num_microbatches": 2, "loss": "softmax", "fp32_output": True},
    ),
    (
        "slime", "run.sh", SLIME + "--actor-num-nodes 4 --actor-num-gpus-per-node 8 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 9 --expert-model-parallel-size 8 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --recompute-granularity selective --recompute-modules moe_act --no-rope-fusion",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 9, "expert_model_parallel_size": 8, "data_parallel_size": 8, "num_microbatches": 8, "recompute_granularity": "selective", "recompute_modules": ("moe_act",), "loss": "softmax", "fp32_output": True},
    ),
    (
        "ms-swift", "run.sh", "NPROC_PER_NODE=8 NNODES=2 \\\nmegatron sft \\\n  --model Qwen/Qwen3-30B-A3B-Base \\\n  --pipeline_model_parallel_size 2 \\\n  --expert_model_parallel_size 8 \\\n  --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\\n  --micro_batch_size 1 --global_batch_size 16 --max_length 8192 --packing true --attention_backend flash",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "data_parallel_size": 8, "seq_length": 8192, "num_microbatches": 2, "cross_entropy_loss_fusion": True, "attention_backend": "flash", **FULL},
    ),
    (
        "ms-swift", "run.sh", "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 megatron pt --load Qwen3-30B-A3B-mcore --tensor_model_parallel_size 2 --sequence_parallel true --recompute_granularity none --cross_entropy_loss_fusion false --max_length 4096 --micro_batch_size 2 --global_batch_size 8",
        {"architecture": "qwen3-30b-a3b", "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "data_parallel_size": 2, "micro_batch_size": 2, "num_microbatches": 2, "apply_rope_fusion": True, "attention_backend": "flash", "expandable_segments": True},
    ),
    (
        "ms-swift", "args.json", json.dumps({"model": "microsoft/phi-4", "world_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True, "max_length": 4096, "micro_batch_size": 1, "global_batch_size": 4, "recompute_granularity": "selective", "recompute_modules": ["core_attn"], "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "cross_entropy_fusion_impl": "te", "optimizer_cpu_offload": True, "tuner_type": "full"}, indent=1),
        {"architecture": "phi-4", "tensor_model_parallel_size": 2, "data_parallel_size": 4, "num_microbatches": 1, "recompute_granularity": "selective", "recompute_modules": ("core_attn",), "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "grad_reduce_in_bf16": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "optimizer_cpu_offload": True, "attention_backend": "flash"},
    ),
    (
        "ms-swift", "run.sh", "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 --max_length 1024 --max_completion_length 3072 --offload_model true --offload_optimizer true --recompute_granularity none --micro_batch_size 1 --global_batch_size 8",
        {"architecture": "qwen3-30b-a3b", "expert_model_parallel_size": 8, "data_parallel_size": 8, "loss": "log_softmax", "fp32_output": True, "attention_backend": "flash", **MOVED},
    ),
    (
        "ms-swift", "run.sh", "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-30B-A3B --pipeline_model_parallel_size 4 --virtual_pipeline_model_parallel_size 3 --decoder_first_pipeline_num_layers 12 --max_length 2048 --recompute_granularity selective --recompute_modules moe_act layernorm --fp8_format hybrid --fp8_recipe blockwise --overlap_grad_reduce true --micro_batch_size 1 --global_batch_size 4 --apply_rope_fusion true",
        {"architecture": "qwen3-30b-a3b", "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 12, "seq_length": 2048, "num_microbatches": 4, "recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act"), "fp8_format": "hybrid", "fp8_recipe": "blockwise", "overlap_grad_reduce": True, "cross_entropy_loss_fusion": True, "apply_rope_fusion": True, "attention_backend": "flash"},
    ),
]  # fmt: skip


def flat(scenario: Scenario, settings: MemorySettings) -> dict[str, Any]:
    """Returns all fields of a job in one dict."""
    layout = {name: getattr(scenario.layout, name) for name in scenario.layout.__slots__}
    workload = {
        name: getattr(scenario, name)
        for name in ("num_layers", "seq_length", "micro_batch_size", "num_microbatches", "dtype")
    }
    return {
        "architecture": scenario.architecture.name, **layout, **workload, **scenario.state.to_dict(), **scenario.allocator.to_dict(),
        **{name: getattr(settings, name) for name in settings.__slots__},
    }  # fmt: skip


FUSIONS = {
    **dict.fromkeys(("megatron-lm", "slime", "ms-swift"), (True, True)),
    **dict.fromkeys(("bridge", "verl"), (False, True)),
    "skyrl": (False, False),
    "nemo-rl": (True, False),
}
"""Whether the activation of a Qwen model, and the accumulation of gradients, are fused where the file does not say it."""
WITHOUT_AUXILIARY_LOSS = ("nemo-rl", "skyrl", "verl")
UNFUSED = ("megatron-lm", "slime", "ms-swift")
"""Where tokens are sorted by their experts without a fused kernel, unless the file says so."""
ROUTER_DTYPES = {"ms-swift": "fp32", "nemo-rl": "fp64", "skyrl": "fp32"}
"""In which the router computes where the file does not say it: Megatron-Core's default is the parameters' type."""


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_every_field_of_a_job_is_the_one_that_its_file_means(number: int, tmp_path: Path) -> None:
    framework, name, text, expected = JOBS[number]
    path = tmp_path / name
    path.write_text(text)
    job = Job.read(path)
    assert job.framework == framework
    assert job.scenario is not None, (job.cannot_start, job.not_supported)
    assert job.settings is not None
    default = flat(Scenario.of(expected["architecture"], seq_length=4096), MemorySettings())
    default |= REMEDY | {"expandable_segments": True} if framework == "verl" else {}
    default["deallocate_pipeline_outputs"] = expected.get("pipeline_model_parallel_size", 1) > 1
    default["calculate_per_token_loss"] = framework == "nemo-rl" or (framework == "ms-swift" and "rlhf" not in text)
    if framework == "megatron-lm":
        default["create_attention_mask_in_dataloader"] = "create_attention_mask" not in text.replace("-", "_")
        default |= {name: 0.1 for name in ("hidden_dropout", "attention_dropout") if "dropout" not in text}
    default["bias_activation_fusion"], default["gradient_accumulation_fusion"] = FUSIONS[framework]
    if job.scenario.architecture.routes and "moe_router_dtype" not in text and "moe-router-dtype" not in text:
        default["moe_router_dtype"] = ROUTER_DTYPES.get(framework, "params_dtype")
    if job.scenario.architecture.routes and framework in UNFUSED and "permute" not in text:
        default["moe_permute_fusion"] = False
    if job.scenario.architecture.routes and framework in WITHOUT_AUXILIARY_LOSS:
        default["moe_router_load_balancing_type"] = "none"
        default["freeze_moe_router"] = framework == "nemo-rl"
    if job.scenario.architecture.routes and framework == "megatron-lm" and "dispatcher" not in text:
        default["moe_token_dispatcher_type"] = "allgather"
    found = flat(job.scenario, job.settings) | {"sequence_parallel": not job.scenario.layout.has_whole_sequences}
    assert {key: value for key, value in found.items() if value != (default | expected)[key]} == {}
    assert [one.key for one in job.not_modelled if one.effect == "unknown"] == []


def test_there_are_five_jobs_of_every_framework() -> None:
    counts = {framework: sum(job[0] == framework for job in JOBS) for framework, *_ in JOBS}
    assert len(counts) == 7
    assert min(counts.values()) >= 5


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_layout_that_megatron_refuses_is_found(tmp_path: Path) -> None:
    # As in two of verl's examples in August 2026: without a size of its own, experts are split as often as TP.
    text = (
        VERL
        + f"{ACTOR}.megatron.tensor_model_parallel_size=4 {ACTOR}.megatron.pipeline_model_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=2"
    )
    path = write(tmp_path, "run.sh", text)
    job = Job.read(path)
    assert job.scenario is None
    assert job.cannot_start is not None
    assert "expert_model_parallel_size 2 x expert_tensor_parallel_size 4 is 8" in job.cannot_start
    job = Job.read(path, overrides=[f"{ACTOR}.megatron.expert_tensor_parallel_size=1"])
    assert job.cannot_start is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("--tensor-model-parallel-size 3", "the job has 8 ranks, must have a multiple of 3"),
        ("--global-batch-size 12", "the global batch has 12 sequences, must be a multiple of 8"),
        (
            "--pipeline-model-parallel-size 8 --num-layers 47",
            "pipeline_model_parallel_size is 8, must divide the 47 layers",
        ),
        ("--expert-model-parallel-size 16", "must divide the 8 ranks of a stage"),
        ("--context-parallel-size 4 --seq-length 4100", "must divide the 4100 tokens"),
    ],
)
def test_each_rule_of_the_layout_is_named(text: str, rule: str, tmp_path: Path) -> None:
    base = f"torchrun --nproc-per-node 8 pretrain_gpt.py {QWEN} --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 "
    assert rule in str(Job.read(write(tmp_path, "run.sh", base + text)).cannot_start)


def test_verl_asks_for_the_version_where_its_default_changed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "run.sh",
        VERL.partition(" actor_rollout_ref.actor.megatron.override_ddp")[0]
        + f" model_engine=megatron {ACTOR}.ppo_micro_batch_size_per_gpu=1 {ACTOR}.ppo_mini_batch_size=8",
    )
    job = Job.read(path)
    assert "fp32 since 2026-08-20, bf16 before" in str(job.not_supported)
    new, old = (Job.read(path, version=version).required()[0].state for version in ("2026-08-20", "before-2026-08-20"))
    assert (new.grad_reduce_in_bf16, old.grad_reduce_in_bf16) == (False, True)


def test_what_is_not_modelled_has_its_sign_and_unknown_keys_are_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "run.sh",
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {QWEN} --seq-length 4096 --micro-batch-size 1 --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm --use-megatron-fsdp --ckpt-format fsdp_dtensor --frobnicate 3 --lr 1e-4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer",
    )
    job = Job.read(path)
    effects = {one.key: one.effect for one in job.not_modelled}
    assert effects == {
        "overlap_moe_expert_parallel_comm": "more",
        "use_megatron_fsdp": "less",
        "frobnicate": "unknown",
    }
    assert "lr" in job.without_effect
    assert job.without_effect["moe_shared_expert_overlap"] == "the model has no shared experts"
    text = path.read_text().replace("--lr 1e-4", "--lr 1e-4 --sequence-parallel")
    with_shared = Job.read(write(tmp_path, "split.sh", text), architecture="qwen2-57b-a14b")
    assert with_shared.required()[0].state.moe_shared_expert_overlap


def test_a_model_of_bridge_has_the_vocabulary_of_its_tokenizer_and_its_environment(tmp_path: Path) -> None:
    text = BRIDGE.replace("  vocab_size: 151936\n", "")
    text += "train: {global_batch_size: 8}\nddp: {grad_reduce_in_fp32: true}\nworld_size: 8\n"
    text += "tokenizer: {tokenizer_model: Qwen/Qwen3-30B-A3B}\n"
    text += "ENV_VARS: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True', NVTE_FLASH_ATTN: 1}\n"
    job = Job.read(write(tmp_path, "run_config.yaml", text))
    scenario, _ = job.required()
    # 151,669 tokens, padded to a multiple of 128
    assert (scenario.architecture.vocab_size, scenario.allocator.expandable_segments) == (151_680, True)
    assert [one.key for one in job.not_modelled] == []


@pytest.mark.parametrize("model", ["  hf_model_id: microsoft/phi-4\n", ""])
def test_overrides_of_a_recipe_are_not_taken_for_the_whole_job(tmp_path: Path, model: str) -> None:
    overrides = f"model:\n{model}  seq_length: 8192\ntrain: {{global_batch_size: 8}}\nddp: {{}}\nworld_size: 8\n"
    (warning,) = (
        line
        for line in Job.read(write(tmp_path, "overrides.yaml", overrides), architecture="phi-4").warnings
        if "overrides a recipe" in line
    )
    assert "takes Megatron's defaults" in warning and "give the run_config.yaml of a checkpoint" in warning
    whole = Job.read(write(tmp_path, "run_config.yaml", BRIDGE + TRAINED))
    assert not any("recipe" in line for line in whole.warnings)


ACCOUNTED = "  pipeline_model_parallel_size: 5\n  account_for_embedding_in_pipeline_split: true\n  account_for_loss_in_pipeline_split: true\n"
TRAINED = "train: {global_batch_size: 8}\nddp: {grad_reduce_in_fp32: true}\nworld_size: 40\n"


def test_embedding_and_loss_count_as_layers_of_their_stages_as_megatron_counts_them(tmp_path: Path) -> None:
    path = write(tmp_path, "run_config.yaml", BRIDGE + ACCOUNTED + TRAINED)
    job = Job.read(path)
    scenario, _ = job.required()
    stages = [scenario.layout.layers_of_stage(stage, scenario.num_layers) for stage in range(5)]
    assert stages == layers_of_megatron(5, 48)
    assert job.not_modelled == ()
    path.write_text(BRIDGE + ACCOUNTED.replace("size: 5", "size: 4") + TRAINED)
    assert "the pipeline has 50 layers (48 of the model, and 2 for model.account" in str(Job.read(path).cannot_start)
    path.write_text(BRIDGE + ACCOUNTED + "  virtual_pipeline_model_parallel_size: 2\n" + TRAINED.replace("8}", "40}"))
    layout = Job.read(path).required()[0].layout
    stages = [list(layout.layers_of_chunks(stage, 48)) for stage in range(5)]
    assert stages == [layers_of_megatron(5, 48, chunks=2)[stage::5] for stage in range(5)]
    path.write_text(BRIDGE + ACCOUNTED.replace("size: 5", "size: 1") + TRAINED.replace("40", "8"))
    assert (Job.read(path).required()[0].num_layers, Job.read(path).not_modelled) == (48, ())
    path.write_text(
        BRIDGE + "  pipeline_model_parallel_size: 5\n  pipeline_model_parallel_layout: Et*3|t*3|t*3|t*3|tL\n" + TRAINED
    )
    assert "with 13 layers, must have the 48 of the model" in str(Job.read(path).cannot_start)


def layers_of_megatron(stages: int, num_layers: int, chunks: int | None = None) -> list[int]:
    """Returns the layers of each chunk, from stage to stage."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype="bf16",
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    return [
        get_num_layers_to_build(config, vp_stage=None if chunks is None else chunk, pp_rank=stage)
        for chunk in range(chunks or 1)
        for stage in range(stages)
    ]


def test_what_megatron_lm_does_with_experts_unless_told_otherwise_is_said(tmp_path: Path) -> None:
    own = (
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-dtype fp32",
        "--moe-token-dispatcher-type alltoall",
    )
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {QWEN} --seq-length 4096\n"
    assert Job.read(write(tmp_path, "run.sh", text)).not_modelled == ()
    for flag in own:
        text = text.replace(flag, "")
    keys = {one.key: one.effect for one in Job.read(write(tmp_path, "run.sh", text)).not_modelled}
    assert keys == {"moe_grouped_gemm": "either"}


@pytest.mark.parametrize("sizes", ["--padded-vocab-size 151936", "--vocab-size 151936", ""])
def test_flags_that_decide_something_only_beside_others_are_known(sizes: str, tmp_path: Path) -> None:
    flags = (
        "--tokenizer-type HuggingFaceTokenizer --vocab-file vocab.json --no-bias-gelu-fusion --no-bias-dropout-fusion"
    )
    text = QWEN.replace("--vocab-size 151936", sizes) + f" {flags} --seq-length 4096"
    assert sizes in text
    job = Job.read(write(tmp_path, "run.sh", f"torchrun --nproc-per-node 8 pretrain_gpt.py {text}\n"))
    assert not [one.key for one in job.not_modelled if one.effect == "unknown"]
    of_slime = Job.read(write(tmp_path, "slime.sh", f"{SLIME} --actor-num-nodes 1 {flags}"))
    assert not [one.key for one in of_slime.not_modelled if one.effect == "unknown"]


@pytest.mark.parametrize(
    ("flags", "packed", "is_warned"),
    [
        ("--rollout-max-response-len 1024 --rollout-max-context-len 4096", 4, False),
        ("--rollout-max-response-len 1024 --rollout-max-prompt-len 1024", 8, False),
        ("--rollout-max-response-len 8192 --rollout-max-prompt-len 8192 --rollout-max-context-len 8192", 2, False),
        ("--rollout-max-response-len 1024", 16, True),
    ],
)
def test_slime_s_sequences_are_a_prompt_with_its_response(
    flags: str, packed: int, is_warned: bool, tmp_path: Path
) -> None:
    text = f"{SLIME} --actor-num-nodes 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 {flags}"
    job = Job.read(write(tmp_path, "run.sh", text))
    assert job.required()[0].packed_sequences == packed
    named = "rollout_max_prompt_len and rollout_max_context_len are not in the file"
    assert any(named in warning for warning in job.warnings) == is_warned
    assert not job.guesses, "a row has the tokens of its budget, however long a prompt is"
    short = Job.read(tmp_path / "run.sh", overrides=["max-tokens-per-gpu=1024"])
    assert bool(short.guesses) == is_warned


def test_sequences_that_copies_cannot_share_evenly_are_said(tmp_path: Path) -> None:
    text = (
        NEMO
        + "  sequence_packing: {enabled: false}\n  train_micro_batch_size: 1\n  train_global_batch_size: 9\ncluster: {num_nodes: 1, gpus_per_node: 8}\n"
    )
    job = Job.read(write(tmp_path, "config.yaml", text))
    assert job.required()[0].num_microbatches == 1
    assert "a step has 9 sequences, which is no multiple of 8" in job.warnings[0]


def test_a_dense_job_of_bridge_ignores_its_expert_keys_and_takes_the_rows_of_its_data(tmp_path: Path) -> None:
    text = "model:\n  num_layers: 16\n  hidden_size: 2048\n  ffn_hidden_size: 8192\n  num_attention_heads: 32\n  num_query_groups: 8\n  kv_channels: 64\n  vocab_size: 128256\n  share_embeddings_and_output_weights: true\n  moe_token_dispatcher_type: allgather\n  moe_grouped_gemm: false\n  seq_length: 131072\ntrain: {micro_batch_size: 1, global_batch_size: 8}\ndataset: {sequence_length: 1024}\nddp: {grad_reduce_in_fp32: true}\nstraggler: null\nworld_size: 8\n"
    job = Job.read(write(tmp_path, "run_config.yaml", text))
    scenario, _ = job.required()
    assert (scenario.seq_length, scenario.architecture.share_embeddings_and_output_weights) == (1024, True)
    assert job.not_modelled == ()
    assert "the model has no experts" in job.without_effect.values()


def test_a_model_that_memlab_does_not_have_is_said(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "run.sh",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --vocab-size 50257 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --bf16 --openai-gelu --position-embedding-type relative",
    )
    job = Job.read(path)
    assert job.scenario is None
    assert "openai-gelu" in str(job.not_supported)
    assert "positions relative" in str(job.not_supported)
    assert Job.read(path, architecture="phi-4-tiny").scenario is not None


def test_defaults_of_a_nemo_rl_file_are_merged_and_set_overrides_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        NEMO
        + "  train_micro_batch_size: 1\n  sequence_packing: {enabled: false}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n",
    )
    path = write(
        tmp_path,
        "recipe.yaml",
        "defaults: base.yaml\npolicy:\n  max_total_sequence_length: 2048\n  train_global_batch_size: 8\n",
    )
    scenario, _ = Job.read(path, overrides=["policy.megatron_cfg.expert_model_parallel_size=8"]).required()
    assert (scenario.seq_length, scenario.layout.expert_model_parallel_size) == (2048, 8)
    (tmp_path / "base.yaml").unlink()
    assert "not beside the file" in Job.read(path).warnings[0]


@pytest.mark.parametrize(
    ("own", "named", "text", "key"),
    [
        ("job.yaml", "base.yaml", f"# a base\n{NEMO}", "policy.model_name"),
        ("run.sh", "tiny.sh", "A=1\n\n\nMODEL_ARGS=(\n  --num-layers 4\n)", "num_layers"),
        ("run.sh", "tiny.sh", "B() {\n  MODEL_ARGS=(--swiglu\n\n\n--num-layers 4)\n}\nB", "num_layers"),
        ("run.sh", "mine.yaml", "# a comment\n\n\n\nlr: 1.0e-6\nentropy_coef: 0.1", "entropy_coef"),
    ],
)
def test_a_key_of_another_file_has_that_file_s_name(own: str, named: str, text: str, key: str, tmp_path: Path) -> None:
    write(tmp_path, "tiny.sh", "")
    write(tmp_path, named, text)
    texts = {
        "job.yaml": "defaults: base.yaml\ncluster: {num_nodes: 1}",
        "run.sh": f"source tiny.sh\n{SLIME} ${{MODEL_ARGS[@]}} --custom-config-path mine.yaml --actor-num-nodes 1",
    }
    job = Job.read(write(tmp_path, own, texts[own]))
    places = {one.key: one.place for one in (*job.taken, *job.not_modelled)}
    last = key.rpartition(".")[2]
    (number,) = (at for at, line in enumerate(text.splitlines(), 1) if last in line.replace("-", "_"))
    assert places[key] == f"line {number} of {named}"
    assert places["cluster.num_nodes" if own == "job.yaml" else "actor_num_nodes"] == "line 2"
    assert f"  {places[key]} " in job_table(job)


def test_a_number_that_is_null_is_the_default_of_the_framework(tmp_path: Path) -> None:
    path = write(tmp_path, "config.yaml", NEMO + "cluster: {num_nodes: null, gpus_per_node: 8}\n")
    assert Job.read(path).required()[0].layout.world_size == 8


def test_defaults_that_name_each_other_or_hundreds_of_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "config.yaml", f"defaults: [base.yaml, base.yaml]\n{NEMO}")
    write(tmp_path, "base.yaml", "defaults: [config.yaml, config.yaml]\npolicy: {}\n")
    with pytest.raises(ValueError, match="line 1: the defaults name each other in a circle"):
        Job.read(path)
    for number in range(10):  # 10^10 reads, if each were followed
        write(tmp_path, f"d{number}.yaml", f"defaults: [{', '.join([f'd{number + 1}.yaml'] * 10)}]\n")
    write(tmp_path, "d10.yaml", "policy: {}\n")
    with pytest.raises(ValueError, match="the defaults name more than 40 files: give the resolved configuration"):
        Job.read(write(tmp_path, "config.yaml", f"defaults: d0.yaml\n{NEMO}"))


def test_a_log_that_is_read_in_part_is_said_to_be(tmp_path: Path) -> None:
    block = f"{'-' * 8} arguments {'-' * 8}\n  num_layers ..... 4\n{'-' * 8} end of arguments {'-' * 8}\n"
    job = Job.read(write(tmp_path, "short.log", block))
    assert not [warning for warning in job.warnings if "8 MiB" in warning]
    job = Job.read(write(tmp_path, "long.log", block + "step\n" * (2 * 2**20)))
    assert [warning for warning in job.warnings if "8 MiB" in warning]
    with pytest.raises(ValueError, match="no block of arguments in its first 8 MiB"):
        Job.read(write(tmp_path, "late.log", "step\n" * (2 * 2**20) + block))


def test_a_mapping_s_own_keys_count_more_than_merged_ones_as_for_pyyaml() -> None:
    """The keys have two letters: see findings/pyyaml_6_0_4_merges_an_overridden_letter_back.sh."""
    text = (
        "one: &one {aa: 1, bb: 1, dd: {x: 1, y: 1}}\ntwo: &two {<<: *one, bb: 2, cc: 2}\n"
        "last: {aa: 3, <<: *two, dd: {x: 3}}\nboth: {<<: [*two, *one], cc: 4}\nself: &self {<<: *self, ee: 5}\n"
    )
    entries = yaml_tree.flat(yaml_tree.read_yaml(text, "merge.yaml"), "merge.yaml")
    expected = yaml.safe_load(text.replace("<<: *self, ", ""))
    for name, mapping in expected.items():
        found = {key: entry.value for key, entry in entries.by_key.items() if key.startswith(f"{name}.")}
        leaves = {f"{name}.{key}": value for key, value in mapping.items() if not isinstance(value, dict)}
        leaves |= {f"{name}.dd.{key}": value for key, value in mapping.get("dd", {}).items()}
        assert found == leaves, name


def test_what_is_not_modelled_has_a_bound_where_one_is_known(tmp_path: Path) -> None:
    text = NEMO + "    tensor_model_parallel_size: 2\n  train_micro_batch_size: 1\n"
    text += "  hf_config_overrides: {freeze_moe_router: true}\n"
    text += "  max_total_sequence_length: 4096\ncluster: {num_nodes: 1, gpus_per_node: 8}\n"
    path = write(tmp_path, "config.yaml", text)
    job = Job.read(path)
    bounds = {one.key.rpartition(".")[2]: (one.effect, one.bound_bytes) for one in job.not_modelled}
    assert bounds["freeze_moe_router"] == ("less", 48 * 2048 * 128 * 16)
    assert f"by at most {format_bytes(48 * 2048 * 128 * 16)}" in job_table(job)
    uneven = "    pipeline_model_parallel_size: 2\n    num_layers_in_last_pipeline_stage: 40\n    tensor_model"
    path.write_text(text.replace("    tensor_model", uneven))
    (router,) = [one for one in Job.read(path).not_modelled if one.key.endswith("freeze_moe_router")]
    assert router.bound_bytes == 40 * 2048 * 128 * 16, "of the stage with the most layers"
    known = {name.name.rpartition(".")[2].strip("*") for framework in TABLES.values() for name in framework.missing}
    known |= {".".join(name.name.split(".")[-2:]) for framework in TABLES.values() for name in framework.missing}
    noted = {
        "actor.policy_loss",
        "policy_loss_type",
        "loss_fn",
        "ref_model",
        "entropy_coef",
        "freeze_moe_router",
        "ref.megatron.param_offload",
        "padding_free",
        "logprobs_chunk_size",
        "sequence_packing.enabled",
    }
    noted |= {"lora_rank", "lora.rank", "lora_cfg", "peft", "peft.enabled"}  # of adapters that memlab has none of
    noted |= {"loss_fn._target_", "vocab_entropy_chunk_size", "vocab_entropy_chunk_memory_mb"}
    assert BOUNDS.keys() - noted <= known, "a bound of a key that no framework has"


def test_what_adapters_save_is_at_most_what_gradients_and_optimizer_state_take(tmp_path: Path) -> None:
    flags = (
        "--model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 8 --tuner_type lora --lora_bias all --max_length 4096"
    )
    job = Job.read(write(tmp_path, "run.sh", f"NPROC_PER_NODE=8 megatron sft {flags}\n"))
    (lora,) = [one for one in job.not_modelled if one.key == "tuner_type"]
    assert lora.effect == "less" and lora.bound_bytes is not None and job.scenario is not None
    # All experts are spread over the ranks; what is not of an expert is whole on each, and its optimizer state shared.
    experts = 48 * 3 * 2048 * 768 * 128
    rest = job.scenario.architecture.num_parameters - experts
    expected = (experts // 8) * (4 + 12) + rest * 4 + rest // 8 * 12
    assert lora.bound_bytes == pytest.approx(expected, rel=1e-6)


def test_attention_backends_are_read_by_megatron_s_numbers_and_names() -> None:
    from megatron.core.transformer.enums import AttnBackend

    names = {one.name: one.name for one in AttnBackend}
    assert {one.name: BACKEND.read(one.value) for one in AttnBackend} == names
    spelled = [repr, str, lambda one: f"{AttnBackend.__module__}.{one}"]  # a log's, and a recipe's with its module
    assert all({one.name: BACKEND.read(text(one)) for one in AttnBackend} == names for text in spelled)


@pytest.mark.parametrize("value", ["/my models/qwen", "it's", "a;b $HOME `x` & *", 'a"b', ["a b", "c,d"], "x:y", "~"])
def test_written_lines_survive_a_shell_and_say_the_same_value(value: Any) -> None:
    for lines in (hydra_lines, plain_lines):
        (line,) = lines({"some.key": value})
        (word,) = shlex.split(line)
        assert yaml.safe_load(word.partition("=")[2]) == value
    assert hydra_lines({"key": ["moe", "mlp"], "n": 3}) == ["++key=[moe,mlp]", "++n=3"]
    assert yaml.safe_load("\n".join(yaml_lines({"some.key": value}))) == {"some": {"key": value}}


def test_set_takes_a_key_that_is_known_by_a_pattern(tmp_path: Path) -> None:
    job = Job.read(write(tmp_path, "config.yaml", NEMO), overrides=["policy.megatron_cfg.mtp_num_layers=1"])
    assert ("policy.megatron_cfg.mtp_num_layers", "--set") in {(one.key, one.place) for one in job.not_modelled}


def test_modules_that_memlab_does_not_have_are_named_with_their_line(tmp_path: Path) -> None:
    text = (
        NEMO
        + "    activation_checkpointing: true\n    recompute_granularity: selective\n    recompute_modules: [mlp, mamba]\n"
    )
    job = Job.read(write(tmp_path, "config.yaml", text))
    (one,) = [one for one in job.not_modelled if one.key == "policy.megatron_cfg.recompute_modules"]
    assert one.place == f"line {text.count(chr(10))}"
    assert "mamba" in one.reason


def test_set_never_does_nothing(tmp_path: Path) -> None:
    arguments = write(tmp_path, "args.json", '{"model": "phi-4", "max_length": 1024, "sequence_parallel": true}')
    assert Job.read(arguments, overrides=["NPROC_PER_NODE=8"]).required()[0].layout.world_size == 8
    with pytest.raises(ValueError, match="--set has the key 'NODES', which memlab does not know"):
        Job.read(write(tmp_path, "config.yaml", NEMO), overrides=["NODES=2"])
    script = write(tmp_path, "run.sh", f"TP=1\nexport OTHER=1\n{TRAIN} --tensor-model-parallel-size $TP\n")
    assert Job.read(script, overrides=["TP=2"]).required()[0].layout.tensor_model_parallel_size == 2
    with pytest.raises(ValueError, match="--set has the key 'TPX', which memlab does not know: did you mean TP"):
        Job.read(script, overrides=["TPX=4"])
    with pytest.raises(ValueError, match=r"--set is '~train.seed=1', and memlab cannot delete a key: give key=value"):
        Job.read(script, overrides=["~train.seed=1"])
    recipe = write(tmp_path, "recipe.yaml", "ENV_VARS: {PYTORCH_CUDA_ALLOC_CONF: no}\nMODEL_ARGS: {--num-layers: 1}\n")
    script_of_verl = write(
        tmp_path, "verl.sh", f"train_tp=2\n{VERL} {ACTOR}.megatron.tensor_model_parallel_size=$train_tp"
    )
    job = Job.read(script_of_verl, overrides=["train_tp=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"])
    assert job.required()[0].layout.tensor_model_parallel_size == 4
    key = f"{ACTOR}.megatron.sequence_parallel"  # which verl's module reads in code, and has in no list
    assert "sequence_parallel is False" in str(Job.read(script_of_verl, overrides=[f"{key}=false"]).cannot_start)
    arrays = write(tmp_path, "arrays.sh", f'MORE=()\n{TRAIN} "${{MORE[@]}}"\n')
    job = Job.read(arrays, overrides=["MORE=--tensor-model-parallel-size 2"])
    assert job.required()[0].layout.tensor_model_parallel_size == 2
    for job in (script, recipe):
        allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        scenario, _ = Job.read(job, overrides=[allocator], architecture="phi-4").required()
        assert scenario.allocator.expandable_segments


TRAIN = f"torchrun --nproc-per-node 8 pretrain_gpt.py {PHI} --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"


def test_flags_after_env_are_read(tmp_path: Path) -> None:
    text = (
        f"ARGS=({PHI})\nenv -i A=1 torchrun train.py ${{ARGS[@]}} --micro-batch-size 4 --tensor-model-parallel-size 2\n"
    )
    scenario, _ = Job.read(write(tmp_path, "run.sh", text)).required()
    assert (scenario.micro_batch_size, scenario.layout.tensor_model_parallel_size) == (4, 2)


UNREAD = "the script has words that are known only when the job runs, and memlab reads no arguments there: give those that matter with --set KEY=VALUE"


@pytest.mark.parametrize(
    ("flags", "warnings"),
    [
        ('--bf16 "${LIST[@]}"', [f"line 1: after --bf16 {UNREAD}"]),
        ("--bf16 $EXTRA", [f"line 1: after --bf16 {UNREAD}"]),
        ("--bf16\\\n --micro-batch-size 2 $(cat extra)", [f"line 2: after --micro-batch-size {UNREAD}"]),
        ("--bf16 --sequence-parallel $EXTRA -- $MORE", [f"line 1: after --sequence-parallel {UNREAD}"]),
        ("--bf16 --save $FOLDER --swiglu ${EXTRA} --lr 1", [f"line 1: after --save, --swiglu {UNREAD}"]),
        ("--bf16 $A \\\n $B", [f"lines 1, 2: after --bf16 {UNREAD}"]),
        (
            "--bf16 --micro-batch-size $SIZE --moe-input-jitter-eps $DROPOUT",
            [
                "line 1: micro_batch_size is known only when the job runs, so memlab takes the default: give it with --set micro_batch_size=VALUE",
                "line 1: moe_input_jitter_eps is known only when the job runs, so memlab takes it as not given: give it with --set moe_input_jitter_eps=VALUE",
            ],
        ),
        ('--bf16 --transformer-impl "$IMPL"', ["line 1: transformer_impl is known only when the job runs, so memlab takes the default: give it with --set transformer_impl=VALUE"]),
    ],
)  # fmt: skip
def test_words_that_only_a_run_shows_change_no_other_flag(flags: str, warnings: list[str], tmp_path: Path) -> None:
    train = TRAIN.replace(" --bf16", "").replace(
        " --micro-batch-size 1", "" if "--micro-batch-size" in flags else " --micro-batch-size 1"
    )
    text = f"mapfile LIST < extra; {train} --tensor-model-parallel-size 2 {'--sequence-parallel' if 'seq' not in flags else ''} {flags}"
    job = Job.read(write(tmp_path, "run.sh", text))
    scenario, _ = job.required()
    assert (scenario.dtype, scenario.micro_batch_size) == ("bf16", 2 if "size 2" in flags else 1)
    assert [one for one in job.warnings if one not in warnings] == []
    assert set(job.warnings) >= set(warnings)
    assert "sequence_parallel" not in {one.key for one in job.not_modelled}
    assert "\0" not in job_table(job)
    assert "\\u0000" not in json.dumps(job.to_dict())


OWN = (
    "$@ stands for what the script is started with, which memlab does not see: give it behind the file, after --, or what "
    "matters with --set KEY=VALUE"
)


@pytest.mark.parametrize(
    ("text", "size", "warnings"),
    [
        (f"{TRAIN} \\\n --tensor-model-parallel-size 2 \\\n $@", 2, [f"line 3: {OWN}"]),
        (f'EXTRA=(\n "$@"\n)\n{TRAIN} "${{EXTRA[@]}}" --tensor-model-parallel-size 2', 2, [f"line 2: {OWN}"]),
        (f'train() {{ {TRAIN} "$@"; }}\nmain() {{ train --tensor-model-parallel-size 2 "$@"; }}\nmain "$@"', 2, [f"line 2: {OWN}"]),
        (f'set -- --tensor-model-parallel-size 2 "$@"\n{TRAIN} "$@"', 2, [f"line 1: {OWN}"]),
        (f'train() {{ {TRAIN} "$@"; }}\ntrain --tensor-model-parallel-size 2', 2, []),
        # Functions and commands that are no part of the job, and a function that has a value without an argument.
        (f'log() {{ echo "$@"; }}\nlog "$@"; echo $*; python prepare.py "$@"\n{TRAIN}', 1, []),
        (f'main() {{ {TRAIN} --tensor-model-parallel-size ${{1:-2}}; }}\nmain "$@"', 2, []),
    ],
)  # fmt: skip
def test_what_a_script_is_started_with_is_said_where_its_job_takes_it(
    text: str, size: int, warnings: list[str], tmp_path: Path
) -> None:
    job = Job.read(write(tmp_path, "run.sh", text))
    assert job.required()[0].layout.tensor_model_parallel_size == size
    assert [one for one in job.warnings if "started with" in one] == warnings == list(job.warnings)


def test_overrides_that_only_a_run_shows_are_said(tmp_path: Path) -> None:
    text = f"$RUN python3 -m verl.trainer.main_ppo model_engine=megatron {ACTOR}.megatron.param_offload=true {ACTOR}.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.model.path=phi-4 unknown.key=$X actor_rollout_ref.model.lora_rank=$RANK "
    job = Job.read(write(tmp_path, "run.sh", f'{text} "$MORE" $(cat extra)'), version="2026-08-20")
    rank = "line 1: actor_rollout_ref.model.lora_rank is known only when the job runs, so memlab takes it as not given"
    assert [one.partition(": give")[0] for one in job.warnings] == [f"line 1: {UNREAD.partition(': give')[0]}", rank]
    assert "\0" not in job_table(job)
    assert not Job.read(write(tmp_path, "run.sh", text.replace("$RANK", "0")), version="2026-08-20").warnings


@pytest.mark.parametrize(
    ("text", "size", "warnings"),
    [
        (
            f"{TRAIN}\n{TRAIN} --tensor-model-parallel-size 2\n{TRAIN}\necho {TRAIN} --bf16 --bf16\n",
            2,
            [
                "lines 1, 2: the script starts megatron-lm with 2 different commands; memlab takes the one of line 2, which has the most arguments: if you mean another one, leave this one out of the script"
            ],
        ),
        (
            f"if nvidia-smi; then {TRAIN} --tensor-model-parallel-size 2; fi\npython other.py --a --b\n",
            2,
            ["line 1: memlab cannot decide whether the script runs this command, and reads it nevertheless"],
        ),
        (
            f"train() {{ {TRAIN} --tensor-model-parallel-size 2; }}\n",
            2,
            ["line 1: memlab cannot decide whether the script runs this command, and reads it nevertheless"],
        ),
        (f"train() {{ {TRAIN} --tensor-model-parallel-size $1; }}\nfor i in 1 2; do train 2; done\n", 2, []),
    ],
)
def test_the_command_that_is_taken_is_said_where_there_is_a_choice(
    text: str, size: int, warnings: list[str], tmp_path: Path
) -> None:
    job = Job.read(write(tmp_path, "run.sh", text))
    assert job.required()[0].layout.tensor_model_parallel_size == size
    assert list(job.warnings) == warnings


def test_a_choice_is_said_with_a_given_format_too(tmp_path: Path) -> None:
    path = write(tmp_path, "run.sh", "python a.py --seq-length 1 --x 1\npython b.py --seq-length 2\n")
    (warning,) = [
        one for one in Job.read(path, format_name="megatron-lm", architecture="phi-4").warnings if "starts" in one
    ]
    assert warning.startswith(
        "lines 1, 2: the script starts programs with 2 different commands; memlab takes the one of"
    )


def test_the_configuration_that_a_command_names_is_read_or_said(tmp_path: Path) -> None:
    def job(flags: str) -> Job:
        text = f"python3 -m verl.trainer.main_ppo {flags} model_engine=megatron actor_rollout_ref.model.path=phi-4 {ACTOR}.megatron.param_offload=true {ACTOR}.ppo_micro_batch_size_per_gpu=1"
        return Job.read(write(tmp_path, "run.sh", text), version="2026-08-20")

    assert not job("--config-path=config --config-name='ppo_megatron_trainer.yaml'").warnings
    for flags in ("--config-name mine", "--config-path=$(pwd)/config --config-name=mine", "--config mine.yaml"):
        (warning,) = job(flags).warnings
        assert warning.startswith("line 1: the configuration 'mine") and "is not beside the script" in warning
    (tmp_path / "config").mkdir()
    write(
        tmp_path / "config",
        "mine.yaml",
        "actor_rollout_ref: {actor: {megatron: {pipeline_model_parallel_size: 4}}}\n",
    )
    assert job("--config-path=config --config-name=mine").required()[0].layout.pipeline_model_parallel_size == 4
    later = f"--config-path=config --config-name=mine {ACTOR}.megatron.pipeline_model_parallel_size=2"
    assert job(later).required()[0].layout.pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("start", "allocator"),
    [
        ("timeout 9 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF= nohup", False),
    ],
)
def test_the_allocator_of_a_wrapper_is_taken(start: str, allocator: bool, tmp_path: Path) -> None:
    job = Job.read(write(tmp_path, "run.sh", f"{start} {TRAIN}"))
    assert job.required()[0].allocator.expandable_segments == allocator


def test_an_exit_before_the_job_does_not_end_the_script(tmp_path: Path) -> None:
    text = f"nvidia-smi --list-gpus\nif [ -z $DATA ]; then echo usage; exit 0; fi\n{TRAIN}\nexit 1\n{TRAIN} --bf16 --bf16\n"
    (warning,) = Job.read(write(tmp_path, "run.sh", text)).warnings
    assert warning.startswith("line 2: with the variables that memlab knows, the script would stop here (exit 0)")


@pytest.mark.parametrize(
    ("layers", "chunks"), [("5", 2), ("10", 1), ("7", None), ("-5", None), ("0", None), ("20", None)]
)
def test_layers_of_a_chunk_that_megatron_refuses_are_found(layers: str, chunks: int | None, tmp_path: Path) -> None:
    text = f"{TRAIN} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage {layers}"
    job = Job.read(write(tmp_path, "run.sh", text))
    if chunks is None:
        assert f"{layers}, must divide the layers of a stage, 40 / 4" in str(job.cannot_start)
    else:
        assert job.required()[0].layout.virtual_pipeline_model_parallel_size == chunks


def test_layers_of_a_chunk_are_counted_with_embedding_and_loss(tmp_path: Path) -> None:
    """As ``validate_args`` of Megatron-LM counts them, which has the chunks of ``get_num_layers_to_build``."""
    flags = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    flags += " --pipeline-model-parallel-size 6 --num-layers-per-virtual-pipeline-stage"
    train = TRAIN.replace("--nproc-per-node 8", "--nproc-per-node 6")
    job = Job.read(write(tmp_path, "run.sh", f"{train} --global-batch-size 12 {flags} 1"))
    layout = job.required()[0].layout
    stages = [list(layout.layers_of_chunks(stage, 40)) for stage in range(6)]
    assert stages == [layers_of_megatron(6, 40, chunks=7)[stage::6] for stage in range(6)]
    keys = {one.key for one in job.taken if one.memlab_value == layout.pipeline_model_parallel_layout}
    assert keys == {"account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"}
    refused = Job.read(write(tmp_path, "run.sh", f"{train} {flags} 2")).cannot_start
    assert "2, must divide the layers of a stage, 42 / 6" in str(refused)


def test_what_fails_in_a_calculation_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("memlab.jobs.job.scenario_of", fails)
    with pytest.raises(ValueError, match=r"^run.sh: a calculation with its values fails \(division by zero\): correct"):
        Job.read(write(tmp_path, "run.sh", TRAIN))


def test_a_deleted_key_is_not_set(tmp_path: Path) -> None:
    key = f"{ACTOR}.megatron.tensor_model_parallel_size"
    text = f"{VERL} {key}=4 ~{key}=1 trainer.n_gpus_per_node=8 {ACTOR}.ppo_micro_batch_size_per_gpu=1"
    job = Job.read(write(tmp_path, "run.sh", text), version="2026-08-20")
    assert job.required()[0].layout.tensor_model_parallel_size == 1
    assert any(f"line 1: ~{key} deletes a key, and memlab takes the framework's default" in one for one in job.warnings)


@pytest.mark.parametrize("format_name", [None, "verl"])
def test_a_configuration_of_keys_in_keys_may_be_json(format_name: str | None, tmp_path: Path) -> None:
    actor = {"ppo_micro_batch_size_per_gpu": 1, "megatron": {"tensor_model_parallel_size": 2}}
    values = {"actor_rollout_ref": {"model": {"path": "microsoft/phi-4"}, "actor": actor}, "seed": None}
    path = write(tmp_path, "config.json", json.dumps(values, indent="\t"))
    job = Job.read(path, format_name=format_name, version="2026-08-20")
    assert (job.framework, job.required()[0].layout.tensor_model_parallel_size) == ("verl", 2)
    assert f"{ACTOR}.megatron.tensor_model_parallel_size" in {one.key for one in job.taken if one.place == "line 9"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", f"torchrun pretrain_gpt.py {QWEN} \\\n --seq-length many", "line 2: seq_length is 'many', must be a whole number: correct it"),
        ("config.yaml", NEMO + "    tensor_model_parallel_size: [2]\n", "line 6: policy.megatron_cfg.tensor_model_parallel_size is [2], must be a whole number: correct it"),
        ("config.yaml", NEMO + "    tensor_model_parallel_size: '4'\n", "is '4', must be a whole number, such as 4 without quotes: correct it"),
        ("config.yaml", "policy:\n  a: [1\n", "config.yaml, line 3: it is not valid YAML"),
        ("config.yaml", "policy:\n  a: *none\n", "config.yaml, line 2: the alias *none has no anchor"),
        ("config.yaml", "a: 1\n", "config.yaml is of no format that memlab reads. It looked for megatron-lm:"),
        ("config.yaml", "e: &e {}\nm: &m {<<: [" + "*e, " * 300 + "]}\n" + "".join(f"k{n}: *m\n" for n in range(300)), "it has more than 20,000 keys"),
        ("config.yaml", NEMO + "  sequence_packing: {train_mb_tokens: -4}\n", "line 6: policy.sequence_packing.train_mb_tokens is -4, must be at least 1: correct it"),
        ("config.yaml", "- 1\n", "config.yaml has no keys at its top level"),
        ("run.sh", "echo hello\n", "run.sh is of no format that memlab reads"),
        ("run.sh", "python3 main_base.py trainer.policy.model.path=phi-4 trainer.strategy=megatron generator.gpu_memory_utilization=1e999", "line 1: generator.gpu_memory_utilization is inf, must be a number of at most 1e+18: correct it"),
        ("run.sh", "A='open", "run.sh, line 1: the quote ' is not closed"),
        ("run.py", "print(1)", "run.py is a program, which memlab never runs"),
        ("args.json", "{", "args.json is not valid JSON"),
        ("args.json", "[1]", "args.json holds no object"),
        ("run.toml", "a = 1", "run.toml is a TOML file, and none of torchtitan's"),
        ("run.sh", "megatron sft --model phi-4 --megatron_extra_kwargs '[1]'", "line 1: megatron_extra_kwargs is '[1]', must be a JSON object: correct it"),
        ("run.sh", "megatron sft --model phi-4 --megatron_extra_kwargs 7", "line 1: megatron_extra_kwargs is 7, must be a JSON object: correct it"),
        ("args.json", '{"model": "phi-4", "megatron_extra_kwargs": "{\\"moe_layer_freq\\": \\"[x]\\"}"}', "line 1: megatron_extra_kwargs.moe_layer_freq is '[x]', must be a list expression"),
        ("args.json", '{"model": "phi-4", "megatron_extra_kwargs": "{\\"min_offloaded_tensor_size\\": \\"many\\"}"}', "line 1: megatron_extra_kwargs.min_offloaded_tensor_size is 'many', must be a whole number: correct it"),
        *(("run.sh", f"python pretrain_gpt.py {QWEN} --{flag} 0", f"line 1: {flag.replace('-', '_')} is 0, must be a whole number of at least 1: correct it") for flag in ("make-vocab-size-divisible-by", "micro-batch-size", "seq-length", "global-batch-size")),
        ("run.sh", f"{SLIME} --actor-num-nodes 1 --max-tokens-per-gpu 0", "line 1: max_tokens_per_gpu is 0, must be a whole number of at least 1: correct it"),
        ("run_config.yaml", BRIDGE + "  make_vocab_size_divisible_by: 0\n  should_pad_vocab: true\ntrain: {micro_batch_size: 1}\n", "line 17: model.make_vocab_size_divisible_by is 0, must be a whole number of at least 1: correct it"),
        ("run.sh", "NPROC_PER_NODE=0 megatron sft --model phi-4", "environment: NPROC_PER_NODE is 0, must be a whole number of at least 1: correct it"),
        ("run.sh", "source models/x.sh\ntorchrun x.py ${ARGS[@]}", "run.sh, line 1: the sourced file x.sh does not exist, or is not a text of less than 1 MiB"),
        ("config.yaml", "policy:\n  ? " + "k" * 1000 + "\n  : {a: 1}\n  megatron_cfg: {enabled: true}\n", "config.yaml, line 3: a key has more than 500 characters: give another file"),
        ("run.sh", f"{VERL} actor_rollout_ref.model.lora='{{rank: [}}'", "the value of actor_rollout_ref.model.lora, line 1: it is not valid YAML"),
        ("empty.sh", " \n", "empty.sh is empty"),
        ("run.sh", "a\0b", "run.sh is not a text"),
        ("train.log", "--------- arguments ---------\n  a .... 1\n", "train.log, line 1: the block of arguments has no end"),
        ("train.log", "[--------- arguments ---------] of a run\n", "train.log is of no format that memlab reads"),
        ("train.log", "-" * 2**20, "train.log is of no format that memlab reads"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_understood_is_refused_with_its_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        Job.read(write(tmp_path, name, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


HOSTILE_YAML = {
    "laughs": "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}, z: *a{n - 1}}}\n" for n in range(1, 40)) + "policy: {megatron_cfg: *a39}\n",
    "self": "policy: &p\n  megatron_cfg: *p\n",
    "deep": "policy: " + "[" * 5000 + "]" * 5000,
    "braces": "policy: " + "{a: " * 5000 + "}" * 5000,
    "tag": "policy: {megatron_cfg: !!python/object/apply:os.system ['touch /tmp/memlab-was-here']}\n",
    "interpolations": "policy:\n  megatron_cfg:\n" + "".join(f"    k{n}: ${{policy.megatron_cfg.k{n + 1}}}${{policy.megatron_cfg.k{n + 1}}}\n" for n in range(60)) + "    k60: aaaa\n",
    "own interpolation": "policy:\n  megatron_cfg:\n    tensor_model_parallel_size: ${policy.megatron_cfg.tensor_model_parallel_size}\n",
    "digits": "policy: {megatron_cfg: {tensor_model_parallel_size: " + "9" * 100_000 + "}}\n",
    "sizes": "policy: {model_name: phi-4, megatron_cfg: {tensor_model_parallel_size: 999999999999999999}}\n",
    "keys": "policy:\n  megatron_cfg:\n" + "".join(f"    k{n}: 1\n" for n in range(60_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_a_hostile_configuration_is_refused_or_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "config.yaml", HOSTILE_YAML[name])
    try:
        job = Job.read(path)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        json.dumps(job.to_dict())
    assert not Path("/tmp/memlab-was-here").exists()  # noqa: S108


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge.sh"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(ValueError, match="is not a text"):
        Job.read(path)
    path.write_text("echo a\n" * 500_000)
    with pytest.raises(ValueError, match="has more than 2 MiB"):
        Job.read(path)


@pytest.mark.parametrize(
    "command",
    [
        "python examples/run_grpo.py --config big.yaml",
        "python -m verl.trainer.main_ppo --config-path . --config-name big.yaml model_engine=megatron",
        "python finetune.py --config big.yaml",
    ],
)
def test_a_large_configuration_that_a_command_names_is_not_cut(command: str, tmp_path: Path) -> None:
    """The keys at its end count over those before them."""
    text = "policy: {model_name: Qwen/Qwen3-8B}\ncluster: {gpus_per_node: 8}\n" + "# padding\n" * 900_000
    (tmp_path / "big.yaml").write_text(text)
    (tmp_path / "run.sh").write_text(command)
    with pytest.raises(ValueError, match=r"big\.yaml has more than 2 MiB"):
        Job.read(tmp_path / "run.sh")


def test_the_lines_for_the_same_framework_are_only_what_differs(tmp_path: Path) -> None:
    job = Job.read(write(tmp_path, "run.sh", JOBS[10][2]))
    scenario, settings = job.required()
    assert written("verl", scenario, settings, source=job).lines == ()
    changed = MemorySettings(recompute_granularity="selective", recompute_modules=["moe_act"], **REMEDY)
    lines = written("verl", scenario, changed, source=job).lines
    assert [line.rpartition(".")[2] for line in lines] == [
        "recompute_granularity=selective",
        "recompute_modules=[moe_act]",
    ]
    shorter = replace(scenario, num_layers=4, num_microbatches=1)
    assert written("verl", shorter, changed, source=job).lines == lines
    of_rank = replace(shorter, layout=replace(shorter.layout, rank=1))
    assert written("verl", of_rank, changed, source=job).lines == lines
    again = Job.read(job.path, overrides=lines)
    assert again.settings == changed
    assert again.scenario == scenario
    other = written(
        "verl", scenario, replace(changed, recompute_modules=["moe"], checkpoint_input_remedy=None), source=job
    )
    assert "verl always applies release_storage" in other.unsaid["checkpoint_input_remedy"]


def test_a_text_that_says_several_fields_is_written_whole(tmp_path: Path) -> None:
    extra = {"offload_modules": ["core_attn"], "fine_grained_activation_offloading": True, "new_key": 1}
    extra |= {"min_offloaded_tensor_size": 0, "apply_rope_fusion": True}
    text = f"NPROC_PER_NODE=1 megatron sft --model phi-4 --megatron_extra_kwargs '{json.dumps(extra)}'"
    job = Job.read(write(tmp_path, "run.sh", text))
    scenario, settings = job.required()
    keep, line = written("ms-swift", scenario, replace(settings, offload_modules=["mlp_norm"]), source=job).lines
    assert keep == "# keep megatron_extra_kwargs.new_key, which memlab does not know"
    del extra["new_key"]
    assert json.loads(shlex.split(line)[1]) == extra | {"offload_modules": ["mlp_norm"]}


def test_a_remedy_of_the_framework_is_that_of_every_candidate(tmp_path: Path) -> None:
    path, transformer = write(tmp_path, "run.sh", JOBS[10][2]), f"{ACTOR}.megatron.override_transformer_config"
    scenario, settings = Job.read(path).required()
    in_file = Job.read(path, overrides=[f"{transformer}.{name}={value}" for name, value in FULL.items()]).settings
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in FULL.items())
    arguments = build_parser(["predict"]).parse_args(shlex.split(f"predict --job {path} {flags}"))
    assert asked_step(arguments).settings == in_file
    tried = candidates(settings, scenario, depth=1)
    assert in_file in tried
    assert all(one.checkpoint_input_remedy for one in tried if checkpoints_moe_layers(one, scenario.architecture))


def test_the_command_prints_the_report_and_the_json_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path, "run.sh", JOBS[0][2])
    code = f"import sys; from memlab.cli import main; main(['job', {str(path)!r}, '--as', 'verl']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model      qwen3-30b-a3b, 48 layers, bf16" in done.stdout
    assert "++actor_rollout_ref.actor.megatron.expert_model_parallel_size=8" in done.stdout
    assert "# verl cannot express loss" in done.stdout


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "run.sh", JOBS[0][2])
    assert main(["job", str(path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert Scenario.from_dict(values["scenario"]).layout.expert_model_parallel_size == 8
    assert MemorySettings.from_dict(values["settings"]).recompute_granularity == "full"
    assert {"taken", "without_effect", "not_modelled"} <= set(values)
    assert main(["job", str(path), "--set", "expert-model-parallel-size=3"]) == 1
    assert "this job cannot start" in capsys.readouterr().out
    assert main(["job", str(path), "--set", "expert-model-paralel-size=3"]) == 2
    assert "did you mean expert_model_parallel_size" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "search", "measure"])
def test_a_command_takes_the_job_and_flags_replace_parts_of_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "run.sh", JOBS[0][2])
    scenario, settings = Job.read(path).required()

    def step_of(flags: str) -> tuple[Scenario, MemorySettings]:
        memory = "--gpu-memory 80GiB" if command == "search" else ""
        arguments = build_parser([command]).parse_args(shlex.split(f"{command} --job {path} {flags} {memory}"))
        asked = asked_step(arguments, measured_ranks=16 if command == "measure" else None)
        return asked.scenario, asked.settings

    assert step_of("") == (scenario, settings)
    assert "8 micro-batches" in capsys.readouterr().err
    changed, other = step_of(
        "--seq-length 2048 --num-microbatches 2 --recompute-granularity selective --recompute-modules moe_act --grad-reduce-in-bf16"
    )
    assert changed == replace(
        scenario, seq_length=2048, num_microbatches=2, state=replace(scenario.state, grad_reduce_in_bf16=True)
    )
    assert other == MemorySettings(recompute_granularity="selective", recompute_modules=["moe_act"])


@pytest.mark.parametrize("loss", ["cross_entropy", "log_softmax"])
def test_a_loss_that_is_given_replaces_the_options_of_the_job_s_loss_and_not_the_model_s_fp32_logits(
    loss: Any, tmp_path: Path
) -> None:
    path = next(write(tmp_path, job[1], job[2]) for job in JOBS if job[0] == "skyrl")
    job = Job.read(path).required()[0].state
    assert (job.fp32_output, job.logprobs_chunk_size) == (True, 1024)
    arguments = build_parser(["predict"]).parse_args(["predict", "--job", str(path), "--loss", loss])
    plain = {"loss": loss, "fp32_output": loss != "cross_entropy", "logprobs_chunk_size": None}
    assert asked_step(arguments).scenario.state == replace(job, **plain)


def test_one_measured_rank_takes_the_model_and_not_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "run.sh", JOBS[0][2])
    arguments = build_parser(["measure"]).parse_args(["measure", "--job", str(path), "--num-layers", "4"])
    asked = asked_step(arguments, measured_ranks=1)
    assert "only one rank is measured, although the job's layout is TP2 EP8 ETP1 DP8" in capsys.readouterr().err
    assert asked.scenario.layout == Layout()
    assert (asked.scenario.num_layers, asked.settings.recompute_granularity) == (4, "full")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("predict", "ARCH is missing"),
        ("predict phi-4 --set a=1", "--set concerns a job's file"),
        ("predict phi-4 --as nobody", "must be one of megatron-lm"),
        ("predict phi-4 --as verl --json", "leave one of the two out"),
        ("predict --job none.sh", "does not exist"),
        ("search --job none.sh --gpu-memory 80GiB", "does not exist"),
        ("search --job none.sh --gpus 8 --gpu-memory 80GiB", "--job cannot be combined with --gpus"),
        ("measure --job none.sh", "does not exist"),
        ("job none.sh --format nobody", "slime-critic, nemo-rl-teacher, nemo-rl-dtensor-teacher: choose one of them"),
        ("job . --format verl", "is a folder without"),
    ],
)
def test_bad_command_lines_are_refused(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
