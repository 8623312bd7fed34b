"""When torch itself multiplies matrices on a rank, and what cuBLAS then keeps for the whole process."""

from __future__ import annotations

from memlab.config.scenario import Scenario

CUBLAS_WORKSPACE_BYTES = 32 * 1024**2
"""The workspace of one cuBLAS handle on compute capability 9.0 (torch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
CUBLASLT_WORKSPACE_BYTES = 1024**2
"""What torch adds for products with a bias, which cuBLASLt computes, once for each handle that has one.

It is kept for the whole process (``getCUDABlasLtWorkspace`` in the same file, ``isInputCompliesAddmmCudaLt`` in
``aten/src/ATen/native/cuda/Blas.cpp``, torch 2.11). An H200's allocator showed it: one of Qwen2.5 7B at the first
product of forward, and one more at that of the first checkpoint.
"""
CUBLAS_THREADS = 2
"""Threads that use cuBLAS, each with its own handle: the one that runs forward, and autograd's."""


def multiplies_with_torch(scenario: Scenario) -> bool:
    """Returns whether a step of this rank calls a matrix product of torch itself, and so allocates cuBLAS's workspaces.

    The linears of Transformer Engine have their own workspace. Torch multiplies in the output layer, in routers, in
    unfused attention, which Transformer Engine also takes for fp32, in Megatron's own layers, and in adapters of
    Megatron-Bridge: those of ms-swift are linears of Transformer Engine. A pipeline stage of dense layers before the
    last stage does none of it. Of a model under FSDP2 with linears of Transformer Engine (NeMo Automodel's classes), it
    is the router alone.
    """
    layout, state = scenario.layout, scenario.state
    if scenario.engine == "fsdp2":
        return state.linear_implementation == "torch" or not state.fake_balanced_gate
    return (
        layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
        or has_experts(scenario)
        or (state.lora is not None and state.lora.library == "megatron_bridge")
        or scenario.keeps_scores
        or scenario.dtype == "fp32"
    )


def has_experts(scenario: Scenario) -> bool:
    """Returns whether a layer of this rank has experts."""
    return any(weight.num_experts for weight in scenario.weights_of_rank)
