"""The CPU in place of a CUDA device: Megatron's own code runs unchanged, small and for real, without a GPU.

Three things are replaced inside a `cuda_replaced` block: the parts of ``torch.cuda`` that Megatron calls, tensor calls
that name a CUDA device, and the few names in megatron-core that need Transformer Engine. Each has a row with the reason
in `memlab.upstream.private_names`. A storage remembers whether it would be in host memory, so that the meter sees
offloads although device and host are the same RAM.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from memlab.backends import Backend, fused_adam, fused_cross_entropy
from memlab.backends.cpu_adam import HostAdam
from memlab.backends.cuda_on_cpu import CUDA_API, CudaOnCpu, from_numpy, is_on_host, random_state
from memlab.backends.eager_steps import require_eager_steps
from memlab.backends.fully_sharded import sharding_on_cpu
from memlab.backends.gloo_collectives import CollectivesOnCopies
from memlab.backends.host_system import host_memory_bytes
from memlab.backends.simulated_version import is_te_min_version
from memlab.config.backend_kind import KINDS
from memlab.config.exchange_buffers import require_no_library_for_exchange
from memlab.config.parameters import (
    bytes_of_gradient,
    bytes_of_optimizer,
    bytes_of_state,
    bytes_of_trained_shard,
    trained_of_rank,
)
from memlab.config.scenario import Scenario
from memlab.engines.megatron.layers import fused_router, gated_delta_rule, torch_moe, unfused_permutation
from memlab.engines.megatron.layers.compiled_activations import quick_gelu, squared_relu
from memlab.engines.megatron.layers.fused_rope import fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd
from memlab.engines.megatron.layers.latent_rope import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q
from memlab.engines.megatron.layers.own_layers import OwnProvider
from memlab.engines.megatron.layers.tied_embedding import adding_in_place
from memlab.engines.megatron.layers.torch_layers import TorchProvider
from memlab.engines.megatron.layers.weight_gradients import APEX_EXTENSION, unused_gradient
from memlab.engines.process_group import join_with_gloo, require_started_ranks
from memlab.meter.labels import one_kernel
from memlab.meter.storage_meter import plain_meter
from memlab.started_ranks import world_size
from memlab.units import format_bytes
from memlab.upstream.patching import patched, swapped


def backend(reason: str) -> Backend:
    """Returns the CPU backend: the live model at small sizes, with real values."""
    return Backend(
        kind=KINDS["cpu"],
        reason=reason,
        layer_provider=TorchProvider,
        own_layer_provider=OwnProvider,
        join=join_with_gloo,
        active=cuda_replaced if world_size() == 1 else cuda_replaced_on_ranks,
        meter=plain_meter,
        check=check,
        sharding=sharding_on_cpu,
    )


def check(scenario: Scenario) -> None:
    """Checks that the layout's ranks are started, that its model fits into host memory, and what needs a GPU.

    That is FP8, and dropout of attention over packed or spread sequences.

    Raises:
        ValueError: If not.
    """
    require_no_library_for_exchange(scenario)
    require_started_ranks(scenario.layout)
    require_eager_steps(scenario.state)
    if scenario.state.fp8_format is not None:
        raise ValueError(
            f"fp8_format is {scenario.state.fp8_format!r}, which needs a GPU: leave it out, or predict the step "
            "(memlab predict, backend 'simulated')"
        )
    drop, ranks = scenario.state.attention_dropout, scenario.layout.context_parallel_size
    for name, value in (("context_parallel_size", ranks), ("packed_sequences", scenario.packed_sequences)):
        if drop and value not in (None, 1):
            raise ValueError(
                f"attention_dropout is {drop:g} with {name} {value}, which needs a GPU: choose 0, or predict the step "
                "(memlab predict, backend 'simulated')"
            )
    require_host_memory(scenario)


def require_host_memory(scenario: Scenario) -> None:
    """Compares a model's parameters, gradients and optimizer state with the host memory that this process may use.

    Raises:
        ValueError: If the model is larger. The system would end the process in the middle of the build, without an
            error message.
    """
    model = scenario.architecture.with_layers(scenario.num_layers)
    needed, limit = model.num_parameters * bytes_per_parameter(scenario), host_memory_bytes()
    if scenario.state.lora is not None:  # the model is frozen
        needed = model.num_parameters * (2 if scenario.dtype == "bf16" else 4)
        needed += sum(trained_of_rank(scenario)) * bytes_per_parameter(scenario)
    if needed > limit:
        raise ValueError(
            f"{scenario} takes at least {format_bytes(needed)} between its steps, and this process may use "
            f"{format_bytes(limit)} of host memory: take fewer layers, or predict it (memlab predict, backend "
            "'simulated')"
        )


def bytes_per_parameter(scenario: Scenario) -> int:
    """Returns the bytes of a parameter, its gradient, its main parameter and Adam's moments, wherever they are.

    Between the steps of FSDP2 there are parameter and moments, all in the type of the shards.
    Scales and copies are not counted: they depend on how parameters are grouped.
    """
    if scenario.engine == "fsdp2":
        return bytes_of_trained_shard(scenario) + bytes_of_state(scenario)
    parameter = 2 if scenario.dtype == "bf16" else 4
    return parameter + bytes_of_gradient(scenario) + sum(bytes_of_optimizer(scenario.state, scenario.dtype))


@contextmanager
def cuda_replaced(calls: type[CudaOnCpu] = CudaOnCpu) -> Iterator[None]:
    """Lets Megatron run on this thread as if the CPU were a CUDA device, for the block.

    The replaced functions are replaced on every thread meanwhile: torch has them once per process.

    Args:
        calls: The mode that serves calls which name a device.
    """
    # One operation of a small model is shorter than waking a second thread. Where another process needs the core,
    # OpenMP's threads wait for each other: a step of 50 ms became one of 1.9 s.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Compiled functions are searched for under the replacements: those that have a replacement keep it.
        with patched(_replacements()), swapped(_compiled_functions(len(sys.modules))), fused_adam.importable(), calls():
            yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def cuda_replaced_on_ranks() -> Iterator[None]:
    """`cuda_replaced`, and gloo in the place of NCCL."""
    with CollectivesOnCopies(), cuda_replaced():
        yield


@cache
def _replacements() -> dict[str, Any]:
    """Returns what megatron-core takes from CUDA or Transformer Engine, with the replacement of each."""
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import token_dispatcher

    random, optimizer = "megatron.core.tensor_parallel.random", "megatron.core.optimizer"
    offload = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
    transformer = "megatron.core.transformer"
    moe, dispatcher = f"{transformer}.moe.moe_utils", f"{transformer}.moe.token_dispatcher"
    loss = "megatron.core.fusions.fused_cross_entropy"
    language_module = "megatron.core.models.common.language_module.language_module"
    by_megatron = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": one_kernel()(utils.local_multi_tensor_scale),
    }
    linear = "megatron.core.tensor_parallel.layers"
    rope = "megatron.core.models.common.embeddings.rope_utils"
    latent = "megatron.core.transformer.multi_latent_attention"
    delta_net = "megatron.core.ssm.gated_delta_net"
    return {
        **{f"torch.cuda.{name}": value for name, value in CUDA_API.items()},
        "torch.get_rng_state": random_state,
        "torch.from_numpy": from_numpy,
        "torch.Tensor.record_stream": lambda tensor, stream: None,
        f"{random}._get_cuda_rng_state": random_state,
        f"{random}._set_cuda_rng_state": lambda state, *_, **__: torch.default_generator.set_state(state),
        f"{random}.FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None),
        f"{random}.activation_recompute_forward": lambda **_: contextlib.nullcontext(),
        f"{random}.fp8_autocast": lambda **_: contextlib.nullcontext(),
        f"{random}._get_share_storage": lambda: _move_block,
        f"{offload}.ChunkOffloadHandler._can_manage_tensor_for_offload": staticmethod(_is_offloadable),
        "megatron.core.extensions.transformer_engine.cpu_offload": SimpleNamespace(CPUOffloadEnabled=False),
        f"{linear}.HAVE_TE": True,
        f"{linear}.ColumnParallelLinear._forward_impl": adding_in_place(layers.ColumnParallelLinear._forward_impl),
        f"{linear}._grad_accum_fusion_available": True,
        f"{linear}.fused_weight_gradient_mlp_cuda": APEX_EXTENSION,
        f"{linear}.get_dummy_wgrad": unused_gradient,
        f"{rope}.fused_apply_rotary_pos_emb": fused_apply_rotary_pos_emb,
        f"{rope}.fused_apply_rotary_pos_emb_thd": fused_apply_rotary_pos_emb_thd,
        f"{latent}.fused_apply_mla_rope_for_q": fused_apply_mla_rope_for_q,
        f"{latent}.fused_apply_mla_rope_for_kv": fused_apply_mla_rope_for_kv,
        f"{delta_net}.HAVE_FLA": True,
        f"{delta_net}.l2norm": gated_delta_rule.l2norm,
        f"{delta_net}.chunk_gated_delta_rule": gated_delta_rule.chunk_gated_delta_rule,
        f"{delta_net}.GatedDeltaNet._apply_gated_norm": gated_delta_rule.apply_gated_norm,
        f"{transformer}.attention.Attention._apply_output_gate": gated_delta_rule.apply_output_gate,
        f"{moe}.HAVE_TE": True,
        f"{moe}.te_general_gemm": None,
        f"{moe}.fused_permute": torch_moe.permute,
        f"{moe}.fused_permute_with_probs": torch_moe.permute_with_probs,
        f"{moe}.fused_unpermute": torch_moe.unpermute,
        f"{moe}.fused_topk_with_score_function": fused_router.fused_topk_with_score_function,
        f"{moe}.fused_compute_score_for_moe_aux_loss": fused_router.fused_compute_score_for_moe_aux_loss,
        f"{moe}.fused_moe_aux_loss": fused_router.fused_moe_aux_loss,
        f"{moe}.fused_sort_chunks_by_index": torch_moe.sort_chunks_by_index,
        f"{moe}.fused_sort_chunks_by_index_with_probs": torch_moe.sort_chunks_by_index_with_probs,
        # The config has the object with which experts compare their activation.
        **dict.fromkeys(
            (f"{transformer}.transformer_config.quick_gelu", f"{transformer}.moe.experts.quick_gelu"), quick_gelu
        ),
        **dict.fromkeys(
            ("megatron.core.activations.squared_relu", f"{transformer}.moe.experts.squared_relu"), squared_relu
        ),
        f"{dispatcher}.maybe_move_tensor_to_cpu": _counts_to_host,
        f"{dispatcher}.permute": unfused_permutation.selecting_by_mask(token_dispatcher.permute),
        f"{dispatcher}.MoEAllGatherTokenDispatcher.dispatch_postprocess": unfused_permutation.selecting_own_rows(
            token_dispatcher.MoEAllGatherTokenDispatcher.dispatch_postprocess, unfused_permutation.counted
        ),
        f"{loss}.calculate_predicted_logits": fused_cross_entropy.native_predicted_logits,
        f"{loss}.calculate_gradients": fused_cross_entropy.native_gradients,
        f"{language_module}.te_parallel_cross_entropy": fused_cross_entropy.te_parallel_cross_entropy,
        f"{optimizer}.USING_PYTORCH_OPTIMIZER": False,
        f"{optimizer}.Adam": fused_adam.adam,
        f"{optimizer}.distrib_optimizer.Adam": fused_adam.FusedAdam,
        f"{optimizer}.is_te_min_version": is_te_min_version,
        f"{optimizer}.optimizer_config.is_te_min_version": is_te_min_version,
        f"{optimizer}.CPUAdam": HostAdam,
        **{f"{optimizer}.optimizer.{name}": value for name, value in by_megatron.items()},
        **{f"{optimizer}.clip_grads.{name}": value for name, value in by_megatron.items()},
        f"{optimizer}.clip_grads.l2_norm_impl": one_kernel()(utils.local_multi_tensor_l2_norm),
        f"{optimizer}.clip_grads.multi_tensor_scale_tensor_impl": None,
    }


def _move_block(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Gives a recomputed tensor's memory to the output that was discarded.

    On a GPU both storages then point to one block. Of the recomputed tensor backward needs only the graph, so here its
    block may leave it: one block either way.
    """
    num_bytes = recomputed.untyped_storage().nbytes()
    with one_kernel():
        block = recomputed.data.clone()
        recomputed.untyped_storage().resize_(0)
        output.untyped_storage().resize_(num_bytes)
        output.data.copy_(block)  # through .data, so that autograd sees no change
        del block


def _counts_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Copies numbers of tokens to the host: as an array, which does not hold the memory of the device's tensor."""
    return tensor.numpy().copy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _is_offloadable(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and not is_on_host(tensor)


# How many functions both tested versions of megatron-core compile at least.
_NUM_COMPILED = 36


@cache
def _compiled_functions(num_modules: int) -> list[tuple[Any, str, Any]]:
    """Returns owner, name and replacement of each function that Megatron compiles (``megatron/core/jit.py``).

    They run eagerly here, each as one kernel for the meter.

    Args:
        num_modules: How many modules Python has loaded; the search is repeated when Megatron has loaded more.

    Raises:
        RuntimeError: If there are so few that the search must be wrong. Bytes that a fused kernel keeps on chip would
            be counted on the device.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    own_classes = [cls for cls in classes if cls.__module__.startswith("megatron.core.")]
    found = [
        (owner, name, one_kernel()(value._torchdynamo_orig_callable))
        for owner in (*modules, *own_classes)
        for name, value in vars(owner).items()
        if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
    ]
    if len(found) < _NUM_COMPILED:
        raise RuntimeError(
            f"megatron-core has {len(found)} functions compiled by torch {torch.__version__}, must have at least "
            f"{_NUM_COMPILED}: unset TORCH_COMPILE_DISABLE, or install the versions that memlab pins"
        )
    return found
