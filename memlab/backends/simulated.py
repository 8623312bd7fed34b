"""A simulated GPU: Megatron's own code on fake tensors, at any size, with the bytes that torch's allocator would take.

All replacements of the CPU backend are in place, with fake tensors instead of a CUDA device's. No value is computed.
Where a value decides about memory (how many tokens each expert gets), Megatron reads the chosen routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.fusions.fused_bias_gelu import GeLUFunction
from megatron.core.fusions.fused_bias_swiglu import BiasSwiGLUFunction

from memlab.backends import Backend, fake_collectives
from memlab.backends.cpu import cuda_replaced
from memlab.backends.cpu_adam import FakeHostAdam
from memlab.backends.eager_backward import as_autograd, bytes_beside, eager_backward, is_inactive
from memlab.backends.fake_cuda import FAKE, FakeCuda
from memlab.backends.fully_sharded import sharding_on_fake_tensors
from memlab.backends.fused_adam import FusedAdam
from memlab.backends.kernel_temporaries import summing_for_bias
from memlab.backends.meta_result_cache import MetaResultCache
from memlab.backends.repeated_kernels import RepeatedKernels
from memlab.backends.simulated_exchange import exchange_by_deep_ep
from memlab.backends.simulated_routing import chosen_routing
from memlab.backends.simulated_version import imitated, is_te_min_version, known
from memlab.config.backend_kind import KINDS
from memlab.config.cublas import has_experts, multiplies_with_torch
from memlab.config.scenario import Scenario
from memlab.config.user_buffers import uses_user_buffers
from memlab.engines.attention import workspace
from memlab.engines.attention.fused_attention import CausalAttention
from memlab.engines.megatron.layers import fake_fp8, fp8_parameters, torch_functions
from memlab.engines.megatron.layers.fake_layers import FakeProvider
from memlab.engines.megatron.layers.norm_workspace import with_workspace
from memlab.engines.megatron.layers.own_layers import OwnProvider
from memlab.engines.process_group import join_alone
from memlab.engines.transformer_engine_caches import LIBRARIES, hold_fake_workspaces
from memlab.meter.labels import Labels
from memlab.meter.protocol import Meter
from memlab.meter.storage_meter import StorageMeter, plain_meter, simulated_meter
from memlab.upstream.patching import patched, swapped


def backend(reason: str) -> Backend:
    """Returns the simulated backend: the live model at any size, without values."""
    return Backend(
        kind=KINDS["simulated"],
        reason=reason,
        layer_provider=FakeProvider,
        fp8_layer_provider=fake_fp8.FakeFp8Provider,
        own_layer_provider=OwnProvider,
        join=join_alone,
        active=on_fake_gpu,
        meter=_meter_of_gpu,
        fill_workspaces=_fill_workspaces,
        sharding=sharding_on_fake_gpu,
        versions=known,
    )


def of_the_cpu_backend() -> Backend:
    """Returns the simulated backend with the bytes of the CPU backend: nothing rounded, no workspaces of kernels."""
    simulated = backend("predicts the cpu backend")
    return replace(
        simulated,
        kind=replace(simulated.kind, has_allocator=False),
        active=on_fake_tensors,
        meter=_meter_of_cpu,
        sharding=sharding_on_fake_tensors,
        fill_workspaces=lambda scenario: None,
    )


def _meter_of_gpu(labels: Labels) -> Meter:
    made = simulated_meter(labels, as_autograd(MetaResultCache.of_process().answer), bytes_beside)
    return _repeating_kernels(labels, made)


def _meter_of_cpu(labels: Labels) -> Meter:
    return _repeating_kernels(labels, plain_meter(labels, MetaResultCache.of_process().answer))


def _repeating_kernels(labels: Labels, meter: StorageMeter) -> StorageMeter:
    labels.on_kernel = RepeatedKernels(labels, meter.storages, is_inactive).call
    return meter


def of_labs_before_0_4() -> Backend:
    """Returns the simulated backend with the bytes of the live labs that memlab measured before its version 0.4.

    Such a lab gave cuBLAS's workspaces to every pipeline stage, emptied the allocator's cache before its first step,
    and nearly always followed others in its process, which had had kernels timed. A job does none of it.
    """
    simulated = backend("predicts a lab of memlab 0.3")

    def meter(labels: Labels) -> Meter:
        made = simulated.meter(labels)
        labels.on_timing = None
        return made

    return replace(simulated, meter=meter, fill_workspaces=_fill_workspaces_as_before_0_4)


def predicting(backend_name: str) -> Backend:
    """Returns the simulated backend that predicts the bytes of another one: the ``cpu``, or else a GPU."""
    return backend("predicts a GPU") if KINDS[backend_name].has_allocator else of_the_cpu_backend()


def _fill_workspaces(scenario: Scenario) -> None:
    if scenario.engine == "fsdp2":
        is_of_te = scenario.state.linear_implementation == "te"
        # With Transformer Engine's linears, at first products, it was not compared with a GPU.
        before = LIBRARIES if is_of_te else ()
        hold_fake_workspaces(cublas=multiplies_with_torch(scenario), linears=is_of_te, before=before)
        return
    grouped = has_experts(scenario)
    beside = grouped and scenario.state.moe_shared_expert_overlap and scenario.architecture.moe_shared_expert_gate
    has_linears = scenario.state.transformer_impl == "transformer_engine"
    overlapped = uses_user_buffers(scenario)
    # Of Megatron's own layers a published peak is exact to 0.001 % with all workspaces there from the beginning.
    is_order_known = has_linears and not overlapped and scenario.state.cuda_graph_impl == "none"
    hold_fake_workspaces(
        cublas=multiplies_with_torch(scenario),
        linears=has_linears,
        grouped=grouped,
        gates_beside=beside,
        overlapped=overlapped,
        before=() if is_order_known else LIBRARIES,
    )


def _fill_workspaces_as_before_0_4(scenario: Scenario) -> None:
    is_megatron = scenario.engine == "megatron"
    grouped = is_megatron and has_experts(scenario)
    hold_fake_workspaces(linears=is_megatron, grouped=grouped, before=LIBRARIES[:1])
    torch.cuda.empty_cache()


@contextmanager
def on_fake_tensors() -> Iterator[None]:
    """Runs Megatron on this thread with fake tensors in place of a CUDA device's, for the block."""
    with (
        cuda_replaced(FakeCuda),
        fake_collectives.collectives_on_fake_tensors(),
        patched(_replacements()),
    ):
        yield


_norm_backward = with_workspace(torch_functions.norm_backward)
_attention_backward = staticmethod(workspace.with_workspace(CausalAttention.backward))


@contextmanager
def sharding_on_fake_gpu() -> Iterator[None]:
    """As `sharding_on_fake_tensors`, with what autograd and torch's kernels of transformers' modules do on a GPU."""
    with sharding_on_fake_tensors(), eager_backward():
        yield


@contextmanager
def on_fake_gpu() -> Iterator[None]:
    """As `on_fake_tensors`, with the copies that NCCL makes, and what kernels of activations and of norms allocate."""
    allocating = {
        "torch.distributed.all_gather": fake_collectives.gather,
        "torch.distributed.reduce_scatter": fake_collectives.reduce_and_scatter,
        "megatron.core.fusions.fused_bias_gelu.GeLUFunction.backward": summing_for_bias(GeLUFunction.backward),
        "megatron.core.fusions.fused_bias_swiglu.BiasSwiGLUFunction.backward": summing_for_bias(
            BiasSwiGLUFunction.backward
        ),
    }
    kernels = [
        (torch_functions, "norm_backward", _norm_backward),
        (CausalAttention, "backward", _attention_backward),
    ]
    with on_fake_tensors(), patched(allocating), swapped(kernels):
        yield


@cache
def _replacements() -> dict[str, Any]:
    return {
        "torch.cuda.current_device": lambda: FAKE,
        "torch.distributed.all_gather_object": _gather_own,
        "torch.distributed.batch_isend_irecv": fake_collectives.exchange,
        "megatron.core.optimizer.Adam": FusedAdam,
        "megatron.core.optimizer.CPUAdam": FakeHostAdam,
        "megatron.core.optimizer.clip_grads.l2_norm_impl": _norm,
        **chosen_routing(),
        **exchange_by_deep_ep(),
        **_fp8_replacements(),
    }


def _fp8_replacements() -> dict[str, Any]:
    """Returns what Megatron takes from Transformer Engine for FP8 only."""
    engine, utilities = "megatron.core.extensions.transformer_engine", "megatron.core.fp8_utils"
    experts, block = "megatron.core.transformer.moe.experts", "megatron.core.transformer.transformer_block"
    recompute, transformer = "megatron.core.recompute", "megatron.core.transformer"
    return {
        f"{transformer}.transformer_config.is_te_min_version": is_te_min_version,
        f"{transformer}.multi_latent_attention.is_te_min_version": is_te_min_version,
        # It would ask for TE's own class of linears; `apply_settings` does what follows from it.
        f"{transformer}.moe.shared_experts.is_te_min_version": lambda *_, **__: False,
        f"{transformer}.multi_token_prediction.get_fp8_context": lambda *_, **__: nullcontext(),
        f"{experts}.HAVE_TE": True,
        f"{experts}.Fp8Padding": fake_fp8.Fp8Padding,
        f"{experts}.Fp8Unpadding": fake_fp8.Fp8Unpadding,
        f"{utilities}.HAVE_TE_FP8_TENSOR_CLASS": True,
        f"{utilities}.FP8_TENSOR_CLASS": fp8_parameters.Fp8Parameter,
        "megatron.core.distributed.param_and_grad_buffer.is_mxfp8tensor": fp8_parameters.is_mx,
        f"{utilities}._modify_underlying_storage_impl": fp8_parameters.move_rows,
        f"{utilities}._quantize_param_shard_impl": fp8_parameters.quantize_main_parameters,
        # An installed Transformer Engine would ask the GPU for its recipes, and fail on a machine without one.
        f"{block}.get_fp8_context": lambda *_, **__: nullcontext(),
        f"{recompute}.get_fp8_context": lambda *_, **__: nullcontext(),
        f"{block}.te_checkpoint": _checkpoint_around_layers,
        f"{recompute}.te_checkpoint": _checkpoint_around_layers,
        f"{engine}.te_checkpoint": _checkpoint_of_module,
        "megatron.core.transformer.moe.moe_layer.te_checkpoint": _checkpoint_inside_layers,
    }


def _checkpoint_around_layers(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``te_checkpoint`` in ``transformer_block.py`` and, since megatron-core 0.18, in ``recompute.py``."""
    place: fake_fp8.Place = "inside layers" if imitated().sees_fp8_within_checkpoints else "around layers"
    return fake_fp8.checkpointed(_as_seen(place, args), *args, **kwargs)


def _checkpoint_inside_layers(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``te_checkpoint`` in ``moe_layer.py``."""
    return fake_fp8.checkpointed(_as_seen("inside layers", args), *args, **kwargs)


def _checkpoint_of_module(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``te_checkpoint`` in layers, and in those of multi-token prediction, which turn FP8 on within it."""
    is_extra = getattr(function, "__qualname__", "").startswith("MultiTokenPredictionLayer.")
    return (_checkpoint_around_layers if is_extra else _checkpoint_inside_layers)(function, *args, **kwargs)


def _as_seen(place: fake_fp8.Place, arguments: tuple[Any, ...]) -> fake_fp8.Place | None:
    """Returns where linears see a checkpoint in its first pass; None if they see none.

    megatron-core 0.16.1 gives layers of multi-token prediction all tensors by name (``multi_token_prediction.py``), and
    TE looks at positional ones: such a checkpoint is not recomputed, and its layer gets no gradients.
    """
    is_trained = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in arguments)
    return place if is_trained or imitated().prepares_every_checkpoint else None


def _gather_own(gathered: list[Any], own: Any, group: Any = None) -> None:
    """Answers for the other ranks: Megatron gathers only which kinds of parameters exist (``optimizer``)."""
    gathered[:] = [own] * len(gathered)


def _norm(chunk_size: int, overflow: torch.Tensor, tensors: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Replaces ``multi_tensor_l2norm``, one kernel over all gradients."""
    return torch.empty(1, dtype=torch.float32, device=FAKE), None
