"""What of a live model each field of `TrainingState` needs anew, as one table.

Megatron reads some fields in each step, some when it builds the optimizer, and the others when it builds layers and
DDP's buffers. A change rebuilds the smallest part that reads all fields that changed. Read in megatron-core 0.16.1 and
0.19.2; ``tests/unit/test_state_change.py`` compares the bytes of changed labs with those of fresh ones.
"""

from __future__ import annotations

from typing import Literal

from memlab.config.training_state import TrainingState

Rebuilt = Literal["model", "optimizer", "nothing"]
"""The part that a change of the training state builds again; a model is rebuilt with its optimizer."""

REBUILDS: dict[str, Rebuilt] = {
    # DDP allocates, divides and reduces its buffers by these, and puts its hooks on the model
    # (distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py).
    "use_distributed_optimizer": "model",
    "grad_reduce_in_bf16": "model",
    "overlap_grad_reduce": "model",
    "overlap_param_gather": "model",
    "ddp_bucket_size": "model",
    # Linears read it when they are built (extensions/transformer_engine.py, tensor_parallel/layers.py).
    "gradient_accumulation_fusion": "model",
    # Only the optimizer reads these, when it is built (optimizer/__init__.py, optimizer/distrib_optimizer.py,
    # optimizer/cpu_offloading/hybrid_optimizer.py).
    "use_precision_aware_optimizer": "optimizer",
    "main_grads_dtype": "optimizer",
    "exp_avg_dtype": "optimizer",
    "exp_avg_sq_dtype": "optimizer",
    "optimizer_offload_fraction": "optimizer",
    "overlap_cpu_optimizer_d2h_h2d": "optimizer",
    "pin_cpu_grads": "optimizer",
    "pin_cpu_params": "optimizer",
    "manual_gc": "optimizer",
    # Only the optimizer reads it too. But for it a simulated model has as many parameters as a real one
    # (memlab/engines/megatron/layers/fake_layers.py).
    "optimizer_cpu_offload": "model",
    # Only the optimizer reads it too. But each step writes the main parameters into the parameters, and in fp16 they
    # lose bits: a model that is built again has the weights of the seed.
    "main_params_dtype": "model",
    # Each forward reads these from the config (models/common/language_module/language_module.py,
    # models/common/embeddings/rope_utils.py, transformer/mlp.py, transformer/moe/experts.py), or from the scenario
    # (memlab/engines/megatron/training_step.py).
    "loss": "nothing",
    "fp32_output": "nothing",
    "logprobs_chunk_size": "nothing",
    "cross_entropy_loss_fusion": "nothing",
    "cross_entropy_fusion_impl": "nothing",
    "apply_rope_fusion": "nothing",
    "bias_activation_fusion": "nothing",
    # The schedule reads it from the config in each step (pipeline_parallel/schedules.py).
    "deallocate_pipeline_outputs": "nothing",
    # Transformer Engine reads it at each forward from the environment (attention_environment.py), where a language
    # model writes it when it is built.
    "attention_backend": "nothing",
    # Layers make their FP8 parameters, scales and paddings when they are built (extensions/transformer_engine.py).
    "fp8_format": "model",
    "fp8_recipe": "model",
    "fp8_param_gather": "model",
}

_ORDER: tuple[Rebuilt, ...] = ("nothing", "optimizer", "model")


def what_rebuilds(before: TrainingState, after: TrainingState) -> Rebuilt:
    """Returns what a change of the training state rebuilds."""
    old, new = before.to_dict(), after.to_dict()
    needs = {REBUILDS[name] for name in new if new[name] != old[name]}
    part: Rebuilt = max(needs, key=_ORDER.index, default="nothing")
    # An optimizer makes its main parameters from values that FP8 parameters keep on the host only until its first build
    # (`get_high_precision_init_val`, optimizer/distrib_optimizer.py).
    return "model" if part == "optimizer" and after.fp8_param_gather else part
